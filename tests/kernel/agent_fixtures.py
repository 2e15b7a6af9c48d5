# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures that the tests of the agent and of the provisioner share."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

#: An environment with ipykernel 6 and without this package; it is made once and kept.
OLD_VENV = ROOT / ".venv-ipykernel629"


@pytest.fixture(scope="session")
def old_python() -> str:
    """Return the interpreter of an environment with ipykernel 6.29.5 and without this package."""
    python = OLD_VENV / "bin" / "python"
    done = OLD_VENV / "complete"
    # Test workers are separate processes: the first makes the environment, the others wait.
    with (Path(sys.prefix) / "old-venv.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make = [sys.executable, "-m", "venv", "--clear", str(OLD_VENV)]
            subprocess.run(make, check=True)
            install = [str(python), "-m", "pip", "install", "-q", "ipykernel==6.29.5"]
            subprocess.run(install, check=True)
            done.touch()
    return str(python)
