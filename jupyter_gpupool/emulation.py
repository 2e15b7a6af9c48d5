# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Access to the emulated NVIDIA driver: only this module of the product imports ``emucuda``.

The package ``emucuda`` is beside this package, and does not know the pool. It replaces only the
driver; all other code is the same as with a real driver. A process uses the emulated driver if its
environment has the variables that :func:`environment` returns.
"""

from __future__ import annotations

import os

from emucuda import (
    EmulatorError,
    EmulatorNotBuilt,
    device_files,
    environment,
    library_dir,
    parse_machine,
    remove_state,
)

__all__ = [
    "EmulatorError",
    "EmulatorNotBuilt",
    "check",
    "device_files",
    "environment",
    "library_dir",
    "real_driver_present",
    "remove_state",
]


def check(machine: str) -> None:
    """Raise :class:`EmulatorError` if ``machine`` (such as ``2x16GiB``) cannot be emulated here."""
    parse_machine(machine)
    library_dir()


def real_driver_present() -> bool:
    """Whether this machine has an NVIDIA kernel driver (or WSL's GPU device).

    A device file alone proves nothing: NVIDIA's library creates ``/dev/nvidiactl`` when root calls
    cuInit, even if the Linux kernel has no NVIDIA driver (observed with versions 535, 550 and 555
    of the library). Without the driver, that file cannot be opened.
    """
    if any(os.path.exists(path) for path in ("/proc/driver/nvidia/version", "/dev/dxg")):
        return True
    try:
        os.close(os.open("/dev/nvidiactl", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        return True  # the driver exists, but this user may not use it; another message reports this
    except OSError:
        return False
    return True
