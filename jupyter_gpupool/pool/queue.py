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
from operator import itemgetter
from typing import Iterator, Mapping

#: (rank, queued_at, number, least bytes that it needs on one device, session id)
Entry = tuple[float, float, int, int, str]

#: Entries per block; a full block is split in two.
BLOCK = 128

_LEAST = itemgetter(3)


def rank(queued_at: float, priority: str, classes: Mapping[str, int], ageing: float) -> float:
    """Return the rank of a session; the smallest goes first. No ageing if ``ageing`` is not > 0."""
    points = classes.get(priority, 0)
    return queued_at / ageing - points if ageing > 0 else float(-points)


class WaitQueue:
    """A sorted list of entries in blocks.

    Adding, removing and ``position`` touch one block and one number per block, so that even 10,000
    waiting sessions cost microseconds; ``first_fitting`` skips whole blocks of larger requests.
    """

    def __init__(self) -> None:
        self._blocks: list[list[Entry]] = []
        self._lasts: list[Entry] = []
        self._least: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Entry]:
        for block in self._blocks:
            yield from block

    def add(self, entry: Entry) -> None:
        """Put ``entry`` in its place."""
        self._length += 1
        if not self._blocks:
            self._blocks.append([entry])
            self._lasts.append(entry)
            self._least.append(entry[3])
            return
        at = min(bisect_left(self._lasts, entry), len(self._blocks) - 1)
        block = self._blocks[at]
        insort(block, entry)
        self._lasts[at] = block[-1]
        self._least[at] = min(self._least[at], entry[3])
        if len(block) > BLOCK:
            half = len(block) // 2
            self._blocks[at : at + 1] = [block[:half], block[half:]]
            self._lasts.insert(at, block[half - 1])
            parts = self._blocks[at : at + 2]
            self._least[at : at + 1] = [min(map(_LEAST, part)) for part in parts]

    def remove(self, entry: Entry) -> None:
        """Take ``entry`` out.

        Raises
        ------
        KeyError
            If it is not there.
        """
        at, inside = self._find(entry)
        block = self._blocks[at]
        del block[inside]
        self._length -= 1
        if not block:
            del self._blocks[at], self._lasts[at], self._least[at]
            return
        self._lasts[at] = block[-1]
        if entry[3] == self._least[at]:
            self._least[at] = min(map(_LEAST, block))

    def first(self) -> Entry | None:
        """Return the entry that goes first, or None."""
        return self._blocks[0][0] if self._blocks else None

    def position(self, entry: Entry) -> int:
        """Return the place of ``entry``, 1 for the first."""
        at, inside = self._find(entry)
        return sum(map(len, self._blocks[:at])) + inside + 1

    def first_fitting(self, most: int, after: Entry | None = None) -> Entry | None:
        """Return the first entry behind ``after`` that needs at most ``most`` bytes on a device."""
        at, inside = 0, 0
        if after is not None:
            at = bisect_left(self._lasts, after)
            if at == len(self._blocks):
                return None
            block = self._blocks[at]
            inside = bisect_left(block, after)
            if inside < len(block) and block[inside] == after:
                inside += 1
        for index in range(at, len(self._blocks)):
            if self._least[index] <= most:
                block = self._blocks[index]
                for place in range(inside, len(block)):
                    if block[place][3] <= most:
                        return block[place]
            inside = 0
        return None

    def slice(self, start: int, stop: int) -> list[Entry]:
        """Return the entries at positions ``start`` (from 0) up to ``stop`` (not included)."""
        found: list[Entry] = []
        base = 0
        for block in self._blocks:
            if base >= stop:
                break
            if base + len(block) > start:
                found.extend(block[max(0, start - base) : stop - base])
            base += len(block)
        return found

    def _find(self, entry: Entry) -> tuple[int, int]:
        at = bisect_left(self._lasts, entry)
        if at < len(self._blocks):
            block = self._blocks[at]
            inside = bisect_left(block, entry)
            if inside < len(block) and block[inside] == entry:
                return at, inside
        raise KeyError(entry)
