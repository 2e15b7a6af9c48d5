# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's wire protocol: one JSON object per line, both ways. No sockets here.

A *request* has ``v``, ``type`` and the fields below; with an ``id`` (a positive integer, unique on
its connection) it is answered by exactly one ``ok`` or ``error`` with the same ``id``, at once or
after a wait. Without an ``id`` there is no answer. A *push* comes from the broker unasked.
Unknown fields are ignored, so that either side may be newer; unknown types and wrong field types
are errors. Sizes are bytes, times seconds.

===========  =====================================================================================
``ok``       ``id`` and the fields of the answer
``error``    ``id``, ``code``, ``message``, ``next_step``, ``details``
``queue``    push to a waiting agent: ``position``, ``length``, ``eta`` (or null), ``reason``
``lease``    push to an agent: ``state``, ``epoch``, ``slices``, ``reason``, ``pinned_reason``
``yield``    push to an agent: ``epoch``; the broker wants the slice, answer with ``yielded``
``lost``     push to an agent: ``message``; the driver lost this session's device state
``notice``   push to an agent: ``message``; a sentence for the user, shown in the notebook
``refused``  push to an agent: ``what`` (``attach`` or ``grow``), ``code``, ``message``,
             ``next_step``; a CUDA call of its processes was refused by the pool
``event``    push to a watcher: a row of the journal as it happens
===========  =====================================================================================

Why ``yield``/``yielded``: a cell on an attached session must not pay for a round trip. The agent
owns its lease until it agrees to give it up, so it may start a cell with one ``hold`` that nobody
answers (``wait`` false). A ``hold`` sent before the ``yield`` was read makes the answer ``false``.
It may be sent up to 50 ms late, and of cells that are over by then one ``hold`` and ``drop`` stand
for all; they are sent before a ``yielded`` and before any other request.

``attach`` and ``grow`` come from the guard, without a ``hello``, each on a connection of its own
and only when the session's shared page says that a call must wait; what was granted is in the page
before the ``ok`` is sent. Closing the connection ends the wait.
"""

from __future__ import annotations

import json
from typing import Any, Mapping

from .errors import GPUPoolError, ProtocolError, RefusedError

VERSION = 1

#: Bytes of one line, newline included. A longer one closes the connection.
MAX_LINE = 1 << 20

Message = dict[str, Any]

_OPTIONAL_INT = (int, type(None))
_OPTIONAL_STR = (str, type(None))

#: type -> (required fields, optional fields); a field's value is the accepted JSON type(s).
REQUESTS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    # ---- a provisioner, about a kernel
    # request: {memory?, limit?, devices?, compute?, priority?}, sizes in bytes.
    # ok: session, token, attach, request, env (variables for the kernel's process), config (the
    # options in force that do not have their default, and their origins), pid, broker, retire
    # (true where a kernel must be retired before it is killed)
    "open": ({"kernel_id": str}, {"label": str, "request": dict, "attach": _OPTIONAL_STR}),
    # pid of the process just started for the session. ok: -
    "launched": ({"session": str, "pid": int}, {}),
    # its kernel is about to be killed: make that safe, where ``open`` answered ``retire``. ok: safe
    "retire": ({"session": str}, {}),
    # the kernel is gone or never came; idempotent. ok: -
    "close": ({"session": str}, {"reason": str}),
    # ---- the agent inside the kernel process (identified by SO_PEERCRED and the token)
    # after a reconnect: epoch and holds as the agent knows them.
    # ok: session, state, epoch, slices, attach, request, limits
    "hello": (
        {"session": str, "token": str},
        {"epoch": int, "holds": list, "cuda": (bool, type(None))},
    ),
    # kind: cell | comm | manual | command. With wait: answered when granted or refused:
    # ok: epoch, slices. Without: no id, no answer; only legal while the agent has its lease.
    "hold": ({"hold": str, "kind": str}, {"epoch": int, "wait": bool}),
    # cuda: has this process called cuInit? (null: cannot tell). No answer.
    "drop": ({"hold": str}, {"cuda": (bool, type(None))}),
    # stop waiting for a hold. Ends that ``hold`` request with error code "cancelled". ok: -
    "cancel": ({"hold": str}, {}),
    # ---- the guard in any process of a session (identified by SO_PEERCRED and the token)
    # a thread waits at the gate. ok, once the gate is open: epoch
    "attach": ({"session": str, "token": str}, {"pid": int, "tid": int}),
    # cuInit is about to be called without a lease: make the page's devices those of the lease that
    # the session would get now. ok, also if nothing could be said: -
    "home": ({"session": str, "token": str}, {"pid": int, "tid": int}),
    # the session's page is not at its name any more: put it back. ok, once it is there: -
    "page": ({"session": str, "token": str}, {"pid": int, "tid": int}),
    # its first context, and it saw another device at cuInit than that of the slice. step: begin
    # (ok: there is room for a context where it is) | move (ok: it sees the slice now) | cancel
    "land": ({"session": str, "token": str, "step": str}, {"pid": int, "tid": int}),
    # ``bytes`` more than is granted on the session's device number ``device``. ok: granted
    "grow": ({"session": str, "token": str, "device": int, "bytes": int}, {"pid": int, "tid": int}),
    # ---- its agent again
    # answer to a yield: did the agent give up the lease of this epoch? No answer.
    "yielded": ({"epoch": int, "yielded": bool}, {"cuda": (bool, type(None))}),
    # ---- anybody who may act on the session (its agent may leave ``session`` out)
    # ok: request (as it is now), note
    "request": (
        {},
        {
            "session": str,
            "memory": _OPTIONAL_INT,
            "limit": _OPTIONAL_INT,
            "devices": _OPTIONAL_INT,
            "compute": _OPTIONAL_INT,
            "priority": _OPTIONAL_STR,
        },
    ),
    # ok: note
    "release": ({}, {"session": str}),
    # keep the slice for so many seconds although idle. ok: note
    "keep": ({"seconds": (int, float)}, {"session": str}),
    # ---- an admin
    # action: pause | drain | resume | retest; device: number or UUID (none: the whole pool).
    # ok: note, once it has begun (pause, drain; ``status`` says how far it is) or is done
    "maintain": ({"action": str}, {"device": _OPTIONAL_STR, "reason": str}),
    # ---- anybody
    # ok: the snapshot described in ``broker/status.py``
    "status": ({}, {}),
    # ok: rows, oldest first, with ``seq`` above ``after``; at most ``limit``
    "journal": ({}, {"after": int, "limit": int, "session": str}),
    # from now on push ``event``. ok: seq of the newest row
    "watch": ({}, {}),
    # ok: -
    "ping": ({}, {}),
}


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
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("A message must be a JSON object with a text field 'type'.")
    version = message.get("v")
    if version != VERSION:
        raise ProtocolError(
            f"The message has protocol version {version!r}; this side speaks {VERSION}.",
            code="version",
            next_step="Use the same version of jupyter_gpupool for the server and the kernel.",
        )
    return message


def check_request(message: Message) -> Message:
    """Return ``message`` if it is a well-formed request.

    Raises
    ------
    ProtocolError
        Naming the field that is missing or wrong.
    """
    kind = message["type"]
    if kind not in REQUESTS:
        raise ProtocolError(f"There is no message type {kind[:40]!r}.", code="unknown-type")
    request_id = message.get("id")
    if request_id is not None and (type(request_id) is not int or request_id <= 0):
        raise ProtocolError("The field 'id' must be a positive whole number.")
    required, optional = REQUESTS[kind]
    for name, accepted in (*required.items(), *optional.items()):
        if name not in message:
            if name in required:
                raise ProtocolError(f"A {kind!r} message needs the field {name!r}.")
            continue
        value = message[name]
        accepted_types = accepted if isinstance(accepted, tuple) else (accepted,)
        if not isinstance(value, accepted) or (
            isinstance(value, bool) and bool not in accepted_types
        ):
            raise ProtocolError(f"The field {name!r} of a {kind!r} message has the wrong type.")
    return message


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
        code=str(message.get("code", "refused")),
        next_step=str(message.get("next_step", "")),
        details=message.get("details") or {},
    )
