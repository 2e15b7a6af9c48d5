# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Shows users of this broker the GPUs and sessions of all machines of the cluster.

Only the ledger knows the GPUs and sessions of all machines. In its next report to the ledger, the
broker asks for a view of the cluster. The ledger's answer to the report contains this view. So no
user needs access to Ray. If the ledger does not answer, the broker shows only the GPUs and sessions
of its own machine.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..cluster.messages import Summary
from ..cluster.overlay import keys_of
from ..pool.model import PoolSettings
from .core import Core
from .transport.connection import Connection

View = Mapping[str, Any]
Give = Callable[[View | None], None]

#: The broker shows the same view for this many seconds, because any local user may ask as often as
#: they like.
FRESH = 1.0
#: Seconds within which the ledger must answer. After that, the broker answers the request without
#: the ledger's view.
PATIENCE = 5.0


def summary_of(core: Core, data: tuple[str, ...]) -> Summary:
    """Return a summary of this machine for people and for the ledger.

    ``data`` are the folders that are on this machine's own disks.
    """
    views = core.pool.device_views()
    return Summary(
        len(views), sum(bool(view.drained_reason) for view in views),
        sum(view.capacity for view in views), sum(view.granted for view in views),
        sum(0 if view.drained_reason else view.free for view in views),
        sum(state == "queued" for state in core.busy.values()),
        tuple((view.device.name, view.free) for view in views if not view.drained_reason),
        tuple(sorted(Counter(session.owner.name for session in core.sessions).items())), data,
    )  # fmt: skip


def keys_for(user: str, core: Core, settings: PoolSettings) -> set[tuple[str, ...]]:
    """Return the keys of all limits that apply to sessions of ``user`` on this machine.

    The key of the user's own limits is always in the result.
    """
    owners = {s.owner for s in core.sessions if s.owner.name == user}
    found: set[tuple[str, ...]] = {("user", user)}
    found.update(key[:2] for owner in owners for key in keys_of(settings, owner))
    return found


class ClusterViews:
    """The last view of the cluster, and the requests that wait for the next view.

    Parameters
    ----------
    ask:
        Makes the broker send the ledger a report soon. The report asks for a view.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._view: View | None = None
        self._at = float("-inf")
        self._waiting: list[tuple[Connection, int | None, Give, asyncio.TimerHandle]] = []

    @property
    def wanted(self) -> bool:
        """Whether a connection waits for a view."""
        return bool(self._waiting)

    def look(
        self, connection: Connection, request: int | None, give: Give, *, connected: bool
    ) -> None:
        """Call ``give`` with a view of the cluster, or with None if the ledger sends none.

        If the last view is recent, or the ledger is not connected, call ``give`` now.
        """
        if not connected or time.monotonic() - self._at < FRESH:
            self._answer(give)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(PATIENCE, self._give_up, connection, request)
        self._waiting.append((connection, request, give, timer))
        self._ask()

    def arrived(self, view: Mapping[str, Any]) -> None:
        """Store a view that the ledger sent, and answer all requests that wait for one."""
        self._view, self._at = view, time.monotonic()
        waiting, self._waiting = self._waiting, []
        for _, _, give, timer in waiting:
            timer.cancel()
            self._answer(give)

    def gone(self, connection: Connection) -> None:
        """Forget the requests of a connection that has ended."""
        for row in [row for row in self._waiting if row[0] is connection]:
            row[3].cancel()
            self._waiting.remove(row)

    def close(self) -> None:
        """Cancel all timers. The requests that still wait get no answer."""
        for _, _, _, timer in self._waiting:
            timer.cancel()
        self._waiting.clear()

    def _give_up(self, connection: Connection, request: int | None) -> None:
        rows, self._waiting = self._waiting, []
        for row in rows:
            if row[0] is connection and row[1] == request:
                self._answer(row[2])
            else:
                self._waiting.append(row)

    def _answer(self, give: Give) -> None:
        known = self._view is not None and time.monotonic() - self._at < FRESH
        give(self._view if known else None)


def visible(
    view: Mapping[str, Any] | None, user: str, keys: Iterable[tuple[str, ...]] | None
) -> Mapping[str, Any] | None:
    """Return only the part of a view that ``user`` may see.

    This part has the limits in ``keys`` and the sessions of ``user``. If ``keys`` is None, the user
    may see the whole view.
    """
    if view is None or keys is None:
        return view
    known = {*keys}
    nodes = [
        {
            **node,
            "counted": [row for row in node["counted"] if tuple(row[:2]) in known],
            "summary": of_user(node["summary"], user),
        }
        for node in view["nodes"]
    ]
    return {**view, "nodes": nodes}


def of_user(summary: Mapping[str, Any] | None, user: str) -> Mapping[str, Any] | None:
    """Return a summary with the sessions of one user only."""
    if summary is None or summary["sessions"] is None:
        return summary
    return {**summary, "sessions": [row for row in summary["sessions"] if row[0] == user]}
