# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""When a priority class closes, its sessions stop. They keep their state and continue later."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Group, Portion
from jupyter_gpupool.pool.model import Owner

from .builders import Lab, device, got, none

DAY = frozenset({"notebook"})


def allow(lab, classes, **changes):
    settings = dataclasses.replace(lab.pool.settings, classes_allowed=classes, **changes)
    return lab.send(ev.SettingsChanged, settings=settings)


def test_session_of_a_closed_class_waits_although_there_is_room():
    lab = Lab(device(0), classes_allowed=DAY)
    lab.open("b", 4, priority="batch")
    none(lab.hold("b"), ev.Attach)
    assert lab.state("b") == "queued"
    assert lab.reason("b") == "kernels of the priority class 'batch' get no GPU at this time"
    assert lab.pool.explain("b").reason.rule == "class-closed"
    lab.open("n", 16)
    got(lab.hold("n"), ev.Attach, session="n")  # b reserves nothing


def test_running_session_stops_when_its_class_is_closed():
    lab = Lab(device(0))
    lab.running("b", 16, priority="batch")
    lab.after(60)
    suspend = got(allow(lab, DAY), ev.Suspend, session="b")
    assert suspend.busy
    lab.suspended("b", ("G0", 16))
    assert lab.state("b") == "queued"
    none(lab.after(3600), ev.Attach)
    got(allow(lab, None), ev.Attach, session="b")


def test_idle_session_of_a_closed_class_is_suspended():
    lab = Lab(device(0))
    lab.idle("b", 16, priority="batch")
    assert not got(allow(lab, DAY), ev.Suspend, session="b").busy


def test_session_of_a_closed_class_has_its_minimum_residence():
    lab = Lab(device(0))
    lab.running("b", 16, priority="batch")
    none(allow(lab, DAY), ev.Suspend)
    assert lab.pool.next_wakeup() is not None
    got(lab.after(60), ev.Suspend, session="b")


def test_pool_suspends_no_session_of_an_open_class():
    lab = Lab(device(0), device(1))
    lab.running("a", 16)
    lab.idle("b", 16)
    lab.after(60)
    none(allow(lab, DAY), ev.Suspend)


def test_session_of_a_closed_class_uses_no_group_guarantee():
    lab = Lab(
        device(0), classes_allowed=DAY,
        groups={"g": Group(guarantee=Portion(bytes=8))}, preempt=frozenset({"guarantee"}),
    )  # fmt: skip
    lab.running("x", 16)
    lab.open("b", 8, owner=Owner("ann", "g"), priority="batch")
    lab.hold("b")
    lab.open("n", 8, owner=Owner("bob", "g"))
    lab.hold("n")
    got(lab.after(60), ev.Suspend, session="x")


@pytest.mark.parametrize("classes", [None, DAY, frozenset({"batch"}), frozenset()])
def test_sending_the_same_settings_again_changes_nothing(classes):
    lab = Lab(device(0), device(1))
    lab.running("a", 16)
    lab.running("b", 16, priority="batch")
    lab.after(60)
    first = [a.session for a in allow(lab, classes) if isinstance(a, ev.Suspend)]
    assert set(first) == {
        name for name, of in (("a", "notebook"), ("b", "batch"))
        if classes is not None and of not in classes
    }  # fmt: skip
    none(allow(lab, classes), ev.Suspend)
