# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Give the pool a client's request about a session, and send the client the pool's answer."""

from __future__ import annotations

import itertools
from typing import Any, Callable

from ...pool import events as e
from ...pool.model import Refusal
from ...protocol import Message
from ..core import Core, refused
from ..sessions import LiveSession
from ..store.records import request_to_json
from ..transport.connection import Connection
from .guard import GuardMessages
from .parsing import note_refusal

#: Types of messages that change a session's request. The answer to such a message has the new
#: request.
_CHANGES = ("request", "prioritise")


class Relay:
    """Passes requests of people and admins to the pool, and passes the pool's answers back."""

    def __init__(self, core: Core, guard: GuardMessages) -> None:
        self._core = core
        self._guard = guard
        self._rids = itertools.count(1)

    def ask(
        self,
        connection: Connection,
        message: Message,
        session: LiveSession,
        event: Callable[[str], e.Event],
        accepted: Callable[[], None] = lambda: None,
    ) -> None:
        """Give the pool a client's request as an event; send the pool's answer to the client.

        ``event`` gets the id of the request in the pool, and returns the event.

        If the pool accepts the request, ``accepted`` runs before the broker commits the journal and
        sends the answer.
        """
        request_id, rid = message.get("id"), f"r{next(self._rids)}"

        def reply(refusal: Refusal | None, note: str) -> None:
            if refusal is not None:
                note_refusal(self._core, session, message["type"], refusal)
                connection.refuse(request_id, refused(refusal))
                return
            accepted()
            answer: dict[str, Any] = {"note": note}
            record = self._core.record(session.id)
            if message["type"] in _CHANGES and record is not None:
                answer["request"] = request_to_json(record.request)
                self._guard.request_changed(session)
            self._core.commit()  # an answer must stay true, even if this broker dies now
            connection.answer(request_id, answer)

        self._core.expect(rid, reply)
        self._core.handle(event(rid))
