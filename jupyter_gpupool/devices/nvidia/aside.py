# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Devices that an admin has set aside: no child of this process has their device files open.

CUDA opens the files of all GPUs that a process sees, and NVML those of which it is asked for a
handle. So children that start while a device is set aside do not see it (CUDA), and do not ask for
it (NVML).
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping

from ...errors import Code, DriverError

_VISIBLE = "CUDA_VISIBLE_DEVICES"


class Aside:
    """Which devices are set aside, and why.

    ``env`` is the environment of children that start from now on; this keeps it up to date.
    """

    def __init__(self, env: dict[str, str]) -> None:
        self._env = env
        self._reasons: dict[str, str] = {}
        #: The numbers of the GPUs' device files, by UUID; a MIG instance has none of its own.
        self.numbers: dict[str, int] = {}

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._reasons

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take note of the device files of the GPUs that NVML found."""
        self.numbers = {row["uuid"]: row["minor"] for row in rows if not row["mig"]}

    def check(self, uuid: str) -> None:
        """Raise DriverError, code ``paused``, if the device is set aside."""
        if uuid in self._reasons:
            raise DriverError(self._reasons[uuid], code=Code.PAUSED)

    def put(self, uuids: Iterable[str], reason: str, machine: Iterable[str]) -> bool:
        """Set devices of this ``machine`` aside; return whether any was not."""
        fresh = {*uuids} - self._reasons.keys()
        self._reasons.update(dict.fromkeys(fresh, reason))
        self._see(machine)
        return bool(fresh)

    def take(self, uuids: Iterable[str], machine: Iterable[str]) -> None:
        """Use devices again."""
        for uuid in uuids:
            self._reasons.pop(uuid, None)
        self._see(machine)

    def _see(self, machine: Iterable[str]) -> None:
        if self._reasons:
            self._env[_VISIBLE] = ",".join(u for u in machine if u not in self._reasons)
        else:
            self._env.pop(_VISIBLE, None)
