# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An admin recalls a slice at a given time, or ends a session."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.errors import Code
from jupyter_gpupool.pool import events as ev

from .builders import Lab, device, got, none

WHY = "the administrator ada took the slice back: a lecture"


def recall(lab: Lab, name: str, seconds: float | None = 300.0):
    at = None if seconds is None else lab.now + seconds
    return lab.send(ev.RecallAsked, session=name, at=at, reason=WHY, rid="x")


def test_busy_lease_is_recalled_exactly_at_the_set_time():
    lab = Lab(device(0))
    lab.running("a")
    note = got(recall(lab, "a"), ev.Answer, rid="x").note
    assert note.startswith("The pool takes the slice back in 5 min: ")
    none(lab.after(299.0), ev.Suspend)
    assert lab.record("a").recall_at == 300.0
    suspend = got(lab.after(1.0), ev.Suspend, session="a")
    assert (suspend.busy, suspend.reason) == (True, WHY)


def test_recalled_session_waits_behind_earlier_waiters():
    lab = Lab(device(0))
    lab.running("a")
    lab.after(50.0)
    lab.open("b")
    lab.hold("b")
    recall(lab, "a", 10.0)
    lab.after(10.0)
    assert [x.session for x in lab.suspended("a", ("G0", 6)) if isinstance(x, ev.Attach)] == ["b"]
    assert lab.reason("a").startswith(f"it was preempted: {WHY}; it goes on by itself")
    lab.done("b")
    lab.end("b")
    assert lab.state("a") == "attaching"
    assert (lab.record("a").recall_at, lab.record("a").recall_reason) == (0.0, "")


def test_kept_idle_lease_is_recalled():
    lab = Lab(device(0))
    lab.idle("a")
    recall(lab, "a", 60.0)
    note = got(lab.keep("a", 10_000.0), ev.Answer, rid="k").note
    assert note.endswith("even when idle. Even so, an administrator takes it back in 60 s.")
    line = "An administrator takes its slice back in 60 s, even if the slice is in use."
    assert line in lab.pool.why("a").lines
    got(lab.after(60.0), ev.Suspend, session="a", reason=WHY, busy=False)


def test_cancelled_recall_suspends_no_lease():
    lab = Lab(device(0))
    lab.running("a")
    recall(lab, "a", 60.0)
    assert got(recall(lab, "a", None), ev.Answer, rid="x").note == "The slice stays."
    none(lab.after(600.0), ev.Suspend)


def test_recall_ends_with_the_lease():
    lab = Lab(device(0))
    lab.idle("a")
    recall(lab, "a", 600.0)
    lab.release("a")
    lab.suspended("a", ("G0", 6))
    lab.hold("a")
    lab.done("a")
    none(lab.after(3600.0), ev.Suspend)


def test_recall_may_use_the_host_memory_kept_for_the_head():
    lab = Lab(device(0), device(1), host_memory=12)
    lab.running("h", 6)
    lab.running("b", 10)
    lab.idle("a", 10)
    assert [lab.record(x).slices[0].device for x in "hba"] == ["G0", "G0", "G1"]
    lab.change("h", 10)
    recall(lab, "a", 10.0)
    got(lab.after(10.0), ev.Suspend, session="a", reason=WHY)


def test_restart_keeps_a_recall_only_with_its_lease():
    lab = Lab(device(0), device(1))
    for name in ("a", "b"):
        lab.running(name)
        recall(lab, name, 600.0)
    records = [lab.record("a"), dataclasses.replace(lab.record("b"), state="detached", slices=())]
    again = Lab(device(0), device(1))
    again.send(ev.Recovered, records=tuple(records))
    assert [again.record(name).recall_at for name in ("a", "b")] == [600.0, 0.0]
    got(again.after(600.0), ev.Suspend, session="a", busy=True)


@pytest.mark.parametrize(
    ("prepare", "code"),
    [
        (lambda lab: lab.open("a"), Code.NOTHING_TO_RELEASE),
        (lambda lab: (lab.idle("a"), lab.release("a")), Code.NOTHING_TO_RELEASE),
        (
            lambda lab: (lab.idle("a"), lab.release("a"), lab.refused("a", "pinned", "IPC")),
            Code.CANNOT_SUSPEND,
        ),
    ],
)
def test_recall_is_refused_if_no_slice_can_leave(prepare, code):
    lab = Lab(device(0))
    prepare(lab)
    assert got(recall(lab, "a"), ev.Answer, rid="x").refusal.code == code
    assert lab.record("a").recall_at == 0.0


@pytest.mark.parametrize("state", ["detached", "queued", "attaching", "active", "idle"])
def test_admin_ends_a_session_in_any_state(state):
    lab = Lab(device(0))
    if state == "queued":
        lab.running("b")
    lab.open("a")
    if state != "detached":
        lab.hold("a")
    if state in ("active", "idle"):
        lab.done("a")
    if state == "idle":
        lab.drop("a")
    assert lab.state("a") == state
    actions = lab.send(ev.EndAsked, session="a", reason="ended by ada", rid="x")
    got(actions, ev.EndSession, session="a", message="ended by ada")
    assert got(actions, ev.Answer, rid="x").refusal is None
    refused = [a.hold for a in actions if isinstance(a, ev.HoldRefused)]
    assert bool(refused) == (state in ("queued", "attaching")), "only a hold that waits is refused"
    lab.end("a")
    lab.open("c")
    lab.hold("c")
    assert lab.state("c") == ("queued" if state == "queued" else "attaching")
