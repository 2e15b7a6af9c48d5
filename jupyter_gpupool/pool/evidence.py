# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What is known of past waits: from it come the ranges of :mod:`.estimate`. Plain values."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple, Sequence

#: Of all ranges, so many should hold the real wait.
COVER = 0.88

#: This many of the last waits count; with fewer waits there is no range. (A ninth wait is beyond
#: the least and the most of eight others in a fifth of all cases.)
MOST, LEAST = 100, 9

#: A shorter figure says nothing: an attach takes as long.
SHORTEST = 0.05


class Figure(NamedTuple):
    """A forecast of the simulation: the seconds that a wait lasts after ``at``."""

    at: float
    seconds: float
    #: For which place in the queue, and how many kernels are in its way.
    position: int
    holders: int
    #: Suspends under way make its room: nothing but these decides.
    moving: bool = False


@dataclass(frozen=True, slots=True)
class Expected:
    """Between which times a session will probably have its slice, and what that is based on."""

    since: float
    until: float
    #: How many past waits decide, and how many kernels are in the way.
    waits: int
    holders: int

    def left(self, now: float) -> tuple[float, float] | None:
        """Return the least and the most seconds from ``now`` on; None if its time has passed."""
        return (max(0.0, self.since - now), self.until - now) if self.until > now else None


class Last:
    """The last ``MOST`` numbers of a kind, in their order and by size."""

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, number: float) -> None:
        """Note one more, and forget the oldest."""
        if len(self._order) == MOST:
            self._sorted.remove(self._order.popleft())
        self._order.append(number)
        insort(self._sorted, number)

    def above(self, least: float) -> list[float]:
        """Return those above ``least``, the smallest first."""
        return self._sorted[bisect_right(self._sorted, least) :]

    def mean(self) -> float | None:
        """Return their mean; None if there are none."""
        return sum(self._sorted) / len(self._sorted) if self._sorted else None


@dataclass(slots=True)
class Evidence:
    """What estimates are made from; a restarted broker begins anew."""

    #: How long cells of any session ran.
    spells: Last = field(default_factory=Last)
    #: The ratios of waits for sessions in the way, and of waits for suspends under way.
    waits: Last = field(default_factory=Last)
    moves: Last = field(default_factory=Last)
    ended: int = 0

    def wait_ended(self, figures: Sequence[Figure], now: float) -> None:
        """Note that a session has its slice.

        One figure of each kind counts, in turns an early and a late one: a long wait has many, and
        must not count more than a short one.
        """
        self.ended += 1
        for moving in (False, True):
            alike = [figure for figure in figures if figure.moving == moving]
            if alike:
                figure = alike[self.ended % len(alike)]
                self._past(figure).add((now - figure.at) / figure.seconds)

    def expected(self, figure: Figure, now: float) -> Expected | None:
        """Return what ``figure`` and past waits say of a wait that still goes on ``now``."""
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
        """Return the seconds that a cell will run; None without evidence.

        ``own`` is the mean of earlier cells of its session; None if it has run none.
        """
        return self.spells.mean() if own is None else own

    def spell_left(self, own: float | None, runs: float) -> float | None:
        """Return the seconds that a cell will still run; it has run for ``runs`` seconds."""
        if own is not None and own > runs:
            return own - runs
        if own is None and self.spells.mean() is None:
            return None
        longer = self.spells.above(runs)
        # Of cells that have run for longer than all others, half go on for as long again.
        return sum(longer) / len(longer) - runs if longer else max(runs, SHORTEST)
