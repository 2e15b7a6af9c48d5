# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Access to the emulated NVIDIA driver: only this module of the product imports ``emucuda``.

The package ``emucuda`` is beside this package, and does not know the pool. It replaces only the
driver; all other code is the same as with a real driver. A process uses the emulated driver if its
environment has the variables that :func:`environment` returns.
"""

from __future__ import annotations

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
    "remove_state",
]


def check(machine: str) -> None:
    """Raise :class:`EmulatorError` if ``machine`` (such as ``2x16GiB``) cannot be emulated here."""
    parse_machine(machine)
    library_dir()
