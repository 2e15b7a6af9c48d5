# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps the usage of users and groups in the journal, so that fair shares survive a restart.

The journal has two values. The first value is the usage of all users and groups. While there are
leases, the broker writes it once a minute. The second value is the usage of the users and groups
that have used a GPU since the first value was written. While there are leases, the broker writes it
every second. So if a broker is killed, about a second of usage is lost. No write is synced to the
disk.

A lease may outlive its broker. The next broker counts the memory of this lease for the time since
the earlier broker's last commit. It cannot count what the lease has computed in that time.

The times in both values are times of day, because the next broker's clock may differ from this
broker's clock.
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

#: The names of the two values in the journal.
_ALL, _RECENT = "usage", "usage-recent"

#: Both apply while there are leases. SOON: seconds between two writes of the recent usage. LATER:
#: seconds between two writes of all usage.
SOON, LATER = 1.0, 60.0

#: The most users, and the most groups, whose usage the broker keeps. It keeps those with the
#: largest usage. Each of them takes about 80 bytes.
MOST = 2000

#: Fewer GPU-seconds than this are not worth keeping.
NOTHING = 0.01


class UsageBook:
    """Writes the pool's usage to the journal, and gives it to the pool of the next broker."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._timer: asyncio.TimerHandle | None = None
        #: The pool's time at which the broker last wrote the usage of all users and groups.
        self._saved_at = -math.inf
        #: The pool's time at which the previous broker last wrote; None if there was no previous
        #: broker, or if the machine has rebooted since. The time for which the machine slept does
        #: not count, because a lease uses nothing while the machine sleeps.
        gone = time.monotonic() - float(core.journal.meta("awake") or math.inf)
        self._since = core.now() - gone if gone >= 0 else None

    def recover(self) -> None:
        """Tell the pool the usage in the journal. Call this after the pool has its leases back."""
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
        """Write the usage soon if a lease has begun or ended."""
        if self._timer is None and (change.new in HAS_LEASE or change.old in HAS_LEASE):
            self._timer = asyncio.get_running_loop().call_later(SOON, self._look)

    def close(self) -> None:
        """Write the usage of all before the broker ends."""
        if self._timer is not None:
            self._timer.cancel()
        self._core.follow_clock()
        self._save(self._core.now())

    def _save(self, now: float) -> None:
        """Pass the usage of all to the journal, which writes it with the next commit."""
        found = self._core.pool.usage(now)
        self._saved_at = now
        self._core.journal.remember(_ALL, usage_text(found.users, found.groups, self._core.ahead))
        self._core.journal.remember(_RECENT, "")

    def _look(self) -> None:
        core, self._timer = self._core, None
        # First measure the time of day again, because the figures below contain times of day.
        core.follow_clock()
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
    """Return the usage as text, for at most MOST users and MOST groups, the largest first.

    ``ahead`` is the time of day minus the clock of these figures, in seconds.
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
    """Return the users and the groups in a text of :func:`usage_text`; skip unreadable ones."""
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
