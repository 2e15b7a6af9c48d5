# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Free TCP ports for programs that must know their port before they bind it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress


def free_ports(count: int) -> list[int]:
    """Return free ports.

    They are below the range from which Linux chooses ports, so Linux gives them to no other socket.
    """
    with ExitStack() as open_ones:
        found: list[int] = []
        while len(found) < count:
            made = open_ones.enter_context(socket.socket())
            with suppress(OSError):
                made.bind(("127.0.0.1", random.randrange(20_000, 32_768)))
                found.append(made.getsockname()[1])
        return found


def free_port() -> int:
    return free_ports(1)[0]
