# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions that wait: victims, the order of the queue, backfilling, and reasons for users."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Slice

from .builders import all_of, device, got, none


def suspends(actions):
    return [a.session for a in all_of(actions, ev.Suspend)]


def attaches(actions):
    return [a.session for a in all_of(actions, ev.Attach)]


# --------------------------------------------------------------------------- victims


def test_only_idle_leases_are_preempted(make):
    lab = make(device(0))
    lab.idle("a", 6)
    lab.running("b", 6)
    lab.open("w", 8)
    actions = lab.hold("w")
    assert suspends(actions) == ["a"]
    assert lab.reason("w") == "waiting for 1 idle kernel to be suspended"
    actions = lab.suspended("a", ("G0", 6))
    assert attaches(actions) == ["w"]


def test_lease_with_the_most_idle_byte_seconds_yields_first(make):
    lab = make(device(0, 30))
    lab.idle("small-old", 4)
    lab.after(100)
    lab.idle("large-new", 20)
    lab.after(10)
    lab.open("w", 7)
    # The score is bytes x idle seconds: 4 x 110 for small-old, 20 x 10 for large-new. So small-old
    # has the higher score. Its 4 bytes and the 6 free bytes are enough for w.
    assert suspends(lab.hold("w")) == ["small-old"]


def test_pool_preempts_no_more_leases_than_needed(make):
    lab = make(device(0, 12))
    lab.idle("a", 2)
    lab.after(100)
    lab.idle("b", 10)
    lab.after(1)
    lab.open("w", 10)
    # a has the higher score, but its 2 bytes are too few. The 10 bytes of b are enough without a.
    assert suspends(lab.hold("w")) == ["b"]


def test_free_memory_is_used_before_a_preemption(lab):
    lab.idle("a", 16)
    lab.open("w", 16)
    actions = lab.hold("w")
    assert suspends(actions) == []
    assert got(actions, ev.Attach).slices == (Slice("G1", 16),)


def test_suspend_under_way_is_awaited_before_another_begins(make):
    lab = make(device(0), device(1))
    lab.idle("a", 16)
    lab.idle("b", 16)
    lab.release("a")
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert attaches(lab.suspended("a", ("G0", 1))) == ["w"]


def test_idle_lease_is_protected_by_reclaim_after_and_by_keep(make):
    lab = make(device(0), reclaim_after=5.0)
    lab.idle("a", 16)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert "keep their slice" in lab.reason("w")
    assert suspends(lab.after(4)) == []
    lab.keep("a", 20)
    assert suspends(lab.after(15)) == []
    assert suspends(lab.after(5)) == ["a"]


def test_a_refused_suspend_is_not_tried_again_at_once(make):
    lab = make(device(0))
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    times = []
    for kind in ("busy", "busy", "drain", "host"):
        assert suspends(lab.refused("a", kind)) == []
        start = lab.now
        while not suspends(lab.after(1.0)):
            pass
        times.append(lab.now - start)
    assert times == [1, 2, 40, 60]


def test_pool_retries_a_pinned_session_after_60_s_and_says_why(make):
    lab = make(device(0))
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    lab.refused("a", "pinned", "it uses managed memory")
    assert lab.record("a").pinned_reason == "it uses managed memory"
    assert suspends(lab.after(59)) == []
    assert suspends(lab.after(1)) == ["a"]


def test_only_empty_leases_end_on_a_device_without_suspend(make):
    lab = make(device(0, can_suspend=False, tier="mig"))
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    assert suspends(lab.after(1000)) == []
    assert suspends(lab.seen("G0", a=3)) == []
    assert suspends(lab.seen("G0", a=0)) == ["a"]


def test_pool_plans_again_when_a_victim_wakes_up(make):
    lab = make(device(0), device(1))
    lab.idle("a", 16)
    lab.after(1)
    lab.idle("b", 16)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == ["a"]
    lab.hold("a", "c2")
    actions = lab.refused("a", "busy")
    assert suspends(actions) == ["b"]
    assert attaches(lab.suspended("b", ("G1", 2))) == ["w"]


def test_two_waiting_sessions_share_one_large_victim(make):
    lab = make(device(0))
    lab.idle("a", 16)
    for name in ("w1", "w2"):
        lab.open(name, 8)
    assert suspends(lab.hold("w1")) == ["a"]
    assert suspends(lab.hold("w2")) == []
    assert attaches(lab.suspended("a", ("G0", 2))) == ["w1", "w2"]


# --------------------------------------------------------------------------- host memory


def test_full_host_memory_is_the_reason_of_a_wait(make):
    lab = make(device(0), host_memory=16)
    lab.parked("p", used=10)
    lab.idle("a", 16)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert lab.reason("w").endswith(": only 6 B of the 16 B for suspended state is free")
    assert suspends(lab.after(1000)) == []
    # The end of p frees its host memory.
    assert suspends(lab.end("p")) == ["a"]


def test_reason_distinguishes_low_host_memory_from_full_budget(make):
    lab = make(device(0), host_memory=16)
    lab.idle("a", 16)
    lab.send(ev.HostMemorySeen, available=5)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert lab.reason("w") == (
        "the pool cannot suspend any kernel that could make room: this machine has room for only "
        "5 B of suspended state now"
    )
    lab.send(ev.HostMemorySeen, available=-3)
    assert "only 0 B" in lab.reason("w")


def test_a_wait_for_host_memory_has_no_estimate(make):
    lab = make(device(0), device(1), host_memory=16)
    lab.parked("p", used=10)
    lab.running("b", 16)
    lab.after(20)
    lab.drop("b")  # the pool has now measured the duration of a cell
    lab.hold("b", "c2")
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    assert lab.reason("w").endswith("for suspended state is free")
    (row,) = [row for row in lab.pool.view(lab.now).sessions if row.record.id == "w"]
    assert row.expected is None


def test_measured_size_counts_instead_of_the_granted_size(make):
    lab = make(device(0), host_memory=16)
    lab.parked("p", used=10)
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    assert suspends(lab.seen("G0", a=7)) == []
    assert suspends(lab.seen("G0", a=6)) == ["a"]


def test_free_memory_of_the_host_limits_suspends(make):
    lab = make(device(0))
    lab.idle("a", 16)
    lab.send(ev.HostMemorySeen, available=12)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == []
    assert suspends(lab.send(ev.HostMemorySeen, available=16)) == ["a"]


def test_busy_victim_is_tried_again_when_its_cell_ends(make):
    """The victim runs short cells, one directly after the other, so most suspends find it busy.

    So the pool tries again each time a cell ends.
    """
    lab = make(device(0))
    lab.idle("a", 16)
    lab.open("w", 16)
    assert suspends(lab.hold("w")) == ["a"]
    for number in range(5):
        lab.now += 0.01
        lab.hold("a", f"c{number}")
        lab.refused("a", "busy")
        assert lab.state("a") == "active"
        lab.now += 0.01
        assert suspends(lab.drop("a", f"c{number}")) == ["a"]
    # This time the refusal says "busy" although the victim runs no cell. So the pool cannot wait
    # for the end of a cell, and tries again after one second.
    lab.refused("a", "busy")
    assert suspends(lab.after(0.9)) == []
    assert suspends(lab.after(0.2)) == ["a"]


def test_next_victim_is_tried_when_a_suspend_is_refused(make):
    """Host memory has 6 free bytes. ``heavy`` needs 8 of them for its state, and ``light`` none."""
    lab = make(device(0), host_memory=16)
    lab.parked("p", used=10)
    lab.idle("heavy", 8)
    lab.idle("light", 8)
    lab.seen("G0", light=0)
    lab.open("w", 8)
    got(lab.hold("w"), ev.Suspend, session="light")
    lab.refused("light", "busy")
    none(lab.seen("G0", light=0), ev.Suspend)
    lab.now += 1.0
    got(lab.hold("heavy", "again"), ev.Suspend, session="light")


def test_idle_lease_leaves_when_host_memory_has_room(make):
    lab = make(device(0), host_memory=16)
    lab.parked("p", used=10)
    lab.idle("a", 10)
    assert suspends(lab.after(1000)) == []
    assert suspends(lab.end("p")) == ["a"]


# --------------------------------------------------------------------------- the order


def test_queue_is_first_come_first_served_within_a_class(make):
    lab = make(device(0))
    lab.running("a", 16)
    for name in ("w1", "w2", "w3"):
        lab.open(name, 16)
        lab.hold(name)
    order = []
    now = "a"
    for _ in range(3):
        lab.drop(now)
        (now,) = attaches(lab.suspended(now))
        order.append(now)
        lab.done(now)
    assert order == ["w1", "w2", "w3"]


def test_a_higher_class_goes_first_until_the_others_have_aged(make):
    lab = make(device(0), ageing=10.0, priority_classes={"high": 10, "notebook": 0})
    lab.running("a", 16)
    lab.open("low", 16)
    lab.hold("low")
    lab.after(99)
    lab.open("high", 16, priority="high")
    lab.hold("high")
    lab.after(2)
    lab.open("late", 16, priority="high")
    lab.hold("late")
    positions = {v.record.id: v.queue_position for v in lab.pool.view(lab.now).sessions}
    # The class "high" is worth 100 s of waiting. The session "high" asks 99 s after "low" and is
    # ahead of it. The session "late" asks 101 s after "low" and is behind it.
    assert (positions["high"], positions["low"], positions["late"]) == (1, 2, 3)


def test_higher_class_takes_over_a_promise_of_a_lower_one(make):
    lab = make(device(0), device(1), priority_classes={"high": 100, "notebook": 0})
    lab.idle("a", 16)
    lab.running("b", 16)
    lab.open("low", 16)
    assert suspends(lab.hold("low")) == ["a"]
    lab.open("high", 16, priority="high")
    lab.hold("high")
    assert attaches(lab.suspended("a", ("G0", 1))) == ["high"]


def test_small_request_is_backfilled_on_another_device(lab):
    lab.running("a", 10)
    lab.running("b", 12)
    lab.open("head", 16)
    lab.hold("head")  # head reserves a's device, which has more free bytes
    lab.open("small", 4)
    assert got(lab.hold("small"), ev.Attach).slices == (Slice("G1", 4),)


def test_backfill_leaves_the_memory_that_the_head_needs(make):
    lab = make(device(0))
    lab.running("a", 4)
    lab.running("b", 4)
    lab.open("head", 10)
    lab.hold("head")
    lab.open("small", 2)
    # 8 bytes are free, and head needs 10. If small gets 2, then 6 are left. The end of a, or of b,
    # frees 4 more bytes, which is enough for head.
    assert attaches(lab.hold("small")) == ["small"]
    lab.open("small2", 2)
    assert attaches(lab.hold("small2")) == []
    assert lab.reason("small2") == ("the free memory is reserved for the next kernel in the queue")


def test_session_is_backfilled_when_the_head_asks_for_less(make):
    lab = make(device(0))
    lab.running("a", 8)
    lab.running("b", 4)
    lab.open("head", 12)
    lab.hold("head")
    lab.open("small", 2)
    assert attaches(lab.hold("small")) == []
    # head now asks for 9 bytes, so it must wait for the end of a. Then 12 bytes are free, and head
    # leaves 3 of them. So small can have 2 bytes now.
    assert attaches(lab.change("head", 9)) == ["small"]


def test_states_of_different_sizes_go_to_devices_with_room(make):
    lab = make(device(0, 12), device(1, 12))
    lab.idle("a", 10, devices=2)
    lab.release("a")
    lab.suspended("a", ("G0", 1), ("G1", 10))
    lab.seen("G1", foreign=2)
    # The first state needs 10 bytes, the second state 11. On G1, 2 of 12 bytes are in use, so only
    # G0 has room for 11 bytes.
    attach = got(lab.hold("a"), ev.Attach)
    assert attach.slices == (Slice("G1", 10), Slice("G0", 11))


def test_backfilled_session_does_not_delay_the_head(make):
    lab = make(device(0))
    lab.running("a", 10)
    lab.open("head", 10)
    lab.hold("head")
    lab.open("small", 6)
    assert attaches(lab.hold("small")) == ["small"]
    assert attaches(lab.end("a")) == ["head"]


def test_two_alternating_sessions_cannot_starve_the_head(make):
    lab = make(device(0))
    lab.running("a", 8)
    lab.running("b", 8)
    lab.open("head", 16)
    lab.hold("head")
    for _ in range(60):
        lab.drop("a")
        lab.after(0.5)
        lab.hold("a", "c")
        lab.drop("b")
        if suspends(lab.after(0.5)):
            break
        lab.hold("b", "c")
    # The head has waited for one period of ageing. From now on, the pool suspends each lease that
    # becomes idle, and keeps its bytes for the head.
    assert lab.state("b") == "detaching"
    lab.suspended("b", ("G0", 2))
    assert suspends(lab.drop("a")) == ["a"]
    assert attaches(lab.suspended("a", ("G0", 2))) == ["head"]


def test_reservation_of_an_old_head_grows_by_whole_devices(make):
    lab = make(device(0), device(1), device(2))
    for name, size in (("a", 8), ("b", 9), ("c", 10)):
        lab.running(name, size)
    lab.open("head", 16)
    lab.hold("head")
    widths = []
    for _ in range(4):
        widths.append(len(lab.pool.explain("head").reserved))
        lab.after(60)
    assert widths == sorted(widths)
    assert widths[0] == 1
    assert widths[-1] > 1


def test_a_request_for_several_devices_is_all_or_nothing(lab):
    lab.running("a", 10)
    lab.open("w", 10, devices=2)
    assert attaches(lab.hold("w")) == []
    assert lab.free() == [6, 16]
    lab.drop("a")
    actions = lab.suspended("a", ("G0", 3))
    assert got(actions, ev.Attach, session="w").slices == (Slice("G0", 10), Slice("G1", 10))


# --------------------------------------------------------------------------- devices


def test_state_from_a_drained_device_resumes_elsewhere(lab):
    lab.parked("a", used=8)
    lab.running("b", 4)
    lab.send(ev.DeviceDrained, device="G0", reason="Xid 79")
    assert lab.state("b") == "active"
    attach = got(lab.hold("a"), ev.Attach, origin=("G0",))
    assert attach.slices[0].device == "G1"


def test_state_waits_if_no_other_device_can_take_it(make):
    lab = make(device(0, model="A"), device(1, model="B"))
    lab.parked("a", used=8)
    lab.send(ev.DeviceDrained, device="G0", reason="Xid 79")
    assert attaches(lab.hold("a")) == []
    assert lab.reason("a") == "every GPU that this kernel can use is out of service"
    # While a waits for its device, it does not block other sessions.
    lab.open("b", 16)
    assert attaches(lab.hold("b")) == ["b"]
    assert attaches(lab.send(ev.DeviceAppeared, device=device(0))) == ["a"]


def test_process_that_called_cuinit_resumes_only_on_its_device(lab):
    lab.running("a", 10)
    lab.drop("a", cuda=True)
    lab.release("a")
    lab.suspended("a")
    lab.running("b", 16)
    assert lab.where("b") == [("G0", 16)]
    assert attaches(lab.hold("a")) == []
    lab.drop("b")
    assert got(lab.suspended("b", ("G0", 1)), ev.Attach, session="a").slices[0].device == "G0"


def test_two_states_of_a_session_resume_on_two_devices(make):
    lab = make(device(0, 32), device(1, 32), device(2, 32))
    lab.idle("a", 8, devices=2)
    lab.release("a")
    lab.suspended("a", ("G0", 5), ("G1", 7))
    lab.running("b", 32)
    lab.running("c", 30)
    lab.send(ev.DeviceAppeared, device=device(3, 32))
    attach = got(lab.hold("a"), ev.Attach, origin=("G0", "G1"))
    assert len({s.device for s in attach.slices}) == 2


def test_foreign_memory_is_counted_and_ends_no_session(make):
    lab = make(device(0))
    lab.running("a", 10)
    assert all_of(lab.seen("G0", foreign=10), ev.Suspend) == []
    assert lab.state("a") == "active"
    lab.open("b", 4)
    assert attaches(lab.hold("b")) == []
    assert attaches(lab.seen("G0", foreign=2)) == ["b"]


def test_request_blocked_by_foreign_memory_reserves_nothing(make):
    lab = make(device(0))
    lab.seen("G0", foreign=8)
    lab.open("large", 12)
    lab.hold("large")
    assert "outside the pool" in lab.reason("large")
    lab.open("small", 8)
    assert attaches(lab.hold("small")) == ["small"]


def test_pool_grants_no_bytes_that_overuse_occupies(make):
    lab = make(device(0))
    lab.running("a", 4)
    assert got(lab.seen("G0", a=9), ev.Log).code == "overuse"
    none(lab.seen("G0", a=9), ev.Log)
    lab.open("b", 10)
    assert attaches(lab.hold("b")) == []
    assert attaches(lab.seen("G0", a=6)) == ["b"]


# --------------------------------------------------------------------------- news


def test_waiting_session_gets_messages_only_about_changes(make):
    lab = make(device(0))
    lab.running("a", 16)
    lab.open("w1", 16)
    first = got(lab.hold("w1"), ev.QueueMoved)
    assert (first.position, first.length, first.expected, first.waited) == (1, 1, None, 0.0)
    assert first.reason == "all 16 B in use by running cells"
    lab.open("w2", 16)
    moved = all_of(lab.hold("w2"), ev.QueueMoved)
    assert [(m.session, m.position, m.length) for m in moved] == [("w1", 1, 2), ("w2", 2, 2)]
    assert lab.after(5) == []


def test_long_queue_sends_messages_at_most_once_a_second(make):
    lab = make(device(0), host_memory=10_000)
    lab.running("a", 16)
    for i in range(130):
        lab.open(f"w{i}", 16)
        told = all_of(lab.hold(f"w{i}"), ev.QueueMoved)
        assert len(told) <= 130 if i < 9 else {t.session for t in told} >= {f"w{i}"}
        assert len(told) <= 51 or i == 0
    burst = all_of(lab.drop("a"), ev.QueueMoved)
    assert len(burst) <= 1
    heard: dict[str, int] = {}
    for _ in range(4):
        for m in all_of(lab.after(1.0), ev.QueueMoved):
            heard[m.session] = m.position
    assert len(heard) == 130
    assert {heard[f"w{i}"] for i in range(50)} == set(range(1, 51))
