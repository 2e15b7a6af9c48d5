# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the broker does about processes outside the pool on its devices, for each policy."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jupyter_gpupool.devices.model import DeviceSample, ProcessMemory
from jupyter_gpupool.procfs import ProcessId

from . import kit
from .kit import Kernel, MiB, wait_until
from .parts import monitor_of

NOBODY = 65534

#: A program that takes 64 MiB of the visible device and keeps running.
STRANGER = """
import sys
from cuda.core import Device
device = Device()
device.set_current()
buffer = device.allocate(64 << 20, stream=device.create_stream())
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def scene(make_broker):
    """Start a broker with a policy, then a session, then a stranger on the session's device."""
    made = []

    def make(policy):
        broker = make_broker(foreign_processes=policy).started
        one = Kernel(broker, "one")
        made.append(one.close)
        one.attach()
        device = one.link()["slices"][0][0]
        environment = {
            k: v for k, v in one.env.items() if not k.startswith(("GPUPOOL_S", "GPUPOOL_T"))
        }
        stranger = subprocess.Popen(
            [sys.executable, "-c", STRANGER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=kit.ROOT,
            env={**kit.environment(broker.folder), **environment, "CUDA_VISIBLE_DEVICES": device,
                 "EMUCUDA_STATE": one.env["EMUCUDA_STATE"]},
        )  # fmt: skip

        def end():
            stranger.kill()
            stranger.wait(60)
            stranger.stdin.close()
            stranger.stdout.close()

        made.append(end)
        assert stranger.stdout.readline() == b"\n"
        return broker, one, stranger

    yield make
    for close in made:
        close()


def foreign(broker):
    return sum(d["memory_foreign"] for d in broker.status()["devices"])


def test_stranger_is_counted_and_left_alone(scene):
    broker, one, stranger = scene("count")
    wait_until(lambda: foreign(broker) == 96 * MiB, "the stranger's memory")
    assert broker.rows("foreign") == []
    assert stranger.poll() is None
    big = Kernel(broker, "big", memory=480 * MiB)
    bigger = Kernel(broker, "bigger", memory=480 * MiB)
    try:
        big.attach()
        one.do("drop", hold="cell")
        bigger.do("ask", hold="cell")
        wait_until(lambda: bigger.link()["queue"], "its place in the queue")
        stranger.kill()
        bigger.do("got", hold="cell")
    finally:
        big.close()
        bigger.close()


def test_stranger_is_reported_once(scene):
    broker, _one, stranger = scene("report")
    wait_until(lambda: broker.rows("foreign"), "the report")
    (row,) = broker.rows("foreign")
    assert row["detail"]["pid"] == stranger.pid
    assert (row["reason"], row["bytes"]) == ("seen", 96 * MiB)
    assert stranger.poll() is None
    assert f"Foreign process {stranger.pid}" in broker.tail()


def test_process_of_root_is_never_ended(scene):
    if os.geteuid() != 0:
        pytest.skip("only root has root's processes")
    broker, _one, stranger = scene("end")
    wait_until(lambda: broker.rows("foreign"), "the report")
    assert broker.rows("foreign")[0]["reason"] == "seen"
    assert stranger.poll() is None


class Notes:
    """The part of a runner that a monitor uses."""

    def __init__(self, *uids):
        self.sessions = [SimpleNamespace(uid=uid) for uid in uids]
        self.notes = []

    def note(self, kind, **fields):
        self.notes.append((kind, fields["reason"]))


def test_children_of_the_broker_are_not_foreign():
    runner = Notes(os.getuid())
    settings = SimpleNamespace(foreign_processes="end")
    child = subprocess.Popen(["sleep", "600"])
    try:

        async def scenario():
            monitor = monitor_of(runner, foreign_processes=settings.foreign_processes)
            sample = DeviceSample("GPU-a", 100, 50, 0, 50, (ProcessMemory(child.pid, 50),))
            monitor._treat_foreign([sample])

        asyncio.run(scenario())
        assert runner.notes == []
        assert child.poll() is None
    finally:
        child.kill()
        child.wait(60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start somebody else's process")
@pytest.mark.parametrize(
    ("policy", "users", "ended"),
    [("end", [NOBODY], True), ("end", [NOBODY - 1], False), ("report", [NOBODY], False)],
    ids=["a user of the pool", "a user without a kernel", "not to be ended"],
)
def test_only_processes_of_the_pools_users_are_ended(policy, users, ended):
    async def scenario(pid):
        runner = Notes(*users)
        settings = SimpleNamespace(foreign_processes=policy)
        monitor = monitor_of(runner, foreign_processes=settings.foreign_processes)
        monitor.own = ProcessId(2**22 - 1, 0)  # the stranger is a child of this test
        sample = DeviceSample("GPU-a", 100, 50, 0, 50, (ProcessMemory(pid, 50),))
        monitor._treat_foreign([sample])
        monitor._treat_foreign([sample])
        return runner.notes

    stranger = subprocess.Popen(["sleep", "600"], user=NOBODY)
    try:
        notes = asyncio.run(scenario(stranger.pid))
        assert notes == [("foreign", "ended" if ended else "seen")]
        if ended:
            assert stranger.wait(60) == -9
        else:
            assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(60)
