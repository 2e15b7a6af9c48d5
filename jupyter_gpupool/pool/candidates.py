# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Behind the head: who might be served by what came free, in the order of the queue.

Blocked sessions are grouped by the devices that can serve them
(:func:`~.placement.kind_of`), each group in queue order with the bytes that its members need. So
the next one that fits is found without looking at those that do not.
"""

from __future__ import annotations

from .books import Books
from .placement import MIXED
from .queue import Entry, WaitQueue

#: What a session asks for: (least bytes, bytes with headroom) for each slice, the smallest first.
Asked = list[tuple[int, int]]


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
            self._groups = {kind: books.kinds[kind] for kind in reach if kind in books.kinds}
            self._reach = reach
        self._firsts: dict[str, Entry] = {}
        self._failed: dict[str, list[Asked]] = {}
        for kind in self._groups:
            self._advance(kind, after)

    def next(self) -> Entry | None:
        """Return the next candidate, and go on behind it."""
        if not self._firsts:
            return None
        kind = min(self._firsts, key=self._firsts.__getitem__)
        entry = self._firsts[kind]
        self._advance(kind, entry)
        return entry

    def peek(self) -> Entry | None:
        """Return the next candidate."""
        return min(self._firsts.values(), default=None)

    def fell(self, reach: dict[str, int] | None) -> None:
        """Take note that somebody was served, and ``reach`` is what is left."""
        if reach is None:
            return
        self._reach = {kind: min(most, reach.get(kind, 0)) for kind, most in self._reach.items()}
        for kind, entry in list(self._firsts.items()):
            if entry[3] > self._reach[kind]:
                self._advance(kind, entry)

    def hopeless(self, kind: str, asked: Asked) -> bool:
        """Return whether no less than ``asked`` was too much before in this walk."""
        return any(_above(asked, less) for less in self._failed.get(kind, ()))

    def failed(self, kind: str, asked: Asked) -> None:
        """Take note that ``asked`` is too much for those of this kind."""
        if kind == MIXED:
            # Each of these can use other devices than the next.
            return
        self._failed.setdefault(kind, []).append(asked)
        if kind in self._reach and len(asked) <= 2 and asked[0] == asked[-1]:
            # So it is for all that need as much on every device, on as many or more of them.
            self._reach[kind] = min(self._reach[kind], asked[0][0] - 1)
            entry = self._firsts.get(kind)
            if entry is not None and entry[3] > self._reach[kind]:
                self._advance(kind, entry)

    def _advance(self, kind: str, after: Entry) -> None:
        most = self._reach[kind]
        found = self._groups[kind].first_fitting(most, after) if most > 0 else None
        if found is None:
            self._firsts.pop(kind, None)
        else:
            self._firsts[kind] = found


def _above(asked: Asked, less: Asked) -> bool:
    return len(asked) == len(less) and all(
        a >= x and b >= y for (a, b), (x, y) in zip(asked, less, strict=True)
    )
