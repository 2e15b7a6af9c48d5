# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A server that gets no answer to its orders for another machine."""

from __future__ import annotations

import asyncio

import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager

from jupyter_gpupool.errors import Code, RefusedError
from jupyter_gpupool.provisioner import KernelNotStarted
from jupyter_gpupool.remote_provisioner import GPUPoolRemoteProvisioner

ENDED = {"running": False, "code": -9}
RUNS = {"running": True, "code": None}


class Far(GPUPoolRemoteProvisioner):
    """A provisioner that sends no orders. Each order gets the next prepared answer."""

    def _send(self, order):
        self.sent.append(order["do"])
        found = self.answers.pop(0)
        if isinstance(found, Code):
            raise RefusedError("no", code=found)
        return found

    def _secrets(self):
        return {"key": "k"}

    def _options(self):
        return {}


@pytest.fixture
def provisioner():
    found = Far(kernel_id="k", kernel_spec=KernelSpec(), parent=AsyncKernelManager())
    found._node, found.sent = "m1", []
    return found


def start(provisioner, *answers):
    provisioner.answers = [*answers]
    with pytest.raises(KernelNotStarted):
        asyncio.run(provisioner.launch_kernel([], cwd="/"))
    assert provisioner.answers == []


def test_a_start_without_an_answer_is_undone(provisioner):
    start(provisioner, Code.UNREACHABLE, RUNS, ENDED)
    assert provisioner.sent == ["start", "signal", "poll"]
    assert (provisioner.has_process, provisioner._node) == (False, "")


def test_a_kernel_starts_only_after_its_lost_start_has_ended(provisioner):
    start(provisioner, *[Code.UNREACHABLE] * 3)
    assert provisioner.has_process
    provisioner.answers = [RUNS]
    with pytest.raises(KernelNotStarted, match="has not ended"):
        asyncio.run(provisioner.pre_launch())
    provisioner.answers = [ENDED]
    asyncio.run(provisioner.pre_launch())
    assert provisioner._node == "m1"


def test_a_refused_start_leaves_no_trace(provisioner):
    start(provisioner, Code.NOT_THERE)
    assert provisioner.sent == ["start"]
    assert (provisioner.has_process, provisioner._node) == (False, "")


def test_a_kernel_that_may_still_run_is_not_forgotten(provisioner):
    provisioner._runs = True
    provisioner.answers = [Code.UNREACHABLE]
    asyncio.run(provisioner.cleanup())
    assert (provisioner.has_process, provisioner._node) == (True, "m1")
    provisioner._asked = 0.0
    provisioner._ends = True
    provisioner.answers = [ENDED, {}]
    asyncio.run(provisioner.cleanup())
    assert provisioner.sent == ["poll", "poll", "clean"]
    assert (provisioner.has_process, provisioner._node) == (False, "")
