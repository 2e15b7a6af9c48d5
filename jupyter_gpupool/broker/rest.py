# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the driver takes by itself, measured again whenever a device is at rest.

It grows in weeks of kernels that come and go. Measured only at the broker's start, the growth would
count as used outside the pool, and the device would shrink.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Collection

from ..devices import residue
from ..devices.model import DeviceSample
from ..pool import events as e
from ..pool.model import Device
from ..units import format_bytes
from .health import Health
from .runner import Runner

#: Looks in a row at a device at rest that must agree: what has just ended shows for a moment more.
LOOKS = 3


class Rest:
    """Looks at each sample of a device; tells the pool what the driver keeps there."""

    def __init__(self, runner: Runner, health: Health, log: logging.Logger) -> None:
        self._runner = runner
        self._health = health
        self._log = log
        self._seen: dict[str, deque[int]] = {}
        #: Devices on which NVML has named a process: elsewhere nobody knows whose memory is whose.
        self._named: set[str] = set()

    def look(self, sample: DeviceSample, owned: Collection[int], *, leased: bool) -> None:
        """Take note of a sample.

        ``owned`` are the numbers of processes of sessions, which may keep a little while they are
        suspended; ``leased``: some session has a slice there.
        """
        uuid = sample.uuid
        if any(p.pid > 0 and p.bytes for p in sample.processes):
            self._named.add(uuid)
        seen = self._seen.setdefault(uuid, deque(maxlen=LOOKS))
        device = self._health.devices.get(uuid)
        at_rest = not leased and all(p.pid in owned for p in sample.processes)
        if device is None or not at_rest or uuid not in self._named or uuid in self._health.failed:
            seen.clear()
            return
        seen.append(residue.unattributed(sample))
        if len(seen) == LOOKS:
            self._settle(device, sample, min(seen))

    def _settle(self, device: Device, sample: DeviceSample, size: int) -> None:
        found, was = residue.reserved(sample, size), device.memory_reserved
        if was - residue.slack(sample.total) <= found <= was:
            return
        self._log.info(
            "GPU %d at rest: the driver keeps %s for itself (%s before)",
            device.index, format_bytes(found), format_bytes(was),
        )  # fmt: skip
        self._runner.note("residue", device=device.uuid, bytes=found, detail={"before": was})
        measured = replace(device, memory_reserved=found)
        self._health.devices[device.uuid] = measured
        self._runner.handle(e.DeviceAppeared(now=self._runner.now(), device=measured))
