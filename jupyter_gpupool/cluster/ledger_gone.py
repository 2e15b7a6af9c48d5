# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""GPU-seconds that nodes used before they left, were fenced or lost their journal. Pure.

Those of a budget with a window count until the window ends. Those of a budget that refills count
until they would have come back on that node.
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, Mapping, NamedTuple

from ..pool.groups import EXACT
from .ledger_counts import Counts
from .ledger_nodes import Node
from .messages import REFILL, Key, Report, recent

#: The ledger looks again at what comes back when this part of a budget is back.
BACK = 1 / 24


class Leak(NamedTuple):
    """GPU-seconds of a budget that refills, which a node used before it was gone."""

    #: When ``amount`` was true, and when the ledger looks again.
    since: float
    at: float
    node: str
    key: Key
    amount: float
    #: How much of the refill brings them back, and how much the ledger wants for them.
    part: int
    wish: int
    #: Whether the node says what it has used if it comes back. If its journal is lost, it cannot.
    is_gone: bool


class UsedByGone:
    """What nodes that are gone have used.

    Parameters
    ----------
    counts:
        The sums of the ledger; they include what this object counts.
    limit_of:
        Returns the limit of a key, or None if there is none.
    day:
        Seconds in which a whole budget that refills comes back.
    """

    def __init__(self, counts: Counts, limit_of: Callable[[Key], int | None], day: float) -> None:
        self._counts, self._limit_of, self._day = counts, limit_of, day
        #: By key with a window: what they have used up. The nodes keep a copy for a later ledger;
        #: ``version`` grows with each change.
        self.spent: dict[Key, int] = {}
        self.version = 1
        #: By node that is gone: which part of ``spent`` it may have used.
        self._by_gone: dict[str, dict[Key, int]] = {}
        self._leaks: list[Leak] = []

    def __iter__(self) -> Iterator[Leak]:
        """Iterate over the GPU-seconds that come back."""
        return iter(self._leaks)

    def amount(self, key: Key) -> int:
        """Return how many GPU-seconds of a key nodes that are gone have used."""
        back = sum(math.ceil(leak.amount) for leak in self._leaks if leak.key == key)
        return self.spent.get(key, 0) + back

    def next_wakeup(self) -> float:
        """Return when :meth:`refilled` has something to do; infinity if never."""
        return min((leak.at for leak in self._leaks), default=math.inf)

    def learn(self, spent: Mapping[Key, int]) -> None:
        """Count what an earlier ledger has counted, according to a node."""
        for key, amount in spent.items():
            if (more := amount - self.spent.get(key, 0)) > 0:
                self._spend(key, more)

    def left(self, node: Node, now: float, *, drained: bool) -> None:
        """Count what a node that is gone may have used, until it is back and says what it has.

        A node that has drained has no session, so it has used only what it has reported.
        """
        counted = {
            key: node.used(key) if drained and key.is_seconds else amount
            for key, amount in node.counted.items()
        }
        self._count(node.name, counted, now, is_gone=True)
        self._by_gone[node.name] = {key: n for key, n in counted.items() if key.window}

    def lost(self, node: Node, counted: Mapping[Key, int], now: float) -> None:
        """Count what a node may have used and never reports, because its journal is lost."""
        self._count(node.name, counted, now, is_gone=False)

    def is_back(self, node: Node, report: Report, now: float) -> None:
        """Count once what a node reports that was gone: the node knows what it has used."""
        for key, amount in self._by_gone.pop(node.name, {}).items():
            self._spend(key, -min(amount, report.used(key), self.spent.get(key, 0)))
        for leak in [leak for leak in self._leaks if leak.is_gone and leak.node == node.name]:
            self._leaks.remove(leak)
            left = self._stop(leak, now) - report.used(leak.key)
            if left > EXACT:
                self._leak(leak.node, leak.key, left, leak.part, now, is_gone=False)

    def _count(self, node: str, counted: Mapping[Key, int], now: float, *, is_gone: bool) -> None:
        for key, amount in counted.items():
            if key.window:
                self._spend(key, amount)
            elif key.is_seconds and amount:
                # They come back as fast as on that node: its part of the refill stays counted.
                part = counted.get(key._replace(resource=REFILL), 0)
                self._leak(node, key, amount, part, now, is_gone=is_gone)

    def refilled(self, now: float) -> list[Key]:
        """Count less of what comes back; return the keys of which more may be free."""
        over = [leak for leak in self._leaks if leak.at <= now]
        self._leaks = [leak for leak in self._leaks if leak.at > now]
        for leak in over:
            left = self._stop(leak, now)
            if left > EXACT:
                refill = leak.key._replace(resource=REFILL)
                free = (self._limit_of(refill) or 0) - self._counts.totals.get(refill, 0)
                part = max(0, free)
                self._leak(leak.node, leak.key, left, part, now, is_gone=leak.is_gone)
        return [*dict.fromkeys(leak.key for leak in over)]

    def _spend(self, key: Key, more: int) -> None:
        if not more:
            return
        self._counts.totals.add(key, more)
        every = {**self.spent, key: self.spent.get(key, 0) + more}
        self.spent = recent(every)
        self.version += 1
        for old in every.keys() - self.spent.keys():
            self._counts.totals.add(old, -every[old])

    def _leak(
        self, node: str, key: Key, amount: float, part: int, now: float, *, is_gone: bool
    ) -> None:
        """Count GPU-seconds of a node that is gone, while ``part`` of the refill is theirs."""
        refill = key._replace(resource=REFILL)
        wish = self._limit_of(refill) or 0
        self._counts.totals.add(key, math.ceil(amount))
        self._counts.totals.add(refill, part)
        self._counts.keeps.add(refill, wish)  # the nodes give up some of the refill
        wait = self._day * BACK
        if part:
            wait = min(wait, self._day * amount / part)
        self._leaks.append(Leak(now, now + wait, node, key, amount, part, wish, is_gone))

    def _stop(self, leak: Leak, now: float) -> float:
        """Count a leak no more; return which GPU-seconds of it have not come back yet."""
        refill = leak.key._replace(resource=REFILL)
        self._counts.totals.add(leak.key, -math.ceil(leak.amount))
        self._counts.totals.add(refill, -leak.part)
        self._counts.keeps.add(refill, -leak.wish)
        return leak.amount - leak.part * (now - leak.since) / self._day
