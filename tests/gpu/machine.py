# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machine under test: this machine if it has an NVIDIA GPU, else an emulated machine.

The same tests run on both machines. On an emulated device, they show that the tests themselves
work, but show nothing about a driver. The device's name in the results tells whether the device was
emulated.
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

#: The emulated machine, if there is no GPU. It is small, so that copies are quick.
EMULATED = "1x4GiB,context=64MiB"

#: The ratio of a size on the emulated device to the size on a real device, for
#: :meth:`Machine.bytes`.
SCALE = 16


@dataclass(frozen=True)
class Machine:
    """The machine on which the tests run."""

    #: The environment variables for the machine's driver.
    env: dict[str, str]
    #: ``c.GPUPool.emulate`` for a broker on it.
    emulate: str

    @property
    def real(self) -> bool:
        """Whether the machine's devices are real NVIDIA devices."""
        return not self.emulate

    def bytes(self, size: int) -> int:
        """Convert a size (bytes) for a real device to the size for this machine."""
        return size if self.real else size // SCALE


@contextmanager
def machine(emulate: str = EMULATED) -> Iterator[Machine]:
    """Yield this machine if it has an NVIDIA driver, else an emulated machine."""
    if real_driver_present():
        yield Machine(dict(os.environ), "")
        return
    from tests.emulated import build

    build.compile()
    with TemporaryDirectory(prefix="gpb") as folder:
        yield Machine({**os.environ, **environment(emulate, Path(folder) / "machine")}, emulate)


#: Calls cuInit without making a context, so it takes no device memory.
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
    """Keep a process running that has called cuInit; yield the result, "0" for success.

    Without persistence mode, the driver stops when no process uses it, and its next start takes
    seconds. This process keeps the driver running, so it starts only once, not for each test.
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
