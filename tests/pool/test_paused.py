# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An admin pauses devices: the pool suspends their leases, and sessions wait."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev

from .builders import Lab, device, got

WHY = "paused by the administrator: new driver"


def pause(lab: Lab, uuid: str = "G0", reason: str = WHY):
    return lab.send(ev.DevicePaused, device=uuid, reason=reason)


def resume(lab: Lab, uuid: str = "G0"):
    return lab.send(ev.DeviceResumed, device=uuid)


def test_kept_idle_lease_leaves_a_paused_device():
    lab = Lab(device(0))
    lab.idle("a")
    lab.keep("a", 1000.0)
    got(pause(lab), ev.Suspend, session="a", reason=WHY)


def test_lease_leaves_a_paused_gpu_after_the_running_cell():
    lab = Lab(device(0))
    lab.running("a")
    pause(lab)
    assert lab.state("a") == "active"
    lab.after(1000.0)
    assert lab.state("a") == "active"
    got(lab.drop("a"), ev.Suspend, session="a", reason=WHY)


def test_attach_under_way_ends_before_the_lease_leaves():
    lab = Lab(device(0))
    lab.open("a")
    lab.hold("a")
    pause(lab)
    lab.drop("a")
    got(lab.done("a"), ev.Suspend, session="a")


def test_wait_for_a_paused_device_shows_the_admins_reason():
    lab = Lab(device(0), device(1))
    lab.open("a")
    lab.parked("b", 4)
    for uuid in ("G0", "G1"):
        pause(lab, uuid)
    for name in ("a", "b"):
        lab.hold(name)
        assert lab.record(name).wait_reason == WHY
    actions = resume(lab)
    assert [a.session for a in actions if isinstance(a, ev.Attach)] == ["a"]
    actions = resume(lab, "G1")
    assert [a.session for a in actions if isinstance(a, ev.Attach)] == ["b"]


def test_session_of_a_paused_device_resumes_on_another():
    lab = Lab(device(0), device(1))
    lab.idle("a")
    got(pause(lab), ev.Suspend, session="a")
    lab.suspended("a", ("G0", 6))
    (attach,) = (x for x in lab.hold("a") if isinstance(x, ev.Attach))
    assert attach.origin == ("G0",)
    assert [x.device for x in attach.slices] == ["G1"]


def test_refused_suspend_is_tried_again_while_the_pause_lasts():
    lab = Lab(device(0))
    lab.idle("a")
    pause(lab)
    lab.refused("a", "pinned", "managed memory")
    assert lab.state("a") == "idle"
    got(lab.after(61.0), ev.Suspend, session="a")


def test_end_of_a_pause_does_not_return_a_faulty_device():
    lab = Lab(device(0))
    lab.send(ev.DeviceDrained, device="G0", reason="Xid 79")
    pause(lab)
    lab.open("a")
    lab.hold("a")
    assert lab.record("a").wait_reason == WHY
    resume(lab)
    assert lab.state("a") == "queued"
    assert lab.record("a").wait_reason != WHY
    assert lab.pool.view(lab.now).devices[0].drained_reason == "Xid 79"
    lab.send(ev.DeviceAppeared, device=device(0))
    assert lab.state("a") == "attaching"


def test_pause_continues_after_a_device_is_found_healthy():
    lab = Lab(device(0))
    pause(lab)
    lab.send(ev.DeviceAppeared, device=device(0))
    lab.open("a")
    lab.hold("a")
    assert lab.state("a") == "queued"


def test_pool_drops_a_plan_on_a_device_that_is_paused():
    lab = Lab(device(0))
    lab.idle("a")
    lab.after(1.0)
    lab.open("b")
    got(lab.hold("b"), ev.Suspend, session="a")
    pause(lab)
    lab.suspended("a", ("G0", 6))
    assert lab.state("b") == "queued"
    assert lab.record("b").wait_reason == WHY
