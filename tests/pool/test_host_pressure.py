# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""When host memory is short, the pool moves suspended state back to a device that has room."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Quota

from .builders import all_of, device, none


def press(lab, *names):
    return lab.send(ev.HostPressure, sessions=frozenset(names))


def away(lab, name, size, **fields):
    """Open a session whose state is suspended."""
    lab.parked(name, size, size, **fields)
    assert lab.state(name) == "detached"


def stays(lab, name):
    return next(v.stays_reason for v in lab.pool.view(lab.now).sessions if v.record.id == name)


def attached(actions):
    return [a.session for a in all_of(actions, ev.Attach)]


def test_states_go_back_one_by_one_and_the_largest_first(make):
    lab = make(device(0))
    for name, size in (("small", 2), ("large", 9), ("huge", 14)):
        away(lab, name, size)
    lab.running("busy", 5)
    assert attached(press(lab, "small", "large", "huge")) == ["large"]
    # The move of one state may free enough host memory. So the pool moves another state only if a
    # sample after this move still shows pressure.
    assert attached(press(lab, "small", "large", "huge")) == []
    lab.done("large")
    assert lab.record("large").state == "idle"
    assert attached(press(lab, "small", "large", "huge")) == []  # "small" does not fit
    lab.end("busy")
    assert attached(press(lab, "small", "large", "huge")) == ["small"]


def test_only_states_under_host_pressure_go_back_to_a_device(make):
    lab = make(device(0))
    away(lab, "here", 2)
    away(lab, "elsewhere", 9)
    assert attached(press(lab, "here")) == ["here"]
    lab.done("here")
    assert attached(press(lab, "here")) == []


def test_resume_under_pressure_uses_only_free_unpromised_bytes(make):
    lab = make(device(0))
    away(lab, "a", 8)
    lab.idle("b", 10)
    none(press(lab, "a"), ev.Attach)
    assert lab.record("b").state == "idle"
    # The suspend of b frees bytes, and the pool has promised these bytes to w. So a gets none.
    lab.open("w", 12)
    lab.hold("w")
    assert lab.record("b").state == "detaching"
    lab.suspended("b", ("G0", 10))
    assert lab.record("w").state == "attaching"
    none(press(lab, "a"), ev.Attach)


def test_resume_under_pressure_respects_a_quota(make):
    lab = make(device(0), quotas={"*": Quota(leases=1)})
    away(lab, "a", 4, owner="ann")
    lab.running("b", 4, owner="ann")
    none(press(lab, "a"), ev.Attach)
    lab.end("b")
    assert attached(press(lab, "a")) == ["a"]


def test_pool_suspends_no_state_under_host_pressure(make):
    lab = make(device(0), idle_timeout=10.0)
    lab.idle("a", 10)
    press(lab, "a")
    lab.open("w", 10)
    none(lab.hold("w"), ev.Suspend)
    none(lab.after(100), ev.Suspend)
    lab.release("a")
    assert lab.record("a").state == "idle"
    assert "The host memory that this kernel may use is nearly full" in stays(lab, "a")
    suspends = all_of(press(lab), ev.Suspend)
    suspends += all_of(lab.after(0), ev.Suspend)
    assert [a.session for a in suspends] == ["a"]


def test_pool_still_preempts_empty_leases_under_host_pressure(make):
    lab = make(device(0))
    lab.idle("a", 10)
    press(lab, "a")
    lab.open("w", 10)
    lab.hold("w")
    actions = lab.seen("G0", a=0)
    assert [a.session for a in all_of(actions, ev.Suspend)] == ["a"]


def test_failed_resume_is_retried_after_a_while(make):
    lab = make(device(0))
    away(lab, "a", 4)
    press(lab, "a")
    lab.failed("a")
    assert lab.record("a").state == "detached"
    none(press(lab, "a"), ev.Attach)
    lab.after(2)
    assert attached(press(lab, "a")) == ["a"]


def test_hold_during_the_resume_is_granted_at_its_end(make):
    lab = make(device(0))
    away(lab, "a", 4)
    press(lab, "a")
    assert lab.record("a").state == "attaching"
    lab.hold("a")
    assert lab.record("a").epoch
    assert all_of(lab.done("a"), ev.HoldGranted)
    assert lab.record("a").state == "active"


def test_refusal_for_host_memory_says_why_the_slice_stays(make):
    lab = make(device(0))
    lab.idle("a", 10)
    lab.open("w", 10)
    lab.hold("w")
    lab.refused("a", "host", "control group /x has 1 GiB left.")
    assert stays(lab, "a") == "control group /x has 1 GiB left."
    assert "1 idle kernel that cannot be suspended" in lab.reason("w")
    lab.hold("a")
    assert "host memory" not in lab.reason("w")
