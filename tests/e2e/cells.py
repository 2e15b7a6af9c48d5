# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Code that the tests run inside kernels. It uses NVIDIA's bindings and numpy, but not the pool.

The code writes values that depend on the address, on the kernel's seed and on a key of the write.
So a check finds lost pages, swapped pages, bytes of another kernel, and bytes of an older write.
"""

from __future__ import annotations

#: Code that defines the class ``Block(mib)``, an array in device memory. ``SEED`` must be defined
#: before the first ``write(key)``.
DEFINE = '''
import numpy as np
from cuda.bindings import driver

def call(answer):
    error, *values = answer
    assert error == driver.CUresult.CUDA_SUCCESS, f"the driver answered {error!r}"
    return values[0] if values else None

class Block:
    """``mib`` MiB of device memory, in chunks, the last of them scratch.

    Small chunks: each 4 KiB of a large new array is a page fault, which took longer than the rest.
    """

    def __init__(self, mib, chunk_mib=2):
        self.chunk = max(1, min(chunk_mib, mib // 5)) << 20
        self.count = (mib << 20) // self.chunk
        self.bytes = mib << 20
        self.base = np.arange(self.chunk // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        self.buffer = np.empty_like(self.base)
        self.address = None

    def allocate(self):
        call(driver.cuInit(0))
        if not int(call(driver.cuCtxGetCurrent())):
            call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))))
        self.address = int(call(driver.cuMemAlloc(self.bytes)))
        self.order = list(range(self.count))
        return self

    def expected(self, number, into=None):
        into = self.buffer if into is None else into
        with np.errstate(over="ignore"):
            salt = np.uint64((SEED * 1_000_003 + self.key * 4099 + number) & (2**64 - 1))
            np.add(self.base, salt, out=into)
        return into

    def at(self, place):
        return self.address + place * self.chunk

    def write(self, key):
        """Fill every byte from the host."""
        self.key = key
        self.order = list(range(self.count))
        for place in range(self.count):
            call(driver.cuMemcpyHtoD(self.at(place), self.expected(place).ctypes.data, self.chunk))
        return self

    def compute(self):
        """Reverse the chunks on the device, through the last one."""
        scratch = self.count - 1
        for low in range(scratch // 2):
            high = scratch - 1 - low
            for target, source in ((scratch, low), (low, high), (high, scratch)):
                call(driver.cuMemcpyDtoD(self.at(target), self.at(source), self.chunk))
                self.order[target] = self.order[source]
        call(driver.cuCtxSynchronize())
        return self

    def verify(self):
        """Read every byte back and compare."""
        back, mine = np.empty_like(self.base), np.empty_like(self.base)  # of this thread alone
        for place, number in enumerate(self.order):
            call(driver.cuMemcpyDtoH(back.ctypes.data, self.at(place), self.chunk))
            wrong = np.flatnonzero(back != self.expected(number, mine))
            assert not wrong.size, (
                f"{wrong.size} of {back.size} words of chunk {place} are wrong, the first at "
                f"{wrong[0]}: {back[wrong[0]]:#x}"
            )
        return self

    def free(self):
        call(driver.cuMemFree(self.address))
        self.address = None

def device():
    """The UUID of the device that this process computes on."""
    raw = bytes(call(driver.cuDeviceGetUuid(call(driver.cuCtxGetDevice()))).bytes)
    import uuid
    return "GPU-" + str(uuid.UUID(bytes=raw))
'''


def setup(seed: int, mib: int, key: int = 0) -> str:
    """Return a cell that allocates ``mib`` MiB and writes all of it."""
    return f"SEED = {seed}\n{DEFINE}\nblock = Block({mib}).allocate().write({key})\n"


#: A cell that keeps its lease busy until the file appears (or two minutes have passed).
BUSY = """
import time as _time
from pathlib import Path as _Path
_end = _time.monotonic() + 120
while not _Path({flag!r}).exists() and _time.monotonic() < _end:
    _time.sleep(0.01)
"""


def busy(flag: object) -> str:
    return BUSY.format(flag=str(flag))


#: A cell that uses CUDA without pause until the file appears (or two minutes have passed).
COMPUTING = """
import time as _time
from pathlib import Path as _Path
_end = _time.monotonic() + 120
while not _Path({flag!r}).exists() and _time.monotonic() < _end:
    call(driver.cuCtxSynchronize())
    _time.sleep(0.01)
"""


def computing(flag: object) -> str:
    return COMPUTING.format(flag=str(flag))
