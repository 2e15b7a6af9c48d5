# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The copy part of a faster way than the driver's checkpoint: own pages, an arena of pinned memory.

State is virtual memory: an address range of chunks that are created and mapped each. *Out*: each
chunk is copied into pinned host memory, then unmapped and released. *In*: each is created and
mapped at its old address and copied back. Contexts, modules and streams stay on the device, so it
is not a suspend: it is the part whose time grows with the state. Pinning the arena is timed apart,
because an arena can be kept.

=============  =================================================================================
one by one     all copies, then all releases; all maps, then all copies
overlapped     a chunk is released as soon as it is copied, and copied as soon as it is mapped
=============  =================================================================================

Baselines, in the same run: the driver's own suspend and resume of a process with as much state, and
copies of pinned memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from jupyter_gpupool.broker import host
from tests.gpu.machine import GiB, Machine, MiB, machine

from .child import remote
from .raw import Raw, call
from .swap_speed import COPIES, COPY, SCALE, against, scaled, service_of, summarise, swap

#: Bytes of state, and repetitions of the driver's own suspend.
SIZES = ((GiB, 2), (8 * GiB, 2), (24 * GiB, 1))

#: At which every number of streams is tried with every size of chunks; at the others, BEST.
FULL = 8 * GiB
STREAMS = (1, 2, 4)
CHUNKS = (2 * MiB, 32 * MiB, 256 * MiB)
BEST = ((1, 32 * MiB), (2, 32 * MiB))

#: Host memory that must be there beyond the arena.
ROOM = 8 * GiB

#: Seconds for one request: pinning 24 GiB takes some.
LONGEST = 40.0


class Prototype(Raw):
    """A process whose state is chunks of virtual memory."""

    def __init__(self) -> None:
        super().__init__()
        self._property = driver.CUmemAllocationProp()
        kind = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.type = kind
        self._property.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = int(self.device)
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._property.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._streams = [call(driver.cuStreamCreate, 1) for _ in range(max(STREAMS))]
        self._arena = self._size = self._at = self._chunk = 0
        self._handles: list[Any] = []

    # ------------------------------------------------------------------ the arena

    def pin(self, size: int) -> float:
        """Have an arena of so many bytes; return the seconds that the driver took for it."""
        begun = time.perf_counter()
        self._arena, self._size = int(call(driver.cuMemHostAlloc, size, 0)), size
        return time.perf_counter() - begun

    def unpin(self) -> float:
        begun = time.perf_counter()
        call(driver.cuMemFreeHost, self._arena)
        self._arena = 0
        return time.perf_counter() - begun

    def register(self, size: int, huge: bool, touched: bool) -> dict[str, float]:
        """Pin ordinary memory instead, and let it go; return the seconds of each part.

        ``huge``: ask the kernel for huge pages first. ``touched``: the pages are there before.
        """
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        took = {}
        if huge:
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel that was built without them
                took["no_huge_pages"] = 1.0
        view = np.frombuffer(memory, np.uint8)
        begun = time.perf_counter()
        if touched:
            view[:: mmap.PAGESIZE] = 1
        took["touch_seconds"] = time.perf_counter() - begun
        begun = time.perf_counter()
        call(driver.cuMemHostRegister, view.ctypes.data, size, 0)
        took["register_seconds"] = time.perf_counter() - begun
        begun = time.perf_counter()
        call(driver.cuMemHostUnregister, view.ctypes.data)
        took["unregister_seconds"] = time.perf_counter() - begun
        del view
        memory.close()
        return took

    # ------------------------------------------------------------------ the state

    def make(self, size: int, chunk: int, first: int) -> None:
        """Have ``size`` bytes of state in chunks, which count up from ``first``."""
        self._chunk = chunk
        self._at = int(call(driver.cuMemAddressReserve, size, 0, 0, 0))
        self._size = size
        for offset in range(0, size, chunk):
            self._map(offset, min(chunk, size - offset))
        self.fill(self._at, size, first)

    def _map(self, offset: int, size: int) -> None:
        handle = call(driver.cuMemCreate, size, self._property, 0)
        call(driver.cuMemMap, self._at + offset, size, 0, handle, 0)
        call(driver.cuMemSetAccess, self._at + offset, size, [self._access], 1)
        self._handles.append(handle)

    def _unmap(self, offset: int, size: int, handle: Any) -> None:
        call(driver.cuMemUnmap, self._at + offset, size)
        call(driver.cuMemRelease, handle)

    def unmake(self) -> None:
        """Give the state back."""
        self._release_all()
        call(driver.cuMemAddressFree, self._at, self._size)

    def _parts(self) -> list[tuple[int, int]]:
        return [
            (offset, min(self._chunk, self._size - offset))
            for offset in range(0, self._size, self._chunk)
        ]

    def _release_all(self) -> None:
        for (offset, size), handle in zip(self._parts(), self._handles, strict=True):
            self._unmap(offset, size, handle)
        self._handles.clear()

    def device_bytes(self) -> int:
        """Return the bytes in use on the device."""
        free, total = call(driver.cuMemGetInfo)
        return int(total) - int(free)

    def swap(self, streams: int, overlapped: bool, first: int) -> dict[str, Any]:
        """Move the state out and in again; return the seconds, and whether it is right then."""
        self.sync()
        held = self.device_bytes()
        begun = time.perf_counter()
        found = (self._out_overlapped if overlapped else self._out)(streams)
        found["out_seconds"] = time.perf_counter() - begun
        found["freed_bytes"] = held - self.device_bytes()
        begun = time.perf_counter()
        found |= (self._in_overlapped if overlapped else self._in)(streams)
        found["in_seconds"] = time.perf_counter() - begun
        found["right"] = self.right(self._at, self._size, first)
        # Other bytes for the next time: what was left in the arena must not pass for them.
        self.increase(self._at, self._size, 1)
        self.sync()
        return found

    def _out(self, streams: int) -> dict[str, Any]:
        begun = time.perf_counter()
        for number, (offset, size) in enumerate(self._parts()):
            stream = self._streams[number % streams]
            call(driver.cuMemcpyDtoHAsync, self._arena + offset, self._at + offset, size, stream)
        self._wait(streams)
        between = time.perf_counter()
        self._release_all()
        after = time.perf_counter()
        return {"copy_out_seconds": between - begun, "release_seconds": after - between}

    def _out_overlapped(self, streams: int) -> dict[str, Any]:
        events = []
        for number, (offset, size) in enumerate(self._parts()):
            stream = self._streams[number % streams]
            call(driver.cuMemcpyDtoHAsync, self._arena + offset, self._at + offset, size, stream)
            events.append(call(driver.cuEventCreate, 2))  # without timing
            call(driver.cuEventRecord, events[-1], stream)
        for (offset, size), handle, event in zip(self._parts(), self._handles, events, strict=True):
            call(driver.cuEventSynchronize, event)
            call(driver.cuEventDestroy, event)
            self._unmap(offset, size, handle)
        self._handles.clear()
        return {}

    def _in(self, streams: int) -> dict[str, Any]:
        begun = time.perf_counter()
        for offset, size in self._parts():
            self._map(offset, size)
        between = time.perf_counter()
        for number, (offset, size) in enumerate(self._parts()):
            stream = self._streams[number % streams]
            call(driver.cuMemcpyHtoDAsync, self._at + offset, self._arena + offset, size, stream)
        self._wait(streams)
        after = time.perf_counter()
        return {"map_seconds": between - begun, "copy_in_seconds": after - between}

    def _in_overlapped(self, streams: int) -> dict[str, Any]:
        for number, (offset, size) in enumerate(self._parts()):
            self._map(offset, size)
            stream = self._streams[number % streams]
            call(driver.cuMemcpyHtoDAsync, self._at + offset, self._arena + offset, size, stream)
        self._wait(streams)
        return {}

    def _wait(self, streams: int) -> None:
        for stream in self._streams[:streams]:
            call(driver.cuStreamSynchronize, stream)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return seconds and GB/s of each way, and of the driver's own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest size alone")
    parser.add_argument("--seconds", type=float, default=135.0, help="begin nothing later")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    with machine() as here:
        return asyncio.run(measure(here, SIZES[:2] if options.quick else SIZES, end))


async def measure(here: Machine, sizes: Sequence[tuple[int, int]], end: float) -> dict[str, Any]:
    """Measure each size in turn."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    problems: list[str] = []
    async with service_of(here) as (service, device):
        env = {**here.env, "CUDA_VISIBLE_DEVICES": device.uuid}
        async with remote("benchmarks.gpu.raw:Raw", env) as process:
            copies = await process.do("copies", scaled(here, COPY), COPIES)
        for nominal, repetitions in sizes:
            size = scaled(here, nominal)
            need = size * 1.3 + (ROOM if here.real else GiB)
            if host.available() < need:
                left_out.append({"bytes": size, "reason": "too little host memory"})
                continue
            # Pinning and copying as before, in proportion, and the driver's own way.
            probably = rows[-1]["seconds"] * size / rows[-1]["bytes"] if rows else 0.0
            if nominal > FULL:
                probably /= 3  # fewer ways
            if time.monotonic() + probably > end:
                left_out.append({"bytes": size, "reason": f"no time for {probably:.0f} s"})
                continue
            begun = time.monotonic()
            row: dict[str, Any] = {"bytes": size, "ways": []}
            try:
                async with remote("benchmarks.gpu.raw:Raw", env) as process:
                    await process.do("put", "state", size, 7)
                    rounds = [
                        await swap(service, device.uuid, process, LONGEST)
                        for _ in range(repetitions)
                    ]
                    if not await process.do("check", "state", 7):
                        raise RuntimeError("the driver's own suspend LOST DATA")
                own = summarise(size, rounds)
                row["driver"] = own | against(own, copies)
                await ways(here, env, size, nominal == FULL, row, end)
            except Exception as error:
                # What was measured so far must not be lost with it.
                problems.append(f"{size / GiB:g} GiB: {type(error).__name__}: {error}")
                print(problems[-1], flush=True)
                if isinstance(error, asyncio.TimeoutError):
                    end = 0.0
            row["seconds"] = time.monotonic() - begun
            rows.append(row)
    if not any(row["ways"] for row in rows):
        raise RuntimeError(f"No way could be measured: {problems or left_out}")
    return {
        "what": "seconds and GB/s of moving chunks of virtual memory to pinned host memory and "
        "back, against the driver's suspend and resume, and against copies",
        "emulated": device.emulated,
        "device_names": [device.name],
        "scale": 1 if here.real else SCALE,
        "baseline_copies": copies,
        "sizes": rows,
        "left_out": left_out,
        "problems": problems,
        "budgets": [],
    }


async def ways(
    here: Machine, env: dict[str, str], size: int, full: bool, row: dict[str, Any], end: float
) -> None:
    """Move ``size`` bytes in every way; fill ``row`` as they end."""
    every = [(s, c) for s in STREAMS for c in CHUNKS] if full else list(BEST)
    async with remote("benchmarks.gpu.swap_prototype:Prototype", env) as process:
        if full:
            row["registering"] = [
                {
                    "huge_pages": huge,
                    "touched": touched,
                    **await process.do("register", size, huge, touched, timeout=LONGEST),
                }
                for huge, touched in ((False, False), (True, False), (True, True))
            ]
        row["pin_seconds"] = await process.do("pin", size, timeout=LONGEST)
        row["pin_GB_per_s"] = size / row["pin_seconds"] / 1e9
        for chunk in sorted({chunk for _, chunk in every}):
            small = max(2 * MiB, scaled(here, chunk))
            await process.do("make", size, small, 7, timeout=LONGEST)
            first = 7
            for streams in [s for s, c in every if c == chunk]:
                for overlapped in (False, True):
                    if time.monotonic() > end:
                        row["cut_short"] = True
                        return
                    # The first time pages of the arena are written to does not count.
                    rounds = []
                    for _ in range(2):
                        rounds.append(
                            await process.do("swap", streams, overlapped, first, timeout=LONGEST)
                        )
                        first += 1
                    if not all(r["right"] for r in rounds):
                        raise RuntimeError("the state is not what it was: DATA WAS LOST")
                    row["ways"].append(
                        judged(row, rounds[-1], streams, small, overlapped=overlapped)
                    )
            await process.do("unmake", timeout=LONGEST)
        row["unpin_seconds"] = await process.do("unpin", timeout=LONGEST)


def judged(
    row: dict[str, Any], found: dict[str, Any], streams: int, chunk: int, *, overlapped: bool
) -> dict[str, Any]:
    """Return one way of moving, in GB/s and against the driver's own."""
    size, own = row["bytes"], row["driver"]
    way = {
        "streams": streams,
        "chunk_bytes": chunk,
        "overlapped": overlapped,
        **found,
        "out_GB_per_s": size / found["out_seconds"] / 1e9,
        "in_GB_per_s": size / found["in_seconds"] / 1e9,
        # 2: takes half the time.
        "out_speed_against_driver": own["suspend_seconds_p50"] / found["out_seconds"],
        "in_speed_against_driver": own["resume_seconds_p50"] / found["in_seconds"],
    }
    print(
        f"{size / GiB:g} GiB, {streams} streams, {chunk >> 20} MiB, "
        f"{'overlapped' if overlapped else 'one by one'}: out {way['out_GB_per_s']:.1f} GB/s "
        f"(x {way['out_speed_against_driver']:.1f}), in {way['in_GB_per_s']:.1f} GB/s "
        f"(x {way['in_speed_against_driver']:.1f})",
        flush=True,
    )
    return way


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
