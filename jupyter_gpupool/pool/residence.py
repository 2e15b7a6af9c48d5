# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Minimum residence: how long an idle holder keeps its slice from sessions that wait for it.

Moving a holder out and in again takes ``cost`` seconds in which the GPU computes nothing. To leave
an idle holder where it is while a session waits wastes the GPU as well, second by second, until the
holder computes again. Which is cheaper depends on when it comes back, which is not known: the
ski-rental problem (rent or buy), as in spinning or blocking on a lock. Plain functions over plain
values; the pool keeps the values and sets its timer to :func:`protected_until`.

The rule, for a holder whose state was moved to its slice:

1. *No session waits*: its slice is not preempted. The clock starts when one waits while the holder
   computes nothing.
2. *Patience.* It is protected for :func:`patience` from then on: ``cost`` at most, as in A. Karlin,
   M. Manasse, L. Rudolph, D. Sleator, "Competitive snoopy caching", Algorithmica 3 (1988), 79-119.
   Less where its own last gaps say so: the patience that would have cost least over those gaps, as
   in A. Karlin, K. Li, M. Manasse, S. Owicki, "Empirical studies of competitive spinning for a
   shared-memory multiprocessor", SOSP 1991, 41-55.
3. *Allowance.* Patience alone would let two loops with short pauses move each other at every
   longer one, or protect one of them without end. So use must pay for a move: once the holder has
   computed, and has kept its slice idle from a session that waited, for ``cost / share`` seconds
   in all since it came back, it is not protected any more.
   Idle time while no session waits counts as neither.

Worst cases:

* One gap: with patience x and a gap of length g, GPU time lost is g (it came back) or x + cost. The
  best in hindsight is min(g, cost). With x = cost this is never more than twice as much.
* Any gaps, with history: a shorter patience can lose more than that if the holder then comes back
  at once, so there is an account of it. ``trust`` is a balance in moves: every gap adds (2 x best -
  lost) / cost, and patience is never below cost x (1 - trust), the most that the balance can pay.
  It starts at 1, is cut off at 1, and never falls below 0, so over any sequence of gaps
  lost <= 2 x best + one move.
* Two holders that contend all the time, with pauses that patience outlasts: each move follows
  cost / share seconds of use, so moving takes at most share / (1 + share) of the time.
* A session waits for an idle GPU at most ``cost`` at a stretch and ``cost / share`` (``STAY_MOST``
  at most) in all, and then for the move. A computation that is running is another rule's business.

``cost`` is the holder's own way out and back, as measured. Every move is so paid for once: in a
cycle of two holders, each pays its own two copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

#: ``work`` is the rule above. ``clock`` is the one before it, kept to compare the two: a holder
#: keeps its slice for cost / share seconds after it came back, whether it computes or not.
ResidenceRule = Literal["work", "clock"]

#: The longest allowance, in seconds.
STAY_MOST = 600.0

#: Gaps that are remembered, and that there must be before they count.
GAPS, ENOUGH = 8, 3

#: A shorter patience must have lost at most this part of what the longest would have.
CLEAR = 0.75

#: A gap that is to be like one before may be longer by this factor.
SLACK = 1.5


@dataclass(frozen=True, slots=True)
class Habits:
    """What a session's past says of its next gap; it outlives the lease."""

    #: Seconds from the end of its work to its next wish, the latest last.
    gaps: tuple[float, ...] = ()
    #: Moves that a wrong guess may cost, from 0 to 1.
    trust: float = 1.0


@dataclass(frozen=True, slots=True)
class Gap:
    """A spell without work, from ``began`` on; ``math.inf`` for a time that has not come."""

    began: float
    #: When a session began to wait for the slice during it.
    wanted: float = math.inf
    #: When the slice was preempted for a session that waited.
    taken: float = math.inf


@dataclass(frozen=True, slots=True)
class Stay:
    """What a holder has done with its slice since its state was moved there, in seconds."""

    computed: float = 0.0
    #: Without work while a session waited for the slice.
    withheld: float = 0.0


def allowance(cost: float, share: float) -> float:
    """Return the seconds of use that pay for a move of ``cost``, at ``share`` of the time."""
    return min(STAY_MOST, cost / share)


def patience(habits: Habits, cost: float, away: float = 0.0) -> float:
    """Return how long an idle holder, ``away`` for so long already, is worth waiting for.

    The patience that would have cost least over those of its last gaps that ``away`` does not rule
    out, if that is clearly less than ``cost`` would have: a holder whose pauses are about as long
    as the move would else be moved at each. One that is away for longer than ever has left.
    """
    if len(habits.gaps) < ENOUGH or cost <= 0:
        return max(0.0, cost)
    left = [max(x - away, (SLACK - 1) * x) for x in habits.gaps if SLACK * x > away]
    options = sorted({0.0, cost, *(min(cost, SLACK * x) for x in left)})

    def total(option: float) -> float:
        return sum(x if x <= option else option + cost for x in left)

    best = min(options, key=lambda option: (total(option), -option)) if left else 0.0
    if total(best) > CLEAR * total(cost):
        best = cost
    return max(best, cost * (1.0 - habits.trust))


def protected_until(gap: Gap, stay: Stay, habits: Habits, *, cost: float, share: float) -> float:
    """Return until when an idle holder keeps its slice from waiting sessions.

    Minus infinity: it does not. Infinity: no session waits, and nothing is to be decided.
    """
    if share <= 0 or cost <= 0:
        return -math.inf
    left = allowance(cost, share) - stay.computed - stay.withheld
    if left <= 0:
        return -math.inf
    start = max(gap.began, gap.wanted)
    if start == math.inf:
        return math.inf
    return start + min(left, patience(habits, cost, start - gap.began))


def computed(stay: Stay, seconds: float) -> Stay:
    """Return the stay after so many more seconds of work."""
    return replace(stay, computed=stay.computed + max(0.0, seconds))


def kept_idle(stay: Stay, gap: Gap, now: float) -> Stay:
    """Return the stay after ``gap``, at the end of which it still had its slice."""
    return replace(stay, withheld=stay.withheld + _withheld(gap, now))


def taken(gap: Gap, stay: Stay, habits: Habits, now: float, *, cost: float, share: float) -> Gap:
    """Return ``gap`` with the slice preempted ``now`` for a waiting session.

    Where the allowance was at its end before patience, use has paid for the move: the gap says
    nothing of how well its length was guessed, and is not accounted for.
    """
    start = max(gap.began, gap.wanted)
    if share <= 0 or cost <= 0 or start == math.inf:
        return replace(gap, wanted=math.inf)
    left = allowance(cost, share) - stay.computed - stay.withheld
    if left < patience(habits, cost, start - gap.began):
        return replace(gap, wanted=math.inf)
    return replace(gap, taken=now)


def returned(habits: Habits, gap: Gap, now: float, cost: float) -> Habits:
    """Return the habits after ``gap``, which ends ``now`` because the session wants to work."""
    trust = habits.trust
    if cost > 0 and gap.wanted < math.inf:
        rent = _withheld(gap, min(now, gap.taken))
        lost = rent + (cost if gap.taken < math.inf else 0.0)
        best = min(_withheld(gap, now), cost)
        # A gap longer than patience in which no session could take the slice owes nothing more.
        trust += (2 * best - min(lost, 2 * cost)) / cost
    gaps = (*habits.gaps, max(0.0, now - gap.began))[-GAPS:]
    return Habits(gaps, min(1.0, max(0.0, trust)))


def _withheld(gap: Gap, until: float) -> float:
    """Return the seconds of ``gap`` before ``until`` in which a session waited."""
    return max(0.0, until - max(gap.began, gap.wanted))
