# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The start script of every child process: ``PYTHON .../devices/child.py MODULE ARGUMENT...``.

It runs ``MODULE`` (``jupyter_gpupool.devices.nvidia.programs``, say) in any Python, even if this
package is not installed there: it imports the package from this file's folder, and nothing else
that is installed beside it. A vendor's packages come from the interpreter's own environment.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

#: This file.
SCRIPT = Path(__file__).resolve()


def main() -> None:
    """Import this package from this file's folder, and run the program."""
    folder = SCRIPT.parent
    # Python puts a script's folder first: our modules would hide others of the same name.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    package = folder.parent
    init = package / "__init__.py"
    spec = importlib.util.spec_from_file_location(
        package.name, init, submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package.name] = module
    spec.loader.exec_module(module)
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
