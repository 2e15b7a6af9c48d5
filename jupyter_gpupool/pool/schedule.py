# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The plan: one pass over every session that wants something, from the facts alone.

The algorithm
-------------
After every event, :func:`plan` looks at the whole machine and decides again. It works on a
:class:`~.draft.Draft` (a copy of the accounts) and returns a :class:`Plan`, whose changes become
the actions (:mod:`.transitions`). The pass has these steps, in this order:

1. *Promises.* The last plan promised some sessions the room that suspends under way make. The pass
   keeps each of these promises that it still can.
2. *Leaving.* The pass suspends two kinds of leases, if host memory has room. The first are leases
   that must not run: an admin has recalled them, their class is closed, or a used-up budget stops
   them. They may also take the host memory that is kept for the head. The second are idle leases
   whose idle time-out is over.
3. *Queue.* The pass puts two kinds of sessions in one order, by guarantees, budgets,
   classes, fair shares and age (:mod:`.shares`): sessions that wait for a lease, and attached
   sessions that have less memory than is guaranteed to them. For each session the pass first checks
   whether it is :func:`barred`. Then it checks whether the quota of the owner and the caps of the
   groups allow the session (possibly only after preempting leases that count there). Then the pass
   takes the first of these ways that works:

   * The bytes promised to the session are free.
   * The session fits in free memory: on the devices of its last lease, else on the tightest device
     (:mod:`.placement`).
   * The session keeps its promise, and waits for the suspends under way.
   * The session will fit when the suspends under way are done.
   * The session fits if the pool preempts the least disruptive victims (:mod:`.victims`). These are
     first idle leases that no rule protects *now* (a rule protects a lease that was just moved, for
     example). Leases in use follow, by the tiers of :mod:`.running`: burst, guarantee, class, turn.
   * The session fits if sessions *behind* it give up promises that the pool made before the session
     began to wait.

   If no way works, the session is blocked, and the :class:`~.model.Reason` names the rule.
4. *The head.* The first session that is blocked for lack of memory reserves devices
   (:func:`~.victims.reservation`). Sessions behind the head are *backfilled*: the pass serves them
   only where this can never delay the head.
5. *Growth of idle leases* comes last in the order and reserves nothing, because these leases
   compute nothing. A session in use that wants to grow waits in the queue like a session without a
   lease: its age counts, and it may become the head.
6. *Relief.* If host memory is short, one suspended state goes back to a device that has room.

After an event, :class:`~.machine.Pool` plans until a new plan at the same instant changes nothing.
The tests check this property after every event.

To understand a decision, read four modules: :mod:`.metering` (what counts as used),
:mod:`.shares` (the order of service, and why no session starves), :mod:`.running` (which session
loses a slice in use, for which session and from what time), and :mod:`.unsuspendable` (what happens
to a session that cannot be suspended).

To change a rule, change one of four functions: :meth:`.shares.Shares.order` (the order of service:
fair share), :func:`barred` (which session must not be served now: budgets, closed classes),
:func:`~.preemption.victim_tier` (which lease may be preempted for which session: preemption of
running work, time slices) and :func:`~.recheck.next_recheck` (when time changes the plan).

Sources
-------
EASY backfilling (Lifka, "The ANL/IBM SP Scheduling System", 1995; the name and the analysis are in
Mu'alem and Feitelson, 2001): jobs may overtake as long as they do not delay the *first* job of the
queue. EASY computes the head's start from the run times that users declare. Users of notebooks
declare no run time, so :meth:`~.draft.Room.spare` is stricter: in whatever order the present leases
end, the head must not start later. KAI-Scheduler tries evictions and placements in a ``Statement``,
and then commits or discards the whole statement. The draft and :class:`~.victims.Trial` do the
same. The controller of dask-gateway reconciles: a wake-up only means "look again", so a lost or an
extra wake-up does no harm. The worker state machine of Dask.distributed maps (state, state) to a
function and returns instructions instead of acting (:mod:`.transitions` does the same).

Rejected
--------
*A pass over only the sessions that an event may have affected.* The pool once did this: each rule
had to announce the sessions that it might affect, and if a rule forgot a session, its kernel waited
without end. On 16 devices and 1,000 sessions a whole pass takes a few milliseconds. *Reservations
for every session in the queue* (conservative backfilling): without run times, each reservation
would cost the memory of one session for as long as the head waits. *No reservation*: a large
request starves. *Growth after the queue*: a busy kernel that asked for a larger guarantee starved
behind short cells. *A completely new plan each time*, without promises: the victims of one session
would make room for another session, and suspends would be wasted. *The optimal plan* (bin packing
with preemption is NP-hard): people cannot predict it, and it moves more state for little gain.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Iterable

from ..states import ATTACHED
from .draft import Draft, Promise, Reservation
from .facts import Facts
from .model import FOR_MEMORY, FOR_QUOTA, Charge, Reason, Slice
from .placement import Asking, asking
from .preemption import leaving, not_before, paused, score
from .reach import Reach
from .running import REASONS, RECALLED, STOPPED, free_from, rule_of
from .session import Session
from .shares import Shares
from .victims import Offer, Trial, attempt, make_room, reservation

SPENT = "the GPU-seconds of today are used up"
CLOSED = "kernels of its priority class get no GPU at this time"
HEAD = "the next kernel in the queue waits for memory"


@dataclass(slots=True)
class Plan:
    """The result of a pass: what the pool does now, and what the next pass must know."""

    #: Every session that wants something, in the order of service.
    order: list[Session] = field(default_factory=list)
    #: The sessions in ``order`` that wait for a lease.
    queue: list[Session] = field(default_factory=list)
    grants: list[tuple[Session, tuple[Slice, ...], str]] = field(default_factory=list)
    grows: list[tuple[Session, tuple[Slice, ...]]] = field(default_factory=list)
    #: Each victim with a reason and a tier: the tier of a lease in use, or 0 for an idle lease.
    suspends: list[tuple[Session, str, int]] = field(default_factory=list)
    #: For each session with a promise: the bytes that suspends under way free for it.
    promises: dict[str, Promise] = field(default_factory=dict)
    #: For each session that was not served: the reason.
    reasons: dict[str, Reason] = field(default_factory=dict)
    reservation: Reservation | None = None
    #: Owners with a session that waits for the owner's quota, and groups with a session that waits
    #: for the group's cap.
    held: set[str] = field(default_factory=set)
    held_groups: set[str] = field(default_factory=set)
    #: Whether some reason names a limit.
    limited: bool = False
    #: Whether the order, or the set of leases that may be preempted, may change because the usage
    #: of owners changes over time.
    contended: bool = False

    @property
    def short(self) -> bool:
        """Whether a session was not served.

        If so, the pool first takes back unused growth of other sessions and plans again.
        """
        return any(why.rule != "retry" for why in self.reasons.values())

    @property
    def complete(self) -> bool:
        """Whether this plan grants a lease to every session that wanted something.

        If so, another plan would change nothing, except if the plan before had a reservation. Its
        host memory is free for the next plan, which may then suspend more idle leases.
        """
        return len(self.grants) == len(self.order) and not (self.reasons or self.promises)

    def behind(self, s: Session, facts: Facts) -> Reason | None:
        """Return why ``s`` waits behind an earlier session, or None.

        The earlier session waits for the quota of the same owner or for the cap of the same group.
        """
        if s.owner.name in self.held:
            return Reason("behind-own")
        for group in facts.tree.capped(s.owner.group) if self.held_groups else ():
            if group in self.held_groups:
                return Reason("behind-group", group=group)
        return None

    @property
    def changes(self) -> bool:
        """Whether the plan changes any lease."""
        return bool(self.grants or self.grows or self.suspends)

    def settled(self, before: Plan) -> bool:
        """Whether another plan would change nothing; ``before`` is the plan before this plan."""
        return (
            not self.changes
            and self.promises == before.promises
            and _devices(self.reservation) == _devices(before.reservation)
        )


def _devices(held: Reservation | None) -> object:
    return None if held is None else (held.session, held.wanted)


# --------------------------------------------------------------------------- the rules to replace


def barred(s: Session, shares: Shares) -> Reason | None:
    """Return why ``s`` must not be served now even if memory is free, or None."""
    facts = shares.facts
    if s.wait.failed and s.retry_at > facts.now:
        return Reason("retry", text=s.wait.failed)
    allowed = facts.settings.classes_allowed
    if allowed is not None and s.state != "active" and s.request.priority not in allowed:
        opens = facts.settings.classes_open.get(s.request.priority)
        at = 0.0 if opens is None else opens - facts.meters.ahead
        return Reason("class-closed", limit=s.request.priority, at=at)
    spent = shares.spent(s.owner) if shares.budgeted else None
    if spent is not None and spent.daily.then != "borrow" and s.state != "active":
        more = spent.daily.more_elsewhere
        if more or spent.daily.then == "stop":
            return Reason(
                "budget", group=spent.group, most=0 if spent.none else 1, at=spent.until,
                text=facts.settings.elsewhere_reason if more else "",
            )  # fmt: skip
    return None


def stopped(s: Session, shares: Shares) -> str:
    """Return why ``s`` must not run although it has a lease, or ""."""
    if s.state not in ATTACHED:
        return ""
    allowed = shares.facts.settings.classes_allowed
    if allowed is not None and s.request.priority not in allowed:
        return CLOSED
    spent = shares.spent(s.owner) if shares.tree.stops else None
    stops = spent is not None and spent.daily.then == "stop"
    return SPENT if stops else s.recalled(shares.facts.now)


def stops_at(s: Session, facts: Facts) -> float:
    """Return the first time at which the pool can suspend ``s``, a session that must not run."""
    return not_before(s, facts) if s.state == "idle" else free_from(s, facts)


# --------------------------------------------------------------------------- the pass


def plan(facts: Facts, before: Plan, relieve: Iterable[str] = ()) -> Plan:
    """Return what the pool does now.

    ``before`` is the last plan. ``relieve`` names the sessions for which host memory is short. The
    function changes no facts. It makes no pass and returns an empty plan if no session wants
    anything, host memory is not short, no rule stops running sessions, and no idle lease must be
    suspended now. This is the case at most events of a cell. A pass would find nothing to do:
    promises and reservations belong to sessions in the order, and the order is empty. The other
    steps are loops over the order, over ``relieve``, over the sessions that must not run, and over
    the idle leases whose idle time-out is over.
    """
    if not (facts.waiting or facts.short or relieve or facts.stops or _overdue(facts)):
        return Plan()
    return _Pass(facts, before).run(relieve)


def _overdue(facts: Facts) -> list[Session]:
    """Return the idle sessions that must give their slices back now, ordered by lease."""
    if not facts.leased:
        return []
    known = leaving(facts)
    now = facts.now
    if min(known.values(), default=math.inf) > now:
        return []
    due = {name for name, at in known.items() if at <= now}
    return [s for s in facts.leased.values() if s.id in due]


def outlook(facts: Facts, before: Plan, but: str = "") -> Draft:
    """Return a draft in which the bytes are free that the last plan neither grants, promises nor
    reserves.

    If ``but`` names a session, the bytes that the plan keeps for this session are free, too.
    """
    return _Pass(facts, before, but=but).draft


def forecast(facts: Facts, before: Plan, s: Session) -> tuple[Slice, ...]:
    """Return the slices that a plan would grant or promise ``s`` if it asked now; () if none."""
    found = attempt(_Pass(facts, before).draft, s, asking(s, facts), behind_head=True)
    return found.takes if isinstance(found, Offer) else ()


class _Pass:
    """One pass over the machine."""

    def __init__(self, facts: Facts, before: Plan, but: str = "") -> None:
        self.facts = facts
        self.before = before
        self.shares = Shares(facts)
        everybody = self.shares.order()
        waits = [s for s in everybody if s.state == "queued"] if facts.short else everybody
        self.plan = Plan(everybody, waits)
        #: Whether :func:`barred` may give a reason other than a failed attach.
        self.bars = self.shares.budgeted or facts.settings.classes_allowed is not None
        self.turn = {s.id: at for at, s in enumerate(everybody)}
        self.draft = Draft(facts, self.shares)
        if everybody and (
            facts.settings.preempt or any(s.owner != everybody[0].owner for s in everybody)
        ):
            self.plan.contended = self.shares.fair
        #: How many waits had begun when the oldest promise was made.
        self.oldest = facts.arrivals
        #: The place in the order of the last session that has a promise from an earlier plan. A new
        #: promise does not matter here: its session is served already, so it is never behind the
        #: session that the pass serves.
        self.last = -1
        #: Finds the requests behind the head that the pass need not try. None until a request
        #: has failed.
        self.reach: Reach | None = None
        if before.promises:
            self._keep_promises(but)
        held = before.reservation
        if held is not None and held.session in self.turn and held.session != but:
            # Keep the reservation of the head until the pass begins to serve the queue.
            head = facts.sessions[held.session]
            found = asking(head, facts)
            wanted = {}
            for uuid in held.wanted:
                ledger = facts.devices[uuid]
                amounts = [need.amount(ledger) for need in found.needs if need.allows(ledger)]
                if amounts:
                    wanted[uuid] = max(amounts)
            held = Reservation(head.id, wanted, len(found.needs), found.charge, held.next_at)
            self.draft.reserve(held, head)

    # ------------------------------------------------------------------ 1. promises

    def _keep_promises(self, but: str) -> None:
        """Keep each promise that still fits its session and that suspends under way can meet."""
        facts, draft = self.facts, self.draft
        for name, promise in self.before.promises.items():
            if name not in self.turn or name == but:
                continue
            found, takes = asking(facts.sessions[name], facts), promise.takes
            if len(found.needs) == len(takes) and all(
                need.allows(d := facts.devices[x.device]) and need.amount(d) == x.bytes
                for need, x in zip(found.needs, takes, strict=True)
            ):
                same = promise.charge == found.charge
                kept = promise if same else replace(promise, charge=found.charge)
                draft.promise(facts.sessions[name], kept)
        for room in draft.rooms.values():
            while room.promised and room.expect < 0:
                there = [n for n, p in draft.promises.items() if room.uuid in _on(p.takes)]
                draft.unpromise(facts.sessions[max(there, key=self.turn.__getitem__)])
        self.oldest = min([promise.made for promise in self.before.promises.values()])
        self.last = max([self.turn[name] for name in draft.promises], default=-1)

    def _behind(self, s: Session, before: float = math.inf) -> list[str]:
        """Return the sessions behind ``s`` that have a promise, the last session first.

        Only promises from before the start of the wait with the number ``before`` count.
        """
        turn, own, held = self.turn, self.turn[s.id], self.draft.promises.items()
        if own >= self.last:
            return []
        behind = [name for name, p in held if p.made < before and turn[name] > own]
        return sorted(behind, key=turn.__getitem__, reverse=True) if behind else behind

    # ------------------------------------------------------------------ the steps

    def run(self, relieve: Iterable[str]) -> Plan:
        plan, draft = self.plan, self.draft
        self._leave()
        if draft.reservation is not None:
            draft.unreserve(draft.reservation, self.facts.sessions[draft.reservation.session])
        for s in plan.order:
            if s.id not in draft.leaving:
                self._serve(s)
        if relieve:
            self._relieve(relieve)
        plan.promises, plan.reservation = draft.promises, draft.reservation
        return plan

    def _leave(self) -> None:
        """Suspend leases that must not run and idle leases whose idle time-out is over, if host
        memory has room.
        """
        facts, draft = self.facts, self.draft
        if facts.stops:
            for s in facts.leased.values():
                if why := stopped(s, self.shares):
                    self._stop(s, why)
        for s in _overdue(facts):
            if s.id in draft.leaving:
                continue
            room = draft.host_left([x.device for x in s.lease.slices])
            if not draft.host_lack([s], room):
                self._suspend(s, paused(s, facts) or ("release" if s.release_asked else "idle"))

    def _stop(self, s: Session, why: str) -> bool:
        """Suspend ``s``, a session that must not run; return False if this is not possible now.

        The suspend may take the host memory that is kept for the head: only a few sessions must
        not run, and the pass suspends them before it serves waiting sessions.
        """
        draft = self.draft
        if stops_at(s, self.facts) > self.facts.now or draft.host_lack([s], draft.host):
            return False
        self._suspend(s, why, RECALLED if s.recalled(self.facts.now) else STOPPED)
        return True

    def _suspend(self, v: Session, reason: str, tier: int = 0) -> None:
        self.draft.suspend(v)
        self.plan.suspends.append((v, reason, tier))
        # The requests that failed before did not have the bytes that this suspend frees.
        self._gain()

    # ------------------------------------------------------------------ 3. the queue

    def _serve(self, s: Session) -> None:
        """3. Serve ``s``, or promise it bytes, or note why it waits."""
        plan, draft, facts = self.plan, self.draft, self.facts
        found = s.asking
        if found is None or found.version != facts.version:
            found = asking(s, facts)
        if (self.bars or s.wait.failed) and (why := barred(s, self.shares)) is not None:
            plan.reasons[s.id] = why
            plan.limited = plan.limited or why.limit != ""
            return
        if s.id in draft.promises and self._kept(s, found):
            return
        if (plan.held or plan.held_groups) and (why := plan.behind(s, facts)) is not None:
            plan.reasons[s.id] = why
            return
        behind_head = draft.reservation is not None
        lacks = None if found.where is not None else draft.lacking(s.owner, found.charge)
        reach = self.reach if behind_head and lacks is None else None
        if reach is not None and (s.wait.number <= self.oldest or not self._newer(s)):
            hopeless = reach.hopeless(s, found)
            if hopeless is not None:
                plan.reasons[s.id] = hopeless
                return
        takes = draft.now(s, found.needs) if lacks is None else None
        offer: Offer | Reason
        if takes is not None:
            offer = Offer(takes, ready=True)
        else:
            offer = make_room(draft, s, found, lacks, behind_head=behind_head)
        if draft.promises and not (isinstance(offer, Offer) and not offer.victims):
            offer = self._overtake(s, found, offer, behind_head=behind_head)
        if isinstance(offer, Offer):
            self._accept(s, offer, found.charge)
            return
        plan.reasons[s.id] = offer
        plan.limited = plan.limited or offer.limit != ""
        if offer.rule in FOR_QUOTA and offer.group:
            plan.held_groups.add(offer.group)
        elif offer.rule in FOR_QUOTA:
            plan.held.add(s.owner.name)
        elif offer.rule in FOR_MEMORY:
            if self.reach is None:
                self.reach = Reach(draft)
            self.reach.failed(s, found, offer)
            if not behind_head and s.state != "idle":
                self._reserve(s, found)

    def _kept(self, s: Session, found: Asking) -> bool:
        """Serve ``s``, a session with a promise, or let it wait; False if the promise is void.

        Bytes that are promised to sessions behind ``s`` count as free for ``s``.
        """
        draft, owner, promise = self.draft, s.owner, self.draft.promises[s.id]
        takes, charge = promise.takes, promise.charge
        if draft.waits(takes, found.least) and draft.within_limits(owner, charge):
            self.plan.reasons[s.id] = Reason("planned", devices=_on(takes))
            return True
        known = draft.known
        draft.unpromise(s)
        if draft.lacking(owner, charge) is None:
            if self._free_for(s, takes):
                # Without this promise, the pass may be able to backfill more sessions on the
                # devices that the head reserves.
                self._gain()
                self._accept(s, Offer(takes, ready=True), charge)
                return True
            elsewhere = draft.now(s, found.needs)
            if elsewhere is not None:
                self._gain()
                self._accept(s, Offer(elsewhere, ready=True), charge)
                return True
        elif draft.lacking(owner, charge, draft.coming_back(owner)) is not None:
            self._gain()
            return False
        draft.promise(s, promise)
        draft.known = known  # the draft is again as it was before
        self.plan.reasons[s.id] = Reason("planned", devices=_on(takes))
        return True

    def _free_for(self, s: Session, takes: Iterable[Slice]) -> bool:
        """Return whether ``takes`` are free now. Bytes that are promised to sessions behind ``s``
        count as free.
        """
        draft, rooms = self.draft, self.draft.rooms
        late = dict.fromkeys(_on(takes), 0)
        for name in self._behind(s):
            for x in draft.promises[name].takes:
                if x.device in late:
                    late[x.device] += x.bytes
        return all(rooms[x.device].avail + late[x.device] >= x.bytes for x in takes)

    def _accept(self, s: Session, offer: Offer, charge: Charge) -> None:
        plan, draft = self.plan, self.draft
        for v in offer.victims:
            tier = offer.tiers.get(v.id, 0)
            why = REASONS[rule_of(tier, s, v, self.shares)] if tier else offer.reason
            self._suspend(v, why, tier)
        if not offer.ready:
            draft.promise(s, Promise(offer.takes, charge, self.facts.arrivals))
            plan.reasons[s.id] = Reason("planned", devices=_on(offer.takes))
            return
        draft.take(s, offer.takes, charge)
        if s.lease.slices:
            more = {x.device: x.bytes for x in offer.takes}
            grown = (Slice(x.device, x.bytes + more.get(x.device, 0)) for x in s.lease.slices)
            plan.grows.append((s, tuple(grown)))
        else:
            plan.grants.append((s, offer.takes, "a slice is free"))

    def _overtake(
        self, s: Session, found: Asking, offer: Offer | Reason, *, behind_head: bool
    ) -> Offer | Reason:
        """Let ``s`` use bytes that are promised to sessions behind it.

        The last session in the order gives up its promise first, and only if this helps ``s``. When
        the pass later comes to a session that lost its promise, the session gets a new promise if
        suspends under way free enough bytes.
        """
        draft, sessions = self.draft, self.facts.sessions
        taken: dict[str, Promise] = {}
        for name in self._newer(s):
            taken[name] = draft.unpromise(sessions[name])
            other = attempt(draft, s, found, behind_head=behind_head)
            if isinstance(other, Offer):
                self._gain()
                return other
        for name, promise in taken.items():
            draft.promise(sessions[name], promise)
        return offer

    def _newer(self, s: Session) -> list[str]:
        """Return the sessions behind ``s`` whose promises it may take over, the last first.

        These are the promises from before the wait of ``s`` began. A later promise was made while
        ``s`` waited and could not use the bytes. ``s`` must leave these bytes to the session with
        the promise: otherwise the suspends for this session would be wasted.
        """
        # A preempted session keeps its age, so it may be ahead of the session for which the pool
        # preempted it. It must not take back the bytes that it gave up for this session.
        if not self.draft.promises or s.wait.number <= self.oldest or s.preempted:
            return []
        return self._behind(s, s.wait.number)

    def _gain(self) -> None:
        """Note that the draft may have more bytes than before."""
        if self.reach is not None:
            self.reach.gained()

    # ------------------------------------------------------------------ 4. the head

    def _reserve(self, s: Session, found: Asking) -> None:
        """4. Reserve devices for ``s``, the first session that is blocked for lack of memory.

        After ``ageing`` seconds as the head, ``s`` also *accumulates* memory: the pass preempts
        idle leases on the reserved devices even if the bytes of these leases are not enough for
        ``s``. (Otherwise, two sessions that are idle at different times could block ``s`` without
        end.) The pass preempts such a lease only if its session would then wait behind ``s``: see
        :meth:`~.draft.Draft.stays_out`.
        """
        draft, before = self.draft, self.before.reservation
        keep = before.wanted if before is not None and before.session == s.id else ()
        held, late = reservation(draft, s, found, keep)
        draft.reserve(held, s)
        for uuid, size in held.wanted.items() if late else ():
            room, now = draft.rooms[uuid], self.facts.now
            options = Trial(draft, s, draft.host).options(room)
            for tier, v, _ in sorted(options, key=lambda o: (o[0], score(o[1], now))):
                if tier or room.expect >= size or draft.host_lack([v], draft.host):
                    continue
                if draft.stays_out(v, room, size):
                    self._suspend(v, HEAD)

    # ------------------------------------------------------------------ 6. relief

    def _relieve(self, names: Iterable[str]) -> None:
        """Resume the largest suspended state that fits in free device memory.

        ``names`` are the sessions for which host memory is short. The pass resumes only one session
        at a time, because that may be enough.
        """
        facts, draft = self.facts, self.draft
        found = [facts.sessions[name] for name in names if name in facts.sessions]
        if any(s.state == "attaching" for s in found):
            return
        away = [s for s in found if s.state == "detached" and s.retry_at <= facts.now]
        for s in sorted(away, key=lambda s: (-s.suspended_bytes, s.id)):
            if not s.suspended or self.plan.behind(s, facts) is not None:
                continue
            if draft.lacking(s.owner, asking(s, facts).charge) is None:
                takes = draft.now(s, asking(s, facts).needs)
                if takes is not None:
                    self.plan.grants.append((s, takes, "host memory is short"))
                    return


def _on(takes: Iterable[Slice]) -> tuple[str, ...]:
    return tuple(x.device for x in takes)
