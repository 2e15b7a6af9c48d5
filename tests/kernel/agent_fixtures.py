# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures that the tests of the agent and of the provisioner share."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest
from harness import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.broker import forks

#: An environment with ipykernel 6 and without this package. The first run creates the environment,
#: and later runs use it again.
OLD_VENV = ROOT / ".venv-ipykernel629"


@pytest.fixture(scope="session")
def old_python() -> str:
    """Return the interpreter of an environment with ipykernel 6.29.5 and without this package."""
    python = OLD_VENV / "bin" / "python"
    done = OLD_VENV / "complete"
    # Test workers are separate processes: the first worker makes the environment, the others wait.
    with (Path(sys.prefix) / "old-venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(OLD_VENV)]
            subprocess.run(make, check=True)
            _link_requirements(*OLD_VENV.glob("lib/python3*/site-packages"))
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
            options = ["--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, *options, "ipykernel==6.29.5", "nest-asyncio"], check=True)
            done.touch()
    forks.kernel_pythons.add(str(python))
    return str(python)


def _link_requirements(folder: Path) -> None:
    """Link ipykernel's requirements into ``folder``. An installation of copies would take 10 s."""
    seen = {"ipykernel"}
    wanted = _requirements("ipykernel")
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        wanted += _requirements(name)
        found = distribution(name)
        for entry in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            target = folder / entry
            if not target.exists():
                target.symlink_to(Path(str(found.locate_file(entry))))


def _requirements(name: str) -> list[str]:
    """Return the names of the packages that a package requires in this environment."""
    lines = map(Requirement, distribution(name).requires or ())
    return [
        canonicalize_name(line.name)
        for line in lines
        if line.marker is None or line.marker.evaluate({"extra": ""})
    ]
