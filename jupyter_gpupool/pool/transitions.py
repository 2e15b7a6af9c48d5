# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The states of a session: every step between them, when it happens, and what it does.

:data:`TRANSITIONS` maps (old, new) to a sentence and a function; ``docs/states.md`` is generated
from it. :func:`move` is the only way from one state to another. Like every function in this module,
it returns the actions that follow; only :class:`~.machine.Pool` collects these actions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Callable, Mapping, NamedTuple, Sequence

from ..errors import Code, GPUPoolError
from ..states import State
from . import residence
from .events import (
    Action,
    Attach,
    EndSession,
    HoldGranted,
    HoldRefused,
    Resize,
    StateChanged,
    Suspend,
)
from .facts import Facts
from .model import Refusal, Slice
from .placement import preferred
from .residence import Gap
from .running import RECALLED, TURN, cost
from .session import Session, weighted
from .shares import level

Actions = list[Action]


class InvalidTransition(GPUPoolError):
    """A session was about to make a step that is not in the table, because of a bug in this
    package.

    ``story`` holds the last steps of the session, oldest first.
    """

    code = Code.INVALID_TRANSITION

    def __init__(self, session: Session, new: State, reason: str) -> None:
        self.story = session.story_lines()
        super().__init__(
            f"Session {session.id} cannot go from {session.state} to {new} ({reason}).",
            next_step="This should never happen: please report it with the history below.\n"
            + "\n".join(self.story),
            details={"session": session.id, "old": session.state, "new": new},
        )


class Step(NamedTuple):
    """When a step happens, and what it does to the facts."""

    when: str
    act: Callable[..., Actions]


# --------------------------------------------------------------------------- what the steps do
# Each function gets the facts, the session as it was before the step, and the data of the event. It
# runs inside ``Facts.change``. The actions that it returns follow the StateChanged of the step.


def _join(facts: Facts, s: Session, since: float) -> Actions:
    """Begin to wait, with an age that counts from ``since``."""
    # The age of a preempted session may count from an earlier time. But its user must see a wait
    # that begins now.
    s.queued_at = facts.now if s.preempted else since
    facts.begin_wait(s, since)
    return []


def _stop_waiting(facts: Facts, s: Session) -> Actions:
    s.preempted = ""
    s.wait_seconds_total += max(0.0, facts.now - s.queued_at)
    s.queued_at = 0.0
    return []


def _begin_attach(facts: Facts, s: Session, takes: tuple[Slice, ...]) -> Actions:
    s.lease.level = level(s, facts)
    s.epoch += 1
    s.retry_at = 0.0
    facts.set_slices(s, takes)
    s.lease.attached_at = facts.now
    origin = preferred(s) if s.suspended else ()
    return [Attach(session=s.id, epoch=s.epoch, slices=takes, origin=origin)]


def _attached(facts: Facts, s: Session, seconds: float) -> Actions:
    """Note that the lease is in effect, and that its devices have the suspended state again."""
    state, s.suspended = s.suspended, ()
    s.preempted = ""
    s.failures, s.refused, s.confined = 0, "", False
    if state:
        s.resumes += 1
        s.bound = tuple(x.device for x in s.lease.slices)
        s.migrations += tuple(x.device for x in state) != s.bound
        s.lease.resumed_at = facts.now
        # The session uses at least these bytes, even before the first sample.
        sizes = zip(s.lease.slices, state, strict=True)
        s.lease.restored = {x.device: old.bytes for x, old in sizes}
        if seconds > 0:
            facts.swap = weighted(facts.swap, seconds)
            s.measured.resume = weighted(s.measured.resume, seconds)
    s.lease.cost = cost(s, facts.swap)
    facts.evidence.wait_ended(s.wait.figures, facts.now)
    s.wait.figures = []
    _stop_waiting(facts, s)
    if s.holds:
        s.measured.busy_since = facts.now
    else:
        _gap(facts, s)
    return []


def _gap(facts: Facts, s: Session) -> None:
    """Begin a gap without work. If the pool has tried a suspend in a gap, continue this gap."""
    s.idle_since = facts.now
    gap = s.measured.gap
    s.measured.gap = Gap(facts.now) if gap is None else replace(gap, taken=math.inf)


def _not_attached(facts: Facts, s: Session) -> Actions:
    """End a lease whose attach had no effect; ``last_devices`` stays as it was before."""
    last = s.last_devices
    facts.end_lease(s)
    s.last_devices = last
    return []


def _back_to_queue(facts: Facts, s: Session, failed: str) -> Actions:
    _not_attached(facts, s)
    _join(facts, s, s.wait.since)
    s.wait.failed = failed
    return []


def _give_up(facts: Facts, s: Session) -> Actions:
    _not_attached(facts, s)
    return _stop_waiting(facts, s)


def _not_landed(facts: Facts, s: Session) -> Actions:
    """End a lease on devices that the session has never used."""
    s.measured.busy = weighted(s.measured.busy, facts.now - s.measured.busy_since)
    return _not_attached(facts, s)


def _rest(facts: Facts, s: Session) -> Actions:
    spell = facts.now - s.measured.busy_since
    s.measured.busy = weighted(s.measured.busy, spell)
    facts.evidence.spells.add(spell)
    s.lease.stay = residence.computed(s.lease.stay, spell)
    _gap(facts, s)
    return []


def _work(facts: Facts, s: Session) -> Actions:
    s.measured.busy_since = facts.now
    s.roomless = ""
    return []


def _begin_suspend(facts: Facts, s: Session, reason: str, _tier: int = 0) -> Actions:
    s.lease.host_bound = s.state_bound
    facts.host_takes(s.lease.host_bound)
    gap, known = s.measured.gap, s.measured
    if gap is not None:
        cost, share = known.moving, facts.settings.max_swap_overhead
        stay, now = s.lease.stay, facts.now
        known.gap = residence.taken(gap, stay, known.habits, now, cost=cost, share=share)
    slices = s.lease.slices
    return [Suspend(session=s.id, epoch=s.epoch, slices=slices, reason=reason)]


def _begin_preempt(facts: Facts, s: Session, reason: str, tier: int) -> Actions:
    """Begin to preempt a session in use. Its holds stay: the cell continues with the next lease."""
    s.measured.busy = weighted(s.measured.busy, facts.now - s.measured.busy_since)
    s.lease.preempted, s.preempted = tier, reason
    s.lease.host_bound = s.state_bound
    facts.host_takes(s.lease.host_bound)
    slices = s.lease.slices
    return [Suspend(session=s.id, epoch=s.epoch, slices=slices, reason=reason, busy=True)]


def _suspended(facts: Facts, s: Session, state: tuple[Slice, ...], cuda: bool | None) -> Actions:
    """Note that the session is suspended, and that its device memory is free."""
    devices = tuple(x.device for x in s.lease.slices)
    state = _in_order(state, devices)
    for x in state:
        facts.device(x.device)
    if state or cuda:
        s.bound = devices
    elif cuda is False:
        s.bound = ()
    s.suspends += bool(state)
    s.failures, s.retry_at = 0, 0.0
    s.roomless = s.pinned_reason = s.refused = ""
    s.confined = False
    s.release_asked = False
    facts.host_takes(sum(x.bytes for x in state) - s.lease.host_bound)
    facts.end_lease(s)
    s.suspended = state
    return []


def _suspended_and_wanted(
    facts: Facts, s: Session, state: tuple[Slice, ...], cuda: bool | None
) -> Actions:
    tier = s.lease.preempted
    _suspended(facts, s, state, cuda)
    # If the session lost its slice because its turn was over or because an admin recalled the
    # slice, it goes behind the sessions that already wait.
    since = facts.now if tier in (TURN, RECALLED) else min(h.since for h in s.holds.values())
    return _join(facts, s, since)


def _suspended_and_done(
    facts: Facts, s: Session, state: tuple[Slice, ...], cuda: bool | None
) -> Actions:
    s.preempted = ""
    return _suspended(facts, s, state, cuda)


def _stays(facts: Facts, s: Session) -> Actions:
    facts.host_takes(-s.lease.host_bound)
    s.lease.host_bound = 0
    s.lease.told_wanted = False  # the agent had given the slice up: inform it again if necessary
    s.lease.preempted, s.preempted = 0, ""
    if s.holds:
        return _work(facts, s)
    since = s.idle_since  # since before the suspend, or since a hold was dropped during the suspend
    _gap(facts, s)
    s.idle_since = since
    return []


def _end(facts: Facts, s: Session, *, lost: bool) -> Actions:
    """End a session: its process has ended, or the driver has ``lost`` the process.

    The lease and the host bytes of a lost process still count, because the process may use them
    until it ends.
    """
    if lost:
        return []
    facts.host_takes(-s.lease.host_bound)
    s.lease.host_bound = 0
    if s.lease.slices:
        facts.end_lease(s)
    s.suspended = ()
    return []


def _in_order(state: Sequence[Slice], devices: Sequence[str]) -> tuple[Slice, ...]:
    """Return the suspended state in the order in which the process sees its devices.

    The process is bound to all devices of the lease, so the resume must map each of them to a
    device. So the result also has the devices without state, with 0 bytes. The result is () if no
    device has state.
    """
    if not state:
        return ()
    size = {x.device: x.bytes for x in state}
    return tuple(Slice(u, size.get(u, 0)) for u in dict.fromkeys((*devices, *size)))


#: Every step that may happen. Any other step is a bug in this package.
TRANSITIONS: Mapping[tuple[State, State], Step] = {
    ("detached", "queued"): Step(
        "a hold is taken and needs a slice, or host memory is short", _join
    ),
    ("queued", "detached"): Step(
        "the last waiting hold is cancelled or refused, or has waited too long", _stop_waiting
    ),
    ("queued", "attaching"): Step(
        "a plan gives it a slice; suspended state is restored, if it has any", _begin_attach
    ),
    ("attaching", "active"): Step("attached, and a hold is there", _attached),
    ("attaching", "idle"): Step("attached, but every hold was dropped meanwhile", _attached),
    ("attaching", "queued"): Step(
        "not attached (nothing lost); back to its old place", _back_to_queue
    ),
    ("attaching", "detached"): Step("not attached (nothing lost), and no hold is left", _give_up),
    ("active", "detached"): Step(
        "its processes are not on the GPU of the slice, and cannot be moved there", _not_landed
    ),
    ("active", "idle"): Step("the last hold is dropped", _rest),
    ("active", "detaching"): Step(
        "preempted while in use; the driver is asked to suspend, and the holds stay", _begin_preempt
    ),
    ("idle", "active"): Step("a hold is taken", _work),
    ("idle", "detaching"): Step(
        "idle time-out, pressure or release; the driver is asked to suspend", _begin_suspend
    ),
    ("detaching", "detached"): Step(
        "the device memory is free; the slice is back in the pool", _suspended_and_done
    ),
    ("detaching", "queued"): Step(
        "the slice is back in the pool, and a hold is there", _suspended_and_wanted
    ),
    ("detaching", "idle"): Step("the suspend was refused; the lease stays", _stays),
    ("detaching", "active"): Step("the suspend was refused, and a hold is there", _stays),
    ("detached", "ended"): Step("the process is gone", _end),
    ("queued", "ended"): Step("the process is gone", _end),
    ("attaching", "ended"): Step("the process is gone, or the driver lost its state", _end),
    ("active", "ended"): Step("the process is gone", _end),
    ("idle", "ended"): Step("the process is gone", _end),
    ("detaching", "ended"): Step("the process is gone, or the driver lost its state", _end),
}


# --------------------------------------------------------------------------- doing them


def move(
    facts: Facts, s: Session, new: State, reason: str, *told: object, **more: object
) -> Actions:
    """Make one step of the table; return the actions that follow from it.

    Raises
    ------
    InvalidTransition
        If the table has no such step.
    """
    old = s.state
    step = TRANSITIONS.get((old, new))
    if step is None:
        raise InvalidTransition(s, new, reason)
    with facts.change(s):
        s.story.append((facts.now, old, new, reason, s.epoch))
        follows = step.act(facts, s, *told, **more)
        s.state = new
        s.state_since = facts.now
    slices = s.lease.slices
    changed = StateChanged(
        session=s.id, now=facts.now, old=old, new=new, reason=reason, epoch=s.epoch, slices=slices
    )
    return [changed, *follows]


def grant(facts: Facts, s: Session, takes: tuple[Slice, ...], reason: str) -> Actions:
    """Give a session its slices and return the actions that put the lease into effect."""
    actions: Actions = []
    if s.state == "detached":
        actions += move(facts, s, "queued", reason, facts.now)
    return [*actions, *move(facts, s, "attaching", reason, takes)]


def resize(facts: Facts, s: Session, slices: tuple[Slice, ...]) -> Actions:
    """Change the size of a lease in place."""
    if slices == s.lease.slices:
        return []
    grows = any(x.bytes > old.bytes for x, old in zip(slices, s.lease.slices, strict=True))
    with facts.change(s):
        # The charge of a lease that shrinks must not rise, even if the request now has a higher
        # limit.
        facts.set_slices(s, slices, math.inf if grows else s.lease.charge)
    return [Resize(session=s.id, epoch=s.epoch, slices=slices)]


def grant_holds(s: Session) -> Actions:
    """Answer every hold of a session that is attached."""
    slices = s.lease.slices
    return [HoldGranted(session=s.id, hold=h, epoch=s.epoch, slices=slices) for h in s.holds]


def wish(facts: Facts, s: Session, gap: Gap) -> None:
    """Record that a session wants to work again, after a gap without work."""
    known = s.measured
    known.gap = None
    known.habits = residence.returned(known.habits, gap, facts.now, known.moving)
    if s.state == "idle":
        s.lease.stay = residence.kept_idle(s.lease.stay, gap, facts.now)


def refuse_holds(s: Session, refusal: Refusal) -> Actions:
    """Refuse and forget every hold of a session that is not attached."""
    holds, s.holds = s.holds, {}
    return [HoldRefused(session=s.id, hold=h, refusal=refusal) for h in holds]


def lose(facts: Facts, s: Session, message: str) -> Actions:
    """Refuse the holds of a session that the driver has lost, and end the session."""
    refusal = Refusal(
        Code.LOST, f"The GPU state of this kernel was lost: {message}", "Restart the kernel."
    )
    return [
        *refuse_holds(s, refusal),
        *move(facts, s, "ended", message, lost=True),
        EndSession(session=s.id, message=message),
    ]
