# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What people ask of a session: another size, release, keep. The pool says whether it can be."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import Any, Awaitable, Callable

from ...errors import Code, GPUPoolError, RefusedError
from ...pool import events as e
from ...pool.model import Refusal
from ...protocol import Message
from ..lives import Lives
from ..runner import Runner, refused
from ..sessions import Session
from ..store.records import request_to_json
from ..transport.connection import Connection
from .parsing import read_request

#: Seconds for which a slice may be kept idle at a time: 30 days.
MAX_KEEP = 30 * 86400

#: Requests that may wait for a sample at once; more are judged by the last one.
MAX_LOOKS = 16


class Wishes:
    """Handles ``request``, ``release`` and ``keep``.

    ``acting`` returns the session that a message is about, if its sender may act on it.
    """

    def __init__(
        self, runner: Runner, lives: Lives, acting: Callable[[Connection, Message], Session]
    ) -> None:
        self._runner = runner
        self._lives = lives
        self._acting = acting
        self._rids = itertools.count(1)
        self._looks: set[asyncio.Task[None]] = set()
        #: Takes a sample of the devices now and tells the pool.
        self.look: Callable[[], Awaitable[None]] = _blind
        #: Called when a session asks for something else than before.
        self.on_request: Callable[[Session], None] = lambda _session: None

    def request(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        record = self._lives.record(session)
        memory = read_request(record.request, message).memory
        # What the guard counts is exact, and older by up to a sample.
        guarded = session.page is not None and any(memory < s.bytes for s in record.slices)
        shrinks = memory < record.footprint or guarded
        if not shrinks or len(self._looks) >= MAX_LOOKS:
            self._request_now(connection, message)
            return
        # Less than it was seen to use: that was a while ago, and it may have freed some since.
        task = asyncio.get_running_loop().create_task(self._look_first(connection, message))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look_first(self, connection: Connection, message: Message) -> None:
        with suppress(GPUPoolError):
            await self.look()
        if connection.open:
            connection.attempt(message, self._request_now)

    def _request_now(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        request = read_request(self._lives.record(session).request, message)
        self._ask(
            connection,
            message,
            session,
            lambda rid: e.RequestChanged(
                now=self._runner.now(), session=session.id, request=request, rid=rid
            ),
        )

    def release(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        self._ask(
            connection,
            message,
            session,
            lambda rid: e.ReleaseAsked(now=self._runner.now(), session=session.id, rid=rid),
        )

    def keep(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        seconds = float(message["seconds"])
        if not 0 <= seconds <= MAX_KEEP:
            raise RefusedError(
                f"A slice cannot be kept for {seconds:g} seconds.",
                code=Code.BAD_REQUEST,
                next_step=f"Ask for at most {MAX_KEEP} (30 days).",
            )
        until = self._runner.now() + seconds
        self._ask(
            connection,
            message,
            session,
            lambda rid: e.KeepAsked(
                now=self._runner.now(), session=session.id, until=until, rid=rid
            ),
        )

    def _ask(
        self,
        connection: Connection,
        message: Message,
        session: Session,
        event: Callable[[str], e.Event],
    ) -> None:
        """Hand an event to the pool and answer with what it answers."""
        request_id, rid = message.get("id"), f"r{next(self._rids)}"

        def reply(refusal: Refusal | None, note: str) -> None:
            if refusal is not None:
                note_refusal(self._runner, session, message["type"], refusal)
                connection.refuse(request_id, refused(refusal))
                return
            answer: dict[str, Any] = {"note": note}
            record = self._runner.record(session.id)
            if message["type"] == "request" and record is not None:
                answer["request"] = request_to_json(record.request)
                self.on_request(session)
            connection.answer(request_id, answer)

        self._runner.expect(rid, reply)
        self._runner.handle(event(rid))


def note_refusal(
    runner: Runner, session: Session | None, what: str, refusal: Refusal, owner: str = ""
) -> None:
    """Note in the journal that something was refused."""
    detail = {"what": what, "code": refusal.code}
    runner.note("refuse", session, owner=owner, reason=refusal.message, detail=detail)


async def _blind() -> None:
    """Until there is a monitor."""
