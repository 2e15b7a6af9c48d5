# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What users and groups have used on all nodes, for fair shares. Pure.

Every usage decays by the same factor, so the sum over all nodes decays by this factor, too. The
last usage that a node reported still counts after the node is gone.
"""

from __future__ import annotations

from .ledger_nodes import Node
from .messages import HolderKind, Report, Usages

#: If the ledger has sums of more than ``MOST`` users and groups, it forgets each sum of at most
#: ``NOTHING`` GPU-seconds.
NOTHING, MOST = 0.1, 100_000


class AllUsage:
    """The decayed usage of all users and groups, from the reports of the nodes."""

    def __init__(self) -> None:
        self._half_life = 0.0
        #: By user or group: the sum over all nodes, and the time for which it was computed.
        self._sums: dict[tuple[HolderKind, str], tuple[float, float]] = {}

    def reported(self, node: Node, report: Report, now: float) -> None:
        """Store a node's usage, if the report has it."""
        if report.usage is None:
            return
        self._half_life = report.half_life
        before, since = node.usage, node.usage_at
        for holder in {**before, **report.usage}:
            had = before.get(holder, 0.0) * self._left(now - since)
            self._sums[holder] = self._sum(holder, now) - had + report.usage.get(holder, 0.0), now
        node.usage, node.usage_at, node.asks = report.usage, now, True
        if len(self._sums) > MOST:
            self._sums = {h: x for h, x in self._sums.items() if self._sum(h, now) > NOTHING}

    def elsewhere(self, node: Node, now: float) -> Usages | None:
        """Return what a node's users and groups have used on other nodes.

        Return None if the node has reported no usage since the last call.
        """
        if not node.asks:
            return None
        node.asks = False
        left = self._left(now - node.usage_at)
        return {
            holder: max(0.0, self._sum(holder, now) - used * left)
            for holder, used in node.usage.items()
        }

    def _sum(self, holder: tuple[HolderKind, str], now: float) -> float:
        amount, at = self._sums.get(holder, (0.0, now))
        return amount * self._left(now - at)

    def _left(self, seconds: float) -> float:
        return 2.0 ** (-max(0.0, seconds) / self._half_life) if self._half_life > 0 else 0.0
