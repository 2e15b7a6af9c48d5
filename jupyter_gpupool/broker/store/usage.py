# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What users and groups have used, kept in the journal: a restart forgets nobody's share.

One value of the journal, written anew: some seconds after a lease has ended, and once a minute
while there are leases. A broker that is killed forgets at most what was used since.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, Mapping

from ...pool import events as e
from ...pool.model import Usage
from ...states import ATTACHED
from ..core import Core

#: The journal's value.
_META = "usage"

#: Seconds after the end of a lease, and between two looks while there are leases.
SOON, LATER = 5.0, 60.0

#: Users, and groups, that are kept: those that have used most. Some 80 bytes each.
MOST = 2000

#: GPU-seconds that are not worth keeping.
NOTHING = 0.01

#: What a row has, and last whether the daily budget is used up.
_FIGURES = ("memory", "compute", "today", "at")


class UsageBook:
    """Writes what the pool says of usage to the journal, and tells the next pool."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    def recover(self) -> None:
        """Tell the pool what the journal has."""
        users, groups = read_usage(self._core.journal.meta(_META))
        if users or groups:
            self._core.handle(e.UsageRecovered(now=self._core.now(), users=users, groups=groups))

    def changed(self, change: e.StateChanged) -> None:
        """Write soon if a lease has ended, or later if one has begun."""
        if change.new in ATTACHED:
            self._within(LATER)
        elif change.old in ATTACHED or change.old == "detaching":
            self._within(SOON)

    def save(self) -> None:
        """Note it for the next commit."""
        found = self._core.pool.usage(self._core.now())
        self._core.journal.remember(_META, usage_text(found.users, found.groups))

    def close(self) -> None:
        """Write for the last time."""
        if self._timer is not None:
            self._timer.cancel()
        self.save()

    def _within(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() + seconds >= self._due:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = loop.time() + seconds
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self._timer, self._due = None, math.inf
        self.save()
        self._core.flush_later()
        if any(state in ATTACHED for state in self._core.busy.values()):
            self._within(LATER)


def usage_text(users: Mapping[str, Usage], groups: Mapping[str, Usage]) -> str:
    """Return usage as text, the largest first and of a bounded number."""
    return json.dumps({"users": _rows(users), "groups": _rows(groups)}, separators=(",", ":"))


def _rows(found: Mapping[str, Usage]) -> dict[str, list[float]]:
    worth = [(name, u) for name, u in found.items() if max(u.dominant, u.today) > NOTHING]
    worth.sort(key=lambda item: -max(item[1].dominant, item[1].today))
    return {
        name: [*(round(getattr(u, f), 3) for f in _FIGURES), int(u.spent)]
        for name, u in worth[:MOST]
    }


def read_usage(text: str) -> tuple[dict[str, Usage], dict[str, Usage]]:
    """Return (users, groups) of :func:`usage_text`; what cannot be read is left out."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}, {}
    if not isinstance(data, dict):
        return {}, {}
    return _read(data.get("users")), _read(data.get("groups"))


def _read(rows: Any) -> dict[str, Usage]:
    found: dict[str, Usage] = {}
    for name, row in rows.items() if isinstance(rows, dict) else ():
        if not isinstance(row, list) or len(row) != len(_FIGURES) + 1:
            continue
        if all(type(x) in (int, float) and 0 <= x < math.inf for x in row):
            memory, compute, today, at, spent = row
            found[name] = Usage(float(memory), float(compute), float(today), bool(spent), float(at))
    return found
