# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The last minutes of this server's kernels and of the devices, from the snapshots. Pure.

A point is what one snapshot said; between two there is nothing. What nobody measured is null, and
where nobody looked for a while there is a point of nulls: a line has to break there.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Collection, Mapping

View = dict[str, Any]

#: Seconds that are kept, and least seconds between two points.
KEPT, LEAST = 300.0, 1.0

#: Points of one ring at most.
_MOST = int(KEPT / LEAST) + 2


class Ring:
    """Points in time, the newest ``KEPT`` seconds; all have a value of each of ``names``."""

    def __init__(self, *names: str) -> None:
        self.time: deque[float] = deque(maxlen=_MOST)
        self._values: dict[str, deque[Any]] = {name: deque(maxlen=_MOST) for name in names}

    def due(self, now: float) -> bool:
        """Return whether there may be a point at ``now``."""
        return not self.time or now - self.time[-1] >= LEAST

    def add(self, now: float, *, broken: bool, **values: Any) -> None:
        """Add a point; ``broken``: nobody looked since the last one."""
        if broken and self.time and now - self.time[-1] >= 2 * LEAST:
            self._append(self.time[-1] + LEAST, dict.fromkeys(self._values))
        self._append(now, values)
        while self.time[0] < now - KEPT:
            self.time.popleft()
            for column in self._values.values():
                column.popleft()

    def _append(self, at: float, values: Mapping[str, Any]) -> None:
        self.time.append(at)
        for name, column in self._values.items():
            column.append(values[name])

    def shown(self, now: float) -> View:
        """Return the points of the last ``KEPT`` seconds."""
        first = next((i for i, at in enumerate(self.time) if at >= now - KEPT), len(self.time))
        columns = {name: list(column)[first:] for name, column in self._values.items()}
        return {"time": [round(at, 1) for at in list(self.time)[first:]], **columns}


class Kernel(Ring):
    """One kernel: memory in use, and the share of time in which it used its device."""

    def __init__(self) -> None:
        super().__init__("used", "busy")
        #: Session, time and busy seconds of the last point; None if nothing follows from them.
        self._before: tuple[str, float, float] | None = None

    def take(self, now: float, session: Mapping[str, Any], broken: bool) -> None:
        """Add a point if it is time."""
        if not self.due(now):
            return
        used = session.get("used_bytes")
        self.add(
            now,
            broken=broken,
            used=session.get("footprint_bytes") if used is None else used,
            busy=self._share(now, session, broken),
        )

    def _share(self, now: float, session: Mapping[str, Any], broken: bool) -> float | None:
        seconds = session.get("busy_seconds")
        if not session.get("guard") or seconds is None:
            self._before = None
            return None
        before, self._before = self._before, (session["id"], now, seconds)
        # Another process, or another broker, counts from zero.
        if broken or before is None or before[0] != session["id"] or seconds < before[2]:
            return None
        # The guard is read four times a second: at the edges there may be a little more.
        return round(min(1.0, float(seconds - before[2]) / (now - before[1])), 2)


class History:
    """The rings of all kernels and devices."""

    def __init__(self) -> None:
        self._kernels: dict[str, Kernel] = {}
        self._devices: dict[str, Ring] = {}
        self._broken = False
        self._now = 0.0

    def pause(self) -> None:
        """Nobody looks until the next :meth:`take`, or the broker is another one then."""
        self._broken = True

    def take(self, view: View) -> None:
        """Take a snapshot."""
        now, broken = float(view["now"]), self._broken
        if now < self._now:
            # A broker that lost its journal, on a machine whose clock was set back.
            self._kernels, self._devices = {}, {}
        self._now, self._broken = now, False
        here = {s["kernel_id"]: s for s in view["sessions"] if s["here"]}
        for name in self._kernels.keys() - here:
            if self._kernels[name].time[-1] < now - KEPT:
                del self._kernels[name]
        for name, session in here.items():
            self._kernels.setdefault(name, Kernel()).take(now, session, broken)
        devices = {d["uuid"]: d.get("utilisation") for d in view["devices"] or ()}
        self._devices = {name: self._devices.get(name) or Ring("utilisation") for name in devices}
        for name, ring in self._devices.items():
            if ring.due(now):
                ring.add(now, broken=broken, utilisation=devices[name])

    def shown(self, now: float, kernels: Collection[str], *, devices: bool = False) -> View:
        """Return what is known of these kernels, and, if asked for, of the devices."""
        known = {name: ring for name, ring in self._kernels.items() if name in kernels}
        found: View = {
            "now": now,
            "interval": LEAST,
            "kernels": {name: ring.shown(now) for name, ring in known.items()},
        }
        if devices:
            found["devices"] = {name: ring.shown(now) for name, ring in self._devices.items()}
        return found
