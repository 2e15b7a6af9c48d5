# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions with two processes on two devices: the pool preempts and resumes both or none."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager

import pytest

from . import kit
from .kit import MiB, children, wait_until
from .test_preemption import BIG, CLASSES, Maker, Worker, further, slow

HIGHER = "a kernel of a higher priority class needs the GPU"


class Gang(Worker):
    """A program with two processes; each process works on its own device."""

    def __init__(self, broker):
        super().__init__(broker, "gang", memory=BIG, devices=2)
        self.begin(64 * MiB, byte=7)
        self.do("toil")
        for command in (
            {"do": "init"}, {"do": "retain", "device": 1},
            {"do": "alloc", "bytes": 48 * MiB, "byte": 9}, {"do": "toil"},
        ):  # fmt: skip
            self.second(**command)
        self.goes_on()

    def second(self, do, **fields):
        return self.do("sub", command={"do": do, **fields})

    def goes_on(self):
        """Wait until both processes have done more work."""
        further(self)
        before = self.second("rounds")["rounds"]

        def gone_on():
            state = self.second("rounds")
            assert not state["error"], state
            return state["rounds"] > before

        wait_until(gone_on, "the second process to go on")

    def whole(self):
        """End the work of both processes; check that every byte is right and no call has failed."""
        for state in (self.do("rest"), self.second("rest")):
            assert not state["error"], state
        assert self.do("check") == 64 * MiB
        assert self.second("check") == 48 * MiB


@pytest.fixture
def parts():
    config = {
        "attach": "lazy", "quiet_after": 2.0, "lock_timeout": 20.0, "preempt": ["class"],
        "priority_classes": CLASSES, "default_priority": "batch",
    }  # fmt: skip
    return kit.Broker, Worker, config


@pytest.fixture
def make(broker):
    with ended(broker) as made:
        yield made


@contextmanager
def ended(broker):
    """Yield an object that makes programs; end these programs afterwards."""
    made = Maker(broker)
    try:
        yield made
    finally:
        made.close()


def gang_of(make):
    make.made.append(Gang(make.broker))
    return make.made[-1]


def displaced(make):
    """Return a preempted gang that waits, and the program that got one of the gang's devices."""
    gang, urgent = gang_of(make), make("urgent", priority="interactive")
    urgent.begin(MiB)
    urgent.do("storm")
    wait_until(lambda: gang.state() == "queued" and gang.status()["waiting"] == 2, "both to wait")
    return gang, urgent


def granted(broker):
    return [d["memory_granted"] for d in broker.status()["devices"]]


def test_gang_loses_and_regains_all_its_devices_together(broker, make):
    """The gang gets no device while only one is free. Its wait reason says that it needs two."""
    gang, urgent = displaced(make)
    status = gang.status()
    assert (status["devices"], status["granted_bytes"]) == ([], 0)
    assert status["suspended_bytes"] >= 112 * MiB
    assert status["wait_reason"] == (
        f"it was preempted: {HIGHER}; it goes on by itself as soon as 300 MiB is free on each of "
        "2 GPUs"
    )
    assert sorted(granted(broker)) == [0, BIG]
    small = make("small", memory=100 * MiB)
    small.begin(MiB)
    assert gang.state() == "queued", "another session was served beside the head"
    urgent.close()
    gang.goes_on()
    assert gang.status()["granted_bytes"] == 2 * BIG
    assert broker.rows("migrate") == []
    gang.whole()


def test_gang_that_lacks_one_of_two_devices_gets_neither(make_broker):
    """The gang needs the devices of two programs; the pool cannot suspend one of these yet."""
    broker = make_broker(lock_timeout=0.5).started
    with ended(broker) as make:
        one, two = make("one"), make("two")
        for p in (one, two):
            p.begin(MiB)
            p.do("toil")
            further(p)
        gang = make("gang", devices=2, priority="interactive")
        two.do("spin", seconds=10)
        gang.tell("context")
        wait_until(lambda: one.state() == "queued" and two.state() == "active", "the refusal")
        assert gang.status()["granted_bytes"] == 0
        assert gang.status()["wait_reason"] == (
            "300 MiB on each of 2 GPUs is needed and 1 GPU has that much free; the rest is in use "
            "by running cells"
        )
        two.close()
        assert gang.answer() is None
        assert gang.status()["granted_bytes"] == 2 * BIG
        gang.close()
        further(one)


@pytest.mark.parametrize("dies", ["the broker", "its workers", "one process", "the gang"])
def test_deaths_while_a_gang_is_half_suspended_do_no_harm(make_broker, dies):
    """The state of one process is in host memory; the copy of the other process is under way."""
    broker = make_broker().started
    with ended(broker) as make:
        gang = gang_of(make)
        second = gang.do("subpid")
        slow(broker)
        urgent = make("urgent", priority="interactive")
        urgent.tell("context")

        def half():
            used = [d["memory_used"] or 0 for d in broker.status()["devices"]]
            return gang.state() == "detaching" and min(used) == 0 < max(used)

        wait_until(half, "the first of the two copies to end")
        if dies == "the broker":
            broker.kill()
        elif dies == "its workers":
            for pid in children(broker, "worker"):
                os.kill(pid, signal.SIGKILL)
        elif dies == "one process":
            os.kill(second, signal.SIGKILL)
        else:
            gang.kill()
        broker.faults.clear()
        if dies == "the broker":
            assert broker.started
        assert urgent.answer() is None
        urgent.close()
        if dies in ("the broker", "its workers"):
            gang.goes_on()
            assert gang.status()["granted_bytes"] == 2 * BIG
            gang.whole()
        elif dies == "one process":
            further(gang)
            assert not gang.do("rest")["error"]
            assert gang.do("check") == 64 * MiB
        else:
            wait_until(lambda: not broker.status()["sessions"], "the end of all")
            assert granted(broker) == [0, 0]
        wait_until(lambda: not broker.status()["host"]["used_bytes"], "host memory to be free")
