# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the broker does with the sessions' pages; the tests act as the guard."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys

import pytest

from jupyter_gpupool.guard import page as layout

from . import kit
from .guardkit import CAPTURES, CLOSED, INFLIGHT, OPEN, PINS, UNUSED, Guarded, GuardedBroker
from .kit import BIG, MiB, wait_until

#: In these tests, a session counts as quiet after this many seconds without a call.
QUIET = 0.3


@pytest.fixture
def parts():
    return GuardedBroker, Guarded, {"quiet_after": QUIET}


def holds(kernel):
    return [hold["id"] for hold in kernel.status()["holds"]]


# ---------------------------------------------------------------------- the page


def test_new_session_has_its_own_page_with_a_closed_gate(broker, kernel):
    k = kernel(memory=BIG, limit=BIG + 100 * MiB)
    assert k.gate() == CLOSED
    assert k.granted() == 0
    assert k.limit() == BIG + 100 * MiB
    assert ",".join(k.devices()) == k.env["CUDA_VISIBLE_DEVICES"]
    found = k.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == os.getuid()
    assert stat.S_IMODE(k.path.parent.stat().st_mode) == 0o700
    assert k.status()["guard"] is True
    assert broker.status()["settings"]["attach"] == "lazy"


def test_page_ends_with_its_session_and_folder_with_the_broker(broker, kernel):
    k = kernel()
    k.server.call("close", session=k.session)
    wait_until(lambda: not k.path.exists(), "the page is removed")
    assert k.gate() == CLOSED
    assert broker.stop() == 0
    assert not k.path.parent.exists()


def test_lease_is_in_the_page_before_the_answer(broker, kernel):
    k = kernel(memory=BIG)
    answer = k.lease()
    assert answer["epoch"] > 0
    assert k.granted() == BIG
    assert k.devices() == k.status()["devices"]
    assert k.served
    # On a slow machine, the kernel may already be idle and have no hold. So the test touches the
    # gate, and the broker sees a new use.
    wait_until(lambda: k.touch() and holds(k) == ["device"], "its use")


def test_call_makes_an_idle_kernel_active_without_a_message(broker, kernel):
    k = kernel()
    k.lease()
    k.wait_state("idle")
    said = k.status()["messages"]
    assert k.gate() == UNUSED
    wait_until(lambda: k.touch() and k.state() == "active", "its use is seen")
    k.wait_state("idle")
    assert k.status()["messages"] == said == 1
    assert k.status()["busy_seconds"] > 0


@pytest.mark.parametrize("inside", [0, 1])
def test_end_of_a_cell_ends_the_use_in_cell_mode(make_broker, inside):
    """The use ends with the cell, because a grace period would delay other kernels.

    Only a call that is still inside the driver counts as use after the cell.
    """
    broker = make_broker(quiet_after=600).started
    k = Guarded(broker, memory=BIG, attach="cell", agent=True)
    k.attach("c1")
    assert k.touch()
    wait_until(lambda: "device" in holds(k), "its use is seen")
    k.set(INFLIGHT, inside)
    k.do("drop", hold="c1")
    if inside:
        wait_until(lambda: holds(k) == ["device"], "the cell is over")
    else:
        k.wait_state("idle")
        assert k.gate() == UNUSED
    k.close()


def test_kernel_without_a_cell_yields_its_slice_at_once(make_broker):
    """The agent reports that the kernel rests, so the broker does not wait for ``quiet_after``."""
    broker = make_broker(quiet_after=600, attach="lazy").started
    kernels = [Guarded(broker, memory=BIG, agent=True) for _ in range(3)]
    *holders, late = kernels
    for k in holders:  # each holder gets one of the two devices
        k.lease()
        assert k.touch()
    assert [k.state() for k in holders] == ["active", "active"]
    late.lease()
    assert [k.state() for k in holders].count("detached") == 1
    for k in kernels:
        k.close()


def test_call_in_the_driver_keeps_a_slice_that_others_need(make_broker):
    broker = make_broker(quiet_after=QUIET, attach="lazy").started
    kernels = [Guarded(broker, memory=BIG, agent=True) for _ in range(3)]
    *holders, late = kernels
    for k in holders:
        k.set(INFLIGHT, 1)
        k.lease()
        assert k.touch()
    with late.asking() as waiting:
        late.wait_state("queued")
        for k in holders:
            wait_until(lambda k=k: k.status()["messages"] >= 2, "it says that it rests")
        assert [k.state() for k in holders] == ["active", "active"]
        assert late.state() == "queued"
        holders[0].set(INFLIGHT, 0)
        assert waiting.read()["type"] == "ok"
    for k in kernels:
        k.close()


def test_agent_that_reconnects_learns_of_the_demand(make_broker):
    broker = make_broker(quiet_after=600, attach="lazy").started
    kernels = [Guarded(broker, memory=BIG) for _ in range(3)]
    *holders, late = kernels
    for k in holders:
        k.lease()
        assert k.touch()
    with late.asking() as waiting:
        late.wait_state("queued")
        # The agent of this holder connects only now, after ``late`` has asked for a slice.
        holders[0].do("start")
        assert waiting.read()["type"] == "ok"
    for k in kernels:
        k.close()


def test_kernel_with_a_call_inside_the_driver_is_not_idle(broker, kernel):
    k = kernel()
    k.set(INFLIGHT, 1)
    k.lease()
    with pytest.raises(AssertionError, match="not within"):
        k.wait_state("idle", seconds=4 * QUIET)
    k.set(INFLIGHT, 0)
    k.wait_state("idle")


def test_graph_recording_keeps_the_slice(broker, kernel):
    """The driver's lock would break the graph recording, so the suspend waits for its end."""
    k = kernel(memory=BIG)
    k.lease()
    k.set(CAPTURES, 1)
    k.touch()
    k.server.call("release", session=k.session)
    with pytest.raises(AssertionError, match="not within"):
        k.wait_state("idle", "detached", seconds=4 * QUIET)
    assert broker.rows("suspend") == []
    k.set(CAPTURES, 0)
    k.wait_state("detached")


def test_suspend_is_refused_if_a_graph_recording_begins(make_broker):
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    k.wait_state("idle")
    k.set(CAPTURES, 1)
    k.server.call("release", session=k.session)
    k.wait_state("active")
    assert k.gate() in (OPEN, UNUSED)
    assert any("it records a CUDA graph" in str(row) for row in broker.rows())
    k.close()


def test_abandoned_recording_keeps_no_slice(make_broker, monkeypatch):
    """The kernel made no call for a long time, so the broker does not wait for the recording."""
    monkeypatch.setenv("TEST_ABANDONED", "1")
    broker = make_broker(quiet_after=QUIET).started
    k = Guarded(broker, memory=BIG)
    k.lease()
    k.set(CAPTURES, 1)
    k.touch()
    k.wait_state("idle")
    k.server.call("release", session=k.session)
    k.wait_state("detached")
    k.close()


def test_call_counts_as_ended_after_its_process_is_killed(broker, kernel):
    k = kernel()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    slot = k.slot(child.pid)
    k.set(INFLIGHT, 1, slot=slot)
    k.lease()
    k.use(50 * MiB, slot=slot)
    assert k.status()["used_bytes"] == 50 * MiB
    child.kill()
    child.wait()
    k.wait_state("idle")
    assert k.status()["used_bytes"] == 0
    child.stdin.close()


def test_waiting_threads_share_one_hold_and_one_answer(broker, kernel):
    first, second = kernel(memory=BIG), kernel(memory=BIG)
    third = kernel(memory=BIG)
    first.lease()
    second.lease()
    first.set(INFLIGHT, 1)
    second.set(INFLIGHT, 1)
    with third.asking() as one, third.asking() as two:
        third.wait_state("queued")
        assert holds(third) == ["device"]
        wait_until(lambda: third.status()["waiting"] == 2, "both are known")
        first.set(INFLIGHT, 0)
        assert one.read()["type"] == two.read()["type"] == "ok"
    assert third.gate() in (OPEN, UNUSED)
    assert first.gate() == CLOSED
    assert first.granted() == 0


def test_wait_ends_when_the_last_thread_gives_up(broker, kernel):
    first, second, third = kernel(memory=BIG), kernel(memory=BIG), kernel(memory=BIG)
    for k in (first, second):
        k.lease()
        k.set(INFLIGHT, 1)
    with third.asking():
        with third.asking():
            third.wait_state("queued")
        wait_until(lambda: third.status()["waiting"] == 1, "one has gone")
        assert third.state() == "queued"
    third.wait_state("detached")
    assert holds(third) == []


def test_agent_learns_of_the_wait(broker, kernel):
    first, second = kernel(memory=BIG), kernel(memory=BIG)
    third = kernel(memory=BIG, agent=True)
    for k in (first, second):
        k.lease()
        k.set(INFLIGHT, 1)
    with third.asking() as raw:
        wait_until(lambda: third.link()["queue"], "the agent knows its place")
        assert third.link()["queue"]["position"] == 1
        second.set(INFLIGHT, 0)
        assert raw.read()["type"] == "ok"
    wait_until(lambda: third.link()["attached"], "the agent knows its lease")


def test_manual_kernel_is_refused_with_a_next_step(broker, kernel):
    k = kernel(attach="manual")
    answer = k.ask()
    assert answer["type"] == "error"
    assert answer["code"] == "manual"
    assert "%gpu attach" in answer["next_step"]
    assert k.state() == "detached"
    assert k.gate() == CLOSED


def test_wait_that_is_too_long_is_refused(make_broker):
    broker = make_broker(max_wait=0.5).started
    first, second = Guarded(broker, memory=BIG, devices=2), Guarded(broker, memory=BIG)
    first.lease()
    first.set(INFLIGHT, 1)
    answer = second.ask()
    assert answer["code"] == "wait-timeout"
    assert "max_wait" in f"{answer['message']} {answer['next_step']}"
    for k in (first, second):
        k.close()


@pytest.mark.parametrize("lie", [{"token": "x"}, {"session": "nobody"}])
def test_requests_for_another_session_are_refused(broker, kernel, lie):
    k = kernel()
    assert k.ask(**lie)["type"] == "error"
    assert k.ask("grow", device=0, bytes=1, **lie)["type"] == "error"
    assert k.state() == "detached"


# ---------------------------------------------------------------------- size


def test_new_size_is_in_the_page_at_once(broker, kernel):
    k = kernel(memory=100 * MiB)
    k.lease()
    k.use(80 * MiB)
    k.server.call("request", session=k.session, memory=200 * MiB)
    assert k.granted() == 200 * MiB
    assert k.limit() == 200 * MiB
    # The broker reads the guard's count at the request. It does not wait for the next sample.
    k.use(150 * MiB)
    with pytest.raises(Exception, match="150 MiB"):
        k.server.call("request", session=k.session, memory=120 * MiB)
    assert k.granted() == 200 * MiB
    k.use(90 * MiB)
    k.server.call("request", session=k.session, memory=120 * MiB)
    assert k.granted() == 120 * MiB


def test_size_requested_without_a_lease_changes_the_limit(broker, kernel):
    k = kernel(memory=100 * MiB)
    k.server.call("request", session=k.session, memory=150 * MiB, limit=250 * MiB)
    assert k.limit() == 250 * MiB
    k.lease()
    assert k.granted() == 150 * MiB


def test_growth_is_in_the_page_before_the_answer(broker, kernel):
    k = kernel(memory=100 * MiB, limit=300 * MiB)
    k.lease()
    k.use(90 * MiB)
    answer = k.ask("grow", device=0, bytes=50 * MiB)
    assert answer["type"] == "ok", answer
    assert answer["granted"] == k.granted() >= 150 * MiB
    k.use(140 * MiB)
    refused = k.ask("grow", device=0, bytes=300 * MiB)
    assert refused["type"] == "error"
    assert refused["code"] == "limit"
    assert broker.rows("refuse")[-1]["reason"] == refused["message"]
    assert k.ask("grow", device=3, bytes=MiB)["code"] == "no-memory"
    assert k.ask("grow", device=0, bytes=-MiB)["code"] == "bad-request"


def test_growth_into_a_neighbours_slice_is_refused(broker, kernel):
    first, second = kernel(memory=BIG, devices=2), kernel(memory=100 * MiB, limit=400 * MiB)
    first.lease()
    second.lease()
    answer = second.ask("grow", device=0, bytes=200 * MiB)
    assert answer["type"] == "error"
    assert answer["code"] == "no-memory"
    assert second.granted() == 100 * MiB


def vain(k, device=0):
    """Return the smallest grant that the page refuses. 0: none, so the guard asks the broker."""
    return struct.unpack_from("<Q", k.map, layout.VAIN_AT + 8 * device)[0]


def test_page_shows_a_refused_growth_until_memory_is_free(make_broker):
    broker = make_broker(quiet_after=600).started
    first = Guarded(broker, memory=BIG, devices=2)
    second = Guarded(broker, memory=100 * MiB, limit=450 * MiB)
    for k in (first, second):
        k.lease()
    assert vain(second) == 0

    def refused():
        # After the answer, an event of the monitor may clear the refusal in the page. So each try
        # asks again.
        assert second.ask("grow", device=0, bytes=200 * MiB)["code"] == "no-memory"
        return vain(second)

    wait_until(lambda: refused() == 300 * MiB, "the page says what was refused")
    # The neighbour's memory becomes free, so the slice can grow.
    first.server.call("close", session=first.session)
    wait_until(lambda: first.status() is None or first.state() == "ended", "the first has ended")
    assert vain(second) == 0
    answer = second.ask("grow", device=0, bytes=200 * MiB)
    assert answer["type"] == "ok", answer
    assert second.granted() >= 300 * MiB
    second.close()
    first.close()


# ---------------------------------------------------------------------- suspend


def test_session_without_an_agent_is_suspended_and_comes_back(broker, kernel):
    first, second = kernel(memory=BIG, devices=1), kernel(memory=BIG)
    for k in (first, second):
        k.lease()
        k.do("alloc", bytes=64 * MiB, byte=7)
        k.use(96 * MiB)
        k.wait_state("idle")
    third = kernel(memory=BIG)
    third.lease()
    gone = first if first.state() == "detached" else second
    assert gone.state() == "detached"
    assert gone.gate() == CLOSED
    assert gone.status()["suspended_bytes"] >= 64 * MiB
    third.wait_state("idle")
    gone.lease()
    assert gone.do("check") == 64 * MiB


def test_kernel_used_since_the_last_sample_is_not_suspended(make_broker):
    """A touched gate shows a new use, although the pool still treats the kernel as idle."""
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    k.wait_state("idle")
    k.set(INFLIGHT, 1)
    k.touch()
    k.server.call("release", session=k.session)
    k.wait_state("active")
    assert k.gate() in (OPEN, UNUSED)
    rows = broker.rows("suspend", "release")
    assert rows == []
    k.set(INFLIGHT, 0)
    k.wait_state("detached")
    assert k.gate() == CLOSED
    k.close()


def test_pinned_kernel_is_recognised_without_a_driver_call(broker, kernel):
    k = kernel(memory=BIG)
    k.lease()
    k.do("alloc", bytes=32 * MiB, byte=1)
    k.touch()
    k.set(PINS, 2)
    wait_until(lambda: k.gate() == UNUSED and k.state() == "idle", "at rest")
    k.server.call("release", session=k.session)
    wait_until(lambda: "IPC" in k.status()["pinned_reason"], "the reason is known")
    k.wait_state("idle")
    assert k.gate() in (OPEN, UNUSED)
    assert broker.rows("suspend") == []
    assert k.do("check") == 32 * MiB


def test_call_that_does_not_return_keeps_the_slice(make_broker):
    """A call stays inside the driver after the gate is closed. So the broker reopens the gate."""
    broker = make_broker().started
    k = Guarded(broker, memory=BIG)
    k.lease()
    k.wait_state("idle")
    # A call is inside the driver, but the gate is untouched. Only the counter of the process shows
    # the call.
    k.set(INFLIGHT, 1)
    k.server.call("release", session=k.session)
    k.wait_state("active")
    assert k.gate() in (OPEN, UNUSED)
    k.close()


def test_used_bytes_are_what_the_guard_counts(broker, kernel):
    k = kernel(memory=BIG)
    k.lease()
    k.use(123 * MiB)
    seen = k.status()
    assert seen["used_bytes"] == 123 * MiB
    (piece,) = seen["slices"]
    assert piece == {"device": seen["device"], "granted_bytes": BIG, "used_bytes": 123 * MiB}
    wait_until(lambda: k.status()["footprint_bytes"] == 123 * MiB, "the pool knows")
    # Allocate without the guard. A program that opens the driver by its path can do this, too.
    k.do("alloc", bytes=200 * MiB, byte=2, devices=[seen["device"]])
    wait_until(lambda: (k.status()["footprint_bytes"] or 0) >= 200 * MiB, "NVML sees more")
    wait_until(lambda: k.status()["used_bytes"] >= 200 * MiB, "which counts as its use")


def test_page_with_false_bytes_takes_nothing_from_others(broker, kernel):
    def free():
        devices = broker.status()["devices"]
        return {d["uuid"]: d["memory_free"] for d in devices}

    k = kernel(memory=BIG)
    k.lease()
    k.use(MiB)
    wait_until(lambda: k.status()["footprint_bytes"] == MiB, "the pool knows")
    before = free()
    k.use(1 << 63)
    wait_until(lambda: k.status()["footprint_bytes"] == BIG, "its word is good for its slice")
    assert free() == before


def test_damaged_page_harms_no_other_session(broker, kernel):
    k, other = kernel(memory=BIG), kernel(memory=BIG)
    k.lease()
    other.lease()
    os.truncate(k.path, 100)
    wait_until(lambda: k.status()["guard"] is False, "given up")
    wait_until(lambda: other.touch() and other.state() == "active", "its use is seen")


@pytest.mark.parametrize("message", ["hold", "drop", "cancel"])
def test_agents_cannot_take_or_end_the_guards_hold(broker, kernel, message):
    k = kernel(agent=True)
    k.set(INFLIGHT, 1)
    k.lease()
    fields = {"hold": "device", **({"kind": "cell"} if message == "hold" else {})}
    assert k.refused("call", type=message, fields=fields) == "protocol"
    assert holds(k) == ["device"]


# ---------------------------------------------------------------------- floods


def test_flood_of_requests_is_slowed_and_others_are_served(broker, kernel):
    k, other = kernel(attach="manual"), kernel(memory=BIG)
    raws = []
    while len(raws) < 600:
        # 100 connections fit in the socket's queue.
        raws += [kit.Raw(broker.socket) for _ in range(100)]
        for raw in raws[-100:]:
            raw.say(type="attach", id=1, session=k.session, token=k.token)
        said = len(raws)
        wait_until(lambda n=said: k.status()["messages"] == n, "all are there")
    other.lease()
    codes = {raw.read()["code"] for raw in raws}
    assert codes == {"manual"}
    assert len(broker.rows("refuse")) < 10
    for raw in raws:
        raw.close()


# ---------------------------------------------------------------------- overuse


def overusing(broker, **fields):
    k = Guarded(broker, memory=100 * MiB, **fields)
    k.lease()
    k.do("alloc", bytes=220 * MiB, byte=5)
    return k


def test_overuse_is_reported(make_broker):
    broker = make_broker(overuse="report").started
    k = overusing(broker)
    row = wait_until(lambda: broker.rows("overuse"), "reported")[0]
    assert row["detail"]["policy"] == "report"
    assert row["detail"]["granted"] == 100 * MiB
    assert row["bytes"] >= 220 * MiB
    assert k.status()["overuse_bytes"] >= 120 * MiB
    assert "allocated some memory without the guard" in row["reason"]
    k.close()


def test_kernel_with_overuse_is_suspended_before_it_is_ended(make_broker):
    broker = make_broker(overuse="end")
    state = broker.folder / "broker.sock.emulated"
    state.mkdir()
    (state / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.71.05  Release Build\n"
    )
    assert broker.started
    k = Guarded(broker, memory=100 * MiB)
    k.lease()
    k.do("alloc", bytes=20 * MiB, byte=5)
    k.server.call("release", session=k.session)
    k.wait_state("detached", seconds=60)
    k.lease()
    # Do not wait for the answer: the kernel may end before it answers. The kernel does not fill
    # the memory: on a busy machine, a fill would take more than 5 s, but a suspend waits only 5 s
    # for work on the GPU.
    k.tell("alloc", bytes=220 * MiB, byte=None)
    k.process.wait(60)
    row = wait_until(lambda: broker.rows("retired"), "suspended again", 60)[0]
    assert row["detail"]["safe"], row
    k.close()


def test_overuse_ends_the_kernel(make_broker):
    broker = make_broker(overuse="end").started
    k = Guarded(broker, memory=100 * MiB)
    k.lease()
    k.tell("alloc", bytes=220 * MiB, byte=5)  # the kernel may end before it answers
    k.process.wait(60)
    row = wait_until(lambda: broker.rows("lost"), "said why")[0]
    assert "c.GPUPool.overuse" in row["reason"]
    k.close()
