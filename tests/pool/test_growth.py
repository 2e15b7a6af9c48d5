# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A lease grows beyond its guarantee, and gives back what it does not use."""

from __future__ import annotations

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Group, Portion
from jupyter_gpupool.pool.model import PREEMPT_ALL, Owner, Quota, Slice
from jupyter_gpupool.pool.requests import SETTLE, UNUSED

from .builders import all_of, device, got, none


def suspends(actions):
    return [a.session for a in all_of(actions, ev.Suspend)]


def attaches(actions):
    return [a.session for a in all_of(actions, ev.Attach)]


def code(actions):
    none(actions, ev.Resize)
    return got(actions, ev.Answer, rid="g").refusal.code


def size(actions, name="a"):
    """Ask for growth that the pool grants; return the new size of the slice."""
    resize, answer = [a for a in actions if isinstance(a, (ev.Resize, ev.Answer))]
    assert isinstance(resize, ev.Resize)
    assert resize.session == name
    assert answer.refusal is None
    return resize.slices[0].bytes


def test_pool_grants_growth_before_it_sends_the_answer(make):
    lab = make(growth_step=1)
    lab.running("a", 4, limit=12)
    assert size(lab.grow("a", 3)) == 7
    assert size(lab.grow("a", 5)) == 12
    assert lab.free() == [4, 16]
    assert got(lab.grow("a", 0), ev.Answer).note == "The slice is 12 B now."


def test_growth_takes_whole_steps_if_no_session_waits(make):
    lab = make(device(0, 100), device(1, 200), growth_step=6)
    lab.running("a", 4, limit=64)
    assert size(lab.grow("a", 1)) == 10
    lab.running("c", 30)
    lab.running("b", 110)
    lab.open("w", 100)
    lab.hold("w")  # w reserves the other device
    assert size(lab.grow("a", 1)) == 11
    lab.drop("w")
    assert size(lab.grow("a", 1)) == 17


def test_growth_step_is_cut_to_the_free_bytes(make):
    lab = make(device(0), growth_step=100)
    lab.running("a", 4, limit=16)
    lab.running("b", 5)
    assert size(lab.grow("a", 2)) == 11
    lab.end("b")
    assert size(lab.grow("a", 2)) == 16


def test_growth_beyond_the_limit_is_refused_with_the_figures(lab):
    lab.running("a", 4, limit=8)
    actions = lab.grow("a", 5)
    assert code(actions) == "limit"
    refusal = got(actions, ev.Answer).refusal
    assert refusal.details == {"device": "G0", "bytes": 5, "granted": 4, "limit": 8}
    begin = "This kernel asked for 5 B in addition to its slice of 4 B; the limit"
    assert str(refusal).startswith(begin)


def test_growth_preempts_no_lease(make):
    lab = make(device(0))
    lab.idle("i", 8)
    lab.running("a", 4, limit=12)
    actions = lab.grow("a", 5)
    assert suspends(actions) == []
    assert code(actions) == "no-memory"
    assert size(lab.grow("a", 4)) == 8


@pytest.mark.parametrize("state", ["detached", "queued", "attaching", "detaching"])
def test_session_without_a_slice_cannot_grow(make, state):
    lab = make(device(0))
    lab.open("a", 4, limit=8)
    if state == "queued":
        lab.running("b", 16)
    if state != "detached":
        lab.hold("a")
    if state == "detaching":
        lab.done("a")
        lab.drop("a")
        lab.release("a")
    assert lab.state("a") == state
    assert code(lab.grow("a", 1)) == "no-memory"


def test_growth_on_a_device_without_a_slice_is_refused(lab):
    assert code(lab.grow("a", 1)) == "unknown-session"
    lab.running("a", 4, limit=8)
    assert code(lab.grow("a", 1, device="G1")) == "no-memory"
    assert code(lab.grow("a", 1, device="G7")) == "no-memory"


def test_growth_is_charged_to_the_quota(make):
    lab = make(quotas={"ann": Quota(memory=12)})
    lab.running("a", 4, limit=12, owner="ann")
    lab.running("b", 4, owner="ann")
    assert code(lab.grow("a", 5)) == "quota"
    assert size(lab.grow("a", 4)) == 8
    lab.open("c", 1, owner="ann")
    assert attaches(lab.hold("c")) == []


def test_growth_leaves_the_quota_to_a_waiting_kernel(make):
    lab = make(quotas={"ann": Quota(memory=12)})
    lab.running("a", 4, limit=12, owner="ann")
    lab.running("b", 4, owner="ann")
    lab.open("c", 6, owner="ann")
    lab.hold("c")
    actions = lab.grow("a", 1)
    assert code(actions) == "quota"
    assert "another kernel of yours waits" in got(actions, ev.Answer).refusal.message
    assert attaches(lab.end("b")) == ["c"]


def test_kernel_alone_on_a_device_grows_beyond_host_memory(make):
    lab = make(device(0), host_memory=10, growth_step=4)
    lab.running("a", 4, limit=16)
    assert size(lab.grow("a", 1)) == 8
    assert size(lab.grow("a", 1)) == 10
    # Above 10 bytes the pool grants only the requested bytes, not a whole step.
    assert size(lab.grow("a", 1)) == 11
    assert size(lab.grow("a", 5)) == 16
    assert "cannot be suspended" in " ".join(lab.pool.why("a").lines)


@pytest.mark.parametrize(("asks", "most"), [(2, 14), (5, 11), (8, 10)])
def test_growth_beyond_host_memory_leaves_room_for_open_sessions(make, asks, most):
    lab = make(device(0), host_memory=10)
    lab.running("a", 4, limit=16)
    lab.open("o", asks)
    actions = lab.grow("a", most - 4 + 1)
    assert code(actions) == "no-memory"
    assert "only if its state fits in host memory" in got(actions, ev.Answer).refusal.message
    assert size(lab.grow("a", most - 4)) == most
    assert attaches(lab.hold("o")) == (["o"] if asks + most <= 16 else [])


def test_growth_beyond_host_memory_respects_group_guarantees(make):
    groups = {"bio": Group(guarantee=Portion(bytes=4)), "phy": Group(guarantee=Portion(bytes=8))}
    lab = make(device(0), host_memory=10, groups=groups)
    lab.running("a", 4, limit=16, owner=Owner("ann", "phy"))
    assert code(lab.grow("a", 9)) == "no-memory"
    assert size(lab.grow("a", 8)) == 12
    lab.open("b", 4, owner=Owner("ben", "bio"))
    assert attaches(lab.hold("b")) == ["b"]


def test_holder_too_large_for_host_memory_is_warned(make):
    lab = make(device(0), host_memory=10, preempt=PREEMPT_ALL)
    lab.running("a", 4, limit=16)
    lab.grow("a", 12)
    none(lab.after(100), ev.Warn)
    lab.open("w", 4)
    assert suspends(lab.hold("w")) == []
    assert "larger than the host memory that it may use" in lab.reason("w")
    none(lab.after(50), ev.Warn)
    warning = got(lab.after(11), ev.Warn, session="a").message
    assert "may need 16 B, and at most 10 B fits in host memory" in warning
    # a has freed memory, so its slice shrinks, and w gets the bytes.
    actions = lab.seen("G0", a=9)
    assert got(actions, ev.Resize, session="a").slices == (Slice("G0", 9),)
    assert attaches(actions) == ["w"]


def test_state_beyond_host_memory_is_suspended_once_it_fits(make):
    lab = make(device(0), host_memory=10, preempt=PREEMPT_ALL)
    lab.running("a", 4, limit=16)
    lab.grow("a", 12)
    lab.after(SETTLE)
    lab.seen("G0", a=16)
    lab.open("w", 8)
    assert suspends([*lab.hold("w"), *lab.after(100), *lab.drop("a")]) == []
    lab.after(SETTLE)
    assert suspends(lab.seen("G0", a=9)) == ["a"]
    assert attaches(lab.suspended("a", ("G0", 9))) == ["w"]


def test_growth_leaves_bytes_promised_to_waiting_sessions(make):
    lab = make(device(0))
    lab.idle("i", 8)
    lab.running("a", 4, limit=12)
    lab.open("w", 12)
    # 4 bytes are free, and the suspend of i will free 8. The pool promises all 12 bytes to w.
    assert suspends(lab.hold("w")) == ["i"]
    assert code(lab.grow("a", 1)) == "no-memory"
    assert attaches(lab.suspended("i", ("G0", 2))) == ["w"]


def test_growth_leaves_bytes_that_the_head_accumulates(make):
    lab = make(device(0))
    lab.running("b", 4)
    lab.running("a", 4, limit=12)
    lab.open("w", 12)
    lab.hold("w")
    actions = lab.grow("a", 1)
    assert code(actions) == "no-memory"
    assert "reserved for waiting kernels" in got(actions, ev.Answer).refusal.message
    assert attaches(lab.end("b")) == ["w"]


# --------------------------------------------------------------------------- giving back


def grown(make, used=6, **rules):
    """Return a lab with a session that has 4 guaranteed bytes and has grown to 12 bytes.

    The last sample of the device shows that the session uses ``used`` bytes.
    """
    lab = make(device(0), growth_step=8, **rules)
    lab.running("a", 4, limit=12)
    assert size(lab.grow("a", 1)) == 12
    lab.after(SETTLE)
    none(lab.seen("G0", a=used), ev.Resize)
    return lab


def test_unused_grown_bytes_go_to_a_waiting_session(make):
    lab = grown(make)
    lab.open("w", 10)
    actions = lab.hold("w")
    assert got(actions, ev.Resize, session="a").slices == (Slice("G0", 6),)
    assert attaches(actions) == ["w"]


def test_pool_reclaims_unused_grown_bytes_before_it_preempts(make):
    lab = grown(make)
    lab.idle("i", 4)
    lab.open("w", 6)
    actions = lab.hold("w")
    assert suspends(actions) == []
    assert attaches(actions) == ["w"]


def test_unused_grown_bytes_stay_if_others_have_room(make):
    lab = grown(make)
    lab.open("w", 4)
    actions = lab.hold("w")
    none(actions, ev.Resize)
    assert attaches(actions) == ["w"]


def test_unused_grown_bytes_go_to_a_larger_guaranteed_slice(make):
    lab = grown(make)
    lab.running("b", 4)
    actions = lab.change("b", 10)
    assert [(a.session, a.slices[0].bytes) for a in all_of(actions, ev.Resize)] == [
        ("a", 6),
        ("b", 10),
    ]


def test_unused_grown_bytes_go_to_another_session_that_grows(make):
    lab = grown(make)
    lab.running("b", 4, limit=12)
    actions = lab.grow("b", 6)
    assert [(a.session, a.slices[0].bytes) for a in all_of(actions, ev.Resize)] == [
        ("a", 6),
        ("b", 10),
    ]


def test_newly_grown_bytes_stay_until_a_sample_after_the_growth(make):
    lab = make(device(0), growth_step=8)
    lab.running("a", 4, limit=12)
    lab.grow("a", 8)
    lab.open("w", 10)
    assert attaches(lab.hold("w")) == []
    # This sample may be older than the growth, so the pool does not take any bytes back yet.
    none(lab.seen("G0", a=4), ev.Resize)
    lab.after(SETTLE)
    actions = lab.seen("G0", a=5)
    assert got(actions, ev.Resize, session="a").slices == (Slice("G0", 5),)
    assert attaches(actions) == ["w"]


def test_used_grown_bytes_are_reclaimed_by_a_suspend(make):
    lab = grown(make, used=12)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == []
    assert suspends(lab.drop("a")) == ["a"]
    assert attaches(lab.suspended("a", ("G0", 12))) == ["w"]
    lab.end("w")
    # Until the resume is done, the slice has the used bytes and the headroom.
    assert got(lab.hold("a"), ev.Attach).slices == (Slice("G0", 13),)
    assert got(lab.done("a"), ev.Resize).slices == (Slice("G0", 12),)


def test_grown_bytes_go_back_after_a_time_without_use(make):
    lab = grown(make)
    lab.after(UNUSED / 2)
    none(lab.seen("G0", a=7), ev.Resize)
    lab.after(UNUSED / 2)
    none(lab.seen("G0", a=7), ev.Resize)
    lab.after(UNUSED / 2)
    assert got(lab.seen("G0", a=7), ev.Resize).slices == (Slice("G0", 7),)
    none(lab.seen("G0", a=7), ev.Resize)


def test_reclaimed_bytes_found_in_use_are_granted_again(make):
    lab = grown(make, used=6)
    lab.after(UNUSED)
    assert got(lab.seen("G0", a=6), ev.Resize).slices == (Slice("G0", 6),)
    actions = lab.seen("G0", a=9)
    assert got(actions, ev.Resize).slices == (Slice("G0", 9),)
    none(actions, ev.Log)
    lab.running("b", 6)
    assert got(lab.seen("G0", a=11), ev.Log).code == "overuse"
    assert lab.where("a") == [("G0", 9)]


def test_limit_below_the_bytes_in_use_is_refused_with_the_figure(make):
    lab = grown(make, used=9)
    refusal = got(lab.change("a", 4, limit=8), ev.Answer).refusal
    assert refusal.code == "in-use"
    assert refusal.details == {"memory": 4, "limit": 8, "in_use": 9}
    assert "9 B now" in refusal.message
    actions = lab.change("a", 4, limit=10)
    assert got(actions, ev.Resize).slices == (Slice("G0", 9),)


def test_restored_bytes_count_as_used_until_they_are_measured(lab):
    lab.parked("a", used=9)
    lab.hold("a")
    lab.done("a")
    refusal = got(lab.change("a", 6), ev.Answer).refusal
    assert refusal.code == "in-use"
    assert refusal.details["in_use"] == 9


def test_growth_ends_with_the_lease(make):
    lab = grown(make, used=6)
    lab.drop("a")
    assert suspends(lab.release("a")) == ["a"]
    lab.suspended("a", ("G0", 6))
    assert lab.free() == [16]
    lab.hold("a")
    lab.done("a")
    assert lab.where("a") == [("G0", 6)]


def test_growth_reclaims_no_memory_of_the_growing_session(make):
    lab = grown(make, used=6)
    lab.running("b", 4)
    lab.change("a", 4, limit=14)
    none(lab.grow("a", 1), ev.Resize)
    assert lab.where("a") == [("G0", 12)]


def test_session_that_keeps_its_slice_gives_up_unused_growth(make):
    lab = grown(make)
    lab.drop("a")
    lab.release("a")
    lab.open("w", 10)
    assert attaches(lab.hold("w")) == []
    actions = lab.refused("a", "pinned")
    assert got(actions, ev.Resize, session="a").slices == (Slice("G0", 6),)
    assert attaches(actions) == ["w"]


def test_growth_may_use_bytes_promised_to_the_same_session(make):
    lab = make(device(0))
    lab.idle("i", 8)
    lab.running("a", 4)
    assert suspends(lab.change("a", 12)) == ["i"]
    # The pool has promised 8 bytes to a: the 4 free bytes, and bytes that the suspend of i frees.
    # So a may already grow by 3 of the free bytes.
    actions = lab.grow("a", 3)
    assert suspends(actions) == []
    assert got(actions, ev.Resize).slices == (Slice("G0", 7),)
    assert code(lab.grow("a", 5)) == "no-memory"
    assert got(lab.suspended("i", ("G0", 2)), ev.Resize).slices == (Slice("G0", 12),)


# ---------------------------------------------------------------------- a larger guarantee


def test_growth_of_a_busy_kernel_is_served_before_later_sessions(make):
    """The growth of ``a`` waits in the queue, ahead of the sessions that ask later."""
    lab = make(device(0))
    lab.running("a", 8)
    lab.running("s0", 8)
    none(lab.change("a", 12), ev.Resize)
    for i in range(1, 6):
        lab.open(f"s{i}", 8)
        none(lab.hold(f"s{i}"), ev.Attach)
    actions = lab.end("s0")
    got(actions, ev.Resize, session="a")
    none(actions, ev.Attach)


def test_waiting_growth_gains_points_with_age(make):
    """A growth that has waited for long is ahead of a session of a higher class."""
    lab = make(device(0), ageing=1.0)
    lab.running("a", 8)
    lab.running("b", 8)
    lab.change("a", 12)
    lab.after(150.0)
    lab.open("w", 8, priority="interactive")  # 100 points more, 150 s younger
    lab.hold("w")
    assert lab.pool.explain("w").ahead == ("a",)
    got(lab.end("b"), ev.Resize, session="a")


def test_growth_at_the_head_reserves_bytes_of_other_leases(make):
    """The head of the queue is the growth of ``a``. It reserves 8 bytes of the other leases.

    ``w`` is behind the head, so it gets none of these bytes.
    """
    lab = make(device(0))
    lab.running("a", 8)
    lab.running("b", 4)
    lab.running("c", 4)
    lab.change("a", 16)
    assert lab.pool.explain("a").reserved == (Slice("G0", 8),)
    lab.end("b")
    lab.open("w", 4)
    none(lab.hold("w"), ev.Attach)
    assert lab.pool.explain("w").reason.rule == "behind-head"
    got(lab.end("c"), ev.Resize, session="a")


def test_growth_at_the_quota_preempts_idle_leases_of_the_owner(make):
    lab = make(quotas={"u": Quota(memory=16)})
    lab.running("a", 8, owner="u")
    lab.idle("b", 8, owner="u")
    got(lab.change("a", 12), ev.Suspend, session="b")
    got(lab.suspended("b", (lab.where("b")[0][0], 8)), ev.Resize, session="a")
