# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Why a session waits, or may lose what it has: data from the plan itself, and the same in lines.

:func:`explain` tells the rule, the leases that the session needs and who has them, where its owner
and groups stand, what would change it and when at the earliest. For a holder: what it is above or
below, who may take its lease, by which rule and from when on. Nothing is guessed: each figure is
what the pass compares. Other owners' sessions are told by size and class only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable

from ..units import format_bytes, format_seconds
from .facts import Facts, Session
from .model import Reason, Slice
from .placement import asking
from .preemption import leaves_at, unprotected, yields_at
from .running import RULES, claims, covered
from .schedule import Plan
from .shares import Budget, Shares, budgets
from .words import reason, stays_reason

# --------------------------------------------------------------------------- data


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease on a device that a waiting session could use."""

    session: str
    device: str
    bytes: int
    #: ``busy``, ``idle``, or ``leaving``: its suspend is under way.
    use: str
    #: When a waiting session may first preempt it; None while it is in use.
    yields_at: float | None
    #: When the pool suspends it even if no session waits; None while it is in use, infinity: never.
    leaves_at: float | None
    #: Whose it is: the session's own owner's, or another one's.
    own: bool = False
    label: str = ""
    priority: str = ""
    #: By which rule of :mod:`.running` the waiting session may preempt it while it is in use, and
    #: from when on; "" if by none. A guarantee may still cover it: see ``covered``.
    rule: str = ""
    rule_at: float | None = None
    #: A guarantee of its group covers it.
    covered: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """Where an owner stands: its groups, shares, guarantees and budgets."""

    #: The groups of the owner, the outermost first.
    groups: tuple[str, ...]
    #: (name, part used, part due) at each level of the tree, among those that use or wait; the name
    #: is "group NAME" or the owner's.
    shares: tuple[tuple[str, float, float], ...]
    #: It, or a group of it, has used more than its fair share.
    above: bool
    #: (group, bytes that its members have, bytes that are guaranteed to it).
    guarantees: tuple[tuple[str, int, int], ...]
    #: The groups within whose guarantee the request of a waiting session is.
    entitled: tuple[str, ...]
    budgets: tuple[Budget, ...]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The plan for one session, as data."""

    session: str
    #: Why it waits (an attached session: for growth); None if it does not.
    reason: Reason | None
    #: Its place in the queue for a lease (1: the first), and all sessions before it.
    position: int | None
    ahead: tuple[str, ...]
    #: The slices that it gets once suspends under way are done.
    promised: tuple[Slice, ...]
    #: Its reservation as the head of the queue: bytes wanted, by device.
    reserved: tuple[Slice, ...]
    #: The leases on the devices that it could use.
    holders: tuple[HeldLease, ...]
    #: Each of these may change it: ``suspend-ends``, ``lease-ends``, ``idle-lease-yields``,
    #: ``host-memory``, ``own-lease-ends``, ``head-is-served``, ``device-returns``,
    #: ``outside-use-ends``, ``time``.
    changes: tuple[str, ...]
    #: When time alone may change it: a lease of ``holders`` can be preempted, or the pool tries
    #: again. None if neither will happen.
    changes_at: float | None
    #: For a lease: the sessions that wait for its devices or some of them, and when they may
    #: preempt it.
    takers: tuple[str, ...]
    taken_from: float | None
    #: The rules by which sessions that wait may preempt a lease in use, and from when on: (rule,
    #: seconds since the epoch, session).
    claims: tuple[tuple[str, float, str], ...]
    #: Why it was preempted while in use; "" if it was not, or has its next lease.
    preempted: str
    standing: Standing
    #: The reason, or why an idle lease stays, in words; "" if there is nothing to tell.
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


def explain(facts: Facts, plan: Plan, s: Session) -> Explanation:
    """Return why ``s`` waits or keeps its slice: leases in its way, the rule, what changes it."""
    why, held = plan.reasons.get(s.id), plan.reservation
    shares = Shares(facts)
    shares.order()
    queue = [w.id for w in plan.queue]
    names = [w.id for w in plan.order]
    reserved = held.wanted if held is not None and held.session == s.id else {}
    holders = tuple(_holders(shares, s, why)) if why is not None else ()
    changes = _CHANGES[why.rule] if why is not None else ()
    times: Iterable[float] = ()
    if "idle-lease-yields" in changes:
        times = [h.yields_at for h in holders if h.yields_at is not None]
        times += [h.rule_at for h in holders if h.rule_at is not None and not h.covered]
    elif "budget-renews" in changes and why is not None:
        times = (why.at,)
    elif "time" in changes:
        times = (s.retry_at,)
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
        changes=changes,
        changes_at=min((t for t in times if facts.now < t < math.inf), default=None),
        takers=tuple(w.id for w in plan.order if w is not s and _wants(facts, w, own)),
        taken_from=yields_at(s, facts) if s.state == "idle" else None,
        claims=tuple(_claims(shares, plan, s, own)),
        preempted=s.preempted,
        standing=standing(shares, s),
        text=reason(facts, plan, s) or stays_reason(facts, s, facts.now),
    )


def standing(shares: Shares, s: Session) -> Standing:
    """Return where the owner of ``s`` stands."""
    facts, owner = shares.facts, s.owner
    path = shares.tree.path(owner.group)
    held = {name: usage.stays for name, usage in facts.group_usage.items()}
    return Standing(
        groups=path,
        shares=tuple(shares.parts(owner)),
        above=shares.above(owner),
        guarantees=tuple(
            (name, held.get(name, 0), shares.tree.guarantees[name])
            for name in path
            if name in shares.tree.guarantees
        ),
        entitled=tuple(name for name in path if name in shares.entitled.get(s.id, ())),
        budgets=tuple(budgets(facts, owner)),
    )


def _claims(
    shares: Shares, plan: Plan, s: Session, own: set[str]
) -> Iterable[tuple[str, float, str]]:
    """Yield by which rules, from when on, waiting sessions may preempt the lease of ``s``."""
    if s.state == "idle" and unprotected(s, shares.facts):
        return
    for w in plan.order:
        if w is s or w.id not in plan.reasons or not _wants(shares.facts, w, own):
            continue
        for tier, at in claims(w, s, shares):
            if not covered(w, [(s, tier)], {}, shares):
                yield RULES[tier], at, w.id
                break


def _holders(shares: Shares, s: Session, why: Reason) -> Iterable[HeldLease]:
    facts = shares.facts
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
        found = sorted((at, tier) for tier, at in claims(s, v, shares)) if use != "leaving" else []
        rule, rule_at, covers = "", None, False
        if found and not unprotected(v, facts):
            rule_at, tier = found[0]
            rule, covers = RULES[tier], covered(s, [(v, tier)], {}, shares)
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
                )


def _wants(facts: Facts, w: Session, devices: set[str]) -> bool:
    needs = asking(w, facts).needs
    return any(need.allows(facts.devices[uuid]) for uuid in devices for need in needs)


# --------------------------------------------------------------------------- the same in lines

#: Leases of other users that are told one by one; the rest is summed up.
MOST_TOLD = 6


def told(facts: Facts, plan: Plan, s: Session) -> tuple[str, ...]:
    """Return :func:`explain` for the owner of ``s``: a sentence per line, the most important first.

    Other users' sessions are told by size and class, never by name.
    """
    found = explain(facts, plan, s)
    lines = [*_state_lines(facts, plan, s, found)]
    if found.reason is not None:
        lines += _holder_lines(facts, found)
        lines += _change_lines(facts, found)
    elif s.lease.slices:
        lines += _exposed_lines(facts, s, found)
    lines += _standing_lines(facts, found.standing)
    return tuple(lines)


def _state_lines(facts: Facts, plan: Plan, s: Session, found: Explanation) -> Iterable[str]:
    sizes = ", ".join(f"{format_bytes(x.bytes)} on {_gpu(facts, x.device)}" for x in s.lease.slices)
    if found.position is not None:
        rank = f"It is {_ordinal(found.position)} of {len(plan.queue)} in the queue"
        yield f"{rank}: {found.text}."
        if found.standing.entitled:
            yield (
                f"What it asks for is guaranteed to its group {found.standing.entitled[0]}, so it "
                "goes before all that is not guaranteed."
            )
    elif found.reason is not None:
        yield f"It has {sizes} and is guaranteed more; that must wait."
    elif s.lease.slices:
        use = {"active": "uses", "idle": "keeps, without using it,"}.get(s.state, "has")
        yield f"It {use} {sizes}." + (f" {found.text}" if found.text else "")
    else:
        yield "It has no slice and waits for none."


def _holder_lines(facts: Facts, found: Explanation) -> Iterable[str]:
    others = 0
    for h in found.holders:
        if not h.own:
            others += 1
            if others > MOST_TOLD:
                continue
        who = f"Your kernel {h.label or h.session}" if h.own else "A kernel of another user"
        use = {"busy": "uses", "idle": "keeps", "leaving": "is giving back"}[h.use]
        what = f"{who} (class {h.priority}) {use} {format_bytes(h.bytes)} on "
        yield what + f"{_gpu(facts, h.device)}{_taken(facts, h)}."
    if others > MOST_TOLD:
        yield f"So do {others - MOST_TOLD} more kernels of other users."


def _taken(facts: Facts, h: HeldLease) -> str:
    """Return from when on the waiting session may preempt a lease, as the end of a sentence."""
    if h.use == "leaving":
        return ""
    if h.covered:
        return "; a guarantee of its group covers it"
    times = [at for at in (h.yields_at, h.rule_at) if at is not None]
    if not times or min(times) == math.inf:
        return "; no rule lets this kernel take it"
    at = min(times)
    rule = f" ({_RULE_WORDS[h.rule]})" if h.rule and at == h.rule_at else ""
    enough = ", if that makes enough room" if at <= facts.now else ""
    return f"; this kernel may take it {_when(at, facts.now)}{rule}{enough}"


_RULE_WORDS = {
    "burst": "it has more than it is guaranteed",
    "guarantee": "by the guarantee of your group, or as its budget is used up",
    "class": "its class is lower",
    "turns": "its turn is over then",
}


def _change_lines(facts: Facts, found: Explanation) -> Iterable[str]:
    words = [_CHANGE_WORDS[name] for name in found.changes if name in _CHANGE_WORDS]
    if words:
        yield f"It goes on when {' or '.join(words)}."
    if found.changes_at is not None:
        yield f"The clock alone changes something {_when(found.changes_at, facts.now)}."


_CHANGE_WORDS = {
    "suspend-ends": "the suspend under way is done",
    "lease-ends": "another kernel stops using its GPU",
    "own-lease-ends": "another kernel of yours gives its slice back",
    "group-lease-ends": "another kernel of the group gives its slice back",
    "head-is-served": "the first of the queue has its slice",
    "host-memory": "host memory becomes free",
    "device-returns": "the GPU is back in service",
    "outside-use-ends": "programs outside the pool free their memory",
    "budget-renews": "there are GPU-seconds again",
    "settings": "the schedule or the administrator lets its class run",
}


def _exposed_lines(facts: Facts, s: Session, found: Explanation) -> Iterable[str]:
    """Yield what a holder is above or below, and who may take its lease."""
    if s.id in facts.grown:
        most = format_bytes(s.request.memory)
        yield f"It has more than the {most} that it is guaranteed; what is beyond goes first."
    for name, held, guaranteed in found.standing.guarantees:
        where = "at or below" if held <= guaranteed else "above"
        yield f"Its group {name} is {where} its guarantee."
    if found.claims:
        rule, at, _ = min(found.claims, key=lambda claim: claim[1])
        yield f"A waiting kernel may take it {_when(at, facts.now)}: {_CLAIM_WORDS[rule]}."
    elif found.takers and s.state == "idle" and found.taken_from is not None:
        if found.taken_from < math.inf:
            yield f"A waiting kernel may take it {_when(found.taken_from, facts.now)}: it is idle."
    elif found.takers:
        yield "Other kernels wait for this GPU, and no rule lets them take this slice."


_CLAIM_WORDS = {
    "burst": "it has grown beyond what it is guaranteed",
    "guarantee": "the other one's group is guaranteed it, or the budget of this one is used up",
    "class": "the other one's class is higher",
    "turns": "its time slice is over, and the other one has used less for its weight",
}


def _standing_lines(facts: Facts, found: Standing) -> Iterable[str]:
    for name, held, guaranteed in found.guarantees:
        yield f"Group {name} has {format_bytes(held)}; {format_bytes(guaranteed)} is guaranteed."
    whole = "the pool"
    for name, used, due in found.shares:
        group = name.startswith("group ")
        who, whose = (f"G{name[1:]} has", "its") if group else ("You have", "your")
        if due < 1:
            yield f"{who} {used:.0%} of the usage of {whole}; {whose} fair share is {due:.0%}."
        whole = name
    for budget in found.budgets:
        whose = f"Group {budget.group} has" if budget.group else "You have"
        left = max(0.0, budget.daily.seconds - budget.used)
        line = f"{whose} {left:.0f} of {budget.daily.seconds:.0f} GPU-seconds left today"
        if budget.until < math.inf:
            what = "there are more" if budget.spent else "as things are, they are used up"
            line += f"; {what} {_when(budget.until, facts.now)}"
        yield f"{line}."


def _gpu(facts: Facts, uuid: str) -> str:
    return f"GPU {facts.devices[uuid].device.index}"


def _when(at: float, now: float) -> str:
    return "now" if at <= now else f"in {format_seconds(at - now)}"


def _ordinal(number: int) -> str:
    teen = 10 < number % 100 < 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
