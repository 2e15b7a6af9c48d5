# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Minimum residence: how long an idle holder keeps its slice from sessions that wait for it.

Moving the state of an idle holder out and in again takes ``cost`` seconds, in which the GPU
computes nothing. If the holder keeps its slice while a session waits, the GPU also computes
nothing, until the holder computes again. Which choice is cheaper depends on when the holder
computes again, and the pool does not know this time. This is the ski-rental problem (rent or buy).
A thread that waits for a lock has the same problem: it can spin or block. The module has plain
functions over plain values; the pool keeps the values and sets its timer to
:func:`protected_until`.

The rule, for a holder whose state was moved to its slice:

1. *No session waits*: the pool does not preempt the slice. As soon as a session waits and the
   holder computes nothing, rule 2 begins.
2. *Patience.* The holder is now protected for :func:`patience`, which is at most ``cost``, as in
   A. Karlin, M. Manasse, L. Rudolph, D. Sleator, "Competitive snoopy caching", Algorithmica 3
   (1988), 79-119. The last gaps of the holder can make the patience shorter: the pool then takes
   the patience that would have cost least over these gaps, as in A. Karlin, K. Li, M. Manasse,
   S. Owicki, "Empirical studies of competitive spinning for a shared-memory multiprocessor", SOSP
   1991, 41-55.
3. *Allowance.* With patience alone, two sessions that compute in loops with short pauses would
   preempt each other at every longer pause, or one of them would be protected without end. So the
   protection also has a limit: it ends when the holder has used the slice for ``cost / share``
   seconds since its state was moved there. This use pays for a move. Computing time counts as use,
   and so does idle time while a session waits. Idle time while no session waits does not count.

Worst cases:

* One gap of length g, with patience x: the lost GPU time is g if the holder comes back in time, and
  x + cost if it comes back later. With full knowledge, the smallest loss would be min(g, cost).
  With x = cost, the loss is never more than twice this smallest loss.
* Any gaps, with history: a shorter patience can lose more than twice the smallest loss, if the
  holder comes back just after the move. So the pool keeps an account of the loss. ``trust`` is the
  balance of this account, in moves: every gap adds (2 x best - lost) / cost, where ``best`` is the
  smallest loss for this gap. Patience is never below cost x (1 - trust), so that the balance can
  pay for a wrong guess. The balance starts at 1, never rises above 1, and never falls below 0. So
  over any sequence of gaps, lost <= 2 x best + one move.
* Two holders that always contend, with pauses shorter than patience: each move follows cost / share
  seconds of use, so moves take at most share / (1 + share) of the time.
* A waiting session waits for an idle holder at most ``cost`` in one gap, and at most
  ``cost / share`` (or ``STAY_MOST``) in all gaps together; then it waits for the move. If the
  holder computes, other rules apply (:mod:`.running`).

``cost`` is the measured time of the holder's own suspend and resume, so each move is paid for only
once: if two holders take turns, each of them pays for its own two copies. The time for which these
copies waited for other moves on the same devices also counts (:func:`move_cost`). An example shows
why. Ten sessions use a device with room for six, and their pauses are a little longer than a move.
If this waiting time did not count, the sessions would preempt each other at every pause, and each
of them would wait for the moves of all ten. Because it counts, the cost of a move rises on a device
that mostly copies. Sessions with short pauses then keep their slices, so there are fewer moves, and
the cost falls again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

#: ``work`` is the rule above. ``clock`` is an older rule, which is here for comparison: after a
#: resume, a holder keeps its slice for cost / share seconds, even if it computes nothing.
ResidenceRule = Literal["work", "clock"]

#: The longest allowance, in seconds.
STAY_MOST = 600.0

#: How many gaps of a session the pool remembers, and how many it needs before it predicts from
#: them.
GAPS, ENOUGH = 8, 3

#: The pool uses a patience below ``cost`` only if the loss over the last gaps would have been at
#: most this part of the loss with the patience ``cost``.
CLEAR = 0.75

#: The shortest time slice, in seconds.
SLICE_LEAST = 10.0

#: The speed of moves that the pool assumes until it has measured one, in bytes per second.
RATE = 1 << 30

#: The wait of a move for other moves counts as at most this many times the duration of the move. A
#: longer wait may come from a driver that stalled, and does not show what moves usually cost.
CROWD = 10.0

#: A gap counts as similar to an earlier gap if it is at most this many times as long.
SLACK = 1.5


@dataclass(frozen=True, slots=True)
class Habits:
    """Figures on a session's past gaps, from which the pool predicts the next gap.

    The session keeps them after its lease ends.
    """

    #: The lengths of the gaps in seconds, the latest gap last. A gap lasts from the end of the
    #: session's work to its next hold.
    gaps: tuple[float, ...] = ()
    #: The balance of the account of the loss (see the start of this module), in moves, from 0 to 1.
    trust: float = 1.0


@dataclass(frozen=True, slots=True)
class Gap:
    """A time without work, from ``began`` on.

    ``wanted`` and ``taken`` are ``math.inf`` as long as their event has not happened.
    """

    began: float
    #: When, during the gap, a session began to wait for the slice.
    wanted: float = math.inf
    #: When the slice was preempted for a session that waited.
    taken: float = math.inf


@dataclass(frozen=True, slots=True)
class Stay:
    """How a holder has used its slice since its state was moved there, in seconds."""

    computed: float = 0.0
    #: Seconds without work while a session waited for the slice.
    withheld: float = 0.0


def allowance(cost: float, share: float) -> float:
    """Return the seconds of use that pay for a move of ``cost`` seconds."""
    return min(STAY_MOST, cost / share)


def move_cost(seconds: float, waited: float) -> float:
    """Return the cost, in seconds, of a suspend or resume that took ``seconds``.

    ``waited`` is the time for which the suspend or resume first waited for other moves.
    """
    return seconds + min(waited, CROWD * seconds)


def guessed_cost(size: int) -> float:
    """Return a guess of how many seconds it takes to move ``size`` bytes out and in again.

    The pool uses this guess until it has measured a move.
    """
    return 2 * size / RATE


def slice_length(cost: float, share: float) -> float:
    """Return the length of a time slice for a holder whose moves take ``cost`` seconds."""
    return max(SLICE_LEAST, cost / share) if share > 0 else SLICE_LEAST


def patience(habits: Habits, cost: float, away: float = 0.0) -> float:
    """Return how many seconds to wait for a holder that has already been idle for ``away`` seconds.

    The function finds the patience that would have lost the least time over those of the last gaps
    that were not clearly shorter than ``away``. If its loss is at most ``CLEAR`` times the loss
    with the patience ``cost``, the function returns it; otherwise it returns ``cost``. (Without
    ``CLEAR``, the pool would move a holder at each pause if the pauses are about as long as a
    move.) If all of the last gaps were clearly shorter than ``away``, the user has probably left,
    and the holder gets the least patience. The result is never below ``cost`` x (1 - ``trust``).
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

    The result is minus infinity if the holder is not protected. It is infinity while no session
    waits, because the patience is counted only from the time at which a session waits.
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
    """Return the stay with ``seconds`` more seconds of work."""
    return replace(stay, computed=stay.computed + max(0.0, seconds))


def kept_idle(stay: Stay, gap: Gap, now: float) -> Stay:
    """Return the stay after a ``gap`` in which the holder kept its slice."""
    return replace(stay, withheld=stay.withheld + _withheld(gap, now))


def taken(gap: Gap, stay: Stay, habits: Habits, now: float, *, cost: float, share: float) -> Gap:
    """Return ``gap`` with a note that the pool preempts the slice ``now`` for a waiting session.

    If the allowance ended before the patience, the result has no such note, and the gap will not
    change ``trust``: the use of the slice has paid for the move, and the gap does not show whether
    the patience was right.
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
        # The holder may have kept its slice for much longer than the patience, because no waiting
        # session could take it. ``trust`` must not fall for this reason, so the loss counts as at
        # most twice the cost of a move.
        trust += (2 * best - min(lost, 2 * cost)) / cost
    gaps = (*habits.gaps, max(0.0, now - gap.began))[-GAPS:]
    return Habits(gaps, min(1.0, max(0.0, trust)))


def _withheld(gap: Gap, until: float) -> float:
    """Return the seconds of ``gap`` before ``until`` in which a session waited."""
    return max(0.0, until - max(gap.began, gap.wanted))
