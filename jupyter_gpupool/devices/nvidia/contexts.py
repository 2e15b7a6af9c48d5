# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a CUDA context costs on a device, read off the memory that a test program takes."""

from __future__ import annotations

import asyncio
import contextlib
from typing import AsyncIterator

from ...errors import DriverError
from ..children import Child
from ..model import DeviceSample
from .sampling import Sampler, others


class Stage:
    """Where test programs start, and move from device to device.

    Not both at once: where NVML does not list processes (a container), the figure comes from the
    device's free memory, which a program that moves in from another device would spoil.
    """

    def __init__(self, sampler: Sampler) -> None:
        #: Bytes by device, as far as measured.
        self.found: dict[str, int] = {}
        self._sampler = sampler
        self._changed = asyncio.Condition()
        self._starting = 0
        self._moving = 0

    async def start(self, target: Child, uuid: str, size: int, timeout: float) -> None:
        """Start ``target``, which takes a context and ``size`` bytes on a device.

        Raises
        ------
        ChildLost, DriverError
            As :meth:`Child.start` does.
        """
        async with self._alone("_starting", "_moving"):
            before = await self._look(uuid)
            await target.start(timeout)
            after = await self._look(uuid)
        if before is not None and after is not None:
            if target.pid is not None:
                self._sampler.numbers.learn(before, after, target.pid)
            cost = _taken(before, after, target.pid) - size
            if 0 < cost <= after.total // 2:  # or somebody else came or went
                self.found[uuid] = cost

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """For as long as a program may be on another device."""
        async with self._alone("_moving", "_starting"):
            yield

    @contextlib.asynccontextmanager
    async def _alone(self, mine: str, others: str) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: getattr(self, others) == 0)
            setattr(self, mine, getattr(self, mine) + 1)
        try:
            yield
        finally:
            async with self._changed:
                setattr(self, mine, getattr(self, mine) - 1)
                self._changed.notify_all()

    async def _look(self, uuid: str) -> DeviceSample | None:
        with contextlib.suppress(DriverError):  # the test itself says what is wrong with NVML
            (sample,) = await self._sampler.sample([uuid])
            return sample
        return None


def _taken(before: DeviceSample, after: DeviceSample, pid: int | None) -> int:
    """Return the bytes that process ``pid`` has on the device of these samples.

    A list may lack some of them: where nobody else came or went, free memory tells of all.
    """
    taken = before.free - after.free
    for process in after.processes:
        if process.pid == pid and process.bytes:
            alone = others(before, {pid}) == others(after, {pid})
            return max(process.bytes, taken) if alone else process.bytes
    return taken
