# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A ledger as a process behind a unix socket, for "machines" that are processes on one host.

``python -m jupyter_gpupool.cluster.ledger_service --socket PATH [--config FILE]``. Only its own
user can connect. Each line of a connection is a report, a letter to another agent, or an order:
``{"order": "view"}`` or ``{"order": "fence", "node": NAME}``. The orders ``drain`` and ``resume``
have the same form as ``fence``. After SIGHUP the process reads members and limits again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config import load_settings
from ..errors import GPUPoolError
from ..protocol import MAX_LINE
from .desk import MARGIN, TTL, Desk
from .ledger_events import Limits
from .overlay import limits_of

_LOG = logging.getLogger(__name__)


class LedgerService:
    """A ledger and its connections."""

    def __init__(self, limits: Limits, members: Sequence[str], ttl: float, margin: float) -> None:
        self.desk = Desk(limits, members, self._post, ttl=ttl, margin=margin)
        self._writers: dict[str, asyncio.StreamWriter] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection until it ends."""
        try:
            while line := await reader.readline():
                self._line(json.loads(line), line.decode(), writer)
                await writer.drain()
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            _LOG.warning("A connection ended: %s: %s", type(error).__name__, error)
        finally:
            self._writers = {n: w for n, w in self._writers.items() if w is not writer}
            writer.close()

    def _line(self, message: dict[str, Any], line: str, writer: asyncio.StreamWriter) -> None:
        order = message.get("order")
        if order == "fence":
            self.desk.fence(str(message["node"]))
        if order in ("drain", "resume"):
            self.desk.drain(str(message["node"]), order == "drain")
        if order is not None:
            writer.write(json.dumps(self.desk.view()).encode() + b"\n")
            return
        if "to" in message:
            self.desk.pass_on(str(message["to"]), str(message["text"]))
            return
        self._writers[str(message["node"])] = writer
        self.desk.report(line)

    def _post(self, node: str, answer: str) -> None:
        writer = self._writers.get(node)
        if writer is not None and not writer.is_closing():
            writer.write(json.dumps({"answer": answer}).encode() + b"\n")


async def run(socket: Path, config: Sequence[Path], ttl: float, margin: float) -> None:
    """Serve until SIGTERM, or until a later ledger takes over."""
    settings = load_settings(config)
    service = LedgerService(limits_of(settings.pool), settings.cluster_nodes, ttl, margin)
    ended = service.desk.superseded

    def read_again() -> None:
        try:
            found = load_settings(config)
        except GPUPoolError as error:
            _LOG.error("The configuration was not read again: %s", error)
            return
        service.desk.change(limits_of(found.pool), found.cluster_nodes)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_signal_handler(signal.SIGHUP, read_again)
    socket.unlink(missing_ok=True)
    old = os.umask(0o177)  # only its own user can connect
    try:
        server = await asyncio.start_unix_server(service.serve, str(socket), limit=MAX_LINE)
    finally:
        os.umask(old)
    async with server:
        _LOG.info("The ledger of %s serves at %s", ", ".join(settings.cluster_nodes), socket)
        await ended.wait()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a ledger; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.cluster.ledger_service")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--ttl", type=float, default=TTL)
    parser.add_argument("--margin", type=float, default=MARGIN)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        asyncio.run(run(options.socket, options.config, options.ttl, options.margin))
    except GPUPoolError as error:
        print(f"The ledger cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
