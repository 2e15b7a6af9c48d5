# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import itertools

import pytest

from tests.broker import kit as brokers

from .kit import Server


@pytest.fixture(scope="module")
def folder():
    found = brokers.short_folder()
    yield found
    brokers.remove(found)


@pytest.fixture(scope="module")
def broker(folder, request):
    """Start a broker with the module's ``MACHINE``. Each device has room for one kernel."""
    broker = brokers.Broker(folder, emulate=getattr(request.module, "MACHINE", brokers.MACHINE))
    yield broker.started
    broker.close()
    print(broker.tail())  # pytest shows this output if a test failed


@pytest.fixture(scope="module")
def start(folder, broker):
    """Return a function that starts a server as the user of the broker."""
    servers = []
    numbers = itertools.count()

    def make(*options):
        home = folder / f"s{next(numbers)}"
        home.mkdir()
        servers.append(Server(folder, broker.socket, *options, home=home))
        return servers[-1]

    yield make
    for server in servers:
        server.end()
        print(server.tail())


@pytest.fixture(scope="module")
def server(start):
    return start("--GPUPoolExtension.slow_resume=0", "--Application.log_level=DEBUG")


@pytest.fixture
def kernel(server):
    """Return a function that starts a kernel. At the end of the test, the kernel ends."""
    made = []

    def make(name="gpupool-python3"):
        made.append(server.start_kernel(name))
        return made[-1]

    yield make
    running = {k["id"] for k in server.request("GET", "/api/kernels").json()}
    for one in made:
        if one in running:
            server.stop_kernel(one)
