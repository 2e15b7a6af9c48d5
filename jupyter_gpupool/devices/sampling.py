# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What NVML shows, asked of the monitor child with a time-out."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Callable, Collection, Mapping, Sequence

from ..errors import DriverError
from .children import Child, ChildLost
from .model import DeviceSample, ProcessMemory

#: Seconds that NVML may take for one look at the devices before its process is replaced.
SAMPLE_TIMEOUT = 5.0

#: Seconds that the memory of a suspended process may take to show as free, and between looks.
FREED_TIMEOUT = 2.0
_FREED_POLL = 0.02


class Sampler:
    """The monitor child. ``on_lost`` is called once for each device that fails."""

    def __init__(
        self,
        *,
        env: Mapping[str, str],
        log: logging.Logger,
        on_lost: Callable[[str, str], None],
        timeout: float = SAMPLE_TIMEOUT,
    ) -> None:
        self.child = Child("monitor", env=env, log=log, on_event=self._take)
        self._timeout = timeout
        self._on_lost = on_lost
        self._uuids: tuple[str, ...] = ()
        self._watching = 0
        self._xids: dict[str, str] = {}
        self._told: set[str] = set()

    async def discover(self) -> dict[str, Any]:
        """Return what ``monitor.discover`` does.

        Raises
        ------
        DriverError
            If there is no driver, with the reason in a sentence, or NVML does not answer.
        """
        return await self._call("discover", 60.0)

    async def watch(self, uuids: Sequence[str]) -> None:
        """From now on, report failures of these devices."""
        self._uuids = tuple(uuids)
        self._watching = 0
        await self._rewatch()

    async def sample(self, uuids: Sequence[str] | None = None) -> list[DeviceSample]:
        """Return one sample for each of ``uuids`` (None: all), in that order.

        Raises
        ------
        DriverError
            If NVML does not answer in time; its process has been killed.
        """
        wanted = list(self._uuids if uuids is None else uuids)
        await self._rewatch()
        answer = await self._call("sample", self._timeout, uuids=wanted)
        samples = []
        for row in answer["samples"]:
            processes = tuple(ProcessMemory(**process) for process in row["processes"])
            sample = DeviceSample(**{**row, "processes": processes})
            samples.append(sample)
            if sample.lost:
                self._tell(sample.uuid, sample.lost)
            else:
                self._told.discard(sample.uuid)
        return samples

    async def wait_freed(
        self, pids: Collection[int], before: Sequence[DeviceSample]
    ) -> tuple[list[DeviceSample], bool]:
        """Wait (bounded) until the devices of ``before`` hold nothing of ``pids``.

        Return new samples and whether that came true. Where NVML's lists did not show these
        processes (another PID namespace), more free memory than before is the sign.
        """
        uuids = [sample.uuid for sample in before]
        shown = any(process.pid in pids for sample in before for process in sample.processes)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FREED_TIMEOUT
        while True:
            after = await self.sample(uuids)
            if shown:
                freed = not any(p.pid in pids and p.bytes != 0 for s in after for p in s.processes)
            else:
                freed = any(a.free > b.free for a, b in zip(after, before, strict=True))
            if freed or loop.time() >= deadline:
                return after, freed
            await asyncio.sleep(_FREED_POLL)

    async def close(self) -> None:
        """End the monitor."""
        await self.child.close()

    async def _rewatch(self) -> None:
        """Tell a monitor that was replaced what to watch, and what is lost for good."""
        if not self._uuids or (self.child.pid and self._watching == self.child.generation):
            return
        await self._call("watch", self._timeout, uuids=self._uuids, lost=self._xids)
        self._watching = self.child.generation

    async def _call(self, op: str, timeout: float, **fields: Any) -> dict[str, Any]:
        try:
            return await self.child.ask(op, timeout, **fields)
        except ChildLost as error:
            raise DriverError(
                f"NVML did not answer: {error}",
                code="nvml",
                next_step="It is asked again by a new process; nvidia-smi shows if it hangs.",
            ) from None

    def _take(self, message: dict[str, Any]) -> None:
        if message["event"] == "lost" and message["uuid"]:
            self._xids[message["uuid"]] = message["reason"]
            self._tell(message["uuid"], message["reason"])

    def _tell(self, uuid: str, reason: str) -> None:
        if uuid not in self._told:
            self._told.add(uuid)
            self._on_lost(uuid, reason)
