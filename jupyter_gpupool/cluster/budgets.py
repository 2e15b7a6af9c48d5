# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How much of each shared quota the broker of one node may grant. Pure.

The broker reports to the ledger what its sessions use and wait for. Each answer of the ledger
contains new ceilings. While the sessions use no more than the ceilings, the broker grants leases
without a message to the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Mapping, Sequence

from .messages import GUARANTEE, REFILL, Epoch, Holding, Key, Loan, Report, Spent

#: What a node does when the ledger is silent for longer than the time-out. ``closed``: the node's
#: sessions keep what they have, and get no more. ``min_share``: each user and group may use a fixed
#: share on each node. So all nodes together may exceed a quota, at most by the share times the
#: number of nodes.
OnLoss = Literal["closed", "min_share"]

#: Maximum number of waiting sessions in one report. When these sessions have got their slices,
#: later reports name the next sessions.
MOST_WAITS = 16


@dataclass(frozen=True, slots=True)
class Demand:
    """How much of a key a node's sessions use now, and how much the node would keep for them."""

    used: int = 0
    keep: int = 0


@dataclass(slots=True)
class Budgets:
    """What one node may use of each key.

    The object knows only keys that the broker has mentioned; the ceiling of any other key is 0.
    """

    node: str
    #: The number of this life of the node. It grows with each start of the broker, and each time
    #: the node comes back after it has drained or was fenced.
    life: int
    on_loss: OnLoss = "closed"
    #: By resource: how much each user or group may use on this node under ``min_share``.
    share: Mapping[str, int] = field(default_factory=dict)
    #: Whether the node drains: it grants nothing more and asks for nothing more. When no session
    #: has a slice, the ledger no longer counts the node.
    drains: bool = False
    #: Whether no session of this node has a slice. Sessions of users without a limit count, too.
    is_empty: bool = True
    epoch: Epoch = field(default_factory=Epoch)
    #: The name of the journal in which the broker records what its sessions use.
    journal: str = ""
    ceilings: dict[Key, int] = field(default_factory=dict)
    uses: dict[Key, Demand] = field(default_factory=dict)
    #: What each waiting session needs in addition to what it uses. The session that has waited
    #: longest comes first.
    waits: tuple[Mapping[Key, int], ...] = ()
    #: Keys that other nodes wait for.
    wanted: frozenset[Key] = frozenset()
    #: Keys of GPU-seconds that all nodes together have used up.
    used_up: frozenset[Key] = frozenset()
    #: Whether the node has drained and left, so that the ledger counts nothing for it any more.
    has_left: bool = False
    #: The time until which the node may grant from its ceilings.
    until: float = 0.0
    #: When the node sent the last report that the ledger has answered.
    heard: float | None = None
    #: Whether the next report must be sent at once, because something has changed.
    due: bool = True
    _number: int = 0
    _applied: int = 0
    _spent: Mapping[Spent, int] = field(default_factory=dict)
    _version: int = -1
    #: The number of the first report to the ledger of ``epoch``. Until the ledger has answered this
    #: report or a later one, each report contains ``spent``.
    _first: int = 1
    _told: bool = False
    #: The number of the last report that the node sent before it began to drain. When the ledger
    #: answered this report or an earlier report, it did not know that the node drains. So the node
    #: ignores an order in these answers.
    _changed: int = -1
    #: Whether a report of this life has said that the node has no session and leaves.
    _leaves: bool = False
    #: When the node sent its last reports, by number.
    _sent: dict[int, float] = field(default_factory=dict)

    # ------------------------------------------------------------------ what the broker may grant

    def is_connected(self, now: float) -> bool:
        """Return whether the ledger has answered in time."""
        return now < self.until

    def age(self, now: float) -> float | None:
        """Return the age in seconds of the last report that was answered; None if none was."""
        return None if self.heard is None else now - self.heard

    def most(self, key: Key, now: float) -> int:
        """Return how much of ``key`` the sessions of this node may use in total.

        If the sessions already use more in total, they keep all of it, but the node grants no more.
        While the ledger is silent, some ceilings stay in force, such as those of GPU-seconds: see
        :attr:`Key.lasts`.
        """
        # A node that drains claims no guarantee: the ledger may already have given the guarantee to
        # other nodes.
        if key.lasts and not (self.drains and key.resource == GUARANTEE):
            most = self.ceilings.get(key, 0)
            return min(most, self._used(key)) if self._leaves and key.is_seconds else most
        if self.drains:
            return 0
        if now < self.until:
            return self.ceilings.get(key, 0)
        return self.share.get(key.resource, 0) if self.on_loss == "min_share" else 0

    def parts(self) -> dict[Key, int]:
        """Return the ceilings that the broker keeps across a restart: see :attr:`Key.lasts`."""
        return {key: amount for key, amount in self.ceilings.items() if key.lasts}

    # ------------------------------------------------------------------ events

    def use(
        self,
        uses: Mapping[Key, Demand],
        waits: Sequence[Mapping[Key, int]] = (),
        *,
        is_empty: bool = False,
    ) -> None:
        """Set all that the broker's sessions use and wait for now, not only what has changed."""
        if is_empty != self.is_empty:
            self.is_empty = is_empty
            self.due = self.due or self.drains
        new = tuple(waits[:MOST_WAITS])
        if new != self.waits and any(
            key not in self.ceilings or uses.get(key, Demand()).used + need > self.ceilings[key]
            for wait in new
            for key, need in wait.items()
        ):
            self.due = True  # a session needs more
        if self.waits and not new:
            self.due = True  # nodes that wait behind this node may now get their turn
        for key, use in uses.items():
            if use.keep > max(self.ceilings.get(key, 0), self.uses.get(key, Demand()).keep):
                self.due = True
        old, self.uses = self.uses, {k: use for k, use in uses.items() if use != Demand()}
        self.waits = new
        for key in self.wanted & self.ceilings.keys():
            if self.uses.get(key, Demand()).used < old.get(key, Demand()).used:
                self.due = True

    def hurry(self) -> None:
        """Request that the next report is sent at once."""
        self.due = True

    def drain(self, drains: bool) -> None:
        """Begin to drain, and leave when no session has a slice; if not ``drains``, come back."""
        if drains == self.drains:
            return
        self.drains, self.due = drains, True
        if drains:
            self._changed = self._number
        else:
            # The old ceilings are void: the ledger may have lent these amounts to other nodes.
            self._begin_life()

    def _begin_life(self) -> None:
        self.life += 1
        self.ceilings.clear()
        self._leaves = False
        self._number = self._applied = 0
        self._first, self._told, self._changed = 1, False, -1
        self._sent.clear()
        self.has_left, self.due = False, True

    def answered(self, loan: Loan) -> None:
        """Apply an answer; ignore it if it is late, repeated, or from an earlier ledger."""
        if loan.life != self.life or loan.epoch < self.epoch:
            return
        if loan.epoch > self.epoch:
            # From now on the node ignores ledgers with a smaller token. The node keeps its
            # ceilings, and reports them to this ledger.
            self.epoch, self._applied, self._version = loan.epoch, 0, -1
            self._told, self.due = False, True
            self._first = self._number + 1
        if loan.gone and not (self.drains and self.is_empty):
            self._begin_life()
            return
        self._told = self._told or loan.number >= self._first
        sent = self._sent.get(loan.number)
        if sent is not None:
            self.until = max(self.until, sent + loan.ttl)
            self.heard = max(self.heard or sent, sent)
            for number in [n for n in self._sent if n < loan.number]:
                del self._sent[number]
        if loan.serial <= self._applied:
            return
        self._applied = loan.serial
        if loan.drains is not None and loan.number > self._changed:
            self.drain(loan.drains)
            if not self.drains:
                return
        self.has_left = self.drains and loan.gone
        self.wanted, self.used_up = loan.wanted, loan.used_up
        if loan.spent is not None and self._told:
            # The ledger has already read this node's copy of ``spent``. So the ledger's copy
            # replaces the node's copy.
            self._spent, self._version = loan.spent, loan.version
        for key, amount in loan.ceilings.items():
            had = self.ceilings.get(key, 0)
            # Sessions may have got slices after the node sent its report. So do not lower the
            # ceiling below what the sessions use now.
            new = max(amount, min(had, self.uses.get(key, Demand()).used))
            if new < had:
                self.due = True
            if new:
                self.ceilings[key] = new
            else:
                self.ceilings.pop(key, None)

    def report(self, now: float) -> Report:
        """Return the next report; the caller must store :meth:`parts`, then send the report."""
        self._number += 1
        self._sent[self._number] = now
        if len(self._sent) > 64:
            del self._sent[min(self._sent)]
        self.due = False
        if self.drains and self.is_empty:
            # The ledger will lend this node's unused GPU-seconds to other nodes. So from now on
            # this node uses no more of them: lower the ceilings to what the node has used.
            self._leaves = True
            for key in [key for key in self.ceilings if key.is_seconds]:
                self.ceilings[key] = min(self.ceilings[key], self._used(key))
        return Report(
            self.node, self.life, self._number, self.epoch, self._applied,
            {key: self._holding(key) for key in {**self.ceilings, **self.uses}},
            () if self.drains else self.waits,
            self._version, None if self._told else self._spent, self.drains,
            self.drains and self.is_empty, journal=self.journal,
        )  # fmt: skip

    def _used(self, key: Key) -> int:
        return self.uses.get(key, Demand()).used

    def _holding(self, key: Key) -> Holding:
        use = self.uses.get(key, Demand())
        # A draining node keeps its part of the refill, which brings back the GPU-seconds that the
        # node has used. Of all other keys, it keeps only what its sessions use now.
        keep = 0 if self.drains and key.resource != REFILL else use.keep
        return Holding(self.ceilings.get(key, 0), use.used, keep)
