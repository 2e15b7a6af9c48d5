# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume of a kernel, end to end, against the time of the driver alone.

A Pooled GPU kernel with policy ``lazy`` writes every byte of its device memory. Then it repeatedly
gives its slice back and takes it again, as a notebook does. The benchmark reports three times:

- *suspend*: from the broker's decision (row ``detaching`` of the journal) to the end of the suspend
  (row ``detached``). In this time, the broker closes the page's gate, waits for calls in flight,
  finds the processes, lets the driver checkpoint them, waits until NVML shows the memory free, and
  writes the journal.
- *asked*: from the request to give the slice back to the broker's decision. The benchmark sends the
  request as soon as the cell has ended.
- *resume*: how much longer the first CUDA call after the suspend takes than the same call with an
  attached slice. The call reads one byte of device memory, and the kernel measures its time. The
  difference contains the request, the plan, the driver's restore, the journal, the page and the
  gate.

The baseline, in the same run, is the time of the driver calls. The device worker measures it, and
the journal stores it. The benchmark uses a real driver if the machine has one, and otherwise the
emulated driver.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.kernels import Kernel, private_pool
from jupyter_gpupool.client import Client

MiB = 1 << 20

#: A suspend or a resume may take at most this many milliseconds longer than the driver's own calls.
BUDGET_P50_MS, BUDGET_P99_MS = 20.0, 100.0

#: Allocates and writes ``size`` bytes.
SETUP = """
import time
from cuda.bindings import driver
def call(answer):
    assert answer[0] == 0, answer
    return answer[1] if len(answer) > 1 else None
call(driver.cuInit(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))))
memory = call(driver.cuMemAlloc({size}))
call(driver.cuMemsetD8(memory, 165, {size}))
call(driver.cuCtxSynchronize())
last = int(memory) + {size} - 1
def touch():
    byte = bytearray(1)
    began = time.perf_counter()
    call(driver.cuMemcpyDtoH(byte, last, 1))
    took = time.perf_counter() - began
    assert byte == bytes([165]), byte
    return took * 1000
touch()
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return by size the whole time, the driver's time, and their difference, in ms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (5 if options.quick else 100)
    sizes = [64, 256] if options.quick else [64, 256, 1024]
    with ExitStack() as stack:
        slice_ = (max(sizes) + 512) * MiB  # also has room for a CUDA context
        devices = stack.enter_context(private_pool(default_memory=slice_, default_limit=slice_))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        rows = [swap(client, size * MiB, rounds) for size in sizes]
    budgets = []
    for operation in ("suspend", "resume"):
        beyond = [row[operation]["beyond_ms"] for row in rows]
        for part, allowed in (("p50", BUDGET_P50_MS), ("p99", BUDGET_P99_MS)):
            worst = max(one[part] for one in beyond)
            name = f"{operation} beyond the driver, the worst size, {part}"
            budgets.append(budget(name, worst, allowed, "ms"))
    return {
        "what": "milliseconds of suspend and resume, end to end and in the driver",
        "device_names": devices,
        "rounds": rounds,
        "sizes": rows,
        "budgets": budgets,
    }


def swap(client: Client, size: int, rounds: int) -> dict[str, Any]:
    """Suspend and resume a kernel of ``size`` bytes repeatedly; the first round does not count."""
    whole: dict[str, list[float]] = {"suspend": [], "resume": []}
    driver: dict[str, list[float]] = {"suspend": [], "resume": []}
    waited: list[float] = []
    with Kernel("gpupool-python3", attach="lazy") as kernel:
        kernel.run(SETUP.format(size=size))
        session = kernel.session()
        for turn in range(rounds + 1):
            before = int(client.call("journal", limit=0)["seq"])
            asked = time.time()
            client.call("release", session=session)
            wait_detached(client, session)
            first, second = kernel.run("print(touch(), touch())").split()
            rows = client.journal(after=before)
            mine = [row for row in rows if row["session"] == session]
            at = {row["detail"]["new"]: row["time"] for row in mine if row["kind"] == "state"}
            suspend = next(row for row in mine if row["kind"] == "suspend")
            resume = next(row for row in mine if row["kind"] == "resume")
            if turn:
                waited.append(1000 * (at["detaching"] - asked))
                whole["suspend"].append(1000 * (at["detached"] - at["detaching"]))
                driver["suspend"].append(1000 * suspend["seconds"])
                whole["resume"].append(float(first) - float(second))
                driver["resume"].append(1000 * resume["detail"]["driver_seconds"])
    return {
        "bytes": size,
        "asked_ms": summary(waited),
        **{name: compare(whole[name], driver[name]) for name in ("suspend", "resume")},
    }


def wait_detached(client: Client, session: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        found = next(s for s in client.call("status")["sessions"] if s["id"] == session)
        if found["state"] == "detached":
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"not detached: {found}")
        time.sleep(0.005)


def compare(whole: Sequence[float], driver: Sequence[float]) -> dict[str, Any]:
    """Return the whole times, the times of the driver calls, and their ratio and difference."""
    return {
        "whole_ms": summary(whole),
        "driver_ms": summary(driver),
        "ratio_p50": percentile([a / b for a, b in zip(whole, driver, strict=True)], 50),
        "beyond_ms": summary([a - b for a, b in zip(whole, driver, strict=True)]),
    }
