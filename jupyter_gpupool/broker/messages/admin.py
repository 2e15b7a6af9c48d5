# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What an admin may do to any session: recall its slice, change its class, end it.

For each order, the broker checks that the sender is an admin. It writes the order and the admin's
name to the log and to the journal, and tells the session's owner about the order.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, Callable

from ...errors import Code, RefusedError
from ...pool import events as e
from ...protocol import Message
from ...units import format_seconds
from ..configuration import Configuration
from ..core import Core
from ..lifecycle import Lifecycle
from ..sessions import LiveSession
from ..transport.auth import owner_of
from ..transport.connection import Connection
from .relay import Relay

#: The most characters of a reason.
MAX_REASON = 200

#: A ``recall`` may take a slice back after at most this many minutes: one week.
MAX_MINUTES = 7 * 24 * 60


class AdminMessages:
    """Handles ``recall``, ``prioritise`` and ``end``."""

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        *,
        lifecycle: Lifecycle,
        relay: Relay,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._lifecycle = lifecycle
        self._relay = relay
        self._log = log

    def recall(self, connection: Connection, message: Message) -> None:
        """Make the pool take a slice back after some minutes, or cancel an earlier ``recall``."""
        session, by, why = self._order(connection, message)
        minutes, now = read_minutes(message), self._core.now()
        if minutes is None:
            told = (
                f"The administrator {by} has cancelled the order to take back this kernel's slice."
            )
            what, at = "recall dropped", None
        else:
            left = format_seconds(60 * minutes)
            told = (
                f"The administrator {by} takes the slice of this kernel back in {left}{why}. "
                "Nothing is lost: the kernel's state moves to host memory, and a running cell "
                "waits until the kernel has a slice again."
            )
            what, at = f"recall in {left}", now + 60 * minutes
        reason = f"the administrator {by} took the slice back{why}"
        self._ask(
            connection, message, session, by=by, what=what, told=told,
            event=lambda rid: e.RecallAsked(
                now=now, session=session.id, at=at, reason=reason, rid=rid
            ),
            detail={"minutes": minutes, "at": at},
        )  # fmt: skip

    def prioritise(self, connection: Connection, message: Message) -> None:
        """Give a session another priority class."""
        session, by, why = self._order(connection, message)
        request = self._lifecycle.record(session).request
        priority = message["priority"]
        self._ask(
            connection, message, session, by=by,
            what=f"priority {priority} instead of {request.priority}",
            told=f"The administrator {by} has moved this kernel to the priority class "
            f"{priority}{why}.",
            event=lambda rid: e.RequestChanged(
                now=self._core.now(), session=session.id, rid=rid,
                request=replace(request, priority=priority),
            ),
            detail={"priority": priority, "before": request.priority},
        )  # fmt: skip

    def end(self, connection: Connection, message: Message) -> None:
        """End a session: its process ends, so its slice becomes free."""
        session, by, why = self._order(connection, message)
        text = f"The administrator {by} has ended this kernel{why}."
        self._ask(
            connection, message, session, by=by, what="end", told=text,
            event=lambda rid: e.EndAsked(
                now=self._core.now(), session=session.id, reason=text, rid=rid
            ),
            detail={},
        )  # fmt: skip

    def _order(self, connection: Connection, message: Message) -> tuple[LiveSession, str, str]:
        """Return the session, the admin's name and the reason; refuse a sender who is no admin.

        The reason is text for the end of a sentence: ``: REASON``, or "" without a reason.
        """
        peer = connection.peer
        if not self._configuration.access.is_admin(peer):
            raise RefusedError(
                "Only an admin of this pool may give orders about a session.",
                code=Code.NOT_ALLOWED,
                next_step="Ask root, or one of c.GPUPool.admins.",
            )
        reason = " ".join(str(message.get("reason") or "").split())[:MAX_REASON].rstrip(".")
        session = self._core.sessions.get(message["session"])
        return session, owner_of(peer.uid).name, f": {reason}" if reason else ""

    def _ask(
        self,
        connection: Connection,
        message: Message,
        session: LiveSession,
        *,
        by: str,
        what: str,
        told: str,
        event: Callable[[str], e.Event],
        detail: dict[str, Any],
    ) -> None:
        """Give the pool an admin's order; log it and tell the owner if the pool accepts it."""

        def accepted() -> None:
            self._log.warning("Admin %s, session %s: %s", by, session.id, what)
            self._core.note(
                "admin", session, reason=told,
                detail={"by": by, "order": message["type"], **detail},
            )  # fmt: skip
            if message["type"] != "end":  # the message that ends the session has the same text
                session.send({"type": "notice", "message": told})

        self._relay.ask(connection, message, session, event, accepted)


def read_minutes(message: Message) -> float | None:
    """Return the minutes of a ``recall``; None if it cancels an earlier recall.

    This function refuses a message with neither minutes nor ``cancel``, because such a message must
    not take a slice back.
    """
    minutes, cancel = message.get("minutes"), bool(message.get("cancel"))
    if cancel and minutes is None:
        return None
    step = f"Send a number of minutes above 0, and at most {MAX_MINUTES} (7 days)."
    if cancel or minutes is None:
        text = "A recall needs either a number of minutes or 'cancel', not both." if cancel else ""
        raise RefusedError(
            text or "A recall needs the number of minutes until the slice goes back.",
            code=Code.BAD_REQUEST,
            next_step=step,
        )
    if not 0 < minutes <= MAX_MINUTES:
        raise RefusedError(
            f"A slice cannot be taken back in {minutes:g} minutes.",
            code=Code.BAD_REQUEST,
            next_step=step,
        )
    return float(minutes)
