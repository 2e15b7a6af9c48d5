# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How many rows of the journal one user may cause that tell of no use of a device.

Opening and closing sessions, asking for what is refused and queueing cost a client nothing, so that
one user could push everybody's history out of the journal. What is accounted (slices, suspends and
resumes) takes its time in the driver and is always written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from .journal import Row

#: Rows a second that a user may cause for long, and at once.
RATE, BURST = 5.0, 2000.0

#: Seconds of rows that one row stands for, once there were too many.
SUMMARY = 60.0

#: Of a user who has caused none for this many seconds nothing is kept: the allowance is full again.
FORGET = BURST / RATE

_CHEAP = frozenset({"open", "close", "refuse", "queue"})


@dataclass(slots=True)
class _User:
    left: float = BURST
    at: float = 0.0
    #: Rows that were not written, by kind, and since when.
    missing: Counter[str] = field(default_factory=Counter)
    since: float = 0.0


class RowBudget:
    """Decides row by row. Times are seconds of any clock that does not go back."""

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}

    def admits(self, row: Row, now: float) -> bool:
        """Return whether the row is to be written; one that is not is counted."""
        cheap = row.kind in _CHEAP or (row.kind == "state" and row.device is None)
        if not cheap or not row.owner:
            return True
        user = self._users.get(row.owner)
        if user is None:
            user = self._users[row.owner] = _User(at=now)
        user.left = min(BURST, user.left + (now - user.at) * RATE)
        user.at = now
        if user.left >= 1:
            user.left -= 1
            return True
        if not user.missing:
            user.since = now
        user.missing[row.kind] += 1
        return False

    def summaries(self, now: float, *, all_of_them: bool = False) -> list[tuple[str, Counter[str]]]:
        """Return whose rows were not written, and how many by kind; for one row each."""
        found = []
        for owner, user in list(self._users.items()):
            if user.missing and (all_of_them or now - user.since >= SUMMARY):
                found.append((owner, user.missing))
                user.missing = Counter()
            elif not user.missing and now - user.at >= FORGET:
                del self._users[owner]
        return found
