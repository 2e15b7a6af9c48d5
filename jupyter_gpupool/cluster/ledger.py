# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The ledger: lends parts of the quotas of a cluster to its nodes. Events in, actions out.

Why no quota is ever exceeded
-----------------------------
A node uses no more of a key than its ceiling. So it is enough that the ceilings of all nodes never
sum to more than the limit. The ledger cannot know a ceiling, because messages take time; it counts
the largest that it can be: the one of the last report, what was in use then, and every ceiling
offered since that the node has not confirmed. A node applies answers in the order of their serial
numbers only, so an offer before the last one that it confirms is void. A smaller ceiling counts
once the node reports it.

What a ledger forgets
---------------------
Everything: it writes nothing to a disk. A new ledger learns from the reports. It lends nothing
before it has heard every member. The members are a list of the admin's or the engine's: a ledger
that took the nodes that it happens to hear for all would lend again what a node has that it cannot
reach. Each life of a ledger has a fencing token. A node that has reported to a ledger ignores every
one with a smaller token, so when the new ledger begins to lend, no node obeys an earlier one. (It
is the first phase of Paxos: L. Lamport, "Paxos Made Simple", 2001.)

A node that is silent
---------------------
Its kernels probably still run: Ray calls a machine dead after seconds without a heartbeat. So its
ceilings stay counted until it reports again, leaves, or is fenced: an admin says that no kernel
runs there any more, or takes it from the list. They count in any case until the node itself has
stopped to grant (``ttl`` after the last answer that it can have seen, and ``margin`` for a clock
that is slow).

Who gets what is free
---------------------
A session gets all its keys or none. Nodes whose sessions wait are served in the order in which they
began to wait, the same for all keys; what the first ones need is kept for them. So the first one is
always served in the end. What no session needs, nodes keep in proportion to what their sessions
would use; for a node that waits, those with the most give up what it lacks.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Iterable, Literal, Mapping

from .messages import Epoch, Holding, Key, Loan, Report

#: By user or group name and resource; ``"*"`` stands for all users without an entry.
Limits = Mapping[str, Mapping[str, Mapping[str, int]]]

#: Unconfirmed offers to one node that are kept apart; more are merged, which counts no less.
OFFERS = 16


# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``now`` is in seconds, of any steady clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """A node's report has arrived."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged(Event):
    """The list of nodes: all that may have ceilings, those included that are dead or silent.

    A node that is no longer in it counts as fenced.
    """

    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Event):
    """An admin says that no kernel runs on this node any more.

    A ledger that starts later does not know it: take a node that does not come back from the list.
    """

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged(Event):
    """The quotas have been read again."""

    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; see :meth:`Ledger.next_wakeup`."""


# --------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send this answer to its node."""

    answer: Loan


@dataclass(frozen=True, slots=True)
class Stop:
    """Another ledger has taken over: end, and send nothing more."""

    by: Epoch


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node has reported that is not in the list of members: it gets nothing."""

    node: str


Action = Send | Stop | Stranger

#: ``unheard``: since the ledger started. ``fenced``: its ceilings are about to be free.
NodeState = Literal["present", "silent", "unheard", "fenced", "gone"]

# --------------------------------------------------------------------------- state


@dataclass(slots=True)
class Node:
    """What the ledger knows of one member."""

    name: str
    life: int = 0
    #: This life of the ledger has read a report of it.
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


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, for people."""

    name: str
    life: int
    state: NodeState
    #: Seconds since its last report.
    age: float
    counted: Mapping[Key, int]


class Ledger:
    """Lends ceilings to nodes.

    Parameters
    ----------
    name:
        Another one for each life of a ledger.
    members:
        See :class:`MembersChanged`.
    ttl:
        Seconds without an answer after which a node grants nothing more from its ceilings.
    margin:
        Seconds that are added to that before the ceilings of a fenced node are free.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        members: Iterable[str],
        now: float,
        *,
        ttl: float = 8.0,
        margin: float = 2.0,
    ) -> None:
        self.epoch = Epoch(1, name)
        self.nodes = {member: Node(member, seen=now) for member in members}
        self.stopped = False
        self.ttl, self.margin = ttl, margin
        self._limits = limits
        self._now = now
        self._serving = False
        #: What nodes that are gone have used up.
        self._spent: dict[Key, int] = {}
        self._version = 1
        #: What counts of each key, over all nodes and what is spent.
        self._totals: dict[Key, int] = {}
        #: By key: the nodes of which something counts, and some of which nothing does any more.
        self._holders: dict[Key, set[str]] = {}
        #: What all nodes would keep of each key.
        self._keeps: dict[Key, int] = {}
        #: By key: the nodes that wait, the longest wait first, and what each needs. The order of
        #: two nodes is the same in all keys.
        self._queues: dict[Key, dict[str, int]] = {}
        #: The keys that each node waits for.
        self._waiting: dict[str, Mapping[Key, int]] = {}

    # ------------------------------------------------------------------ the door

    def handle(self, event: Event) -> list[Action]:
        """Take an event; return what must be done about it."""
        if self.stopped:
            return []
        self._now = max(self._now, event.now)
        actions: list[Action] = []
        if isinstance(event, Reported):
            actions += self._reported(event.report)
        elif isinstance(event, MembersChanged):
            for name in sorted(event.names - self.nodes.keys()):
                self.nodes[name] = Node(name, seen=self._now)
            for name in sorted(self.nodes.keys() - event.names):
                self._fence(name)
        elif isinstance(event, Fenced):
            self._fence(event.node)
        elif isinstance(event, LimitsChanged):
            self._limits = event.limits
        if not self.stopped:
            for node in [node for node in self.nodes.values() if node.free_at <= self._now]:
                actions += self._forget(node)
        return actions

    def next_wakeup(self) -> float:
        """Return when the ledger needs a :class:`Tick`; infinity if it needs none."""
        return min((node.free_at for node in self.nodes.values()), default=math.inf)

    @property
    def serving(self) -> bool:
        """Whether it lends: every member has been heard, or is gone.

        A member that is added later has nothing of an earlier ledger.
        """
        if not self._serving:
            self._serving = all(node.heard or node.gone for node in self.nodes.values())
        return self._serving

    def limit_of(self, key: Key) -> int | None:
        """Return the limit of a key; None if there is none."""
        known = self._limits.get(key.kind, {})
        found = known.get(key.name)
        if found is None and key.kind == "user":
            found = known.get("*")
        return None if found is None else found.get(key.resource)

    def counted(self, key: Key) -> int:
        """Return how much of a key the nodes may use at most, and have used up."""
        return self._totals.get(key, 0)

    def views(self) -> list[NodeView]:
        """Return all members, by name."""
        return [
            NodeView(
                node.name, node.life, self._state(node), self._now - node.seen, dict(node.counted)
            )
            for node in sorted(self.nodes.values(), key=lambda node: node.name)
        ]

    def _state(self, node: Node) -> NodeState:
        if node.gone:
            return "gone"
        if node.free_at < math.inf:
            return "fenced"
        if not node.heard:
            return "unheard"
        return "silent" if self._now - node.seen > self.ttl else "present"

    # ------------------------------------------------------------------ reports

    def _reported(self, report: Report) -> list[Action]:
        if report.epoch > self.epoch:
            if self.serving:
                self.stopped = True
                return [Stop(report.epoch)]
            self._begin(report.epoch.number + 1)
        node = self.nodes.get(report.node)
        if node is None:
            return [Stranger(report.node)]
        if report.life < node.life or (report.life == node.life and report.number <= node.number):
            return []
        if report.life > node.life:
            self._new_life(node, report)
        node.number = report.number
        if node.gone:
            return [Send(self._answer(node))]
        node.seen = self._now
        if node.free_at < math.inf and not report.leaves:
            node.free_at = math.inf  # it lives
        # While it obeys an earlier ledger, what it has can still change.
        if report.epoch == self.epoch and report.spent is not None and not node.heard:
            node.heard = True
            self._learn(report.spent)
        if report.epoch < self.epoch or not node.heard:
            return [Send(self._answer(node))]
        node.version = report.version
        freed = self._count(node, report)
        if report.leaves and not any(h.used for k, h in report.holdings.items() if not k.window):
            return [*self._forget(node), Send(self._answer(node))]
        if not self.serving:
            return [Send(self._answer(node))]
        # Those that wait longest first.
        return [*self._lend(node), *self._push_all(freed, but=node.name)]

    def _begin(self, number: int) -> None:
        """Begin anew with a greater token: what was heard so far may have changed since."""
        self.epoch = Epoch(number, self.epoch.ledger)
        for node in self.nodes.values():
            node.heard = False
            node.serial = 0
            node.version = -1

    def _new_life(self, node: Node, report: Report) -> None:
        """Let the offers to an earlier life count no more: no node applies them."""
        for key, amount in node.counted.items():
            # A broker that has lost its journal does not know what it has used up.
            now = report.holdings.get(key, Holding())
            if key.window and amount > max(now.used, now.ceiling):
                self._spend(key, amount - max(now.used, now.ceiling))
        node.life, node.number, node.serial, node.version = report.life, 0, 0, -1
        node.gone = False
        node.offers.clear()

    def _learn(self, spent: Mapping[Key, int]) -> None:
        for key, amount in spent.items():
            self._spend(key, amount - self._spent.get(key, 0))

    def _spend(self, key: Key, amount: int) -> None:
        if amount > 0:
            self._spent = {**self._spent, key: self._spent.get(key, 0) + amount}
            self._version += 1
            self._add(key, amount)

    # ------------------------------------------------------------------ counting

    def _count(self, node: Node, report: Report) -> list[Key]:
        """Count what a report says; return the keys of which there is more now."""
        while node.offers and node.offers[0][0] <= report.applied:
            node.offers.popleft()
        self._drop_keeps(node)
        old, node.holdings, node.counted = node.counted, report.holdings, {}
        freed, node.waits = [], report.waits
        if not node.waits and node.name in self._waiting:
            freed += self._leave_queues(node.name)
        for key, held in report.holdings.items():
            if amount := max(held.ceiling, held.used):
                node.counted[key] = amount
            if held.keep:
                self._keeps[key] = self._keeps.get(key, 0) + held.keep
        for _, ceilings in node.offers:
            for key, amount in ceilings.items():
                node.counted[key] = max(amount, node.counted.get(key, 0))
        for key in dict.fromkeys((*old, *node.counted)):
            self._holders.setdefault(key, set()).add(node.name)
            more = node.counted.get(key, 0) - old.get(key, 0)
            self._add(key, more)
            if more < 0:
                freed.append(key)
        return freed

    def _drop_keeps(self, node: Node) -> None:
        for key, held in node.holdings.items():
            if held.keep:
                self._keeps[key] -= held.keep
                if not self._keeps[key]:
                    del self._keeps[key]

    def _add(self, key: Key, amount: int) -> None:
        total = self._totals.get(key, 0) + amount
        if total:
            self._totals[key] = total
        else:
            self._totals.pop(key, None)

    # ------------------------------------------------------------------ lending

    def _lend(self, node: Node) -> list[Action]:
        """Answer a report: offer new ceilings, and ask others for what the node waits for."""
        waited = self._waiting.get(node.name, {})
        new = self._ceilings(node)
        ceilings = {k: n for k, n in new.items() if n != node.holdings.get(k, Holding()).ceiling}
        self._offer(node, ceilings)
        actions: list[Action] = [Send(self._answer(node, ceilings))]
        asked: dict[str, bool] = {}
        for key, need in self._waiting.get(node.name, {}).items():
            if key not in waited:
                asked.update(dict.fromkeys(self._keep_unused(key, need), True))
        for name in asked:
            if name != node.name:
                actions += self._push(self.nodes[name], less=True)
        return actions

    def _push(self, node: Node, *, less: bool = False) -> list[Action]:
        """Offer a node more without a report of it; with ``less`` also smaller ceilings."""
        ceilings: dict[Key, int] = {}
        for key, new in self._ceilings(node).items():
            last = _last(node, key)
            if new > last or (less and new < last):
                ceilings[key] = new
        if not ceilings:
            return []
        self._offer(node, ceilings)
        return [Send(self._answer(node, ceilings))]

    def _ceilings(self, node: Node) -> dict[Key, int]:
        """Return the ceilings that a node should have, of keys with a limit; note if it waits."""
        extra: dict[Key, int] = {}
        unserved: Mapping[Key, int] = {}
        left = _Left(self, node)
        for wait in node.waits:
            limited = {key: need for key, need in wait.items() if self.limit_of(key) is not None}
            used = {key: self._used(node, key) + extra.get(key, 0) for key in limited}
            if all(used[key] + need <= left.of(key) for key, need in limited.items()):
                for key, need in limited.items():
                    extra[key] = extra.get(key, 0) + need
            elif not unserved and all(
                need <= (self.limit_of(key) or 0) for key, need in limited.items()
            ):
                unserved = limited
        self._queue(node, unserved)
        found: dict[Key, int] = {}
        for key in {**node.holdings, **extra}:
            if self.limit_of(key) is None:
                continue
            held = node.holdings.get(key, Holding())
            new = held.used + extra.get(key, 0)
            found[key] = max(new, min(self._part(key, held.keep), left.unused(key)))
        return found

    def _part(self, key: Key, keep: int) -> int:
        """Return how much of a key a node may keep that would keep ``keep``, rounded up."""
        limit, keeps = self.limit_of(key) or 0, self._keeps.get(key, 0)
        return keep if keeps <= limit else -(-limit * keep // keeps)

    def _used(self, node: Node, key: Key) -> int:
        held = node.holdings.get(key)
        return 0 if held is None else held.used

    def _queue(self, node: Node, needs: Mapping[Key, int]) -> None:
        """Let a node wait for these amounts; {}: for nothing. Its place stays for the same keys."""
        if needs.keys() != self._waiting.get(node.name, {}).keys():
            self._leave_queues(node.name)
        if needs:
            self._waiting[node.name] = needs
            for key, need in needs.items():
                self._queues.setdefault(key, {})[node.name] = need

    def _leave_queues(self, name: str) -> list[Key]:
        keys = [*self._waiting.pop(name, ())]
        for key in keys:
            self._queues[key].pop(name, None)
            if not self._queues[key]:
                del self._queues[key]
        return keys

    def before(self, key: Key, node: Node) -> int:
        """Return how much of a key is kept for nodes that wait for longer than ``node``."""
        found = 0
        for name, need in [*self._queues.get(key, {}).items()]:
            if name == node.name:
                break
            if self._now - self.nodes[name].seen > self.ttl:
                self._leave_queues(name)  # silent since
            else:
                found += need
        return found

    def _push_all(self, keys: Iterable[Key], but: str = "") -> list[Action]:
        """Offer what has come free of ``keys`` to the nodes that wait for it."""
        waiting = dict.fromkeys(name for key in keys for name in self._queues.get(key, ()))
        return [
            action for name in waiting if name != but for action in self._push(self.nodes[name])
        ]

    def _keep_unused(self, key: Key, need: int) -> list[str]:
        """Return the nodes that keep the most of a key unused, until that is ``need``."""
        found = []
        for name in [*self._holders.get(key, ())]:
            node = self.nodes[name]
            if key not in node.counted:
                self._holders[key].discard(name)
            elif (spare := node.counted[key] - self._used(node, key)) > 0:
                found.append((spare, name))
        names: list[str] = []
        for spare, name in sorted(found, reverse=True):
            if need <= 0:
                break
            names.append(name)
            need -= spare
        return names

    def _offer(self, node: Node, ceilings: dict[Key, int]) -> None:
        """Count an offer from now on; the next answer makes it."""
        if not ceilings:
            return
        node.offers.append((node.serial + 1, ceilings))
        if len(node.offers) > OFFERS:
            (_, first), (serial, second) = node.offers.popleft(), node.offers.popleft()
            both = {key: max(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}
            node.offers.appendleft((serial, both))
        for key, amount in ceilings.items():
            had = node.counted.get(key, 0)
            if amount > had:
                node.counted[key] = amount
                self._holders.setdefault(key, set()).add(node.name)
                self._add(key, amount - had)

    def _answer(self, node: Node, ceilings: Mapping[Key, int] = {}) -> Loan:
        node.serial += 1
        wanted = frozenset(
            key for key in node.counted if any(n != node.name for n in self._queues.get(key, ()))
        )
        return Loan(
            node.name, node.life, node.number, self.epoch, node.serial, ceilings, wanted, self.ttl,
            self._version, self._spent if node.version != self._version else None, node.gone,
        )  # fmt: skip

    # ------------------------------------------------------------------ nodes that are gone

    def _fence(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is not None and node.free_at == math.inf and not node.gone:
            node.free_at = node.seen + self.ttl + self.margin

    def _forget(self, node: Node) -> list[Action]:
        """Count no ceiling of a node any more, except what it has used up."""
        freed = []
        for key, amount in node.counted.items():
            self._add(key, -amount)
            if key.window:
                self._spend(key, amount)
            else:
                freed.append(key)
        self._leave_queues(node.name)
        self._drop_keeps(node)
        node.counted, node.holdings, node.waits = {}, {}, ()
        node.free_at, node.gone = math.inf, True
        node.offers.clear()
        return self._push_all(freed) if self.serving else []


class _Left:
    """How much a node may have of each key, without what nodes before it wait for."""

    def __init__(self, ledger: Ledger, node: Node) -> None:
        self._ledger = ledger
        self._node = node
        self._known: dict[Key, int] = {}

    def of(self, key: Key) -> int:
        """Return the most that sessions may use."""
        if key not in self._known:
            # What it was just offered for a session stays, or two nodes would take it from each
            # other.
            kept = min(self._free(key), _last(self._node, key)) if self._node.waits else 0
            self._known[key] = max(self.unused(key), kept)
        return self._known[key]

    def unused(self, key: Key) -> int:
        """Return the most that it may keep for sessions to come."""
        return self._free(key) - self._ledger.before(key, self._node)

    def _free(self, key: Key) -> int:
        others = self._ledger.counted(key) - self._node.counted.get(key, 0)
        return (self._ledger.limit_of(key) or 0) - others


def _last(node: Node, key: Key) -> int:
    """Return the ceiling that a node was offered last."""
    for _, offered in reversed(node.offers):
        if key in offered:
            return offered[key]
    held = node.holdings.get(key)
    return 0 if held is None else held.ceiling
