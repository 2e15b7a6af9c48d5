# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a kernel's agent says: who it is, what it holds, what it gives back."""

from __future__ import annotations

import logging

from ... import procfs
from ...errors import Code, ProtocolError, RefusedError
from ...pool import events as e
from ...protocol import MAX_HOLDS, Message
from ..lives import Lives
from ..pages.activity import DEVICE_HOLD, Activity
from ..runner import Runner
from ..sessions import Session, Wait
from ..store.records import request_to_json, slices_to_json
from ..transport.connection import MAX_WAITING, Connection
from .parsing import MAX_NAME, read_hold_kind, read_holds
from .snapshot import Snapshots


class Agents:
    """Handles the messages of agents; one method per type."""

    def __init__(
        self, runner: Runner, lives: Lives, snapshots: Snapshots, log: logging.Logger
    ) -> None:
        self._runner = runner
        self._lives = lives
        self._snapshots = snapshots
        self._log = log
        #: Set where kernels run under the guard.
        self.activity: Activity | None = None

    def hello(self, connection: Connection, message: Message) -> None:
        session = self._runner.sessions.get(message["session"])
        if not session.token_is(message["token"]):
            raise RefusedError("The token is not this session's.", code=Code.BAD_TOKEN)
        if connection.peer.uid != session.uid:
            raise RefusedError(
                f"The session belongs to user id {session.uid} and you are {connection.peer.uid}.",
                code=Code.NOT_YOURS,
            )
        if session.process is None:
            # A kernel can be faster than the server that started it.
            session.put_early(connection, message)
            return
        if not procfs.descends(connection.peer.pid, session.process):
            raise RefusedError(
                f"Process {connection.peer.pid} is not the kernel {session.process.pid} that the "
                "session was opened for, nor a child of it.",
                code=Code.NOT_YOURS,
            )
        holds = read_holds(message.get("holds", []), self._runner.now())
        if session.agent is not None and session.agent is not connection:
            previous, session.agent = session.agent, None
            previous.session = None
            previous.close()
            self._lives.drop_waits(session)
        if session.grace is not None:
            session.grace.cancel()
            session.grace = None
        session.agent = connection
        connection.session = session
        _note_cuda(session, message.get("cuda"))
        # A hold that waits for its answer is asked for again by the agent; not to be dropped here.
        waiting = tuple(
            hold
            for hold in self._lives.record(session).holds
            if hold.id in session.waits or hold.id == DEVICE_HOLD
        )
        if self.activity is not None:
            self.activity.settle(session)
        self._runner.handle(
            e.HoldsReplaced(
                now=self._runner.now(), session=session.id, holds=(*waiting, *holds),
                cuda=session.cuda,
            )
        )  # fmt: skip
        record = self._lives.record(session)
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
                "limits": self._snapshots.limits(session.owner),
            },
        )
        if session.wanted == record.epoch:
            connection.send({"type": "wanted"})

    def hold(self, connection: Connection, message: Message) -> None:
        session = self.session_of(connection)
        hold, kind = message["hold"], read_hold_kind(message["kind"])
        if not hold or len(hold) > MAX_NAME:
            raise ProtocolError(f"The name of a hold must have 1 to {MAX_NAME} characters.")
        if hold == DEVICE_HOLD:
            raise ProtocolError(f"The hold {hold!r} is the guard's.")
        record = self._lives.record(session)
        if len(record.holds) >= MAX_HOLDS:
            raise RefusedError(f"A session may have {MAX_HOLDS} holds at once.", code=Code.TOO_MANY)
        if message.get("wait"):
            if connection.waiting >= MAX_WAITING:
                raise RefusedError(
                    f"A connection may wait for {MAX_WAITING} holds at once.", code=Code.TOO_MANY
                )
            previous = session.waits.get(hold)
            if previous is not None:
                raise RefusedError(
                    f"The session already waits for the hold {hold!r}.", code=Code.DUPLICATE
                )
            connection.waiting += 1
            session.waits[hold] = Wait(connection, message.get("id"))
        elif message.get("epoch", record.epoch) != record.epoch:
            # The agent believes in a lease that it has no more. It has begun a cell all the same,
            # so the hold counts; but let it know.
            self._log.warning(
                "Session %s took a hold in epoch %s and is in %d",
                session.id, message.get("epoch"), record.epoch,
            )  # fmt: skip
            self._runner.push_lease(session, "epoch")
        if self.activity is not None:
            self.activity.settle(session)
        self._runner.handle(
            e.HoldTaken(now=self._runner.now(), session=session.id, hold=hold, kind=kind)
        )

    def drop(self, connection: Connection, message: Message) -> None:
        session = self.session_of(connection)
        if message["hold"] == DEVICE_HOLD:
            raise ProtocolError(f"The hold {DEVICE_HOLD!r} is the guard's.")
        _note_cuda(session, message.get("cuda"))
        self._runner.handle(
            e.HoldDropped(
                now=self._runner.now(), session=session.id, hold=message["hold"],
                cuda=message.get("cuda") if session.page is None else session.cuda,
            )
        )  # fmt: skip
        if self.activity is not None:
            self.activity.cell_over(session)

    def cancel(self, connection: Connection, message: Message) -> None:
        session = self.session_of(connection)
        if message["hold"] == DEVICE_HOLD:
            raise ProtocolError(f"The hold {DEVICE_HOLD!r} is the guard's.")
        self._lives.cancel(session, message["hold"])
        connection.answer(message.get("id"))

    def yielded(self, connection: Connection, message: Message) -> None:
        session = self.session_of(connection)
        _note_cuda(session, message.get("cuda"))
        asked = session.yielding
        if asked is not None and asked[0] == message["epoch"] and not asked[1].done():
            asked[1].set_result((message["yielded"], message.get("cuda")))
        elif message["yielded"]:
            # Too late: the suspend was given up, and the agent has its lease.
            self._runner.push_lease(session, "too late to yield")

    def resting(self, connection: Connection, _message: Message) -> None:
        session = self.session_of(connection)
        if self.activity is not None:
            self.activity.resting(session)

    def session_of(self, connection: Connection) -> Session:
        if connection.session is None:
            raise RefusedError(
                "Send hello first: this connection has no session.", code=Code.UNKNOWN_SESSION
            )
        return connection.session


def _note_cuda(session: Session, cuda: bool | None) -> None:
    """Believe the agent; but where there is a page it knows of every process, the agent of one."""
    if cuda is not None and session.page is None:
        session.cuda = cuda
