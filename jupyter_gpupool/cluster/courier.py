# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent of one machine: carries reports from its broker to the ledger, and answers back.

It decides nothing and keeps nothing, so it may be killed at any time. If broker or ledger does not
answer, it tries again; the broker itself notices when no answer comes in time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from ..deadlines import within
from ..protocol import MAX_LINE, decode, encode, raise_for

#: Seconds after which a report goes out although nothing has changed; the ledger's time-out is some
#: of these.
INTERVAL = 2.0
#: Seconds until the next attempt where a broker or a ledger does not answer.
AGAIN = 0.5
#: Seconds in which a broker must answer beyond what it was asked to wait.
PATIENCE = 10.0

_LOG = logging.getLogger(__name__)


class BrokerCalls:
    """Requests to a broker over one connection; several may be under way."""

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
            If the broker refuses.
        """
        if self._task.done():
            raise ConnectionResetError("The broker has closed the connection.")
        self._last += 1
        number = self._last  # another call may begin before this one ends
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode({"type": kind, "id": number, **fields}))
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


async def carry(
    broker: Path,
    send: Callable[[str], Awaitable[None]],
    answers: asyncio.Queue[str],
    *,
    interval: float = INTERVAL,
) -> None:
    """Carry reports of a broker to ``send`` and ``answers`` to the broker, until cancelled.

    ``send`` may raise ``OSError`` where no ledger answers.
    """
    while True:
        try:
            async with broker_calls(broker) as link:
                _LOG.info("Connected to the broker at %s", broker)
                await _both(_reports(link, send, interval), _lend(link, answers))
        except (OSError, ValueError) as error:
            _LOG.warning("The broker at %s does not answer: %s", broker, error)
        await asyncio.sleep(AGAIN)


async def _reports(
    link: BrokerCalls, send: Callable[[str], Awaitable[None]], interval: float
) -> None:
    wait = 0.0
    while True:
        found = await link.call("account", wait + PATIENCE, wait=wait)
        wait = interval
        try:
            await send(found["report"])
        except OSError:
            # The report is lost, as on any network. The next one has all of it.
            await asyncio.sleep(AGAIN)
            wait = 0.0


async def _lend(link: BrokerCalls, answers: asyncio.Queue[str]) -> None:
    while True:
        await link.call("lend", PATIENCE, answer=await answers.get())


async def _both(*works: Awaitable[None]) -> None:
    """Run both until one ends or fails; the other is cancelled."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SocketLedger:
    """A ledger behind a unix socket, for machines that are processes of one host."""

    def __init__(self, path: Path) -> None:
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def send(self, report: str) -> None:
        """Send a report; connect first where there is no connection."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(
                str(self._path), limit=MAX_LINE
            )
            self._task = asyncio.get_running_loop().create_task(self._read(reader, self._writer))
        try:
            self._writer.write(report.encode() + b"\n")
            await self._writer.drain()
        except OSError:
            self._writer = None
            raise

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                self.answers.put_nowait(json.loads(line)["answer"])
        writer.close()
        if self._writer is writer:
            self._writer = None
