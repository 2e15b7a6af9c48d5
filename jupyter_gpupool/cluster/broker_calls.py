# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An agent's connection to its broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ..deadlines import within
from ..errors import Code, RefusedError
from ..protocol import MAX_LINE, MAX_REQUEST, decode, encode, raise_for


class BrokerCalls:
    """Sends requests to a broker over one connection. Several calls may wait at the same time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self._task = asyncio.get_running_loop().create_task(self._read())

    async def call(self, kind: str, patience: float, **fields: Any) -> dict[str, Any]:
        """Send a request and return its answer.

        Raises
        ------
        OSError
            If the connection ends first, or no answer comes in time.
        GPUPoolError
            If the broker refuses, or the request is too long. This method does not send a request
            that is too long: the broker would close the connection, and all other calls would fail.
        """
        if self._task.done():
            raise ConnectionResetError("The broker has closed the connection.")
        self._last += 1
        number = self._last  # a copy, because another call may begin before this call ends
        line = encode({"type": kind, "id": number, **fields})
        if len(line) > MAX_REQUEST:
            raise RefusedError(
                f"A {kind!r} request of {len(line)} bytes was not sent, because at most "
                f"{MAX_REQUEST} bytes are allowed.",
                code=Code.TOO_LONG,
            )
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(line)
        try:
            return raise_for(await within(future, patience))
        except asyncio.TimeoutError:
            raise ConnectionResetError("The broker does not answer.") from None
        finally:
            self._answers.pop(number, None)

    def close(self) -> None:
        """End the connection."""
        self._task.cancel()
        self._writer.close()

    async def _read(self) -> None:
        try:
            while line := await self._reader.readline():
                message = decode(line)
                future = self._answers.get(message.get("id") or 0)
                if future is not None and not future.done():
                    future.set_result(message)
        finally:
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(ConnectionResetError("The broker is gone."))


@asynccontextmanager
async def broker_calls(path: Path) -> AsyncIterator[BrokerCalls]:
    """Connect to the broker that listens at ``path``."""
    link = BrokerCalls(*await asyncio.open_unix_connection(str(path), limit=MAX_LINE))
    try:
        yield link
    finally:
        link.close()
