# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The tests' way to the emulated driver: all that they use of ``emucuda``.

Only ``tests/emulator``, that package's own tests, import it directly.
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
