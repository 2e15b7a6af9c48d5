# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machine under test: this machine if it has an NVIDIA GPU, else an emulated machine.

The same tests run on both machines. Their results on an emulated device say nothing about a real
driver, and show only that the tests themselves work. The device's name in the results shows whether
the device was emulated.
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

from jupyter_gpupool.devices import vendor
from jupyter_gpupool.emulation import environment

GiB = 1 << 30
MiB = 1 << 20

#: The emulated machine for a machine without a GPU. Its device is small, so copies are quick.
EMULATED = "1x4GiB,context=64MiB"

#: A size on a real device is this many times the size on the emulated device; see
#: :meth:`Machine.bytes`.
SCALE = 16


@dataclass(frozen=True)
class Machine:
    """The machine on which the tests run."""

    #: The environment of processes that use the driver of this machine.
    env: dict[str, str]
    #: ``c.GPUPool.emulate`` for a broker on it.
    emulate: str

    @property
    def real(self) -> bool:
        """Whether the machine's devices are real NVIDIA devices."""
        return not self.emulate

    def bytes(self, size: int) -> int:
        """Return ``size``, or a smaller size in place of it if the devices are emulated."""
        return size if self.real else size // SCALE


@contextmanager
def machine(emulate: str = EMULATED) -> Iterator[Machine]:
    """Yield this machine if it has an NVIDIA driver, else an emulated machine."""
    if vendor.driver_present():
        yield Machine(dict(os.environ), "")
        return
    from tests.emulated import build

    build.compile()
    with TemporaryDirectory(prefix="gpb") as folder:
        yield Machine({**os.environ, **environment(emulate, Path(folder) / "machine")}, emulate)


#: A program that calls cuInit and waits. It makes no context, so it uses no device memory.
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
    """Keep a process running that has called cuInit; yield its result ("0" is success).

    Without persistence mode, the driver stops when no process uses it. Its next start takes
    seconds. Because of this process, the driver starts only once for all tests.
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
