# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Read the request in a message; check that the sender may act on the named session."""

from __future__ import annotations

from typing import Any, Mapping, cast, get_args

from ...errors import Code, ProtocolError, RefusedError
from ...pool.limits import changed_request
from ...pool.model import Hold, HoldKind, Refusal, Request
from ...protocol import Message
from ..core import Core
from ..request_fields import MAX_HOLDS
from ..sessions import LiveSession
from ..transport.auth import Access
from ..transport.connection import Connection

#: The most characters of a name that a client chooses.
MAX_NAME = 200

_HOLD_KINDS = frozenset(get_args(HoldKind))


def read_request(base: Request, fields: Mapping[str, Any]) -> Request:
    """Return ``base`` with the changes in ``fields``.

    Raises
    ------
    RefusedError
        If a field has a wrong value (code ``bad-request``). The pool decides later whether it can
        grant the request.
    """
    wanted: dict[str, Any] = {}
    for name in ("memory", "limit", "devices", "compute"):
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 1 << 60:
            raise RefusedError(
                f"The request has {name} = {value!r}; it must be a whole number above 0 and below "
                "2^60.",
                code=Code.BAD_REQUEST,
            )
        wanted[name] = value
    priority = fields.get("priority")
    if priority is not None:
        if not isinstance(priority, str):
            raise RefusedError("A priority class must be a name.", code=Code.BAD_REQUEST)
        wanted["priority"] = priority
    return changed_request(base, wanted)


def named(fields: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the fields that have a value."""
    return frozenset(name for name, value in fields.items() if value is not None)


def read_hold_kind(kind: str) -> HoldKind:
    """Return ``kind`` if it is a kind of hold; raise :class:`ProtocolError` otherwise."""
    if kind not in _HOLD_KINDS:
        raise ProtocolError(f"There is no kind of hold {kind[:40]!r}.")
    return cast(HoldKind, kind)


def read_holds(given: list[Any], now: float) -> tuple[Hold, ...]:
    """Return the holds that an agent reports."""
    holds = []
    for entry in given[:MAX_HOLDS]:
        name = entry.get("id", entry.get("hold")) if isinstance(entry, dict) else entry
        kind = entry.get("kind", "cell") if isinstance(entry, dict) else "cell"
        if not isinstance(name, str) or not name or not isinstance(kind, str):
            raise ProtocolError("A hold in 'holds' must be an object with 'id' and 'kind'.")
        holds.append(Hold(name[:MAX_NAME], read_hold_kind(kind), now))
    return tuple(holds)


def session_of(connection: Connection) -> LiveSession:
    """Return the session of the agent at the other end of a connection; refuse any other peer."""
    if connection.session is None:
        raise RefusedError(
            "Send hello first: this connection has no session.", code=Code.UNKNOWN_SESSION
        )
    return connection.session


def acting(core: Core, access: Access, connection: Connection, message: Message) -> LiveSession:
    """Return the session of a message; refuse a sender that may not act on the session."""
    name = message.get("session")
    session = session_of(connection) if name is None else core.sessions.get(name)
    check_may_act(access, connection, session)
    return session


def check_may_act(access: Access, connection: Connection, session: LiveSession) -> None:
    """Refuse a peer that may not act on a session."""
    if not access.may_act(connection.peer, session.uid):
        raise RefusedError(
            f"Session {session.id} belongs to another user.",
            code=Code.NOT_ALLOWED,
            next_step="Ask its owner or an admin.",
        )


def note_refusal(
    core: Core, session: LiveSession | None, what: str, refusal: Refusal, owner: str = ""
) -> None:
    """Write a refusal to the journal."""
    detail = {"what": what, "code": refusal.code}
    core.note("refuse", session, owner=owner, reason=refusal.message, detail=detail)
