# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The start script of every child process: ``PYTHON .../devices/child.py MODULE ARGUMENT...``.

It runs ``MODULE`` (such as ``jupyter_gpupool.devices.nvidia.child_programs``) in any Python, even
if this package is not installed there. The script imports this package from the folder of this
file, and imports no other package that is installed beside it. A vendor's packages come from the
interpreter's own environment.
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
    # Python puts a script's folder first in sys.path, where our modules would hide other modules of
    # the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    package = folder.parent
    _add_package(package.name, package)
    # The package's __init__.py imports modules that only the broker needs. These imports took a
    # third of the time of a child's start.
    _add_package(f"{package.name}.{folder.name}", folder)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


def _add_package(name: str, folder: Path) -> None:
    """Add a package without running its ``__init__.py``; its modules are in ``folder``."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


if __name__ == "__main__":
    main()
