# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a ledger knows about each node of its cluster. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Mapping

from .messages import Holding, Key, Report, Summary, Usages

#: The ledger keeps at most this many unconfirmed offers to one node. If there are more, it merges
#: the two oldest offers: the merged offer has the larger ceiling of each key.
OFFERS = 16

#: ``unheard``: no report shows yet that the node obeys this ledger (see :attr:`Node.heard`).
#: ``fenced``: the node's ceilings will be free soon. ``gone``: the node was fenced, and its
#: ceilings are free. ``draining``: the node drains, so it grants nothing more, or it has the order
#: to drain. ``left``: the node has drained, and no session of it has a slice.
NodeState = Literal["present", "silent", "unheard", "fenced", "gone", "draining", "left"]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, for people."""

    name: str
    life: int
    state: NodeState
    #: Seconds since its last report.
    age: float
    counted: Mapping[Key, int]
    #: The summary in its last report.
    summary: Summary | None = None


@dataclass(slots=True)
class Node:
    """What the ledger knows about one member."""

    name: str
    life: int = 0
    #: Whether the node obeys this ledger: a report of the node has contained this ledger's token.
    heard: bool = False
    #: Whether the node has left or was fenced in this life. If so, the ledger counts no ceiling of
    #: the node.
    gone: bool = False
    #: Whether a node that is gone had drained. A fenced node is gone without that.
    has_drained: bool = False
    number: int = 0
    #: When the last report arrived. For a node without a report: when the ledger learnt of the
    #: node.
    seen: float = 0.0
    serial: int = 0
    version: int = -1
    holdings: Mapping[Key, Holding] = field(default_factory=dict)
    waits: tuple[Mapping[Key, int], ...] = ()
    #: (serial number, ceilings) of offers that the node has not confirmed.
    offers: deque[tuple[int, dict[Key, int]]] = field(default_factory=deque)
    #: How much of each key counts for this node.
    counted: dict[Key, int] = field(default_factory=dict)
    #: When the ceilings of a fenced node are free; infinity if the node is not fenced.
    free_at: float = math.inf
    #: ``drains``: whether the node has reported that it drains. ``order``: an admin's order that
    #: the node has not yet executed: True to drain, False to come back, None for no order.
    #: ``order_serial``: the serial number of the first answer that contains the order.
    drains: bool = False
    order: bool | None = None
    order_serial: int = 0
    #: ``journal``: the journal of the last report that the ledger counted; "" before the first.
    #: ``is_new``: since that report, the node may have begun a new life, lost its journal, or
    #: obeyed another ledger.
    journal: str = ""
    is_new: bool = True
    #: ``usage``: the last usage that the node has reported, by user and group. ``usage_at``: the
    #: time of that report. ``asks``: the next answer must contain what these users and groups have
    #: used on other nodes.
    usage: Usages = field(default_factory=dict)
    usage_at: float = 0.0
    asks: bool = False
    summary: Summary | None = None

    def used(self, key: Key) -> int:
        """Return how much of a key the node's sessions used, according to the last report."""
        held = self.holdings.get(key)
        return 0 if held is None else held.used

    def read_state(self, report: Report) -> None:
        """Store the node's summary, and whether it drains and has executed the admin's order."""
        self.summary = report.summary
        self.drains = report.drains
        # ``drains`` alone does not prove that the node has executed the order. The node may already
        # have been in this state, and an earlier order that arrives late may still change the
        # state. So also check that the node has applied an answer that contains this order.
        if report.drains == self.order and report.applied >= self.order_serial:
            self.order = None

    def last_offer(self, key: Key) -> int:
        """Return the ceiling that the ledger last offered the node for a key."""
        for _, offered in reversed(self.offers):
            if key in offered:
                return offered[key]
        held = self.holdings.get(key)
        return 0 if held is None else held.ceiling

    def note_offer(self, ceilings: dict[Key, int]) -> None:
        """Note that the next answer offers ``ceilings``."""
        self.offers.append((self.serial + 1, ceilings))
        if len(self.offers) > OFFERS:
            (_, first), (serial, second) = self.offers.popleft(), self.offers.popleft()
            both = {key: max(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}
            self.offers.appendleft((serial, both))

    def view(self, now: float, ttl: float) -> NodeView:
        """Return the node for people; without a report for ``ttl`` seconds it is ``silent``."""
        age = now - self.seen
        state: NodeState = "draining" if self.drains or self.order else "present"
        if age > ttl:
            state = "silent"
        if self.gone:
            state = "left" if self.has_drained else "gone"
        elif self.free_at < math.inf:
            state = "fenced"
        elif not self.heard:
            state = "unheard"
        return NodeView(self.name, self.life, state, age, dict(self.counted), self.summary)
