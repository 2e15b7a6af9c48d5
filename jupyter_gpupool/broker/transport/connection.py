# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads one peer's requests and sends it messages, within limits that protect other peers.

This module does not know what a message means. ``dispatch`` decides when a connection handles its
next request, and calls :meth:`step`. A read is a request that changes nothing; any other request is
an act. The broker handles the acts of a connection in the order in which they came. In addition,
one read of the connection at a time may wait for its answer. If a further request has to wait, or
if the peer has many unread answers, the broker reads nothing more from the peer.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import sys
import termios
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Callable, Literal, Mapping, Protocol

from ...errors import Code, GPUPoolError, ProtocolError
from ...protocol import MAX_REQUEST, Message, encode, error_message
from ..request_fields import READS, decode_request
from .auth import Peer, peer_of, shown
from .dispatch import ABUSE_PRICE, BAD_PRICE, BYTES_PER_POINT, PRICES, Dispatcher, UserAccount

if TYPE_CHECKING:
    from ..sessions import LiveSession

#: The most bytes that the broker reads from a peer at once. It reads the rest of a longer request
#: only if it reads fewer than ``dispatch.MAX_LONG`` other long requests of this user. Otherwise a
#: hundred busy connections would keep the loop reading.
CHUNK = 16 << 10

#: The most bytes that the broker keeps of one user's incomplete and waiting requests. This limit is
#: for all connections of the user together.
MAX_UNFINISHED = 4 << 20

#: The number of malformed messages after which the connection is closed.
MAX_BAD = 16

#: The most holds for which one connection may wait at the same time.
MAX_WAITING = 256

#: If a peer has more unread bytes than this, the broker handles no request of the peer until the
#: peer has read most of these bytes.
HIGH_WATER = 32 << 10

#: If a peer has more unread bytes than this, the broker closes the connection. Between HIGH_WATER
#: and this limit, the broker still sends messages that answer no request.
MAX_UNREAD = 1 << 20

#: The seconds that a peer has to read if it has more than HIGH_WATER unread bytes, or to send the
#: rest of a long request. After this time, the broker closes the connection.
READER_PATIENCE = 30.0

#: The buffer into which all connections receive, one at a time.
_INBOX = memoryview(bytearray(CHUNK))


@dataclass
class Counters:
    """Counts of events since the broker's start."""

    connections: int = 0
    messages: int = 0
    bad_messages: int = 0
    refused: int = 0
    throttled: int = 0
    closed_for_abuse: int = 0

    def snapshot(self) -> dict[str, int]:
        """Return the figures by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class Service(Protocol):
    """The functions of the broker that a connection calls."""

    counters: Counters
    log: logging.Logger
    dispatcher: Dispatcher

    def connected(self, connection: Connection) -> None:
        """Note a new connection, or raise :class:`GPUPoolError` to refuse it."""

    def received(self, connection: Connection, message: Message) -> None:
        """Handle a well-formed request, or raise :class:`GPUPoolError` to refuse it."""

    def disconnected(self, connection: Connection) -> None:
        """Forget the connection. Called once for each accepted connection."""


class Connection(asyncio.BufferedProtocol):
    """The connection of one peer. ``session`` is set after the ``hello`` of a kernel's agent."""

    def __init__(self, service: Service, user: str = "") -> None:
        self.service = service
        #: The user to whom the connection's socket belongs; "" for the socket for all users.
        self._user = user
        self.peer = Peer(0, -1, -1)
        self.account: UserAccount
        self.session: LiveSession | None = None
        #: The sessions that this connection has opened and that are not launched yet.
        self.opened: set[str] = set()
        #: The session for whose launch a message of this connection waits; None if no message
        #: waits.
        self.early: LiveSession | None = None
        #: The number of hold requests that wait for their answer.
        self.waiting = 0
        self.accepted = False
        #: The number of sent bytes that the peer had not read at the last count.
        self.unread = 0
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._scanned = 0
        self._ended = False
        self._bad = 0
        #: A decoded read that waits until the previous read has its answer; None if no read waits
        #: for this.
        self._next: Message | None = None
        #: ``_act_waits``: whether the next request is an act that waits for its user's budget.
        #: ``_act_price``: the price of this act. The act stays in the buffer, because a decoded act
        #: may take several times as much memory.
        self._act_waits = False
        self._act_price = 0.0
        #: ``_read``: a read that waits for its user's budget, or that may be handled now.
        #: ``_read_state``: the state of the present read. "answering" means that its answer comes
        #: later.
        self._read: Message | None = None
        self._read_state: Literal["", "waits", "due", "answering"] = ""
        self._reading = True
        self._choked: asyncio.TimerHandle | None = None
        #: Ends the connection if the rest of a long request does not come in time.
        self._rest: asyncio.TimerHandle | None = None
        #: Bytes of the answers to the present request.
        self._sent = 0

    # ------------------------------------------------------------------ for the rest of the broker

    @property
    def open(self) -> bool:
        """Whether the connection can still send."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def buffered(self) -> int:
        """Bytes that were received but not yet handled."""
        return len(self._buffer)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; without effect if the connection has ended."""
        if self.open:
            self.send_line(encode(message))

    def send_line(self, line: bytes) -> None:
        """Send an encoded message; without effect if the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        choked = self._choked is not None
        self._sent += len(line)
        self._transport.write(line)
        self.count_unread()
        if choked and self.unread > MAX_UNREAD:
            self.abuse("does not read its answers", abort=True)

    def count_unread(self) -> None:
        """Report the peer's unread bytes to its user's account."""
        if self.accepted and self._transport is not None:
            # An aborted transport has no unread bytes.
            size = self._transport.get_write_buffer_size()
            if size != self.unread:
                more, self.unread = size - self.unread, size
                self.service.dispatcher.note_unread(self, more)

    def answer(self, request_id: int | None, fields_: Mapping[str, Any] | None = None) -> None:
        """Answer a request with ``ok``; a request without an id has no answer."""
        if request_id is not None:
            self.send({"type": "ok", "id": request_id, **(fields_ or {})})

    def answer_with(self, request_id: int | None, descriptor: int) -> None:
        """Answer a request with ``ok``, and give the peer a copy of a descriptor.

        The transport cannot send a descriptor, so this method uses the socket itself. This works
        only if the connection has no other unread answers. Otherwise the peer gets no descriptor,
        and may ask again on a new connection. A peer that never reads keeps one descriptor under
        way on each of its connections. Linux limits how many descriptors of one user are under way.
        If the broker's user reaches this limit, no process of that user can pass a descriptor.
        """
        if not self.open or self._transport is None or request_id is None:
            return
        own = self._transport.get_extra_info("socket").fileno()
        if self._transport.get_write_buffer_size() or _unread(own):
            self.answer(request_id)
            return
        line = encode({"type": "ok", "id": request_id})
        try:
            with socket.socket(fileno=os.dup(own)) as ours:
                # The buffer is empty and the line is short, so the system sends the whole line or
                # nothing.
                socket.send_fds(ours, [line], [descriptor])
        except OSError:
            self.answer(request_id)
        else:
            self._sent += len(line)

    def refuse(self, request_id: int | None, error: GPUPoolError) -> None:
        """Answer a request with ``error``; send the error even for a request without an id."""
        self.service.counters.refused += 1
        self.send(error_message(error, request_id))

    def close(self) -> None:
        """Send the remaining answers, then end the connection."""
        if self._transport is not None:
            self._transport.close()
            if self._transport.get_write_buffer_size():
                # If the peer does not read the remaining answers within this time, the broker drops
                # them and ends the connection.
                asyncio.get_running_loop().call_later(READER_PATIENCE, self._transport.abort)

    def attempt(self, message: Message, method: Callable[[Connection, Message], None]) -> None:
        """Let ``method`` handle a request; if it raises an error, answer with this error.

        The broker handles every request of a client with this method, even a request that had to
        wait.
        """
        request_id = message.get("id")
        try:
            method(self, message)
        except GPUPoolError as error:
            self.refuse(request_id, error)
            if error.code in (Code.NOT_YOURS, Code.BAD_TOKEN):
                self.abuse(f"named a session or process that is not its own ({error.message})")
        except Exception:
            # All kernels depend on the broker, so a bug in ``method`` must not end the broker.
            self.service.log.exception("A %r message was not handled", message["type"])
            self.refuse(
                request_id,
                GPUPoolError(
                    f"The broker failed on this {message['type']!r} message; this is a bug.",
                    code=Code.INTERNAL,
                    next_step="Please report it with the broker's log.",
                ),
            )

    def speaks_for(self, session: LiveSession | None) -> None:
        """Note that the peer speaks for ``session`` from now on, or for no session (None)."""
        self.session = session

    def hold_early(self, session: LiveSession | None) -> None:
        """Note that a message waits for the launch of ``session``; with None, that none waits."""
        self.early = session
        self.account.early += 1 if session is not None else -1

    def begin_wait(self) -> None:
        """Note that one more hold request waits for its answer."""
        self.waiting += 1

    def end_wait(self) -> None:
        """Note that a hold request has its answer."""
        self.waiting -= 1

    def begin_read(self) -> None:
        """Note that the present read gets its answer later; see :meth:`end_read`."""
        self._read_state = "answering"

    def end_read(self, cost: float) -> None:
        """Charge ``cost`` points for the answer to a read, and handle the next request."""
        self.account.reads.pay(cost, asyncio.get_running_loop().time())
        if self._read_state == "answering":
            self._read_state = ""
        self._go_on()

    # ------------------------------------------------------------------ for the dispatcher

    def has_work(self) -> bool:
        """Return whether :meth:`step` would do anything now."""
        if not self.open or self._choked is not None:
            return False
        if self._read_state == "due":
            return True
        if self._next is not None or self._act_waits:
            return not self._act_waits and not self._blocked()
        return self._has_line() or (self._ended and not self._read_state)

    def step(self, now: float) -> tuple[float, bool]:
        """Handle one request or let it wait; return its price, and whether it is a read."""
        self._sent = 0
        price, read = self._step(now)
        self._look_at_reading()
        return price + self._sent / BYTES_PER_POINT, read

    def go_on(self, *, read: bool) -> None:
        """Let the request that waited for the budget continue: the budget covers it now."""
        if read and self._read_state == "waits":
            self._read_state = "due"
        elif not read:
            self._act_waits = False
        self._go_on()

    def give_up_read(self, error: GPUPoolError) -> None:
        """Refuse the read that waited for the budget: the budget did not cover it in time."""
        if self._read is not None and self.open:
            message, self._read, self._read_state = self._read, None, ""
            self.refuse(message.get("id"), error)
        self._go_on()

    def next_price(self) -> float:
        """Return the price of the request that waits for the budget."""
        if not self.open:
            return 0.0
        message = self._read or self._next
        return PRICES[message["type"]] if message is not None else self._act_price

    # ------------------------------------------------------------------ asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)
        self.service.counters.connections += 1
        try:
            self.peer = peer_of(transport.get_extra_info("socket"), self._user)
            self.account = self.service.dispatcher.account(self.peer.uid)
            self.service.connected(self)
            self.accepted = True
            self.service.dispatcher.joined(self)
        except GPUPoolError as error:
            self.refuse(None, error)
            transport.close()
        except OSError:
            transport.abort()  # the peer has closed the connection already

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return _INBOX

    def buffer_updated(self, nbytes: int) -> None:
        if not self.accepted:
            return
        self._buffer += _INBOX[:nbytes]
        self.account.buffered += nbytes
        self._go_on()

    def eof_received(self) -> bool:
        self._ended = True
        self._go_on()
        return True  # the broker closes the connection after all requests are handled

    def pause_writing(self) -> None:
        if self._choked is None:
            self._choked = asyncio.get_running_loop().call_later(
                READER_PATIENCE, self.abuse, "does not read its answers", True
            )

    def resume_writing(self) -> None:
        if self._choked is not None:
            self._choked.cancel()
            self._choked = None
        self.count_unread()
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._choked is not None:
            self._choked.cancel()
            self._choked = None
        if self.accepted:
            self._end_long()
            self.service.dispatcher.left(self)
            self._buffer.clear()
            self.accepted = False
            self.service.disconnected(self)

    # ------------------------------------------------------------------ internals

    def _go_on(self) -> None:
        """Ask the dispatcher for a turn, if there is a request to handle."""
        if not self.accepted:
            return
        if not self._has_line() and len(self._buffer) > 0 and not self._check_unfinished():
            return
        if self.has_work():
            self.service.dispatcher.ready(self)
        self._look_at_reading()

    def _has_line(self) -> bool:
        if self._buffer.find(b"\n", self._scanned) >= 0:
            return True
        self._scanned = len(self._buffer)
        return False

    def _check_unfinished(self) -> bool:
        """Return whether the peer may send the rest of a request; if not, close the connection."""
        if len(self._buffer) > MAX_REQUEST:
            self._bad_message(
                ProtocolError(f"A message has more than {MAX_REQUEST} bytes.", code=Code.TOO_LONG)
            )
            self.abuse("sent a line that is too long")
            return False
        if self.account.buffered > MAX_UNFINISHED:
            self.abuse("and other connections of its user left too many requests unfinished")
            return False
        return True

    def _blocked(self) -> bool:
        """Return whether the next request is a read that must wait for another read."""
        return self._next is not None and bool(self._read_state)

    def _look_at_reading(self) -> None:
        """Start or stop reading: read only if the broker can handle the peer's requests soon."""
        if self._transport is None or self._transport.is_closing() or self._ended:
            return
        stuck = self._next is not None or self._act_waits or self._choked is not None
        wanted = not stuck and (len(self._buffer) < CHUNK or self._may_read_on())
        if wanted and not self._reading:
            self._transport.resume_reading()
        elif self._reading and not wanted:
            self._transport.pause_reading()
        self._reading = wanted

    def _may_read_on(self) -> bool:
        """Return whether the connection may read the rest of a long request now."""
        whole = self._has_line()
        if self.accepted:
            (self._end_long if whole else self._begin_long)()
        return not whole and (not self.accepted or self in self.account.long)

    def _begin_long(self) -> None:
        """Take one of the user's places for long requests, or wait for a place.

        The peer must send the rest of the request within READER_PATIENCE seconds.
        """
        self.account.begin_long(self)
        if self._rest is None and self in self.account.long:
            loop = asyncio.get_running_loop()
            self._rest = loop.call_later(READER_PATIENCE, self._stalled)

    def _end_long(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        self.account.end_long(self)

    def _stalled(self) -> None:
        if not self._has_line():
            self.abuse(f"did not send the rest of a long request in {READER_PATIENCE:g} seconds")

    def read_on(self) -> None:
        """Read the rest of a long request, because it is this connection's turn."""
        self._look_at_reading()

    def _step(self, now: float) -> tuple[float, bool]:
        if self._read_state == "due" and self._read is not None:
            message, self._read, self._read_state = self._read, None, ""
            return self._handle(message), True
        if self._next is not None:
            message, self._next = self._next, None
        else:
            found = self._decode_line()
            if isinstance(found, float):
                return found, False
            message, size = found
            if message["type"] not in READS and self.account.acts.left(now) <= 0:
                self.service.counters.throttled += 1
                self._act_waits, self._act_price = True, PRICES[message["type"]]
                self.service.dispatcher.wait_act(self)
                return 0.0, False
            self._drop_line(size)
        if message["type"] in READS:
            if self._read_state:
                self._next = message
                return 0.0, True
            if self.account.reads.left(now) <= 0:
                self.service.counters.throttled += 1
                self._read, self._read_state = message, "waits"
                self.service.dispatcher.wait_read(self)
                return 0.0, True
            return self._handle(message), True
        return self._handle(message), False

    def _handle(self, message: Message) -> float:
        self.attempt(message, self.service.received)
        return PRICES[message["type"]]

    def _decode_line(self) -> tuple[Message, int] | float:
        """Return the next request and its size in the buffer; leave it in the buffer.

        If the next line is no valid request, this method removes the line and returns the price of
        the line. If the buffer has no whole line, it returns the price 0.0.
        """
        end = self._buffer.find(b"\n", self._scanned)
        if end < 0:
            if self._ended and not self._read_state:
                self._finish()
            return 0.0
        try:
            return decode_request(bytes(self._buffer[:end])), end + 1
        except ProtocolError as error:
            self._drop_line(end + 1)
            self._bad_message(error, error.details.get("id"))
            return BAD_PRICE + end / BYTES_PER_POINT

    def _drop_line(self, size: int) -> None:
        """Remove the first line, which has ``size`` bytes, from the buffer."""
        del self._buffer[:size]
        self.account.buffered -= size
        self._scanned = 0
        self.service.counters.messages += 1

    def _finish(self) -> None:
        """Close the connection, because the peer sends no more requests."""
        if self._buffer and self.accepted:
            self._forget_buffer()
            self._bad_message(ProtocolError("The connection ended in the middle of a message."))
        self.close()

    def _forget_buffer(self) -> None:
        if self.accepted:
            self._end_long()
            self.account.buffered -= len(self._buffer)
        self._buffer.clear()
        self._scanned = 0

    def _bad_message(self, error: ProtocolError, request_id: int | None = None) -> None:
        self.service.counters.bad_messages += 1
        self._bad += 1
        self.refuse(request_id, error)
        if self._bad >= MAX_BAD:
            self.abuse("keeps sending malformed messages")

    def abuse(self, what: str, abort: bool = False) -> None:
        """Close the connection of a peer that misbehaves."""
        transport = self._transport
        if transport is None or not self.open:
            if abort and transport is not None:
                # The connection is closing already, but the peer does not read its last answers.
                transport.abort()
            return
        self.service.counters.closed_for_abuse += 1
        self.account.connects.pay(ABUSE_PRICE, asyncio.get_running_loop().time())
        self.service.log.warning(
            "Connection of process %d (%s) closed: it %s",
            self.peer.pid, shown(self.peer.uid), what, extra={"cause": self.peer.uid},
        )  # fmt: skip
        self._forget_buffer()
        self._next = self._read = None
        if abort:
            transport.abort()
            return
        self.send(
            error_message(
                ProtocolError(f"This connection is closed: it {what}.", code=Code.ABUSE), None
            )
        )
        transport.close()


def _unread(descriptor: int) -> int:
    """Return how much memory sent data takes until the peer reads it; 0 if unknown."""
    try:
        size = fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(size, sys.byteorder)
