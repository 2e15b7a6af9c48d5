# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A ledger's sums of each key over all nodes. Pure."""

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
    """The amounts of each key that the ledger counts, and the nodes for which it counts them."""

    def __init__(self) -> None:
        #: By key: the sum of what counts for all nodes, plus what gone nodes have used.
        self.totals = Sums()
        #: By key: the sum of :attr:`.messages.Holding.keep` over all nodes, plus what the ledger
        #: wants of a refill for gone nodes (:attr:`.ledger_gone.Leak.wish`).
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
