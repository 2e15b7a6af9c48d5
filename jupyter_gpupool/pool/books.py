# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The state of the pool, and the steps that keep its accounts in agreement.

Every step here changes a session *and* the device, host, quota and queue accounts it is counted in,
and writes the actions that follow. Nothing outside this file changes them.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

from .claims import Claim
from .estimate import Estimates
from .events import (
    Action,
    Attach,
    EndSession,
    HoldGranted,
    HoldRefused,
    Log,
    Resize,
    StateChanged,
    Suspend,
)
from .inventory import HostLedger, Inventory
from .lanes import Lanes
from .lease import ATTACHED, Session
from .model import PoolSettings, Refusal, Slice, State
from .placement import groups_of, needs_of
from .policy import Plan
from .queue import Entry, WaitQueue, rank
from .quota import Quotas
from .timers import Timers
from .yielding import host_bound, host_room, stays_until, timeout_at, yield_at

#: Seconds before a session is tried again after a failed attach or a refused suspend; doubled with
#: every further failure, up to ``BACK_OFF_MOST``. ``drain`` and ``host`` begin later because work
#: and memory pressure last longer than a race with the next cell.
BACK_OFF = {"attach": 1.0, "busy": 1.0, "drain": 10.0, "host": 10.0}
BACK_OFF_MOST = 60.0


class Books(Lanes):
    """Everything the pool knows."""

    def __init__(self, settings: PoolSettings) -> None:
        super().__init__(Quotas(settings))
        self.settings = settings
        self.now = -math.inf
        self.sessions: dict[str, Session] = {}
        self.inventory = Inventory()
        self.host = HostLedger(settings.host_memory)
        self.estimates = Estimates()
        self.timers = Timers()
        #: All waiting sessions.
        self.order = WaitQueue()
        #: Idle sessions whose time is over but whose state does not fit in host memory now.
        self.leaving: dict[str, Session] = {}
        #: By idle session: why its last suspend was refused for want of host memory.
        self.roomless: dict[str, str] = {}
        #: Idle sessions that may not be taken only because they have just been moved.
        self.staying: dict[str, Session] = {}
        #: Leased sessions by owner: an owner's own idle ones may make room in the quota.
        self.leased: dict[str, dict[str, Session]] = {}
        #: Leased sessions with more than is guaranteed on some device.
        self.grown: dict[str, Session] = {}
        #: What the head of the queue accumulates memory on.
        self.claim: Claim | None = None
        self.active = 0
        self.actions: list[Action] = []
        #: The head must be looked at again although nothing came free.
        self.recheck_head = False
        self._numbers = 0

    # ------------------------------------------------------------------ actions

    def emit(self, action: Action) -> None:
        self.actions.append(action)

    def log(self, session: str, level: Any, code: str, message: str) -> None:
        self.emit(Log(session=session, level=level, code=code, message=message))

    # ------------------------------------------------------------------ states

    def move(self, s: Session, new: State, reason: str) -> None:
        """Make one transition: count it, tell it, set the alarm that goes with the new state."""
        old = s.move(new, self.now, reason)
        if old == "active":
            self.active -= 1
        if old == "active" and s.slices:
            self.estimates.busy(s, self.now - s.busy_since)
        if old == "idle":
            self._withdraw(s)
            self.leaving.pop(s.id, None)
            self.staying.pop(s.id, None)
        if new == "active":
            self.active += 1
            s.busy_since = self.now
            self.roomless.pop(s.id, None)
        if new == "idle":
            s.idle_since = self.now
        self.emit(
            StateChanged(
                session=s.id,
                now=self.now,
                old=old,
                new=new,
                reason=reason,
                epoch=s.epoch,
                slices=s.slices,
            )
        )
        self.offer(s)

    def offer(self, s: Session) -> None:
        """Count an idle lease among those that may be taken, if it may; set the next alarm."""
        wake = math.inf
        if s.state == "idle":
            s.state_bound = host_bound(s)
            may = yield_at(s, self)
            if may <= self.now and not s.yieldable:
                s.yieldable = True
                self.inventory.offer(s, 1)
                self.quotas.note(s.owner.name)
                self.staying.pop(s.id, None)
            elif may > self.now:
                self._withdraw(s)
                wake = may
                if may == stays_until(s, self):
                    self.staying[s.id] = s
                else:
                    self.staying.pop(s.id, None)
            if s.id not in self.leaving:
                wake = min(wake, timeout_at(s, self))
        elif s.state == "queued":
            if self.settings.max_wait is not None:
                wake = s.queued_at + self.settings.max_wait
            if s.lane == "later":
                wake = min(wake, s.retry_at)
            if self.claim is not None and self.claim.session == s.id:
                wake = min(wake, self.claim.next_at)
        self.timers.set(s, wake)

    def _withdraw(self, s: Session) -> None:
        if s.yieldable:
            s.yieldable = False
            self.inventory.offer(s, -1)

    # ------------------------------------------------------------------ the queue

    def enqueue(self, s: Session, since: float) -> None:
        """Put ``s`` (just moved to queued) in the queue, with the age it has."""
        s.queued_at = since
        self._numbers += 1
        s.entry = self._entry(s, self._numbers)
        self.order.add(s.entry)
        self.set_lane(s, "fresh")
        self.offer(s)

    def requeue(self, s: Session) -> None:
        """Give a waiting session the place that its (changed) request deserves."""
        assert s.entry is not None
        number = s.entry[2]
        if self.claim is not None and self.claim.session == s.id:
            self.recheck_head = True
        self.drop_plan(s)
        self.set_lane(s, "")
        self.order.remove(s.entry)
        s.entry = self._entry(s, number)
        self.order.add(s.entry)
        self.set_lane(s, "fresh")
        self.offer(s)

    def dequeue(self, s: Session) -> None:
        """Take ``s`` out of the queue, its plan and claim with it."""
        assert s.entry is not None
        if self.claim is not None and self.claim.session == s.id:
            self.set_claim(None)
        self.drop_plan(s)
        self.set_lane(s, "")
        self.order.remove(s.entry)
        s.entry = None
        s.head_since = None
        s.why = ()
        s.told = None

    def _entry(self, s: Session, number: int) -> Entry:
        settings = self.settings
        place = rank(s.queued_at, s.request.priority, settings.priority_classes, settings.ageing)
        s.needs = needs_of(s, self.inventory, settings)
        s.groups = groups_of(s.needs)
        # With the headroom, unless some device is so small that it would be the whole of it.
        smallest = self.inventory.smallest()
        least = min(n.least if n.at_origin or n.bytes > smallest else n.bytes for n in s.needs)
        return place, s.queued_at, number, least, s.id

    # ------------------------------------------------------------------ plans and claims

    def begin_plan(self, s: Session, plan: Plan) -> None:
        """Promise ``plan.takes`` and begin the suspends that it needs."""
        s.plan = plan
        self.inventory.reserve(s, plan.takes, 1)
        self.quotas.charge(s.owner.name, plan.charge, plan.devices, plan.leases, 1)
        if s.entry is not None:
            self.set_lane(s, "planned")
            self.planned[s.id] = s
        for victim in plan.victims:
            self.suspend(self.sessions[victim], plan.reason)

    def drop_plan(self, s: Session) -> None:
        """Take the promise back; suspends under way go on."""
        plan, s.plan = s.plan, None
        if plan is None:
            return
        self.inventory.reserve(s, plan.takes, -1)
        self.quotas.charge(s.owner.name, plan.charge, plan.devices, plan.leases, -1)
        self.planned.pop(s.id, None)

    def set_claim(self, claim: Claim | None) -> None:
        """Let the head of the queue accumulate memory on the devices of ``claim``."""
        old, self.claim = self.claim, claim
        self.inventory.watched = {} if claim is None else claim.wanted
        same = old is not None and claim is not None and old.session == claim.session
        if not same or _cost(old) != _cost(claim):
            for change, sign in ((old, -1), (claim, 1)):
                if change is not None:
                    self.quotas.charge(change.owner, change.charge, change.devices, 1, sign)
        if old is not None:
            for uuid, wanted in old.wanted.items():
                if claim is None or claim.wanted.get(uuid) != wanted:
                    self.inventory.nudge(uuid)
            if claim is None or claim.session != old.session:
                session = self.sessions.get(old.session)
                if session is not None:
                    self.offer(session)
        if claim is not None:
            self.offer(self.sessions[claim.session])

    # ------------------------------------------------------------------ leases

    def grant(self, s: Session, takes: Sequence[Slice], reason: str) -> None:
        """Give a waiting session its slices and ask the driver to make it true."""
        self.dequeue(s)
        s.epoch += 1
        s.attached_at = self.now
        s.retry_at = 0.0
        self._set_slices(s, tuple(takes))
        self.leased.setdefault(s.owner.name, {})[s.id] = s
        self.estimates.holds(s, 1)
        self.move(s, "attaching", reason)
        origin = tuple(x.device for x in s.suspended)
        self.emit(Attach(session=s.id, epoch=s.epoch, slices=s.slices, origin=origin))

    def return_lease(self, s: Session) -> None:
        """Give the slices back to the pool."""
        self._grow_over(s)
        s.last_devices = tuple(x.device for x in s.slices)
        s.attached_total += self.now - s.attached_at
        self._set_slices(s, ())
        s.footprints = {}
        s.footprint = 0
        s.sampled_at = s.grown_at = s.rose_at = -math.inf
        s.measured_at.clear()
        s.restored = {}
        s.resumed_at = -math.inf
        leases = self.leased[s.owner.name]
        del leases[s.id]
        if not leases:
            del self.leased[s.owner.name]
        self.estimates.holds(s, -1)

    def adopt(self, s: Session) -> None:
        """Count a recovered session's lease and suspended state as they are."""
        if s.slices:
            slices, s.slices = s.slices, ()
            for x in slices:
                self.inventory.placeholder(x.device)
            self._set_slices(s, slices, force=True)
            self.leased.setdefault(s.owner.name, {})[s.id] = s
            self.estimates.holds(s, 1)
        self.take_suspended(s, s.suspended)
        if s.state == "active":
            self.active += 1
        self.offer(s)

    def resize(self, s: Session, slices: Sequence[Slice]) -> None:
        """Change the size of a lease in place, and tell the runner."""
        self._grow_over(s)
        self._withdraw(s)
        held = {x.device: x.bytes for x in s.slices}
        for x in slices:
            more = x.bytes - held[x.device]
            if more > 0 and self.inventory[x.device].free < more:
                raise ValueError(f"{more} more bytes are not free on {x.device}")
        grows = any(x.bytes > held[x.device] for x in slices)
        # What stays is a fact, even where the free bytes are below zero.
        self._set_slices(s, tuple(slices), force=True, most=math.inf if grows else s.charge)
        self.offer(s)
        self.emit(Resize(session=s.id, epoch=s.epoch, slices=s.slices))

    def _set_slices(
        self,
        s: Session,
        slices: tuple[Slice, ...],
        *,
        force: bool = False,
        most: float = math.inf,
    ) -> None:
        owner = s.owner.name
        if s.slices:
            self.inventory.give_back(s.id, s.slices)
            self.quotas.charge(owner, s.charge, len(s.slices), 1, -1)
        s.slices = slices
        s.granted = sum(x.bytes for x in slices)
        # By the request at this moment: a later one counts when the lease has changed with it.
        s.charge = 0
        if slices:
            # A lease that becomes smaller is not charged more, whatever the limit has become.
            charge = s.charge_of(slices)
            s.charge = charge if charge < most else int(most)
            self.inventory.take(s.id, slices, force=force)
            self.quotas.charge(owner, s.charge, len(slices), 1, 1)
        self.note_grown(s)

    def note_grown(self, s: Session) -> None:
        """Remember whether a session has more than it is guaranteed."""
        if any(x.bytes > s.request.memory for x in s.slices):
            self.grown[s.id] = s
        else:
            self.grown.pop(s.id, None)

    def _grow_over(self, s: Session) -> None:
        self.drop_plan(s)
        if s.growing:
            s.growing = False
            for x in s.slices:
                self.inventory[x.device].growers.pop(s.id, None)

    def grow_later(self, s: Session) -> None:
        """Remember that ``s`` asks for more than it has."""
        s.growing = True
        for x in s.slices:
            self.inventory[x.device].growers[s.id] = s

    def note_growth(self, s: Session) -> None:
        """Remember whether an attached session still asks for more than it has."""
        if any(x.bytes < s.request.memory for x in s.slices):
            self.grow_later(s)

    # ------------------------------------------------------------------ suspended state

    def may_suspend(self, s: Session) -> bool:
        """Return whether the state of ``s`` has room in host memory and in its owner's quota."""
        bound = s.state_bound
        if s.pressed and bound:
            return False
        room = host_room(self, [x.device for x in s.slices], guarded=True)
        own = self.quotas.suspend_room(s.owner.name)
        return not bound or (bound <= room and (own is None or bound <= own))

    def suspend(self, s: Session, reason: str) -> None:
        """Ask for the suspend of an idle session; its lease counts until that is done."""
        s.host_bound = s.state_bound
        self.host.begin(s.host_bound)
        self.quotas.suspended(s.owner.name, s.host_bound)
        self.drop_plan(s)
        self.move(s, "detaching", reason)
        self.inventory.going(s.slices, 1)
        # What it is charged will come back: a session held up by the quota can be planned for.
        self.quotas.note(s.owner.name)
        self.emit(Suspend(session=s.id, epoch=s.epoch, slices=s.slices, reason=reason))

    def suspend_over(self, s: Session, actual: int | None) -> None:
        """The suspend is done with ``actual`` host bytes taken, or (None) nothing happened."""
        self.inventory.going(s.slices, -1)
        self._host_over(s, actual)

    def _host_over(self, s: Session, actual: int | None) -> None:
        bound, s.host_bound = s.host_bound, 0
        self.quotas.note(s.owner.name)
        if actual is None:
            self.host.cancel(bound)
            self.quotas.suspended(s.owner.name, -bound)
        else:
            self.host.finish(bound, actual)
            self.quotas.suspended(s.owner.name, actual - bound)

    def take_suspended(self, s: Session, state: tuple[Slice, ...]) -> None:
        """Count state that was suspended without the pool's asking for it."""
        s.suspended = state
        for x in state:
            self.inventory.placeholder(x.device)
        if state:
            self.host.add(s.suspended_bytes)
            self.quotas.suspended(s.owner.name, s.suspended_bytes)

    def drop_suspended(self, s: Session) -> None:
        """The state is on a device again, or gone with its process: its host bytes are free."""
        size = s.suspended_bytes
        s.suspended = ()
        if size:
            self.host.free(size)
            self.quotas.suspended(s.owner.name, -size)

    # ------------------------------------------------------------------ holds

    def grant_holds(self, s: Session) -> None:
        """Answer every hold of a session that has just been attached."""
        for hold in s.holds:
            self.emit(HoldGranted(session=s.id, hold=hold, epoch=s.epoch, slices=s.slices))

    def refuse_holds(self, s: Session, refusal: Refusal) -> None:
        """Refuse and forget every hold of a session that is not attached."""
        for hold in s.holds:
            self.emit(HoldRefused(session=s.id, hold=hold, refusal=refusal))
        s.holds.clear()

    # ------------------------------------------------------------------ the end

    def lose(self, s: Session, message: str) -> None:
        """The driver lost the session: it must end.

        Until its process is gone, it may still hold all of its lease and its host bytes, so these
        go on counting.
        """
        if s.state == "detaching":
            self.inventory.going(s.slices, -1)
            self.quotas.note(s.owner.name)
        self._grow_over(s)
        self.refuse_holds(
            s,
            Refusal(
                "lost",
                f"The GPU state of this kernel was lost: {message}",
                "Restart the kernel.",
            ),
        )
        self.move(s, "ended", message)
        self.emit(EndSession(session=s.id, message=message))

    def remove(self, s: Session, reason: str) -> None:
        """The process is gone: free everything that it had."""
        if s.state == "queued":
            self.dequeue(s)
        if s.state == "detaching":
            self.inventory.going(s.slices, -1)
        self._host_over(s, None)
        if s.state not in ATTACHED:
            self.refuse_holds(s, _ENDED)
        s.holds.clear()
        self._withdraw(s)
        if s.slices:
            self.return_lease(s)
        self.drop_suspended(s)
        if s.state != "ended":
            self.move(s, "ended", reason)
        self.timers.set(s, math.inf)
        s.timer = math.inf
        self.leaving.pop(s.id, None)
        self.roomless.pop(s.id, None)
        del self.sessions[s.id]


def _cost(claim: Claim | None) -> tuple[int, int] | None:
    return None if claim is None else (claim.charge, claim.devices)


_ENDED = Refusal("session-ended", "The kernel has ended.")
