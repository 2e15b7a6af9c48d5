# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent of one machine carries its broker's reports to the ledger, and the answers back.

The agent decides nothing and keeps nothing, so it may be killed at any time. If the broker or the
ledger does not answer, the agent tries again. The broker itself notices when no answer of the
ledger comes in time.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from ..protocol import MAX_LINE
from .broker_calls import BrokerCalls, broker_calls
from .mail import Mail, PassOn, letter_in

#: The broker sends a report after this many seconds even if nothing has changed. The ledger's
#: time-out is several times longer.
INTERVAL = 2.0
#: Seconds until the next attempt if a broker or a ledger does not answer.
AGAIN = 0.5
#: Time-out in seconds for a broker's answer. If a request lets the broker wait, the time-out is
#: longer by this waiting time.
PATIENCE = 10.0

_LOG = logging.getLogger(__name__)


async def carry(
    broker: Path,
    send: Callable[[str], Awaitable[None]],
    answers: asyncio.Queue[str],
    relay: PassOn,
    *,
    interval: float = INTERVAL,
) -> None:
    """Carry a broker's reports to the ledger and ``answers`` to the broker, until cancelled.

    ``send`` sends a report to the ledger. ``relay`` lets the ledger pass a letter on to another
    agent. Both may raise ``OSError`` if no ledger answers.
    """
    while True:
        try:
            async with broker_calls(broker) as link:
                _LOG.info("Connected to the broker at %s", broker)
                mail = Mail(link, relay)
                await _together(
                    _reports(link, send, interval), _lend(link, answers, mail), mail.fetch()
                )
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
            # The report is lost. The next report contains everything again.
            await asyncio.sleep(AGAIN)
            wait = 0.0


async def _lend(link: BrokerCalls, answers: asyncio.Queue[str], mail: Mail) -> None:
    while True:
        text = await answers.get()
        letter = letter_in(text)
        if letter is not None:
            mail.arrived(letter)
        else:
            await link.call("lend", PATIENCE, answer=text)


async def _together(*works: Awaitable[None]) -> None:
    """Run all ``works`` at the same time. When one of them ends or fails, cancel the others."""
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
    """An agent's connection to a ledger behind a unix socket.

    It is for several "machines" that are processes on one host.
    """

    def __init__(self, path: Path) -> None:
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self._path = path
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None

    async def send(self, report: str) -> None:
        """Send a report; connect first if there is no connection."""
        await self._write(report.encode())

    async def relay(self, node: str, text: str) -> None:
        """Make the ledger pass a letter on to a node."""
        await self._write(json.dumps({"to": node, "text": text}).encode())

    async def _write(self, line: bytes) -> None:
        if self._writer is None:
            reader, self._writer = await asyncio.open_unix_connection(
                str(self._path), limit=MAX_LINE
            )
            self._task = asyncio.get_running_loop().create_task(self._read(reader, self._writer))
        try:
            self._writer.write(line + b"\n")
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
