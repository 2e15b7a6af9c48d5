# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's wire protocol: one JSON object per line, both ways. No sockets here.

A *request* has ``v``, ``type`` and the fields below; with an ``id`` (a positive integer, unique on
its connection) it gets exactly one ``ok`` or ``error`` with the same ``id``, at once or after a
wait. Without an ``id`` it gets no answer. A *push* is a message of the broker without a request.
Unknown fields are dropped, so that either side may be newer. Unknown types, wrong field types and
values outside the ranges below are errors, and so are ``NaN``, ``Infinity`` and numbers of more
than 19 digits. Sizes are bytes, times seconds.

``status``, ``journal``, ``watch`` and ``ping`` are *reads*, all others are *acts*. Each has a
price, and each user (by user id, over all connections) has one budget for reads and another for
acts. The broker delays requests beyond the budget; it refuses a read that waited for 2 s with the
code ``busy`` and the seconds until a retry in ``details.retry_after``. It never refuses acts for
that reason. Acts of one connection are handled in their order; they may overtake one read.

===========  =====================================================================================
``ok``       ``id`` and the fields of the answer
``error``    ``id``, ``code``, ``message``, ``next_step``, ``details``
``queue``    push to a waiting agent: ``position``, ``length``, ``eta`` (or null), ``reason``
``lease``    push to an agent: ``state``, ``epoch``, ``slices``, ``reason``, ``pinned_reason``,
             ``preempted`` (why it lost its slice in the middle of its work, or "")
``yield``    push to an agent: ``epoch``; the broker wants the slice, answer with ``yielded``
``wanted``   push to an agent: another kernel waits for its slice; until the lease is over, send
             ``resting`` whenever no cell runs (now, or at the end of the last one that does)
``lost``     push to an agent: ``message``; the driver lost this session's device state
``notice``   push to an agent: ``message``; a sentence for the user, shown in the notebook
``refused``  push to an agent: ``what`` (``attach`` or ``grow``), ``code``, ``message``,
             ``next_step``; a CUDA call of its processes was refused by the pool
``event``    push to a watcher: a row of the journal as it happens
===========  =====================================================================================

Why ``yield``/``yielded``: a cell on an attached session must not pay for a round trip. The agent
owns its lease until it agrees to give it up, so it may start a cell with one ``hold`` that has no
answer (``wait`` false). If it sent a ``hold`` before it read the ``yield``, its answer is
``false``. It may send a ``hold`` up to 50 ms late, and one ``hold`` and ``drop`` for all cells that
have ended by then; but always before a ``yielded`` or any other request.

A session has one agent and any number of *members*: its programs, and ``jupyter gpupool run``,
which started its process. A member takes each hold with ``wait`` true and goes on when it is
granted, so that the broker need not ask it for a ``yield``; it gets the pushes ``queue``,
``lease``, ``lost``, ``notice`` and ``refused`` as the agent does. Its holds end with its
connection.

``attach`` and ``grow`` come from the guard, without a ``hello``, each on a connection of its own
and only if a call must wait by the session's shared page. The broker writes the grant to the page
before it sends the ``ok``. Closing the connection ends the wait.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol

from .errors import Code, GPUPoolError, ProtocolError, RefusedError

# ---------------------------------------------------------------------- fields of a request
# Every value that a client sends passes through one of these types, so the code behind the decoder
# gets no unexpected number, text or nesting.


class OutOfRange(ValueError):
    """A number of the right type outside the allowed range."""


class Field(Protocol):
    """The values that a field accepts; ``about`` describes them in words."""

    @property
    def about(self) -> str: ...

    def read(self, value: Any) -> Any:
        """Return the value to use; raise ``ValueError`` with the error."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of at most ``most`` characters; half a surrogate pair becomes a question mark."""

    most: int = 200
    null: bool = False

    @property
    def about(self) -> str:
        return "text or null" if self.null else "text"

    def read(self, value: Any) -> Any:
        if value is None and self.null:
            return None
        if not isinstance(value, str):
            raise ValueError("has the wrong type")
        if len(value) > self.most:
            raise ValueError(f"has {len(value)} characters; at most {self.most} are allowed")
        return value if value.isascii() else value.encode("utf-8", "replace").decode()


@dataclass(frozen=True, slots=True)
class Whole:
    """A whole number; by default any number of 64 bits."""

    least: int = -(1 << 63)
    most: int = (1 << 63) - 1
    null: bool = False

    @property
    def about(self) -> str:
        return "whole number or null" if self.null else "whole number"

    def read(self, value: Any) -> Any:
        if value is None and self.null:
            return None
        if type(value) is not int:
            raise ValueError("has the wrong type")
        if not self.least <= value <= self.most:
            raise OutOfRange(f"must be from {self.least} to {self.most}")
        return value


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, whole or not."""

    @property
    def about(self) -> str:
        return "number"

    def read(self, value: Any) -> Any:
        if type(value) not in (int, float):
            raise ValueError("has the wrong type")
        if isinstance(value, float) and not math.isfinite(value):
            raise OutOfRange("must be a finite number")
        if abs(value) >= 1 << 63:
            raise OutOfRange("is too large")
        return value


@dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    null: bool = False

    @property
    def about(self) -> str:
        return "true or false or null" if self.null else "true or false"

    def read(self, value: Any) -> Any:
        if not (isinstance(value, bool) or (value is None and self.null)):
            raise ValueError("has the wrong type")
        return value


@dataclass(frozen=True, slots=True)
class Scalar:
    """Text, a number, true, false or null; the code that uses it checks it."""

    @property
    def about(self) -> str:
        return "text, number or null"

    def read(self, value: Any) -> Any:
        if isinstance(value, str):
            return Text().read(value)
        if value is None or isinstance(value, bool):
            return value
        return Number().read(value)


@dataclass(frozen=True, slots=True)
class Object:
    """An object; only the fields named here are kept."""

    fields: Mapping[str, Field]

    @property
    def about(self) -> str:
        return "object"

    def read(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("has the wrong type")
        found = {}
        for name, kind in self.fields.items():
            if name in value:
                try:
                    found[name] = kind.read(value[name])
                except ValueError as error:
                    raise ValueError(f"has a field {name!r} that {error}") from None
        return found


@dataclass(frozen=True, slots=True)
class Items:
    """A list of at most ``most`` values of one type."""

    of: Field
    most: int

    @property
    def about(self) -> str:
        return "list"

    def read(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise ValueError("has the wrong type")
        if len(value) > self.most:
            raise ValueError(f"has {len(value)} entries; at most {self.most} are allowed")
        try:
            return [self.of.read(entry) for entry in value]
        except ValueError as error:
            raise ValueError(f"has an entry that {error}") from None


@dataclass(frozen=True, slots=True)
class HoldName:
    """A hold of an agent: its name, or an object with ``id`` and ``kind``."""

    about: str = "hold"
    inner: Object = field(
        default_factory=lambda: Object({"id": Text(), "hold": Text(), "kind": Text()})
    )

    def read(self, value: Any) -> Any:
        return Text().read(value) if isinstance(value, str) else self.inner.read(value)


# ---------------------------------------------------------------------- the messages

VERSION = 1

#: Most bytes of a line from the broker, with its newline. A longer line closes the connection.
MAX_LINE = 1 << 24

#: Most bytes of a request, with its newline: a ``hello`` with a thousand holds fits.
MAX_REQUEST = 1 << 18

#: Characters of a number in a request.
MAX_DIGITS = 20

Message = dict[str, Any]

#: A client's text for people; the broker shortens it.
_WORDS = Text(4096)
_PROCESS = Whole(-(1 << 32), 1 << 32)
_COUNT = Whole(0)
_REQUEST = Object(dict.fromkeys(("memory", "limit", "devices", "compute", "priority"), Scalar()))

#: Most holds of a session: cells cannot nest this deep.
MAX_HOLDS = 1000

#: type -> (required fields, optional fields), each with the values that it accepts.
REQUESTS: Mapping[str, tuple[Mapping[str, Field], Mapping[str, Field]]] = {
    # ---- a provisioner, about a kernel
    # request: {memory?, limit?, devices?, compute?, priority?}, sizes in bytes; group: one of the
    # user's groups, instead of the first.
    # ok: session, token, attach, request, group, env (variables for the kernel's process), config
    # (the options in force that do not have their default, and their origins), pid, broker, retire
    # (true where a kernel must be retired before it is killed). guarded: false for a process that
    # has loaded the driver already, so that the guard comes too late
    "open": (
        {"kernel_id": _WORDS},
        {
            "label": _WORDS,
            "request": _REQUEST,
            "attach": Text(null=True),
            "group": Text(null=True),
            "guarded": Flag(),
        },
    ),
    # pid of the process just started for the session. ok: -
    "launched": ({"session": Text(), "pid": _PROCESS}, {}),
    # make it safe to kill the kernel now, where ``open`` answered ``retire``. ok: safe
    "retire": ({"session": Text()}, {}),
    # the kernel has ended or was never started; idempotent. ok: -
    "close": ({"session": Text()}, {"reason": _WORDS}),
    # ---- the agent inside the kernel process (identified by SO_PEERCRED and the token)
    # after a reconnect: the agent's own epoch and holds. member: this is not the agent but another
    # program of the session, or the one that started it (see above).
    # ok: session, state, epoch, slices, attach, request, limits
    "hello": (
        {"session": Text(), "token": Text(500)},
        {
            "epoch": _COUNT,
            "holds": Items(HoldName(), MAX_HOLDS),
            "cuda": Flag(null=True),
            "member": Flag(),
        },
    ),
    # kind: cell | comm | manual. With wait: answered when granted or refused:
    # ok: epoch, slices. Without: no id, no answer; only legal while the agent has its lease.
    "hold": ({"hold": Text(), "kind": Text()}, {"epoch": _COUNT, "wait": Flag()}),
    # cuda: has this process called cuInit? (null: cannot tell). No answer.
    "drop": ({"hold": Text()}, {"cuda": Flag(null=True)}),
    # stop waiting for a hold. Ends that ``hold`` request with error code "cancelled". ok: -
    "cancel": ({"hold": Text()}, {}),
    # ---- the guard in any process of a session (identified by SO_PEERCRED and the token)
    # a thread waits at the gate. ok, once the gate is open: epoch
    "attach": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # the process calls cuInit without a lease: set the page's devices to those of the lease that
    # the session would get now. ok, even if there are none: -
    "home": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # the session's page was deleted: put it back. ok, once it is there: -
    "page": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # its first context, and it saw another device at cuInit than that of the slice. step: begin
    # (ok: there is room for a context where it is) | move (ok: it sees the slice now) | cancel
    "land": (
        {"session": Text(), "token": Text(500), "step": Text()},
        {"pid": _PROCESS, "tid": _PROCESS},
    ),
    # ``bytes`` more than is granted on the session's device number ``device``. ok: granted
    "grow": (
        {"session": Text(), "token": Text(500), "device": _COUNT, "bytes": _COUNT},
        {"pid": _PROCESS, "tid": _PROCESS},
    ),
    # ---- its agent again
    # answer to a yield: did the agent give up the lease of this epoch? No answer.
    "yielded": ({"epoch": _COUNT, "yielded": Flag()}, {"cuda": Flag(null=True)}),
    # after ``wanted``: no cell, and no widget callback, runs in the kernel. No answer.
    "resting": ({}, {}),
    # ---- any client that may act on the session (its agent may leave ``session`` out)
    # ok: request (as it is now), note
    "request": (
        {},
        {
            "session": Text(),
            "memory": Whole(null=True),
            "limit": Whole(null=True),
            "devices": Whole(null=True),
            "compute": Whole(null=True),
            "priority": Text(null=True),
        },
    ),
    # ok: note
    "release": ({}, {"session": Text()}),
    # keep the slice for this many seconds although idle. ok: note
    "keep": ({"seconds": Number()}, {"session": Text()}),
    # ---- an admin
    # action: pause | drain | resume | retest; device: number or UUID (none: the whole pool).
    # ok: note, once it has begun (pause, drain: see ``status``) or is done (resume, retest)
    "maintain": ({"action": Text()}, {"device": Text(null=True), "reason": _WORDS}),
    # ---- any client
    # ok: the snapshot described in ``broker/messages/snapshot.py``
    "status": ({}, {}),
    # why the session waits, or may lose its slice. ok: see ``broker/messages/explanation.py``
    "why": ({}, {"session": Text()}),
    # ok: rows, oldest first, with ``seq`` above ``after``, at most ``limit`` and 1,000;
    # more: whether there are further ones; seq of the newest row of all
    "journal": ({}, {"after": Whole(), "limit": Whole(), "session": Text()}),
    # from now on push ``event``. ok: seq of the newest row
    "watch": ({}, {}),
    # ok: -
    "ping": ({}, {}),
}

#: Requests that change nothing and can be repeated.
READS = frozenset({"status", "why", "journal", "watch", "ping"})


def encode(message: Mapping[str, Any]) -> bytes:
    """Return ``message`` as one line of UTF-8, newline included."""
    return json.dumps({"v": VERSION, **message}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the object on ``line``.

    Raises
    ------
    ProtocolError
        If the line is too long, not JSON, not an object, of another version, or has no type.
    """
    if len(line) > MAX_LINE:
        raise ProtocolError(f"A message has {len(line)} bytes; at most {MAX_LINE} are allowed.")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A message is not JSON: {error}.") from None
    return _checked(message)


def _checked(message: Any) -> Message:
    """Return ``message`` if it is an object of this version with a type."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("A message must be a JSON object with a text field 'type'.")
    version = message.get("v")
    if version != VERSION:
        raise ProtocolError(
            f"The message has protocol version {str(version)[:40]}; this side speaks {VERSION}.",
            code=Code.VERSION,
            next_step="Use the same version of jupyter_gpupool for the server and the kernel.",
        )
    return message


def _whole(text: str) -> float:
    # A number with too many digits becomes a value that no field accepts. Unlike an error of the
    # decoder, that refusal can name the request's id.
    return int(text) if len(text) <= MAX_DIGITS else math.inf


_STRICT = json.JSONDecoder(parse_int=_whole)


def decode_request(line: bytes) -> Message:
    """Return the request on ``line``, with the declared fields and no others.

    Raises
    ------
    ProtocolError
        If it is no request; ``details["id"]`` is its id if it has one.
    """
    if len(line) > MAX_REQUEST:
        raise ProtocolError(f"A request has {len(line)} bytes; at most {MAX_REQUEST} are allowed.")
    try:
        message = _STRICT.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A message is not JSON: {str(error)[:200]}.") from None
    return check_request(_checked(message))


def check_request(message: Message) -> Message:
    """Return ``message`` with its declared fields only, if it is a well-formed request.

    Raises
    ------
    ProtocolError
        Naming the field that is missing or wrong; ``details["id"]`` is its id if it has one.
    """
    request_id = message.get("id")
    if request_id is not None and (type(request_id) is not int or not 0 < request_id < 1 << 63):
        raise ProtocolError("The field 'id' must be a positive whole number.")
    about = {} if request_id is None else {"id": request_id}
    kind = message["type"]
    if kind not in REQUESTS:
        raise ProtocolError(
            f"There is no message type {kind[:40]!r}.", code=Code.UNKNOWN_TYPE, details=about
        )
    found: Message = {"type": kind, **about}
    required, optional = REQUESTS[kind]
    for name, accepted in (*required.items(), *optional.items()):
        if name not in message:
            if name in required:
                raise ProtocolError(f"A {kind!r} message needs the field {name!r}.", details=about)
            continue
        try:
            found[name] = accepted.read(message[name])
        except ValueError as error:
            raise ProtocolError(
                f"The field {name!r} of a {kind!r} message {error}.",
                code=Code.BAD_REQUEST if isinstance(error, OutOfRange) else None,
                details=about,
            ) from None
    return found


def error_message(error: GPUPoolError, request_id: int | None) -> Message:
    """Return the ``error`` message for ``error``."""
    return {
        "type": "error",
        "id": request_id,
        "code": error.code,
        "message": error.message,
        "next_step": error.next_step,
        "details": error.details,
    }


def raise_for(message: Message) -> Message:
    """Return an ``ok`` message; raise an ``error`` message as :class:`RefusedError`."""
    if message["type"] != "error":
        return message
    raise RefusedError(
        str(message.get("message", "refused")),
        code=Code.of(message.get("code"), Code.REFUSED),
        next_step=str(message.get("next_step", "")),
        details=message.get("details") or {},
    )
