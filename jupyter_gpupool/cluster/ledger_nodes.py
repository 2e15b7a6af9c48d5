# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a ledger knows of each node of its cluster. Pure."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, Mapping

from .messages import Holding, Key, Report, Summary, Usages

#: Unconfirmed offers to one node that are kept apart; more are merged, which counts no less.
OFFERS = 16

#: ``unheard``: since the ledger started. ``fenced``: its ceilings are about to be free. ``gone``:
#: they are. ``draining``: it grants nothing more. ``left``: it has drained, and no slice is left.
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
    #: What its last report said that it has.
    summary: Summary | None = None


@dataclass(slots=True)
class Node:
    """What the ledger knows of one member."""

    name: str
    life: int = 0
    #: The ledger has read a report of it since it started.
    heard: bool = False
    #: It has left, or was fenced, in this life: nothing of it counts.
    gone: bool = False
    number: int = 0
    #: When the last report arrived; for a node that was not heard: when the ledger learnt of it.
    seen: float = 0.0
    serial: int = 0
    version: int = -1
    holdings: Mapping[Key, Holding] = field(default_factory=dict)
    waits: tuple[Mapping[Key, int], ...] = ()
    #: (serial number, ceilings) of offers that it has not confirmed.
    offers: deque[tuple[int, dict[Key, int]]] = field(default_factory=deque)
    #: What counts of each key.
    counted: dict[Key, int] = field(default_factory=dict)
    #: It is fenced, and its ceilings are free at this time.
    free_at: float = math.inf
    #: It says that it drains; what an admin has ordered, until it says so; and the first answer
    #: with that order.
    drains: bool = False
    order: bool | None = None
    order_serial: int = 0
    #: What its users and groups had used at its last report of that, and when that was; and whether
    #: its next answer has what they have used on other nodes.
    usage: Usages = field(default_factory=dict)
    usage_at: float = 0.0
    asks: bool = False
    summary: Summary | None = None

    def used(self, key: Key) -> int:
        """Return how much of a key its sessions used at its last report."""
        held = self.holdings.get(key)
        return 0 if held is None else held.used

    def read_state(self, report: Report) -> None:
        """Note whether it drains, whether it has carried out its order, and what it has."""
        self.summary = report.summary
        self.drains = report.drains
        # Before it has read this order, it may have reported the same and then read an earlier one.
        if report.drains == self.order and report.applied >= self.order_serial:
            self.order = None

    def last_offer(self, key: Key) -> int:
        """Return the ceiling that it was offered last."""
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
        """Return what people see of it; without a report for ``ttl`` seconds it is silent."""
        age = now - self.seen
        state: NodeState = "draining" if self.drains or self.order else "present"
        if age > ttl:
            state = "silent"
        if self.gone:
            state = "left" if self.drains else "gone"
        elif self.free_at < math.inf:
            state = "fenced"
        elif not self.heard:
            state = "unheard"
        return NodeView(self.name, self.life, state, age, dict(self.counted), self.summary)
