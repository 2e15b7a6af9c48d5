# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""State that the driver cannot move to another device; and the headroom of a resume."""

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
    """Return a lab in which the driver has refused to move the state of ``a`` from G0 to G1.

    ``a`` is suspended and waits for G0. ``b`` uses G0.
    """
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


def test_immovable_state_waits_for_its_device(lab):
    none(lab.after(2), ev.Attach)
    why = "the kernel was suspended from this GPU, and the driver cannot move its state"
    assert why in lab.reason("a")
    assert "on GPU 0" in lab.reason("a")
    attach = got(lab.end("b"), ev.Attach, session="a")
    assert [s.device for s in attach.slices] == ["G0"]
    lab.done("a")
    assert lab.state("a") == "active"


def test_immovable_state_preempts_an_idle_kernel_on_its_device(lab):
    lab.after(2)
    got(lab.drop("b"), ev.Suspend, session="b")
    attach = got(lab.suspended("b", ("G0", 12)), ev.Attach, session="a")
    assert [s.device for s in attach.slices] == ["G0"]


def test_refusal_to_move_is_remembered_after_reattach(lab):
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


def test_state_of_a_lost_device_resumes_on_another(lab):
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
    # After the resume, the session's slice no longer has the headroom.
    lab.done("a")
    assert lab.where("a") == [("G0", 200 * MiB)]
    assert all_of(lab.after(1), ev.EndSession) == []


def test_resume_does_not_wait_for_bytes_of_a_display_server(make):
    """The display server uses 2 of 64 bytes, and the state needs 61. So 1 byte is left as headroom.

    The session resumes with 1 byte of headroom, and does not wait for 4 bytes.
    """
    lab = make(device(0, 64), resume_headroom=4)
    lab.seen("G0", foreign=2)
    lab.parked("a", used=61, memory=60)
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert [s.bytes for s in attach.slices] == [62]
    lab.done("a")
    assert lab.where("a") == [("G0", 61)]


def test_resume_goes_to_another_device_that_has_headroom(make):
    lab = make(device(0, 64), device(1, 64), resume_headroom=4)
    lab.parked("a", used=61, memory=60)
    lab.seen("G0", foreign=2)
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert [(s.device, s.bytes) for s in attach.slices] == [("G1", 64)]


def test_waiting_state_resumes_if_others_took_its_headroom(make):
    lab = make(device(0, 64), device(1, 64), resume_headroom=4)
    lab.parked("a", used=61, memory=60)
    lab.running("b", 60)
    lab.running("c", 60)
    none(lab.hold("a"), ev.Attach)
    lab.seen("G1", foreign=2, c=60)
    none(lab.seen("G0", foreign=2, b=60), ev.Attach)
    attach = got(lab.end("b"), ev.Attach, session="a")
    assert [(s.device, s.bytes) for s in attach.slices] == [("G0", 62)]


def test_state_resumes_without_headroom_if_the_other_gpu_is_lost(make):
    lab = make(device(0, 64), device(1, 64), resume_headroom=4)
    lab.parked("a", used=61, memory=60)
    lab.seen("G0", foreign=2)
    lab.running("c", 63)
    assert lab.where("c")[0][0] == "G1"
    none(lab.hold("a"), ev.Attach)
    attach = got(lab.send(ev.DeviceDrained, device="G1", reason="lost"), ev.Attach, session="a")
    assert [(s.device, s.bytes) for s in attach.slices] == [("G0", 62)]


def test_two_states_that_nearly_fill_their_devices_resume_there(make):
    """Each device has room for the state and 1 byte of headroom, not for the usual 4 bytes.

    In an earlier version, the session waited for the rest of the headroom.
    """
    lab = make(device(0, 64), device(1, 64), resume_headroom=4)
    lab.idle("a", memory=50, devices=2)
    lab.release("a")
    lab.suspended("a", ("G0", 61), ("G1", 57))
    lab.seen("G0", foreign=2)
    lab.seen("G1", foreign=6)
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert [(s.device, s.bytes) for s in attach.slices] == [("G0", 62), ("G1", 58)]


def test_two_states_resume_without_headroom_if_no_gpu_has_it(make):
    lab = make(device(0, 64), device(1, 64), resume_headroom=4)
    lab.idle("a", memory=50, devices=2)
    lab.release("a")
    lab.suspended("a", ("G0", 58), ("G1", 58))
    lab.running("b", 60)
    none(lab.hold("a"), ev.Attach)
    lab.seen("G0", foreign=2, b=60)
    none(lab.seen("G1", foreign=5), ev.Attach)
    attach = got(lab.end("b"), ev.Attach, session="a")
    assert [(s.device, s.bytes) for s in attach.slices] == [("G0", 62), ("G1", 59)]


def test_state_larger_than_the_usable_memory_resumes(make):
    """Without the guard, a kernel can use bytes that the pool keeps for the driver or the admin.

    So its state can be larger than the memory that a slice can have.
    """
    lab = make(device(0, 64, memory_reserved=2), reserve=1)
    lab.parked("a", used=63, memory=61)
    attach = got(lab.hold("a"), ev.Attach, session="a")
    assert [s.bytes for s in attach.slices] == [61]
    lab.done("a")
    assert (lab.state("a"), lab.where("a")) == ("active", [("G0", 61)])
