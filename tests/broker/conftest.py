# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import pytest

from . import kit


@pytest.fixture
def folder():
    found = kit.short_folder()
    yield found
    kit.remove(found)


@pytest.fixture
def make_broker(folder):
    """Make a broker (not yet started) in the test's folder."""
    made = []

    def make(**config):
        broker = kit.Broker(folder, **config)
        made.append(broker)
        return broker

    yield make
    for broker in made:
        broker.close()
        print(broker.tail())  # pytest shows it if the test failed


@pytest.fixture
def broker(make_broker):
    """A broker on two emulated devices."""
    return make_broker().started


@pytest.fixture
def kernel(broker):
    """Make kernels of the broker."""
    made = []

    def make(*args, **kwargs):
        made.append(kit.Kernel(broker, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
