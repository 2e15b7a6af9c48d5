# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent of one machine as a process, with a ledger behind a unix socket.

``python -m jupyter_gpupool.cluster.agent_service --broker PATH --ledger PATH``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .courier import INTERVAL, SocketLedger, carry


async def run(broker: Path, ledger: Path, interval: float) -> None:
    """Carry reports and answers until the process ends."""
    link = SocketLedger(ledger)
    await carry(broker, link.send, link.answers, link.relay, interval=interval)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.cluster.agent_service")
    parser.add_argument("--broker", type=Path, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--interval", type=float, default=INTERVAL)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    with suppress(KeyboardInterrupt):
        asyncio.run(run(options.broker, options.ledger, options.interval))
    return 0


if __name__ == "__main__":
    sys.exit(main())
