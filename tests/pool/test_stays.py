# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The sentence that says why an idle slice stays; the sentence is empty if the slice can leave."""

from __future__ import annotations

import dataclasses

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Quota, Slice

from .builders import Lab, device, got


def told(lab: Lab, name: str = "a") -> str:
    (found,) = (v for v in lab.pool.view(lab.now).sessions if v.record.id == name)
    assert found.stays_reason == "" or found.stays_reason.endswith(".")
    return found.stays_reason


def test_slice_in_use_or_leaving_has_no_reason_to_stay(make):
    lab = make(idle_timeout=60.0)
    lab.open("a")
    assert told(lab) == ""
    lab.hold("a")
    lab.done("a")
    assert told(lab) == ""
    lab.drop("a")
    assert told(lab) == ""
    lab.after(59.0)
    assert told(lab) == ""
    lab.after(1.0)
    assert lab.state("a") == "detaching"
    assert told(lab) == ""


def test_full_host_memory_is_the_reason_until_there_is_room(make):
    lab = make(host_memory=15, idle_timeout=60.0)
    lab.parked("b", 10)
    lab.idle("a")
    lab.after(59.0)
    assert told(lab) == "", "it may still be idle"
    lab.after(1.0)
    assert lab.state("a") == "idle"
    assert told(lab).startswith(
        "Its state may need 10 B, and only 5 B of the 15 B of host memory for suspended kernels is "
        "free;"
    )
    lab.end("b")
    assert lab.state("a") == "detaching"
    assert told(lab) == ""


def test_keep_removes_the_reason_of_a_blocked_release(make):
    lab = make(host_memory=15, idle_timeout=60.0)
    lab.parked("b", 10)
    lab.idle("a")
    lab.release("a")
    assert told(lab).startswith("Its state may need 10 B, and only 5 B of the 15 B of host memory")
    lab.keep("a", 100.0)
    assert told(lab) == "", "the user keeps it"


def test_full_quota_of_suspended_state_is_the_reason(make):
    lab = make(idle_timeout=60.0, quotas={"me": Quota(suspended=15)})
    lab.parked("b", 10, owner="me")
    lab.idle("a", owner="me")
    lab.after(60.0)
    assert told(lab) == (
        "Your quota of 15 B of suspended state is full; the slice goes back as soon as there is "
        "room."
    )


def test_too_little_free_memory_is_the_reason(make):
    lab = make(idle_timeout=60.0)
    lab.idle("a")
    lab.send(ev.HostMemorySeen, available=5)
    lab.after(60.0)
    assert told(lab).startswith("This machine has too little free memory now")


def test_budget_smaller_than_the_state_is_the_reason(make):
    lab = make(idle_timeout=60.0)
    lab.idle("a")
    rules = dataclasses.replace(lab.pool.settings, host_memory=5)
    lab.send(ev.SettingsChanged, settings=rules)
    lab.after(60.0)
    assert told(lab).startswith(
        "Its state may need 10 B, and this machine keeps at most 5 B of state"
    )


def test_refused_suspend_is_the_reason_until_the_retry(make):
    lab = make(idle_timeout=60.0)
    lab.idle("a")
    lab.after(60.0)
    lab.refused("a", "drain")
    assert lab.state("a") == "idle"
    assert told(lab).startswith("The last attempt to suspend the kernel failed")
    lab.after(10.0)
    assert lab.state("a") == "detaching"
    assert told(lab) == ""


def test_early_refusal_does_not_delay_the_idle_timeout(make):
    lab = Lab(device(0), idle_timeout=60.0)
    lab.idle("a")
    lab.open("b")
    lab.hold("b")
    lab.refused("a", "busy")
    assert lab.state("a") in ("idle", "detaching")
    lab.after(0.5)
    assert lab.state("a") == "idle"
    assert told(lab) == ""


def test_pinned_session_shows_its_own_reason(make):
    lab = make(idle_timeout=60.0)
    lab.idle("a")
    lab.after(60.0)
    lab.refused("a", "pinned", "it shares memory")
    assert lab.record("a").pinned_reason
    assert told(lab) == ""
    # It is time to try the suspend again, but now host memory is too small for the state. This is
    # a second reason. The pool still shows only the first reason (``pinned_reason``).
    lab.send(ev.SettingsChanged, settings=dataclasses.replace(lab.pool.settings, host_memory=5))
    lab.after(60.0)
    assert lab.state("a") == "idle"
    assert told(lab) == ""


def test_idle_kernel_stays_if_its_device_cannot_suspend():
    lab = Lab(device(0, can_suspend=False), idle_timeout=60.0)
    lab.running("a")
    lab.drop("a")
    assert told(lab).startswith("State on this GPU cannot be moved"), "nobody knows what it uses"
    lab.seen("G0", a=4)
    assert told(lab).startswith("State on this GPU cannot be moved")
    lab.seen("G0", a=0)
    assert told(lab) == "", "there is nothing to move"
    lab.after(60.0)
    assert got(lab.past, ev.Suspend, session="a").reason == "idle"


def test_reason_names_the_measured_bytes_of_each_device(make):
    lab = make()
    lab.running("a", 4, devices=2)
    lab.seen("G1", a=3)
    (seen,) = lab.pool.view(lab.now).sessions
    assert seen.footprints == {"G1": 3}
    assert seen.record.slices == (Slice("G0", 4), Slice("G1", 4))
