# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sets the visible devices and the memory caps of libraries in this process to those of the slice.

No function here may initialise CUDA: a context takes device memory, and a kernel that computes only
on the CPU needs no context.

The guard corrects ``CUDA_VISIBLE_DEVICES`` at cuInit, in every language. But Python libraries also
read the variable themselves, to count devices through NVML (``torch.cuda.device_count``), and child
processes inherit ``os.environ``. So the agent checks each assignment to the variable. If the new
value names a GPU outside the session, the agent corrects the value at once by the guard's rules
(``choose`` in ``guard/src/init.c``), and prints a line.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Any, Callable, MutableMapping, Sequence

from ..protocol import DEVICES_VARIABLE
from .holds import Slice

#: ``CUDA_ERROR_NOT_INITIALIZED`` (cuda.h): cuInit has not been called in this process.
NOT_INITIALIZED = 3

#: A framework's cap is its grant minus this many bytes. The CUDA context and the libraries' own
#: allocations need these bytes. The number is an estimate, because the size of a context depends on
#: the GPU and the driver.
CONTEXT_BYTES = 512 << 20

#: A framework's cap is at least this share of its grant, so that a small slice stays usable.
SMALLEST_SHARE = 0.5


#: The environment variable with a copy of the value that the pool has given to
#: ``CUDA_VISIBLE_DEVICES``. Only the processes of a session with a guard have this variable.
OURS_VARIABLE = "GPUPOOL_VISIBLE"

#: NVIDIA's variable of visible devices. The code for guarded sessions uses it directly, because
#: only NVIDIA's GPUs have a guard.
VISIBLE = "CUDA_VISIBLE_DEVICES"


class CudaProbe:
    """Tells whether this process has called cuInit.

    This class never loads libcuda itself: ``RTLD_NOLOAD`` finds libcuda only if the process has
    already loaded it. ``cuDeviceGetCount`` initialises nothing: it returns ``NOT_INITIALIZED``
    until the process has called cuInit.
    """

    def __init__(self) -> None:
        self._library: ctypes.CDLL | None = None
        self._initialised = False

    def __call__(self) -> bool | None:
        """Return whether cuInit was called; None if libcuda does not have ``cuDeviceGetCount``."""
        if self._initialised:
            return True  # a process cannot undo cuInit
        if self._library is None:
            try:
                mode = os.RTLD_NOLOAD | os.RTLD_NOW
                self._library = ctypes.CDLL("libcuda.so.1", mode=mode)
            except OSError:
                return False
        try:
            count = ctypes.c_int()
            answer = int(self._library.cuDeviceGetCount(ctypes.byref(count)))
        except AttributeError:
            return None
        self._initialised = answer != NOT_INITIALIZED
        return self._initialised


def show_devices(devices: Sequence[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Set the vendor's variable of visible devices to the UUIDs of the session's devices.

    The variable ``GPUPOOL_DEVICES_VARIABLE`` has the name of the vendor's variable. A broker of an
    older version does not set it; its devices are NVIDIA's.

    With NVIDIA's driver: before cuInit, ``CUDA_VISIBLE_DEVICES`` decides which devices the process
    gets. After cuInit the driver no longer reads it, but child processes do, and they must see the
    session's present devices. This function replaces only a list that the pool has set
    (OURS_VARIABLE has a copy of that list). It does not change a list that the user has set.
    """
    if not devices:
        return
    name = environ.get(DEVICES_VARIABLE) or VISIBLE
    text = ",".join(devices)
    ours = environ.get(OURS_VARIABLE)
    if ours is not None:
        if environ.get(name) != ours:
            return
        environ[OURS_VARIABLE] = text
    environ[name] = text


def usable_bytes(granted: int) -> int:
    """Return how many of the ``granted`` bytes the allocator of a framework may take."""
    return max(granted - CONTEXT_BYTES, int(granted * SMALLEST_SHARE))


class FrameworkCaps:
    """Sets the memory caps of torch and CuPy from the size of the slice, if these are loaded.

    A library that reaches its cap first frees its caches. If this does not free enough memory, the
    library raises its own out-of-memory error, before the device is full. The caps are only for
    these errors: they do not enforce the size of the slice.
    """

    def __init__(self, probe: CudaProbe) -> None:
        self._probe = probe
        self._set: dict[str, tuple[Slice, ...]] = {}
        #: Why a cap could not be set; "" if no cap has failed. ``%gpu`` shows this text. The cell
        #: itself raises no error for a failed cap.
        self.problem = ""

    def apply(self, slices: Sequence[Slice]) -> None:
        """Set the caps of the loaded libraries for these slices.

        If a library already has the caps for these slices, this method skips the library.
        """
        wanted = tuple(slices)
        if not wanted:
            return
        for name, setter in (("torch", _cap_torch), ("cupy", _cap_cupy)):
            module = sys.modules.get(name)
            if module is None or self._set.get(name) == wanted:
                continue
            if name == "cupy" and self._probe() is not True:
                # CuPy's call would initialise CUDA. So set CuPy's cap only after the process itself
                # has initialised CUDA. Torch stores its cap until its own initialisation.
                continue
            try:
                if setter(module, wanted):
                    self._set[name] = wanted
            except Exception as error:
                self._set[name] = wanted
                self.problem = f"The memory cap of {name} could not be set: {error}"


def _cap_torch(torch: Any, slices: tuple[Slice, ...]) -> bool:
    cuda = getattr(torch, "cuda", None)
    if cuda is None or not hasattr(cuda, "set_per_process_memory_fraction"):
        return False  # the import of torch has not finished, or torch was built without CUDA

    def cap() -> None:
        for index, part in enumerate(slices):
            total = int(cuda.get_device_properties(index).total_memory)
            fraction = min(1.0, usable_bytes(part.bytes) / total)
            cuda.set_per_process_memory_fraction(fraction, index)

    if cuda.is_initialized():
        cap()
    elif hasattr(cuda, "_lazy_call"):
        cuda._lazy_call(cap)  # torch calls ``cap`` at the end of its own initialisation
    else:
        return False
    return True


def _cap_cupy(cupy: Any, slices: tuple[Slice, ...]) -> bool:
    if not hasattr(cupy, "get_default_memory_pool"):
        return False
    for index, part in enumerate(slices):
        with cupy.cuda.Device(index):
            cupy.get_default_memory_pool().set_limit(size=usable_bytes(part.bytes))
    return True


# ---------------------------------------------------------------------- assignments by the user


def corrected(text: str, devices: Sequence[str], ours: str) -> str | None:
    """Return the device list ``text`` with corrections; None if it needs no correction.

    ``devices`` are the UUIDs of the session's devices. The corrected list does not contain GPUs
    outside the session. If ``text`` names only such GPUs, the result is ``ours``, the pool's list.
    """
    if text == ours or not devices:
        return None
    home = ours.split(",")
    kept: list[str] = []
    others = False
    for entry in text.split(","):
        place = _place(entry.strip(" "), devices, home)
        if place is None:
            break
        if place < 0:
            others = True
        elif str(place) in kept:
            return None  # the list names one device twice: the driver then hides all devices
        else:
            kept.append(str(place))
    if not others:
        return None
    return ",".join(kept) or ours


def _place(entry: str, devices: Sequence[str], home: Sequence[str]) -> int | None:
    """Return the index in ``devices`` of the device that ``entry`` names.

    Return -1 if the session does not have this device. Return None if ``entry`` is not valid: the
    driver then ignores the rest of the list.
    """
    if not entry.upper().startswith(("GPU-", "MIG-")):
        number = re.match(r"\s*[+-]?[0-9]+", entry)
        if number is None or int(number[0]) < 0:
            return None
        return int(number[0]) if int(number[0]) < len(devices) else -1
    found = [i for i, uuid in enumerate(devices) if uuid.upper().startswith(entry.upper())]
    if len(found) > 1:
        return None
    same = [i for i, uuid in enumerate(home[: len(devices)]) if uuid.upper() == entry.upper()]
    return (found or same or [-1])[0]


class Visible:
    """Watches assignments to ``CUDA_VISIBLE_DEVICES`` in ``os.environ``.

    Parameters
    ----------
    devices:
        The UUIDs of the devices that the session's processes see, in their order.
    """

    def __init__(self, devices: Callable[[], Sequence[str]]) -> None:
        self._devices = devices
        self._plain: type[Any] | None = None
        self._said: set[str] = set()

    def install(self) -> None:
        """Begin to watch.

        This method does not check the present value. If the pool has not set that value, the guard
        checks it.
        """
        plain = type(os.environ)
        watcher = self

        class Environ(plain):  # type: ignore[misc, valid-type]
            def __setitem__(self, key: str, value: str) -> None:
                if key == VISIBLE and isinstance(value, str):
                    value = watcher.check(value)
                super().__setitem__(key, value)

            def __delitem__(self, key: str) -> None:
                super().__delitem__(key)
                ours = self.get(OURS_VARIABLE)
                if key == VISIBLE and ours:
                    # Without the variable, libraries count all GPUs of the machine.
                    super().__setitem__(key, ours)

        self._plain = plain
        os.environ.__class__ = Environ

    def uninstall(self) -> None:
        """Stop watching."""
        if self._plain is not None:
            os.environ.__class__ = self._plain
            self._plain = None

    def check(self, text: str) -> str:
        """Return the value to store for ``text``; print a line if it differs from ``text``."""
        ours = os.environ.get(OURS_VARIABLE, "")
        right = corrected(text, self._devices(), ours) if ours else None
        if right is None:
            return text
        if text not in self._said:
            self._said.add(text)
            does = "the kernel's own GPU is used instead" if right == ours else "it is left out"
            print(
                f"GPU pool: {VISIBLE}={text[:64]!r} names a GPU that this kernel does not have; "
                f"{does}. For more GPUs: %gpu devices 2",
                file=sys.stderr,
            )
        return right
