# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agent of one machine as a process that uses the ledger in Ray; ``node`` starts it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from .courier import INTERVAL
from .desk import TTL
from .ray_ledger import run_agent


def main(argv: Sequence[str] | None = None) -> int:
    """Run an agent; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jupyter_gpupool.cluster.ray_agent")
    parser.add_argument("--address", required=True)
    parser.add_argument("--broker", type=Path, required=True)
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--ttl", type=float, default=TTL)
    parser.add_argument("--interval", type=float, default=INTERVAL)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    asyncio.run(
        run_agent(
            options.address, options.broker, options.config,
            ttl=options.ttl, interval=options.interval,
        )
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
