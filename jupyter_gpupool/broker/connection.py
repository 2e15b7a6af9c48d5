# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One peer's connection: bytes to messages and back, and the limits that keep one from all.

Nothing here knows what a message means. Messages are handled in the order they came, one at a
time, in the event loop; a peer that sends a lot gets its turn and no more.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Mapping, Protocol

from ..errors import GPUPoolError, ProtocolError
from ..protocol import MAX_LINE, Message, check_request, decode, encode, error_message
from .auth import Peer, peer_of

if TYPE_CHECKING:
    from .sessions import Session

#: Messages handled before another connection gets its turn.
TURN = 64

#: Messages a second that one peer may send for long, and at once. A peer that waits for its
#: answers is only slowed down; see BACKLOG_LINES.
RATE, BURST = 5000.0, 10000.0

#: Bytes received and not yet handled because the peer is over its rate. More is a flood: a peer
#: that waits for answers never has more than a few lines here.
BACKLOG = 64 << 10

#: Messages that are no messages before the connection is closed.
MAX_BAD = 16

#: Holds that one connection may wait for at once.
MAX_WAITING = 256

#: Bytes of answers that a peer may leave unread.
MAX_UNREAD = 8 << 20


@dataclass
class Counters:
    """What the broker has seen since its start."""

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
    """What a connection needs of the rest of the broker."""

    counters: Counters
    log: logging.Logger

    def connected(self, connection: Connection) -> None:
        """Take note of a new connection, or raise :class:`GPUPoolError` to refuse it."""

    def received(self, connection: Connection, message: Message) -> None:
        """Handle a well-formed request, or raise :class:`GPUPoolError` to refuse it."""

    def disconnected(self, connection: Connection) -> None:
        """Forget the connection. Called once for each that was not refused."""


class Connection(asyncio.Protocol):
    """See the module. ``session`` is set for a kernel's agent once it has said hello."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.peer = Peer(0, -1, -1)
        self.session: Session | None = None
        #: Sessions opened here and not yet launched.
        self.opened: set[str] = set()
        #: Hold requests that wait for their answer.
        self.waiting = 0
        self.watching = False
        self.accepted = False
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._scanned = 0
        self._ended = False
        self._bad = 0
        self._allowance = BURST
        self._filled_at = 0.0
        self._resume: asyncio.Handle | None = None

    # ------------------------------------------------------------------ for the rest of the broker

    @property
    def open(self) -> bool:
        """Whether what is sent still goes somewhere."""
        return self._transport is not None and not self._transport.is_closing()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message; without effect if the connection has ended."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(encode(message))
        if self._transport.get_write_buffer_size() > MAX_UNREAD:
            self._abuse("does not read its answers", abort=True)

    def answer(self, request_id: int | None, fields_: Mapping[str, Any] | None = None) -> None:
        """Answer a request with ``ok``; a request without an id has no answer."""
        if request_id is not None:
            self.send({"type": "ok", "id": request_id, **(fields_ or {})})

    def refuse(self, request_id: int | None, error: GPUPoolError) -> None:
        """Answer a request with ``error``, also one that has no id: it must not be lost."""
        self.service.counters.refused += 1
        self.send(error_message(error, request_id))

    def close(self) -> None:
        """Send what is to be sent, then end the connection."""
        if self._transport is not None:
            self._transport.close()

    # ------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._filled_at = asyncio.get_running_loop().time()
        self.service.counters.connections += 1
        try:
            self.peer = peer_of(transport.get_extra_info("socket"))
            self.service.connected(self)
            self.accepted = True
        except GPUPoolError as error:
            self.refuse(None, error)
            transport.close()
        except OSError:
            transport.abort()  # it left before we looked

    def data_received(self, data: bytes) -> None:
        if not self.accepted:
            return
        self._buffer += data
        if self._resume is None:
            self._work()
        elif len(self._buffer) > BACKLOG + MAX_LINE:
            self._abuse("sends more than it may")

    def eof_received(self) -> bool:
        self._ended = True
        if self._resume is None:
            self._work()
        return True  # we close it ourselves, when all it sent has been handled

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._transport = None
        if self._resume is not None:
            self._resume.cancel()
            self._resume = None
        if self.accepted:
            self.accepted = False
            self.service.disconnected(self)

    # ------------------------------------------------------------------ internals

    def _work(self) -> None:
        """Handle up to TURN messages of the buffer, then come back for the others."""
        self._resume = None
        loop = asyncio.get_running_loop()
        for _ in range(TURN):
            if not self.open:
                self._buffer.clear()
                return
            end = self._buffer.find(b"\n", self._scanned)
            if end < 0:
                self._scanned = len(self._buffer)
                if len(self._buffer) > MAX_LINE:
                    self._bad_message(
                        ProtocolError(f"A message has more than {MAX_LINE} bytes.", code="too-long")
                    )
                    self._abuse("sent an endless line")
                elif self._ended:
                    self._finish()
                return
            if not self._may_go_on():
                return
            line = bytes(self._buffer[:end])
            del self._buffer[: end + 1]
            self._scanned = 0
            self._take(line)
        if self._buffer or self._ended:
            self._resume = loop.call_soon(self._work)

    def _finish(self) -> None:
        """The peer has said all that it will."""
        if self._buffer and self.accepted:
            self._buffer.clear()
            self._bad_message(ProtocolError("The connection ended in the middle of a message."))
        self.close()

    def _may_go_on(self) -> bool:
        loop = asyncio.get_running_loop()
        if self._allowance < 1:
            now = loop.time()
            self._allowance = min(BURST, self._allowance + (now - self._filled_at) * RATE)
            self._filled_at = now
        if self._allowance >= 1:
            self._allowance -= 1
            if self._resume is None and self._transport is not None:
                self._transport.resume_reading()
            return True
        self.service.counters.throttled += 1
        if len(self._buffer) > BACKLOG:
            self._abuse("sends more than it may")
            return False
        # What it sends meanwhile waits in the operating system, and then in the peer.
        assert self._transport is not None
        self._transport.pause_reading()
        self._resume = loop.call_later(TURN / RATE, self._work)
        return False

    def _take(self, line: bytes) -> None:
        self.service.counters.messages += 1
        request_id: int | None = None
        try:
            message = decode(line)
            if type(message.get("id")) is int:
                request_id = message["id"]
            check_request(message)
        except ProtocolError as error:
            self._bad_message(error, request_id)
            return
        try:
            self.service.received(self, message)
        except GPUPoolError as error:
            self.refuse(request_id, error)
            if error.code in ("not-yours", "bad-token"):
                self._abuse(f"claims what is not its own ({error.message})")
        except Exception:
            # A fault of ours must not take the broker, and with it everybody's kernels, along.
            self.service.log.exception("A %r message was not handled", message["type"])
            self.refuse(
                request_id,
                GPUPoolError(
                    f"The broker failed on this {message['type']!r} message; this is a bug.",
                    code="internal",
                    next_step="Please report it with the broker's log.",
                ),
            )

    def _bad_message(self, error: ProtocolError, request_id: int | None = None) -> None:
        self.service.counters.bad_messages += 1
        self._bad += 1
        self.refuse(request_id, error)
        if self._bad >= MAX_BAD:
            self._abuse("keeps sending what is no message")

    def _abuse(self, what: str, *, abort: bool = False) -> None:
        if not self.open:
            return
        assert self._transport is not None
        self.service.counters.closed_for_abuse += 1
        self.service.log.warning(
            "Connection of process %d (user id %d) closed: it %s",
            self.peer.pid, self.peer.uid, what,
        )  # fmt: skip
        self._buffer.clear()
        if abort:
            self._transport.abort()
            return
        self.send(
            error_message(
                ProtocolError(f"This connection is closed: it {what}.", code="abuse"), None
            )
        )
        self._transport.close()
