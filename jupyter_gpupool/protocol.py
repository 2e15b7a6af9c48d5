# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's wire protocol: one JSON object per line, in both directions.

This module uses no sockets.

A *request* has ``v``, ``type`` and the fields below. A request with an ``id`` (a positive integer,
unique on its connection) gets exactly one ``ok`` or ``error`` with the same ``id``, at once or
after a wait. A request without an ``id`` gets no ``ok``, but it may get an ``error`` whose ``id``
is null. A *push* is a message that the broker sends without a request. Each side ignores unknown
fields, so that the other side may be newer. Unknown types, wrong field types and values outside the
ranges below are errors. ``NaN``, ``Infinity`` and numbers of more than 19 digits are errors, too.
Sizes are in bytes, times in seconds.

``status``, ``why``, ``hour``, ``journal``, ``watch`` and ``ping`` are *reads*; all other requests
are *acts*. Each request has a price. Each user (by user id, over all connections) has one budget
for reads and one budget for acts. The broker delays requests beyond the budget. If a read has
waited for 2 s, the broker refuses it with the code ``busy``; ``details.retry_after`` is the number
of seconds after which the client may retry. The broker never refuses an act because it has waited.
The broker handles the acts of one connection in their order. While a read waits, it may handle acts
that came after the read.

===========  =====================================================================================
``ok``       ``id`` and the fields of the answer
``error``    ``id``, ``code``, ``message``, ``next_step``, ``details``
``queue``    push to a waiting agent: ``position``, ``length``, ``reason``, ``waited``
             (seconds), ``left`` (the least and the most seconds that the wait will last, or null)
``lease``    push to an agent: ``state``, ``epoch``, ``slices``, ``reason``, ``pinned_reason``,
             ``preempted`` (why the kernel lost its slice while it worked, or ""), ``remedy``
             (what its user can do about that, or "")
``yield``    push to an agent: ``epoch``; the broker wants the slice, answer with ``yielded``
``wanted``   push to an agent: another kernel waits for the agent's slice; until the lease ends,
             send ``resting`` whenever no cell runs: at once, or when the last running cell ends
``lost``     push to an agent: ``message``; the driver lost this session's device state
``notice``   push to an agent: ``message``; a sentence for the user, shown in the notebook
``refused``  push to an agent: ``what`` (``attach`` or ``grow``), ``code``, ``message``,
             ``next_step``; the pool refused a CUDA call of the session's processes
``event``    push to a watcher: a row of the journal as it happens
``stirred``  push to a watcher: ``session``; the session has changed, but the journal has no row
             about the change: a cell began or ended, or the wait has news. After a change of the
             queue, other kernels may have begun or stopped waiting for the slices of idle sessions.
             For all idle sessions of a watcher, the broker then sends only one ``stirred``, with
             the id of one of these sessions
===========  =====================================================================================

Why ``yield``/``yielded``: a cell on an attached session must not wait for a round trip to the
broker. The agent owns its lease until it gives the lease up with ``yielded``. So it may start a
cell at once, and send a ``hold`` to which the broker sends no answer (``wait`` false). If the agent
has sent a ``hold`` before it reads the ``yield``, its ``yielded`` is false. The agent may send a
``hold`` up to 50 ms late. If several cells begin and end in this time, the agent may send one
``hold`` and one ``drop`` for all of them. It always sends these messages before a ``yielded`` or
any other request.

A session has one agent and any number of *members*: the session's programs, and the ``jupyter
gpupool run`` that started them. A member sends each ``hold`` with ``wait`` true, and continues when
the broker has granted the hold. So the broker need not send a member a ``yield``. A member gets the
pushes ``queue``, ``lease``, ``lost``, ``notice`` and ``refused``, as the agent does. The holds of a
member end with its connection.

The guard sends the following requests without a ``hello``, and opens a new connection for each of
them. If it closes the connection, the wait ends.

- ``attach``: the session's shared page says that a call must wait for a lease.
- ``grow``: a call needs more memory than the grant in the page.
- ``home``: a process is about to call ``cuInit``, and its session has no lease. The broker chooses
  the devices that the process sees.
- ``page``: a process cannot open the session's page. The broker restores the page, and sends a
  descriptor of the page with the ``ok``.
- ``land``: a process is about to make its first context, but saw another device at ``cuInit`` than
  the device of its slice. Each ``step`` of its move to that device is one request.

The broker writes the result (open gate, grant or devices) to the page before it sends the ``ok``.
The guard reads the result from the page.
"""

from __future__ import annotations

import json
from typing import Any, Mapping

from .errors import Code, GPUPoolError, ProtocolError, RefusedError

VERSION = 1

#: A variable of each session's processes: the name of the vendor's variable of visible devices.
DEVICES_VARIABLE = "GPUPOOL_DEVICES_VARIABLE"

#: The most bytes of a request, including its newline. They are enough for a ``hello`` with a
#: thousand holds.
MAX_REQUEST = 1 << 18

#: A server may ask another machine about at most this many kernels in one query. The answer has
#: about 2 KiB for each kernel, and must fit into one message between the agents of the cluster.
MOST_LOOKED = 16

#: The most bytes of a line from the broker, including its newline. If a longer line comes, the
#: client closes the connection.
MAX_LINE = 1 << 24

Message = dict[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """Return ``message`` as one line of UTF-8, with its newline."""
    return json.dumps({"v": VERSION, **message}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the JSON object in ``line``.

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
    return checked(message)


def checked(message: Any) -> Message:
    """Return ``message`` if it is an object of this version with a type."""
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("A message must be a JSON object with a text field 'type'.")
    version = message.get("v")
    if version != VERSION:
        raise ProtocolError(
            f"The message has protocol version {str(version)[:40]}; its receiver uses {VERSION}.",
            code=Code.VERSION,
            next_step="Use the same version of jupyter_gpupool for the server and the kernel.",
        )
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
        code=Code.of(message.get("code"), Code.REFUSED),
        next_step=str(message.get("next_step", "")),
        details=message.get("details") or {},
    )
