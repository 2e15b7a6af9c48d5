# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Broker, guard and emulated driver together, with programs that do not know the pool."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from jupyter_gpupool.guard import page as layout

from . import kit
from .kit import MiB, wait_until

#: Size that a session requests. A device has room for only one session of this size.
BIG = 300 * MiB

#: CUDA_ERROR_OUT_OF_MEMORY.
OUT_OF_MEMORY = {"cuda": 2}

#: CUDA_ERROR_SYSTEM_NOT_READY.
NOT_READY = {"cuda": 802}

#: The size of a context on the emulated machine, see kit.MACHINE.
CONTEXT = 32 * MiB


class Program(kit.Kernel):
    """A session whose process has no agent."""

    module = "tests.broker.guarded_child"

    def __init__(self, broker, label="", *, attach=None, **request):
        self._attach = attach
        super().__init__(broker, label, agent=False, **request)

    def open_fields(self):
        return {} if self._attach is None else {"attach": self._attach}

    def begin(self, size=0, byte=1):
        """Make a context, and allocate."""
        assert self.do("context") is None
        if size:
            assert self.do("alloc", bytes=size, byte=byte) is None

    def status(self):
        return self.broker.session(self.session)

    def mark(self):
        """Read from the page which step of its landing the process has reached."""
        return self.in_slot(layout.LANDING_AT)

    def sees(self):
        """Read from the page which device is the first device for the process."""
        return self.in_slot(layout.SEES_AT)

    def in_slot(self, offset):
        """Return a word of the process's slot in the page."""
        data = Path(self.env["GPUPOOL_PAGE"]).read_bytes()
        for at in range(layout.HEADER_BYTES, layout.SIZE, layout.SLOT_BYTES):
            if struct.unpack_from("<I", data, at + 4)[0] == self.process.pid:
                return struct.unpack_from("<Q", data, at + offset)[0]
        return None


@pytest.fixture
def parts():
    return kit.Broker, Program, {"attach": "lazy", "quiet_after": 0.3}


@pytest.fixture
def broker(make_broker):
    broker = make_broker().started
    settings = broker.status()["settings"]
    assert settings["attach"] == "lazy", settings["attach_reason"]
    return broker


@pytest.fixture
def program(broker):
    made = []

    def make(*args, **kwargs):
        made.append(Program(broker, *args, **{"memory": BIG, **kwargs}))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_session_attaches_at_its_first_call_and_not_before(program):
    p = program()
    assert p.do("init") == 1
    assert p.state() == "detached"
    assert p.status()["messages"] == 0
    p.begin(64 * MiB)
    status = p.status()
    assert status["state"] in ("active", "idle")
    assert status["used_bytes"] == 64 * MiB + CONTEXT
    p.wait_state("idle")
    assert p.status()["messages"] == 1
    assert p.do("check") == 64 * MiB
    p.wait_state("active", "idle")
    assert p.status()["messages"] == 1


def test_idle_kernel_is_preempted_and_returns_with_its_bytes(broker, program):
    first, second = program(), program()
    first.begin(64 * MiB, byte=7)
    second.begin(64 * MiB, byte=8)
    for p in (first, second):
        p.wait_state("idle")
    third = program()
    third.begin(32 * MiB, byte=9)
    gone = first if first.state() == "detached" else second
    assert gone.state() == "detached"
    assert gone.status()["suspended_bytes"] >= 64 * MiB
    third.wait_state("idle")
    assert gone.do("check") == 64 * MiB
    assert gone.status()["resumes"] == 1
    assert third.state() in ("detached", "idle")


def test_nvml_call_of_a_suspended_kernel_brings_it_back(broker, program):
    """The driver would block the call until a resume, so the guard must ask for the resume."""
    p = program()
    devices = p.do("nvml")  # this call needs no slice
    assert p.state() == "detached"
    p.begin(64 * MiB, byte=7)
    p.wait_state("idle")
    p.server.call("release", session=p.session)
    p.wait_state("detached")
    assert p.status()["suspended_bytes"] >= 64 * MiB
    assert p.do("nvml") == devices
    assert p.status()["resumes"] == 1
    p.wait_state("idle")
    assert p.do("check") == 64 * MiB


def test_thread_that_polls_nvml_neither_keeps_nor_gets_a_slice(broker, program):
    p = program()
    p.begin(64 * MiB, byte=7)
    p.do("poll")
    wait_until(lambda: p.do("polled"), "the first answer")
    p.wait_state("idle")  # the polling does not count as use of the device
    p.server.call("release", session=p.session)
    p.wait_state("detached")
    before = p.do("polled")
    assert p.status()["waiting"] == 0
    assert p.do("check") == 64 * MiB
    assert p.status()["resumes"] == 1
    wait_until(lambda: p.do("polled") > before + 1, "the thread goes on after the resume")


def test_call_waits_while_the_other_kernels_are_busy(broker, program):
    first, second = program(), program()
    first.begin(MiB)
    second.begin(MiB)
    for p in (first, second):
        assert p.do("storm") is None
    third = program()
    third.tell("context")
    third.wait_state("queued")
    assert third.status()["waiting"] == 1
    before = first.do("calls")
    wait_until(lambda: first.do("calls") > before, "the neighbour works on")
    assert first.do("calm")["error"] == 0
    assert second.do("calm")["error"] == 0
    assert third.answer() is None
    assert third.served


def test_program_survives_an_allocation_beyond_its_slice(program):
    p = program(memory=100 * MiB, limit=100 * MiB)
    p.begin(60 * MiB)
    free, total = p.do("info")
    assert total == 100 * MiB
    assert free == 100 * MiB - 60 * MiB - CONTEXT
    assert p.do("alloc", bytes=free + MiB, byte=2) == OUT_OF_MEMORY
    assert p.do("alloc", bytes=free, byte=2) is None
    assert p.do("free", byte=2) is None
    assert p.do("info") == [free, total]
    assert p.do("check") == 60 * MiB


def test_free_memory_excludes_a_neighbours_guarantee(broker, program):
    """JAX, TensorFlow and vLLM allocate all memory that CUDA reports as free. They must get it."""
    p = program(memory=100 * MiB, limit=400 * MiB)
    p.begin()
    wait_until(lambda: p.do("info")[0] == 400 * MiB - CONTEXT, "an empty device")
    # This program makes only a context, and its slice cannot grow.
    other = program(memory=350 * MiB, limit=350 * MiB)
    other.begin()
    third = program(memory=250 * MiB, limit=250 * MiB)
    third.begin()
    home = p.status()["slices"][0]["device"]
    neighbours = [q for q in (other, third) if q.status()["slices"][0]["device"] == home]
    assert neighbours, "the machine has two devices, and the three sessions fit on no single one"
    granted = sum(q.status()["granted_bytes"] for q in neighbours)
    # ``p`` may grow into all memory outside the neighbours' slices. The memory inside these slices
    # does not count as free, even if the neighbours do not use it.
    wait_until(
        lambda: p.do("info")[0] <= kit.CAPACITY - granted - CONTEXT, "the neighbour's guarantee"
    )
    free, total = p.do("info")
    assert total == 400 * MiB
    assert p.do("alloc", bytes=free, byte=3) is None
    for q in neighbours:
        assert q.do("alloc", bytes=q.status()["granted_bytes"] - CONTEXT, byte=4) is None
    for q in (p, *neighbours):
        q.close()


def test_new_size_counts_at_the_next_allocation(program):
    p = program(memory=100 * MiB, limit=100 * MiB)
    p.begin(60 * MiB)
    assert p.do("alloc", bytes=100 * MiB, byte=2) == OUT_OF_MEMORY
    p.server.call("request", session=p.session, memory=250 * MiB)
    assert p.do("alloc", bytes=100 * MiB, byte=2) is None
    assert p.do("info")[1] == 250 * MiB
    with pytest.raises(Exception, match="192 MiB"):
        p.server.call("request", session=p.session, memory=100 * MiB)
    assert p.do("free", byte=2) is None
    # Until the next sample, the broker still counts the memory that ``free`` has released.
    wait_until(lambda: p.status()["used_bytes"] == 60 * MiB + CONTEXT, "a sample after it")
    p.server.call("request", session=p.session, memory=120 * MiB)
    assert p.do("alloc", bytes=60 * MiB, byte=2) == OUT_OF_MEMORY


def test_slice_grows_to_its_limit_out_of_free_memory(program):
    p = program(memory=100 * MiB, limit=300 * MiB)
    p.begin(60 * MiB)
    assert p.do("alloc", bytes=150 * MiB, byte=2) is None
    assert p.status()["granted_bytes"] >= 60 * MiB + 150 * MiB + CONTEXT
    assert p.do("alloc", bytes=100 * MiB, byte=3) == OUT_OF_MEMORY
    assert p.do("check") == 210 * MiB


def test_lone_program_may_use_the_gpu_beyond_host_memory(make_broker):
    """The lone program cannot get the memory that the pool guarantees to another open program.

    After the other program has ended, the lone program may use the whole GPU.
    """
    broker = make_broker(emulate="1x512MiB,context=32MiB", host_memory=200 * MiB).started
    p = Program(broker, memory=100 * MiB, limit=512 * MiB)
    other = Program(broker, memory=150 * MiB, limit=150 * MiB)
    p.begin(60 * MiB)
    assert p.do("alloc", bytes=200 * MiB, byte=2) is None, "more than host memory takes"
    assert p.do("alloc", bytes=100 * MiB, byte=3) == OUT_OF_MEMORY, "the other one's"
    other.begin(64 * MiB)
    assert other.status()["granted_bytes"] == 150 * MiB
    other.close()
    wait_until(lambda: p.do("alloc", bytes=100 * MiB, byte=3) is None, "the other one's memory", 60)
    assert p.do("check") == 360 * MiB
    with broker.client() as client:
        lines = client.call("why", session=p.session)["lines"]
    assert any("It cannot be suspended: its state may need" in line for line in lines), lines
    p.close()


def test_repeated_refused_allocations_send_few_requests(program):
    """After a refusal, the guard asks the broker again only when something has changed."""
    p = program(memory=100 * MiB, limit=100 * MiB)
    p.begin(60 * MiB)
    before = p.status()["messages"]
    storm = p.do("exhaust", bytes=100 * MiB, times=2000)
    assert storm == [OUT_OF_MEMORY["cuda"]]
    assert p.status()["messages"] - before < 200
    # A larger slice takes effect at once.
    p.server.call("request", session=p.session, memory=250 * MiB)
    assert p.do("alloc", bytes=100 * MiB, byte=2) is None
    assert p.do("check") == 160 * MiB


def test_bytes_of_a_killed_child_become_free(program):
    p = program(memory=200 * MiB, limit=200 * MiB)
    p.begin(40 * MiB)
    child = p.do("spawn", bytes=60 * MiB)
    assert child["answers"] == [{"ok": None}, {"ok": None}]
    assert p.status()["used_bytes"] == 100 * MiB + 2 * CONTEXT
    assert p.do("alloc", bytes=60 * MiB, byte=2) == OUT_OF_MEMORY
    p.do("kill")
    wait_until(lambda: p.status()["used_bytes"] == 40 * MiB + CONTEXT, "the child's bytes")
    assert p.do("alloc", bytes=60 * MiB, byte=2) is None


def test_child_is_suspended_with_its_parent(broker, program):
    p = program()
    p.begin(40 * MiB, byte=3)
    p.do("spawn", bytes=30 * MiB)
    p.wait_state("idle")
    p.server.call("release", session=p.session)
    p.wait_state("detached")
    assert p.status()["suspended_bytes"] >= 70 * MiB
    assert p.do("check") == 40 * MiB


def test_calls_that_race_with_a_release_do_not_fail(broker, program):
    p = program()
    p.begin(16 * MiB, byte=5)
    assert p.do("storm", pause=0.02) is None
    for _ in range(10):
        p.server.call("release", session=p.session)
        before = p.do("calls")
        wait_until(lambda n=before: p.do("calls") > n + 5, "it works on")
    assert p.do("calm")["error"] == 0
    p.wait_state("detached", "idle")
    assert p.do("check") == 16 * MiB


def test_program_in_manual_mode_gets_an_error_without_a_slice(program):
    p = program(attach="manual")
    assert p.do("init") == 1
    assert p.do("context") == NOT_READY


def test_next_broker_serves_a_call_that_still_waits(broker, program):
    first, second, third = program(), program(), program()
    for p in (first, second):
        p.begin(MiB)
        assert p.do("storm") is None
    third.tell("context")
    third.wait_state("queued")
    broker.kill()
    assert broker.started
    third.wait_state("queued")
    for p in (first, second):
        assert p.do("calm")["error"] == 0
    assert third.answer() is None


def test_waiting_call_gets_a_cuda_error_if_no_broker_returns(broker, program):
    first, second, third = program(), program(), program()
    for p in (first, second):
        p.begin(MiB)
        assert p.do("storm") is None
    third.tell("context")
    third.wait_state("queued")
    broker.kill()
    assert third.answer() == NOT_READY
    for p in (first, second):
        assert p.do("calm")["error"] == 0  # an attached program continues


def test_memory_allocated_past_the_guard_is_reported(make_broker):
    """A program that starts without the guard's variables allocates without asking the broker."""
    broker = make_broker(overuse="report").started
    p = Program(broker, launch=False, memory=100 * MiB)
    for name in ("LD_PRELOAD", "GPUPOOL_PAGE"):
        p.env.pop(name)
    p.env["LD_LIBRARY_PATH"] = p.env["LD_LIBRARY_PATH"].split(":", 1)[1]
    p.launch(agent=False)
    p.begin(200 * MiB)
    row = wait_until(lambda: broker.rows("overuse"), "reported")[0]
    assert row["session"] == p.session
    assert row["bytes"] >= 200 * MiB
    p.close()


def test_next_broker_frees_a_slice_that_is_no_longer_used(make_broker):
    """The holder's last call ends after one broker has died and before the next broker starts.

    The next broker once counted the slice as in use for its first two seconds. Brokers that were
    killed within their first two seconds therefore never served the waiting session.
    """
    broker = make_broker(emulate="1x512MiB,context=32MiB").started
    holder, waiting = (Program(broker, name, memory=BIG) for name in ("holder", "waiting"))
    try:
        holder.begin(16 * MiB, byte=1)
        assert holder.do("storm") is None
        waiting.tell("context")
        waiting.wait_state("queued")
        broker.kill()
        assert holder.do("calm")["error"] == 0
        assert broker.started
        assert waiting.answer() is None
        assert "did not reconnect" not in broker.tail(1 << 20)
        assert holder.do("check") == 16 * MiB
    finally:
        holder.close()
        waiting.close()
