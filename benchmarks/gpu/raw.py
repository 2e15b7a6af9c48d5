# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Uses device 0 through ``cuda.bindings.driver`` alone, without a framework.

An array on the device has uint32 numbers that count up: ``p[i] = first + i`` modulo 2**32. A check
compares the sum of all numbers, and some single numbers, with the expected values. The device
computes the sum. So the host does not have to read and hash an array of 48 GiB.
"""

from __future__ import annotations

import ctypes
import os
import time
from statistics import median
from typing import Any

import numpy as np
from cuda.bindings import driver

from emucuda.kernels import PTX

#: Blocks and threads of every kernel.
GRID, BLOCK = 1024, 256

#: Number of elements that a check compares one by one.
SAMPLES = 256

_WORDS = 1 << 32


class DriverProblem(RuntimeError):
    """A call of the driver has failed; the text names the call and the error."""


def call(function: Any, *arguments: Any) -> Any:
    """Return the values of a driver call without its result code.

    Raises
    ------
    DriverProblem
        If the result is not CUDA_SUCCESS.
    """
    result, *values = function(*arguments)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise DriverProblem(f"{function.__name__}: {result.name}")
    return values[0] if len(values) == 1 else (tuple(values) or None)


def expected_sum(size: int, first: int) -> int:
    """Return the sum (modulo 2**64) of uint32 numbers from ``first`` on, ``size`` bytes in all."""
    whole, rest = divmod(size // 4, _WORDS)
    start = first % _WORDS
    before_zero = min(rest, _WORDS - start)
    total = whole * (_WORDS * (_WORDS - 1) // 2)
    total += before_zero * start + before_zero * (before_zero - 1) // 2
    after = rest - before_zero
    return (total + after * (after - 1) // 2) % (1 << 64)


class Raw:
    """The primary context of device 0, and arrays on it by name."""

    def __init__(self) -> None:
        self.arrays: dict[str, tuple[int, int]] = {}
        call(driver.cuInit, 0)
        self.device = call(driver.cuDeviceGet, 0)
        self.open()

    def open(self) -> None:
        """Make the context and load the kernels."""
        call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, self.device))
        module = call(driver.cuModuleLoadData, PTX.encode() + b"\0")
        names = ("emucuda_iota_u32", "emucuda_add_u32", "emucuda_sum_u32", "emucuda_spin_ns")
        self._functions = {
            name: call(driver.cuModuleGetFunction, module, name.encode()) for name in names
        }

    def close(self) -> None:
        """Free everything on the device, and the context."""
        for name in list(self.arrays):
            self.free(name)
        call(driver.cuDevicePrimaryCtxRelease, self.device)

    def launch(self, name: str, values: tuple[Any, ...], types: tuple[Any, ...]) -> None:
        call(
            driver.cuLaunchKernel, self._functions[name], GRID, 1, 1, BLOCK, 1, 1, 0, 0,
            (values, types), 0,
        )  # fmt: skip

    def fill(self, address: int, size: int, first: int) -> None:
        """Fill the memory at ``address`` with numbers that count up from ``first``."""
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        self.launch("emucuda_iota_u32", (address, size // 4, first % _WORDS), types)
        self.sync()

    def increase(self, address: int, size: int, step: int) -> None:
        """Launch a GPU kernel that adds ``step`` to each element."""
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32)
        self.launch("emucuda_add_u32", (address, size // 4, step % _WORDS), types)

    def spin(self, seconds: float) -> None:
        """Launch a GPU kernel that occupies one thread of the device for ``seconds``."""
        self.launch("emucuda_spin_ns", (int(seconds * 1e9),), (ctypes.c_uint64,))

    def right(self, address: int, size: int, first: int) -> bool:
        """Return whether the numbers at ``address`` count up from ``first``."""
        out = int(call(driver.cuMemAlloc, 8))
        host = np.zeros(1, np.uint64)
        call(driver.cuMemcpyHtoD, out, host.ctypes.data, 8)
        types = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64)
        self.launch("emucuda_sum_u32", (out, address, size // 4), types)
        call(driver.cuMemcpyDtoH, host.ctypes.data, out, 8)
        call(driver.cuMemFree, out)
        if int(host[0]) != expected_sum(size, first):
            return False
        # If two pages have changed places, the sum is still right. So also check single numbers.
        number, word = size // 4, np.zeros(1, np.uint32)
        for sample in range(SAMPLES):
            place = sample * (number - 1) // (SAMPLES - 1)
            call(driver.cuMemcpyDtoH, word.ctypes.data, address + 4 * place, 4)
            if int(word[0]) != (first + place) % _WORDS:
                return False
        return True

    # ------------------------------------------------------------------ called by another process

    def pid(self) -> int:
        return os.getpid()

    def put(self, name: str, size: int, first: int) -> float:
        """Allocate and fill an array; return the seconds."""
        begun = time.perf_counter()
        self.arrays[name] = int(call(driver.cuMemAlloc, size)), size
        self.fill(*self.arrays[name], first)
        return time.perf_counter() - begun

    def add(self, name: str, step: int) -> None:
        self.increase(*self.arrays[name], step)
        self.sync()

    def check(self, name: str, first: int) -> bool:
        return self.right(*self.arrays[name], first)

    def wrong(self, name: str, first: int) -> int:
        """Copy a whole array to the host; return the number of bytes of all wrong numbers."""
        address, size = self.arrays[name]
        chunk = min(size, 1 << 23)
        words, found = np.empty(chunk // 4, np.uint32), 0
        for at in range(0, size, chunk):
            part = words[: min(chunk, size - at) // 4]
            call(driver.cuMemcpyDtoH, part.ctypes.data, address + at, part.nbytes)
            begin = np.uint32((first + at // 4) % _WORDS)
            found += 4 * int(
                np.count_nonzero(part != np.arange(part.size, dtype=np.uint32) + begin)
            )
        return found

    def free(self, name: str) -> None:
        call(driver.cuMemFree, self.arrays.pop(name)[0])

    def sync(self) -> None:
        call(driver.cuCtxSynchronize)

    # ------------------------------------------------------------------ the speed of copies

    def copies(self, size: int, repetitions: int) -> dict[str, Any]:
        """Return the best and the median GB/s of copies, by kind of host memory and direction.

        "pinned" memory is from ``cuMemHostAlloc``. "pageable" memory is a NumPy array, and NumPy
        has already written to its pages. Each copy has ``size`` bytes.
        """
        device = int(call(driver.cuMemAlloc, size))
        pinned = int(call(driver.cuMemHostAlloc, size, 0))
        pageable = np.ones(size, np.uint8)
        found: dict[str, Any] = {"bytes": size, "repetitions": repetitions}
        for kind, host in (("pinned", pinned), ("pageable", pageable.ctypes.data)):
            ways = {
                "to_host": (driver.cuMemcpyDtoH, host, device),
                "to_device": (driver.cuMemcpyHtoD, device, host),
            }
            for way, (function, to, source) in ways.items():
                speeds = []
                for _ in range(repetitions + 1):
                    self.sync()
                    begun = time.perf_counter()
                    call(function, to, source, size)
                    self.sync()
                    speeds.append(size / (time.perf_counter() - begun) / 1e9)
                del speeds[0]  # the first copy is slower, because it touches new pages
                found[f"{kind}_{way}_GB_per_s"] = {"best": max(speeds), "p50": median(speeds)}
        call(driver.cuMemFreeHost, pinned)
        call(driver.cuMemFree, device)
        return found


class Eyes:
    """NVML's figures of device 0."""

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        pynvml.nvmlInit()
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def used(self) -> int:
        """Return the bytes in use by all processes."""
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def shown(self) -> dict[str, int | None]:
        """Return the bytes by pid. A pid is a string here, because a key in JSON is a string."""
        rows = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        return {str(row.pid): row.usedGpuMemory for row in rows}
