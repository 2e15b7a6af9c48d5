# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes Linux run the event loop sooner after a message, on a machine whose cores are busy.

A thread that wakes on a busy core waits until the time slice of the running thread ends. That takes
up to 3 milliseconds, longer than a whole grant. Since Linux 6.12, a thread may ask for shorter time
slices (``sched_setattr(2)``, ``sched_runtime`` of a normal thread). The thread gets no larger share
of the processor, but Linux lets it interrupt a thread with a longer slice. Older kernels ignore the
request.
"""

from __future__ import annotations

import ctypes
import platform
import struct

#: The length of the event loop's time slices in nanoseconds: the shortest that Linux allows.
SLICE = 100_000

#: ``struct sched_attr`` of <linux/sched/types.h>: size, policy, flags, nice, priority, runtime,
#: deadline, period, least and largest utilisation.
_ATTRIBUTES = struct.Struct("=IIQiIQQQII")
_RESET_ON_FORK = 1

#: Numbers of the system calls ``sched_setattr`` and ``sched_getattr``.
_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


def wake_soon() -> bool:
    """Ask for the shortest time slice for this thread; return whether Linux grants it.

    Threads and processes that this thread starts have the usual time slice.
    """
    found = _read(0)
    if found is None or found[1]:  # an administrator chose another policy than the normal one
        return False
    found[2] |= _RESET_ON_FORK
    found[5] = SLICE
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.pack(*found), _ATTRIBUTES.size)
    failed = ctypes.CDLL(None).syscall(_CALLS[platform.machine()][0], 0, attributes, 0)
    return not failed and time_slice(0) == SLICE


def time_slice(thread: int) -> int:
    """Return a thread's time slice in nanoseconds; 0 if it is not known.

    ``thread`` 0 is the calling thread.
    """
    found = _read(thread)
    return found[5] if found is not None else 0


def _read(thread: int) -> list[int] | None:
    """Return the scheduling attributes of a thread, or None if the system does not show them."""
    if platform.machine() not in _CALLS:
        return None
    attributes = ctypes.create_string_buffer(_ATTRIBUTES.size)
    number = _CALLS[platform.machine()][1]
    if ctypes.CDLL(None).syscall(number, thread, attributes, _ATTRIBUTES.size, 0):
        return None
    return [*_ATTRIBUTES.unpack(attributes.raw)]
