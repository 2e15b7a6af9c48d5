# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machine under test: the one with an NVIDIA GPU if this is one, else an emulated one.

The same tests run on both. On an emulated device they show that the tests themselves hold, and
nothing about a driver; what they find is marked with the device's name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from jupyter_gpupool.emulation import environment, real_driver_present

GiB = 1 << 30
MiB = 1 << 20

#: What is emulated where there is no GPU: small, so that states move in no time.
EMULATED = "1x4GiB,context=64MiB"

#: Bytes of the emulated device for a byte of a real one, in :meth:`Machine.bytes`.
SCALE = 16


@dataclass(frozen=True)
class Machine:
    """Where the tests run."""

    #: The environment that leads to its driver.
    env: dict[str, str]
    #: ``c.GPUPool.emulate`` for a broker on it.
    emulate: str

    @property
    def real(self) -> bool:
        """Whether its devices are NVIDIA's."""
        return not self.emulate

    def bytes(self, size: int) -> int:
        """Return a size (bytes) meant for a real device as this one is to have it."""
        return size if self.real else size // SCALE


@contextmanager
def machine(emulate: str = EMULATED) -> Iterator[Machine]:
    """Yield this machine if it has an NVIDIA driver, else the emulated one."""
    if real_driver_present():
        yield Machine(dict(os.environ), "")
        return
    from tests.emulated import build

    build.compile()
    with TemporaryDirectory(prefix="gpb") as folder:
        yield Machine({**os.environ, **environment(emulate, Path(folder) / "machine")}, emulate)


#: Calls cuInit and makes no context, so that it takes no device memory.
_HOLDER = """
import ctypes, sys
try:
    print(ctypes.CDLL("libcuda.so.1").cuInit(0), flush=True)
except OSError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@contextmanager
def driver_up(found: Machine) -> Iterator[str]:
    """Keep a process that has called cuInit; yield what came of it, "0" if it worked.

    Without persistence mode the driver starts anew for the first process that comes, and that
    takes seconds: here once, and not for each test.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER],
        env=found.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        yield holder.stdout.readline().strip()
    finally:
        holder.kill()
        holder.communicate(timeout=30)
