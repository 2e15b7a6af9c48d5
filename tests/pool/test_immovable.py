# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""State that the driver did not move to another device; and how much room a resume asks for."""

from __future__ import annotations

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import GiB, MiB

from .builders import Lab, all_of, device, got, none


def not_moved(lab: Lab, name: str) -> list[ev.Action]:
    return lab.send(
        ev.AttachFailed, session=name, epoch=lab.record(name).epoch, message="not moved", stay=True
    )


@pytest.fixture
def lab(make):
    """State of ``a`` from G0, which ``b`` has now, was to go to G1, and did not."""
    lab = make(device(0), device(1))
    lab.parked("a", used=10)
    assert [s.device for s in lab.record("a").suspended] == ["G0"]
    lab.running("b", 12, devices=1)
    if lab.where("b")[0][0] != "G0":
        pytest.fail("b was to be where a was")
    assert got(lab.hold("a"), ev.Attach, session="a").slices[0].device == "G1"
    none(not_moved(lab, "a"), ev.EndSession)
    assert (lab.state("a"), lab.reason("a")) == ("queued", "not moved")
    return lab


def test_who_is_not_moved_waits_for_the_device_he_had(lab):
    none(lab.after(2), ev.Attach)
    assert "its state is from there, and the driver does not move it" in lab.reason("a")
    assert "on GPU 0" in lab.reason("a")
    attach = got(lab.end("b"), ev.Attach, session="a")
    assert [s.device for s in attach.slices] == ["G0"]
    lab.done("a")
    assert lab.state("a") == "active"


def test_an_idle_kernel_there_yields_to_him(lab):
    lab.after(2)
    got(lab.drop("b"), ev.Suspend, session="b")
    attach = got(lab.suspended("b", ("G0", 12)), ev.Attach, session="a")
    assert [s.device for s in attach.slices] == ["G0"]


def test_it_is_remembered_after_he_was_back(lab):
    lab.after(2)
    lab.end("b")
    lab.done("a")
    lab.drop("a")
    got(lab.release("a"), ev.Suspend, session="a")
    lab.suspended("a", ("G0", 10))
    lab.running("c", 12)
    assert lab.where("c")[0][0] == "G0"
    none(lab.hold("a"), ev.Attach)
    assert lab.state("a") == "queued"


def test_without_that_device_another_is_better_than_none(lab):
    lab.after(2)
    actions = lab.send(ev.DeviceDrained, device="G0", reason="lost")
    attach = got(actions, ev.Attach, session="a")
    assert [s.device for s in attach.slices] == ["G1"]


@pytest.mark.parametrize(
    ("size", "room"), [(512 * MiB, 32 * MiB), (2 * GiB, 128 * MiB), (80 * GiB, 256 * MiB)]
)
def test_the_headroom_of_a_resume_is_less_on_a_small_device(make, size, room):
    lab = make(device(0, size), resume_headroom=256 * MiB, host_memory=80 * GiB)
    lab.parked("a", used=200 * MiB, memory=100 * MiB)
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert [s.bytes for s in attach.slices] == [200 * MiB + room]
    # Once it is back, this is for others.
    lab.done("a")
    assert lab.where("a") == [("G0", 200 * MiB)]
    assert all_of(lab.after(1), ev.EndSession) == []
