# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Messages of a kernel's agent: who it is, its holds, and whether it gives up its lease."""

from __future__ import annotations

import logging
from typing import Sequence

from ... import procfs
from ...errors import Code, ProtocolError, RefusedError
from ...pool import events as e
from ...pool.model import Hold
from ...pool.running import REMEDIES
from ...procfs import ProcessId
from ...protocol import Message
from ..core import Core
from ..lifecycle import Lifecycle
from ..pages.activity import DEVICE_HOLD, Activity
from ..request_fields import MAX_HOLDS
from ..sessions import LiveSession, PendingHold
from ..store.records import request_to_json, slices_to_json
from ..transport.connection import MAX_WAITING, Connection
from .parsing import MAX_NAME, read_hold_kind, read_holds, session_of
from .snapshot import Snapshots


class AgentMessages:
    """Handles the messages of agents; one method per type."""

    def __init__(
        self,
        core: Core,
        lifecycle: Lifecycle,
        activity: Activity,
        snapshots: Snapshots,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._lifecycle = lifecycle
        self._activity = activity
        self._snapshots = snapshots
        self._log = log

    def hello(self, connection: Connection, message: Message) -> None:
        session = self._core.sessions.proven(connection.peer, message)
        if session.process is None:
            # The kernel has sent this message before its server has sent ``launched``. The message
            # waits until the server sends ``launched``.
            session.put_early(connection, message)
            return
        if not _belongs(connection.peer.pid, session.process, bool(message.get("member"))):
            raise RefusedError(
                f"Process {connection.peer.pid} is neither the kernel of this session (process "
                f"{session.process.pid}) nor a child of this kernel.",
                code=Code.NOT_YOURS,
            )
        holds = read_holds(message.get("holds", []), self._core.now())
        if message.get("member"):
            self._join(connection, session, message, holds)
            return
        if session.agent is not None and session.agent is not connection:
            session.disconnect_agent()
            self._lifecycle.drop_waits(session)
        if session.grace is not None:
            session.grace.cancel()
            session.grace = None
        session.connect_agent(connection)
        _note_cuda(session, message.get("cuda"))
        # The agent reports its own holds. Three other kinds of holds must stay: holds for which a
        # request still waits, the hold of the guard, and the holds of members.
        waiting = tuple(
            hold
            for hold in self._lifecycle.record(session).holds
            if hold.id in session.waits or hold.id == DEVICE_HOLD or hold.id in session.member_holds
        )
        self._activity.settle(session)
        self._core.handle(
            e.HoldsReplaced(
                now=self._core.now(), session=session.id, holds=(*waiting, *holds),
                cuda=session.cuda,
            )
        )  # fmt: skip
        self._greet(connection, session, message)
        if session.wanted == self._lifecycle.record(session).epoch:
            connection.send({"type": "wanted"})

    def _join(
        self,
        connection: Connection,
        session: LiveSession,
        message: Message,
        holds: Sequence[Hold],
    ) -> None:
        """Register a member, and take the holds that it had on an earlier connection."""
        taken = {hold.id for hold in holds} & session.member_holds
        if taken:
            raise RefusedError(
                f"Another program of the session already has the hold {min(taken)!r}.",
                code=Code.DUPLICATE,
            )
        session.connect_member(connection, (hold.id for hold in holds))
        _note_cuda(session, message.get("cuda"))
        self._activity.settle(session)
        for hold in holds:
            self._core.handle(
                e.HoldTaken(now=self._core.now(), session=session.id, hold=hold.id, kind=hold.kind)
            )
        self._greet(connection, session, message)

    def _greet(self, connection: Connection, session: LiveSession, message: Message) -> None:
        record = self._lifecycle.record(session)
        connection.answer(
            message.get("id"),
            {
                "session": session.id,
                "state": record.state,
                "epoch": record.epoch,
                "slices": slices_to_json(record.slices),
                "attach": record.attach,
                "request": request_to_json(record.request),
                "pinned_reason": record.pinned_reason,
                "preempted": record.preempted,
                "remedy": REMEDIES.get(record.preempted, ""),
                "limits": self._snapshots.limits(session.owner),
            },
        )

    def hold(self, connection: Connection, message: Message) -> None:
        session = session_of(connection)
        hold, kind = message["hold"], read_hold_kind(message["kind"])
        if not hold or len(hold) > MAX_NAME:
            raise ProtocolError(f"The name of a hold must have 1 to {MAX_NAME} characters.")
        if hold == DEVICE_HOLD:
            raise ProtocolError(f"The hold {hold!r} belongs to the guard.")
        record = self._lifecycle.record(session)
        if len(record.holds) >= MAX_HOLDS:
            raise RefusedError(
                f"A session may have at most {MAX_HOLDS} holds at once.", code=Code.TOO_MANY
            )
        if message.get("wait"):
            if connection.waiting >= MAX_WAITING:
                raise RefusedError(
                    f"A connection may wait for at most {MAX_WAITING} holds at once.",
                    code=Code.TOO_MANY,
                )
            previous = session.waits.get(hold)
            if previous is not None:
                raise RefusedError(
                    f"The session already waits for the hold {hold!r}.", code=Code.DUPLICATE
                )
            connection.begin_wait()
            session.waits[hold] = PendingHold(connection, message.get("id"))
        elif message.get("epoch", record.epoch) != record.epoch:
            # The agent does not know yet that its lease has ended, so send it the present state of
            # the lease. The hold still counts, because the agent has begun a cell.
            self._log.warning(
                "Session %s began a hold in epoch %s, but the present epoch is %d",
                session.id, message.get("epoch"), record.epoch,
            )  # fmt: skip
            self._core.push_lease(session, "epoch")
        session.note_hold(connection, hold)
        self._activity.settle(session)
        self._core.follow_clock()
        self._core.handle(
            e.HoldTaken(now=self._core.now(), session=session.id, hold=hold, kind=kind)
        )

    def drop(self, connection: Connection, message: Message) -> None:
        session = session_of(connection)
        if message["hold"] == DEVICE_HOLD:
            raise ProtocolError(f"The hold {DEVICE_HOLD!r} belongs to the guard.")
        _note_cuda(session, message.get("cuda"))
        session.forget_hold(connection, message["hold"])
        self._core.handle(
            e.HoldDropped(
                now=self._core.now(), session=session.id, hold=message["hold"],
                cuda=message.get("cuda") if session.page is None else session.cuda,
            )
        )  # fmt: skip
        self._activity.cell_over(session)

    def cancel(self, connection: Connection, message: Message) -> None:
        session = session_of(connection)
        if message["hold"] == DEVICE_HOLD:
            raise ProtocolError(f"The hold {DEVICE_HOLD!r} belongs to the guard.")
        session.forget_hold(connection, message["hold"])
        self._lifecycle.cancel(session, message["hold"])
        connection.answer(message.get("id"))

    def yielded(self, connection: Connection, message: Message) -> None:
        session = session_of(connection)
        if session.agent is not connection:
            return  # the broker asks only the agent to yield, never a member
        _note_cuda(session, message.get("cuda"))
        asked = session.yielding
        if asked is not None and asked[0] == message["epoch"] and not asked[1].done():
            asked[1].set_result((message["yielded"], message.get("cuda")))
        elif message["yielded"]:
            # The answer is too late. The broker no longer tries to suspend the session, so the
            # agent keeps its lease.
            self._core.push_lease(session, "too late to yield")

    def resting(self, connection: Connection, _message: Message) -> None:
        session = session_of(connection)
        if session.agent is connection:
            self._activity.resting(session)


def _belongs(pid: int, process: ProcessId, member: bool) -> bool:
    """Return whether process ``pid`` may connect as a part of the session.

    It may connect if it is the session's process or a descendant of that process. A member may also
    be an ancestor of the session's process.
    """
    if procfs.descends(pid, process):
        return True
    parent = procfs.identify(pid) if member else None
    return parent is not None and procfs.descends(process.pid, parent)


def _note_cuda(session: LiveSession, cuda: bool | None) -> None:
    """Store an agent's report whether its process uses CUDA, if the session has no page.

    A page shows the use of CUDA for all processes of the session.
    """
    if cuda is not None and session.page is None:
        session.cuda = cuda
