# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The life of a session with a real broker, the emulated driver, and data in device memory."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jupyter_gpupool.broker.messages.snapshot import measured
from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.guard.install import without_guard
from jupyter_gpupool.pool.model import Owner, Request, SessionRecord, Slice

from .kit import BIG, CAPACITY, Kernel, MiB, wait_until


def test_new_session_is_detached_and_has_a_home_device(broker, kernel):
    one = kernel("one")
    devices = {d["uuid"]: d for d in broker.status()["devices"]}
    assert one.env["CUDA_VISIBLE_DEVICES"] in devices
    assert one.env["CUDF_PANDAS_RMM_MODE"] == "async"  # RMM's default mode cannot be suspended
    assert one.env["GPUPOOL_SOCKET"] == str(broker.socket)
    assert one.env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert one.env["LD_LIBRARY_PATH"].endswith("/emucuda/lib")
    found = broker.session(one.session)
    assert (found["state"], found["granted_bytes"], found["holds"]) == ("detached", 0, [])
    assert (found["label"], found["kernel_id"]) == ("one", "k-one")
    assert found["request"]["memory"] == BIG
    assert found["pid"] == one.process.pid


def test_home_devices_are_spread_evenly(broker, kernel):
    homes = [kernel(str(n), launch=False).env["CUDA_VISIBLE_DEVICES"] for n in range(4)]
    assert sorted(homes.count(d["uuid"]) for d in broker.status()["devices"]) == [2, 2]


def test_ended_kernels_do_not_count_for_home_devices(broker, kernel):
    first, second = (kernel(name, launch=False) for name in ("first", "second"))
    homes = [one.env["CUDA_VISIBLE_DEVICES"] for one in (first, second)]
    assert len({*homes}) == 2
    with broker.client() as client:
        client.call("close", session=second.session)
    wait_until(lambda: len(broker.status()["sessions"]) == 1, "the second one has ended")
    assert kernel("third", launch=False).env["CUDA_VISIBLE_DEVICES"] == homes[1]


def test_cell_takes_and_drops_a_hold(broker, kernel):
    one = kernel("one")
    got = one.attach("c1")
    ((device, size),) = got["slices"]
    assert size == BIG
    found = broker.session(one.session)
    assert (found["state"], found["device"], found["granted_bytes"]) == ("active", device, BIG)
    assert [h["id"] for h in found["holds"]] == ["c1"]
    one.do("drop", hold="c1")
    one.wait_state("idle")
    assert one.do("take", hold="c2") is True
    one.wait_state("active")
    one.do("drop", hold="c2")
    one.wait_state("idle")
    kinds = [r["kind"] for r in broker.rows() if r["session"] == one.session]
    assert kinds[0] == "open"
    assert kinds.count("attach") == 1


def test_unmeasured_values_are_null_and_not_zero():
    record = SessionRecord("a", Owner("ann"), Request(4, 4), "cell")
    assert measured(record, None) == 0
    attached = replace(record, slices=(Slice("G0", 4),))
    assert [measured(attached, cuda) for cuda in (None, True, False)] == [None, None, 0]
    assert measured(replace(attached, footprint=3), True) == 3


def test_normal_end_keeps_the_emulated_devices_of_sessions(broker, kernel):
    state = broker.socket.with_name("broker.sock.emulated")
    one = kernel("one")
    assert broker.stop() == 0
    assert state.is_dir()
    assert broker.started
    one.close()
    wait_until(lambda: not broker.status()["sessions"], "the end of the session")
    assert broker.stop() == 0
    assert not state.exists()
    assert not broker.socket.with_name("broker.sock.lock").exists()


def test_three_sessions_share_two_devices_and_lose_no_byte(broker, kernel):
    first, second, third = (kernel(name) for name in ("first", "second", "third"))
    for number, one in enumerate((first, second), 1):
        one.attach()
        one.do("alloc", bytes=64 * MiB, byte=number)
    second_device = broker.session(second.session)["device"]
    first_device = broker.session(first.session)["device"]
    assert first_device != second_device
    third.do("ask", hold="cell")
    wait_until(lambda: third.link()["queue"], "its place in the queue")
    assert third.link()["queue"]["position"] == 1
    assert third.state() == "queued"
    first.do("drop", hold="cell")
    third.do("got", hold="cell")
    assert broker.session(third.session)["device"] == first_device
    found = broker.session(first.session)
    assert found["state"] == "detached"
    assert found["suspended_bytes"] == (64 + 32) * MiB
    assert first.link()["attached"] is False
    # The second session's device becomes free, and the first session resumes on it.
    second.do("drop", hold="cell")
    first.attach("again")
    assert broker.session(first.session)["device"] == second_device
    assert first.do("check") == 64 * MiB
    assert broker.session(first.session)["migrations"] == 1
    third.do("drop", hold="cell")
    second.attach("again")
    assert second.do("check") == 64 * MiB
    rows = broker.rows("attach", "suspend", "resume", "migrate")

    def of(one):
        return [r["kind"] for r in rows if r["session"] == one.session]

    assert of(first) == ["attach", "suspend", "resume", "migrate"]
    assert of(second)[:3] == ["attach", "suspend", "resume"]
    suspended = next(r for r in rows if r["kind"] == "suspend")
    assert suspended["bytes"] == (64 + 32) * MiB
    assert suspended["seconds"] > 0


def test_unused_slice_is_released_without_a_driver_call(broker, kernel):
    one = kernel("one")
    one.attach()
    one.do("drop", hold="cell")
    with broker.client() as client:
        note = client.call("release", session=one.session)["note"]
    assert note
    one.wait_state("detached")
    assert broker.session(one.session)["suspended_bytes"] == 0
    assert [r["kind"] for r in broker.rows("release", "suspend")] == ["release"]


def test_release_during_a_cell_waits_for_the_cell(broker, kernel):
    one = kernel("one")
    one.attach()
    assert one.do("call", type="release")["note"]
    assert one.state() == "active"
    one.do("drop", hold="cell")
    one.wait_state("detached")


def test_idle_time_ends_a_lease_and_keep_postpones_it(make_broker):
    broker = make_broker(idle_timeout=0.5).started
    kept, other = Kernel(broker, "kept"), Kernel(broker, "other")
    try:
        for one in (kept, other):
            one.attach()
        kept.do("call", type="keep", fields={"seconds": 3600})
        for one in (kept, other):
            one.do("drop", hold="cell")
        other.wait_state("detached")
        assert kept.state() == "idle"
        assert kept.refused("call", type="keep", fields={"seconds": float("nan")}) == "bad-request"
        kept.do("call", type="release")
        kept.wait_state("detached")
    finally:
        kept.close()
        other.close()


def test_request_changes_the_slice(broker, kernel):
    one = kernel("one")
    one.attach()
    answer = one.do("call", type="request", fields={"memory": 400 * MiB})
    assert answer["request"]["memory"] == 400 * MiB
    wait_until(lambda: broker.session(one.session)["granted_bytes"] == 400 * MiB, "the new size")
    wait_until(lambda: one.link()["slices"][0][1] == 400 * MiB, "the agent's lease")


@pytest.mark.parametrize(
    "fields",
    [{"memory": 10 * CAPACITY}, {"memory": -1}, {"devices": 3}, {"priority": "emperor"}],
    ids=str,
)
def test_impossible_request_is_refused_and_changes_nothing(broker, kernel, fields):
    one = kernel("one")
    before = broker.session(one.session)["request"]
    one.refused("call", type="request", fields=fields)
    assert broker.session(one.session)["request"] == before
    with pytest.raises(RefusedError):
        Kernel(broker, "never", launch=False, **fields)
    assert len(broker.status()["sessions"]) == 1


def test_wait_can_be_cancelled(broker, kernel):
    one, two = kernel("one", memory=400 * MiB), kernel("two", memory=400 * MiB)
    three = kernel("three", memory=400 * MiB)
    one.attach()
    two.attach()
    three.do("ask", hold="cell")
    three.wait_state("queued")
    three.do("drop", hold="cell")
    three.wait_state("detached")
    assert broker.status()["queue_length"] == 0


def test_close_ends_a_session_and_may_be_repeated(broker, kernel):
    one = kernel("one")
    one.attach()
    one.server.call("close", session=one.session)
    one.server.call("close", session=one.session)
    assert broker.status()["sessions"] == []
    assert all(d["memory_granted"] == 0 for d in broker.status()["devices"])


def test_session_ends_if_its_client_leaves_before_the_launch(broker, kernel):
    one = kernel("one", launch=False)
    assert len(broker.status()["sessions"]) == 1
    one.server.close()
    wait_until(lambda: broker.status()["sessions"] == [], "the end of the session")


def test_end_of_the_server_does_not_end_its_kernels(broker, kernel):
    one = kernel("one")
    one.attach()
    one.server.close()
    broker.status()
    assert one.state() == "active"


def test_watchers_see_rows_as_they_happen(broker, kernel):
    seen = []
    with broker.client(on_push=seen.append) as client:
        client.call("watch")
        one = kernel("one")
        one.attach()
        wait_until(lambda: [r for r in seen if r.get("kind") == "attach"], "the attach row")
    rows = [r for r in seen if r["type"] == "event"]
    assert [r["seq"] for r in rows] == sorted(r["seq"] for r in rows)


def test_watchers_hear_of_the_end_of_a_cell(broker, kernel):
    seen = []
    with broker.client(on_push=seen.append) as client:
        client.call("watch")
        one = kernel("one")
        one.attach()
        one.do("drop", hold="cell")
        ended = {"type": "stirred", "session": one.session}
        wait_until(lambda: ended.items() <= {**seen[-1]}.items(), "the end of the cell")
        assert one.state() == "idle"


def test_watchers_hear_that_others_wait_for_an_idle_slice(broker, kernel):
    """The broker sends the watcher one push, even if several of the watcher's sessions are idle."""
    one, other, heir = (kernel(name, memory=400 * MiB) for name in ("v", "o", "h"))
    idle = {each.session for each in (one, other)}
    for each in (one, other):
        each.attach()
        each.do("drop", hold="cell")
        each.wait_state("idle")
    seen = []
    with broker.client(on_push=seen.append) as client:
        for name in idle:
            client.call("keep", session=name, seconds=600)
        client.call("watch")
        for ask, wanted in ((True, True), (False, False)):
            seen.clear()
            if ask:
                heir.do("ask", hold="cell")
            else:
                heir.kill()
            wait_until(lambda: [x for x in seen if x.get("session") in idle], "the stir")
            assert [broker.session(name)["wanted"] for name in idle] == [wanted, wanted]


@pytest.mark.parametrize("when", ["queued", "attached", "suspended"])
def test_killed_kernel_gives_its_slice_back(broker, kernel, record_property, when):
    victim, other, heir = (kernel(name, memory=400 * MiB) for name in ("v", "o", "h"))
    victim.attach()
    victim.do("alloc", bytes=32 * MiB, byte=1)
    other.attach()
    heir.do("ask", hold="cell")
    heir.wait_state("queued")
    if when == "attached":
        started = time.monotonic()
        victim.kill()
        heir.do("got", hold="cell")
    elif when == "suspended":
        victim.do("drop", hold="cell")
        heir.do("got", hold="cell")
        victim.wait_state("detached")
        assert broker.session(victim.session)["suspended_bytes"] > 0
        started = time.monotonic()
        victim.kill()
        wait_until(lambda: broker.session(victim.session) is None, "its end")
    else:
        started = time.monotonic()
        heir.kill()
        wait_until(lambda: broker.session(heir.session) is None, "its end")
        assert broker.status()["queue_length"] == 0
    record_property("milliseconds", round(1000 * (time.monotonic() - started), 1))
    print(f"{when}: {1000 * (time.monotonic() - started):.1f} ms")
    ended = heir if when == "queued" else victim
    assert broker.session(ended.session) is None
    assert broker.status()["host"]["used_bytes"] == 0
    alive = [one for one in (victim, other, heir) if one is not ended]
    assert {s["id"] for s in broker.status()["sessions"]} == {one.session for one in alive}


def test_memory_outside_the_pool_is_counted(broker, kernel):
    """A process without a session allocates memory. The pool counts it as foreign memory."""
    one = kernel("one")
    one.attach()
    device = one.link()["slices"][0][0]
    stranger = kernel("stranger", launch=False)
    stranger.env = without_guard(stranger.env)
    stranger.launch(agent=False)
    stranger.server.call("close", session=stranger.session)
    stranger.process.stdin.flush()
    # The stranger's session is closed, so its memory on the first device is foreign.
    stranger.do("alloc", bytes=64 * MiB, byte=3)

    def foreign():
        return {d["uuid"]: d["memory_foreign"] for d in broker.status()["devices"]}

    wait_until(lambda: sum(foreign().values()) == (64 + 32) * MiB, "the stranger's memory")
    stranger.kill()
    wait_until(lambda: sum(foreign().values()) == 0, "its end")
    assert device
