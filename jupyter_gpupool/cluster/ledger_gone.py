# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""GPU-seconds used by nodes that have left, were fenced, or have lost their journal. Pure.

If the budget has a window, these GPU-seconds count until the window ends. If the budget refills,
they count until the refill has brought them back.

Each amount belongs to a node and its journal. In one journal, the amount that a node has used in a
window only grows. So if several nodes have different copies of one amount, the largest is right.
No amount counts twice: when the node itself reports with the same journal, its report replaces the
amount that is counted here. (This is a grow-only counter: M. Shapiro et al., "A comprehensive study
of Convergent and Commutative Replicated Data Types", 2011.)
"""

from __future__ import annotations

import math
from typing import Callable, Iterator, Mapping, NamedTuple

from ..pool.groups import EXACT
from .ledger_counts import Counts, Sums
from .messages import REFILL, Key, Spent, recent

#: The ledger updates a :class:`Leak` at least once in the time in which this fraction of a whole
#: budget comes back.
BACK = 1 / 24


class Leak(NamedTuple):
    """GPU-seconds of a budget that refills, which a gone node has used and which come back."""

    #: ``since``: the time for which ``amount`` was computed. ``at``: the time of the next update.
    since: float
    at: float
    what: Spent
    amount: float
    #: ``part``: how many of these GPU-seconds come back per day, as a part of the budget's refill.
    #: ``wish``: the part of the refill that the ledger would like to use for them.
    part: int
    wish: int


class UsedByGone:
    """What nodes that are gone have used.

    Parameters
    ----------
    counts:
        The sums of the ledger; they include what this object counts.
    limit_of:
        Returns the limit of a key, or None if there is none.
    is_counted:
        Takes the names of a node and of a journal. Returns whether the ledger counts the node's own
        reports with this journal.
    day:
        Seconds in which a budget that refills comes back from zero to full.
    """

    def __init__(
        self,
        counts: Counts,
        limit_of: Callable[[Key], int | None],
        is_counted: Callable[[str, str], bool],
        day: float,
    ) -> None:
        self._counts, self._limit_of, self._day = counts, limit_of, day
        self._is_counted = is_counted
        #: What gone nodes have used of budgets with a window. The other nodes keep a copy, from
        #: which a later ledger learns these amounts. ``version`` grows with each change.
        self.spent: dict[Spent, int] = {}
        self.version = 1
        self._leaks: list[Leak] = []
        #: How much of each key this object counts.
        self._sums = Sums()

    def __iter__(self) -> Iterator[Leak]:
        """Iterate over the GPU-seconds that come back."""
        return iter(self._leaks)

    def amount(self, key: Key) -> int:
        """Return how many GPU-seconds of a key the gone nodes have used."""
        return self._sums.get(key, 0)

    def next_wakeup(self) -> float:
        """Return the time at which :meth:`refilled` has something to do; infinity if never."""
        return min((leak.at for leak in self._leaks), default=math.inf)

    def learn(self, spent: Mapping[Spent, int]) -> None:
        """Count the amounts in ``spent``: a node's copy of what an earlier ledger counted."""
        self._spend({
            what: amount
            for what, amount in spent.items()
            if not self._is_counted(what.node, what.journal)
        })  # fmt: skip

    def left(self, node: str, journal: str, counted: Mapping[Key, int], now: float) -> None:
        """Count what a node may have used, until the node reports again with this journal."""
        self._spend({
            Spent(node, journal, key): amount for key, amount in counted.items() if key.window
        })  # fmt: skip
        for key, amount in counted.items():
            if key.is_seconds and not key.window and amount:
                # Go on counting the node's part of the refill, too. So these GPU-seconds come back
                # as fast as they came back on the node.
                part = counted.get(key._replace(resource=REFILL), 0)
                self._leak(Spent(node, journal, key), amount, part, now)

    def drop(self, node: str, journal: str) -> list[Key]:
        """Remove the amounts that count for a node and its journal; return their keys."""
        keys = []
        for what in [what for what in self.spent if what[:2] == (node, journal)]:
            self._add(what.key, -self.spent.pop(what))
            self.version += 1
            keys.append(what.key)
        for leak in [leak for leak in self._leaks if leak.what[:2] == (node, journal)]:
            self._leaks.remove(leak)
            self._stop(leak)
            keys.append(leak.what.key)
        return keys

    def refilled(self, now: float) -> list[Key]:
        """Stop counting the GPU-seconds that the refill has brought back; return their keys."""
        over = [leak for leak in self._leaks if leak.at <= now]
        self._leaks = [leak for leak in self._leaks if leak.at > now]
        for leak in over:
            self._stop(leak)
            left = leak.amount - leak.part * (now - leak.since) / self._day
            if left > EXACT:
                refill = leak.what.key._replace(resource=REFILL)
                free = (self._limit_of(refill) or 0) - self._counts.totals.get(refill, 0)
                self._leak(leak.what, left, max(0, free), now)
        return [*dict.fromkeys(leak.what.key for leak in over)]

    def _spend(self, spent: Mapping[Spent, int]) -> None:
        more = {what: n for what, n in spent.items() if n > self.spent.get(what, 0)}
        if not more:
            return
        for what, amount in more.items():
            self._add(what.key, amount - self.spent.get(what, 0))
        every = {**self.spent, **more}
        self.spent = recent(every)
        self.version += 1
        for old in every.keys() - self.spent.keys():
            self._add(old.key, -every[old])

    def _leak(self, what: Spent, amount: float, part: int, now: float) -> None:
        """Count ``amount`` GPU-seconds of a gone node; ``part`` of them come back per day."""
        refill = what.key._replace(resource=REFILL)
        wish = self._limit_of(refill) or 0
        self._add(what.key, math.ceil(amount))
        self._counts.totals.add(refill, part)
        self._counts.keeps.add(refill, wish)  # so the nodes must give up a part of the refill
        wait = self._day * BACK
        if part:
            wait = min(wait, self._day * amount / part)
        self._leaks.append(Leak(now, now + wait, what, amount, part, wish))

    def _stop(self, leak: Leak) -> None:
        """Stop counting a leak."""
        refill = leak.what.key._replace(resource=REFILL)
        self._add(leak.what.key, -math.ceil(leak.amount))
        self._counts.totals.add(refill, -leak.part)
        self._counts.keeps.add(refill, -leak.wish)

    def _add(self, key: Key, more: int) -> None:
        self._sums.add(key, more)
        self._counts.totals.add(key, more)
