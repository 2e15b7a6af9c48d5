# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The tests' interface to the emulated driver: everything that they use of ``emucuda``.

Only ``tests/emulator``, the tests of that package, imports it directly.
"""

from emucuda import (
    Faults,
    build,
    device_files,
    environment,
    library_dir,
    machine,
    parse_machine,
)
from emucuda.kernels import PTX

__all__ = [
    "PTX",
    "Faults",
    "build",
    "device_files",
    "environment",
    "library_dir",
    "machine",
    "parse_machine",
]
