# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The requests that the broker accepts: the fields of each, and the values of each field.

The types below check every value that a client sends. So the rest of the broker gets no unexpected
number, text or nesting. Kernels do not import this module, because the import would delay the start
of each kernel.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Mapping, Protocol

from ..errors import Code, ProtocolError
from ..protocol import MAX_REQUEST, Message, checked

#: The most characters of a number in a request.
MAX_DIGITS = 20

# ---------------------------------------------------------------------- fields


class OutOfRange(ValueError):
    """Raised for a number that has the right type but is outside the allowed range."""


class Field(Protocol):
    """The values that a field accepts; ``about`` describes them in words."""

    @property
    def about(self) -> str: ...

    def read(self, value: Any) -> Any:
        """Return the value to use; raise ``ValueError`` with a reason if the value is refused."""


@dataclass(frozen=True, slots=True)
class Text:
    """Text of at most ``most`` characters; an unpaired surrogate becomes a question mark.

    If ``plain`` is true, the text may contain only printable ASCII characters. JSON writes each of
    them with at most two characters.
    """

    most: int = 200
    null: bool = False
    plain: bool = False

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
        if self.plain and not (value.isascii() and value.isprintable()):
            raise ValueError("has characters that are not printable ASCII")
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
    """Text, a number, true, false or null. The code that uses the value checks it."""

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
    """A hold of an agent: the name of the hold, or an object with ``id`` and ``kind``."""

    about: str = "hold"
    inner: Object = field(
        default_factory=lambda: Object({"id": Text(), "hold": Text(), "kind": Text()})
    )

    def read(self, value: Any) -> Any:
        return Text().read(value) if isinstance(value, str) else self.inner.read(value)


# ---------------------------------------------------------------------- the requests

#: A client's text for people; the broker shortens it.
_WORDS = Text(4096)

#: Texts that agents carry from one broker to another. The limits are small enough for this: an
#: agent encodes the text again, and the encoded text must not exceed MAX_REQUEST.
CREDENTIAL, RESULT = Text(1 << 16, plain=True), Text(1 << 17, plain=True)
_PROCESS = Whole(-(1 << 32), 1 << 32)
_COUNT = Whole(0)
_REQUEST = Object(dict.fromkeys(("memory", "limit", "devices", "compute", "priority"), Scalar()))

#: The most holds of a session. Cells never nest so deep that a session needs more.
MAX_HOLDS = 1000

#: By type of request: the required fields and the optional fields, with the values that each field
#: accepts. The comment before an entry says what the request means, and lists after "ok:" the
#: fields of the answer ("-": no fields).
REQUESTS: Mapping[str, tuple[Mapping[str, Field], Mapping[str, Field]]] = {
    # ---- a provisioner, about a kernel
    # request: {memory?, limit?, devices?, compute?, priority?}, sizes in bytes. group: one of the
    # user's groups, if it is not the first group. guarded: false if the process has already loaded
    # the driver, because such a process can no longer load the guard. model, data: the GPU model
    # and the folders that the kernel needs; only if the cluster chose this machine by them.
    # ok: session, token, attach, request, group, env (variables for the kernel's process), config
    # (the options in force that differ from their defaults, and their origins), pid, broker, retire
    # (true if a kernel must be retired before it is killed)
    "open": (
        {"kernel_id": _WORDS},
        {
            "label": _WORDS,
            "request": _REQUEST,
            "attach": Text(null=True),
            "group": Text(null=True),
            "guarded": Flag(),
            "model": Text(),
            "data": Items(Text(4096), 17),
        },
    ),
    # pid: the process that the server has just started for the session. ok: -
    "launched": ({"session": Text(), "pid": _PROCESS}, {}),
    # make the kernel safe to kill, because the server is about to kill it. The server sends this
    # only if ``retire`` was true in the answer to ``open``. ok: safe (whether the kernel is safe to
    # kill)
    "retire": ({"session": Text()}, {}),
    # end the session, because its kernel has ended or was never started. The message may be
    # repeated. ok: -
    "close": ({"session": Text()}, {"reason": _WORDS}),
    # ---- the agent inside the kernel process (SO_PEERCRED and the token identify it)
    # epoch, holds: after a reconnect, the epoch and the holds that the agent knows. member: false
    # for the agent; true for another program of the session, or for the program that started the
    # session.
    # ok: session, state, epoch, slices, attach, request, pinned_reason, preempted, remedy, limits
    "hello": (
        {"session": Text(), "token": Text(500)},
        {
            "epoch": _COUNT,
            "holds": Items(HoldName(), MAX_HOLDS),
            "cuda": Flag(null=True),
            "member": Flag(),
        },
    ),
    # kind: cell | comm | manual. With ``wait``, the broker answers when it grants or refuses the
    # hold. ok: epoch, slices. Without ``wait``, the message has no id and gets no ``ok``. An agent
    # may leave ``wait`` out only while it has its lease.
    "hold": ({"hold": Text(), "kind": Text()}, {"epoch": _COUNT, "wait": Flag()}),
    # cuda: whether this process has called cuInit (null: the agent cannot tell). No ``ok``.
    "drop": ({"hold": Text()}, {"cuda": Flag(null=True)}),
    # stop waiting for a hold. The broker refuses the ``hold`` request that waits, with error code
    # "cancelled". ok: -
    "cancel": ({"hold": Text()}, {}),
    # ---- the guard in any process of a session (SO_PEERCRED and the token identify it)
    # a thread waits at the gate. ok, when the gate opens: epoch
    "attach": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # the process is about to call cuInit, but has no lease. The broker writes into the page the
    # devices that a lease would have now. It also does so if no device is free for a lease. ok: -
    "home": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # the process cannot open the session's page: restore the page if it was deleted. ok, with a
    # descriptor of the page: -
    "page": ({"session": Text(), "token": Text(500)}, {"pid": _PROCESS, "tid": _PROCESS}),
    # the process is about to make its first context, but its slice is not on the device that it saw
    # at cuInit. step: begin (ok: the device that the process sees has room for a context) | move
    # (ok: the process now sees the device of its slice) | stay (ok: the session has given the slice
    # back) | cancel
    "land": (
        {"session": Text(), "token": Text(500), "step": Text()},
        {"pid": _PROCESS, "tid": _PROCESS},
    ),
    # enlarge the session's grant by ``bytes`` on the session's device number ``device``. ok:
    # granted (the bytes of the new grant)
    "grow": (
        {"session": Text(), "token": Text(500), "device": _COUNT, "bytes": _COUNT},
        {"pid": _PROCESS, "tid": _PROCESS},
    ),
    # ---- its agent again
    # the agent's answer to the broker's message ``yield``. yielded: whether the agent gives up the
    # lease of this epoch. No ``ok``.
    "yielded": ({"epoch": _COUNT, "yielded": Flag()}, {"cuda": Flag(null=True)}),
    # no cell and no widget callback runs in the kernel now. The agent sends this after the broker's
    # message ``wanted``. No ``ok``.
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
    # let the kernel keep its slice for this many seconds, even while it is idle. ok: note
    "keep": ({"seconds": Number()}, {"session": Text()}),
    # ---- an admin
    # action: pause | drain | resume | retest. device: number or UUID; without it, the whole pool.
    # The answer to pause and drain comes when they have begun; ``status`` shows when they are done.
    # The answer to resume and retest comes when they are done. ok: note
    "maintain": ({"action": Text()}, {"device": Text(null=True), "reason": _WORDS}),
    # take the session's slice back after ``minutes`` minutes, even if the slice is in use. With
    # ``cancel`` instead of ``minutes``, cancel an earlier recall. ok: note
    "recall": ({"session": Text()}, {"minutes": Number(), "cancel": Flag(), "reason": _WORDS}),
    # give the session another priority class. ok: request (as it is now), note
    "prioritise": ({"session": Text(), "priority": Text()}, {"reason": _WORDS}),
    # end the session and its processes. ok: note
    "end": ({"session": Text()}, {"reason": _WORDS}),
    # ---- the agent of a cluster (c.GPUPool.cluster_agent)
    # get the next report for the ledger. It says how much of the shared limits this machine's
    # sessions use. The broker answers when the sessions need more or less than before, at the
    # latest after ``wait`` seconds. ok: report (text)
    "account": ({}, {"wait": Number()}),
    # the ledger's answer to a report, as text. ok: -
    "lend": ({"answer": Text(1 << 17)}, {}),
    # get the orders that users of this machine send to other machines. The broker answers as soon
    # as it has an order, at the latest after ``wait`` seconds. ok: node (this machine), orders (for
    # each order: its name, the machine that it is for, its credential)
    "orders": ({}, {"wait": Number()}),
    # carry out an order from another machine; the credential has the order. ok: result (the text of
    # an ``ok`` or ``error`` message)
    "perform": ({"credential": CREDENTIAL}, {}),
    # pass the result of the order ``name`` to its user; another machine has carried it out. ok: -
    "performed": ({"name": Text(), "result": RESULT}, {}),
    # only an admin may send this: drain this machine, and take it out of its cluster. ok: name (of
    # the machine), left (whether the ledger no longer counts anything of the machine), kernels (the
    # number of kernels with a slice), connected (whether the ledger answers)
    "leave": ({}, {}),
    # ---- any client
    # on a machine of a cluster: choose a machine for a new kernel. The kernel needs ``memory``
    # bytes on each of ``devices`` GPUs of the model ``model``, and uses the folders ``data``. ok:
    # node (the chosen machine), considered (the name of each machine, and what it lacks), identity
    # (c.GPUPool.cluster_identity)
    "place": (
        {},
        {"memory": _COUNT, "devices": _COUNT, "model": Text(), "data": Items(Text(4096), 17)},
    ),
    # send an order to the broker of the machine ``node``; the credential has the order. ok: result
    "order": ({"node": Text(), "credential": CREDENTIAL}, {}),
    # on a machine of a cluster: show the cluster's machines. ok: name (of this machine), own (the
    # summary of this machine), connected (whether the ledger answers), age (seconds since the last
    # of this machine's reports to which the ledger has answered; null if there is no such report),
    # view (what the ledger knows; null if the ledger does not answer).
    #   A view has: serving, left_out (the number of machines that did not fit into the message),
    # nodes.
    #   A node has: name, state, age (seconds since its last report), summary (or null), counted
    # (how much of the peer's limits the ledger counts for the node). ``counted`` has rows of kind,
    # name, resource, window and amount.
    #   A summary has, among other fields: sessions (the number of the peer's sessions), gpus (the
    # model and the free bytes of each GPU). Both are null if they did not fit into the message
    "cluster": ({}, {}),
    # on a machine of a cluster: show what the other machines have for a session that waits. ok:
    # machines (sentences about each other machine: how much of the session's limits it may use, and
    # whether it has room for such a kernel; one sentence says so if the ledger does not answer),
    # considered (for each other machine: its name, and a text that says whether it has room)
    "elsewhere": ({}, {"session": Text()}),
    # ok: the snapshot described in ``broker/messages/snapshot.py``
    "status": ({}, {}),
    # why the session waits, or why it may lose its slice. ok: see
    # ``broker/messages/explanation.py``
    "why": ({}, {"session": Text()}),
    # the figures for each minute of the last hour. ok: now, step (seconds between two values),
    # devices (by UUID: the figures granted, used, utilisation), queue. Each figure is a list with
    # one value for each minute, oldest first. The value of a minute without a reading is null
    "hour": ({}, {}),
    # ok: rows (those with ``seq`` above ``after``, oldest first, at most ``limit`` and at most
    # 1,000), more (whether there are further rows), seq (the number of the newest row in the
    # journal)
    "journal": ({}, {"after": Whole(), "limit": Whole(), "session": Text()}),
    # push each new row as a message ``event`` from now on. ok: seq (the number of the newest row)
    "watch": ({}, {}),
    # ok: -
    "ping": ({}, {}),
}

#: Requests that change nothing, so a client may repeat them.
READS = frozenset({"status", "why", "hour", "journal", "watch", "ping"})


def _whole(text: str) -> float:
    # A number with too many digits becomes a value that no field accepts. If the decoder raised an
    # error here instead, the broker could not send the request's id with the error.
    return int(text) if len(text) <= MAX_DIGITS else math.inf


_STRICT = json.JSONDecoder(parse_int=_whole)


def decode_request(line: bytes) -> Message:
    """Return the request on ``line``, with the declared fields and no others.

    Raises
    ------
    ProtocolError
        If the line is no request. ``details["id"]`` is the request's id if it has one.
    """
    if len(line) > MAX_REQUEST:
        raise ProtocolError(f"A request has {len(line)} bytes; at most {MAX_REQUEST} are allowed.")
    try:
        message = _STRICT.decode(line.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"A message is not JSON: {str(error)[:200]}.") from None
    return check_request(checked(message))


def check_request(message: Message) -> Message:
    """Return ``message`` with its declared fields only, if it is a well-formed request.

    Raises
    ------
    ProtocolError
        If a field is missing or wrong; the error names it. ``details["id"]`` is the request's id if
        it has one.
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
