# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What users and groups have used, kept in the journal: a restart forgets nobody's share.

Two values of the journal: the usage of all users, written once a minute while there are leases, and
the usage of those that have used anything since, written every second. The next broker counts the
memory of the leases that have outlived this one from its last commit on (their compute is not
known). So a broker that is killed loses about a second. No write is synced to the disk.

Their times are times of day, because the next broker's clock need not continue this one's.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from typing import Any, Mapping

from ...pool import events as e
from ...pool.model import Usage
from ...states import HAS_LEASE
from ..core import Core

#: The journal's values: the usage of all, and of those that have used anything since.
_ALL, _RECENT = "usage", "usage-recent"

#: Seconds between two writes of the recent usage, and of all, while there are leases.
SOON, LATER = 1.0, 60.0

#: Users, and groups, that are kept: those that have used most. Some 80 bytes each.
MOST = 2000

#: GPU-seconds that are not worth keeping.
NOTHING = 0.01


class UsageBook:
    """Writes what the pool says of usage to the journal, and tells the next pool."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timer: asyncio.TimerHandle | None = None
        #: When the usage of all was written last.
        self._saved_at = -math.inf
        #: When the broker before this one last wrote; None: there was none, or before a reboot. By
        #: the seconds that the machine was awake: a lease uses nothing while it sleeps.
        gone = time.monotonic() - float(core.journal.meta("awake") or math.inf)
        self._since = core.now() - gone if gone >= 0 else None

    def recover(self) -> None:
        """Tell the pool what the journal has, once it has the leases of the broker before."""
        core = self._core
        core.follow_clock()
        users, groups = read_usage(core.journal.meta(_ALL), core.ahead)
        recent = read_usage(core.journal.meta(_RECENT), core.ahead)
        core.handle(
            e.UsageRecovered(
                now=core.now(),
                users=users | recent[0],
                groups=groups | recent[1],
                since=self._since,
            )
        )
        self._look()

    def changed(self, change: e.StateChanged) -> None:
        """Write soon if a lease has begun or ended."""
        if self._timer is None and (change.new in HAS_LEASE or change.old in HAS_LEASE):
            self._timer = asyncio.get_running_loop().call_later(SOON, self._look)

    def close(self) -> None:
        """Write for the last time."""
        if self._timer is not None:
            self._timer.cancel()
        self._core.follow_clock()
        self._save(self._core.now())

    def _save(self, now: float) -> None:
        """Let the next commit write the usage of all."""
        found = self._core.pool.usage(now)
        self._saved_at = now
        self._core.journal.remember(_ALL, usage_text(found.users, found.groups, self._core.ahead))
        self._core.journal.remember(_RECENT, "")

    def _look(self) -> None:
        core, self._timer = self._core, None
        core.follow_clock()  # the figures are written with the time of day
        now = core.now()
        leases = any(state in HAS_LEASE for state in core.busy.values())
        if now >= self._saved_at + LATER:
            self._save(now)
        else:
            found = core.pool.usage(now, self._saved_at)
            core.journal.remember(_RECENT, usage_text(found.users, found.groups, core.ahead))
        core.flush_later()
        if leases:
            self._timer = asyncio.get_running_loop().call_later(SOON, self._look)


def usage_text(users: Mapping[str, Usage], groups: Mapping[str, Usage], ahead: float = 0.0) -> str:
    """Return usage as text, the largest first and of a bounded number.

    ``ahead``: by how much the time of day is ahead of the clock of these figures.
    """
    found = {"users": _rows(users, ahead), "groups": _rows(groups, ahead)}
    return json.dumps(found, separators=(",", ":"))


def _rows(found: Mapping[str, Usage], ahead: float) -> dict[str, list[float]]:
    worth = [(name, u) for name, u in found.items() if max(u.here, u.today) > NOTHING]
    worth.sort(key=lambda item: -max(item[1].here, item[1].today))
    return {
        name: [*(round(x, 3) for x in (u.memory, u.compute, u.today, u.at + ahead)), int(u.spent)]
        for name, u in worth[:MOST]
    }


def read_usage(text: str, ahead: float = 0.0) -> tuple[dict[str, Usage], dict[str, Usage]]:
    """Return (users, groups) of :func:`usage_text`; what cannot be read is left out."""
    try:
        data = json.loads(text or "{}")
    except ValueError:
        return {}, {}
    if not isinstance(data, dict):
        return {}, {}
    return _read(data.get("users"), ahead), _read(data.get("groups"), ahead)


def _read(rows: Any, ahead: float) -> dict[str, Usage]:
    found: dict[str, Usage] = {}
    for name, row in rows.items() if isinstance(rows, dict) else ():
        if not isinstance(row, list) or len(row) != 5:
            continue
        if all(type(x) in (int, float) and 0 <= x < math.inf for x in row):
            memory, compute, today, at, spent = row
            found[name] = Usage(
                float(memory), float(compute), float(today), bool(spent), float(at) - ahead
            )
    return found
