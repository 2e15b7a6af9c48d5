# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool: it takes events and returns actions.

The pool processes an event in four steps:

1. It changes the facts (:mod:`.updates`).
2. It ends waits that have lasted too long.
3. It plans (:mod:`.schedule`) and turns each plan into actions, until a plan changes nothing.
4. It informs waiting sessions of their place in the queue (:mod:`.news`).
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
    Refusal,
    Request,
    SessionRecord,
    Slice,
)
from .news import News
from .placement import asking, headroom
from .recheck import next_recheck
from .schedule import Plan, forecast, plan
from .selfcheck import problems
from .session import NEVER, Session, record
from .session_view import PoolView, session_views
from .shares import Shares
from .transitions import Actions, grant, move, refuse_holds, resize
from .unsuspendable import due, note, warn
from .updates import update
from .why import Told, standing_lines, told
from .words import budget_refusal, reason

#: The most plans for one event. One plan is nearly always enough, and a second plan confirms it. If
#: this many plans are not enough, the pool has a bug. It then acts on the last plan, because this
#: is better than no plan.
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
        An event about an unknown session and an event with an old epoch are not errors: the pool
        answers or logs them.

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
                # Before the pool preempts a lease, it takes back the unused growth of leases.
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
        """Return the latest time at which the broker must send a ``Tick``.

        The time is on the clock of ``now``. If it has passed, the broker must send the ``Tick`` at
        once. The result is None if the passing of time changes nothing.
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

        A session that has a lease or suspended state, or that is bound to devices, keeps these
        devices. A session in the queue gets the devices that the present plan reserves or promises
        for it. Any other session gets the devices that a new plan would give it; the new plan may
        preempt leases. The answer is empty if the plan gives the session no device.
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
        """Return a device as the broker announced it; None if the pool does not know the device."""
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
        """Return the lease of each session: its slices, and the time at which it became idle.

        The time is None if the lease is in use. This call is cheap even for many sessions.
        """
        return {
            s.id: (s.lease.slices, s.idle_since if s.state == "idle" else None)
            for s in self._facts.leased.values()
        }

    def suspended(self) -> dict[str, int]:
        """Return the host bytes of suspended state, by session; cheap even for many sessions."""
        return {s.id: s.suspended_bytes for s in self._facts.sessions.values() if s.suspended}

    def growable(self, session: str) -> tuple[int, ...]:
        """Return how many bytes each slice of an attached session could gain now.

        The answer is in the order of the slices; it is empty if the session is not attached. A
        slice can grow only into free memory that the plan neither grants nor reserves. It cannot
        grow into bytes that are guaranteed to another session, even if the other session does not
        use these bytes.
        """
        s = self._facts.sessions[session]
        return requests.growable(self._facts, s, self._plan) if s.state in ATTACHED else ()

    def headroom(self, uuid: str) -> int:
        """Return the bytes that a resume on this device reserves in addition to the state.

        The answer is 0 for an unknown device, because no session resumes on such a device.
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
        return PoolView(
            now=now,
            devices=self.device_views(),
            sessions=session_views(
                facts, self._plan, now, self.record, Waits(facts, self._plan).since
            ),
            host_budget=facts.settings.host_memory,
            host_used=facts.host_used,
            settings=facts.settings,
        )

    def usage(self, now: float | None = None, since: float = -math.inf) -> PoolUsage:
        """Return the usage of users and groups at ``now`` (if None, at the time of the last event).

        The answer leaves out users and groups that used nothing after ``since``. After a restart
        of the broker, the event :class:`~.events.UsageRecovered` gives this usage to the new pool.
        """
        facts = self._facts
        return facts.meters.view(max(facts.now, now or facts.now), facts.settings, since)

    def standing(self, owner: Owner, now: float) -> tuple[Standing, tuple[str, ...]]:
        """Return an owner's guarantees, shares and daily budgets at ``now``, as data and as lines
        of text.
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
    """Note for each idle slice since when other sessions wait for it.

    Also inform each active lazy kernel, once for each lease, when a session waits for its slice.
    Return the actions, and whether a noted time has changed. Such a change may also change the time
    from which the slice may be preempted.
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
                # Keep the earlier of the two times. The session that began to wait at the earlier
                # time may already have a slice, but some session has waited at every moment since.
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

    A device has an entry for each session that waits to grow on this device. It also has an entry
    for the first session in the queue that could use this device, even if the session needs more
    devices. The entry of an owner is the time since which the first session waits for the owner's
    quota, even if this session also waits for memory. The entry of a group is the time since which
    the first session waits for the group's cap.
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
        """Return since when a session waits for a device, quota or cap that ``v`` uses.

        The answer is the earliest such time, or infinity if no session waits for these.
        """
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

    The pool does not refuse the holds of a preempted session: its computation waits until the
    budget is renewed. It also refuses no holds while other machines may have a part of the budget
    left.
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
