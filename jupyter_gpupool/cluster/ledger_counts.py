# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The sums over all nodes that a ledger keeps of each key. Pure."""

from __future__ import annotations

from typing import Collection

from .messages import Key


class Sums(dict[Key, int]):
    """An amount of each key; a key without an entry has the amount 0."""

    def add(self, key: Key, more: int) -> None:
        """Add ``more``, which may be negative, to the amount of a key."""
        amount = self.get(key, 0) + more
        if amount:
            self[key] = amount
        else:
            self.pop(key, None)


class Counts:
    """How much of each key counts, and for which nodes."""

    def __init__(self) -> None:
        #: How much of each key counts for all nodes, plus what gone nodes have used.
        self.totals = Sums()
        #: How much of each key all nodes together would keep.
        self.keeps = Sums()
        #: For keys of GPU-seconds: how much the sessions of all nodes have used up.
        self.used = Sums()
        self._holders: dict[Key, set[str]] = {}

    def holders(self, key: Key) -> Collection[str]:
        """Return the nodes for which an amount of a key counts."""
        return self._holders.get(key, ())

    def add_holder(self, key: Key, node: str) -> None:
        """Note that an amount of a key counts for a node."""
        self._holders.setdefault(key, set()).add(node)

    def drop_holder(self, key: Key, node: str) -> None:
        """Note that nothing of a key counts for a node any more."""
        self._holders[key].discard(node)
        if not self._holders[key]:
            del self._holders[key]
