# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The plan: one pass over everybody who wants something, from the facts alone.

The algorithm
-------------
After every event, whatever it was, :func:`plan` looks at the whole machine and decides again. It
works on a :class:`~.placement.Draft` (a copy of the accounts) and returns a :class:`Plan`; the plan
minus the present are the actions (:mod:`.transitions` carries them out). In this order:

1. *Promises.* What the last plan promised, and suspends under way are making room for, is kept for
   whom it was promised, as far as it can still be kept.
2. *Leaving.* Idle leases whose time is over are suspended, if host memory has room.
3. *Queue.* For each session in :func:`order`: is it :func:`barred`? does its owner's quota allow
   it (if need be after the owner's own idle leases yield)? Then the first of these that works:
   what it is promised is free; it fits elsewhere in what is free (where it was last, else on the
   tightest device: :mod:`.placement`); its promise stands; it fits once suspends under way are
   done; it fits if the least disruptive victims yield (idle leases that no rule protects *now*,
   such as that of a lease just moved there: :mod:`.preemption`); it fits if somebody *behind* it
   gives up a promise made before it came.
   Else it is blocked, and the :class:`~.model.Reason` says by which rule.
4. *The head.* The first that is blocked for want of memory reserves devices (:func:`_reserve`).
   Those behind it are *backfilled*: served only where that delays the head in no case.
5. *Growth.* Attached sessions with less than they are guaranteed come after the queue.
6. *Relief.* If host memory is short, one suspended state goes back to a device that has room.

"Planning again at the same instant changes nothing" is a property that the tests check after every
event; :class:`~.machine.Pool` plans until it holds.

Four functions are the seams for other rules: :func:`order` (who goes first: fair share),
:func:`barred` (who must not be served now: schedules), :func:`~.preemption.victim_tier` (who may be
suspended, and for whom: preemption, time slices) and :func:`next_recheck` (when the clock alone
changes the plan).

Sources
-------
EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", 1995; the name and the analysis in
Mu'alem and Feitelson, 2001): jobs may overtake as long as they do not delay the *first* of the
queue. EASY derives the head's start from the run times that users declare. Nobody declares the
time of a notebook cell, so :meth:`~.placement.Room.spare` asks for more: no delay in any order in
which the present leases may end. KAI-Scheduler tries evictions and placements in a ``Statement``
that is committed or discarded as a whole; the draft and :class:`~.preemption.Trial` are that.
dask-gateway's controller reconciles: a wake-up only says "look again", so one too many is harmless
and none is needed for correctness. Dask.distributed's worker state machine maps (state, state) to
a function and returns instructions instead of acting (:mod:`.transitions`).

Rejected
--------
*Looking only at those whose case may have changed.* The pool did that: each rule had to announce
what it might have changed for whom, and each announcement that somebody forgot was a kernel that
waited without end. On 16 devices and 1,000 sessions a whole pass costs less than a millisecond.
*Reservations for everybody in the queue* (conservative backfilling): without run times each would
cost the memory of one session for as long as the head waits. *No reservation*: a large request
starves. *A new plan from nothing each time*, without promises: the victims of one session would
make room for another, and suspends would be wasted. *The best plan of all* (bin packing with
preemption is NP-hard): people can not predict it, and it moves more for little.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Iterable, Sequence

from ..states import ATTACHED
from .facts import Facts, Session, charge_of
from .limits import Charge
from .model import Reason, Slice
from .needs import Asking, asking
from .placement import Draft, Need, Reservation, choose
from .preemption import (
    WAITS,
    Blocked,
    Offer,
    Trial,
    asker_kind,
    attempt,
    blocked_as,
    candidate,
    leaves_at,
    paused,
    quota_reason,
    reservation,
    score,
    times,
)

HEAD = "the next kernel in the queue waits for memory"


@dataclass(slots=True)
class Plan:
    """What to do now, and what the next plan must know."""

    #: The waiting sessions, the first to go first.
    order: list[Session] = field(default_factory=list)
    grants: list[tuple[Session, tuple[Slice, ...], str]] = field(default_factory=list)
    grows: list[tuple[Session, tuple[Slice, ...]]] = field(default_factory=list)
    suspends: list[tuple[Session, str]] = field(default_factory=list)
    #: Bytes that suspends under way free, by the session that gets them.
    promises: dict[str, tuple[Slice, ...]] = field(default_factory=dict)
    #: How many had come to wait when each promise was made.
    made: dict[str, int] = field(default_factory=dict)
    #: Why whoever was not served was not.
    reasons: dict[str, Reason] = field(default_factory=dict)
    reservation: Reservation | None = None
    #: Owners with a session that waits for the owner's quota.
    held: set[str] = field(default_factory=set)
    #: Somebody was not served at once: what others have grown and do not use should go first.
    short: bool = False

    @property
    def complete(self) -> bool:
        """Whether everybody who wanted something has it, and is attached.

        Then to plan again would change nothing, if nothing was reserved before: nobody is left to
        serve, and what keeps an idle lease whose time is over (host memory, some of it kept for the
        head of the queue) has not become more by this plan.
        """
        return len(self.grants) == len(self.order) and not (
            self.grows or self.reasons or self.promises
        )

    @property
    def changes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.grants or self.grows or self.suspends)

    def settled(self, before: Plan) -> bool:
        """Whether to plan again could change nothing that ``before`` has not decided already."""
        return not self.changes and (
            self.promises == before.promises and _same(self.reservation, before.reservation)
        )


def _same(one: Reservation | None, other: Reservation | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.session == other.session and one.wanted == other.wanted


# --------------------------------------------------------------------------- the seams


def order(facts: Facts) -> list[Session]:
    """Return the waiting sessions, the first to go first.

    By points: the number of the priority class, plus one point for every ``ageing`` seconds of
    waiting, so nobody starves; all age alike, so who of two goes first never changes while both
    wait. Equal points: older first, then first come.
    """
    ageing, classes = facts.settings.ageing, facts.settings.priority_classes

    def rank(s: Session) -> tuple[float, float, int]:
        points = classes.get(s.request.priority, 0)
        place = s.queued_at / ageing - points if ageing > 0 else float(-points)
        return place, s.queued_at, s.wait.number

    return sorted(facts.waiting.values(), key=rank)


def barred(s: Session, facts: Facts) -> Reason | None:
    """Return why ``s`` must not be served now whatever is free, or None."""
    if s.wait.failed and s.retry_at > facts.now:
        return Reason("retry", text=s.wait.failed)
    return None


def next_recheck(facts: Facts, plan: Plan) -> float:
    """Return when the clock alone next changes the plan; infinity if it does not."""
    now, at = facts.now, math.inf
    wanted = bool(plan.order or facts.short)
    for s in facts.leased.values():
        if s.state == "idle":
            yields, leaves = times(s, facts)
            if now < leaves < at:
                at = leaves
            if wanted and now < yields < at:
                at = yields
    most = facts.settings.max_wait
    for s in plan.order:
        for when in (s.retry_at, math.inf if most is None else s.queued_at + most):
            if now < when < at:
                at = when
    if plan.reservation is not None and plan.reservation.next_at > now:
        at = min(at, plan.reservation.next_at)
    return at


# --------------------------------------------------------------------------- the pass


def plan(facts: Facts, before: Plan, relieve: Iterable[str] = ()) -> Plan:
    """Return what to do now. ``before`` is the last plan, ``relieve`` who is short of host memory.

    Changes nothing.
    """
    return _Pass(facts, before).run(relieve)


def outlook(facts: Facts, before: Plan, but: str = "") -> Draft:
    """Return what the last plan leaves: free bytes that nobody is promised or waits for first.

    ``but``: what this session is promised is left to it.
    """
    return _Pass(facts, before, but=but).draft


def forecast(facts: Facts, before: Plan, s: Session) -> tuple[Slice, ...]:
    """Return what ``s`` would get, or be promised, if it asked now; () if it would be blocked."""
    found = attempt(_Pass(facts, before).draft, s, asking(s, facts), guarded=True)
    return found.takes if isinstance(found, Offer) else ()


class _Pass:
    """One pass over the machine."""

    def __init__(self, facts: Facts, before: Plan, but: str = "") -> None:
        self.facts = facts
        self.plan = Plan(order=order(facts))
        self.draft = Draft(facts)
        self.turn = {s.id: at for at, s in enumerate(self.plan.order)}
        #: Requests that found nothing behind the head, by kind of request; see :meth:`_hopeless`.
        self.failed: dict[object, list[tuple[int, int, Reason]]] = {}
        self.before = before
        #: How many had come to wait when the oldest promise was made.
        self.oldest = min(before.made.values(), default=facts.arrivals)
        for s in facts.leased.values():
            if candidate(s, facts):
                for x in s.lease.slices:
                    room = self.draft.rooms[x.device]
                    room.candidates.append((s, x.bytes))
                    room.offered += x.bytes
        if before.promises:
            self._keep_promises(but)
        if before.reservation is not None:
            self._keep_reservation(before.reservation)

    # ------------------------------------------------------------------ 1. promises

    def _keep_promises(self, but: str) -> None:
        """Keep what was promised, as far as it is still what is needed and will be there."""
        facts, draft = self.facts, self.draft
        for name, takes in self.before.promises.items():
            s = facts.sessions.get(name)
            if s is None or name == but:
                continue
            if s.id in self.turn:
                needs, charge = asking(s, facts).needs, asking(s, facts).charge
            elif s.id in facts.short:
                needs, charge = _growth(s)
            else:
                continue
            if len(needs) == len(takes) and all(
                need.allows(room := draft.rooms[x.device]) and need.amount(room) == x.bytes
                for need, x in zip(needs, takes, strict=True)
            ):
                draft.promise(s, takes, charge)
        for room in draft.rooms.values():
            while room.promised and room.expect < 0:
                there = [n for n, (t, _) in draft.promises.items() if room.uuid in _on(t)]
                draft.unpromise(facts.sessions[max(there, key=self._place)])

    def _place(self, name: str) -> tuple[int, str]:
        """Return the order in which promises are kept: growth of leases, then the queue."""
        return self.turn.get(name, -1), name

    def _behind(self, s: Session) -> list[str]:
        """Return those in the queue behind ``s`` that have a promise, the last first."""
        mine, turn = self.turn[s.id], self.turn
        behind = [name for name in self.draft.promises if turn.get(name, -1) > mine]
        return sorted(behind, key=self._place, reverse=True)

    def _keep_reservation(self, held: Reservation) -> None:
        """Until the queue has been looked at, what the head reserved stays reserved."""
        if held.session not in self.turn:
            return
        head = self.facts.sessions[held.session]
        found = asking(head, self.facts)
        wanted = {}
        for uuid in held.wanted:
            room = self.draft.rooms[uuid]
            amounts = [need.amount(room) for need in found.needs if need.allows(room)]
            if amounts:
                wanted[uuid] = max(amounts)
        held = Reservation(head.id, wanted, len(found.needs), found.charge, held.next_at)
        self.draft.reserve(held, head.owner.name)

    def _drop_reservation(self, held: Reservation) -> None:
        memory, devices, leases = held.charge
        owner = self.facts.sessions[held.session].owner.name
        self.draft.usage(owner).add(-memory, -devices, -leases)
        self.draft.reservation = None

    # ------------------------------------------------------------------ the steps

    def run(self, relieve: Iterable[str]) -> Plan:
        plan, draft = self.plan, self.draft
        self._leave()
        if draft.reservation is not None:
            self._drop_reservation(draft.reservation)
        promised: list[Session] = []
        if draft.promises:
            promised = [s for s in self.facts.short.values() if s.id in draft.promises]
        for s in promised:
            self._grow(s)
        for s in plan.order:
            self._serve(s)
        for s in self.facts.short.values():
            if s not in promised:
                self._grow(s)
        if relieve:
            self._relieve(relieve)
        for name, (takes, _) in draft.promises.items():
            plan.promises[name] = takes
            kept = self.before.promises.get(name) == takes
            plan.made[name] = self.before.made[name] if kept else self.facts.arrivals
        plan.reservation = draft.reservation
        return plan

    def _leave(self) -> None:
        """2. Suspend idle leases whose time is over, as far as host memory has room."""
        facts, draft = self.facts, self.draft
        for s in facts.leased.values():
            if s.state != "idle" or leaves_at(s, facts) > facts.now:
                continue
            room = draft.host_left([x.device for x in s.lease.slices])
            if draft.host_fits([s], room):
                self._suspend(s, paused(s, facts) or ("release" if s.release_asked else "idle"))

    def _suspend(self, v: Session, reason: str) -> None:
        self.draft.suspend(v, reason)
        self.plan.suspends.append((v, reason))
        # More is to come there than whoever failed before could count on.
        self.failed.clear()

    # ------------------------------------------------------------------ 3. the queue

    def _serve(self, s: Session) -> None:
        """Serve ``s`` or plan for it, or note why it waits."""
        plan, draft, facts = self.plan, self.draft, self.facts
        found = asking(s, facts)
        why = barred(s, facts)
        if why is not None:
            plan.reasons[s.id] = why
            return
        if s.id in draft.promises and self._kept(s, found):
            return
        if s.owner.name in plan.held:
            plan.reasons[s.id] = Reason("behind-own")
            return
        if found.impossible is not None:
            plan.reasons[s.id] = found.impossible
            plan.short = True
            return
        guarded = draft.reservation is not None
        why = self._hopeless(s, found) if guarded else None
        if why is not None:
            plan.reasons[s.id] = why
            plan.short = True
            return
        offer = attempt(draft, s, found, guarded=guarded)
        if draft.promises and not (isinstance(offer, Offer) and not offer.victims):
            offer = self._overtake(s, found, offer, guarded=guarded)
        if isinstance(offer, Offer):
            self._accept(s, offer, found.charge)
            return
        plan.reasons[s.id] = offer.reason
        plan.short = True
        self._note_failure(s, found, offer)
        if offer.quota:
            plan.held.add(s.owner.name)
        elif not guarded:
            self._reserve(s, found)

    def _kept(self, s: Session, found: Asking) -> bool:
        """Serve ``s``, which has a promise, or let it go on waiting; False if the promise is void.

        Promises of those behind it do not delay it.
        """
        draft = self.draft
        behind = self._behind(s)
        takes, charge = draft.unpromise(s)
        owner = s.owner.name
        if draft.lacking(owner, charge) is None:
            late = dict.fromkeys(_on(takes), 0)
            for name in behind:
                for x in draft.promises[name][0]:
                    if x.device in late:
                        late[x.device] += x.bytes
            if all(draft.rooms[x.device].avail + late[x.device] >= x.bytes for x in takes):
                self._accept(s, Offer(takes, ready=True), charge)
                return True
            elsewhere = draft.now(s, found.needs)
            if elsewhere is not None:
                self.failed.clear()
                self._accept(s, Offer(elsewhere, ready=True), found.charge)
                return True
        elif draft.lacking(owner, charge, draft.coming_back(owner)) is not None:
            self.failed.clear()
            return False
        self._accept(s, Offer(takes), charge)
        return True

    def _accept(self, s: Session, offer: Offer, charge: Charge) -> None:
        plan, draft = self.plan, self.draft
        for v in offer.victims:
            self._suspend(v, offer.reason)
        if offer.ready:
            draft.take(s, offer.takes, charge)
            plan.grants.append((s, offer.takes, "a slice is free"))
        else:
            draft.promise(s, offer.takes, charge)
            plan.reasons[s.id] = Reason("planned", devices=_on(offer.takes))
            plan.short = True

    def _overtake(
        self, s: Session, found: Asking, offer: Offer | Blocked, *, guarded: bool
    ) -> Offer | Blocked:
        """Let ``s`` use what was promised to those behind it: to the last that will do, or to all.

        Nobody behind it loses a promise in vain.
        """
        draft, sessions = self.draft, self.facts.sessions
        behind = self._newer(s, found)
        if not behind:
            return offer
        alone = next((name for name in behind if self._enough(found.needs, name)), None)
        for names in ([alone], behind) if alone is not None else (behind,):
            taken = {name: draft.unpromise(sessions[name]) for name in names}
            other = attempt(draft, s, found, guarded=guarded)
            if isinstance(other, Offer):
                self.failed.clear()
                return other
            for name, (takes, charge) in taken.items():
                draft.promise(sessions[name], takes, charge)
        return offer

    def _newer(self, s: Session, found: Asking) -> list[str]:
        """Return those behind ``s`` whose promises it may take over, the last first.

        They were made before ``s`` came to wait. A later one was made although ``s`` was ahead,
        because ``s`` could not use it: it is not taken back, and the suspends for it are not in
        vain. [] if all of them, with all that may yield, would not be enough for one slice: then no
        way to place it needs a look, for nothing else can come free.
        """
        made, draft = self.before.made, self.draft
        if s.wait.number <= self.oldest:
            return []
        behind = [n for n in self._behind(s) if made.get(n, s.wait.number) < s.wait.number]
        owners = {self.facts.sessions[name].owner.name for name in behind}
        quota = found.where is None and s.owner.name in owners  # which they would give up as well
        if not behind or quota or len(found.needs) != 1:
            return behind
        need, more = found.needs[0], dict[str, int]()
        for name in behind:
            for x in draft.promises[name][0]:
                more[x.device] = more.get(x.device, 0) + x.bytes
        for uuid, size in more.items():
            room = draft.rooms[uuid]
            most = room.expect + size + room.offered
            if need.allows(room) and most >= need.least:
                return behind
        return []

    def _enough(self, needs: Sequence[Need], name: str) -> bool:
        """Return whether what is promised to ``name`` would be enough for one need."""
        rooms = self.draft.rooms
        return len(needs) == 1 and any(
            needs[0].allows(room := rooms[x.device])
            and x.bytes + room.expect >= needs[0].amount(room)
            for x in self.draft.promises[name][0]
        )

    def _hopeless(self, s: Session, found: Asking) -> Reason | None:
        """Return why ``s`` is blocked if somebody before it found nothing for no more; else None.

        What is skipped could not have succeeded. Since that one failed, the draft has only lost:
        whatever lets it gain (a suspend, a promise that moves or is void) forgets the failures.
        ``s`` asks for no less of the same devices, in one slice, and without a quota, and
        :func:`asker_kind` says that the same victims are open to it. Every step of
        :func:`attempt` that finds room for an amount finds it for a smaller one: free bytes,
        greedy victims in a fixed order, and the combinations, whose options are then the same.
        And it has no promise to take over that the other one could not have.
        """
        if found.where is None or (self.draft.promises and self._newer(s, found)):
            return None
        key, need = (found.where, asker_kind(s)), found.needs[0]
        for least, size, why in self.failed.get(key, ()):
            if need.least >= least and need.bytes >= size:
                rule = blocked_as(self.draft, s, need, why.rule)
                return Reason(rule, bytes=s.request.memory, count=1)
        return None

    def _note_failure(self, s: Session, found: Asking, blocked: Blocked) -> None:
        if found.where is not None:
            key, need = (found.where, asker_kind(s)), found.needs[0]
            self.failed.setdefault(key, []).append((need.least, need.bytes, blocked.reason))

    # ------------------------------------------------------------------ 4. the head

    def _reserve(self, s: Session, found: Asking) -> None:
        """Reserve devices for ``s``, the first that is blocked for want of memory.

        After ``ageing`` seconds as the head it also *accumulates*: idle leases there yield although
        that alone is not enough (else two sessions in turns would keep it out).
        """
        before = self.before.reservation
        keep = before.wanted if before is not None and before.session == s.id else ()
        held, late = reservation(self.draft, s, found, keep)
        self.draft.reserve(held, s.owner.name)
        if late:
            self._accumulate(s, held)

    def _accumulate(self, s: Session, held: Reservation) -> None:
        draft = self.draft
        for uuid, size in held.wanted.items():
            trial = Trial(draft, s, draft.host)
            room = draft.rooms[uuid]
            now = self.facts.now
            for _, v, _ in sorted(trial.options(room), key=lambda o: (o[0], score(o[1], now))):
                if room.expect < size and draft.host_fits([v], draft.host):
                    self._suspend(v, HEAD)

    # ------------------------------------------------------------------ 5. growth

    def _grow(self, s: Session) -> None:
        """Give an attached session what it is guaranteed beyond what it has, or plan for it."""
        plan, draft = self.plan, self.draft
        if s.state not in ATTACHED or s.id in draft.leaving:
            return
        needs, charge = _growth(s)
        if s.id in draft.promises:
            takes, _ = draft.unpromise(s)
            if all(draft.rooms[x.device].avail + self._late(x.device) >= x.bytes for x in takes):
                self._grown(s, takes, charge)
            else:
                draft.promise(s, takes, charge)
                plan.short = True
            return
        name = draft.lacking(s.owner.name, charge)
        if name is not None:
            plan.reasons[s.id] = quota_reason(draft, s, name, besides=1)
            plan.short = True
            return
        takes_now = choose(needs, draft.rooms, draft.left)
        if takes_now is not None:
            self._grown(s, takes_now, charge)
            return
        plan.short = True
        trial = Trial(draft, s, draft.host_left())
        if trial.place(needs):
            for v in trial.chosen:
                self._suspend(v, WAITS)
            draft.promise(s, trial.takes, charge)
        else:
            plan.reasons[s.id] = Reason("busy", bytes=s.request.memory, count=len(needs))

    def _late(self, uuid: str) -> int:
        """Return the bytes promised on a device to sessions of the queue."""
        return sum(
            x.bytes
            for name, (takes, _) in self.draft.promises.items()
            if name in self.turn
            for x in takes
            if x.device == uuid
        )

    def _grown(self, s: Session, takes: Iterable[Slice], charge: Charge) -> None:
        self.draft.take(s, takes, charge)
        more = {x.device: x.bytes for x in takes}
        slices = (Slice(x.device, x.bytes + more.get(x.device, 0)) for x in s.lease.slices)
        self.plan.grows.append((s, tuple(slices)))

    # ------------------------------------------------------------------ 6. relief

    def _relieve(self, names: Iterable[str]) -> None:
        """Resume the largest suspended state that is short of host memory, if nobody yields for it.

        One at a time: it may be enough.
        """
        facts, draft = self.facts, self.draft
        found = [facts.sessions[name] for name in names if name in facts.sessions]
        if any(s.state == "attaching" for s in found):
            return
        away = [s for s in found if s.state == "detached" and s.retry_at <= facts.now]
        for s in sorted(away, key=lambda s: (-s.suspended_bytes, s.id)):
            charge = asking(s, facts).charge
            if not s.suspended or s.owner.name in self.plan.held:
                continue
            takes = None
            if draft.lacking(s.owner.name, charge) is None:
                takes = draft.now(s, asking(s, facts).needs)
            if takes is not None:
                self.plan.grants.append((s, takes, "host memory is short"))
                return


def _on(takes: Iterable[Slice]) -> tuple[str, ...]:
    return tuple(x.device for x in takes)


def _growth(s: Session) -> tuple[tuple[Need, ...], Charge]:
    """Return what an attached session is guaranteed beyond what it has, and the charge of that."""
    memory = s.request.memory
    needs = tuple(
        Need(more, more, fixed=x.device) for x in s.lease.slices if (more := memory - x.bytes) > 0
    )
    goal = tuple(Slice(x.device, max(x.bytes, memory)) for x in s.lease.slices)
    return needs, (charge_of(s, goal) - s.lease.charge, 0, 0)
