# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs one item of the plan in its own process group; kills an item that exceeds its bound."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from .plan import Item
from .record import ROOT

#: Seconds that the runner waits until SIGKILL has ended an item's processes. A process does not end
#: while it hangs in a driver call. The runner reports such a process.
GONE = 20.0

#: The code of the child process: it runs a benchmark and writes the returned dict to a file.
BENCHMARK = """
import importlib, json, sys
name, out, *argv = sys.argv[1:]
result = importlib.import_module("benchmarks.gpu." + name).main(argv)
with open(out, "w") as file:
    json.dump(result, file)
"""

_SET_CHILD_SUBREAPER = 36

#: For each exit code of an item, its outcome. Any other exit code is a failure. The code is None if
#: the item did not end in time. pytest returns 5 if it has run no test.
_OUTCOMES = {None: "hung", 0: "passed", 5: "left out"}


def adopt_orphans() -> None:
    """Adopt the orphan processes of items (as a subreaper), so that the runner can kill them."""
    ctypes.CDLL(None, use_errno=True).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def keep_driver_up() -> None:
    """Call cuInit in this process; the call makes no context and takes no device memory.

    Without persistence mode, the driver stops when its last process has ended, and starts again for
    the next process. A start takes seconds. This process keeps the driver running, so the driver
    starts only once for all items.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1").cuInit(0)


def run(item: Item, *, quick: bool = False, real: bool = True) -> dict[str, Any]:
    """Run an item; return its line for the record. A failure of the item raises no error.

    In the line, ``outcome`` is "passed", "failed", "hung" or "left out". ``tests`` has the outcome
    of each test, or ``result`` has the benchmark's dict. If the item did not pass, ``output`` has
    the end of the item's output. ``left`` names the processes that SIGKILL did not end. If
    ``real`` is False, the item leaves out the tests that need a real GPU.
    """
    begun = time.monotonic()
    before = psutil.Process().children()
    with TemporaryDirectory(prefix="gpb") as folder:
        report, log = Path(folder) / "report", Path(folder) / "log"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "GPUPOOL_GPU_REPORT": str(report),
            **({"GPUPOOL_GPU_SECONDS": str(item.enough)} if item.enough else {}),
        }
        with log.open("wb") as out:
            process = subprocess.Popen(
                _command(item, report, quick=quick, real=real), cwd=ROOT, env=environment,
                stdout=out, stderr=out, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = process.wait(item.bound)
            except subprocess.TimeoutExpired:
                code = None
        left = end_descendants(before)
        line: dict[str, Any] = {
            "item": item.name,
            "outcome": _OUTCOMES.get(code, "failed"),
            "seconds": round(time.monotonic() - begun, 1),
            "exit_code": code,
        }
        found = _found(item, report)
        problems = found["problems"] if isinstance(found, dict) and "problems" in found else ()
        if line["outcome"] == "passed" and (found is None or problems):
            line["outcome"] = "failed"  # the item reported nothing, or reported a problem
        if found is not None:
            line["tests" if item.tests else "result"] = found
        if line["outcome"] != "passed":
            line["output"] = log.read_text(errors="replace")[-40000:]
        if left:
            line["left"] = left
        return line


def _command(item: Item, report: Path, *, quick: bool, real: bool) -> list[str]:
    if item.tests:
        # Each test has a time-out of two thirds of the item's bound. So pytest ends a hung test
        # before the runner kills the item. The time-out is long, because the first test also starts
        # the kernels that all tests of the file use. "-W default" keeps warnings of this machine's
        # packages from being failures.
        bound = item.bound * 2 // 3
        options = ["-q", "-p", "no:cacheprovider", f"--timeout={bound}", "-W", "default"]
        which = ["-m", "" if real else "not gpu"]
        return [sys.executable, "-m", "pytest", *options, *which, item.name]
    argv = ["--quick"] if quick else []
    argv += ["--seconds", str(item.enough)] if item.enough else []
    return [sys.executable, "-c", BENCHMARK, item.name, str(report), *argv]


def _found(item: Item, report: Path) -> Any:
    """Return the contents of the item's output file; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        text = report.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if item.tests else json.loads(text)
    return None


def end_descendants(before: Sequence[psutil.Process]) -> list[str]:
    """Kill all processes that an item has left; describe the processes that did not end.

    ``before`` has the children that this process had before the item. They do not belong to the
    item, so this function kills neither them nor their children.
    """

    def left() -> Iterator[psutil.Process]:
        for child in psutil.Process().children():
            if child not in before:
                with contextlib.suppress(psutil.Error):
                    yield from child.children(recursive=True)
                yield child

    deadline = time.monotonic() + GONE
    while found := [process for process in left() if _alive(process)]:
        if time.monotonic() > deadline:
            return [_named(process) for process in found]
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=0.5)
    return []


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _named(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return str(process.pid)
