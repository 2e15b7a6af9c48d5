# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The ledger lends parts of the quotas of a cluster to its nodes. Events in, actions out.

Why no quota is ever exceeded
-----------------------------
A node uses no more of a key than its ceiling. So no quota is exceeded if the ceilings of all nodes
together never exceed the limit. The ledger cannot know a node's ceiling exactly, because messages
take time. So the ledger counts the largest value that the ceiling can have. This value is the
maximum of three numbers: the ceiling in the last report, the amount in use in that report, and the
largest ceiling that the ledger has offered and the node has not confirmed. A node applies answers
only in the order of their serial numbers. So when a node confirms an offer, all earlier offers are
void. A smaller ceiling counts as soon as the node reports it.

What a ledger forgets
---------------------
A ledger forgets everything when it ends, because it writes nothing to a disk. A new ledger learns
from the reports of the nodes. It lends nothing before every member has reported: otherwise it would
lend again what an unreachable node has. The list of members comes from the admin's configuration.
Each life of a ledger has a fencing token. A node that has reported to a ledger ignores every ledger
with a smaller token. So when the new ledger begins to lend, no node obeys an earlier ledger. (This
is the first phase of Paxos: L. Lamport, "Paxos Made Simple", 2001.)

A node that is silent
---------------------
The kernels of a silent node probably still run: Ray declares a machine dead after only a few
seconds without a heartbeat. So the node's ceilings count until it reports again, leaves, or is
fenced. An admin fences a node in one of two ways: with an order that says that no kernel runs on
the node any more, or by removing the node from the list of members. The ceilings of a fenced node
count until the node has certainly stopped granting: ``ttl`` seconds after the last answer that it
can have seen. The ledger waits ``margin`` seconds more, because the node's clock may be slow.

A node that leaves
------------------
A node that leaves drains first: it grants nothing more. The amounts that its sessions hold count
until the sessions have given them back. A node that comes back begins a new life, because its old
ceilings are void: the ledger may have lent these amounts to other nodes.

Which node gets a free amount
---------------------
A session gets all its keys or none. If sessions of several nodes wait, the ledger serves the node
that began to wait first; this order is the same for all keys. The ledger reserves what a node needs
before it serves the nodes behind it, so every node gets its turn. If no session waits for an
amount, the ledger divides it among the nodes in proportion to what their sessions would use. If a
node waits, the nodes with the largest unused amounts give up what the waiting node lacks.
"""

from __future__ import annotations

import math
from typing import Iterable, Mapping

from ..pool.groups import DAY
from .ledger_counts import Counts
from .ledger_events import (
    Action,
    DrainAsked,
    Event,
    Fenced,
    FenceDropped,
    Limits,
    LimitsChanged,
    MembersChanged,
    Reported,
    Send,
    Stop,
    Stranger,
)
from .ledger_gone import BACK, UsedByGone
from .ledger_nodes import Node, NodeView
from .ledger_usage import AllUsage
from .messages import GUARANTEE, NOTHING, Epoch, Key, Loan, Report
from .queues import Queues

#: Maximum size of the cache of limits. Each day and each new user bring new keys.
MOST_KNOWN = 100_000


class Ledger:
    """Lends ceilings to nodes.

    Parameters
    ----------
    name:
        The name of this life of the ledger; each life has a different name.
    members:
        See :class:`MembersChanged`.
    ttl:
        Seconds without an answer after which a node grants nothing more from its ceilings.
    margin:
        Seconds after ``ttl`` until the ceilings of a fenced node are free.
    day:
        Seconds in which a budget that refills comes back from zero to full.
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
        day: float = DAY,
    ) -> None:
        self.epoch = Epoch(1, name)
        self.nodes = {member: Node(member, seen=now) for member in members}
        self._members = frozenset(self.nodes)
        #: Nodes that are fenced, and whose ceilings are not yet free.
        self._fenced: dict[str, Node] = {}
        #: A :class:`FenceDropped` for each fence that the ledger has removed during this event.
        self._dropped: list[Action] = []
        self.stopped = False
        self.ttl, self.margin = ttl, margin
        self._limits = limits
        #: A cache of limits by key. It is empty after a change of the limits.
        self._known: dict[Key, int | None] = {}
        self._now = now
        self._serving = False
        self._counts = Counts()
        #: Keys of GPU-seconds that were used up when the ledger last checked them.
        self._used_up: set[Key] = set()
        self._gone = UsedByGone(self._counts, self.limit_of, self._is_counted, day)
        self._queues = Queues(self._is_silent)
        self._usage = AllUsage()

    # ------------------------------------------------------------------ the interface

    def handle(self, event: Event) -> list[Action]:
        """Handle an event; return the actions that the caller must perform."""
        if self.stopped:
            return []
        self._now = max(self._now, event.now)
        actions: list[Action] = []
        if isinstance(event, Reported):
            actions += self._reported(event.report)
        elif isinstance(event, MembersChanged):
            self._members = event.names
            for name in sorted(event.names - self.nodes.keys()):
                self.nodes[name] = Node(name, seen=self._now)
            for name in sorted(self.nodes.keys() - event.names):
                self._fence(name)
        elif isinstance(event, Fenced):
            self._fence(event.node)
        elif isinstance(event, DrainAsked):
            actions += self._order(event)
        elif isinstance(event, LimitsChanged):
            self._limits = event.limits
            self._known.clear()
        if not self.stopped:
            for node in [node for node in self._fenced.values() if node.free_at <= self._now]:
                actions += self._forget(node, drained=False)
            freed = self._gone.refilled(self._now)
            if freed and self.serving:
                actions += self._push_all(freed)
        dropped, self._dropped = self._dropped, []
        return [*dropped, *actions]

    def next_wakeup(self) -> float:
        """Return the time at which the ledger needs a :class:`Tick`; infinity if it needs none."""
        times = [node.free_at for node in self._fenced.values()]
        return min((*times, self._gone.next_wakeup()))

    @property
    def serving(self) -> bool:
        """Whether the ledger lends.

        It begins to lend when every member has reported or is gone, and at least one has reported.
        After that it does not wait for the report of a new member: a new member has borrowed
        nothing from an earlier ledger.
        """
        if not self._serving:
            nodes = self.nodes.values()
            self._serving = all(node.heard or node.gone for node in nodes) and any(
                node.heard for node in nodes
            )
        return self._serving

    def limit_of(self, key: Key) -> int | None:
        """Return the limit of a key; None if the key has no limit."""
        if key in self._known:
            return self._known[key]
        known = self._limits.get(key.kind, {})
        found = known.get(key.name)
        if found is None and key.kind == "user":
            found = known.get("*")
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[key] = limit = None if found is None else found.get(key.resource)
        return limit

    def counted(self, key: Key) -> int:
        """Return how much of a key is not free: nodes may use it, or gone nodes have used it."""
        return self._counts.totals.get(key, 0)

    def views(self) -> list[NodeView]:
        """Return all members, sorted by name."""
        nodes = sorted(self.nodes.values(), key=lambda node: node.name)
        return [node.view(self._now, self.ttl) for node in nodes]

    def _is_silent(self, name: str) -> bool:
        return self._now - self.nodes[name].seen > self.ttl

    def _is_counted(self, name: str, journal: str) -> bool:
        node = self.nodes.get(name)
        return node is not None and not node.is_new and node.heard and node.journal == journal

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
            self._new_life(node, report.life)
        node.number = report.number
        node.read_state(report)
        self._usage.reported(node, report, self._now)
        if report.spent is not None:
            self._gone.learn(report.spent)
        if node.gone:
            return [Send(self._answer(node))]
        node.seen = self._now
        if node.free_at < math.inf and not report.leaves:
            self._drop_fence(node, reported=True)
        # A report counts only if the node obeys this ledger. While it obeys an earlier ledger, that
        # ledger can still change its ceilings.
        if report.epoch == self.epoch and report.spent is not None and not node.heard:
            node.heard = True
            if not self._serving:
                self._wait_for_fenced()
        if report.epoch < self.epoch or not node.heard:
            return [Send(self._answer(node))]
        node.version = report.version
        freed = self._count(node, report)
        if report.leaves and not any(h.used for k, h in report.holdings.items() if not k.lasts):
            return [*self._forget(node, drained=True), Send(self._answer(node))]
        if not self.serving:
            return [Send(self._answer(node))]
        # :meth:`_lend` may run before :meth:`_push_all`, because it takes nothing that is reserved
        # for nodes that have waited longer than this node.
        return [*self._lend(node), *self._push_all(freed, but=node.name)]

    def _begin(self, number: int) -> None:
        """Begin again with a greater token, because a node has obeyed another ledger.

        The other ledger may have changed the ceilings of all nodes, so wait for new reports. A
        fenced member may have come back and borrowed from that ledger, so wait for it, too.
        """
        self.epoch = Epoch(number, self.epoch.ledger)
        for node in self.nodes.values():
            node.heard, node.is_new = False, True
        self._wait_for_fenced()
        for node in self.nodes.values():
            node.serial = node.order_serial = 0
            node.version = -1

    def _wait_for_fenced(self) -> None:
        """Remove the fence of each member that has not reported to this ledger, and wait for it.

        The member may have come back while the nodes obeyed another ledger, and may have borrowed
        from that ledger. If the member is dead, the admin must fence it again.
        """
        for node in self.nodes.values():
            if not node.heard and node.name in self._members:
                if node.gone or node.free_at < math.inf:
                    self._drop_fence(node, reported=False)
                node.gone = False

    def _new_life(self, node: Node, life: int) -> None:
        """Begin a node's new life, and drop the offers to its earlier life, which are void now.

        The ledger goes on counting what it counted for the earlier life, until it counts the next
        report.
        """
        node.life, node.number, node.serial, node.version = life, 0, 0, -1
        node.order_serial = 0
        node.gone, node.is_new = False, True
        node.offers.clear()

    def _recognise(self, node: Node, report: Report) -> list[Key]:
        """Stop counting what the node used before it was gone; return the keys of this use.

        The node's own report now contains this use, because the node still has the same journal.
        """
        if node.journal not in ("", report.journal):
            # The node has lost its earlier journal, so its reports no longer contain what it used
            # before. Count this as the use of a gone node.
            self._gone.left(node.name, node.journal, node.counted, self._now)
        node.journal, node.is_new = report.journal, False
        return self._gone.drop(node.name, report.journal)

    # ------------------------------------------------------------------ counting

    def _count(self, node: Node, report: Report) -> list[Key]:
        """Count what a report says; return the keys of which the ledger can lend more now."""
        freed = self._recognise(node, report) if node.is_new else []
        while node.offers and node.offers[0][0] <= report.applied:
            node.offers.popleft()
        old, node.counted = node.counted, {}
        before, node.holdings = node.holdings, report.holdings
        node.waits = report.waits
        if not node.waits and node.name in self._queues:
            freed += self._queues.drop(node.name)
        for key, held in report.holdings.items():
            if amount := max(held.ceiling, held.used):
                node.counted[key] = amount
            had = before.get(key, NOTHING)
            if more := held.keep - had.keep:
                self._counts.keeps.add(key, more)
            if key.is_seconds and held.used != had.used:
                self._counts.used.add(key, held.used - had.used)
        for key, held in before.items():
            if key not in report.holdings:
                self._counts.keeps.add(key, -held.keep)
                if key.is_seconds:
                    self._counts.used.add(key, -held.used)
        for _, ceilings in node.offers:
            for key, amount in ceilings.items():
                if amount > node.counted.get(key, 0):
                    node.counted[key] = amount
        for key, amount in node.counted.items():
            if more := amount - old.get(key, 0):
                self._counts.totals.add(key, more)
                if key not in old:
                    self._counts.add_holder(key, node.name)
                if more < 0:
                    freed.append(key)
        for key, amount in old.items():
            if key not in node.counted:
                self._counts.totals.add(key, -amount)
                self._counts.drop_holder(key, node.name)
                freed.append(key)
        return freed

    # ------------------------------------------------------------------ lending

    def _lend(self, node: Node) -> list[Action]:
        """Answer a report: offer new ceilings, and ask other nodes for what this node waits for."""
        waited = self._queues.of(node.name)
        new = self._ceilings(node, node.holdings)
        ceilings = {k: n for k, n in new.items() if n != node.holdings.get(k, NOTHING).ceiling}
        self._offer(node, ceilings)
        actions: list[Action] = [Send(self._answer(node, ceilings))]
        asked: dict[str, list[Key]] = {}
        for key, need in self._queues.of(node.name).items():
            if key not in waited:
                for name in self._keep_unused(key, need):
                    asked.setdefault(name, []).append(key)
        for name, keys in asked.items():
            if name != node.name:
                actions += self._push(self.nodes[name], less=keys)
        return actions

    def _push(self, node: Node, *, less: Iterable[Key] = ()) -> list[Action]:
        """Offer a node more for its waiting sessions, or less of the keys ``less``.

        The ledger does not wait for a report of the node before it makes this offer.
        """
        ceilings: dict[Key, int] = {}
        for key, new in self._ceilings(node, less).items():
            last = node.last_offer(key)
            if new > last or (new < last and key in less):
                ceilings[key] = new
        if not ceilings:
            return []
        self._offer(node, ceilings)
        return [Send(self._answer(node, ceilings))]

    def _ceilings(self, node: Node, keys: Iterable[Key]) -> dict[Key, int]:
        """Return the ceilings that a node should have; record whether the node waits.

        The result contains each of ``keys`` that has a limit. It also contains the keys of each
        waiting session that can get everything that it needs.
        """
        extra: dict[Key, int] = {}
        unserved: Mapping[Key, int] = {}
        for wait in node.waits:
            limited = {
                key: self._needed(key, need)
                for key, need in wait.items()
                if self.limit_of(key) is not None
            }
            if all(
                node.used(key) + extra.get(key, 0) + need <= self._left(node, key)
                for key, need in limited.items()
            ):
                for key, need in limited.items():
                    extra[key] = extra.get(key, 0) + need
            elif not unserved and all(
                need <= (self.limit_of(key) or 0) for key, need in limited.items()
            ):
                unserved = limited
        # This call does not change what is reserved for nodes that have waited longer than this
        # one.
        self._queues.put(node.name, unserved)
        found: dict[Key, int] = {}
        for key in dict.fromkeys((*keys, *extra)) if extra else keys:
            limit = self.limit_of(key)
            if limit is None:
                continue
            held = node.holdings.get(key, NOTHING)
            found[key] = held.used + extra.get(key, 0) if extra else held.used
            if held.keep > found[key]:
                # Divide the limit in proportion to what all nodes would keep, and round up. Do not
                # divide a guarantee: a part that is too small for a request is useless. So the
                # first node that asks for a guarantee gets all that it asks for.
                keep, keeps = held.keep, self._counts.keeps[key]
                whole = keeps <= limit or key.resource == GUARANTEE
                part = keep if whole else -(-limit * keep // keeps)
                found[key] = max(found[key], min(part, self._unused(node, key)))
            if key.is_seconds:
                # Sessions use GPU-seconds until they are suspended, so the use can exceed the limit
                # a little. Lower the ceiling to what is free, so that the next session does not
                # exceed the limit further.
                found[key] = min(found[key], max(0, self._free(node, key)))
        return found

    def _needed(self, key: Key, need: int) -> int:
        """Return how much of a key a session waits for.

        For GPU-seconds, this is at most the rest of the budget.
        """
        if not key.is_seconds:
            return need
        return min(need, max(1, self._left_of_budget(key)))

    def _left_of_budget(self, key: Key) -> int:
        """Return how many GPU-seconds of a budget the nodes have not used up yet."""
        used = self._counts.used.get(key, 0) + self._gone.amount(key)
        return (self.limit_of(key) or 0) - used

    def _left(self, node: Node, key: Key) -> int:
        """Return the most of a key that the sessions of a node may use."""
        # The node keeps an amount that the ledger has just offered it for a session. Otherwise two
        # nodes would take the amount from each other again and again.
        kept = min(self._free(node, key), node.last_offer(key))
        return max(self._unused(node, key), kept)

    def _unused(self, node: Node, key: Key) -> int:
        """Return the most of a key that a node may keep.

        This is the amount that no other node has, minus the amount that is reserved for nodes that
        have waited longer.
        """
        free = self._free(node, key)
        return free - self._queues.before(key, node.name, free)

    def _free(self, node: Node, key: Key) -> int:
        """Return how much of a key no other node may use."""
        return (self.limit_of(key) or 0) - self.counted(key) + node.counted.get(key, 0)

    def _push_all(self, keys: Iterable[Key], but: str = "") -> list[Action]:
        """Offer the free amounts of ``keys`` to the nodes that wait for them.

        A queue may be long, so only the nodes at its front get an offer: those that can get a part
        of the free amount.
        """
        reached = dict.fromkeys(
            name
            for key in keys
            for name in self._queues.reached(key, (self.limit_of(key) or 0) - self.counted(key))
        )
        return [
            action for name in reached if name != but for action in self._push(self.nodes[name])
        ]

    def _keep_unused(self, key: Key, need: int) -> list[str]:
        """Return nodes that together can give up ``need`` of a key, largest unused amount first."""
        found = []
        for name in self._counts.holders(key):
            node = self.nodes[name]
            if (spare := node.counted[key] - node.used(key)) > 0:
                found.append((spare, name))
        names: list[str] = []
        for spare, name in sorted(found, reverse=True):
            if need <= 0:
                break
            names.append(name)
            need -= spare
        return names

    def _offer(self, node: Node, ceilings: dict[Key, int]) -> None:
        """Count the ceilings that the next answer will offer to the node."""
        if not ceilings:
            return
        node.note_offer(ceilings)
        for key, amount in ceilings.items():
            had = node.counted.get(key, 0)
            if amount > had:
                node.counted[key] = amount
                self._counts.add_holder(key, node.name)
                self._counts.totals.add(key, amount - had)

    def _answer(self, node: Node, ceilings: Mapping[Key, int] = {}) -> Loan:
        node.serial += 1
        wanted = self._queues.wanted(node.counted, but=node.name)
        seconds = [key for key in node.holdings if key.is_seconds]
        used_up = frozenset(key for key in seconds if self._is_used_up(key))
        gone = self._gone
        return Loan(
            node.name, node.life, node.number, self.epoch, node.serial, ceilings, wanted, self.ttl,
            gone.version, gone.spent if node.version != gone.version else None, node.gone,
            node.order, used_up, self._usage.elsewhere(node, self._now),
        )  # fmt: skip

    def _is_used_up(self, key: Key) -> bool:
        """Return whether the nodes have used up all GPU-seconds of a budget."""
        limit = self.limit_of(key)
        left = 0 if limit is None else self._left_of_budget(key)
        if limit is None or left > (0 if key.window else limit * BACK):
            self._used_up.discard(key)
        elif left <= 0:
            self._used_up.add(key)
        return key in self._used_up

    # ------------------------------------------------------------------ nodes that are gone

    def _order(self, event: DrainAsked) -> list[Action]:
        """Order a node to drain or to come back.

        The answers repeat the order until the node's reports confirm it.
        """
        node = self.nodes.get(event.node)
        if node is None or (node.heard and node.drains == event.drains and node.order is None):
            return []
        node.order, node.order_serial = event.drains, node.serial + 1
        return [Send(self._answer(node))]

    def _fence(self, name: str) -> None:
        node = self.nodes.get(name)
        if node is not None and node.free_at == math.inf and not node.gone:
            node.free_at = node.seen + self.ttl + self.margin
            self._fenced[name] = node

    def _drop_fence(self, node: Node, *, reported: bool) -> None:
        self._unfence(node)
        self._dropped.append(FenceDropped(node.name, reported))

    def _unfence(self, node: Node) -> None:
        node.free_at = math.inf
        self._fenced.pop(node.name, None)

    def _forget(self, node: Node, *, drained: bool) -> list[Action]:
        """Stop counting a node's ceilings, but not the GPU-seconds that it has used.

        Return the offers of the amounts that are free now.
        """
        freed = []
        for key, amount in node.counted.items():
            self._counts.totals.add(key, -amount)
            self._counts.drop_holder(key, node.name)
            if not key.window:
                freed.append(key)
        self._queues.drop(node.name)
        for key, held in node.holdings.items():
            self._counts.keeps.add(key, -held.keep)
            if key.is_seconds:
                self._counts.used.add(key, -held.used)
        used = {
            # A node that has drained has used exactly what it reported. A fenced node may have used
            # all that the ledger counts for it.
            key: node.used(key) if drained and key.is_seconds else amount
            for key, amount in node.counted.items()
        }
        self._gone.left(node.name, node.journal, used, self._now)
        node.counted, node.holdings, node.waits = {}, {}, ()
        node.is_new = True
        self._unfence(node)
        node.gone, node.has_drained = True, drained
        node.offers.clear()
        return self._push_all(freed) if self.serving else []
