# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import pytest

from . import forks, kit

#: A list for each test, with one entry for each finished phase (setup, call): True if it failed.
FAILED = pytest.StashKey[list[bool]]()


@pytest.fixture
def folder():
    found = kit.short_folder()
    yield found
    kit.remove(found)


@pytest.fixture
def parts():
    """Return a broker class, a kernel class and a configuration. Test modules may override this."""
    return kit.Broker, kit.Kernel, {}


@pytest.fixture
def forked():
    """Fork the brokers that this process launches, for tests that do not test the launch."""
    with forks.instead_of_launches():
        yield


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
        print(broker.tail())  # pytest shows the log if the test failed


@pytest.fixture(scope="module")
def rested():
    """Yield the list of used brokers of this test file that the next test can use again."""
    brokers = []
    yield brokers
    for broker in brokers:
        broker.close()
        kit.remove(broker.folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    item.stash.setdefault(FAILED, []).append(report.failed)
    return report


@pytest.fixture
def broker(rested, parts, request):
    """Yield a broker on two emulated devices; it is new, or as good as new.

    A start costs more than most tests, so several tests use the same broker. If a test fails, ends
    the broker, injects a fault or leaves something behind, the next test gets another broker.
    """
    broker = rested.pop() if rested else parts[0](kit.short_folder(), **parts[2]).started
    broker.begin()
    yield broker
    print(broker.tail())  # pytest shows the log if the test failed
    if not any(request.node.stash[FAILED]) and broker.rests():
        rested.append(broker)
    else:
        broker.close()
        kit.remove(broker.folder)


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
