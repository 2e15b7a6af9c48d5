# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""CUDA devices made of host memory: NVIDIA's driver, emulated, for machines without a GPU.

``src/`` is the driver in C, and ``build`` compiles it into ``lib/``. ``machine`` describes machines
and says which environment selects the driver, ``faults`` makes it fail, and ``kernels`` is PTX that
this driver and a real one both run. Standard library only.
"""

from __future__ import annotations

from .faults import FAULTS, Faults
from .machine import (
    EmulatorNotBuilt,
    Machine,
    device_files,
    environment,
    library_dir,
    parse_machine,
    remove_state,
)
from .text import EmulatorError

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
