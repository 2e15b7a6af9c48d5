# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker ends processes that nothing can resume. All other processes must continue."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.procfs import identify

from . import kit
from .kit import MiB, wait_until
from .test_guarded import CONTEXT, Program


@pytest.fixture
def parts():
    return kit.Broker, Program, {"attach": "lazy", "quiet_after": 0.3}


@pytest.fixture
def broker(make_broker):
    return make_broker().started


@pytest.fixture
def family(broker):
    """Yield a suspended kernel and its suspended child. The child does not end with the kernel."""
    one = Program(broker, "one", memory=300 * MiB)
    other = Program(broker, "other", memory=100 * MiB)
    one.begin(32 * MiB)
    child = one.do("orphan", bytes=48 * MiB)
    try:
        one.wait_state("idle")
        one.server.call("release", session=one.session)
        one.wait_state("detached")
        assert one.status()["suspended_bytes"] == 80 * MiB + 2 * CONTEXT
        yield one, child
    finally:
        one.close()
        other.close()
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_suspended_child_of_a_dead_kernel_is_ended(broker, family):
    one, child = family
    assert identify(child) is not None
    one.kill()
    wait_until(lambda: identify(child) is None, "the child's end", 60)
    line = f"process {child} of session {one.session}: this process was still suspended"
    wait_until(lambda: line in broker.tail(), "the log's line")


def test_next_broker_ends_the_suspended_child_of_a_dead_kernel(broker, family):
    one, child = family
    broker.kill()
    one.kill()
    broker.start()
    wait_until(lambda: identify(child) is None, "the child's end", 60)


def test_running_child_outlives_its_kernel(broker):
    one = Program(broker, "one", memory=300 * MiB)
    one.begin(32 * MiB)
    child = one.do("orphan", bytes=48 * MiB)
    try:
        one.close()
        wait_until(lambda: broker.rows("close"), "the end of the session")
        two = Program(broker, "two", memory=100 * MiB)
        two.begin(MiB)
        two.close()
        assert identify(child) is not None
    finally:
        os.kill(child, signal.SIGKILL)


def descriptors(pid):
    return len([*Path(f"/proc/{pid}/fd").iterdir()])


def test_no_process_counts_as_dead_when_descriptors_run_out(broker):
    one = Program(broker, "one", memory=300 * MiB)
    one.begin(32 * MiB)
    one.wait_state("idle")
    pid = broker.process.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    few = descriptors(pid)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (few, before[1]))
    raws = []
    try:
        # The broker cannot accept these connections, because it has no free descriptor.
        for _ in range(5):
            raws.append(kit.Raw(broker.socket))
        wait_until(lambda: "The broker can accept no connection now" in broker.tail(), "the log")
        one.server.call("release", session=one.session)

        def looked():
            (session,) = one.server.call("status")["sessions"]
            return session["state"] == "detached" or session["stays_reason"]

        wait_until(looked, "the suspend, or why not")
        assert len(broker.tail(1 << 20).splitlines()) < 100
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for raw in raws:
            raw.close()
    one.wait_state("detached", seconds=60)
    assert one.do("check") == 32 * MiB
    one.close()


def test_broker_raises_its_descriptor_limit_to_the_hard_limit(broker):
    soft, hard = resource.prlimit(broker.process.pid, resource.RLIMIT_NOFILE)
    assert soft == hard >= resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_living_process_is_alive_when_no_file_can_be_opened(monkeypatch):
    me = identify(os.getpid())
    gone = procfs.ProcessId((1 << 22) + 1, 5)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    procfs.spare.keep()
    opened = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors(os.getpid()) + 8, before[1]))
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        assert procfs.presence(me) == "alive"
        assert procfs.identify(os.getpid()) == me
        assert procfs.presence(gone) == "gone"
        # Now ``procfs`` has no spare descriptor and cannot get one.
        monkeypatch.setattr(procfs, "spare", type(procfs.spare)())
        assert procfs.presence(me) == "alive"
        assert procfs.identify(os.getpid()) is None
        assert procfs.presence(gone) == "gone"
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
