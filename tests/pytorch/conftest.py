# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Programs with PyTorch on an emulated machine."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import (  # noqa: F401 - of the notebooks
    installed,
    kernelspec,
    pool,
    pytest_runtest_makereport,
    rested,
)
from tests.emulated import build, environment

EXAMPLE = Path(__file__).parents[2] / "examples" / "pytorch" / "training.ipynb"

#: A program of a test may take this many seconds. The import of PyTorch alone takes 6 s on two busy
#: cores.
TIMEOUT = 200

_MISSING = "PyTorch for emulated devices is not installed: make torch sets it up"


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    ready = importlib.util.find_spec("torch") and importlib.util.find_spec("_emucuda_pytorch")
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.pytorch)
            if not ready:
                item.add_marker(pytest.mark.skip(reason=_MISSING))


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a program on two emulated devices.

    The function returns the ended process with its output.
    """
    build.compile()

    def run(code, machine="2x1GiB,context=32MiB", stdin="", **variables):
        env = {**os.environ, **environment(machine, tmp_path / "machine"), **variables}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done

    return run
