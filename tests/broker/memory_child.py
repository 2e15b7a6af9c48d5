# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A program on the devices of ``memory_broker``: each of its allocations is a file."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_gpupool.kernel.frameworks import show_devices

from . import child
from .memory_broker import MACHINE, VISIBLE


def do_alloc(command):
    device = child.LINK.slices[0].device
    with (Path(os.environ[MACHINE]) / device / str(os.getpid())).open("wb") as file:
        file.write(bytes([command["byte"]]) * 4096)
        file.truncate(command["bytes"])


def do_where(_):
    """Return the folder of the file with this program's memory, the file's first byte and size."""
    (found,) = Path(os.environ[MACHINE]).glob(f"*/{os.getpid()}")
    with found.open("rb") as file:
        return [found.parent.name, file.read(1)[0], found.stat().st_size]


def do_sees(_):
    return os.environ[VISIBLE].split(",")


def do_settle(_):
    """Set the visible devices as the agent does after a lease; return the variables that changed.

    The agent of a kernel calls the same function before each cell.
    """
    before = dict(os.environ)
    show_devices([s.device for s in child.LINK.slices])
    return dict(os.environ.items() - before.items())


if __name__ == "__main__":
    child.do_alloc, child.do_where = do_alloc, do_where
    child.do_sees, child.do_settle = do_sees, do_settle
    child.main()
