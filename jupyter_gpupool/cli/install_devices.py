# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool install-devices``: makes a Python environment with NVIDIA's packages.

The broker's device processes use this environment. It has the packages in the versions with which
this release was tested. So no other environment (of Jupyter Server, or of a kernel) needs these
packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Sequence

from ..devices import vendor
from ..errors import Code, GPUPoolError

_PIP = ("--quiet", "--disable-pip-version-check", "--only-binary", ":all:")


class InstallError(GPUPoolError):
    """The environment could not be made. An existing environment is unchanged."""

    code = Code.INSTALL


def install_devices(*, folder: Path | None, wheels: Path | None) -> int:
    """Make or replace the environment, print its folder, and return 0.

    Parameters
    ----------
    folder:
        Where to make the environment; None: the first writable place that a broker searches.
    wheels:
        A folder that contains all packages. If it is given, pip uses no package index.
    """
    target = folder.expanduser().absolute() if folder else _first_writable()
    if target.exists() and not (target / "pyvenv.cfg").is_file():
        raise InstallError(
            f"{target} exists, but is not a Python environment, so nothing was changed in it.",
            next_step="Name another folder with --folder.",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise InstallError(
            f"Nothing can be written in {target.parent} ({error.strerror}).",
            next_step="Name another folder with --folder.",
        ) from None
    try:
        # mkdtemp makes a folder that only its owner can read. A broker that runs under another
        # account may need to read the folder. Kernels of other users never read it.
        scratch.chmod(0o755)
        python = _fill(scratch / "new", wheels)
        found = vendor.interpreter.ask(str(python))
        if found.problem:
            raise InstallError(f"The new environment does not work: {found.problem}")
        if target.exists():
            target.rename(scratch / "old")
        (scratch / "new").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    print(f"Installed {versions} for Python {found.python} in {target}")
    if folder:
        print(
            "The broker uses this environment if you set c.GPUPool.device_python = "
            f"'{target}/bin/python'"
        )
    else:
        print("The next broker that starts uses this environment.")
    return 0


def download_devices(folder: Path) -> int:
    """Download the wheels of the environment into ``folder``, for a machine without network."""
    pip = [sys.executable, "-m", "pip", "download", *_PIP]
    _run([*pip, "--dest", str(folder), "--requirement", str(vendor.interpreter.REQUIREMENTS)])
    print(f"Run on the other machine: {vendor.interpreter.INSTALL} --wheels {folder.name}")
    return 0


def _first_writable() -> Path:
    """Return the first place of the environment; the second if the first cannot be written."""
    first, second = vendor.interpreter.places()
    above = next(path for path in (first, *first.parents) if path.exists())
    return first if os.access(above, os.W_OK | os.X_OK) else second


def _fill(folder: Path, wheels: Path | None) -> Path:
    """Make the environment in ``folder``, install the packages, and return the interpreter."""
    python = folder / "bin" / "python"
    source: list[str] = []
    if wheels is not None:
        source = ["--no-index", "--find-links", str(wheels.expanduser().absolute())]
    venv = [sys.executable, "-m", "venv"]
    wanted = ["--requirement", str(vendor.interpreter.REQUIREMENTS)]
    if find_spec("pip"):
        _run([*venv, "--without-pip", str(folder)])
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", *_PIP]
        _run([*pip, *source, *wanted])
    elif uv := shutil.which("uv"):
        _run([*venv, "--without-pip", str(folder)])
        pip = [uv, "pip", "install", "--quiet", "--only-binary", ":all:"]
        _run([*pip, "--python", str(python), *source, *wanted])
    elif find_spec("ensurepip"):
        _run([*venv, str(folder)])
        _run([str(python), "-m", "pip", "install", *_PIP, *source, *wanted])
    else:
        raise InstallError(
            f"There is neither pip nor uv for {sys.executable}.",
            next_step="Install one of them, and run this command again.",
        )
    return python


def _run(command: Sequence[str]) -> None:
    env = {k: v for k, v in os.environ.items() if k not in ("PIP_TARGET", "PIP_PREFIX", "PIP_USER")}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        said = "\n".join(done.stdout.strip().splitlines()[-8:])
        raise InstallError(
            f"This command failed with exit code {done.returncode}: {' '.join(command)}\n{said}\n",
            next_step="If this machine has no network, fetch the wheels on another machine with "
            "--download FOLDER, copy FOLDER to this machine, and name it with --wheels.",
        )
