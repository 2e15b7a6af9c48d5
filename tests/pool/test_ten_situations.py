# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ten situations in which the pool must do what ``pool/schedule.py`` describes.

Each docstring quotes or summarises a text of that module. If a test fails, either the plan or the
module's text is wrong.
"""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Quota

from .builders import Lab, device, got, none


def rule(lab: Lab, name: str) -> str:
    why = lab.pool.explain(name).reason
    return "" if why is None else why.rule


def ask(lab: Lab, name: str, memory: int = 10, **fields: object) -> list[ev.Action]:
    lab.open(name, memory, **fields)
    return lab.hold(name)


def test_backfilling_takes_only_bytes_that_the_head_can_spare():
    """The pool serves sessions behind the head only with memory that the head can never need."""
    lab = Lab()
    lab.running("a")
    lab.running("b")
    none(ask(lab, "head", 12, devices=2), ev.Attach)
    assert rule(lab, "head") == "busy"
    got(ask(lab, "c", 4), ev.Attach, session="c")  # after the end of "a", G0 still has 12 bytes
    got(ask(lab, "d", 2), ev.Attach, session="d")
    none(ask(lab, "e", 4), ev.Attach)
    assert rule(lab, "e") == "behind-head"
    assert lab.where("d") == [("G1", 2)] == [(lab.where("b")[0][0], 2)]
    none(lab.end("b"), ev.Attach)  # 14 bytes are free; "e" would leave only 10
    got(ask(lab, "f", 2), ev.Attach, session="f")
    assert lab.where("f") == [("G1", 2)]
    got(lab.end("a"), ev.Attach, session="head")


def test_session_ahead_in_the_queue_takes_over_a_promise():
    """A new session may take what the pool has promised to sessions *behind* it in the queue."""
    lab = Lab(device(0))
    lab.idle("a")
    got(ask(lab, "b", priority="batch"), ev.Suspend, session="a")
    none(ask(lab, "c", priority="interactive"), ev.Suspend)
    assert (rule(lab, "c"), rule(lab, "b")) == ("planned", "busy")
    got(lab.suspended("a", ("G0", 10)), ev.Attach, session="c")
    assert lab.pool.explain("b").reserved  # now b is the head


def test_head_accumulates_after_ageing_seconds():
    """After ``ageing`` seconds the pool preempts idle leases for the head, one after the other."""
    lab = Lab()
    lab.running("a")
    lab.idle("b")
    none(ask(lab, "head", 16, devices=2), ev.Suspend)
    none(ask(lab, "small", 6, priority="batch"), ev.Attach)
    assert rule(lab, "small") == "behind-head"
    none(lab.after(59.9), ev.Suspend)
    got(lab.after(0.1), ev.Suspend, session="b")
    none(lab.suspended("b", ("G1", 10)), ev.Attach)  # G1 is empty, and waits for the head
    got(lab.end("a"), ev.Attach, session="head")


def test_wait_for_a_quota_reserves_nothing():
    """If a session waits for its owner's quota, the pool preempts idle leases of this owner.

    The session reserves no memory while it waits, so sessions of other owners can start. The pool
    places a slice on the fullest device that has room, so one device is empty for ``other``.
    """
    lab = Lab(quotas={"u": Quota(leases=1)})
    lab.idle("a", owner="u")
    got(ask(lab, "b", 6, owner="u"), ev.Suspend, session="a")  # G1 is free, the quota is not
    assert rule(lab, "b") == "planned"
    got(lab.suspended("a", ("G0", 10)), ev.Attach, session="b")
    lab.done("b")
    ask(lab, "c", 4, owner="u")
    ask(lab, "d", 2, owner="u")
    assert (rule(lab, "c"), rule(lab, "d")) == ("quota", "behind-own")
    got(ask(lab, "other", 16), ev.Attach, session="other")


def test_victim_is_a_session_whose_state_fits_host_memory():
    """The pool preempts a session only if host memory has room for its state.

    If host memory has no room for the state of any victim, it is the reason for the wait.
    """
    lab = Lab(device(0))
    lab.idle("a")
    lab.seen("G0", a=8)
    lab.send(ev.HostMemorySeen, available=5)
    none(ask(lab, "w"), ev.Suspend)
    assert rule(lab, "w") == "host"
    lab.send(ev.DeviceAppeared, device=device(1))
    got(lab.end("w"), ev.StateChanged, session="w", new="ended")
    lab.now += 10  # "a" has been idle for longer: only the lack of host memory protects it
    lab.idle("c")
    lab.seen("G1", c=4)
    got(ask(lab, "w2"), ev.Suspend, session="c")


def test_growth_of_a_busy_lease_takes_its_turn_in_the_queue():
    """A session whose slice is smaller than its guarantee waits in the queue for the rest.

    It is the same queue in which sessions without a slice wait.
    """
    lab = Lab(device(0))
    lab.running("a", 8)
    lab.running("b", 8)
    lab.change("a", 12)
    ask(lab, "later", 4, priority="interactive")
    ask(lab, "w", 8)
    assert lab.pool.explain("w").ahead == ("later", "a")
    got(lab.drop("b"), ev.Suspend, session="b")
    actions = lab.suspended("b", ("G0", 8))
    got(actions, ev.Attach, session="later")
    got(actions, ev.Resize, session="a")
    none(actions, ev.Attach, session="w")
    # The growth of an idle lease is last in the queue and reserves nothing.
    lab = Lab(device(0))
    lab.idle("a", 8)
    lab.keep("a", 1000)
    lab.running("b", 8)
    lab.change("a", 12)
    ask(lab, "w", 8)
    got(lab.end("b"), ev.Attach, session="w")


def test_old_wait_goes_before_a_higher_class():
    """A waiting session gets one point every ``ageing`` seconds.

    All sessions get points at the same rate, so two waiting sessions never change their order.
    """
    lab = Lab(device(0), ageing=1.0)
    lab.running("a", 16)
    ask(lab, "batch", 16, priority="batch")
    lab.now = 50.0
    ask(lab, "soon", 16)
    lab.now = 150.0
    ask(lab, "late", 16)
    assert [lab.pool.explain(n).position for n in ("soon", "batch", "late")] == [1, 2, 3]
    got(lab.end("a"), ev.Attach, session="soon")


def test_promise_on_a_paused_device_is_replaced():
    """If the pool can no longer keep a promise, it preempts another lease for the same session."""
    lab = Lab()
    lab.idle("a")
    lab.now = 1.0
    lab.idle("b")
    got(ask(lab, "c"), ev.Suspend, session="a")
    got(lab.send(ev.DevicePaused, device="G0", reason="cleaning"), ev.Suspend, session="b")
    none(lab.suspended("a", ("G0", 10)), ev.Attach)
    actions = lab.suspended("b", ("G1", 10))
    got(actions, ev.Attach, session="c")
    assert lab.where("c") == [("G1", 10)]


def test_slice_stays_for_the_length_of_a_move_after_a_resume():
    """After a resume, an idle lease stays for its minimum residence, here 2 s.

    When this time is over, the pool preempts the lease for a waiting session.
    """
    lab = Lab(device(0))
    lab.idle("a")
    lab.release("a")
    lab.suspended("a", ("G0", 10), seconds=1.0)
    lab.now = 10.0
    lab.hold("a")
    lab.now = 11.0
    lab.done("a", seconds=1.0)
    lab.drop("a", cuda=True)
    none(ask(lab, "b", 16), ev.Suspend)
    assert rule(lab, "b") == "busy"
    none(lab.after(1.9), ev.Suspend)
    got(lab.after(0.2), ev.Suspend, session="a")


def test_release_waits_for_the_hold_and_for_host_memory():
    """The pool suspends a released lease when it is idle and host memory has room."""
    lab = Lab(host_memory=16)
    lab.parked("p", used=10)
    lab.running("a")
    lab.running("z", 16)
    none(lab.release("a"), ev.Suspend)
    ask(lab, "w")
    assert rule(lab, "w") == "busy"
    none(lab.drop("a"), ev.Suspend)
    assert (lab.state("a"), rule(lab, "w")) == ("idle", "host")
    got(lab.end("p"), ev.Suspend, session="a", reason="release")
    assert rule(lab, "w") == "planned"
    got(lab.suspended("a", (lab.where("a")[0][0], 10)), ev.Attach, session="w")
