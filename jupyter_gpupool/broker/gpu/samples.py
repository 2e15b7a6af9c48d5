# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The last sample of the devices, and how old it is."""

from __future__ import annotations

import asyncio
from typing import Mapping, Sequence

from ...devices import Devices, DeviceSample
from ...pool.attribution import slack
from ...pool.model import Slice
from ...units import format_bytes
from ..configuration import Configuration

#: A sample that is younger than this many seconds is good enough to attach a session that has no
#: GPU state yet. The broker restores nothing for this session, so nothing is lost if a process
#: outside the pool has taken the memory since the sample.
FRESH = 10.0

#: While no session is attached or waits, the monitor samples only once in QUIET intervals.
QUIET = 5


class Samples:
    """Takes samples, and keeps the last one."""

    def __init__(self, service: Devices, configuration: Configuration) -> None:
        self._service = service
        self._configuration = configuration
        #: The last sample of each device.
        self.last: Mapping[str, DeviceSample] = {}
        self._taken_at = float("-inf")

    async def take(self) -> list[DeviceSample]:
        """Return a sample taken now, and keep it for the next attach.

        Raises
        ------
        DriverError
            If NVML does not answer.
        """
        began = asyncio.get_running_loop().time()
        found = await self._service.sample()
        self.last = {sample.uuid: sample for sample in found}
        self._taken_at = began
        return found

    def recent(self, device: str) -> DeviceSample | None:
        """Return the last sample of a device; None if it is too old, or if NVML could not read it.

        The last sample may be old, because the broker takes no samples while it has no session. A
        sample is too old after three times the longest interval between two samples of the monitor.
        """
        lasts = 3 * QUIET * self._configuration.settings.sample_interval
        sample = self.last.get(device) if self._age() <= lasts else None
        return None if sample is None or sample.lost else sample

    def fits(self, slices: Sequence[Slice]) -> bool:
        """Return whether a fresh sample shows that the memory of ``slices`` is free."""
        return self._age() < FRESH and not self.missing(slices)

    def missing(self, slices: Sequence[Slice]) -> str:
        """Return why the last sample shows no room for ``slices``, or "" if it shows enough."""
        for piece in slices:
            sample = self.last.get(piece.device)
            if sample is None or sample.lost:
                return f"{piece.device} cannot be read: {sample.lost if sample else 'not found'}."
            # The driver's own memory varies by a little, so this check allows some slack. The
            # session has no state to restore, so the slack does no harm.
            if sample.free + slack(sample.total) < piece.bytes:
                return (
                    f"The slice needs {format_bytes(piece.bytes)} on {piece.device}, but only "
                    f"{format_bytes(sample.free)} is free: processes outside the pool use the rest "
                    "(nvidia-smi lists these processes)."
                )
        return ""

    def _age(self) -> float:
        return asyncio.get_running_loop().time() - self._taken_at
