# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Who goes first: one total order of waiting sessions, and a list that keeps it.

The order is by points: the number of the priority class, plus one point for every
``settings.ageing`` seconds of waiting. All waiting sessions age at the same speed, so that who of
two goes first never changes while both wait, and the order can be kept sorted:

    rank = queued_at / ageing - class number        (the smaller rank goes first)

A session of a class 100 points below another one therefore overtakes those that arrive
100 * ageing seconds after it: nobody starves. Equal ranks: older first, then first come.

Fair share will put the owner's decayed use in front of the age, as one more term of ``rank``; the
entries of that owner are then removed and added again when the figure moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Mapping

#: (rank, queued_at, number, least bytes that it needs on one device, session id)
Entry = tuple[float, float, int, int, str]


def rank(queued_at: float, priority: str, classes: Mapping[str, int], ageing: float) -> float:
    """Return the rank of a session; the smallest goes first. No ageing if ``ageing`` is not > 0."""
    points = classes.get(priority, 0)
    return queued_at / ageing - points if ageing > 0 else float(-points)


class WaitQueue(list[Entry]):
    """A sorted list of entries."""

    def add(self, entry: Entry) -> None:
        """Put ``entry`` in its place."""
        insort(self, entry)

    def remove(self, entry: Entry) -> None:
        """Take ``entry`` out.

        Raises
        ------
        KeyError
            If it is not there.
        """
        del self[self.position(entry) - 1]

    def first(self) -> Entry | None:
        """Return the entry that goes first, or None."""
        return self[0] if self else None

    def position(self, entry: Entry) -> int:
        """Return the place of ``entry``, 1 for the first."""
        at = bisect_left(self, entry)
        if at == len(self) or self[at] != entry:
            raise KeyError(entry)
        return at + 1
