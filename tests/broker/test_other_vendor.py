# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The devices of another vendor. The broker is the same; only ``open_devices`` is different."""

from __future__ import annotations

import pytest

from jupyter_gpupool.devices import Devices

from . import kit
from .kit import MiB, wait_until
from .memory_broker import MACHINE, NAMES, VISIBLE, MemoryDevices


class Broker(kit.Broker):
    module = "tests.broker.memory_broker"

    def start(self, *, wait=True, env=None):
        env = {**(env or kit.environment(self.folder)), MACHINE: str(self.folder / "machine")}
        return super().start(wait=wait, env=env)


class Kernel(kit.Kernel):
    module = "tests.broker.memory_child"


@pytest.fixture
def parts():
    return Broker, Kernel, {"emulate": ""}


def take(kernel, byte, hold="cell"):
    kernel.attach(hold)
    kernel.do("alloc", bytes=200 * MiB, byte=byte)


def test_fake_vendor_implements_the_whole_protocol():
    names = [name for name in dir(Devices) if not name.startswith("_")]
    opened = {"down", "renewed"}
    assert [n for n in names if n not in opened and not hasattr(MemoryDevices, n)] == []


def test_devices_of_another_vendor_are_shown(broker):
    status = broker.status()
    found = {d["uuid"]: (d["name"], d["tier"], d["memory_total"]) for d in status["devices"]}
    assert found == dict.fromkeys(NAMES, ("Host memory", "unguarded", 512 * MiB))
    # Without a guard, a device call cannot wait for a slice. So a kernel waits before the cell.
    assert status["settings"]["attach"] == "cell"


@pytest.mark.parametrize("moves", [False, True], ids=["same device", "another device"])
def test_session_attaches_is_suspended_and_resumes(broker, kernel, moves):
    one, two, three = (kernel(name, memory=kit.BIG) for name in "abc")
    assert set(one.do("sees")) <= {*NAMES}
    take(one, byte=1)
    before = one.do("where")[0]
    one.do("drop", hold="cell")
    take(two, byte=2)
    take(three, byte=3)  # the pool suspends the idle session
    assert one.do("where") == ["host", 1, 200 * MiB]
    assert broker.session(one.session)["state"] == "detached"
    places = {two.do("where")[0]: two, three.do("where")[0]: three}
    assert {*places} == {*NAMES}
    target = next(name for name in NAMES if (name != before) == moves)
    places[target].do("drop", hold="cell")
    one.attach("again")
    assert one.do("where") == [target, 1, 200 * MiB]
    # The kernel shows its slice in the variable of this vendor, and in no other variable.
    seen = one.do("sees")
    assert one.do("settle") == ({} if seen == [target] else {VISIBLE: target})
    assert one.do("sees") == [target]
    assert places[target].do("where")[0] == "host"


def test_pause_and_restart_keep_a_suspended_session(broker, kernel):
    one = kernel("a", memory=kit.BIG)
    take(one, byte=7)
    one.do("drop", hold="cell")
    with broker.client() as admin:
        admin.call("maintain", action="pause")
        # Wait for the end of the suspend. While the suspend moves the memory file, the file is in
        # neither folder.
        one.wait_state("detached", seconds=60)
        assert one.do("where")[0] == "host"
        admin.call("maintain", action="resume")
    broker.kill()
    assert broker.started.session(one.session)["state"] == "detached"
    wait_until(lambda: one.link()["greeted"], "its return")
    one.attach("again")
    assert one.do("where")[1:] == [7, 200 * MiB]
