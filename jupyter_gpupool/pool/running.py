# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Preemption of sessions in use: which may be preempted, from what time, and for which session.

A preempted session loses nothing: the pool suspends it while its cell runs, the session waits in
the queue, and the cell continues when the session has a slice again. These are the rules, from the
first victim to the last (tier 0 is an idle lease that nothing protects, see :mod:`.preemption`):

====  ==============  ==============================================================================
tier  rule            which holders, for which askers
====  ==============  ==============================================================================
1     ``burst``       holders that have more than their request guarantees, for an asker that needs
                      no more than its own request guarantees
2     ``guarantee``   holders outside the asker's group, for an asker within its group's guarantee;
                      and holders whose daily budget is used up, for an asker that has budget left
3     ``class``       holders of a lower class, for an asker that needs no more than its own request
                      guarantees
4     ``turns``       holders of the same class whose time slice is over, for an asker of the same
                      owner, or of an owner with less usage for its weight (less by more than one
                      time slice)
====  ==============  ==============================================================================

For all of these rules, the pool does not preempt these holders:

* A holder that is protected by a guarantee of its own group. (A session of the same group may still
  preempt it.)
* A holder that cannot be suspended.
* A holder that has not yet had its slice for its *minimum residence*. This is the measured time for
  moving the holder's state out and in. (Under ``burst``, the minimum residence of a holder whose
  state was moved to its slice is its whole time slice, because the pool would have to move the
  whole state again.)

The rules treat a protected idle holder (``%gpu keep``, ``reclaim_after``, residence) like a busy
holder, so that an idle slice is never better protected than a slice in use.

*Two sessions never preempt each other again and again*, except by ``turns``, where this is the
purpose. The reasons by rule: ``guarantee``: the group of the victim had more than its guarantee.
With the victim's request, the group would again have more than its guarantee, so no guarantee
covers this request, and the victim cannot take the slice back by a guarantee. ``class``: a session
preempts only sessions of a lower class. If its age raised the session to a class, it keeps this
class while it has the lease. ``burst``: a session whose state has grown beyond its request preempts
only by ``guarantee`` and ``turns``, so a victim of ``burst`` cannot take the slice back by its
class.

*Time slices.* A slice lasts for ``cost / max_swap_overhead`` seconds (at least ``SLICE_LEAST``),
where ``cost`` is the measured time of the holder's own suspend and resume. So moving takes at most
``max_swap_overhead`` of the time. The pool preempts a lease only if it needs the lease's bytes, so
sessions that fit beside each other stay. If a lease is on several devices, the pool preempts the
whole lease.

*Thrashing.* If the sessions need more memory than the GPUs have, the GPUs must not spend most of
the time on copies. So the pool lets such sessions run one after the other, for longer times. A time
slice has no upper bound: if the state of a session takes two minutes to move, its slice lasts
twenty minutes (at 10 %). All devices copy to the same host memory. If many copies slow each other
down or wait for each other, the measured cost rises, so every slice becomes longer, until all moves
together take no more than ``max_swap_overhead`` again. The disadvantage is that a round (the sum of
the slices of all waiting sessions) becomes longer, so a session waits for longer until its turn.
Sessions that should not wait belong in a higher class, or in a group with a guarantee.

*Conditions of a turn.* If asker and holder have different owners, the holder gives up its turn only
if the asker's owner would still have used less after using as much as the holder uses in one slice.
Without this condition, the asker would have to give the turn back at once. If asker and holder have
the same owner, the asker must have waited for ``SLICE_LEAST``, so that a victim does not at once
take a turn from another holder. (The asker need not wait for as long as the holder's time slice
lasts. If it had to, a holder with a longer slice than all others would never be preempted: each
asker would get the slice of another holder sooner.) Of several holders, the holder whose slice
ended first gives up its turn first.
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
#: The tier of a lease that a used-up budget or a closed class ends even if no session waits.
#: :meth:`Asker.tier` never returns it.
STOPPED = 5
#: The tier of a lease whose slice an admin has recalled. :meth:`Asker.tier` never returns it.
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

#: What the owner of a preempted session can do, by the reason of the preemption.
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

    The guess comes from ``swap``, the mean time of the suspends and resumes of all sessions. If
    ``swap`` is None, the guess comes from the session's measured bytes on its devices, or from the
    granted bytes if the bytes have not been measured.
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
    """Return four values that tell when ``s`` may be preempted while it is in use.

    They are :attr:`Facts.version`, the first time at which a rule may preempt ``s`` while it is in
    use, the end of its turn, and its class as a holder. The session caches the answer, as with
    :func:`~.preemption.times`. The class depends on the request and the lease, which change only
    inside :meth:`Facts.change`. Both times are infinity if no rule may preempt ``s``.
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
    """Return the first time at which a rule may allow the pool to preempt ``s`` in use."""
    return use_times(s, facts)[0]


def slice_ends(s: Session, facts: Facts) -> float:
    """Return when the present turn of ``s`` is over."""
    return use_times(s, facts)[1]


def _guaranteed(asker: Session, holder: Session, shares: Shares) -> bool:
    """Return whether a group that ``holder`` does not belong to has a guarantee that covers the
    request of ``asker``.
    """
    groups = shares.entitled.get(asker.id, frozenset())
    return bool(groups) and not groups <= set(shares.tree.path(holder.owner.group))


def rule_of(tier: int, asker: Session, holder: Session, shares: Shares) -> str:
    """Return the rule by which ``asker`` preempts ``holder`` in this tier.

    In tier 2, the answer is ``guarantee`` if a guarantee allows the preemption. It is ``budget`` if
    only the used-up budget of the holder allows it.
    """
    if tier == 2 and not _guaranteed(asker, holder, shares):
        return "budget"
    return RULES[tier]


class Asker:
    """A waiting session that may preempt leases, with the facts that the rules compare."""

    def __init__(self, session: Session, shares: Shares) -> None:
        self.session = session
        self._shares = shares
        self._facts = shares.facts
        # An idle session that waits to grow computes nothing, so it may preempt no lease in use. A
        # session whose budget is used up may not preempt one either.
        self._silent = session.state == "idle" or shares.spent(session.owner) is not None
        self._within = asking(session, shares.facts).modest
        #: The class of the session, raised by its age.
        self.level = shares.level(session)
        #: Whether its request is within the guarantee of a group.
        self.guaranteed = session.id in shares.entitled

    def claims(
        self, holder: Session, *, by: float = math.inf, stuck: bool = False, foresee: bool = False
    ) -> Iterator[tuple[int, float]]:
        """Yield the tiers in which the session may preempt ``holder`` in use.

        Each tier comes with the first time at which the session may do so; tiers whose first time
        is after ``by`` may be missing. The answer ignores the guarantees that protect the holder,
        because they depend on the other victims (:func:`covered`). With ``stuck``, the answer is as
        if the holder could be suspended. ``foresee`` matters if the asker's owner has used too much
        for a turn now: the answer then includes the tier of ``turns``, with the time at which the
        usage will be low enough if the rates stay as they are now.
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
        """Return the tier in which the session may preempt ``holder`` in use now; None if it may
        not.
        """
        now = self._facts.now
        for tier, at in self.claims(holder, by=now):
            if at <= now:
                return tier
        return None


def open_above(holder: Session, level: int, shares: Shares, *, over: bool) -> float:
    """Return the number above which a class may allow a session to preempt ``holder`` in use.

    A session whose class has this number or a lower number cannot preempt the holder, except if the
    session is :attr:`~Asker.guaranteed`. ``level`` is the holder's class; ``over`` is true if the
    holder's turn is over.
    """
    if holder.id in shares.facts.grown:
        return -math.inf
    if shares.budgeted and shares.spent(holder.owner) is not None:
        return -math.inf
    # If the holder's turn is over, sessions of its own class may preempt it, too. Classes are whole
    # numbers, so ``level - 0.5`` is below the holder's class and above all lower classes.
    return level - 0.5 if over else level


def holder_level(s: Session, facts: Facts) -> int:
    """Return the class of a holder: its own class or the class in which it got its lease, whichever
    is higher.
    """
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
    """Return whether a guarantee protects one of ``victims`` if the pool preempts them in this
    order.

    ``victims`` are sessions with their tiers. ``leaving`` says for each group how many bytes this
    plan already suspends. The guarantee of a group to which the asker also belongs protects no
    victim from the asker. No guarantee protects a victim of tier 0, or a victim whose daily budget
    is used up.
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
    """Return the kind of an asker: what :meth:`Asker.tier` reads of an asker without a lease.

    :meth:`Asker.tier` also reads two things that are not part of the kind. The first is how long
    the asker has waited, which counts between two sessions of one owner (and between all sessions
    if past usage does not count). The second is the usage and the leases of the asker's owner.
    Sessions of two owners can have the same kind only if the owners are in one group.
    """
    spent = shares.budgeted and shares.spent(asker.owner) is not None
    groups = shares.entitled.get(asker.id) if shares.entitled else None
    modest = asking(asker, shares.facts).modest
    return asker.owner.group, shares.level(asker), spent, groups, modest
