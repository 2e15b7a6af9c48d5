# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Records of past waits and cells, from which :mod:`.estimate` computes its ranges."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

#: This part of all waits should end inside the range that was shown.
COVER = 0.88

#: Only the last ``MOST`` waits count. If fewer than ``LEAST`` waits count, there is no range. (With
#: ``LEAST`` waits, the range goes from the smallest ratio to the largest ratio. The next wait lies
#: outside this range in a fifth of all cases.)
MOST, LEAST = 100, 9

#: The smallest figure, in seconds: an attach alone takes this long.
SHORTEST = 0.05


class Figure(NamedTuple):
    """A forecast of the simulation, made at the time ``at``: the wait ends ``seconds`` later."""

    at: float
    seconds: float
    #: The session's place in the queue when this forecast was made, and how many leases were before
    #: it.
    position: int
    holders: int
    #: True if the session waits only for suspends under way.
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """The two times between which a session will probably get its slice, and the evidence for
    them.
    """

    since: float
    until: float
    #: The number of past waits from which the range was computed, and the number of leases ahead.
    waits: int
    holders: int

    def left(self, now: float) -> tuple[float, float] | None:
        """Return both times as seconds after ``now``; None if the second time has passed."""
        return (max(0.0, self.since - now), self.until - now) if self.until > now else None


class Last:
    """Keeps the last ``MOST`` numbers, both in order of arrival and in order of size."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, number: float) -> None:
        """Add a number; if there are ``MOST`` numbers already, forget the oldest one."""
        if len(self._order) == MOST:
            self._sorted.remove(self._order.popleft())
        self._order.append(number)
        insort(self._sorted, number)

    def above(self, least: float) -> list[float]:
        """Return the numbers above ``least``, the smallest first."""
        return self._sorted[bisect_right(self._sorted, least) :]

    def mean(self) -> float | None:
        """Return the mean of the numbers; None if there are none."""
        return sum(self._sorted) / len(self._sorted) if self._sorted else None


@dataclass(slots=True)
class Evidence:
    """All data behind the estimates; a restarted broker begins without data."""

    #: The durations of the past cells of all sessions, in seconds.
    spells: Last = field(default_factory=Last)
    #: Each number is the ratio of a past wait to its figure. ``waits`` has the waits for the leases
    #: of other sessions. ``moves`` has the waits for suspends under way.
    waits: Last = field(default_factory=Last)
    moves: Last = field(default_factory=Last)
    ended: int = 0

    def wait_ended(self, figures: Sequence[Figure], now: float) -> None:
        """Record that a wait has ended: the session has its slice.

        A long wait has many figures, but it must not count more than a short wait. So this method
        selects only one figure of each kind. The position of the selected figure changes from wait
        to wait, so that early figures and late figures count.
        """
        self.ended += 1
        for moving in (False, True):
            alike = [figure for figure in figures if figure.moving == moving]
            if alike:
                figure = alike[self.ended % len(alike)]
                self._past(figure).add((now - figure.at) / figure.seconds)

    def expected(self, figure: Figure, now: float) -> Expected | None:
        """Return the range for a wait that still lasts at ``now``; None with too few past waits."""
        at, seconds = figure.at, figure.seconds
        past = self._past(figure).above((now - at) / seconds)
        number = len(past)
        if number < LEAST:
            return None
        out = max(1, int((1.0 - COVER) / 2 * (number + 1)))
        least, most = past[out - 1], past[-out]
        return Expected(at + least * seconds, at + most * seconds, number, figure.holders)

    def _past(self, figure: Figure) -> Last:
        return self.moves if figure.moving else self.waits

    def next_spell(self, own: float | None) -> float | None:
        """Return the estimated seconds that a cell will run; None without evidence.

        ``own`` is the mean of the session's earlier cells; None if it has run none.
        """
        return self.spells.mean() if own is None else own

    def spell_left(self, own: float | None, runs: float) -> float | None:
        """Return the estimated seconds that a cell will still run, after ``runs`` seconds."""
        if own is not None and own > runs:
            return own - runs
        if own is None and self.spells.mean() is None:
            return None
        longer = self.spells.above(runs)
        # If no past cell has run longer than this cell, assume that half of this cell's run time is
        # over.
        return sum(longer) / len(longer) - runs if longer else max(runs, SHORTEST)
