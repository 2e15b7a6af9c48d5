# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Explanations of a wait: the leases that a session needs, the rule, and what can end the wait."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Daily, Group, Portion
from jupyter_gpupool.pool.model import PREEMPT_ALL, Owner, Quota, Rule, Slice
from jupyter_gpupool.pool.words import FOR_OTHERS

from .builders import device, got

DOCS = Path(__file__).parents[2] / "docs"


def told(lab, name):
    return lab.pool.explain(name)


def test_explanation_names_the_leases_a_session_needs(make):
    lab = make(device(0), device(1))
    lab.running("a", 12)
    lab.running("b", 10)
    lab.open("w", 16)
    lab.hold("w")
    found = told(lab, "w")
    assert found.reason.rule == "busy"
    assert [(h.session, h.device, h.bytes, h.use) for h in found.holders] == [
        ("a", "G0", 12, "busy"),
        ("b", "G1", 10, "busy"),
    ]
    assert found.reserved == (Slice("G1", 16),), "fewer bytes are missing here"
    assert found.changes == ("lease-ends", "idle-lease-yields")
    assert found.text == lab.reason("w")


def test_explanation_of_a_promise_names_device_and_suspend(make):
    lab = make(device(0))
    lab.idle("a", 12)
    lab.open("w", 10)
    lab.hold("w")
    found = told(lab, "w")
    assert (found.reason.rule, found.promised) == ("planned", (Slice("G0", 10),))
    assert [(h.session, h.use) for h in found.holders] == [("a", "leaving")]


def test_waiter_and_holder_show_the_time_of_the_preemption(make):
    lab = make(device(0), reclaim_after=5.0)
    lab.idle("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    assert told(lab, "w").changes_at == 5.0
    assert by_time(lab, "w") == "it may take the slice of an idle kernel in 5 s."
    assert told(lab, "a").taken_from == 5.0
    assert told(lab, "a").takers == ("w",)
    lab.keep("a", 50)
    assert told(lab, "w").changes_at == 50.0


def test_quota_names_only_the_owners_own_leases(make):
    lab = make(quotas={"ann": Quota(leases=1)})
    lab.running("a", 4, owner="ann")
    lab.running("b", 4)
    lab.open("w", 4, owner="ann")
    lab.hold("w")
    lab.open("v", 4, owner="ann")
    lab.hold("v")
    found = told(lab, "w")
    assert found.reason.rule == "quota"
    assert [h.session for h in found.holders] == ["a"]
    assert told(lab, "v").reason.rule == "behind-own"
    assert told(lab, "v").ahead == ("w",)


def test_other_users_see_why_a_session_waits_but_no_figures(make):
    lab = make(quotas={"ann": Quota(leases=1)})
    lab.running("a", 4, owner="ann")
    lab.open("w", 4, owner="ann")
    lab.hold("w")
    found = {v.record.id: v.waits_for for v in lab.pool.view(lab.now).sessions}
    assert found == {"a": "", "w": "a limit of its user or group"}
    assert FOR_OTHERS.keys() == {*get_args(Rule)}
    assert not any(re.search(r"\d|%|your", text) for text in FOR_OTHERS.values())


def test_session_that_does_not_wait_has_no_reason(make):
    lab = make(device(0))
    lab.running("a", 4)
    found = told(lab, "a")
    assert (found.reason, found.position, found.holders, found.text) == (None, None, (), "")
    with pytest.raises(KeyError):
        lab.pool.explain("nobody")


def test_explanation_has_the_time_of_the_retry(make):
    lab = make(device(0))
    lab.open("a", 4)
    lab.hold("a")
    lab.failed("a", "memory was not free")
    found = told(lab, "a")
    assert (found.reason.rule, found.changes_at) == ("retry", lab.now + 1.0)
    assert by_time(lab, "a") == "the pool tries again in 1 s."


# --------------------------------------------------------------------------- stability


def test_promise_stays_when_a_better_place_appears(make):
    """If the pool planned again for another device, the suspend under way would be wasted."""
    lab = make(device(0), device(1))
    lab.idle("a", 16)
    lab.running("b", 16)
    lab.open("w", 10)
    got(lab.hold("w"), ev.Suspend, session="a")
    assert told(lab, "w").promised == (Slice("G0", 10),)
    lab.drop("b")
    for _ in range(3):
        lab.after(1.0)
        assert told(lab, "w").promised == (Slice("G0", 10),)
    assert lab.state("b") == "idle", "one victim is enough"


def test_backfill_leaves_the_reservation_of_the_head_unchanged(make):
    lab = make(device(0), device(1), priority_classes={"high": 100, "notebook": 0})
    lab.running("a", 12)
    lab.running("b", 10)
    lab.idle("c", 6)  # on the device of b
    lab.open("head", 16, priority="high")
    lab.hold("head")
    lab.open("w", 4)
    actions = lab.hold("w")
    got(actions, ev.Attach, session="w")  # on any device that can spare the bytes
    before = told(lab, "head").reserved
    for _ in range(3):
        lab.after(1.0)
        assert told(lab, "head").reserved == before


def test_newcomer_of_a_higher_class_takes_over_a_promise(make):
    lab = make(device(0), priority_classes={"high": 100, "notebook": 0})
    lab.idle("a", 16)
    lab.open("low", 16)
    lab.hold("low")
    assert told(lab, "low").promised
    lab.open("high", 16, priority="high")
    lab.hold("high")
    assert told(lab, "high").promised == (Slice("G0", 16),)
    assert not told(lab, "low").promised


@pytest.mark.parametrize("example", ["planner", "groups"])
def test_pool_does_what_the_examples_in_the_docs_show(example):
    done = subprocess.run(
        [sys.executable, str(DOCS / f"make_{example}.py"), "--check"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_plan_is_stable_if_memory_and_quota_are_both_missing(make):
    """``w`` waits for quota, which its owner's idle lease uses up, and also for memory on G1.

    A running cell uses all memory of G1. So a suspend of the idle lease alone would not help ``w``.
    """
    lab = make(device(0), device(1), quotas={"ann": Quota(leases=1)})
    lab.idle("a", 10, owner="ann")
    lab.release("a")
    lab.suspended("a", ("G0", 10), seconds=1.0)
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    lab.running("b", 16)
    lab.open("w", 4, owner="ann")
    # After each event, the lab checks that a second plan changes nothing.
    lab.send(ev.HoldTaken, session="w", hold="h", kind="device", bound=("G1",))
    lab.after(10)
    assert (told(lab, "w").reason.rule, told(lab, "w").reason.limit) == ("busy", "leases")
    got(lab.end("b"), ev.Suspend, session="a")
    got(lab.suspended("a", ("G0", 10)), ev.Attach, session="w")


# --------------------------------------------------------------------------- budget


def test_one_event_makes_few_calls_in_few_files():
    from benchmarks.pool_trace import story

    figures = story()["HoldTaken"]
    assert figures["calls"] <= 100
    assert figures["files"] <= 13
    assert figures["changes_of_file"] <= 50


def test_wait_for_foreign_memory_names_no_time(make):
    lab = make(device(0), reclaim_after=5.0)
    lab.idle("a", 4)
    lab.send(ev.DeviceMemorySeen, device="G0", foreign=8, footprints={})
    lab.open("w", 10)
    lab.hold("w")
    found = lab.pool.explain("w")
    assert (found.reason.rule, found.changes) == ("foreign", ("outside-use-ends",))
    assert found.changes_at is None


def test_later_kernel_waits_if_an_earlier_one_reserves_the_quota(make):
    lab = make(device(0), quotas={"u": Quota(leases=1)})
    lab.running("a", 16)
    lab.open("head", 16, owner="u")
    lab.hold("head")
    lab.open("next", 16, owner="u")
    lab.hold("next")
    assert (
        lab.reason("next") == "another waiting kernel of yours has reserved your quota of 1 slice"
    )


def test_equal_leases_of_other_users_share_one_line(make):
    lab = make(device(0))
    for n in range(3):
        lab.running(f"v{n}", 4, owner="bob")
    lab.running("mine", 4, owner="ann", label="a.ipynb")
    lab.open("w", 8, owner="ann")
    lab.hold("w")
    lines = lab.pool.why("w").lines
    assert [line.partition(";")[0] for line in lines[1:4]] == [
        "There is no estimate yet of how long it will wait.",
        "Your kernel a.ipynb is active and has 4 B on GPU 0",
        "3 kernels of other users are active and have 4 B each on GPU 0",
    ]
    assert len({*lines}) == len(lines)


TURNS = {"preempt": PREEMPT_ALL, "half_life": 3600.0}


def may_take(lab, name):
    """Return the line of a session's explanation that says whose kernel may take its slice."""
    (line,) = [line for line in lab.pool.why(name).lines if "may take this slice" in line]
    return line


def test_lines_name_the_time_at_which_a_time_slice_ends(make):
    lab = make(device(0), **TURNS)
    lab.running("before", 16, owner="ann")
    lab.after(600)
    lab.end("before")
    lab.running("a", 16, owner="ann")
    lab.after(1)
    lab.open("w", 16, owner="bob")
    lab.hold("w")
    over = "time slice is over"
    used = "the other kernel's user has used less, relative to that user's weight"
    assert may_take(lab, "a").endswith(f" s, when this kernel's {over}, and {used}.")
    lines = lab.pool.why("w").lines
    assert any(line.endswith(f" s (when that kernel's {over}).") for line in lines)


def test_line_about_another_kernel_of_yours_names_no_usage(make):
    lab = make(device(0), **TURNS)
    lab.running("a", 16, owner="ann")
    lab.after(1)
    lab.open("w", 16, owner="ann")
    lab.hold("w")
    line = may_take(lab, "a")
    assert line.startswith("Another kernel of yours may take this slice in ")
    assert line.endswith(" s, when this kernel's time slice is over.")


def test_lines_say_that_a_request_exceeds_the_guarantee(make):
    lab = make(device(0), groups={"bio": Group(guarantee=Portion(bytes=8))})
    lab.running("a", 6, owner=Owner("ann", "bio"))
    lab.running("b", 8, owner="bob")
    lab.open("w", 4, owner=Owner("ben", "bio"))
    lab.hold("w")
    told = lab.pool.why("w")
    assert "Group bio has 6 B, below its guaranteed 8 B." in told.standing
    assert (
        "With this request, group bio would have more than its guarantee of 8 B, so the guarantee "
        "does not put the kernel first in the queue."
    ) in told.lines


def test_wait_for_a_resume_names_bytes_of_state_and_headroom(make):
    lab = make(device(0))
    lab.parked("w", 9, memory=4)
    lab.running("a", 8)
    lab.hold("w")
    found = told(lab, "w")
    assert found.reason.bytes == 10, "state and headroom"
    assert found.text.startswith("10 B is needed and at most 8 B is free on a GPU")


def test_preempted_session_names_the_bytes_that_must_be_free(make):
    lab = make(device(0), preempt=PREEMPT_ALL, half_life=0.0)
    lab.running("w", 12, priority="batch")
    lab.after(60)
    lab.open("a", 16, priority="interactive")
    lab.hold("a")
    lab.suspended("w", ("G0", 12))
    assert told(lab, "w").text.endswith(" it goes on by itself as soon as 13 B is free on a GPU")


def test_wait_names_an_idle_kernel_that_cannot_be_suspended(make):
    lab = make(device(0))
    lab.idle("a", 12, owner="ann", label="a.ipynb")
    lab.send(ev.HostPressure, sessions=frozenset({"a"}))
    lab.open("w", 8, owner="ann")
    lab.hold("w")
    assert (
        "Your kernel a.ipynb is idle and keeps 12 B on GPU 0; it cannot be suspended: host "
        "memory has too little room for the state."
    ) in lab.pool.why("w").lines


# ------------------------------------------------------------------ predictions are exact


def lines(lab, name):
    return lab.pool.why(name).lines


def by_time(lab, name):
    """Return the rest of a session's line "If nothing else changes, ...", or "" without one."""
    begin = "If nothing else changes, "
    return next((x.removeprefix(begin) for x in lines(lab, name) if x.startswith(begin)), "")


def test_wait_names_the_time_when_a_closed_class_may_run(make):
    lab = make(device(0), classes_allowed=frozenset({"notebook"}), classes_open={"batch": 7200.0})
    lab.running("a", 4)
    lab.after(5)
    lab.drop("a")
    lab.hold("a")
    lab.open("w", 4, priority="batch")
    lab.hold("w")
    assert lab.pool.why("w").expected is None
    found = told(lab, "w")
    assert (found.changes_at, found.holders) == (7200.0, ())
    assert by_time(lab, "w") == "the schedule lets its class run in 2 h."
    assert lab.reason("w").endswith("; the schedule lets them run in 2 h, at 02:00 UTC")
    assert told(lab, "a").takers == ()


def test_wait_of_a_class_without_a_schedule_names_no_time(make):
    lab = make(device(0), classes_allowed=frozenset({"notebook"}))
    lab.open("w", 4, priority="batch")
    lab.hold("w")
    assert told(lab, "w").changes_at is None
    assert by_time(lab, "w") == ""


@pytest.mark.parametrize(
    ("rules", "at"), [({"class"}, None), ({"class", "turns"}, 120.0)], ids=["class", "turns"]
)
def test_wait_names_a_time_only_if_age_changes_the_plan(make, rules, at):
    """After 120 s of waiting, ``w`` reaches the holder's class. Then it can preempt by a turn.

    If turns are off, it can never preempt the holder, so the explanation names no time.
    """
    classes = {"batch": 0, "urgent": 2}
    lab = make(
        device(0), preempt=frozenset(rules), priority_classes=classes, default_priority="batch",
        max_swap_overhead=0.1,
    )  # fmt: skip
    lab.running("a", 16, priority="urgent")
    lab.open("w", 4, priority="batch")
    lab.hold("w")
    assert told(lab, "w").changes_at == at


def test_wait_names_the_time_when_age_overtakes_the_queue(make):
    classes = {"batch": 0, "urgent": 2}
    lab = make(device(0), preempt=frozenset({"class"}), priority_classes=classes,
               default_priority="batch", half_life=3600.0)  # fmt: skip
    lab.running("a", 16, owner="ann", priority="urgent")
    lab.open("h", 16, owner="ann", priority="urgent")
    lab.hold("h")
    lab.open("w", 4, owner="bob", priority="batch")
    lab.hold("w")
    assert told(lab, "h").changes_at is None
    assert told(lab, "w").changes_at == 120.0
    assert by_time(lab, "w") == "its long wait raises its priority in 2 min."


@pytest.mark.parametrize(("owner", "half_life"), [("ann", 3600.0), ("bob", 0.0)])
def test_wait_names_no_time_if_age_does_not_change_the_order(make, owner, half_life):
    """Sessions of one owner keep their order in the queue, however long they wait.

    If fair shares are off, sessions of different owners keep their order, too.
    """
    lab = make(device(0), preempt=frozenset(), half_life=half_life)
    lab.running("a", 16, owner="cyd")
    for name, whose in (("h", "ann"), ("w", owner)):
        lab.open(name, 16, owner=whose)
        lab.hold(name)
    assert told(lab, "w").changes_at is None


def test_session_of_a_closed_class_claims_no_lease(make):
    lab = make(device(0), preempt=PREEMPT_ALL, classes_allowed=frozenset({"notebook"}))
    lab.running("a", 8, limit=16, owner="ann")
    lab.after(60)
    lab.open("w", 8, owner="bob", priority="interactive")
    lab.hold("w")
    assert told(lab, "w").reason.rule == "class-closed"
    assert told(lab, "a").claims == ()


def test_wait_for_a_spent_budget_names_its_renewal(make):
    lab = make(device(0), preempt=PREEMPT_ALL, quotas={"ann": Quota(daily=Daily(10.0))})
    lab.running("a", 16, owner="ann")
    lab.after(60)
    lab.open("w", 16, owner="ann")
    lab.hold("w")
    assert told(lab, "w").changes_at == 86400.0
    assert by_time(lab, "w") == "there are GPU-seconds again in 24 h."


def test_session_in_a_suspend_shows_only_its_preemption(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("a", 16, priority="batch")
    lab.after(60)
    lab.open("w", 16)
    lab.hold("w")
    assert lab.state("a") == "detaching"
    assert lines(lab, "a") == (
        "It is giving back 16 B on GPU 0: a kernel of a higher priority class needs the GPU.",
    )


def test_reason_says_that_holders_are_being_moved(make):
    lab = make(device(0), preempt=PREEMPT_ALL)
    lab.running("a", 16, priority="batch")
    lab.after(60)
    for name in ("w", "v"):
        lab.open(name, 16)
        lab.hold(name)
    assert lab.reason("v") == "all 16 B in use by kernels that are being moved"


def test_waiter_and_holder_see_the_end_of_an_unsuspendable_lease(make):
    after = (10.0, 20.0, 40.0)
    lab = make(device(0), preempt=PREEMPT_ALL, unsuspendable="end", unsuspendable_after=after)
    lab.running("a", 16, priority="batch", gated=False)
    lab.after(60)
    lab.open("w", 16)
    lab.hold("w")
    assert told(lab, "w").changes_at == told(lab, "a").ends_at == 100.0
    assert any("the pool ends it in 40 s" in line for line in lines(lab, "w"))
    assert by_time(lab, "w") == "the pool ends a blocking kernel in 40 s."
    assert "The pool ends this kernel in 40 s, if another kernel waits." in lines(lab, "a")
    got(lab.after(40), ev.EndSession, session="a")


def test_reason_of_a_gang_names_how_many_devices_it_needs(make):
    """The gang has called cuInit on two devices, and only one of them has enough free memory."""
    models = (device(n, 17, model=model, landing_bytes=1) for n, model in enumerate("AAB"))
    lab = make(*models)
    lab.running("b", 16)
    lab.open("g", 12, devices=2, lands=True)
    lab.send(ev.HoldTaken, session="g", hold="h", kind="device", bound=("G0", "G1"))
    assert lab.reason("g") == (
        "12 B is needed on each of 2 GPUs of the model A, because the kernel initialised CUDA on "
        "this model; too few such GPUs have that much free"
    )
    lab.running("c", 8)
    assert lab.reason("g").startswith("12 B on each of 2 GPUs is needed and 1 GPU has that much")


def test_reason_of_a_gang_counts_the_devices_of_each_model(make):
    lab = make(*(device(n, 17, model=model, landing_bytes=1) for n, model in enumerate("BBAA")))
    lab.running("b", 16)
    lab.open("g", 12, devices=3, lands=True)
    lab.send(ev.HoldTaken, session="g", hold="h", kind="device", bound=("G2", "G0", "G1"))
    assert lab.reason("g") == (
        "12 B is needed on each of 3 GPUs (1 of the model A and 2 of the model B), because the "
        "kernel initialised CUDA on these models; too few such GPUs have that much free"
    )
