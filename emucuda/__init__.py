# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""CUDA devices made of host memory: an emulation of NVIDIA's driver for machines without a GPU.

``src/`` is the driver in C, and ``build`` compiles it into ``lib/``. ``machine`` describes
machines, and returns the environment that selects the driver. ``faults`` makes the driver fail.
``kernels`` has small kernels as PTX. Both this driver and a real driver can run them. The package
needs only the standard library.
"""

from __future__ import annotations

from .faults import FAULTS, Faults
from .sizes import EmulatorError
from .specification import (
    EmulatorNotBuilt,
    Machine,
    device_files,
    environment,
    library_dir,
    parse_machine,
    remove_state,
)

__all__ = [
    "FAULTS",
    "EmulatorError",
    "EmulatorNotBuilt",
    "Faults",
    "Machine",
    "device_files",
    "environment",
    "library_dir",
    "parse_machine",
    "remove_state",
]
