# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The server's only connection to the broker. The first call opens it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Callable

from ..client import CALL_TIMEOUT, Client
from ..deadlines import within
from ..endpoint import check_path, check_socket
from ..errors import BrokerUnavailable, Code, RefusedError
from ..protocol import Message

#: At most this many calls may wait for an answer at once. A hung broker reads nothing, so the calls
#: stay in the buffer of the socket. If this buffer becomes full, the server hangs, too. The buffer
#: has 212,992 bytes on Linux, and a call has a few hundred bytes.
MAX_CALLS = 64


class BrokerLink:
    """Calls the broker from the server's event loop.

    Parameters
    ----------
    path:
        Returns the broker's socket; called before each connection.
    on_row:
        Called in the event loop with each new row of the journal, after :meth:`watch` was called.
    on_stir:
        Called in the event loop when a session has changed and the journal has no row about it.
    on_close:
        Called in the event loop when a connection has ended that this server has not closed.
    """

    def __init__(
        self,
        path: Callable[[], Path],
        on_row: Callable[[Message], None],
        on_stir: Callable[[], None],
        on_close: Callable[[BrokerUnavailable], None],
        log: logging.Logger,
    ) -> None:
        self._path = path
        self._on_row = on_row
        self._on_stir = on_stir
        self._on_close = on_close
        self._log = log
        self._client: Client | None = None
        #: The connection on which the broker pushes rows.
        self._watched: Client | None = None
        #: Why the broker closes the connection. The broker sends this reason in an error message
        #: that answers no call.
        self._said: RefusedError | None = None
        self._connecting = asyncio.Lock()
        self._calls = asyncio.Semaphore(MAX_CALLS)
        self._pending: set[asyncio.Future[Message]] = set()

    async def call(self, kind: str, /, **fields: Any) -> Message:
        """Send a request and return the answer.

        Raises
        ------
        RefusedError
            If the broker refuses.
        BrokerUnavailable
            If no broker listens, or it does not answer within CALL_TIMEOUT seconds.
        """
        async with self._calls:
            client = await self._open()
            try:
                answer = asyncio.wrap_future(client.start(kind, **fields))
                self._pending.add(answer)
                answer.add_done_callback(self._pending.discard)
                return await within(answer, CALL_TIMEOUT)
            except asyncio.TimeoutError:
                await self._drop(client)
                raise BrokerUnavailable(
                    f"The GPU pool broker at {client.path} did not answer within "
                    f"{CALL_TIMEOUT:g} s.",
                    next_step="CPU work goes on; see `jupyter gpupool doctor`.",
                ) from None
            except BrokerUnavailable:
                if self._said is not None:
                    raise self._said from None
                raise

    async def watch(self) -> None:
        """Make the broker push rows and changes; call ``on_row`` and ``on_stir`` for them.

        The pushes stop when the connection ends.
        """
        client = await self._open()
        if self._watched is not client:
            await self.call("watch")
            self._watched = client

    async def close(self) -> None:
        """Close the connection as soon as every call has its answer.

        A later call opens a new connection.
        """
        client, self._client = self._client, None
        if client is not None:
            if self._pending:
                await asyncio.wait(self._pending, timeout=CALL_TIMEOUT)
            await self._drop(client)

    # ------------------------------------------------------------------ internals

    async def _open(self) -> Client:
        async with self._connecting:
            if self._client is not None and not self._client.closed:
                return self._client
            path = self._path()
            check_path(path)
            check_socket(path)
            loop = asyncio.get_running_loop()
            self._said = None

            def hand_over(function: Callable[..., None], *args: Any) -> None:
                """Run the function in the event loop.

                This has no effect after the server has stopped.
                """
                try:
                    loop.call_soon_threadsafe(function, *args)
                except RuntimeError:
                    self._log.debug("GPU pool: a message came after the end of the server")

            def connect() -> Client:
                made: list[Client] = []
                made.append(
                    Client(
                        path,
                        on_push=lambda message: hand_over(self._pushed, message),
                        on_close=lambda error: hand_over(self._lost, made, error),
                    )
                )
                return made[0]

            # A hung broker accepts no connection, so an attempt to connect blocks. Another thread
            # makes the attempt, so that it does not block the event loop.
            self._client = await loop.run_in_executor(None, connect)
            return self._client

    def _pushed(self, message: Message) -> None:
        if message["type"] == "event":
            self._on_row(message)
        elif message["type"] == "stirred":
            self._on_stir()
        elif message["type"] == "error":
            self._said = RefusedError(
                str(message.get("message", "refused")),
                code=Code.of(message.get("code"), Code.REFUSED),
                next_step=str(message.get("next_step", "")),
            )

    def _lost(self, made: list[Client], error: BrokerUnavailable) -> None:
        if made and made[0] is self._client:
            self._client = None
            self._on_close(error)

    async def _drop(self, client: Client) -> None:
        if client is self._client:
            self._client = None
        # ``Client.close`` waits for the end of the client's reader thread, so call it in another
        # thread.
        await asyncio.get_running_loop().run_in_executor(None, client.close)
