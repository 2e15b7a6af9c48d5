# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Launches Python functions as kernels, also in the capture of a graph.

The emulated driver has a kernel ``emucuda_host_call``, which calls the function. This kernel is
launched with ``cuLaunchKernel``. So, like any launch, it passes the guard, waits while a checkpoint
has locked the process, and takes time on its stream.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import traceback
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PTX = b""".version 7.0
.target sm_70
.address_size 64
.visible .entry emucuda_host_call(.param .u64 f, .param .u64 x, .param .u64 ns) { ret; }
"""
#: The name under which only the emulated driver exports a table of functions (``src/export.c``).
_TABLE = b"emucuda: devices"
_INVALID_CONTEXT = 201
_LAUNCH_FAILED = 719
#: The nanoseconds that a small kernel takes.
SHORTEST = 3000


class NotEmulatedError(RuntimeError):
    """The driver of this process is not the emulated one."""


class _Table(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("bytes_at", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64)),
    ]


class Launcher:
    """Launches functions on the emulated devices of this process."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        table = ctypes.POINTER(_Table)()
        if self._driver.cuGetExportTable(ctypes.byref(table), _TABLE):
            raise NotEmulatedError(
                "EMUCUDA_MACHINE is set, but the CUDA driver of this process is not the emulated "
                "one: PyTorch stays as it is."
            )
        self._table = table.contents
        self._functions: dict[int, ctypes.c_void_p] = {}
        self._work: dict[int, Callable[[], None]] = {}
        self._kept: set[int] = set()  # keys of work in graphs, which stays until the process ends
        self._keys = itertools.count(1)
        self._thread = threading.local()
        self._entry = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64)(self._called)
        self._address = ctypes.c_uint64(ctypes.cast(self._entry, ctypes.c_void_p).value or 0)

    def bytes_at(self, address: int, size: int) -> int:
        """Return the host address of device memory; 0 if these bytes are not device memory."""
        return self._table.bytes_at(address, size) or 0

    def launch(
        self, device: int, work: Callable[[], None], ns: int = SHORTEST, *, keep: bool = False
    ) -> None:
        """Run ``work`` on the current stream of a device.

        If the stream is in capture, set ``keep``. The capture then records ``work``, and each
        launch of the graph runs it.
        """
        key = next(self._keys)
        self._work[key] = work
        if keep:
            self._kept.add(key)
        self._thread.error = None
        try:
            result = self._submit(device, key, ns)
        finally:
            if not keep:
                del self._work[key]
        error, self._thread.error = self._thread.error, None
        if error is not None:
            raise error
        if result:
            name = ctypes.c_char_p()
            self._driver.cuGetErrorString(result, ctypes.byref(name))
            raise RuntimeError(f"CUDA error: {(name.value or b'unknown').decode()}")

    def _submit(self, device: int, key: int, ns: int) -> int:
        argument, duration = ctypes.c_uint64(key), ctypes.c_uint64(ns)
        parameters = (ctypes.c_void_p * 3)(
            *(ctypes.addressof(value) for value in (self._address, argument, duration))
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
        for attempt in (1, 2):
            code = self._function(device)
            result: int = self._driver.cuLaunchKernel(
                code, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None
            )
            if result != _INVALID_CONTEXT or attempt == 2:
                break
            torch.cuda.set_device(device)  # this thread has not used the device yet
        return result

    def _function(self, device: int) -> ctypes.c_void_p:
        found = self._functions.get(device)
        if found is None:
            torch.cuda.set_device(device)
            module, found = ctypes.c_void_p(), ctypes.c_void_p()
            result = self._driver.cuModuleLoadData(ctypes.byref(module), _PTX)
            result = result or self._driver.cuModuleGetFunction(
                ctypes.byref(found), module, b"emucuda_host_call"
            )
            if result:
                raise RuntimeError(f"CUDA error: {result} when the kernel of operators was loaded")
            self._functions[device] = found
        return found

    def _called(self, key: int) -> int:
        try:
            self._work[key]()
        except BaseException as error:  # launch() raises it, even a KeyboardInterrupt
            # At the launch of a graph, no thread waits for the result of this work. So nobody could
            # raise its error. As on hardware, the failed kernel ends the context.
            if key in self._kept:
                traceback.print_exc()
                return _LAUNCH_FAILED
            self._thread.error = error
        return 0
