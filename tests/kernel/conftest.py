# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Callable, Iterator

import pytest
from agent_fixtures import old_python  # noqa: F401
from harness import Kernel, start_kernel, this_python
from scripted_broker import ScriptedBroker


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with tempfile.TemporaryDirectory(prefix="gpupool-") as folder:
        broker = ScriptedBroker(Path(folder) / "broker.sock").start()
        yield broker
        broker.die()
        assert broker.problems == []


@pytest.fixture(params=["ipykernel 7", "ipykernel 6"])
def python(request: pytest.FixtureRequest) -> str:
    if request.param == "ipykernel 6":
        return request.getfixturevalue("old_python")
    return this_python()


@pytest.fixture
def start(broker: ScriptedBroker) -> Iterator[Callable[..., Kernel]]:
    """Return a function that starts kernels of ``broker``."""
    kernels: list[Kernel] = []

    def begin(python: str = this_python(), **options: str) -> Kernel:
        opened = broker._on_open({"type": "open", "kernel_id": "test"})
        kernel = start_kernel(python, opened["env"], **options)
        kernels.append(kernel)
        broker.wait_for("hello")
        return kernel

    yield begin
    for kernel in kernels:
        kernel.stop()


@pytest.fixture
def kernel(start: Callable[..., Kernel], python: str) -> Kernel:
    """Return a kernel of the broker; each test runs once with each version of ipykernel."""
    return start(python)
