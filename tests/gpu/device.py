# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The device service on the machine under test, and the view of a device from outside."""

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

#: START: seconds to wait for the start of the service. SETTLED: seconds to wait until the device
#: shows that a process has ended.
START = 120.0
SETTLED = 30.0

#: Wait this many seconds for earlier processes to end. Processes that still run then count as
#: foreign.
LEFT = 3.0

#: The time-out, in seconds, of a driver call that copies nothing. It is shorter than the default,
#: because a call that hangs fails the test.
CALL = 20.0

#: Seconds for a test of many rounds. If a test does fewer rounds than planned, it notes the number.
SECONDS = float(os.environ.get("GPUPOOL_GPU_SECONDS", "40"))

#: The driver allocates device memory in pages of this size.
PAGE = 2 * MiB

#: The devices that earlier services of this test run have tested.
_known: dict[str, Device] = {}


@dataclass
class Bench:
    """A started service, and the device that its tests use."""

    machine: Machine
    service: DeviceService
    device: Device
    #: Bytes that were in use on the device before the first process of a test.
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
        """The bytes in use on an empty device may vary by this number."""
        return self.machine.bytes(64 * MiB)

    async def suspend(self, process: Target) -> SuspendOutcome:
        return await self.service.suspend(process.root, [self.uuid], session=session(process))

    async def resume(
        self, process: Target, freed: SuspendOutcome | None = None, *, need: int | None = None
    ) -> ResumeOutcome:
        """Resume a process if the device has enough bytes free.

        ``freed`` is the outcome of a suspend: the device must have as many bytes free as that
        suspend freed. Without ``freed``, ``need`` bytes must be free.
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
        """Return the driver's own answer to a question about a process, as the worker gives it."""
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
        """Wait until the tests use no memory of the device; return the seconds until then."""
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
        """Let another process take the device's memory except ``left``; return the free bytes then.

        The process allocates in pieces, because one large piece may not fit. So a little more
        than ``left`` may stay free. At least ``left`` stays free, even though the driver itself
        needs memory to map the last pieces.
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
        """Return the free bytes of the device: the smaller of NVML's figure and the driver's."""
        free, _ = await process.do("info")
        return min(free, (await self.sample()).free)


def session(process: Target) -> str:
    """Return a session's name that is unique to this process."""
    return f"gpu-tests-{process.pid}"


def held(sample: DeviceSample, pid: int) -> int | None:
    found = [p.bytes for p in sample.processes if p.pid == pid]
    return found[0] if found else None


@contextlib.asynccontextmanager
async def bench(machine: Machine, **options: Any) -> AsyncIterator[Bench]:
    """Yield a service that can suspend on the machine's first device."""
    service = DeviceService(env=machine.env, **{"call_timeout": CALL, **options})
    try:
        devices = await asyncio.wait_for(service.start(known=_known), START)
        assert devices, service.problem
        device = devices[0]
        assert device.can_suspend, device.tier_reason
        _known[device.uuid] = device
        found = Bench(machine, service, device)
        # The worker starts before the measurement: after cuInit it may use device memory.
        await found.worker.start()
        # NVML may show memory of earlier processes, such as the self-test's program, a little
        # longer.
        deadline = time.monotonic() + LEFT
        while (before := await found.sample()).processes and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        found.base = before.used
        yield found
    finally:
        await asyncio.wait_for(service.close(), SETTLED)


def bytes_of(pid: int, name: str = "VmRSS") -> int:
    """Return a figure of ``/proc/<pid>/status`` in bytes; 0 if the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = [line for line in lines if line.startswith(f"{name}:")]
    return int(found[0].split()[1]) << 10 if found else 0


def threads(pid: int) -> list[str]:
    """Return the state of each thread of a process, as the letters of ``proc_pid_stat(5)``."""
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
    """Wait for a condition; return whether it came true in time.

    It polls, because neither the driver nor the kernel reports the change.
    """
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(0.002)
    return True


def share(device: Device, part: float, *, processes: int = 1, cap: int = 24 << 30) -> int:
    """Return this part of a device's memory in bytes: at most ``cap``, and at most what host
    memory allows.

    Host memory must have room for the state of a suspended process, and for a moment for a second
    copy of a part of the state.
    """
    room = min(int(device.memory_total * part), cap, int(host_memory() * 0.7) // processes)
    return room // PAGE * PAGE


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the 99th percentile and the maximum."""
    ordered = sorted(seconds)
    return {
        "p50": round(ordered[len(ordered) // 2], 4),
        "p99": round(ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)], 4),
        "max": round(ordered[-1], 4),
    }


def speeds(outcome: SuspendOutcome | ResumeOutcome) -> dict[str, float]:
    """Return the seconds of a suspend or a resume: in total, and in the driver."""
    return {"s": round(outcome.seconds, 4), "driver_s": round(outcome.driver_seconds, 4)}
