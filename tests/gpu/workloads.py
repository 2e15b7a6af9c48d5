# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The workloads: each framework keeps the same bytes on a device and computes on them.

The state of a workload is a set of named arrays of uint32. An array begins with ``p[i] = first +
i``, and each step of work does ``p[i] += step``, modulo 2**32. So :func:`expected` can compute
its hash without a GPU. Only the child process (``child.py``) imports frameworks, when it makes a
workload. ``cuda-core`` also runs on the emulated driver. The others need CUDA's runtime, and so a
real driver.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from typing import Any, Protocol

import numpy as np

from .machine import MiB

#: The type of an array's elements, in the host's byte order.
U32 = np.dtype("<u4")


def expected(size: int, first: int, steps: int = 0) -> str:
    """Return the SHA-256 that an array of ``size`` bytes has after its steps of work.

    ``steps`` is the sum of the steps' values.
    """
    start = np.uint64((first + steps) % (1 << 32))
    return hashlib.sha256((np.arange(size // 4, dtype=np.uint64) + start).astype(U32)).hexdigest()


#: A fingerprint hashes PIECES pieces of an array. A piece has at most PIECE bytes.
PIECES, PIECE = 64, MiB


def pieces(size: int) -> tuple[list[int], int]:
    """Return the offsets of the pieces of an array of ``size`` bytes, and the length of a piece."""
    long = min(PIECE, size // PIECES // 4 * 4)
    return [(size - long) * i // (PIECES - 1) // 4 * 4 for i in range(PIECES)], long


def expected_fingerprint(size: int, first: int, steps: int = 0) -> list[Any]:
    """Return the expected value of :meth:`CudaCore.fingerprint`, for arrays too
    large to hash whole.
    """
    start, number, turn = (first + steps) % (1 << 32), size // 4, 1 << 32
    whole, rest = divmod(number, turn)
    wrapped = max(0, start + rest - turn)
    total = whole * (turn * (turn - 1) // 2) + rest * start + rest * (rest - 1) // 2
    total -= wrapped * turn
    places, long = pieces(size)
    sha = hashlib.sha256()
    for place in places:
        at = np.arange(place // 4, (place + long) // 4, dtype=np.uint64) + np.uint64(start)
        sha.update(at.astype(U32))
    return [total % (1 << 64), sha.hexdigest()]


class Workload(Protocol):
    """The methods that every framework has for the tests. Sizes are in bytes, multiples of 4."""

    def put(self, name: str, size: int, first: int) -> None:
        """Put an array on the device."""

    def work(self, name: str, step: int) -> None:
        """Add ``step`` to each element. The workload does this with the feature that it tests."""

    def get(self, name: str) -> Any:
        """Return the array's elements as a NumPy array on the host."""

    def free(self, name: str) -> None:
        """Return the array's memory to the driver."""

    def sync(self) -> None:
        """Wait until the device has done all work."""


class CudaCore:
    """NVIDIA's cuda-core and a kernel from PTX."""

    def __init__(self) -> None:
        from cuda.core import Device, LaunchConfig, ObjectCode, launch

        from tests.emulated import PTX

        self._device = Device()
        self._device.set_current()
        self._stream = self._device.create_stream()
        module = ObjectCode.from_ptx(PTX.encode())
        self._iota = module.get_kernel("emucuda_iota_u32")
        self._add = module.get_kernel("emucuda_add_u32")
        self._sum = module.get_kernel("emucuda_sum_u32")
        self._spin = module.get_kernel("emucuda_spin_ns")
        self._launch, self._grid = launch, LaunchConfig(grid=1024, block=256)
        self._one = LaunchConfig(grid=1, block=1)
        self._buffers: dict[str, Any] = {}

    def _run(self, kernel: Any, name: str, value: int) -> None:
        buffer = self._buffers[name]
        number = np.uint64(buffer.size // 4)
        self._launch(self._stream, self._grid, kernel, buffer, number, np.uint32(value))

    def put(self, name: str, size: int, first: int) -> None:
        self._buffers[name] = self._device.allocate(size, stream=self._stream)
        self._run(self._iota, name, first)
        self.sync()

    def work(self, name: str, step: int) -> None:
        self._run(self._add, name, step)

    def get(self, name: str) -> Any:
        from cuda.bindings import driver

        self.sync()
        buffer = self._buffers[name]
        host = np.empty(buffer.size // 4, U32)
        (result,) = driver.cuMemcpyDtoH(host.ctypes.data, int(buffer.handle), buffer.size)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemcpyDtoH: {result.name}")
        return host

    def fingerprint(self, name: str) -> list[Any]:
        """Return the sum of all elements, and the SHA-256 of pieces of the array.

        Only the device reads the whole array. The host would need a minute to hash 24 GiB.
        """
        from cuda.bindings import driver

        buffer = self._buffers[name]
        total = self._device.allocate(8, stream=self._stream)
        (result,) = driver.cuMemsetD8Async(int(total.handle), 0, 8, self._stream.handle)
        assert result == driver.CUresult.CUDA_SUCCESS, result
        number = np.uint64(buffer.size // 4)
        self._launch(self._stream, self._grid, self._sum, total, buffer, number)
        self.sync()
        places, long = pieces(buffer.size)
        sha, piece, out = hashlib.sha256(), bytearray(long), bytearray(8)
        for place in places:
            (result,) = driver.cuMemcpyDtoH(piece, int(buffer.handle) + place, long)
            assert result == driver.CUresult.CUDA_SUCCESS, result
            sha.update(piece)
        (result,) = driver.cuMemcpyDtoH(out, int(total.handle), 8)
        assert result == driver.CUresult.CUDA_SUCCESS, result
        total.close(self._stream)
        return [int.from_bytes(out, "little"), sha.hexdigest()]

    def spin(self, ns: int) -> None:
        """Occupy the device for this many nanoseconds, without waiting."""
        self._launch(self._stream, self._one, self._spin, np.uint64(ns))

    def free(self, name: str) -> None:
        from cuda.bindings import driver

        self._buffers.pop(name).close(self._stream)
        self.sync()
        # Memory that cuda-core frees stays in the driver's memory pool. A trim returns the memory.
        result, pool = driver.cuDeviceGetMemPool(self._device.device_id)
        assert result == driver.CUresult.CUDA_SUCCESS, result
        (result,) = driver.cuMemPoolTrimTo(pool, 0)
        assert result == driver.CUresult.CUDA_SUCCESS, result

    def sync(self) -> None:
        self._stream.sync()


#: The device of PyTorch's workloads. The value "cpu" lets a developer try the workloads without a
#: GPU.
TORCH_DEVICE = os.environ.get("GPUPOOL_TEST_TORCH_DEVICE", "cuda")

#: PyTorch fills at most this many elements in one call.
_PART = 1 << 30


class Torch:
    """PyTorch, eager."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._arrays: dict[str, Any] = {}
        torch.zeros(1, device=TORCH_DEVICE)

    def put(self, name: str, size: int, first: int) -> None:
        # Allocate the array once and fill it in place. With a temporary array, the caching
        # allocator would keep a second array's memory. Fill the array in parts, because an array
        # of 8 GiB or more has more elements than int32 can count.
        array = self.torch.empty(size // 4, dtype=self.torch.int32, device=TORCH_DEVICE)
        for start in range(0, size // 4, _PART):
            part = array[start : start + _PART]
            self.torch.arange(part.numel(), dtype=self.torch.int32, out=part)
            part.add_(_signed(first + start))
        self._arrays[name] = array
        self.sync()

    def work(self, name: str, step: int) -> None:
        self._arrays[name].add_(_signed(step))

    def get(self, name: str) -> Any:
        return self._arrays[name].cpu().numpy().view(U32)

    def free(self, name: str) -> None:
        del self._arrays[name]
        self.torch.cuda.empty_cache()

    def sync(self) -> None:
        if TORCH_DEVICE == "cuda":
            self.torch.cuda.synchronize()


def _signed(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


class TorchExpandable(Torch):
    """PyTorch with expandable segments: its allocator maps memory by the driver's VMM calls."""

    def __init__(self) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ[name] = "expandable_segments:True"
        super().__init__()


class TorchAsync(Torch):
    """PyTorch with cudaMallocAsync as its allocator, so memory is in the driver's own pools."""

    def __init__(self) -> None:
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            os.environ[name] = "backend:cudaMallocAsync"
        super().__init__()
        assert self.torch.cuda.get_allocator_backend() == "cudaMallocAsync"


class TorchGraph(Torch):
    """PyTorch with CUDA graphs. It captures one graph for each array, and replays it for a step."""

    def __init__(self) -> None:
        super().__init__()
        self._graphs: dict[str, Any] = {}
        self._steps: dict[str, Any] = {}

    def put(self, name: str, size: int, first: int) -> None:
        super().put(name, size, first)
        step = self.torch.zeros(1, dtype=self.torch.int32, device=TORCH_DEVICE)
        # Run the kernel once before the capture. Its first run may load code, and a capture does
        # not allow this.
        self._arrays[name].add_(step)
        self.sync()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self._arrays[name].add_(step)
        self._steps[name], self._graphs[name] = step, graph

    def work(self, name: str, step: int) -> None:
        self._steps[name].fill_(_signed(step))
        self._graphs[name].replay()

    def free(self, name: str) -> None:
        del self._graphs[name], self._steps[name]
        super().free(name)


class TorchCompile(Torch):
    """PyTorch with torch.compile: at the first call, Triton compiles the kernels."""

    def __init__(self) -> None:
        super().__init__()

        def add(array: Any, step: Any) -> Any:
            return array.add_(step)

        self._add = self.torch.compile(add, dynamic=True)

    def work(self, name: str, step: int) -> None:
        number = self.torch.tensor(_signed(step), dtype=self.torch.int32, device=TORCH_DEVICE)
        self._add(self._arrays[name], number)


class Triton(Torch):
    """A Triton kernel on PyTorch's memory."""

    def __init__(self) -> None:
        super().__init__()
        from . import triton_add

        self._kernel = triton_add.add

    def work(self, name: str, step: int) -> None:
        array = self._arrays[name]
        grid = ((array.numel() + 1023) // 1024,)
        self._kernel[grid](array, array.numel(), _signed(step), BLOCK=1024)


class CuPy:
    """CuPy and its memory pool."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._arrays: dict[str, Any] = {}
        cupy.zeros(1)

    def put(self, name: str, size: int, first: int) -> None:
        array = self._cupy.arange(size // 4, dtype=self._cupy.uint32)
        array += self._cupy.uint32(first)
        self._arrays[name] = array
        self.sync()

    def work(self, name: str, step: int) -> None:
        self._arrays[name] += self._cupy.uint32(step)

    def get(self, name: str) -> Any:
        return self._arrays[name].get()

    def free(self, name: str) -> None:
        del self._arrays[name]
        self._cupy.get_default_memory_pool().free_all_blocks()

    def sync(self) -> None:
        self._cupy.cuda.Device().synchronize()


class Jax:
    """JAX: code compiled by XLA, and a new array for each step."""

    def __init__(self) -> None:
        # By default, JAX allocates three quarters of the device's memory. A suspend would copy all
        # these bytes to host memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        import jax

        self._jax = jax
        self._arrays: dict[str, Any] = {}
        # Without a GPU, JAX would compute on the CPU and only log a warning.
        if TORCH_DEVICE == "cuda":
            assert jax.default_backend() == "gpu", jax.devices()
        jax.numpy.zeros(1).block_until_ready()
        self._make = jax.jit(
            lambda first, number: jax.lax.iota(jax.numpy.uint32, number) + first, static_argnums=1
        )
        # The new array takes over the memory of the old array, so at most one copy exists.
        self._step = jax.jit(lambda array, step: array + step, donate_argnums=0)

    def put(self, name: str, size: int, first: int) -> None:
        made = self._make(np.uint32(first), size // 4)
        # If the device has no memory for the array, this call raises, and the array is not kept.
        made.block_until_ready()
        self._arrays[name] = made

    def work(self, name: str, step: int) -> None:
        self._arrays[name] = self._step(self._arrays[name], np.uint32(step))

    def get(self, name: str) -> Any:
        # A JAX array caches its bytes on the host when it is read. A step makes a new array in the
        # same memory. The new array has no cached bytes, so the read below copies from the device.
        self.work(name, 0)
        return np.asarray(self._arrays[name])

    def free(self, name: str) -> None:
        self._arrays.pop(name).delete()

    def sync(self) -> None:
        for array in self._arrays.values():
            array.block_until_ready()


class Numba:
    """numba-cuda: a kernel compiled from Python."""

    def __init__(self) -> None:
        from numba import cuda

        @cuda.jit
        def add(array: Any, step: Any) -> None:
            place = cuda.grid(1)
            while place < array.size:
                array[place] += step
                place += cuda.gridsize(1)

        cuda.current_context()
        self._cuda, self._add = cuda, add
        self._arrays: dict[str, Any] = {}

    def put(self, name: str, size: int, first: int) -> None:
        start = np.uint64(first)
        host = (np.arange(size // 4, dtype=np.uint64) + start).astype(U32)
        self._arrays[name] = self._cuda.to_device(host)
        self.sync()

    def work(self, name: str, step: int) -> None:
        self._add[1024, 256](self._arrays[name], np.uint32(step))

    def get(self, name: str) -> Any:
        return self._arrays[name].copy_to_host()

    def free(self, name: str) -> None:
        del self._arrays[name]
        # numba frees memory only in batches, or at this call.
        self._cuda.current_context().memory_manager.deallocations.clear()

    def sync(self) -> None:
        self._cuda.synchronize()


#: For each name of a workload: its class, and the package whose version the tests record.
WORKLOADS: dict[str, tuple[type[Any], str]] = {
    "cuda-core": (CudaCore, "cuda-core"),
    "torch": (Torch, "torch"),
    "torch-expandable": (TorchExpandable, "torch"),
    "torch-async": (TorchAsync, "torch"),
    "torch-graph": (TorchGraph, "torch"),
    "torch-compile": (TorchCompile, "torch"),
    "triton": (Triton, "triton"),
    "cupy": (CuPy, "cupy-cuda13x"),
    "jax": (Jax, "jax"),
    "numba": (Numba, "numba-cuda"),
}


def version(name: str) -> str:
    """Return the version of a workload's package, or "not installed"."""
    try:
        return importlib.metadata.version(WORKLOADS[name][1])
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
