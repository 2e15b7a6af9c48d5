# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How long this server's kernels were open, and how long of that they had a slice. Pure.

Both only grow, and a kernel counts also when it has ended. A kernel that the broker lost sight of
and has again was open all along; that it had a slice meanwhile is counted only if the broker says
so: its own count goes back when it was killed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterable, Mapping

from ..states import HAS_LEASE

View = dict[str, Any]

#: Sessions to be remembered; of those that are gone the first are forgotten.
MOST = 2000


@dataclass
class _Seen:
    """A session as it was when last counted."""

    at: float
    #: The broker's own count.
    total: float
    #: Since when it has its slice, of what is not counted yet; None if it has none.
    leased: float | None = None
    #: Seconds with a slice that the journal told of since.
    known: float = 0.0
    ended: bool = False


class Usage:
    """Counts from ``since`` on, in seconds since the epoch."""

    def __init__(self, since: float) -> None:
        self.since = since
        self._open = self._attached = 0.0
        self._seen: dict[str, _Seen] = {}

    def take(self, view: View, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take a snapshot, and the rows of the journal that came since the last."""
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
        """Take one row: of the last seconds of a session there will be no snapshot."""
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
        """Return the figures."""
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
            # One that was open before us counts from now.
            if opened is not None and self.since <= opened <= now:
                self._count(now - opened, total)
            self._seen[name] = _Seen(now, total, leased)
        elif not seen.ended and now >= seen.at:
            self._count(now - seen.at, total - seen.total)
            seen.at, seen.total, seen.leased, seen.known = now, total, leased, 0.0

    def _count(self, seconds: float, attached: float) -> None:
        seconds = max(0.0, seconds)
        self._open += seconds
        self._attached += min(max(0.0, attached), seconds)
