# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Behind the head: who might be served by what came free, in the order of the queue.

Blocked sessions are grouped by the devices that can serve them
(:func:`~.placement.groups_of`), each group in queue order with the bytes that its members need. So
the next one that fits is found without looking at those that do not.
"""

from __future__ import annotations

from .books import Books
from .placement import Asked, above
from .queue import Entry, WaitQueue


class Candidates:
    """One walk along the queue, behind ``after``.

    ``reach`` is the most bytes that each group can find; None: any device may do, for anybody.
    Nothing comes free during a walk, so what was too much once stays too much.
    """

    def __init__(self, books: Books, reach: dict[str, int] | None, after: Entry) -> None:
        if reach is None:
            self._groups: dict[str, WaitQueue] = {"": books.open}
            self._reach = {"": books.inventory.most()}
        else:
            self._groups = {group: books.groups[group] for group in reach if group in books.groups}
            self._reach = reach
        self._firsts: dict[str, Entry] = {}
        self._failed: dict[str, list[Asked]] = {}
        for group in self._groups:
            self._advance(group, after)

    def next(self) -> Entry | None:
        """Return the next candidate, and go on behind it."""
        if not self._firsts:
            return None
        group = min(self._firsts, key=self._firsts.__getitem__)
        entry = self._firsts[group]
        self._advance(group, entry)
        return entry

    def peek(self) -> Entry | None:
        """Return the next candidate."""
        return min(self._firsts.values(), default=None)

    def fell(self, reach: dict[str, int] | None) -> None:
        """Take note that somebody was served, and ``reach`` is what is left."""
        if reach is None:
            return
        self._reach = {group: min(most, reach.get(group, 0)) for group, most in self._reach.items()}
        for group, entry in list(self._firsts.items()):
            if entry[3] > self._reach[group]:
                self._advance(group, entry)

    def hopeless(self, asked: Asked) -> bool:
        """Return whether no more than ``asked`` was too much before in this walk."""
        return any(above(asked, less) for less in self._failed.get(asked[0][0], ()))

    def failed(self, asked: Asked) -> None:
        """Take note that ``asked`` is too much."""
        group, least, _ = asked[0]
        self._failed.setdefault(group, []).append(asked)
        if len(asked) == 1 and group in self._reach:
            # So it is for all of the group that need as much.
            self._reach[group] = min(self._reach[group], least - 1)
            entry = self._firsts.get(group)
            if entry is not None and entry[3] > self._reach[group]:
                self._advance(group, entry)

    def _advance(self, group: str, after: Entry) -> None:
        most = self._reach[group]
        found = self._groups[group].first_fitting(most, after) if most > 0 else None
        if found is None:
            self._firsts.pop(group, None)
        else:
            self._firsts[group] = found
