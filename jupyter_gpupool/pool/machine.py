# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool: it takes events and returns actions.

The pool processes one event in four steps. It changes the facts (:mod:`.updates`); it ends waits
that have lasted too long; it plans (:mod:`.schedule`) until a plan changes nothing; and it sends
the news to waiting sessions (:mod:`.news`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..errors import Code
from ..states import ATTACHED
from ..units import format_seconds
from . import requests
from .events import Action, Event, HostPressure, ReleaseAsked, RequestChanged, Tick, Wanted
from .explain import Explanation, Standing, explain, explain_all, standing
from .facts import Facts
from .model import (
    FOR_MEMORY,
    Device,
    DeviceView,
    Owner,
    PoolSettings,
    PoolUsage,
    PoolView,
    Refusal,
    Request,
    SessionRecord,
    SessionView,
    Slice,
)
from .news import News
from .placement import asking, headroom
from .preemption import leaves_at
from .recheck import next_recheck
from .schedule import Plan, forecast, plan
from .selfcheck import problems
from .session import NEVER, Session, record
from .shares import Shares
from .transitions import Actions, grant, move, refuse_holds, resize
from .unsuspendable import due, note, warn
from .updates import update
from .why import Told, standing_lines, told
from .words import budget_refusal, reason, seconds, stays_reason, taken_reason, waits_for

#: The most plans per event. One plan is nearly always enough, and a second one confirms it. If this
#: many plans are not enough, the pool has a bug; it then acts on the last plan, because that is
#: better than no plan.
ROUNDS = 16


class Pool:
    """Decides which session gets which slice of which device, and when.

    The pool performs no operation itself. A question about a session that the pool does not know
    raises :class:`KeyError`.
    """

    def __init__(self, settings: PoolSettings) -> None:
        self._facts = Facts(settings)
        self._plan = Plan()
        self._news = News()
        #: Records that were computed since the last event. They stay valid, because only an event
        #: changes the facts or the plan. They save time: after an event that names a session, the
        #: broker reads the record of this session about ten times.
        self._records: dict[str, SessionRecord] = {}

    @property
    def settings(self) -> PoolSettings:
        """The rules in force."""
        return self._facts.settings

    def handle(self, event: Event) -> list[Action]:
        """Process ``event`` and return the actions in their order.

        The ``now`` of events must not go back; if it does, the pool uses the latest ``now`` so far.
        An event of an unknown session or a stale completion is never an error: the pool answers it
        or logs it.

        Raises
        ------
        InvalidTransition
            If the pool has a bug; the message asks for a report and contains the session's history.
        """
        facts = self._facts
        self._records.clear()
        facts.now = max(facts.now, event.now)
        # Apply the event before the effects of time: if a hold comes at the very moment at which
        # the idle time-out ends, the session must still have its lease.
        actions = update(facts, event, self._plan)
        if facts.settings.max_wait is not None:
            actions += self._give_up(facts.settings.max_wait)
        if facts.tree.budgeted:
            actions += refuse_spent(facts)
        if facts.stuck:
            actions += warn(facts)
        actions += self._settle(event.sessions if isinstance(event, HostPressure) else ())
        if self._plan.queue or facts.stuck:
            note(facts, self._plan)
            if any(due(s, facts) <= facts.now for s, _ in facts.stuck.values()):
                actions += warn(facts) + self._settle(())
                note(facts, self._plan)
        if isinstance(event, (RequestChanged, ReleaseAsked)):
            actions += requests.reply(facts, event, self._plan, actions)
        if self._plan.queue:
            actions += self._news.run(facts, self._plan, actions, tick=isinstance(event, Tick))
        facts.settle()
        return actions

    def _give_up(self, most: float) -> Actions:
        """Refuse the holds of sessions that have waited for ``max_wait``."""
        facts = self._facts
        actions: Actions = []
        late = [s for s in facts.waiting.values() if s.queued_at + most <= facts.now]
        for s in late:
            if s.preempted:
                continue  # the preempted computation must continue, even after a long wait
            last = reason(facts, self._plan, s)
            refusal = Refusal(
                Code.WAIT_TIMEOUT,
                f"No GPU slice became free within {format_seconds(most)} (c.GPUPool.max_wait)"
                + (f". The last reason: {last}." if last else "."),
                "Run the cell again to wait once more, or ask for less with %gpu.",
                {"max_wait": most, "reason": last},
            )
            actions += refuse_holds(s, refusal)
            actions += move(facts, s, "detached", "waited too long")
        return actions

    def _settle(self, relieve: frozenset[str] | tuple[()]) -> Actions:
        """Plan and apply the plan, until a new plan changes nothing."""
        facts, first = self._facts, self._plan
        actions: Actions = []
        for _ in range(ROUNDS):
            if facts.meters.changed and (facts.waiting or facts.short or facts.tree.budgeted):
                facts.settle()  # the plan depends on the present usage
            new = plan(facts, self._plan, relieve)
            if new.short and facts.grown:
                # Take back unused growth of other sessions before any lease is preempted.
                found = requests.reclaim(facts)
                if found:
                    actions += found
                    continue
            before, self._plan = self._plan, new
            relieve = ()
            if new.reservation is not None:
                wait = facts.sessions[new.reservation.session].wait
                wait.head_since = facts.now if wait.head_since is None else wait.head_since
            if new.complete and before.reservation is None:
                actions += carry_out(facts, new)
                self._plan = Plan()
                if first.reasons or first.promises:
                    actions += note_waiting(facts, self._plan)[0]
                break
            if new.settled(before):
                told, changed = note_waiting(facts, new)
                actions += told
                if not changed:
                    break
            actions += carry_out(facts, new)
        return actions

    def next_wakeup(self) -> float | None:
        """Return when the broker must send a ``Tick`` at the latest, on the clock of ``now``.

        None if time alone changes nothing. A time in the past means: at once.
        """
        facts = self._facts
        at = min(next_recheck(facts, self._plan), self._news.next_at(self._plan))
        for s, _ in facts.stuck.values():
            if s.state in ATTACHED:
                at = min(at, max(due(s, facts), facts.now))
        return None if at == math.inf else at

    # ------------------------------------------------------------------ questions

    def __contains__(self, session: str) -> bool:
        return session in self._facts.sessions

    def record(self, session: str) -> SessionRecord:
        """Return a session as it is now."""
        known = self._records.get(session)
        if known is None:
            found = self._facts.sessions[session]
            known = record(found, reason(self._facts, self._plan, found))
            self._records[session] = known
        return known

    def records(self) -> list[SessionRecord]:
        """Return all sessions as they are now, in the order in which they were opened."""
        return [self.record(name) for name in self._facts.sessions]

    def explain(self, session: str) -> Explanation:
        """Return why a session waits or keeps its slice, and what would change it."""
        return explain(self._facts, self._plan, self._facts.sessions[session])

    def explanations(self) -> dict[str, Explanation]:
        """Return :meth:`explain` of every session, much faster than with one call per session."""
        return explain_all(self._facts, self._plan)

    def why(self, session: str) -> Told:
        """Return :meth:`explain` with the lines that the session's owner reads."""
        return told(self._facts, self._plan, self._facts.sessions[session])

    def preferred(self, session: str) -> tuple[str, ...]:
        """Return the devices that the session would get if it asked now; the pool reserves nothing.

        If the session has devices or is bound to devices, the answer is these devices. Else it is
        the devices that the present plan gives the session, or that a new plan would give it (a new
        plan may preempt idle leases). The answer is empty if the session would wait for a lease in
        use.
        """
        s = self._facts.sessions[session]
        settled = tuple(x.device for x in s.lease.slices or s.suspended) or s.bound
        if settled:
            return settled
        if s.state == "queued":
            held = self._plan.reservation
            if held is not None and held.session == s.id:
                return tuple(held.wanted)[: s.request.devices]
            promise = self._plan.promises.get(s.id)
            return tuple(x.device for x in promise.takes) if promise is not None else ()
        return tuple(x.device for x in forecast(self._facts, self._plan, s))

    def device(self, uuid: str) -> Device | None:
        """Return a device as it was announced; None if it is unknown."""
        ledger = self._facts.devices.get(uuid)
        return None if ledger is None else ledger.device

    def devices(self) -> list[Device]:
        """Return all devices as they were announced."""
        return [ledger.device for ledger in self._facts.devices.values()]

    def device_views(self) -> tuple[DeviceView, ...]:
        """Return all devices with their ledgers, sorted by number; cheap even for many sessions."""
        ledgers = sorted(self._facts.devices.values(), key=lambda d: d.device.index)
        return tuple(ledger.view() for ledger in ledgers)

    def request(self, session: str) -> Request:
        """Return what a session asks for; costs a tenth of :meth:`record`."""
        return self._facts.sessions[session].request

    def leases(self) -> dict[str, tuple[tuple[Slice, ...], float | None]]:
        """Return every lease by session: its slices, and since when it is idle (None if it is in
        use).

        Cheap even for many sessions.
        """
        return {
            s.id: (s.lease.slices, s.idle_since if s.state == "idle" else None)
            for s in self._facts.leased.values()
        }

    def suspended(self) -> dict[str, int]:
        """Return the host bytes of suspended state, by session; cheap even for many sessions."""
        return {s.id: s.suspended_bytes for s in self._facts.sessions.values() if s.suspended}

    def growable(self, session: str) -> tuple[int, ...]:
        """Return by how many bytes each slice of an attached session could grow now, in their
        order.

        A slice can grow only into memory that is free, and that the plan neither grants nor
        reserves. It cannot grow into the bytes that are guaranteed to another session on the
        device, even if that session does not use them. The answer is empty for a session without a
        lease.
        """
        s = self._facts.sessions[session]
        return requests.growable(self._facts, s, self._plan) if s.state in ATTACHED else ()

    def headroom(self, uuid: str) -> int:
        """Return how many bytes beyond a session's state a resume reserves on this device.

        The answer is 0 for an unknown device, because no session resumes there.
        """
        ledger = self._facts.devices.get(uuid)
        return 0 if ledger is None else headroom(ledger, self._facts.settings)

    def story(self, session: str) -> list[str]:
        """Return the last steps of a session as lines of text, oldest first; [] if unknown."""
        found = self._facts.sessions.get(session)
        return [] if found is None else found.story_lines()

    def view(self, now: float) -> PoolView:
        """Return the state of the whole pool at ``now``.

        This call is for status pages. It is too slow for decisions, because it reads all sessions.
        """
        facts = self._facts
        positions = {s.id: at for at, s in enumerate(self._plan.queue, 1)}
        waits = Waits(facts, self._plan)
        return PoolView(
            now=now,
            devices=self.device_views(),
            sessions=tuple(
                self._view(s, positions.get(s.id), len(positions), waits, now)
                for s in facts.sessions.values()
            ),
            host_budget=facts.settings.host_memory,
            host_used=facts.host_used,
            settings=facts.settings,
        )

    def _view(
        self, s: Session, position: int | None, length: int, waits: Waits, now: float
    ) -> SessionView:
        facts = self._facts
        stays = stays_reason(facts, s, now)
        wanted = s.state == "idle" and waits.since(s) < math.inf
        leaves = leaves_at(s, facts) if s.state == "idle" else math.inf
        waited, attached = seconds(s, now)
        return SessionView(
            record=self.record(s.id),
            queue_position=position,
            queue_length=length,
            expected=None if position is None else s.wait.expected,
            queued_at=None if position is None else s.queued_at,
            wait_seconds_total=waited,
            attached_seconds_total=attached,
            stays_reason=stays,
            leaves_at=None if stays or wanted or leaves == math.inf else leaves,
            wanted=wanted,
            taken_reason=taken_reason(s),
            waits_for=waits_for(self._plan, s),
            footprints=dict(s.lease.footprints),
        )

    def usage(self, now: float | None = None, since: float = -math.inf) -> PoolUsage:
        """Return what users and groups have used, at ``now`` (None: at the last event).

        Users and groups that used nothing after ``since`` are left out. The usage survives a
        restart of the broker as :class:`~.events.UsageRecovered`.
        """
        facts = self._facts
        return facts.meters.view(max(facts.now, now or facts.now), facts.settings, since)

    def standing(self, owner: Owner, now: float) -> tuple[Standing, tuple[str, ...]]:
        """Return an owner's guarantees, shares and daily budgets at ``now``, and the lines about
        them.
        """
        now = max(self._facts.now, now)
        found = standing(Shares(self._facts), owner, now)
        return found, tuple(standing_lines(found, now))

    def self_check(self) -> list[str]:
        """Return the errors in the accounts, as sentences with the last steps of the sessions."""
        return problems(self._facts)


def carry_out(facts: Facts, new: Plan) -> Actions:
    """Carry out a plan: each change that the plan makes becomes an action."""
    actions: Actions = []
    for s, slices in new.grows:
        actions += resize(facts, s, slices)
    for s, takes, why in new.grants:
        actions += grant(facts, s, takes, why)
    for s, text, tier in new.suspends:
        actions += move(facts, s, "detaching", text, text, tier)
    return actions


def note_waiting(facts: Facts, plan: Plan) -> tuple[Actions, bool]:
    """Note since when a session waits for each idle slice.

    Inform lazy kernels when a session waits for their slices. Return the actions, and whether the
    time from which a slice may be preempted has changed.
    """
    actions: Actions = []
    changed = False
    if facts.settings.residence == "clock":
        return actions, changed
    waits = Waits(facts, plan)
    for v in facts.leased.values():
        if v.state == "idle":
            gap = v.measured.gap
            if gap is None or v.lease.resumed_at == NEVER:
                continue
            since = waits.since(v) if waits.found else math.inf
            if since < math.inf:
                # Keep the earlier time. The session that began to wait then may have got a slice
                # since, but at least one session has waited at every moment since then.
                since = min(since, gap.wanted)
            if since != gap.wanted:
                v.measured.gap = replace(gap, wanted=since)
                facts.forget_times(v)
                changed = True
        elif v.attach == "lazy" and v.state == "active" and not v.lease.told_wanted:
            v.lease.told_wanted = waits.found and waits.since(v) < math.inf
            if v.lease.told_wanted:
                actions.append(Wanted(session=v.id, epoch=v.epoch))
    return actions, changed


class Waits:
    """Which sessions wait for a device, for an owner's quota or for a group's cap, and since when.

    A device has two kinds of entries: the first session in the queue that could use the device
    (even if it needs other devices, too), and every session that waits to grow there. The entry of
    an owner is the first session that waits for the owner's quota, even if the session also waits
    for memory. The entry of a group is the first session that waits for its cap.
    """

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self._facts = facts
        self._devices: dict[str, list[tuple[Session, float]]] = {}
        self._owners: dict[str, float] = {}
        self._groups: dict[str, float] = {}
        found: set[str] = set()
        suitable = sum([not ledger.drained for ledger in facts.devices.values()])
        for s in plan.order:
            if len(found) == suitable and not (facts.short or plan.limited):
                break  # no later session waits for growth or for a limit
            why, grows = plan.reasons.get(s.id), s.id in facts.short
            if why is None or not (grows or s.state == "queued"):
                continue
            if why.limit and why.group:
                self._groups.setdefault(why.group, s.wait.since)
            elif why.limit:
                self._owners.setdefault(s.owner.name, s.wait.since)
            memory = why.rule in FOR_MEMORY and len(found) < suitable
            if grows or memory:
                needs = asking(s, facts).needs
                for uuid, ledger in facts.devices.items():
                    if (grows or uuid not in found) and any(need.allows(ledger) for need in needs):
                        self._devices.setdefault(uuid, []).append((s, s.wait.since))
                        if not grows:
                            found.add(uuid)

        #: Whether any session waits.
        self.found = bool(self._devices or self._owners or self._groups)

    def since(self, v: Session) -> float:
        """Return since when some session waits for what ``v`` has; infinity if no session does."""
        since = self._owners.get(v.owner.name, math.inf)
        for x in v.lease.slices:
            for w, at in self._devices.get(x.device, ()):
                if at < since and w is not v:
                    since = at
        for name in self._facts.tree.path(v.owner.group) if self._groups else ():
            since = min(since, self._groups.get(name, math.inf))
        return since


def refuse_spent(facts: Facts) -> Actions:
    """Refuse the holds of sessions whose daily budget is used up, if the rule of the budget allows
    no new lease.

    The holds of a preempted session stay: its computation waits until the budget is renewed. A
    session also waits, without a refusal, if other machines may have a part of the budget left.
    """
    shares, actions = Shares(facts), Actions()
    for s in list(facts.waiting.values()):
        spent = shares.spent(s.owner)
        if spent is None or s.preempted or spent.daily.then == "borrow":
            continue
        if spent.daily.more_elsewhere:
            continue
        actions += refuse_holds(s, budget_refusal(spent, facts))
        actions += move(facts, s, "detached", "the budget of today is used up")
    return actions
