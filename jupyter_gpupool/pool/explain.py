# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Why a session waits, or may lose its slice, as data from the plan. :mod:`.why` puts the data in
words.

For a waiting session, :func:`explain` returns:

* the rule by which the session waits;
* the leases that it needs, and their holders;
* the usage of its owner and groups;
* the events that may end the wait, and the earliest time of such an event.

For a session that has a lease (a holder), :func:`explain` returns:

* the guarantees of the holder's groups;
* the sessions that may preempt the lease, each with the rule, and with the earliest time.

The figures are not estimates: they are the figures that the pass compares. Labels of other owners'
sessions are left out: of these sessions, :mod:`.why` shows size and class, but no name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Collection, Iterable, NamedTuple

from .draft import Draft
from .facts import Facts
from .model import HostLack, Owner, Reason, Slice
from .placement import asking
from .preemption import leaves_at, obstacle, unprotected, yields_at
from .running import TURN, Asker, covered, rule_of
from .schedule import Plan
from .session import Session
from .shares import Budget, Shares, budgets
from .unsuspendable import ends_at
from .words import reason, stays_reason


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease on a device that a waiting session could use."""

    session: str
    device: str
    bytes: int
    #: ``busy``, ``idle``, or ``leaving`` (its suspend is under way).
    use: str
    #: When a waiting session may first preempt the lease; None while the lease is in use.
    yields_at: float | None
    #: When the pool suspends the holder, even if no session waits for the lease; infinity if the
    #: pool never does so. None while the lease is in use.
    leaves_at: float | None
    #: Whether the holder has the same owner as the waiting session.
    own: bool = False
    label: str = ""
    priority: str = ""
    #: The rule of :mod:`.running` by which the waiting session may preempt the lease while the
    #: lease is in use, and the time from which it may do so. The rule is "" if no rule allows this.
    #: Even with a rule, a guarantee may protect the lease: see ``covered``.
    rule: str = ""
    rule_at: float | None = None
    #: Whether a guarantee of the holder's group protects the lease.
    covered: bool = False
    #: Why host memory has no room for the holder's state now, even if the pool suspends only this
    #: lease; "" if it has room.
    unmoved: HostLack = ""
    #: When the pool ends the holder, because the driver cannot suspend it; None if the pool does
    #: not end it.
    ends_at: float | None = None


class GroupGuarantee(NamedTuple):
    """How many bytes the members of a group have now, and how many are guaranteed to the group."""

    group: str
    held: int
    #: The bytes guaranteed on this machine.
    guaranteed: int
    #: The bytes guaranteed on all machines together; None if the guarantee is not shared among
    #: machines.
    of_all: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """The groups, shares, guarantees and budgets of an owner, and how much of them is used."""

    #: The groups of the owner, the outermost first.
    groups: tuple[str, ...]
    #: For each level of the tree: the name ("group NAME", or the owner's name), its part of the
    #: usage at this level, and its fair part. Only siblings that use GPUs or wait count.
    shares: tuple[tuple[str, float, float], ...]
    #: Whether the owner, or one of its groups, has used more than its fair share.
    above: bool
    guarantees: tuple[GroupGuarantee, ...]
    #: The groups whose guarantee covers the request of the waiting session.
    entitled: tuple[str, ...]
    budgets: tuple[Budget, ...]


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The budget of host memory, and how many bytes of it the state of sessions takes.

    ``own`` and ``others`` are the bytes for the owner's sessions and for all other sessions;
    ``own_sessions`` and ``other_sessions`` are the numbers of these sessions.
    """

    budget: int
    own: int
    own_sessions: int
    others: int
    other_sessions: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan for one session, as data."""

    session: str
    #: Why the session waits (an attached session waits for growth); None if it does not wait.
    reason: Reason | None
    #: ``position`` is the session's place in the queue for a lease; the first place is 1. ``ahead``
    #: has the sessions that the pass serves before this session.
    position: int | None
    ahead: tuple[str, ...]
    #: The slices that the session will get when the suspends under way have ended.
    promised: tuple[Slice, ...]
    #: The bytes that the session reserves on each device, if it is the head of the queue.
    reserved: tuple[Slice, ...]
    #: The leases on the devices that the session could use.
    holders: tuple[HeldLease, ...]
    #: The use of host memory, if a lack of host memory is the reason.
    host: HostMemory | None
    #: The names of the events that may end the wait: ``suspend-ends``, ``lease-ends``,
    #: ``idle-lease-yields``, ``host-memory``, ``holder-host-memory``, ``holder-frees``,
    #: ``own-lease-ends``, ``group-lease-ends``, ``head-is-served``, ``budget-renews``,
    #: ``settings``, ``device-returns``, ``outside-use-ends``, ``time``.
    changes: tuple[str, ...]
    #: The earliest known time at which an event may end the wait; None if no such time is known.
    #: Such an event is: the session may preempt a lease of ``holders``, the pool ends a holder, age
    #: raises the session past other sessions or above a holder, a budget renews, a schedule allows
    #: the session's class, or the pool tries again.
    changes_at: float | None
    #: The name of the event at ``changes_at``: ``idle-lease-yields``, ``busy-lease-yields``,
    #: ``kernel-ends``, ``ageing``, ``budget-renews``, ``settings`` or ``retry``; "" if
    #: ``changes_at`` is None.
    changes_by: str
    #: ``takers`` has the sessions that wait for a device on which this session has a lease.
    #: ``taken_from`` is the time from which they may preempt the lease; None if it is not idle.
    takers: tuple[str, ...]
    taken_from: float | None
    #: The sessions that may preempt this lease while it is in use. For each of them: the rule, the
    #: time from which it may do so (in seconds since 1970), and the session's id.
    claims: tuple[tuple[str, float, str], ...]
    #: ``obstacle`` says why the session cannot be suspended. It is "" if the session can be
    #: suspended or has no lease. ``ends_at`` is the time at which the pool ends the session because
    #: of the obstacle; None if the pool does not end it.
    obstacle: str
    ends_at: float | None
    #: Why the session was preempted while in use; "" if it was not, or if it has a lease again.
    preempted: str
    standing: Standing
    #: Why the session waits, or why an idle lease stays, in words; "" if neither applies.
    text: str


_CHANGES: dict[str, tuple[str, ...]] = {
    "planned": ("suspend-ends",),
    "busy": ("lease-ends", "idle-lease-yields"),
    "behind-head": ("head-is-served", "idle-lease-yields"),
    "host": ("host-memory", "lease-ends", "idle-lease-yields"),
    "quota": ("own-lease-ends", "idle-lease-yields"),
    "quota-host": ("own-lease-ends", "host-memory", "idle-lease-yields"),
    "behind-own": ("own-lease-ends", "idle-lease-yields"),
    "cap": ("group-lease-ends", "idle-lease-yields"),
    "behind-group": ("group-lease-ends", "idle-lease-yields"),
    "budget": ("budget-renews",),
    "class-closed": ("settings",),
    "paused": ("device-returns",),
    "drained": ("device-returns",),
    "foreign": ("outside-use-ends",),
    "nowhere": ("device-returns",),
    "retry": ("time",),
}


#: The rules that keep a session waiting even if enough memory is free.
_BARRED = ("budget", "class-closed")

#: Maps an event in ``changes`` and a :data:`~.model.HostLack` to the event that replaces it. With
#: such a lack, more free host memory would not end the wait.
_HOST_CHANGES: dict[str, dict[HostLack, str]] = {
    "host-memory": {"size": "holder-frees", "quota": "holder-host-memory"},
}


def explain_all(facts: Facts, plan: Plan) -> dict[str, Explanation]:
    """Return a map from each session's id to the result of :func:`explain` for the session."""
    shares = Shares(facts)
    shares.order()
    return {s.id: _explain(shares, plan, s) for s in facts.sessions.values()}


def explain(facts: Facts, plan: Plan, s: Session) -> Explanation:
    """Return why ``s`` waits or keeps its slice: the rule, the leases that it waits for, and what
    ends the wait.
    """
    shares = Shares(facts)
    shares.order()
    return _explain(shares, plan, s)


def _explain(shares: Shares, plan: Plan, s: Session) -> Explanation:
    facts, why, held = shares.facts, plan.reasons.get(s.id), plan.reservation
    queue = [w.id for w in plan.queue]
    names = [w.id for w in plan.order]
    reserved = held.wanted if held is not None and held.session == s.id else {}
    # If a session waits for its budget, or until the schedule allows its class, it does not wait
    # for leases of others.
    holders = () if why is None or why.rule in _BARRED else tuple(_holders(shares, s, why))
    changes = _CHANGES[why.rule] if why is not None else ()
    if why is not None and why.lacks:
        changes = tuple(_HOST_CHANGES.get(name, {}).get(why.lacks, name) for name in changes)
    times: list[tuple[float, str]] = []
    if "idle-lease-yields" in changes:
        for h in holders:
            yields = "idle-lease-yields" if h.use == "idle" else "busy-lease-yields"
            times += _named(h.yields_at, yields)
            times += _named(None if h.covered else h.rule_at, yields)
            times += _named(h.ends_at, "kernel-ends")
        times += _named(_raised_at(shares, plan, s, holders), "ageing")
        spent = shares.spent(s.owner)
        times += _named(None if spent is None else spent.until, "budget-renews")
    elif why is not None and why.rule in _BARRED:
        times += _named(why.at, "settings" if why.rule == "class-closed" else "budget-renews")
    elif "time" in changes:
        times += _named(s.retry_at, "retry")
    changes_at, changes_by = min(
        (found for found in times if facts.now < found[0] < math.inf),
        key=lambda found: found[0],
        default=(None, ""),
    )
    own = {x.device for x in s.lease.slices}
    promise = plan.promises.get(s.id)
    return Explanation(
        session=s.id,
        reason=why,
        position=queue.index(s.id) + 1 if s.id in queue else None,
        ahead=tuple(names[: names.index(s.id)]) if s.id in names else (),
        promised=promise.takes if promise is not None else (),
        reserved=tuple(Slice(uuid, size) for uuid, size in reserved.items()),
        holders=holders,
        host=_host(facts, s.owner) if why is not None and why.lacks == "room" else None,
        changes=changes,
        changes_at=changes_at,
        changes_by=changes_by,
        takers=tuple(
            w.id
            for w in plan.order
            if w is not s and not _barred(plan, w) and _wants(facts, w, own)
        ),
        taken_from=yields_at(s, facts) if s.state == "idle" else None,
        claims=tuple(_claims(shares, plan, s, own)),
        obstacle=obstacle(s, facts),
        ends_at=_ends_at(s, facts),
        preempted=s.preempted,
        standing=standing(shares, s.owner, facts.now, shares.entitled.get(s.id, ())),
        text=reason(facts, plan, s) or stays_reason(facts, s, facts.now),
    )


def _named(at: float | None, change: str) -> list[tuple[float, str]]:
    return [] if at is None else [(at, change)]


def standing(shares: Shares, owner: Owner, now: float, entitled: Collection[str] = ()) -> Standing:
    """Return the :class:`Standing` of ``owner`` at ``now``.

    ``entitled`` are the groups whose guarantee covers the request of the owner's waiting session.
    """
    facts = shares.facts
    path = shares.tree.path(owner.group)
    held = {name: usage.stays for name, usage in facts.group_usage.items()}
    return Standing(
        groups=path,
        shares=tuple(shares.parts(owner)),
        above=shares.above(owner),
        guarantees=tuple(
            _guarantee(shares, name, held.get(name, 0))
            for name in path
            if name in shares.tree.guarantees
        ),
        entitled=tuple(name for name in path if name in entitled),
        budgets=tuple(budgets(facts, owner, now)),
    )


def _guarantee(shares: Shares, name: str, held: int) -> GroupGuarantee:
    group = shares.tree.groups[name]
    whole = group.guarantee if group.guarantee_here is not None else None
    return GroupGuarantee(
        name, held, shares.tree.guarantees[name], None if whole is None else whole.bytes
    )


def _claims(
    shares: Shares, plan: Plan, s: Session, own: set[str]
) -> Iterable[tuple[str, float, str]]:
    """Yield one entry for each waiting session that may preempt the lease of ``s``.

    An entry is the rule that allows this, the time from which it allows it, and the session's id.
    """
    if obstacle(s, shares.facts) or (s.state == "idle" and unprotected(s, shares.facts)):
        return
    for w in plan.order:
        if w is s or w.id not in plan.reasons or _barred(plan, w):
            continue
        if not _wants(shares.facts, w, own):
            continue
        for tier, at in Asker(w, shares).claims(s, foresee=True):
            if at < math.inf and not covered(w, [(s, tier)], {}, shares):
                yield rule_of(tier, w, s, shares), at, w.id
                break


def _barred(plan: Plan, w: Session) -> bool:
    why = plan.reasons.get(w.id)
    return why is not None and why.rule in _BARRED


def _ends_at(s: Session, facts: Facts) -> float | None:
    at = ends_at(s, facts)
    return None if at == math.inf else at


def _raised_at(shares: Shares, plan: Plan, s: Session, holders: Iterable[HeldLease]) -> float:
    """Return when age raises ``s`` to a class that may end its wait; infinity if never.

    In such a class, ``s`` passes a session that is ahead of it in the queue, or may preempt a lease
    that it may not preempt now.
    """
    facts, settings = shares.facts, shares.facts.settings
    if s.state != "queued" or settings.ageing <= 0 or shares.above(s.owner):
        return math.inf
    spent = shares.spent(s.owner) is not None
    # Age raises all waiting sessions. So the sessions of one owner keep their order, and ``s`` can
    # pass only sessions of other owners. Without shares, all sessions keep their order.
    ahead = [
        shares.level(w)
        for w in plan.order[: plan.order.index(s)]
        if shares.fair and w.owner != s.owner
        if w.id not in shares.entitled and (shares.spent(w.owner) is not None) == spent
    ]
    leases = [facts.sessions[h.session] for h in holders if h.use != "leaving"]
    asker, own = Asker(s, shares), settings.priority_classes.get(s.request.priority, 0)
    for number in sorted(n for n in settings.priority_classes.values() if n > asker.level):
        at = s.wait.since + settings.ageing * (number - own)
        if any(level <= number for level in ahead):
            return at
        asker.level = number
        claims = [
            max(at, since)
            for v in leases
            for tier, since in asker.claims(v, foresee=True)
            if tier in (TURN, TURN - 1) and not covered(s, [(v, tier)], {}, shares)
        ]
        if min(claims, default=math.inf) < math.inf:
            return min(claims)
    return math.inf


def _host(facts: Facts, owner: Owner) -> HostMemory:
    own, others = list[int](), list[int]()
    for s in facts.sessions.values():
        size = s.suspended_bytes + s.lease.host_bound
        if size:
            (own if s.owner.name == owner.name else others).append(size)
    budget = facts.settings.host_memory
    return HostMemory(budget, sum(own), len(own), sum(others), len(others))


def _holders(shares: Shares, s: Session, why: Reason) -> Iterable[HeldLease]:
    facts, draft, asker = shares.facts, Draft(shares.facts, shares), Asker(s, shares)
    own = why.rule in ("quota", "quota-host", "behind-own") and not why.group
    for v in facts.leased.values():
        if v is s or (own and v.owner.name != s.owner.name):
            continue
        if why.rule in ("cap", "behind-group") and why.group not in facts.tree.path(v.owner.group):
            continue
        idle = v.state == "idle"
        use = "idle" if idle else "leaving" if v.state == "detaching" else "busy"
        yields, leaves = (yields_at(v, facts), leaves_at(v, facts)) if idle else (None, None)
        mine = v.owner.name == s.owner.name
        label = v.label if mine else ""
        each = asker.claims(v, foresee=True) if use != "leaving" else ()
        found = sorted((at, tier) for tier, at in each if at < math.inf)
        lack = draft.host_lack([v], facts.host_room) if use != "leaving" else ""
        if idle and v.pressed and v.state_bound:
            lack = "room"  # memory is short in its control group, even if the machine has enough
        rule, rule_at, covers = "", None, False
        if found and not unprotected(v, facts):
            rule_at, tier = found[0]
            rule, covers = rule_of(tier, s, v, shares), covered(s, [(v, tier)], {}, shares)
        for x in v.lease.slices:
            if own or _wants(facts, s, {x.device}):
                yield HeldLease(
                    session=v.id,
                    device=x.device,
                    bytes=x.bytes,
                    use=use,
                    yields_at=yields,
                    leaves_at=leaves,
                    own=mine,
                    label=label,
                    priority=v.request.priority,
                    rule=rule,
                    rule_at=rule_at,
                    covered=covers,
                    unmoved=lack,
                    ends_at=_ends_at(v, facts),
                )


def _wants(facts: Facts, w: Session, devices: set[str]) -> bool:
    needs = asking(w, facts).needs
    return any(need.allows(facts.devices[uuid]) for uuid in devices for need in needs)
