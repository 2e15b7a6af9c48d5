# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume by size, in seconds and GB/s, against copies of pinned memory.

A process fills device memory. Then ``DeviceService`` suspends and resumes the process several
times, as in the broker. After each resume the process computes on the memory, and at the end it
checks the memory. The first round also counts, because the pool suspends many notebooks only once.
The baseline, in the same run, is synchronous copies of pinned and of pageable memory, in each
direction.

The benchmark begins with the smallest size. It leaves out a size if the time or the memory is
probably too short for it, and lists this size in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from benchmarks.common import budget
from jupyter_gpupool import cgroups, procfs
from jupyter_gpupool.devices.nvidia.calls import SessionCalls
from jupyter_gpupool.devices.nvidia.checkpoint import DriverAnswer
from jupyter_gpupool.devices.nvidia.service import DeviceService
from jupyter_gpupool.pool.model import Device
from jupyter_gpupool.procfs import ProcessId
from tests.gpu.machine import GiB, Machine, MiB, machine

from .child import Remote, remote

#: Bytes of state, and how often each state is suspended and resumed.
PLAN = tuple((int(gib * GiB), 3 if gib <= 8 else 2) for gib in (0.5, 1, 2, 4, 8, 16, 24, 48))
QUICK = ((GiB // 2, 2), (2 * GiB, 2), (8 * GiB, 2))

#: On an emulated device, one byte stands for this many bytes on a real device.
SCALE = 64

#: A suspended state takes slightly more host memory than its size. So the benchmark measures a size
#: only if FACTOR times the size plus ROOM bytes of host memory are free.
FACTOR, ROOM = 1.3, 8 * GiB

#: The bytes of device memory that the context of a process takes.
CONTEXT = GiB

#: Bytes of each copy of the baseline, and the number of copies.
COPY, COPIES = GiB, 5

#: A suspend or a resume may take at most this many milliseconds longer than its driver calls (p50).
#: The benchmark ``suspend_overhead`` has budgets for this difference, too.
BUDGET_MS = 50.0

#: If a suspend or a resume takes longer than this many seconds, the benchmark skips the larger
#: sizes. At 0.6 GB/s, 48 GiB take about this time.
LONGEST = 80.0

CALLS = ("lock", "checkpoint", "restore", "unlock")


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return seconds and GB/s by size, the baseline, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument(
        "--seconds", type=float, default=220.0, help="begin nothing that ends later"
    )
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    with machine() as here:
        return asyncio.run(measure(here, QUICK if options.quick else PLAN, end))


def scaled(here: Machine, size: int) -> int:
    """Return the size on this device that stands for ``size`` on a real device."""
    return size if here.real else max(2 * MiB, size // SCALE)


async def measure(here: Machine, plan: Sequence[tuple[int, int]], end: float) -> dict[str, Any]:
    """Measure the baseline, then each size in turn."""
    async with service_of(here) as (service, device):
        async with remote("benchmarks.gpu.raw:Raw", here.env) as process:
            copies = await process.do("copies", scaled(here, COPY), COPIES)
        print(f"copies: {copies}", flush=True)
        rows: list[dict[str, Any]] = []
        left_out: list[dict[str, Any]] = []
        problems: list[str] = []
        for nominal, repetitions in plan:
            size = scaled(here, nominal)
            reason = await why_not(here, service, device, size, repetitions, rows, end)
            if reason:
                left_out.append({"bytes": size, "reason": reason})
                print(f"{size / GiB:g} GiB: left out: {reason}", flush=True)
                continue
            try:
                row = await one_size(here, service, device, size, repetitions, end)
            except Exception as error:
                # Continue with the other sizes after a failure, but stop after a time-out.
                problems.append(f"{size / GiB:g} GiB: {type(error).__name__}: {error}")
                print(problems[-1], flush=True)
                if isinstance(error, asyncio.TimeoutError):
                    break
                continue
            rows.append({**row, **against(row, copies)})
            print(f"{size / GiB:g} GiB: {told(rows[-1])}", flush=True)
        version = service.driver_version
    if not rows:
        raise RuntimeError(f"No size could be measured: {problems or left_out}")
    beyond = [ms for row in rows for ms in row["beyond_driver_ms"]]
    return {
        "what": "seconds and GB/s of suspend and resume by size, against copies of pinned memory",
        "emulated": device.emulated,
        "device_names": [device.name],
        "driver": version,
        "baseline_copies": copies,
        "sizes": rows,
        "fit": {way: fit(rows, way) for way in ("suspend", "resume")},
        "left_out": left_out,
        "problems": problems,
        "budgets": [
            budget("suspend and resume beyond the driver's calls, p50", median(beyond), BUDGET_MS,
                   "ms"),
        ],
    }  # fmt: skip


@asynccontextmanager
async def service_of(here: Machine) -> AsyncIterator[tuple[DeviceService, Device]]:
    """Yield a started service and its first device that can suspend."""
    service = DeviceService(env=here.env, call_timeout=60.0)
    try:
        devices = await asyncio.wait_for(service.start(), 90)
        device = next((device for device in devices if device.can_suspend), None)
        if device is None:
            reasons = [d.tier_reason for d in devices] or [service.problem]
            raise RuntimeError(f"No device can suspend. {reasons[0]}")
        yield service, device
    finally:
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(service.close(5.0), 15)


async def why_not(
    here: Machine, service: DeviceService, device: Device, size: int, repetitions: int,
    rows: Sequence[Mapping[str, Any]], end: float,
) -> str:  # fmt: skip
    """Return the reason to leave out a size; "" if there is no reason."""
    need = size * FACTOR + (ROOM if here.real else GiB)
    there = cgroups.available()
    if there < need:
        return f"it needs {need / GiB:.1f} GiB of host memory, and {there / GiB:.1f} are available"
    (sample,) = [s for s in await service.sample() if s.uuid == device.uuid]
    if sample.free < size + (CONTEXT if here.real else 128 * MiB):
        return f"{sample.free / GiB:.1f} GiB of device memory are free"
    if rows:
        before = rows[-1]
        each = (before["suspend_seconds_p50"] + before["resume_seconds_p50"]) * size
        probably = 3 + repetitions * 1.2 * each / before["bytes"]
        left = end - time.monotonic()
        if probably > left:
            return f"it would take about {probably:.0f} s, and {left:.0f} are left"
    return ""


async def one_size(
    here: Machine, service: DeviceService, device: Device, size: int, repetitions: int, end: float
) -> dict[str, Any]:
    """Suspend and resume a process with ``size`` bytes of state; return the times."""
    env = {**here.env, "CUDA_VISIBLE_DEVICES": device.uuid}
    async with remote("benchmarks.gpu.raw:Raw", env) as process:
        filled = await process.do("put", "state", size, 7)
        rounds = []
        for _ in range(repetitions):
            longest = max(20.0, min(LONGEST, end + 20 - time.monotonic()))
            rounds.append(await swap(service, device.uuid, process, longest))
            await process.do("add", "state", 1)
        right = await process.do("check", "state", 7 + repetitions)
    if not right:
        raise RuntimeError("the state is not what it was: DATA WAS LOST")
    return summarise(size, rounds) | {
        "fill_seconds": filled,
        "state_right": right,
    }


async def swap(
    service: DeviceService, uuid: str, process: Remote, longest: float = LONGEST
) -> dict[str, Any]:
    """Suspend and resume a process once; return the seconds in total and of each driver call.

    Raises
    ------
    RuntimeError
        If the suspend or the resume fails.
    asyncio.TimeoutError
        If the suspend or the resume takes longer than ``longest`` seconds.
    """
    root = procfs.identify(process.pid)
    if root is None:
        raise RuntimeError("the process has ended")
    taken = dict.fromkeys(CALLS, 0.0)
    with timed_calls(taken):
        begun = time.perf_counter()
        out = await asyncio.wait_for(service.suspend(root, [uuid], session="benchmark"), longest)
        whole_out = time.perf_counter() - begun
        if out.status != "suspended":
            raise RuntimeError(f"suspend: {out.status}: {out.message}")
        rss = resident(root)
        begun = time.perf_counter()
        back = await asyncio.wait_for(
            service.resume(root, [uuid], [uuid], session="benchmark", need=out.freed), longest
        )
        whole_back = time.perf_counter() - begun
    if back.status != "resumed":
        raise RuntimeError(f"resume: {back.status}: {back.message}")
    return {
        "suspend_seconds": whole_out,
        "resume_seconds": whole_back,
        "suspend_driver_seconds": out.driver_seconds,
        "resume_driver_seconds": back.driver_seconds,
        **{f"{name}_seconds": seconds for name, seconds in taken.items()},
        "freed_bytes": sum(out.freed.values()),
        "host_bytes_suspended": rss,
        "host_bytes_resumed": resident(root),
        # A note if NVML still shows memory of the process after the suspend; otherwise "".
        "message": out.message,
    }


def timed_calls(taken: dict[str, float]) -> Any:
    """Return a patch that adds the seconds of each driver call to its kind's sum in ``taken``."""
    original = SessionCalls.call

    async def call(self: SessionCalls, op: str, process: ProcessId, **fields: Any) -> DriverAnswer:
        answer = await original(self, op, process, **fields)
        taken[op] += answer.seconds
        return answer

    return mock.patch.object(SessionCalls, "call", call)


def resident(process: ProcessId) -> int:
    """Return the host memory of a process in bytes, 0 if unknown."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])
    return 0


def summarise(size: int, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians, the GB/s, and the milliseconds that were not spent in driver calls."""
    row: dict[str, Any] = {"bytes": size, "repetitions": len(rounds), "rounds": list(rounds)}
    names = [*(f"{name}_seconds" for name in CALLS)]
    names += [f"{way}{part}_seconds" for way in ("suspend", "resume") for part in ("", "_driver")]
    for name in names:
        row[f"{name}_p50"] = median(r[name] for r in rounds)
    for way in ("suspend", "resume"):
        row[f"{way}_GB_per_s"] = size / row[f"{way}_seconds_p50"] / 1e9
    row["beyond_driver_ms"] = [
        1000 * (r[f"{way}_seconds"] - r[f"{way}_driver_seconds"])
        for r in rounds
        for way in ("suspend", "resume")
    ]
    row["freed_bytes"] = rounds[0]["freed_bytes"]
    return row


def against(row: Mapping[str, Any], copies: Mapping[str, Any]) -> dict[str, float]:
    """Return each speed divided by the speed of the baseline; 1 means as fast as a copy."""
    found = {}
    for way, copy in (("suspend", "to_host"), ("resume", "to_device")):
        for kind in ("pinned", "pageable"):
            best = copies[f"{kind}_{copy}_GB_per_s"]["p50"]
            found[f"{way}_ratio_to_{kind}"] = row[f"{way}_GB_per_s"] / best
    return found


def fit(rows: Sequence[Mapping[str, Any]], way: str) -> dict[str, float] | None:
    """Fit seconds = fixed seconds + size / speed to the rows; return both constants.

    Return None if all rows have the same size.
    """
    sizes = [row["bytes"] / 1e9 for row in rows]
    seconds = [row[f"{way}_seconds_p50"] for row in rows]
    middle = sum(sizes) / len(sizes)
    spread = sum((size - middle) ** 2 for size in sizes)
    if not spread:
        return None
    mean = sum(seconds) / len(seconds)
    products = [(s - middle) * (t - mean) for s, t in zip(sizes, seconds, strict=True)]
    slope = sum(products) / spread
    return {"seconds_at_0": mean - slope * middle, "GB_per_s": 1 / slope if slope > 0 else 0.0}


def told(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text."""
    return ", ".join(
        f"{way} {row[f'{way}_seconds_p50']:.3f} s = {row[f'{way}_GB_per_s']:.2f} GB/s "
        f"({row[f'{way}_ratio_to_pinned']:.0%} of pinned)"
        for way in ("suspend", "resume")
    )


if __name__ == "__main__":
    import json

    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
