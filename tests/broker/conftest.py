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
def parts():
    """What brokers and kernels are made of, and configured with; modules have their own."""
    return kit.Broker, kit.Kernel, {}


@pytest.fixture
def make_broker(folder, parts):
    """Make a broker (not yet started) in the test's folder."""
    made = []

    def make(**config):
        broker = parts[0](folder, **{**parts[2], **config})
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
def kernel(broker, parts):
    """Make kernels of the broker."""
    made = []

    def make(*args, **kwargs):
        made.append(parts[1](broker, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
