# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The time that the guard adds to an allocation and to a free.

A C program in a session allocates and frees memory. It alternates between calls through the guard
and direct calls of the driver that the guard has opened. One process makes both kinds of calls, so
the driver uses the same tables for both. The program runs twice: alone in its session, and beside
seven other processes of the session. In the second case, the guard sums the accounts of all these
processes at each allocation. An allocation by the emulated driver takes some 100 ns. An allocation
by a real driver takes longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import budget, percentile

MiB = 1 << 20
SOURCE = Path(__file__).with_suffix(".c")

#: The most nanoseconds that the guard may add to an allocation, and to a free.
BUDGETS_NS = {"alloc": 80.0, "free": 100.0}

#: The most nanoseconds that the guard may take to refuse a size that the broker has just refused.
REFUSED_NS = 5000.0

#: Another process of the session: it makes a context, allocates a little, and waits.
NEIGHBOUR = """
import ctypes, sys
L = ctypes.CDLL("libcuda.so.1")
c, p = ctypes.c_void_p(), ctypes.c_uint64()
assert not L.cuInit(0) and not L.cuDevicePrimaryCtxRetain(ctypes.byref(c), 0)
assert not L.cuCtxSetCurrent(c) and not L.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(4096))
print(flush=True)
sys.stdin.read()
"""

#: Prints the UUID of the device.
UUID = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return nanoseconds by call, through the guard and without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (200 if options.quick else 3000)
    results, refusals = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpb")))
        env, driver = session(folder)
        program = folder / "program"
        command = ["cc", "-O2", "-o", str(program), str(SOURCE), "-ldl"]
        subprocess.run(command, check=True)
        for others in (0, 7):
            for _ in range(others):
                neighbour(stack, env)
            done = subprocess.run(
                [program, driver, str(rounds)], env=env, check=True, capture_output=True, text=True
            )
            results += summarise(done.stdout, others + 1)
            refusals.append(refusal(done.stdout, others + 1))
    budgets = []
    for what, key in (("allocation", "alloc"), ("free", "free")):
        for row in results:
            name = f"guard, {what}, {row['call']}, {row['processes']} process(es)"
            budgets.append(budget(name, row[f"{key}_added_ns"], BUDGETS_NS[key], "ns"))
    # With other processes in the session, a refusal has no budget: the guard then also checks
    # whether each of these processes still lives.
    budgets.append(
        budget("guard, a refused allocation, 1 process", refusals[0]["guard_ns"], REFUSED_NS, "ns")
    )
    return {
        "emulated": True, "rounds": rounds, "results": results, "refusals": refusals,
        "budgets": budgets,
    }  # fmt: skip


def session(folder: Path) -> tuple[dict[str, str], str]:
    """Return the environment of a session on an emulated machine, and the driver's path."""
    import emucuda.build
    from jupyter_gpupool.guard import build as guard_build
    from jupyter_gpupool.guard import page as pages

    emucuda.build.compile()
    guard_build.compile()
    machine = emucuda.environment("1x8GiB,context=32MiB", folder / "machine", base={})
    env = {**os.environ, **machine}
    done = subprocess.run(
        [sys.executable, "-c", UUID], env=env, check=True, capture_output=True, text=True
    )
    page = pages.Page.create(folder / "page", "benchmark", os.getuid())
    page.set_devices([done.stdout.strip()])
    page.set_grant([4 << 30], 4 << 30, 1)
    page.set_policy(managed=False, context_bytes=32 * MiB)
    # Write to the page that the broker has just refused a request for more memory. A real broker
    # would clear this entry at the next change. No broker runs here, so the entry stays.
    page.set_vain([(4 << 30) + 1], time.monotonic_ns() + 3600 * 10**9)
    page.set_gate(pages.OPEN)
    page.close()
    env |= {
        "LD_PRELOAD": str(guard_build.DEFAULT_OUT / "libcuda.so.1"),
        "GPUPOOL_PAGE": str(folder / "page"),
    }
    return env, str(emucuda.library_dir() / "libcuda.so.1")


def neighbour(stack: ExitStack, env: dict[str, str]) -> None:
    """Start another process of the session. ``stack`` ends the process when it closes."""
    child = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    stack.callback(child.communicate)  # the program ends when its input ends
    assert child.stdout is not None
    assert child.stdout.readline() == b"\n", "a neighbour has not started"


def refusal(text: str, processes: int) -> dict[str, Any]:
    """Return the time of a refused allocation, from the program's lines."""
    rows = [line.split()[1:] for line in text.splitlines() if line.startswith("refused ")]
    guard, bare = (median(float(row[i]) for row in rows) for i in (0, 1))
    return {"processes": processes, "guard_ns": guard, "bare_ns": bare}


def summarise(text: str, processes: int) -> list[dict[str, Any]]:
    """Return one row for each call, from the program's lines."""
    rounds: dict[str, list[list[float]]] = defaultdict(list)
    for line in text.splitlines():
        name, *numbers = line.split()
        if name == "refused":
            continue
        rounds[name].append([float(number) for number in numbers])
    rows = []
    for name, values in rounds.items():
        row: dict[str, Any] = {"call": name, "processes": processes}
        for what, guard, bare in (("alloc", 0, 1), ("free", 2, 3)):
            row[f"{what}_guard_ns"] = round(median(v[guard] for v in values), 1)
            row[f"{what}_bare_ns"] = round(median(v[bare] for v in values), 1)
            added = [v[guard] - v[bare] for v in values]
            row[f"{what}_added_ns"] = round(median(added), 1)
            row[f"{what}_added_p90_ns"] = round(percentile(added, 90), 1)
            ratio = row[f"{what}_guard_ns"] / row[f"{what}_bare_ns"]
            row[f"{what}_ratio"] = round(ratio, 3)
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
