# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What all machines of the cluster have, for people who ask this broker.

Only the ledger knows that. The next report asks it, and its answer comes as any other one, so no
user needs a way to Ray. Without an answer this machine still shows its own part.
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

#: Seconds for which a view is shown again: any local user may ask, as often as they like.
FRESH = 1.0
#: Seconds in which the ledger must answer; then the request is answered without it.
PATIENCE = 5.0


def summary_of(core: Core) -> Summary:
    """Return what this machine has."""
    views = core.pool.device_views()
    return Summary(
        len(views), sum(bool(view.drained_reason) for view in views),
        sum(view.capacity for view in views), sum(view.granted for view in views),
        sum(0 if view.drained_reason else view.free for view in views),
        sum(state == "queued" for state in core.busy.values()),
        tuple((view.device.name, view.free) for view in views if not view.drained_reason),
        tuple(sorted(Counter(session.owner.name for session in core.sessions).items())),
    )  # fmt: skip


def keys_for(user: str, core: Core, settings: PoolSettings) -> set[tuple[str, ...]]:
    """Return the limits that count a user's sessions here; the users' own in any case."""
    owners = {s.owner for s in core.sessions if s.owner.name == user}
    found: set[tuple[str, ...]] = {("user", user)}
    found.update(key[:2] for owner in owners for key in keys_of(settings, owner))
    return found


class ClusterViews:
    """The last view of the cluster, and those who wait for the next one.

    Parameters
    ----------
    ask:
        Has a report go out soon.
    shown:
        Returns what a connection sees of a view, and of this machine.
    """

    def __init__(
        self,
        ask: Callable[[], None],
        shown: Callable[[Connection, Mapping[str, Any] | None], dict[str, Any]],
    ) -> None:
        self._ask, self._shown = ask, shown
        self._view: Mapping[str, Any] | None = None
        self._at = float("-inf")
        self._waiting: list[tuple[Connection, int | None, asyncio.TimerHandle]] = []

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a view."""
        return bool(self._waiting)

    def look(self, connection: Connection, request: int | None, *, connected: bool) -> None:
        """Answer a request: now, or once the ledger has sent a view."""
        if not connected or time.monotonic() - self._at < FRESH:
            self._answer(connection, request)
            return
        loop = asyncio.get_running_loop()
        timer = loop.call_later(PATIENCE, self._give_up, connection, request)
        self._waiting.append((connection, request, timer))
        self._ask()

    def arrived(self, view: Mapping[str, Any]) -> None:
        """Take a view of the ledger, and answer all who wait for it."""
        self._view, self._at = view, time.monotonic()
        waiting, self._waiting = self._waiting, []
        for connection, request, timer in waiting:
            timer.cancel()
            self._answer(connection, request)

    def gone(self, connection: Connection) -> None:
        """Forget the requests of a connection that has ended."""
        for row in [row for row in self._waiting if row[0] is connection]:
            row[2].cancel()
            self._waiting.remove(row)

    def close(self) -> None:
        """Answer nobody any more."""
        for _, _, timer in self._waiting:
            timer.cancel()
        self._waiting.clear()

    def _give_up(self, connection: Connection, request: int | None) -> None:
        self._waiting = [
            row for row in self._waiting if row[0] is not connection or row[1] != request
        ]
        self._answer(connection, request)

    def _answer(self, connection: Connection, request: int | None) -> None:
        now = time.monotonic()
        known = self._view is not None and now - self._at < FRESH
        connection.answer(request, self._shown(connection, self._view if known else None))


def visible(
    view: Mapping[str, Any] | None, user: str, keys: Iterable[tuple[str, ...]] | None
) -> Mapping[str, Any] | None:
    """Return a view with the limits in ``keys`` and the sessions of ``user`` only.

    With None for ``keys``, it has all of them.
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
