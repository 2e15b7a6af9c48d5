# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A NumPy array on the GPU, for the notebooks beside this file.

This module uses NVIDIA's cuda-core and cuda-bindings. It also has two small CUDA kernels as PTX
text, which run on real and on emulated GPUs. It uses no function of the pool.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, launch

from emucuda.kernels import PTX


class CUDAError(RuntimeError):
    """A driver call failed; ``code`` is the driver's ``CUresult``."""

    def __init__(self, code: driver.CUresult) -> None:
        super().__init__(code.name)
        self.code = code


def call(answer: tuple[Any, ...]) -> Any:
    """Return the value, or the list of values, of a driver call.

    Raises :class:`CUDAError` if the call has failed.
    """
    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CUDAError(code)
    return values[0] if len(values) == 1 else values or None


class GPUArray:
    """A copy of a NumPy array in device memory.

    The device memory is freed when this Python object is deleted.

    Parameters
    ----------
    array:
        The array to copy; it must be C-contiguous.
    device:
        The CUDA ordinal of the device.
    """

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self._address = 0
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.device = Device(device)
        self.device.set_current()
        self._address = int(call(driver.cuMemAlloc(array.nbytes)))
        self.write(array)

    @property
    def address(self) -> int:
        """The device address; it stays the same after a suspend and a restore."""
        return self._address

    def write(self, array: np.ndarray) -> GPUArray:
        """Copy an array of the same size to the device."""
        self.device.set_current()
        call(
            driver.cuMemcpyHtoD(self._address, np.ascontiguousarray(array).ctypes.data, self.nbytes)
        )
        return self

    def read(self) -> np.ndarray:
        """Return a copy in host memory."""
        self.device.set_current()
        found = np.empty(self.shape, self.dtype)
        call(driver.cuMemcpyDtoH(found.ctypes.data, self._address, self.nbytes))
        return found

    def copy(self) -> GPUArray:
        """Return a copy in the memory of the same device."""
        self.device.set_current()
        other = object.__new__(GPUArray)
        other._address = 0
        other.shape, other.dtype, other.nbytes = self.shape, self.dtype, self.nbytes
        other.device = self.device
        other._address = int(call(driver.cuMemAlloc(self.nbytes)))
        call(driver.cuMemcpyDtoD(other._address, self._address, self.nbytes))
        return other

    def fill(self, value: int) -> GPUArray:
        """Let the device set every byte to ``value``."""
        self.device.set_current()
        call(driver.cuMemsetD8(self._address, value, self.nbytes))
        return self

    def free(self) -> None:
        """Free the device memory now."""
        address, self._address = self._address, 0
        if address:
            self.device.set_current()
            call(driver.cuMemFree(address))

    def __del__(self) -> None:
        address, self._address = getattr(self, "_address", 0), 0
        if address:
            driver.cuMemFree(address)  # garbage collection cannot report an error


_KERNELS: dict[tuple[int, str], Any] = {}


def _kernel(device: Device, name: str) -> Any:
    """Return a CUDA kernel of the PTX module. The first call for each device loads the kernel."""
    key = (device.device_id, name)
    if key not in _KERNELS:
        _KERNELS[key] = ObjectCode.from_ptx(PTX.encode()).get_kernel(name)
    return _KERNELS[key]


def add(array: GPUArray, value: int, stream: Any = None) -> None:
    """Add ``value`` to each 32-bit unsigned element, on the GPU."""
    array.device.set_current()
    launch(
        stream or array.device.default_stream,
        LaunchConfig(grid=64, block=256),
        _kernel(array.device, "emucuda_add_u32"),
        array.address,
        np.uint64(array.nbytes // 4),
        np.uint32(value),
    )


def total(array: GPUArray) -> int:
    """Return the sum of all 32-bit unsigned elements, computed on the GPU."""
    result = GPUArray(np.zeros(1, np.uint64), array.device.device_id)
    launch(
        array.device.default_stream,
        LaunchConfig(grid=64, block=256),
        _kernel(array.device, "emucuda_sum_u32"),
        result.address,
        array.address,
        np.uint64(array.nbytes // 4),
    )
    return int(result.read()[0])
