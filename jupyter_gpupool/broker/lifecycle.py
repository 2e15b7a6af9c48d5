# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""End sessions and waits when a process dies, an agent disconnects, or a time-out passes."""

from __future__ import annotations

import asyncio
import logging

from ..errors import Code, RefusedError
from ..pool import events as e
from ..pool.model import SessionRecord
from ..procfs import ProcessId
from . import sessions as processes
from .core import Core
from .pages.activity import DEVICE_HOLD
from .sessions import LiveSession
from .transport.connection import Connection

#: If an agent disconnects but its process lives, the broker keeps the agent's holds for this many
#: seconds.
GRACE = 10.0

#: A server must send ``launched`` within this many seconds after ``open``. Otherwise the session
#: ends, because somebody may have killed the server.
LAUNCH_TIMEOUT = 30.0


class Lifecycle:
    """Turns the end of a process or a connection into an event for the pool."""

    def __init__(self, core: Core, log: logging.Logger) -> None:
        self._core = core
        self._log = log

    def record(self, session: LiveSession) -> SessionRecord:
        """Return the pool's record of a session; raise RefusedError if the session has ended."""
        record = self._core.record(session.id)
        if record is None:
            raise RefusedError(f"Session {session.id} has ended.", code=Code.UNKNOWN_SESSION)
        return record

    def expect_launch(self, session: LiveSession) -> None:
        """End the session if the server does not launch its process in time."""
        session.launch_timer = asyncio.get_running_loop().call_later(
            LAUNCH_TIMEOUT, self.end, session, f"its kernel did not start in {LAUNCH_TIMEOUT:g} s"
        )

    def watch_process(self, session: LiveSession, process: ProcessId) -> None:
        """End the session when its process ends."""
        session.death = processes.Death(process, lambda: self.end(session, "its process has ended"))

    def start_grace(self, session: LiveSession, seconds: float = GRACE) -> None:
        """Keep the session's holds for a while, so that its agent can reconnect and report them."""
        if session.grace is not None:
            session.grace.cancel()
        session.grace = asyncio.get_running_loop().call_later(seconds, self._grace_over, session)

    def _grace_over(self, session: LiveSession) -> None:
        session.grace = None
        self._log.warning(
            "The agent of session %s did not reconnect; the session's holds end", session.id
        )
        self._core.handle(
            e.HoldsReplaced(
                now=self._core.now(), session=session.id, cuda=session.cuda,
                holds=tuple(
                    hold
                    for hold in self.record(session).holds
                    if hold.id == DEVICE_HOLD or hold.id in session.member_holds
                ),
            )
        )  # fmt: skip

    def agent_gone(self, session: LiveSession) -> None:
        """End the agent's waits, and keep its holds for GRACE seconds, because it may reconnect."""
        session.agent = None
        if session.yielding is not None and not session.yielding[1].done():
            session.yielding[1].set_result((False, None))
        self.drop_waits(session)
        if self.record(session).state != "ended":
            self.start_grace(session)

    def member_gone(self, session: LiveSession, connection: Connection) -> None:
        """End the holds of a member whose connection has ended.

        A member ends its connection when its program ends or needs no GPU now.
        """
        for hold in session.members.pop(connection, ()):
            self.cancel(session, hold)

    def drop_waits(self, session: LiveSession) -> None:
        """End all waits of the session's agent."""
        for hold in set(session.waits) - session.member_holds:
            self.cancel(session, hold)

    def cancel(self, session: LiveSession, hold: str) -> None:
        """Drop a hold. If a ``hold`` request waits for it, refuse the request as ``cancelled``."""
        wait = session.waits.pop(hold, None)
        if wait is not None:
            wait.refuse(RefusedError("The wait was cancelled.", code=Code.CANCELLED))
        self._core.handle(
            e.HoldDropped(now=self._core.now(), session=session.id, hold=hold, cuda=session.cuda)
        )

    def end(self, session: LiveSession, reason: str) -> None:
        """End the session for this reason. Do nothing if it has already ended."""
        if self._core.sessions.find(session.id) is session:
            self._core.handle(
                e.SessionEnded(now=self._core.now(), session=session.id, reason=reason)
            )
