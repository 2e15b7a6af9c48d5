# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Preemption of sessions in use: which may be preempted, from what time, and for which session.

A preempted session loses nothing: the pool suspends it while its cell runs, it waits in the queue,
and the cell continues with the next slice. These are the rules, from the first victim to the last
(tier 0 is an idle lease that nothing protects, see :mod:`.preemption`):

====  ==============  ==============================================================================
tier  rule            which holders, for which askers
====  ==============  ==============================================================================
1     ``burst``       holders that have more than their request guarantees, for any asker that needs
                      no more than its own request guarantees
2     ``guarantee``   holders outside the asker's group, for an asker within its group's guarantee;
                      and holders whose daily budget is used up, for an asker that has budget left
3     ``class``       holders of a lower class, for askers that need no more than their request
4     ``turns``       holders of the same class whose time slice is over, for an asker whose owner
                      has used less for its weight, by more than one time slice; sessions of one
                      owner take turns
====  ==============  ==============================================================================

For all of these rules, the pool does not preempt these holders:

* A holder that is protected by a guarantee of its own group. (A session of the same group may still
  preempt it.)
* A holder that cannot be suspended.
* A holder before its *minimum residence* is over. This is the measured time for moving its state
  out and in. (For ``burst``, it is the holder's time slice if its state was moved to its slice,
  because all of this state would have to come back.)

The rules treat protected idle holders (``%gpu keep``, ``reclaim_after``, residence) like busy
holders: an idle slice is never better protected than a slice in use.

*Two sessions never preempt each other again and again*, except by ``turns``, where this is the
purpose. A victim of ``guarantee`` belongs to a group that had more than its guarantee. So the
victim cannot take the slice back by a guarantee: with its request, its group still needs more than
its guarantee, and a guarantee covers the asker. By ``class``, a session preempts only sessions of a
lower class, and a session that was raised by its age keeps the class in which it got its lease. A
session that needs more than its request guarantees (because its state has grown) preempts only by
``guarantee`` and ``turns``. So a victim of ``burst`` does not take the slice back by its class.

*Time slices.* A slice lasts for ``cost / max_swap_overhead`` seconds (at least ``SLICE_LEAST``),
where ``cost`` is the measured time of the holder's own suspend and resume. So moving takes at most
``max_swap_overhead`` of the time. Sessions that fit beside each other stay: the pool preempts a
lease only if its bytes are needed. It preempts a lease on several devices as a whole.

*Thrashing.* If there are more sessions than fit, or more state, the GPUs must still do more than
copy. The pool lets sessions that would thrash run one after the other, for longer times. A time
slice has no upper bound: a session whose state takes two minutes to move has a slice of twenty
minutes (at 10 %). All devices copy to the same host memory. If many copies slow each other down or
wait for each other, the measured cost rises. Then every slice becomes longer, until all moves
together take no more than ``max_swap_overhead`` again. The price is a longer round (the sum of the
slices of all waiting sessions): a session waits for longer until it has its turn. Sessions that
should not wait belong in a higher class, or in a group with a guarantee.

A holder gives its turn to an asker of another owner only under one condition: the asker would still
be behind the holder after using as much as the holder uses in one slice. Otherwise the asker would
have to give the turn back at once. Between two sessions of one owner, this condition does not
apply. The holder whose slice ended first gives up its turn first. The asker must have waited for
``SLICE_LEAST``, so that a victim does not at once take a turn from another holder. (The asker need
not wait for as long as the holder's own slice lasts. With such a rule, the pool would never preempt
a holder with a longer slice than the others, because each asker would get the slice of another
holder sooner.)
"""

from __future__ import annotations

import math
from typing import Iterator, Mapping, Sequence

from ..states import ATTACHED
from .facts import Facts
from .model import PreemptRule
from .placement import asking
from .residence import SLICE_LEAST, guessed_cost, slice_length
from .session import NEVER, Session
from .shares import Shares

#: The shortest minimum residence of a holder, in seconds.
STAY_LEAST = 1.0

#: The tier of ``turns``.
TURN = 4
#: This is not a tier of :meth:`Asker.tier`. A used-up budget or a closed class ends a lease even if
#: no session waits.
STOPPED = 5
#: This is not a tier of :meth:`Asker.tier` either: an admin has recalled the slice.
RECALLED = 6

#: The rules by tier.
RULES: Mapping[int, PreemptRule] = {1: "burst", 2: "guarantee", 3: "class", 4: "turns"}
REASONS = {
    "burst": (
        "it has more memory than its guarantee covers, and another kernel needs its own guaranteed "
        "memory"
    ),
    "guarantee": "another kernel needs memory that is guaranteed to its group",
    "budget": "its GPU-seconds of today are used up, and another kernel needs the GPU",
    "class": "a kernel of a higher priority class needs the GPU",
    "turns": "its time slice is over, and another kernel has its turn",
}

#: For each rule of preemption: a sentence on what the owner of the preempted session can do.
REMEDIES = {
    REASONS["burst"]: (
        "Memory that you ask for with %gpu is guaranteed, so ask for as much as the kernel needs."
    ),
    REASONS["guarantee"]: "With a smaller request (%gpu) both kernels may fit.",
    REASONS["budget"]: "%gpu why shows when there are GPU-seconds again.",
    REASONS["class"]: "With a smaller request (%gpu) both kernels may fit.",
    REASONS["turns"]: (
        "Kernels do not take turns if all of them fit, so a smaller request (%gpu) may help."
    ),
}


def cost(s: Session, swap: float | None) -> float:
    """Return the measured or guessed seconds that moving ``s`` out and in takes.

    The guess comes from ``swap``, the mean of all sessions' suspends and resumes. Without this
    mean, it comes from the session's measured bytes on its devices, or from the granted bytes if
    there is no measurement.
    """
    known, lease = s.measured, s.lease
    if known.suspend is not None and known.resume is not None:
        return known.moving
    if swap is not None:
        return 2 * swap
    seen = len(lease.footprints) >= len(lease.slices)
    return guessed_cost(lease.footprint if seen else lease.granted)


def time_slice(s: Session, facts: Facts) -> float:
    """Return the length of a turn of ``s`` in seconds."""
    return slice_length(s.lease.cost, facts.settings.max_swap_overhead)


def began(s: Session) -> float:
    """Return when ``s`` got its present lease."""
    return max(s.lease.attached_at, s.lease.resumed_at)


def terms(s: Session, facts: Facts) -> tuple[int, float, float, int]:
    """Return (:attr:`Facts.version`, the first time at which a rule may preempt ``s`` while in use,
    the end of its turn, its class as a holder).

    The session caches the answer, as with :func:`~.preemption.times`. The class depends on the
    request and the lease, which change only inside :meth:`Facts.change`. Both times are infinity if
    no rule may preempt ``s``.
    """
    found: tuple[int, float, float, int] | None = s.using
    if found is None or found[0] != facts.version:
        at = ends = math.inf
        if movable(s, facts):
            least, ends = _times(s, facts)
            at, ends = max(s.retry_at, least), max(s.retry_at, ends)
        own = facts.settings.priority_classes.get(s.request.priority, 0)
        found = s.using = facts.version, at, ends, max(own, s.lease.level)
    return found


def use_times(s: Session, facts: Facts) -> tuple[float, float]:
    """Return the first time at which a rule may preempt ``s`` in use, and the end of its turn."""
    _, at, ends, _ = terms(s, facts)
    return at, ends


def _times(s: Session, facts: Facts) -> tuple[float, float]:
    """Return when the minimum residence of a lease is over, and when its time slice is over."""
    since, least = began(s), max(STAY_LEAST, s.lease.cost)
    return since + least, since + max(least, time_slice(s, facts))


def movable(s: Session, facts: Facts) -> bool:
    """Return whether ``s`` can be suspended while it is in use."""
    return (
        s.state in ATTACHED
        and (s.gated or s.state == "idle")
        and not s.pressed
        and not s.pinned_reason
        and all(facts.devices[x.device].device.can_suspend for x in s.lease.slices)
    )


def free_from(s: Session, facts: Facts) -> float:
    """Return the first time at which some rule allows a preemption of ``s`` while it is in use."""
    return use_times(s, facts)[0]


def slice_ends(s: Session, facts: Facts) -> float:
    """Return when the present turn of ``s`` is over."""
    return use_times(s, facts)[1]


def _guaranteed(asker: Session, holder: Session, shares: Shares) -> bool:
    """Return whether a guarantee covers the request of ``asker``, and ``holder`` is outside the
    group of this guarantee.
    """
    groups = shares.entitled.get(asker.id, frozenset())
    return bool(groups) and not groups <= set(shares.tree.path(holder.owner.group))


def rule_of(tier: int, asker: Session, holder: Session, shares: Shares) -> str:
    """Return the rule of a tier; ``budget`` if only the holder's used-up budget allows the
    preemption.
    """
    if tier == 2 and not _guaranteed(asker, holder, shares):
        return "budget"
    return RULES[tier]


class Asker:
    """The facts about an asking session that the rules read; they are the same for all holders."""

    def __init__(self, session: Session, shares: Shares) -> None:
        self.session = session
        self._shares = shares
        self._facts = shares.facts
        # The growth of an idle session serves no computation, so it preempts nothing. A session
        # whose budget is used up preempts nothing either.
        self._silent = session.state == "idle" or shares.spent(session.owner) is not None
        self._within = asking(session, shares.facts).modest
        #: The class of the session, raised by its age.
        self.level = shares.level(session)
        #: Whether its request is within the guarantee of a group.
        self.guaranteed = session.id in shares.entitled

    def claims(
        self, holder: Session, *, by: float = math.inf, stuck: bool = False, foresee: bool = False
    ) -> Iterator[tuple[int, float]]:
        """Yield the tiers in which the session may preempt ``holder`` while in use, each with the
        time at which it begins; tiers that begin after ``by`` may be missing.

        The answer ignores guarantees of the holder, which depend on the other victims
        (:func:`covered`). ``stuck``: treat the holder as if it could be suspended. ``foresee``: if
        the asker has used too much for a turn now, yield the turn with the time at which its usage
        will be low enough, if the rates stay as they are now.
        """
        asker, shares, facts = self.session, self._shares, self._facts
        if self._silent or asker is holder:
            return
        at, ends = _times(holder, facts) if stuck else use_times(holder, facts)
        if at == math.inf or at > by:
            return
        rules = facts.settings.preempt
        if self._within and "burst" in rules and holder.id in facts.grown:
            moved = holder.lease.resumed_at > NEVER
            yield 1, ends if moved else at
        overdrawn = shares.spent(holder.owner) is not None
        if "guarantee" in rules and (overdrawn or _guaranteed(asker, holder, shares)):
            yield 2, at
        level, its = self.level, holder_level(holder, facts)
        if level > its:
            if self._within and "class" in rules:
                yield 3, at
        elif level == its and "turns" in rules and ends <= by:
            if asker.owner == holder.owner or not shares.fair:
                yield TURN, max(ends, asker.wait.since + SLICE_LEAST)
                return
            debt = time_slice(holder, facts) * rate(holder, shares)
            if foresee:
                since = max(ends, facts.now)
                behind_from = shares.behind_from(asker.owner, holder.owner, debt, since)
                yield TURN, ends if behind_from <= since else behind_from
            elif shares.behind(asker.owner, holder.owner, debt):
                yield TURN, ends

    def tier(self, holder: Session) -> int | None:
        """Return the tier in which the session may preempt ``holder`` now although the holder is in
        use.
        """
        now = self._facts.now
        for tier, at in self.claims(holder, by=now):
            if at <= now:
                return tier
        return None


def open_above(holder: Session, level: int, shares: Shares, *, over: bool) -> float:
    """Return a bound: a session of this class, or of a lower class, cannot preempt ``holder`` in
    use.

    The bound does not apply to a session that is :attr:`~Asker.guaranteed`.

    ``level`` is the holder's class; ``over`` is true if its turn is over.
    """
    if holder.id in shares.facts.grown:
        return -math.inf
    if shares.budgeted and shares.spent(holder.owner) is not None:
        return -math.inf
    # Classes are whole numbers, so the holder's own class is above this bound.
    return level - 0.5 if over else level


def holder_level(s: Session, facts: Facts) -> int:
    """Return the class of a holder: its own, or the one in which it got its lease."""
    return terms(s, facts)[3]


def rate(s: Session, shares: Shares) -> float:
    """Return how much of a device ``s`` uses: its share of the memory or its share of the compute,
    whichever is larger.
    """
    account = shares.facts.meters.users.get(s.owner.name)
    return max(account.parts.get(s.id, (0.0, 0.0))) if account is not None else 0.0


def covered(
    asker: Session,
    victims: Sequence[tuple[Session, int]],
    leaving: Mapping[str, int],
    shares: Shares,
) -> bool:
    """Return whether a guarantee covers one of ``victims``, if they are preempted in this order.

    ``victims`` are sessions with their tiers. ``leaving``: by group, the bytes that this plan
    already suspends. A guarantee of a group to which the asker also belongs does not count here. No
    guarantee covers an idle lease that nothing protects.
    """
    guarantees, facts = shares.tree.guarantees, shares.facts
    if not guarantees or not any(tier for _, tier in victims):
        return False
    own = shares.tree.path(asker.owner.group)
    have: dict[str, int] = {}
    for v, tier in victims:
        names = [name for name in shares.tree.path(v.owner.group) if name in guarantees]
        for name in names:
            if name not in have:
                usage = facts.group_usage.get(name)
                have[name] = (usage.stays if usage else 0) - leaving.get(name, 0)
        if tier and shares.spent(v.owner) is None:
            for name in names:
                if name not in own and have[name] <= guarantees[name]:
                    return True
        for name in names:
            have[name] -= v.lease.charge
    return False


def kind_of(asker: Session, shares: Shares) -> object:
    """Return what :meth:`Asker.tier` reads of an asker without a lease, except for two things.

    The first is the time that the asker has waited, which counts between two sessions of one owner.
    The second is the usage and the leases of its owner. Two owners can have the same value only if
    they are in one group.
    """
    spent = shares.budgeted and shares.spent(asker.owner) is not None
    groups = shares.entitled.get(asker.id) if shares.entitled else None
    modest = asking(asker, shares.facts).modest
    return asker.owner.group, shares.level(asker), spent, groups, modest
