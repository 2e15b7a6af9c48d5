# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import pytest

from tests.broker import kit
from tests.broker.conftest import (  # noqa: F401
    broker,
    folder,
    make_broker,
    pytest_runtest_makereport,
    rested,
)

from . import runkit

#: One device. It has room for one program of a test, and not for two at the same time.
MACHINE = "1x512MiB,context=32MiB"


@pytest.fixture(scope="session", autouse=True)
def built():
    """Compile the guard and the emulated driver."""
    from jupyter_gpupool.guard.install import library

    library()


@pytest.fixture
def parts():
    return kit.Broker, kit.Kernel, {"emulate": MACHINE, "quiet_after": 0.3}


@pytest.fixture
def program(broker):  # noqa: F811
    """Return a function that starts programs under ``run``."""
    made = []

    def make(*options, **kwargs):
        made.append(runkit.Program(broker, *options, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def terminal(broker):  # noqa: F811
    """Return a function that opens terminals."""
    made = []

    def make(command, **env):
        made.append(runkit.Terminal(broker, command, **env))
        return made[-1]

    yield make
    for one in made:
        one.close()
