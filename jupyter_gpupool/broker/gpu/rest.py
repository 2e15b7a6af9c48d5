# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the driver takes by itself, measured again whenever a device is at rest.

It grows in weeks of kernels that come and go. Measured only at the broker's start, the growth would
count as used outside the pool, and the device would shrink. ``pool/attribution.py`` has the rules.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Sequence

from ...devices import DeviceSample
from ...pool import attribution
from ...pool import events as e
from ...pool.model import Device
from ...units import format_bytes
from ..runner import Runner
from .health import Health


class Rest:
    """Looks at each sample of a device; tells the pool what the driver keeps there."""

    def __init__(self, runner: Runner, health: Health, log: logging.Logger) -> None:
        self._runner = runner
        self._health = health
        self._log = log
        self._seen: dict[str, deque[int]] = {}
        #: Devices on which NVML has named a process: elsewhere nobody knows whose memory is whose.
        self._named: set[str] = set()

    def look(
        self, sample: DeviceSample, listed: Sequence[attribution.Listed], *, leased: bool
    ) -> None:
        """Take note of a sample.

        ``listed`` are its processes with their sessions; ``leased``: some session has a slice
        there.
        """
        uuid = sample.uuid
        if any(entry.known and entry.bytes for entry in listed):
            self._named.add(uuid)
        seen = self._seen.setdefault(uuid, deque(maxlen=attribution.REST_LOOKS))
        device = self._health.devices.get(uuid)
        if (
            device is None
            or not attribution.at_rest(listed, leased=leased)
            or uuid not in self._named
            or uuid in self._health.failed
        ):
            seen.clear()
            return
        seen.append(attribution.unlisted(sample.used, (entry.bytes for entry in listed)))
        was = device.memory_reserved
        found = attribution.measured_again([*seen], sample.reserved, sample.total, was)
        if found is not None:
            self._settle(device, found)

    def _settle(self, device: Device, found: int) -> None:
        was = device.memory_reserved
        self._log.info(
            "GPU %d at rest: the driver keeps %s for itself (%s before)",
            device.index, format_bytes(found), format_bytes(was),
        )  # fmt: skip
        self._runner.note("residue", device=device.uuid, bytes=found, detail={"before": was})
        measured = replace(device, memory_reserved=found)
        self._health.devices[device.uuid] = measured
        self._runner.handle(e.DeviceAppeared(now=self._runner.now(), device=measured))
