# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m benchmarks [NAME ...] [--quick] [--out DIR]``: run benchmarks, check budgets.

Exit code: 1 if a benchmark broke, otherwise 0. A missed budget does not change the exit code.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from .common import RESULTS, machine_facts, table, write_result

HERE = Path(__file__).parent

#: The runner ends a benchmark that runs for more than this many seconds, and reports it as failed.
TIMEOUT = 1800

#: An interrupted benchmark has this many seconds to end the processes that it started.
ENDING = 60

#: The code of the child process: it runs the benchmark and writes the returned dict to a file.
CHILD = """
import importlib, json, sys
name, out, *argv = sys.argv[1:]
result = importlib.import_module("benchmarks." + name).main(argv)
with open(out, "w") as file:
    json.dump(result, file)
"""


def find() -> list[str]:
    """Return the names of this folder's modules that define ``main``; import none of them."""
    names = []
    for path in sorted(HERE.glob("*.py")):
        if path.stem.startswith("_") or path.stem == "common":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(n, ast.FunctionDef) and n.name == "main" for n in tree.body):
            names.append(path.stem)
    return names


def end(child: subprocess.Popen[bytes]) -> None:
    """Interrupt a benchmark that still runs, so that it ends its own brokers and clusters."""
    if child.poll() is None:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(ENDING)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def run(name: str, quick: bool) -> dict[str, Any] | str:
    """Run one benchmark in a child process; return its result, or the reason for its failure."""
    with tempfile.TemporaryDirectory(prefix="gpb") as folder:
        out = Path(folder) / "result.json"
        argv = ["--quick"] if quick else []
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, name, str(out), *argv],
            cwd=HERE.parent,
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            # The child needs its own process group. Without one, the child would get two signals
            # after a Ctrl-C: the terminal's SIGINT, and then the SIGINT of end(). The second signal
            # would interrupt the child's clean-up.
            start_new_session=True,
        )
        try:
            code = child.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            return f"did not end within {TIMEOUT} s"
        finally:
            end(child)
        if code != 0 or not out.exists():
            return f"ended with exit code {code}"
        result = json.loads(out.read_text())
    return result if isinstance(result, dict) else f"returned {type(result).__name__}, not a dict"


def main() -> int:
    """Run the command line; return the exit code."""
    known = find()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, rougher figures")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON files")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(known)}")
    # Make the folder before the benchmarks run. A failure after them would lose their figures.
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"the folder {options.out} cannot be made: {error.strerror}")

    lines, broken = [], []
    for name in options.names or known:
        print(f"== {name}", flush=True)
        facts, begun = machine_facts(), time.monotonic()
        result = run(name, options.quick)
        if isinstance(result, str):
            broken.append(name)
            print(f"{name} {result}", file=sys.stderr)
            continue
        if result.get("emulated"):
            facts["devices"] = ["EMULATED NVIDIA GPU"]
        facts["devices"] = result.pop("device_names", facts["devices"])
        result.setdefault("machine", facts)
        result["quick"] = options.quick
        result["seconds"] = round(time.monotonic() - begun, 1)
        path = write_result(name, result, options.out)
        print(f"   {result['seconds']:g} s, written to {path.name}", flush=True)
        lines += result.get("budgets", [])
    if lines:
        print("\n" + table(lines))
    if broken:
        print(f"\nbroken: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
