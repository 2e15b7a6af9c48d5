# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The devices that a session would get now, before its process is bound to a device."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev

from .builders import device, got
from .checks import check_pool


def test_device_with_room_is_preferred(lab):
    lab.running("b", 16)
    lab.open("a", 10)
    assert lab.pool.preferred("a") == ("G1",)
    assert got(lab.hold("a"), ev.Attach).slices[0].device == "G1"


def test_device_of_the_victim_is_preferred(lab):
    """On G1, the pool can suspend an idle lease. On G0, ``a`` would have to wait for a cell."""
    lab.running("b", 16)
    lab.idle("c", 16)
    lab.open("a", 10)
    assert lab.pool.preferred("a") == ("G1",)
    got(lab.hold("a"), ev.Suspend, session="c")


def test_no_device_is_preferred_if_all_are_in_use(lab):
    lab.running("b", 16)
    lab.running("c", 16)
    lab.open("a", 10)
    assert lab.pool.preferred("a") == ()


def test_device_that_a_session_has_or_needs_is_preferred(make):
    lab = make(device(0), device(1))
    lab.running("a", 4)
    assert lab.pool.preferred("a") == ("G0",)
    lab.drop("a", cuda=True)
    lab.after(1000)
    lab.suspended("a", ("G0", 4), cuda=True)
    lab.running("b", 16)
    assert lab.pool.preferred("a") == ("G0",)


def test_all_preferred_devices_of_a_gang_are_named(lab):
    lab.open("a", 4, devices=2)
    assert sorted(lab.pool.preferred("a")) == ["G0", "G1"]


def test_gang_resumes_on_its_own_devices_in_the_same_order(make):
    """G1 is free, but G0 is not. The pool frees G0, and moves no state to another device."""
    lab = make(device(0, can_migrate=True), device(1, can_migrate=True))
    lab.running("g", 8, devices=2)
    lab.drop("g")
    lab.release("g")
    lab.suspended("g", ("G0", 8), ("G1", 8))
    lab.idle("c", 16)
    assert [x[0] for x in lab.where("c")] == ["G0"]
    got(lab.hold("g"), ev.Suspend, session="c")
    attach = got(lab.suspended("c", ("G0", 16)), ev.Attach, session="g")
    assert [x.device for x in attach.slices] == ["G0", "G1"]


def test_query_for_preferred_devices_changes_nothing(lab):
    lab.idle("b", 16)
    lab.open("a", 10)
    before, records = lab.pool.view(lab.now), lab.pool.records()
    for _ in range(3):
        lab.pool.preferred("a")
    assert (lab.pool.view(lab.now), lab.pool.records()) == (before, records)
    check_pool(lab.pool, lab.now)
