# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The names of ``emucuda``, the emulated driver, that other tests use.

Only the tests of ``emucuda`` itself, in ``tests/emulator``, import the package directly.
"""

from emucuda import (
    Faults,
    build,
    device_files,
    environment,
    library_dir,
    parse_machine,
    specification,
)
from emucuda.kernels import PTX

__all__ = [
    "PTX",
    "Faults",
    "build",
    "device_files",
    "environment",
    "library_dir",
    "parse_machine",
    "specification",
]
