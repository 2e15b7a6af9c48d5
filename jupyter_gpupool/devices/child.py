# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The start script of every child process: ``PYTHON .../devices/child.py MODULE ARGUMENT...``.

The script runs ``MODULE`` (such as ``jupyter_gpupool.devices.nvidia.child_programs``) with any
Python interpreter, even if this package is not installed for that interpreter. The script loads
this package, and only this package, from the folders above this file. All other packages, such as
the vendor's, come from the interpreter's own environment.
"""

import runpy
import sys
import types
from pathlib import Path

#: This file.
SCRIPT = Path(__file__).resolve()


def main() -> None:
    """Import this package from this file's folder, and run the program."""
    folder = SCRIPT.parent
    # Python puts the folder of the script first in sys.path. Remove the folder, because its modules
    # would hide other modules with the same names.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    package = folder.parent
    _add_package(package.name, package)
    # Do not run devices/__init__.py: it imports modules that only the broker needs. These imports
    # took a third of the time that a child needs for its start.
    _add_package(f"{package.name}.{folder.name}", folder)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _add_package(name: str, folder: Path) -> None:
    """Make a package whose modules are in ``folder``, without running its ``__init__.py``."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    main()
