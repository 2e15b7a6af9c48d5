# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which rules of a calendar are in force at an instant, and when they change next. Pure.

A rule names days, and hours on a wall clock: ``20:00-08:00`` begins on each of its days and ends
the next morning. A clock that is put forward skips times, and a clock that is put back shows times
twice. The following definition covers both cases: **a time of day means the first instant of its
date at which the clock shows this time or a later time.** So a skipped time means the moment of the
jump, and a time shown twice means its first instant. Two rules that share a boundary therefore
never overlap and never leave a gap. A rule for a night is in force once, from its beginning to its
end, even if the night has 23 or 25 hours.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, tzinfo
from functools import lru_cache
from typing import Iterator, Sequence

#: Every rule begins at least once in this many seconds, in which each weekday occurs at least
#: twice. One day would not be enough, because the clock may skip the rule's hours on that day.
HORIZON = 15 * 86400

#: The minutes of a day.
DAY = 1440

_ONE_DAY = timedelta(days=1)


@dataclass(frozen=True)
class RuleTimes:
    """The times at which one rule is in force."""

    name: str
    #: Days on which the rule begins; 0 is Monday.
    days: frozenset[int]
    #: Pairs (begin, end) in minutes after midnight. If the end is not later than the begin, the end
    #: is on the next day.
    hours: tuple[tuple[int, int], ...]
    zone: tzinfo

    def times(self, since: float, until: float) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of each period in force that may overlap [``since``, ``until``]."""
        # Search from two days before ``since`` to one day after ``until``. One day on each side is
        # necessary, because hours may pass midnight. The second day at the beginning is necessary,
        # because a clock may skip a whole day.
        day = datetime.fromtimestamp(since, self.zone).date() - 2 * _ONE_DAY
        last = datetime.fromtimestamp(until, self.zone).date() + _ONE_DAY
        while day <= last:
            if day.weekday() in self.days:
                for first, end in self.hours:
                    begin = instant(day, first, self.zone)
                    over = instant(day, end if end > first else end + DAY, self.zone)
                    if begin < over:
                        yield begin, over
            day += _ONE_DAY

    def is_in_force(self, now: float) -> bool:
        """Return whether the rule is in force at ``now`` (seconds since the epoch)."""
        return any(begin <= now < end for begin, end in self.times(now, now))


def in_force(rules: Sequence[RuleTimes], now: float) -> tuple[int, ...]:
    """Return the indices of the rules that are in force at ``now``."""
    return tuple(index for index, rule in enumerate(rules) if rule.is_in_force(now))


def changes(
    rules: Sequence[RuleTimes], since: float, until: float
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each instant after ``since``, up to ``until``, at which the rules in force change.

    With each instant, yield the indices of the rules that are in force from then on.
    """
    steps: dict[int, list[tuple[int, int]]] = {}
    count = [0] * len(rules)
    for index, rule in enumerate(rules):
        for begin, end in rule.times(since, until):
            if begin <= since < end:
                count[index] += 1
            for edge, step in ((begin, 1), (end, -1)):
                if since < edge <= until:
                    steps.setdefault(edge, []).append((index, step))
    known = tuple(index for index, times in enumerate(count) if times)
    for edge in sorted(steps):
        for index, step in steps[edge]:
            count[index] += step
        now = tuple(index for index, times in enumerate(count) if times)
        if now != known:
            known = now
            yield edge, now


def next_change(rules: Sequence[RuleTimes], now: float) -> tuple[int, tuple[int, ...]] | None:
    """Return when the rules in force change next, and the rules in force then; None if never."""
    return next(changes(rules, now, now + HORIZON), None)


@lru_cache(maxsize=8192)
def instant(day: date, minute: int, zone: tzinfo) -> int:
    """Return the first second at which a clock in ``zone`` shows ``minute`` of ``day`` or later."""
    wall = datetime.combine(day, time()) + timedelta(minutes=minute)
    before, after = (int(wall.replace(tzinfo=zone, fold=fold).timestamp()) for fold in (0, 1))
    if before <= after:
        return before  # the first instant, also if the clock shows the time twice
    # The clock skips this time. Find the moment of the jump, which is between the two timestamps
    # (see PEP 495).
    early, late = after, before
    while late - early > 1:
        middle = (early + late) // 2
        if datetime.fromtimestamp(middle, zone).replace(tzinfo=None) >= wall:
            late = middle
        else:
            early = middle
    return late
