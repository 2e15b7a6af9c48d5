# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume: the whole operation against the driver's own part of it.

A CUDA process writes every byte of its device memory and is suspended and resumed in turn through
``DeviceService``, as the broker does it: processes found, NVML asked, room checked, memory
verified to be free. The baseline, in the same run, is the sum of the driver calls as the worker
measures them. On the emulated driver unless this machine has a real one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import budget, percentile, summary
from jupyter_gpupool.devices import processes
from jupyter_gpupool.devices.model import ProcessId
from jupyter_gpupool.devices.service import DeviceService

MiB = 1 << 20

#: Milliseconds that suspend or resume may take beyond the driver.
BUDGET_P50_MS, BUDGET_P99_MS = 20.0, 100.0

#: Takes and writes so many bytes, says so, and waits for its stdin to end.
TARGET = """
import sys
from cuda.bindings import driver
def call(function, *arguments):
    result, *values = function(*arguments)
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return values[0] if values else None
size = int(sys.argv[1])
call(driver.cuInit, 0)
call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, call(driver.cuDeviceGet, 0)))
call(driver.cuMemsetD8, call(driver.cuMemAlloc, size), 165, size)
call(driver.cuCtxSynchronize)
print(flush=True)
sys.stdin.read()
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return medians, ratios and the difference in milliseconds by size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller sizes")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (5 if options.quick else 20)
    sizes = [64, 256] if options.quick else [64, 128, 256, 512, 1024]
    with ExitStack() as stack:
        env = environment(stack)
        return asyncio.run(measure(env, [size * MiB for size in sizes], rounds))


def environment(stack: ExitStack) -> dict[str, str]:
    """Return the environment that leads to the driver to measure."""
    import emucuda.build
    from jupyter_gpupool.emulation import real_driver_present

    if real_driver_present():
        return dict(os.environ)
    emucuda.build.compile()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpb"))
    machine = emucuda.environment("2x4GiB", Path(folder) / "machine")
    return {**os.environ, **machine}


async def measure(env: dict[str, str], sizes: Sequence[int], rounds: int) -> dict[str, Any]:
    """Measure each size in turn."""
    service = DeviceService(env=env)
    try:
        begin = time.perf_counter()
        devices = await service.start()
        started = time.perf_counter() - begin
        device = next((device for device in devices if device.can_suspend), None)
        if device is None:
            reasons = [d.tier_reason for d in devices] or [service.problem]
            raise RuntimeError(f"No device can suspend. {reasons[0]}")
        rows = []
        for size in sizes:
            target = subprocess.Popen(
                [sys.executable, "-c", TARGET, str(size)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**env, "CUDA_VISIBLE_DEVICES": device.uuid},
            )
            with target:
                assert target.stdin is not None
                assert target.stdout is not None
                if target.stdout.readline() != b"\n":
                    raise RuntimeError("The CUDA process did not come up.")
                root = processes.identify(target.pid)
                assert root is not None
                rows.append({"bytes": size, **await swap(service, root, device.uuid, rounds)})
                target.kill()
    finally:
        await service.close()
    worst = max(row[op]["beyond_ms"]["p50"] for row in rows for op in ("suspend", "resume"))
    late = max(row[op]["beyond_ms"]["p99"] for row in rows for op in ("suspend", "resume"))
    return {
        "what": "seconds of suspend and resume, whole and in the driver",
        "driver": service.driver_version,
        "emulated": device.emulated,
        "devices": len(devices),
        "start_seconds": started,
        "rounds": rounds,
        "sizes": rows,
        "budgets": [
            budget("suspend and resume beyond the driver, p50", worst, BUDGET_P50_MS, "ms"),
            budget("suspend and resume beyond the driver, p99", late, BUDGET_P99_MS, "ms"),
        ],
    }


async def swap(service: DeviceService, root: ProcessId, uuid: str, rounds: int) -> dict[str, Any]:
    """Suspend and resume ``rounds`` times, after once that does not count."""
    whole: dict[str, list[float]] = {"suspend": [], "resume": []}
    driver: dict[str, list[float]] = {"suspend": [], "resume": []}
    for turn in range(rounds + 1):
        begin = time.perf_counter()
        suspended = await service.suspend(root, [uuid], session="benchmark")
        middle = time.perf_counter()
        if suspended.status != "suspended" or suspended.message:
            raise RuntimeError(f"{suspended.status}: {suspended.message}")
        between = time.perf_counter()
        resumed = await service.resume(
            root, [uuid], [uuid], session="benchmark", need=suspended.freed
        )
        end = time.perf_counter()
        if resumed.status != "resumed":
            raise RuntimeError(f"{resumed.status}: {resumed.message}")
        if turn:
            whole["suspend"].append(middle - begin)
            whole["resume"].append(end - between)
            driver["suspend"].append(suspended.driver_seconds)
            driver["resume"].append(resumed.driver_seconds)
    return {op: compare(whole[op], driver[op]) for op in ("suspend", "resume")}


def compare(whole: Sequence[float], driver: Sequence[float]) -> dict[str, Any]:
    """Return the medians, their ratio, and what the whole takes beyond the driver."""
    beyond = [1000 * (a - b) for a, b in zip(whole, driver, strict=True)]
    return {
        "seconds_p50": median(whole),
        "driver_seconds_p50": median(driver),
        "ratio_p50": percentile([a / b for a, b in zip(whole, driver, strict=True)], 50),
        "beyond_ms": summary(beyond),
    }


if __name__ == "__main__":
    import json

    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
