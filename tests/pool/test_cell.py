# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The life of a cell: hold, attach, idle, suspend, resume, and what can interrupt them."""

from __future__ import annotations

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Hold, Slice

from .builders import all_of, device, got, none


def test_session_without_a_hold_never_has_a_slice(lab):
    assert lab.open("a") == []
    assert lab.after(10_000) == []
    assert lab.state("a") == "detached"
    assert lab.free() == [16, 16]


def test_the_first_cell_gets_a_slice_at_once(lab):
    lab.open("a", 10)
    attach = got(lab.hold("a"), ev.Attach, session="a", epoch=1, origin=())
    assert attach.slices == (Slice("G0", 10),)
    granted = got(lab.done("a"), ev.HoldGranted, session="a", hold="c", epoch=1)
    assert granted.slices == attach.slices
    assert lab.state("a") == "active"
    assert lab.free() == [6, 16]


def test_next_cell_on_a_lease_takes_two_actions(lab):
    lab.idle("a")
    kinds = [type(a) for a in lab.hold("a", "c2")]
    assert kinds == [ev.StateChanged, ev.HoldGranted]


def test_taking_a_hold_twice_changes_nothing(lab):
    lab.running("a")
    got(lab.hold("a"), ev.HoldGranted, hold="c", epoch=1)
    assert len(lab.record("a").holds) == 1
    lab.drop("a")
    assert lab.state("a") == "idle"


def test_lease_counts_as_granted_until_its_suspend_is_done(lab):
    lab.idle("a", 10)
    got(lab.after(300), ev.Suspend, session="a", reason="idle")
    assert lab.state("a") == "detaching"
    assert lab.free() == [6, 16]
    lab.suspended("a", ("G0", 5))
    assert lab.free() == [16, 16]
    assert lab.pool.view(lab.now).host_used == 5


def test_headroom_of_a_resume_is_free_after_the_resume(lab):
    lab.parked("a", used=12, memory=10)
    attach = got(lab.hold("a"), ev.Attach, epoch=2, origin=("G0",))
    assert attach.slices == (Slice("G0", 13),)
    assert lab.pool.view(lab.now).host_used == 12
    actions = lab.done("a")
    assert got(actions, ev.Resize).slices == (Slice("G0", 12),)
    assert got(actions, ev.HoldGranted).slices == (Slice("G0", 12),)
    assert lab.pool.view(lab.now).host_used == 0
    assert lab.record("a").resumes == 1


def test_state_resumes_on_another_device_if_its_own_is_in_use(lab):
    lab.parked("a", used=10)
    lab.running("b", 10)
    assert lab.where("b") == [("G0", 10)]
    attach = got(lab.hold("a"), ev.Attach, origin=("G0",))
    assert attach.slices == (Slice("G1", 11),)
    lab.done("a")
    assert lab.record("a").migrations == 1
    assert lab.record("a").bound == ("G1",)


def test_state_that_fills_a_device_resumes_on_it(make):
    lab = make(device(0))
    lab.parked("a", used=16, memory=16)
    assert got(lab.hold("a"), ev.Attach).slices == (Slice("G0", 16),)
    lab.done("a")


def test_hold_taken_while_detaching_waits_in_the_queue(lab):
    lab.idle("a")
    lab.after(300)
    none(lab.hold("a", "c2"), ev.HoldGranted)
    actions = lab.suspended("a", ("G0", 4))
    assert [(a.old, a.new) for a in all_of(actions, ev.StateChanged)] == [
        ("detaching", "queued"),
        ("queued", "attaching"),
    ]
    got(lab.done("a"), ev.HoldGranted, hold="c2", epoch=2)


def test_hold_taken_while_detaching_is_granted_if_suspend_fails(lab):
    lab.idle("a")
    lab.after(300)
    lab.hold("a", "c2")
    got(lab.refused("a", "busy"), ev.HoldGranted, hold="c2", epoch=1)
    assert lab.state("a") == "active"


def test_hold_dropped_while_detaching_restarts_idle_time(lab):
    """The report of a short cell comes late, during a suspend.

    The agent refuses the suspend because of this cell. Then the idle time starts again.
    """
    lab.idle("a")
    lab.after(300)
    assert lab.state("a") == "detaching"
    lab.hold("a", "short")
    lab.drop("a", "short")
    lab.refused("a", "busy")
    assert lab.state("a") == "idle"
    lab.after(299)
    assert lab.state("a") == "idle"
    lab.after(1)
    assert lab.state("a") == "detaching"


def test_report_of_no_holds_while_detaching_keeps_idle_time(lab):
    lab.idle("a")
    lab.after(300)
    lab.after(5)
    lab.send(ev.HoldsReplaced, session="a", holds=())
    lab.refused("a", "busy")
    assert lab.state("a") == "idle"
    got(lab.after(1), ev.Suspend, session="a")


def test_hold_taken_exactly_at_the_idle_timeout_keeps_the_lease(lab):
    lab.idle("a")
    lab.now += 300
    none(lab.hold("a", "c2"), ev.Suspend)
    assert lab.state("a") == "active"


def test_a_cancelled_wait_leaves_the_queue(lab):
    lab.running("a", 16)
    lab.running("b", 16)
    lab.open("w")
    lab.hold("w")
    assert got(lab.drop("w"), ev.StateChanged).new == "detached"
    assert lab.pool.view(lab.now).sessions[2].queue_position is None


def test_session_of_a_cancelled_cell_is_idle_after_its_attach(lab):
    lab.open("a")
    lab.hold("a")
    assert lab.drop("a") == []
    assert lab.state("a") == "attaching"
    assert got(lab.done("a"), ev.StateChanged).new == "idle"


def test_pool_refuses_all_waiting_holds_after_max_wait(make):
    lab = make(device(0), max_wait=30.0)
    lab.running("a")
    lab.open("w")
    lab.hold("w", "c1")
    lab.after(10)
    lab.hold("w", "c2")
    actions = lab.after(20)
    assert {a.hold for a in all_of(actions, ev.HoldRefused)} == {"c1", "c2"}
    assert {a.refusal.code for a in all_of(actions, ev.HoldRefused)} == {"wait-timeout"}
    message = all_of(actions, ev.HoldRefused)[0].refusal.message
    assert message.startswith(
        "No GPU slice became free within 30 s (c.GPUPool.max_wait). The last reason:"
    )
    assert "in use by running cells" in message
    assert lab.state("w") == "detached"


# --------------------------------------------------------------------------- completions


@pytest.mark.parametrize("epoch", [0, 2, 99])
def test_completion_of_another_epoch_is_logged_and_dropped(lab, epoch):
    lab.open("a")
    lab.hold("a")
    assert got(lab.done("a", epoch=epoch), ev.Log).code == "stale-completion"
    assert lab.state("a") == "attaching"


def test_completion_after_the_end_of_a_session_is_dropped(lab):
    lab.idle("a")
    lab.after(300)
    lab.end("a")
    actions = lab.send(ev.SuspendDone, session="a", epoch=1, suspended=(Slice("G0", 9),))
    assert [type(a) for a in actions] == [ev.Log]
    assert lab.pool.view(lab.now).host_used == 0
    assert lab.free() == [16, 16]


def test_failed_attach_is_retried_and_keeps_its_place(make):
    lab = make(device(0))
    lab.open("a")
    lab.hold("a")
    lab.open("b")
    lab.hold("b")
    actions = lab.failed("a", "memory was not free")
    # a is ahead of b in the queue, but must wait before its next attempt. So b gets the slice.
    got(actions, ev.Attach, session="b")
    assert lab.reason("a") == "memory was not free"
    assert lab.pool.view(lab.now).sessions[0].queue_position == 1
    lab.end("b")
    got(lab.after(1.0), ev.Attach, session="a", epoch=2)


def test_failed_attaches_are_retried_with_back_off(lab):
    lab.open("a")
    lab.hold("a")
    pauses = []
    for _ in range(9):
        lab.failed("a")
        pauses.append(lab.pool.next_wakeup() - lab.now)
        lab.after(pauses[-1])
        assert lab.state("a") == "attaching"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_lost_session_holds_its_bytes_until_its_process_ends(lab):
    lab.parked("a", used=8)
    lab.hold("a")
    actions = lab.failed("a", "driver error 304", lost=True)
    got(actions, ev.EndSession, session="a")
    assert got(actions, ev.HoldRefused).refusal.code == "lost"
    assert lab.state("a") == "ended"
    assert lab.free() == [6, 16]
    got(lab.hold("a", "c2"), ev.HoldRefused)
    lab.end("a")
    assert lab.free() == [16, 16]
    assert lab.pool.view(lab.now).host_used == 0


def test_session_lost_during_its_suspend_ends(lab):
    lab.idle("a")
    lab.after(300)
    got(lab.send(ev.SuspendFailed, session="a", epoch=1, message="hung"), ev.EndSession)
    assert got(lab.release("a"), ev.Answer).refusal.code == "unknown-session"


@pytest.mark.parametrize(
    "state", ["detached", "queued", "attaching", "active", "idle", "detaching"]
)
def test_the_end_of_a_process_frees_everything_in_every_state(make, state):
    lab = make(device(0))
    lab.parked("a", used=6)
    if state == "queued":
        lab.running("b", 16)
    if state != "detached":
        lab.hold("a", "c2")
    if state in ("active", "idle", "detaching"):
        lab.done("a")
    if state in ("idle", "detaching"):
        lab.drop("a", "c2")
    if state == "detaching":
        lab.after(300)
    assert lab.state("a") == state
    actions = lab.end("a")
    assert got(actions, ev.StateChanged, session="a").new == "ended"
    assert len(all_of(actions, ev.HoldRefused)) == (state in ("queued", "attaching"))
    assert "a" not in lab.pool
    assert lab.pool.view(lab.now).host_used == 0
    assert lab.free() == [0 if state == "queued" else 16]


# --------------------------------------------------------------------------- unknown sessions


def test_events_of_unknown_sessions_are_answered_or_logged(lab):
    assert got(lab.hold("x"), ev.HoldRefused).refusal.code == "unknown-session"
    assert got(lab.release("x"), ev.Answer).refusal.code == "unknown-session"
    assert got(lab.keep("x", 5), ev.Answer).refusal.code == "unknown-session"
    for actions in (lab.drop("x"), lab.end("x"), lab.done("x", epoch=1)):
        assert [type(a) for a in actions] == [ev.Log]
    assert [type(a) for a in lab.send(ev.DeviceDrained, device="x", reason="?")] == [ev.Log]
    assert [type(a) for a in lab.seen("x")] == [ev.Log]


def test_session_can_open_only_once(lab):
    assert got(lab.open("a", rid="1"), ev.Answer).refusal is None
    assert got(lab.open("a", rid="2"), ev.Answer).refusal.code == "session-exists"


def test_event_with_an_earlier_time_gets_the_latest_time(lab):
    lab.now = 50.0
    lab.idle("a")
    lab.now = 10.0
    lab.hold("a", "c2")
    assert lab.record("a").state_since == 50.0


def test_reconnecting_agent_reports_its_holds(lab):
    lab.running("a")
    lab.send(ev.HoldsReplaced, session="a", holds=(), cuda=True)
    assert lab.state("a") == "idle"
    assert lab.record("a").bound == ("G0",)


def test_history_of_a_session_has_its_last_steps(lab):
    lab.parked("a", used=4)
    story = lab.pool.story("a")
    assert len(story) == 6
    assert "detached -> queued" in story[0]
    assert "detaching -> detached" in story[-1]
    assert lab.pool.story("nobody") == []


def test_waiting_and_attached_seconds_are_counted(make):
    lab = make(device(0))
    lab.running("a", 16)
    lab.open("w", 16)
    lab.hold("w")
    lab.after(7)
    lab.drop("a")
    lab.after(2)
    lab.suspended("a", ("G0", 3))
    lab.after(1)
    lab.done("w")
    lab.after(20)
    view = {v.record.id: v for v in lab.pool.view(lab.now).sessions}
    assert view["w"].wait_seconds_total == 10
    assert view["w"].attached_seconds_total == 21
    assert view["a"].attached_seconds_total == 9


# --------------------------------------------------------------------------- activity


def device_hold(lab, name="a"):
    return lab.send(ev.HoldTaken, session=name, hold="device", kind="device")


def test_reconnected_agent_does_not_end_the_device_hold(lab):
    lab.running("a")
    device_hold(lab)
    lab.send(ev.HoldsReplaced, session="a", holds=())
    assert [h.id for h in lab.record("a").holds] == ["device"]
    assert lab.state("a") == "active"
    lab.send(ev.HoldsReplaced, session="a", holds=(Hold("c9", "cell", lab.now),))
    assert {h.id for h in lab.record("a").holds} == {"c9", "device"}
    lab.drop("a", "device")
    assert lab.state("a") == "active"
    lab.drop("a", "c9")
    assert lab.state("a") == "idle"


def test_agent_cannot_report_a_device_hold(lab):
    lab.idle("a")
    lab.send(ev.HoldsReplaced, session="a", holds=(Hold("device", "device", lab.now),))
    assert lab.state("a") == "idle"


def test_waiting_call_outlives_a_reconnect_of_the_agent(make):
    lab = make(device(0))
    lab.running("b", 16)
    lab.open("a", 16)
    device_hold(lab)
    lab.send(ev.HoldsReplaced, session="a", holds=())
    assert lab.state("a") == "queued"
    got(lab.end("b"), ev.Attach, session="a")
    got(lab.done("a"), ev.HoldGranted, session="a", hold="device")


def test_release_between_cells_waits_for_work_on_the_gpu(lab):
    lab.open("a")
    device_hold(lab)
    lab.done("a")
    assert "when the kernel's work on the GPU is done" in got(lab.release("a"), ev.Answer).note
    got(lab.drop("a", "device"), ev.Suspend, session="a")


def test_cuda_call_waits_for_a_device_that_its_process_sees(make):
    lab = make(device(0), device(1))
    lab.running("b", 16)
    lab.open("a", 10)
    actions = lab.send(ev.HoldTaken, session="a", hold="device", kind="device", bound=("G0",))
    none(actions, ev.Attach)
    got(lab.end("b"), ev.Attach, session="a", slices=(Slice("G0", 10),))


def test_reason_says_why_a_free_device_does_not_help(make):
    lab = make(device(0), device(1))
    lab.running("a", 16)
    lab.running("b", 16)
    lab.open("w", 12)
    lab.send(ev.HoldTaken, session="w", hold="device", kind="device", bound=("G1",))
    assert lab.reason("w") == "all 32 B in use by running cells"
    lab.end("a")
    assert lab.state("w") == "queued"
    assert lab.reason("w") == (
        "12 B is needed on GPU 1, and 0 B is free there; the kernel initialised CUDA on this GPU, "
        "and the pool cannot move it to another GPU before its first slice"
    )


def test_cuinit_binds_a_waiting_cell_to_the_visible_device(make):
    lab = make(device(0), device(1))
    lab.running("b", 16)
    lab.running("c", 16)
    lab.open("a", 10)
    lab.hold("a")
    lab.send(ev.HoldTaken, session="a", hold="device", kind="device", bound=("G1",))
    none(lab.end("b"), ev.Attach)
    got(lab.end("c"), ev.Attach, session="a", slices=(Slice("G1", 10),))
