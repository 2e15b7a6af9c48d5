# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Figures of the last minutes on this server's kernels and on the devices, and totals of use. Pure.

:class:`KernelHistory` keeps one point from each snapshot. A value that was not measured is null.
After a gap in the snapshots it adds a point of nulls, so that the line of a chart breaks there.

:class:`KernelUsage` counts how long this server's kernels were open, and how long they had a slice.
Both totals only grow, and include kernels that have ended. If a broker restarts and finds a
kernel's session again, the kernel counts as open in the time without a broker, too. How long the
kernel had a slice in this time comes from the broker's own total. If the broker was killed, this
total may be too small.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Collection, Iterable, Mapping

from ..states import HAS_LEASE

View = dict[str, Any]

#: A :class:`Ring` keeps a point for ``KEPT`` seconds. Two points are at least ``LEAST`` seconds
#: apart.
KEPT, LEAST = 300.0, 1.0

#: The largest number of points in one ring.
_MOST = int(KEPT / LEAST) + 2


class Ring:
    """The points of the last ``KEPT`` seconds. Each point has a value for each of ``names``."""

    def __init__(self, *names: str) -> None:
        self.time: deque[float] = deque(maxlen=_MOST)
        self._values: dict[str, deque[Any]] = {name: deque(maxlen=_MOST) for name in names}

    def due(self, now: float) -> bool:
        """Return whether enough time has passed for another point."""
        return not self.time or now - self.time[-1] >= LEAST

    def add(self, now: float, *, broken: bool, **values: Any) -> None:
        """Add a point. ``broken`` is true if there was a gap in the snapshots before this point."""
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


class KernelRing(Ring):
    """One kernel's memory in use, and the share of time in which it used its device."""

    def __init__(self) -> None:
        super().__init__("used", "busy")
        #: The session, the time and the busy seconds at the last point; None if the busy seconds
        #: were unknown at that point.
        self._before: tuple[str, float, float] | None = None

    def take(self, now: float, session: Mapping[str, Any], broken: bool) -> None:
        """Add a point if the last point is old enough."""
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
        # A new process or a new broker counts the busy seconds from zero again, so there is no
        # share for this point.
        if broken or before is None or before[0] != session["id"] or seconds < before[2]:
            return None
        # The broker reads the guard four times a second, so the computed share may be slightly
        # above 1.
        return round(min(1.0, float(seconds - before[2]) / (now - before[1])), 2)


class KernelHistory:
    """The points of the last minutes of all kernels and devices."""

    def __init__(self) -> None:
        self._kernels: dict[str, KernelRing] = {}
        self._devices: dict[str, Ring] = {}
        self._broken = False
        self._now = 0.0

    def pause(self) -> None:
        """Note that no snapshots come until the next :meth:`take`: the points then have a gap.

        The next snapshot may come from another broker.
        """
        self._broken = True

    def take(self, view: View) -> None:
        """Add the points of a snapshot."""
        now, broken = float(view["now"]), self._broken
        if now < self._now:
            # Older points have times after ``now``, so drop all points. This happens if the broker
            # has lost its journal and the machine's clock was set back.
            self._kernels, self._devices = {}, {}
        self._now, self._broken = now, False
        here = {s["kernel_id"]: s for s in view["sessions"] if s["here"]}
        for name in self._kernels.keys() - here:
            if self._kernels[name].time[-1] < now - KEPT:
                del self._kernels[name]
        for name, session in here.items():
            self._kernels.setdefault(name, KernelRing()).take(now, session, broken)
        devices = {d["uuid"]: d.get("utilisation") for d in view["devices"] or ()}
        self._devices = {name: self._devices.get(name) or Ring("utilisation") for name in devices}
        for name, ring in self._devices.items():
            if ring.due(now):
                ring.add(now, broken=broken, utilisation=devices[name])

    def shown(self, now: float, kernels: Collection[str], *, devices: bool = False) -> View:
        """Return the points of these kernels and, on request, of the devices."""
        known = {name: ring for name, ring in self._kernels.items() if name in kernels}
        found: View = {
            "now": now,
            "interval": LEAST,
            "kernels": {name: ring.shown(now) for name, ring in known.items()},
        }
        if devices:
            found["devices"] = {name: ring.shown(now) for name, ring in self._devices.items()}
        return found


# ---------------------------------------------------------------------- totals of use

#: The most sessions to keep. If there are more, the oldest ended sessions are dropped.
MOST = 2000


@dataclass
class _LastCount:
    """A session at its last count."""

    at: float
    #: The seconds with a slice, as the broker counts them.
    total: float
    #: The seconds of the session's present slice are counted up to this time; None if the session
    #: has no slice.
    leased: float | None = None
    #: Seconds with a slice since the last count, from rows of the journal.
    known: float = 0.0
    ended: bool = False


class KernelUsage:
    """The totals since ``since`` (seconds since the epoch)."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._open = self._attached = 0.0
        self._seen: dict[str, _LastCount] = {}

    def take(self, view: View, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count a snapshot, and the rows of the journal since the last snapshot."""
        now, later = float(view["now"]), []
        for row in rows:
            if row["time"] <= now:
                self.row(row)
            else:
                later.append(row)
        current = {s["id"]: s for s in view["sessions"] if s["here"]}
        for name, session in current.items():
            self._look(name, session, now)
        for row in later:
            self.row(row)
        gone = (name for name in list(self._seen) if name not in current)
        for _, name in zip(range(len(self._seen) - MOST), gone, strict=False):
            del self._seen[name]

    def row(self, row: Mapping[str, Any]) -> None:
        """Count one row of the journal.

        After a session's end, only rows show the session's last seconds: no snapshot has them.
        """
        seen, at = self._seen.get(str(row.get("session"))), float(row["time"])
        if seen is None or seen.ended or at < seen.at:
            return
        if row["kind"] == "state":
            has = row.get("detail", {}).get("new") in HAS_LEASE
            if has and seen.leased is None:
                seen.leased = at
            elif not has and seen.leased is not None:
                seen.known += at - seen.leased
                seen.leased = None
        elif row["kind"] == "close":
            if seen.leased is not None:
                seen.known += at - seen.leased
            self._count(at - seen.at, seen.known)
            seen.ended = True

    def shown(self) -> View:
        """Return the totals."""
        return {
            "since": round(self.since, 1),
            "attached_seconds": round(self._attached, 3),
            "kernel_seconds": round(self._open, 3),
        }

    def _look(self, name: str, session: Mapping[str, Any], now: float) -> None:
        total = float(session.get("attached_seconds_total") or 0.0)
        leased = now if session["state"] in HAS_LEASE else None
        seen = self._seen.get(name)
        if seen is None:
            opened = session.get("opened_at")
            # If a session was opened before this server began to count, it counts only from this
            # snapshot on.
            if opened is not None and self.since <= opened <= now:
                self._count(now - opened, total)
            self._seen[name] = _LastCount(now, total, leased)
        elif not seen.ended and now >= seen.at:
            self._count(now - seen.at, total - seen.total)
            seen.at, seen.total, seen.leased, seen.known = now, total, leased, 0.0

    def _count(self, seconds: float, attached: float) -> None:
        seconds = max(0.0, seconds)
        self._open += seconds
        self._attached += min(max(0.0, attached), seconds)
