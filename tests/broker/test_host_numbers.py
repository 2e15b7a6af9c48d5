# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A broker in a container. The driver lists processes by the host's pids, not the container's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from . import kit
from .kit import MiB, wait_until
from .test_foreign import STRANGER
from .test_guarded import CONTEXT, Program


@pytest.fixture
def parts():
    quick = {"attach": "lazy", "quiet_after": 0.3, "overuse": "end", "foreign_processes": "end"}
    return kit.Broker, Program, quick


@pytest.fixture
def broker(make_broker):
    broker = make_broker()
    broker.faults.set("nvml-host-pids")
    return broker.started


@pytest.fixture
def program(broker):
    made = []

    def make(*args, **kwargs):
        made.append(Program(broker, *args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def bystander():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(60)


def looked(broker, one, times=5):
    """Let the kernel change its memory, and wait until a sample shows the change; then repeat."""

    def seen():
        status = broker.status()
        used = sum(device["memory_used"] or 0 for device in status["devices"])
        return used == sum(session["used_bytes"] or 0 for session in status["sessions"])

    for _ in range(times):
        for do in ("alloc", "free"):
            assert one.do(do, bytes=2 * MiB, byte=250) is None
            wait_until(seen, "the next look")


def foreign(broker):
    return [d["memory_foreign"] for d in broker.status()["devices"]]


def test_request_for_more_than_half_a_gpu_is_served(broker, program):
    """If NVML lists the bytes of a slice under an unknown pid, they must not count twice."""
    big = program("big", memory=400 * MiB, limit=400 * MiB)
    other = program("other", memory=400 * MiB, limit=400 * MiB)
    big.begin(300 * MiB, byte=1)
    other.begin(300 * MiB, byte=2)
    looked(broker, big)
    assert foreign(broker) == [0, 0]
    for p in (big, other):
        p.wait_state("idle")
    third = program("third", memory=400 * MiB, limit=400 * MiB)
    third.begin(200 * MiB, byte=3)
    gone = big if big.state() == "detached" else other
    assert gone.status()["suspended_bytes"] == 300 * MiB + CONTEXT
    third.wait_state("idle")
    assert gone.do("check") == 300 * MiB
    looked(broker, gone)
    assert foreign(broker) == [0, 0]


def test_memory_outside_the_pool_counts_once(broker, program):
    program("idle")  # the broker samples only while a session exists
    one = program("one", memory=200 * MiB, limit=200 * MiB)
    one.begin(100 * MiB)
    device = one.status()["device"]
    keep = {k: v for k, v in one.env.items() if k.startswith("EMUCUDA_")}
    library = one.env["LD_LIBRARY_PATH"].split(":")[-1]
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=kit.ROOT,
        env={**kit.environment(broker.folder), **keep, "LD_LIBRARY_PATH": library,
             "CUDA_VISIBLE_DEVICES": device},
    )  # fmt: skip
    try:
        assert stranger.stdout.readline() == b"\n"
        used = 100 * MiB + CONTEXT + 64 * MiB + CONTEXT
        # The slice covers a part of the stranger's memory: only the rest counts as foreign.
        wait_until(lambda: sum(foreign(broker)) == used - 200 * MiB, "its memory")
        one.close()
        wait_until(lambda: sum(foreign(broker)) == 64 * MiB + CONTEXT, "all of its memory")
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait(60)
        stranger.stdin.close()
        stranger.stdout.close()
    wait_until(lambda: sum(foreign(broker)) == 0, "its end")


def test_process_with_a_pid_from_the_drivers_list_is_not_ended(broker, program, bystander):
    one = program("one", memory=400 * MiB, limit=400 * MiB)
    two = program("two", memory=100 * MiB, limit=100 * MiB)
    one.begin(300 * MiB, byte=1)
    two.begin(byte=2)
    # NVML lists the first program under the second program's pid, and the second program under
    # the bystander's pid.
    broker.faults.set("nvml-host-pids", pid=one.process.pid, number=two.process.pid)
    broker.faults.set("nvml-host-pids", pid=two.process.pid, number=bystander.pid)
    looked(broker, one)
    assert broker.rows("overuse", "foreign", "lost") == []
    assert bystander.poll() is None
    for p in (one, two):
        assert p.state() in ("active", "idle")
    assert one.do("check") == 300 * MiB


def test_next_broker_knows_the_host_pids_without_a_self_test(broker, program):
    one = program("one", memory=400 * MiB, limit=400 * MiB)
    one.begin(300 * MiB, byte=1)
    broker.kill()
    broker.start()
    looked(broker, one)
    assert sum(foreign(broker)) == 0
    assert one.do("check") == 300 * MiB
