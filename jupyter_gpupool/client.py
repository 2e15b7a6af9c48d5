# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The only Python code that calls the broker's socket.

Kernels use this module, so it imports only the standard library.

One :class:`Client` is one connection with one reader thread. Calls may come from any thread;
``start`` returns a future, so that asynchronous code can ``await asyncio.wrap_future(...)`` it.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, Callable

from .endpoint import START_TIMEOUT, check_socket, dial, is_machine_path
from .errors import BrokerUnavailable, Code, GPUPoolError, ProtocolError, RefusedError
from .protocol import MAX_LINE, Message, decode, encode, raise_for
from .threads import start_thread

#: Seconds to wait for an answer that the broker gives at once.
CALL_TIMEOUT = 10.0

#: If the broker refuses a request as ``busy``, the client repeats the request after at least this
#: many seconds.
MIN_PAUSE = 0.05


def first_answer(path: Path) -> float:
    """Return the time-out in seconds for the first answer on a connection to ``path``.

    The service manager keeps the machine's socket open while no broker runs. So a connection to
    this socket may have to wait for the start of the next broker.
    """
    return START_TIMEOUT if is_machine_path(path) else CALL_TIMEOUT


class Client:
    """A connection to the broker.

    Parameters
    ----------
    path:
        The socket, see :func:`jupyter_gpupool.endpoint.find_socket`.
    on_push:
        Called in the reader thread with each message that is not an answer. Must not block.
    on_close:
        Called once, with the reason, when the connection has ended. The reader thread makes this
        call. After :meth:`close` it makes no such call.

    Raises
    ------
    BrokerUnavailable
        If no broker listens at ``path``, or the socket cannot be trusted.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        on_push: Callable[[Message], None] | None = None,
        on_close: Callable[[BrokerUnavailable], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self._on_push = on_push
        self._on_close = on_close
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Message]] = {}
        self._lock = threading.Lock()
        self._closed = False
        check_socket(self.path)
        #: The broker's last error message that was not the answer to a request. With such a message
        #: the broker says why it closes the connection.
        self._said: GPUPoolError | None = None
        try:
            self._socket = dial(self.path, CALL_TIMEOUT)
        except OSError as error:
            raise self._unavailable(f"cannot be reached ({error.strerror or error})") from None
        self._reader = threading.Thread(target=self._read, name="gpupool-client", daemon=True)
        start_thread(self._reader)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._closed

    def start(self, kind: str, /, **fields: Any) -> Future[Message]:
        """Send a request and return the future of its ``ok`` message.

        The future raises :class:`RefusedError` for an ``error`` message, and
        :class:`BrokerUnavailable` if the connection ends first.
        """
        future: Future[Message] = Future()
        with self._lock:
            if self._closed:
                raise self._unavailable("has closed the connection")
            request_id = next(self._ids)
            self._waiting[request_id] = future
        try:
            self._send({"type": kind, "id": request_id, **fields})
        except BrokerUnavailable:
            self._waiting.pop(request_id, None)
            raise
        return future

    def call(self, kind: str, /, *, timeout: float | None = CALL_TIMEOUT, **fields: Any) -> Message:
        """Send a request and return its ``ok`` message.

        Raises
        ------
        RefusedError
            If the broker answers with an error. If the error is ``busy``, because this user sends
            too many requests, the client repeats the request as long as ``timeout`` allows.
        BrokerUnavailable
            If the connection ends or no answer comes in ``timeout`` seconds (None: no time-out).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            future = self.start(kind, **fields)
            try:
                return future.result(
                    None if deadline is None else max(0.0, deadline - time.monotonic())
                )
            except FutureTimeout:
                raise self._unavailable(f"did not answer {kind!r} in {timeout:g} s") from None
            except RefusedError as error:
                after = error.details.get("retry_after")
                if error.code != Code.BUSY or not isinstance(after, (int, float)):
                    raise
                pause = min(max(float(after), MIN_PAUSE), CALL_TIMEOUT)
                if deadline is not None and time.monotonic() + pause >= deadline:
                    raise
                time.sleep(pause)

    def journal(self, *, after: int = 0, session: str = "") -> list[Message]:
        """Return the rows of the journal with numbers above ``after``, oldest first.

        The broker leaves out the rows that this user may not see.
        """
        found: list[Message] = []
        fields: dict[str, Any] = {"session": session} if session else {}
        while True:
            page = self.call("journal", after=after, **fields)
            found += page["rows"]
            if not page["more"]:
                return found
            after = page["rows"][-1]["seq"]

    def send(self, kind: str, /, **fields: Any) -> None:
        """Send a message that has no answer."""
        if self._closed:
            raise self._unavailable("has closed the connection")
        self._send({"type": kind, **fields})

    def close(self) -> None:
        """End the connection. Safe to call twice and from any thread."""
        with self._lock:
            already, self._closed = self._closed, True
            self._on_close = None
        if already:
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the broker has closed the connection
        if threading.current_thread() is not self._reader:
            self._reader.join(CALL_TIMEOUT)  # the reader closes the socket as it ends

    # ------------------------------------------------------------------ internals

    def _send(self, message: Message) -> None:
        line = encode(message)
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError as error:
            # The broker may have received only a part of this line, so the connection can carry no
            # further message. The reader thread may not know yet that the connection has ended.
            self._closed = True
            raise self._unavailable(f"went away ({error.strerror or error})") from None

    def _read(self) -> None:
        buffer = bytearray()
        reason = "closed the connection"
        try:
            while chunk := self._socket.recv(65536):
                buffer += chunk
                while (end := buffer.find(b"\n")) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    self._take(decode(line))
                if len(buffer) > MAX_LINE:
                    raise ProtocolError("The broker sent a line that is too long.")
        except OSError as error:
            reason = f"went away ({error.strerror or error})"
        except ProtocolError as error:
            reason = f"does not follow the protocol ({error})"
        self._ended(self._unavailable(reason))

    def _take(self, message: Message) -> None:
        request_id = message.get("id")
        if message["type"] in ("ok", "error") and request_id is not None:
            future = self._waiting.pop(request_id, None)
            if future is None or not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(raise_for(message))
            except GPUPoolError as error:
                future.set_exception(error)
            return
        if message["type"] == "error":
            try:
                raise_for(message)
            except GPUPoolError as error:
                self._said = error
        if self._on_push is not None:
            self._on_push(message)

    def _ended(self, error: BrokerUnavailable) -> None:
        if self._said is not None:
            error = BrokerUnavailable(
                f"{error.message} The broker's last message: {self._said.message}",
                code=error.code,
                next_step=self._said.next_step or error.next_step,
            )
        with self._lock:
            self._closed = True
            self._socket.close()
            waiting, self._waiting = self._waiting, {}
            on_close, self._on_close = self._on_close, None
        for future in waiting.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        if on_close is not None:
            on_close(error)

    def _unavailable(self, what: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"The GPU pool broker at {self.path} {what}.",
            next_step="CPU work goes on; see `jupyter gpupool doctor`.",
        )


class ClientAgain:
    """A connection that outlives its broker: if the broker dies, it connects to the next broker.

    If a broker dies during a call, this object repeats the call to the next broker. So one call may
    reach two brokers. If an ``open`` reaches two brokers, the session of the first ``open`` has no
    process, so a broker ends this session. All other calls do no harm if they run twice.

    Parameters
    ----------
    find:
        Returns the socket of a living broker, and restarts a broker that has died. Raises
        BrokerUnavailable.
    timeout:
        Seconds for one call, including the starts of brokers.
    """

    def __init__(self, find: Callable[[], Path], *, timeout: float) -> None:
        self._find = find
        self._timeout = timeout
        self._client: Client | None = None

    def call(self, kind: str, /, **fields: Any) -> Message:
        """Send a request and return its answer; raises the errors of :meth:`ask`."""
        return self.ask(kind, **fields)[0]

    def ask(self, kind: str, /, **fields: Any) -> tuple[Message, Path]:
        """Send a request; return its answer and the socket of the broker that answered.

        Raises
        ------
        RefusedError
            If the broker answers with an error.
        BrokerUnavailable
            If no broker can be started, or none lives long enough to answer.
        """
        give_up = time.monotonic() + self._timeout
        while True:
            client = self._client
            if client is None:
                client = self._connect(give_up)
            try:
                return client.call(kind, timeout=first_answer(client.path), **fields), client.path
            except BrokerUnavailable:
                # Repeat the call only if the connection has ended. If the broker lives but did not
                # answer in time, it would not answer the second call in time.
                if not client.closed or time.monotonic() > give_up:
                    raise
                self.close()

    def close(self) -> None:
        """End the connection. The next call opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _connect(self, give_up: float) -> Client:
        while True:
            path = self._find()
            try:
                self._client = Client(path)
                return self._client
            except BrokerUnavailable as error:
                # The broker died after ``find`` returned.
                if error.code == Code.BAD_SOCKET or time.monotonic() > give_up:
                    raise
