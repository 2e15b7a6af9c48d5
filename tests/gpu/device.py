# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The device service on the machine under test, and functions that observe a device."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_gpupool.devices.children import ChildLost
from jupyter_gpupool.devices.model import DeviceSample, ResumeOutcome, SuspendOutcome
from jupyter_gpupool.devices.nvidia.service import DeviceService
from jupyter_gpupool.pool.model import Device
from jupyter_gpupool.procfs import ProcessId

from .machine import Machine, MiB
from .target import Failed, Target

#: Time-outs in seconds: for the start of the service, and for the device to show that a process has
#: ended.
START = 120.0
SETTLED = 30.0

#: The seconds to wait for the end of earlier processes. A process that runs longer counts as a
#: foreign process.
LEFT = 3.0

#: The time-out of a driver call that copies nothing, in seconds. It is shorter than the default: a
#: call that hangs fails the test, so the test need not wait long.
CALL = 20.0

#: After this many seconds, a test with many rounds begins no further round, except that each test
#: does a minimum of rounds. The test notes how many rounds it has done.
SECONDS = float(os.environ.get("GPUPOOL_GPU_SECONDS", "40"))

#: The driver allocates device memory in pages of this size.
PAGE = 2 * MiB

#: The devices that an earlier service of this test run has tested, by UUID. A later service does
#: not test them again.
_known: dict[str, Device] = {}


@dataclass
class Bench:
    """A started service, and the device that its tests use."""

    machine: Machine
    service: DeviceService
    device: Device
    #: The bytes that were in use on the device before the test started a process.
    base: int = 0

    @property
    def uuid(self) -> str:
        return self.device.uuid

    @property
    def env(self) -> dict[str, str]:
        """The environment for a process that uses this device."""
        return {**self.machine.env, "CUDA_VISIBLE_DEVICES": self.uuid}

    @property
    def slack(self) -> int:
        """The used bytes of an empty device may be larger than :attr:`base` by this number."""
        return self.machine.bytes(64 * MiB)

    async def suspend(self, process: Target) -> SuspendOutcome:
        return await self.service.suspend(process.root, [self.uuid], session=session(process))

    async def resume(
        self, process: Target, freed: SuspendOutcome | None = None, *, need: int | None = None
    ) -> ResumeOutcome:
        """Resume a process if the device has enough free bytes.

        Pass the outcome of the suspend as ``freed``: the resume then needs as many bytes as the
        suspend has freed. Or pass the number of bytes as ``need``.
        """
        bytes_ = need if freed is None else freed.freed.get(self.uuid, 0)
        return await self.service.resume(
            process.root,
            [self.uuid],
            [self.uuid],
            session=session(process),
            need={} if bytes_ is None else {self.uuid: bytes_},
        )

    async def state(self, process: Target) -> str:
        return await self.service.driver_state(process.root, session=session(process))

    async def there_and_back(self, process: Target) -> tuple[SuspendOutcome, ResumeOutcome]:
        """Suspend and resume a process; both must work."""
        there = await self.suspend(process)
        assert there.status == "suspended", there
        back = await self.resume(process, there)
        assert back.status == "resumed", back
        return there, back

    async def ask(self, op: str, process: ProcessId) -> dict[str, Any]:
        """Let the worker make the driver call ``op`` for a process; return the driver's answer."""
        fields = {"pid": process.pid, "start_time": process.start_time}
        try:
            answer = await self.worker.call(op, CALL, process=fields)
        except ChildLost as lost:
            return {
                "outcome": "hung" if lost.hung else "died",
                "code": "",
                "value": "",
                "seconds": 0,
            }
        return {name: answer[name] for name in ("outcome", "code", "value", "seconds")}

    @property
    def worker(self) -> Any:
        """The suspend worker of the device."""
        return self.service._workers.children[self.uuid]

    async def sample(self) -> DeviceSample:
        (sample,) = [s for s in await self.service.sample() if s.uuid == self.uuid]
        return sample

    async def used(self) -> int:
        return (await self.sample()).used

    async def held(self, process: Target) -> int | None:
        """Return the bytes that NVML lists for a process; None if NVML does not
        list the process.
        """
        return held(await self.sample(), process.pid)

    async def empty(self, *gone: Target, timeout: float = SETTLED) -> float:
        """Wait until the tests use no memory of the device; return the seconds of this wait."""
        pids = {process.pid for process in gone}
        begin = time.monotonic()
        while True:
            sample = await self.sample()
            listed = [p for p in sample.processes if p.pid in pids and p.bytes != 0]
            over = sample.used - self.base - self.slack
            if over <= 0 and not listed:
                return time.monotonic() - begin
            assert time.monotonic() - begin < timeout, (
                f"{over >> 20} MiB too many are in use after {timeout:g} s; NVML lists {listed}"
            )
            await asyncio.sleep(0.02)

    async def leave(self, other: Target, left: int) -> int:
        """Let another process allocate all but ``left`` bytes; return the bytes that are then free.

        The process allocates in pieces, because one large piece may not fit. So a little more
        than ``left`` may stay free. At least ``left`` stays free, although the driver itself needs
        memory to map the last pieces.
        """
        near, piece = self.machine.bytes(256 * MiB), self.machine.bytes(16 << 30)
        left += self.machine.bytes(8 * MiB)
        while (more := (await self._free(other) - left) // PAGE * PAGE) > 0:
            try:
                await other.do("take", min(more, piece))
            except Failed:
                if piece <= near:
                    break
                piece //= 2
        free = (await self.sample()).free
        assert free <= left + near, f"{free >> 20} MiB are free, and not {left >> 20} MiB"
        return free

    async def _free(self, process: Target) -> int:
        """Return the free bytes of the device, from NVML or the driver; take the smaller number."""
        free, _ = await process.do("info")
        return min(free, (await self.sample()).free)


def session(process: Target) -> str:
    """Return a name for the session of this process; no other process has this name."""
    return f"gpu-tests-{process.pid}"


def held(sample: DeviceSample, pid: int) -> int | None:
    found = [p.bytes for p in sample.processes if p.pid == pid]
    return found[0] if found else None


@contextlib.asynccontextmanager
async def bench(machine: Machine, **options: Any) -> AsyncIterator[Bench]:
    """Yield a started service whose first device can suspend processes."""
    service = DeviceService(env=machine.env, **{"call_timeout": CALL, **options})
    try:
        devices = await asyncio.wait_for(service.start(known=_known), START)
        assert devices, service.problem
        device = devices[0]
        assert device.can_suspend, device.tier_reason
        _known[device.uuid] = device
        found = Bench(machine, service, device)
        # Start the worker first, so that ``base`` includes the device memory that the worker uses.
        await found.worker.start()
        # NVML may still list earlier processes for a moment, such as the program of the self-test.
        deadline = time.monotonic() + LEFT
        while (before := await found.sample()).processes and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        found.base = before.used
        yield found
    finally:
        await asyncio.wait_for(service.close(), SETTLED)


def bytes_of(pid: int, name: str = "VmRSS") -> int:
    """Return the field ``name`` of ``/proc/<pid>/status`` in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith(f"{name}:")]
    return int(found[0].split()[1]) << 10 if found else 0


def threads(pid: int) -> list[str]:
    """Return the states of the threads of a process, as letters; see ``proc_pid_stat(5)``."""
    found = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.append(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0])
    return found


def host_memory() -> int:
    """Return the bytes of host memory that processes can still allocate."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise AssertionError("The kernel does not tell MemAvailable")


async def until(condition: Callable[[], bool], timeout: float = SETTLED) -> bool:
    """Wait until a condition is true; return False if it is still false after the time-out.

    This polls, because neither the driver nor the kernel reports the change.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.002)
    return True


def share(device: Device, part: float, *, processes: int = 1, cap: int = 24 << 30) -> int:
    """Return a size in bytes for a test's process: the fraction ``part`` of a device's memory.

    The size is at most ``cap``. It is also limited by the free host memory, which must have room
    for the states of all ``processes`` and, for a moment, for a second copy of a part of a state.
    """
    room = min(int(device.memory_total * part), cap, int(host_memory() * 0.7) // processes)
    return room // PAGE * PAGE


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum of some durations."""
    ordered = sorted(seconds)
    return {
        "p50": round(ordered[len(ordered) // 2], 4),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 4),
        "max": round(ordered[-1], 4),
    }


def speeds(outcome: SuspendOutcome | ResumeOutcome) -> dict[str, float]:
    """Return how long a suspend or a resume took, in total and in the driver alone."""
    return {"s": round(outcome.seconds, 4), "driver_s": round(outcome.driver_seconds, 4)}
