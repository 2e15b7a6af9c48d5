# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Build hook of the package: compiles the guard and the emulated driver into the wheel.

A machine without a C compiler still gets a working, pure wheel; only what would have been compiled
is missing from it, and is named where it is asked for.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What is compiled, and what it is called in a warning.
_PARTS = {
    "guard": "the guard (kernels then get their slice when a cell starts)",
    "emulator": "the emulated NVIDIA driver",
}


def _load_build(root: str, part: str) -> Any:
    """Import the ``build.py`` of a part by its path: what the package requires is not here."""
    path = Path(root) / "jupyter_gpupool" / part / "build.py"
    spec = importlib.util.spec_from_file_location(f"_gpupool_{part}_build", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} cannot be loaded; the source tree is incomplete.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CustomBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]
    """Compiles for wheels, editable ones included; source distributions carry only sources."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile, and tag the wheel with the platform (it works on any Python 3)."""
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        if not [part for part, what in _PARTS.items() if self._compile(part, what)]:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _compile(self, part: str, what: str) -> bool:
        build = _load_build(self.root, part)
        try:
            build.compile(build.DEFAULT_OUT, strict=False)
        except (build.CompilerMissing, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"jupyter_gpupool: {what} is left out ({error})")
            return False
        return True
