# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A cluster without I/O: nodes, ledgers, a network without guarantees, and an auditor."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from jupyter_gpupool.cluster import ledger_events as ev
from jupyter_gpupool.cluster.budgets import Budgets, Demand
from jupyter_gpupool.cluster.ledger import Ledger
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Key,
    Loan,
    Report,
    loan_from_json,
    loan_to_json,
    report_from_json,
    report_to_json,
)

TODAY = "2026-11-23"
LIMITS = {
    "user": {
        "ada": {"memory": 8, "gpu-seconds": 20},
        "bob": {"memory": 5, "gpu-seconds": 12, "refill": 12},
        "*": {"memory": 5},
    },
    "group": {"lab": {"memory": 10, "guarantee": 6}},
}
#: Seconds in which bob's whole budget refills.
DAY = 40.0
USERS = ("ada", "bob")


def keys_of(user):
    """Return the keys that a slice of this user needs; ada and bob are in one group."""
    return Key("user", user, "memory"), Key("group", "lab", "memory")


SECONDS = Key("user", "ada", "gpu-seconds", TODAY)
#: Bob's budget refills. It has two keys: the GPU-seconds in use, and the refill.
BUCKET, REFILL = Key("user", "bob", "gpu-seconds"), Key("user", "bob", "refill")
GUARANTEE = Key("group", "lab", "guarantee")


@dataclass
class Session:
    user: str
    size: int


@dataclass
class Node:
    """A node's broker. It grants each slice that its budgets allow, without asking a ledger."""

    name: str
    rate: float = 1.0
    life: int = 1
    alive: bool = True
    on_loss: str = "closed"
    running: list[Session] = field(default_factory=list)
    waiting: list[Session] = field(default_factory=list)
    consumed: int = 0
    #: The GPU-seconds of bob's budget that this node has used and that have not refilled yet.
    level: float = 0.0
    #: Slices of users without a limit.
    others: int = 0
    #: For each key, the node wants this much more than the amount in use.
    spare: int = 0
    budgets: Budgets = None
    granted: int = 0
    journal: str = "j"
    #: The GPU-seconds of the day that this node has used, but that only lost journals had counted.
    forgotten: int = 0

    def __post_init__(self):
        self.begin(self.life)

    def lose_journal(self):
        """Start the broker without its journal, so that it forgets what its sessions have used."""
        self.forgotten += self.consumed
        self.consumed, self.level = 0, 0.0
        self.journal += "'"
        self.begin(max(self.life, self.budgets.life) + 1, keeps=False)

    def begin(self, life, *, keeps=True):
        """Start the broker. Its sessions and the GPU-seconds that they used come from its journal.

        With ``keeps``, its ceilings of GPU-seconds come from the journal, too.
        """
        self.life = life
        before = self.budgets
        self.budgets = Budgets(
            self.name, life, on_loss=self.on_loss, share={"memory": 1},
            drains=before is not None and before.drains,
            ceilings=before.parts() if keeps and before is not None else {},
            epoch=Epoch() if before is None else before.epoch, journal=self.journal,
        )  # fmt: skip
        self.tell()

    def used(self):
        found = Counter()
        for session in self.running:
            for key in keys_of(session.user):
                found[key] += session.size
        found[SECONDS] = self.consumed
        found[BUCKET] = math.ceil(self.level)
        return found

    def tell(self):
        used = self.used()
        uses = {key: Demand(used[key], used[key] + self.spare) for key in used}
        uses[SECONDS] = Demand(self.consumed, min(20, self.consumed + 2))
        if self.level:
            uses[BUCKET] = Demand(used[BUCKET], min(12, used[BUCKET] + 2))
            uses[REFILL] = Demand(0, 12)
        elif not self.budgets.drains:
            uses[BUCKET] = Demand(0, 2)
        held = used[Key("group", "lab", "memory")]
        more = sum(session.size for session in self.waiting)
        uses[GUARANTEE] = Demand(min(held, self.budgets.most(GUARANTEE, 0.0)), held + more)
        waits = [dict.fromkeys(keys_of(s.user), s.size) for s in self.waiting]
        self.budgets.use(uses, waits, is_empty=not self.running and not self.others)

    def serve(self, now):
        """Serve the sessions that the budgets allow, the longest wait first; return them."""
        found = []
        for session in [*self.waiting]:
            used = self.used()
            if all(
                used[key] + session.size <= self.budgets.most(key, now)
                for key in keys_of(session.user)
            ):
                self.waiting.remove(session)
                self.running.append(session)
                self.granted += 1
                found.append(session)
                self.tell()
        return found

    def consume(self, amount, now):
        left = self.budgets.most(SECONDS, now) - self.consumed
        self.consumed += max(0, min(amount, left))
        self.tell()

    def use_bucket(self, amount, now):
        """Use at most ``amount`` of the lent part of bob's budget; return the amount used."""
        if self.budgets.drains and self.budgets.is_empty:
            return 0  # no session is left that could use it
        left = self.budgets.most(BUCKET, now) - math.ceil(self.level)
        used = max(0, min(amount, left))
        self.level += used
        self.tell()
        return used

    def refill(self, seconds, now):
        """Reduce ``level`` by the refill of ``seconds``, at the rate of this node's clock."""
        part = self.budgets.most(REFILL, now)
        self.level = max(0.0, self.level - part * seconds * self.rate / DAY)


class World:
    """A cluster that does nothing by itself: a test calls each step. ``now`` is the true time."""

    def __init__(self, names=("n0", "n1", "n2"), rates=(1.0, 1.02, 0.98), **ledger):
        self.now = 0.0
        self.nodes = {n: Node(n, r) for n, r in zip(names, rates, strict=True)}
        self.options = ledger
        self.starts = 0
        self.ledgers = {}
        self.current = self.start_ledger()
        #: The messages in the network: pairs of a ledger's name and a report or an answer.
        self.wires: list[tuple[str, Report | Loan]] = []
        #: Fences that a ledger has dropped.
        self.dropped: list[ev.FenceDropped] = []
        self.sent = 0
        #: GPU-seconds that a node used, but did not report before a ledger fenced it. No ledger can
        #: know them.
        self.lost = 0
        #: The auditor's own count of bob's budget: the use on all nodes minus the whole refill.
        self.level = 0.0
        #: Guarantees that nodes still claim when they start again after a fence.
        self.claims_of_fenced = 0
        #: The use of bob's budget that a ledger may have forgotten.
        self.forgotten = 0.0

    # ------------------------------------------------------------------ ledgers

    def start_ledger(self, *, members=None):
        """Start another ledger. Earlier ledgers run until :meth:`kill_ledger` ends them."""
        self.starts += 1
        name = f"l{self.starts}"
        self.ledgers[name] = Ledger(
            name, LIMITS, self.nodes if members is None else members, self.now,
            day=DAY, **self.options,
        )  # fmt: skip
        self.current = name
        return name

    def kill_ledger(self):
        self.ledgers.pop(self.current, None)
        return self.start_ledger()

    @property
    def ledger(self):
        return self.ledgers[self.current]

    def do(self, name, event):
        if name not in self.ledgers:
            return
        for action in self.ledgers[name].handle(event):
            if isinstance(action, ev.Send):
                self.wires.append((name, action.answer))
            if isinstance(action, ev.FenceDropped):
                self.dropped.append(action)
            if isinstance(action, ev.Stop):
                del self.ledgers[name]
                # Ledger ``name`` stops, because another ledger has taken over. If the other one is
                # dead, start a new ledger.
                found = action.by.ledger
                self.current = found if found in self.ledgers else self.start_ledger()

    # ------------------------------------------------------------------ time and messages

    def clock(self, node):
        return self.now * node.rate

    def advance(self, seconds):
        self.now += seconds
        # A node with a fast clock refills its part too fast. So the auditor refills at the rate of
        # the fastest clock.
        fastest = max(node.rate for node in self.nodes.values())
        self.level = max(0.0, self.level - 12 * seconds * fastest / DAY)
        for node in self.nodes.values():
            node.refill(seconds, self.clock(node))
        for name in [*self.ledgers]:
            if self.ledgers[name].next_wakeup() <= self.now:
                self.do(name, ev.Tick(now=self.now))

    def report(self, name, to=None):
        node = self.nodes[name]
        if node.alive:
            self.sent += 1
            self.wires.append((to or self.current, node.budgets.report(self.clock(node))))

    def deliver(self, at=0, *, keep=False):
        """Deliver one message that is on its way. With ``keep``, the message may arrive again."""
        ledger, message = self.wires[at] if keep else self.wires.pop(at)
        if isinstance(message, Report):
            message = report_from_json(report_to_json(message))
            self.do(ledger, ev.Reported(now=self.now, report=message))
        elif (node := self.nodes[message.node]).alive:
            node.budgets.answered(loan_from_json(loan_to_json(message)))
            node.serve(self.clock(node))
            node.tell()

    def settle(self, rounds=6, *, silent=()):
        """Let every node report, and deliver every message in order, for some rounds."""
        for _ in range(rounds):
            for name in self.nodes:
                if name not in silent:
                    self.report(name)
            most = 500  # the most messages in a round, to find an endless exchange
            while self.wires:
                most -= 1
                assert most, "the messages have no end"
                self.deliver()
                for name, node in self.nodes.items():
                    if node.alive and node.budgets.due and name not in silent:
                        self.report(name)
            self.advance(0.1)

    # ------------------------------------------------------------------ nodes

    def ask(self, name, user, size):
        node = self.nodes[name]
        if node.alive:
            node.waiting.append(Session(user, size))
            node.tell()
            node.serve(self.clock(node))

    def use_bucket(self, name, amount):
        node = self.nodes[name]
        self.level += node.use_bucket(amount, self.clock(node))

    def use_all(self, at_once=20):
        """Let every node use as many GPU-seconds of the day as it can get; return the total."""
        for _ in range(40):
            for node in self.nodes.values():
                if node.alive and not node.budgets.drains:
                    node.consume(at_once, self.clock(node))
            self.settle(1)
        return sum(node.consumed + node.forgotten for node in self.nodes.values())

    def end(self, name, at=0):
        node = self.nodes[name]
        if node.running:
            node.running.pop(at % len(node.running))
            node.tell()
            node.serve(self.clock(node))

    def order(self, name, drains):
        """As an admin, order the ledger to drain a node, or, without ``drains``, to resume it."""
        self.do(self.current, ev.DrainAsked(now=self.now, node=name, drains=drains))

    def crash(self, name):
        """Cut the power of a node: its kernels are gone."""
        node = self.nodes[name]
        node.alive = False
        node.running.clear()
        node.waiting.clear()

    def churn(self, random, steps):
        """Do ``steps`` random steps with slices and messages, and audit after each step.

        Some messages are lost, some arrive again, and some arrive late.
        """
        if random.random() < 0.6:
            self.settle(2)
        for _ in range(steps):
            name = random.choice([*self.nodes])
            node = self.nodes[name]
            what = random.random()
            if what < 0.15:
                self.ask(name, random.choice(USERS), random.randint(1, 5))
            elif what < 0.27:
                self.end(name, random.randrange(4))
            elif what < 0.3 and node.alive:
                node.consume(random.randint(1, 3), self.clock(node))
            elif what < 0.32 and node.alive:
                self.use_bucket(name, random.randint(1, 4))
            elif what < 0.35:
                node.spare = random.choice((0, 0, 3))
                node.waiting.clear()
                node.tell()
            elif what < 0.55 or not self.wires:
                old = random.random() < 0.1
                self.report(name, random.choice([*self.ledgers]) if old else self.current)
            elif what < 0.95:
                # Most messages arrive in order. Some arrive after messages that were sent later.
                at = random.randrange(len(self.wires)) if random.random() < 0.4 else 0
                self.deliver(at, keep=random.random() < 0.1)
            elif what < 0.98:
                self.wires.pop(random.randrange(len(self.wires)))
            else:
                self.advance(random.choice((0.1, 0.1, 1.0, 5.0)))
            self.audit(lost=self.lost)

    # ------------------------------------------------------------------ the auditor

    def audit(self, *, lost=0, over=0):
        """Add up the running slices of all nodes, and check the sums against the limits.

        The auditor does not trust the nodes' budgets.
        """
        memory, seconds = Counter(), 0
        for node in self.nodes.values():
            assert not (node.budgets.has_left and node.running), node.name
            seconds += node.consumed + node.forgotten
            for session in node.running:
                memory["user", session.user] += session.size
                memory["group", "lab"] += session.size
        for (kind, name), used in memory.items():
            limit = LIMITS[kind].get(name) or LIMITS[kind]["*"]
            assert used <= limit["memory"] + over, (kind, name, used)
        assert seconds <= 20 + lost, seconds
        assert self.level <= 12 + self.forgotten + 1e-6, self.level
        # A guarantee does not limit slices. So add up the parts of it that the nodes may claim.
        claims = [n.budgets.most(GUARANTEE, self.clock(n)) for n in self.nodes.values() if n.alive]
        assert sum(claims) <= 6 + self.claims_of_fenced, claims
