# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps the last hour's figures of devices and queue in memory: one point for each minute.

A minute has no figures if the broker did not run, or took no sample because no session was open.
The point of such a minute is null, and a graph shows a gap.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping, NamedTuple

from ..pool.model import DeviceView
from .core import Core
from .gpu.samples import Samples

#: STEP: the seconds that one point covers. KEPT: the number of points. The last point is for the
#: present minute, which has not ended yet.
STEP, KEPT = 60, 60

#: The figures of a device.
FIGURES = ("granted", "used", "utilisation")


class DeviceLook(NamedTuple):
    """The figures of one device at one instant. A figure that the broker did not read is None."""

    granted: int
    used: int | None
    utilisation: int | None


@dataclass
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> int | None:
        return round(self.total / self.count) if self.count else None


@dataclass
class _Minute:
    number: int
    #: By device and figure: the mean.
    devices: dict[str, dict[str, _Mean]] = field(default_factory=dict)
    queue: int = 0

    def count(self, devices: Mapping[str, DeviceLook], queue: int) -> None:
        self.queue = max(self.queue, queue)
        for uuid, reading in devices.items():
            means = self.devices.setdefault(uuid, {name: _Mean() for name in FIGURES})
            for name, value in zip(FIGURES, reading, strict=True):
                means[name].add(value)


class Hour:
    """The points of the last hour: the mean figures of each device, and the longest queue."""

    def __init__(self) -> None:
        self._minutes: deque[_Minute] = deque(maxlen=KEPT)

    def take(self, now: float, devices: Mapping[str, DeviceLook], queue: int) -> None:
        """Add the figures of the devices, and the length of the queue, at the time ``now``."""
        number = int(now // STEP)
        if not self._minutes or self._minutes[-1].number < number:
            self._minutes.append(_Minute(number))
        self._minutes[-1].count(devices, queue)

    def shown(self, now: float, devices: Iterable[str]) -> dict[str, Any]:
        """Return the points of these devices and of the queue, oldest first, up to ``now``."""
        last = int(now // STEP)
        by_number = {minute.number: minute for minute in self._minutes}
        minutes = [by_number.get(number) for number in range(last - KEPT + 1, last + 1)]
        return {
            "now": now,
            "step": STEP,
            "devices": {
                uuid: {
                    name: [
                        m.devices[uuid][name].value if m and uuid in m.devices else None
                        for m in minutes
                    ]
                    for name in FIGURES
                }
                for uuid in devices
            },
            "queue": [m.queue if m else None for m in minutes],
        }


class HourBook:
    """Fills an :class:`Hour` with the broker's figures, and returns its points."""

    def __init__(self, core: Core, samples: Samples) -> None:
        self._core = core
        self._samples = samples
        self._hour = Hour()

    def look(self) -> None:
        """Add the figures of the pool as it is now; call this after each sample."""
        found = {view.device.uuid: self._seen(view) for view in self._core.pool.device_views()}
        self._hour.take(self._core.now(), found, self._waiting())

    def count_queue(self) -> None:
        """Add the length of the queue; call this when a session begins to wait.

        Most waits are shorter than the time between two calls of :meth:`look`, so :meth:`look`
        alone would miss them.
        """
        self._hour.take(self._core.now(), {}, self._waiting())

    def _waiting(self) -> int:
        return sum(state == "queued" for state in self._core.busy.values())

    def _seen(self, view: DeviceView) -> DeviceLook:
        sample = self._samples.recent(view.device.uuid)
        return DeviceLook(
            view.granted, sample.used if sample else None, sample.utilisation if sample else None
        )

    def shown(self) -> dict[str, Any]:
        """Return the last hour of every device of the pool, and of the queue."""
        devices = [view.device.uuid for view in self._core.pool.device_views()]
        return self._hour.shown(self._core.now(), devices)
