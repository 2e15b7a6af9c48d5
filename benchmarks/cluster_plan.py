# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The cost of a ledger and its nodes, and of the loss of a ledger, with 10 to 1,000 nodes.

``python -m benchmarks.cluster_plan [--nodes 10,100,1000] [--shards 1,8] [--quick]`` prints JSON.

The ledger and the nodes' budgets are the product's own code. Every message is really encoded and
decoded. The network and the brokers are simulated. A message takes one millisecond: a call of a Ray
actor on another node took 1.0 ms (p50). A broker grants a slice as soon as its budgets allow it.

Each node has 20 kernels. A kernel thinks (mean 60 s), then computes (mean 20 s) with one slice.
Each user has 4 kernels, three of them on one node, and a quota of 2 slices. A group has 40 users
and may have 48 slices. So some cells wait for a quota. Other cells wait because their node must
first ask the ledger for a loan, usually because the user of the cell works on two nodes.

After half of the time the ledger dies. A new ledger starts 3 s later, because Ray's tuned health
check takes 3 s to notice the death. ``serving_s`` is the number of seconds from the start of the
new ledger until it lends again.

``ledger_lines_per_report`` is the number of lines of Python that the ledger runs for a report.
The benchmark counts the lines of every hundredth report. Unlike a time, this number does not
depend on the machine and its load.

``shards`` is the number of ledgers. Each ledger serves a part of the groups and users.
``ledger_cores`` is the processor time of the busiest ledger, as a share of one core. The baseline,
in the same run, is the time to encode and decode an empty report.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from benchmarks.common import budget, percentile
from jupyter_gpupool.cluster import ledger_events as ev
from jupyter_gpupool.cluster.budgets import Budgets, Demand
from jupyter_gpupool.cluster.ledger import Ledger
from jupyter_gpupool.cluster.messages import (
    Epoch,
    Key,
    Report,
    loan_from_json,
    loan_to_json,
    report_from_json,
    report_to_json,
)

KERNELS, PER_USER, PER_GROUP = 20, 4, 40
THINK, COMPUTE = 60.0, 20.0
USER_SLICES, GROUP_SLICES = 2, 48
DELAY, NOTICE = 0.001, 3.0
#: Of this many reports, the simulation counts the lines of one and measures the time of the others.
SAMPLE = 100
#: Seconds between two regular reports of a node, and the least seconds between any two reports.
INTERVAL, LEAST = 2.0, 0.05
#: The largest share of one core for a ledger, and the most seconds until a new ledger lends.
CPU_BUDGET, SERVING_BUDGET = 0.5, 5.0


class Node:
    """A node: a budget for each shard, and the kernels that run and wait."""

    def __init__(self, name: str, shards: int) -> None:
        self.name = name
        self.budgets = [Budgets(name, 1) for _ in range(shards)]
        self.used: Counter[Key] = Counter()
        #: By key: the number of the node's kernels, which is the most that the node can use. The
        #: node may keep a loan of this size until another node needs a part of it.
        self.kernels: Counter[Key] = Counter()
        self.waiting: list[tuple[float, str, tuple[Key, ...]]] = []
        self.last = [-1.0] * shards
        self.planned = [False] * shards


class Simulation:
    """A cluster on a simulated clock; it measures only the time of the product's own code."""

    def __init__(self, nodes: int, shards: int, seconds: float, seed: int) -> None:
        self.random = random.Random(seed)
        self.seconds, self.shards, self.now = seconds, shards, 0.0
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.count = itertools.count()
        self.nodes = {f"node{n}": Node(f"node{n}", shards) for n in range(nodes)}
        self.ledgers: list[Ledger | None] = [self.ledger(0) for _ in range(shards)]
        self.ledger_cpu = [0.0] * shards
        self.node_cpu = 0.0
        self.reports = 0
        self.lines: list[int] = []
        self.messages = [0] * shards
        self.bytes = 0
        self.waits: list[float] = []
        self.granted = self.hot = 0
        self.worst: Counter[Key] = Counter()
        self.total: Counter[Key] = Counter()
        self.died_at = self.served_at = self.started_at = 0.0
        self.kernels()
        for node in self.nodes.values():
            for shard in range(shards):
                self.at(self.random.random() * INTERVAL, lambda n=node, s=shard: self.beat(n, s))

    def ledger(self, life: int) -> Ledger:
        users = {"*": {"leases": USER_SLICES}}
        groups = len(self.nodes) * KERNELS // PER_USER // PER_GROUP + 1
        limits = {f"group{n}": {"leases": GROUP_SLICES} for n in range(groups)}
        return Ledger(f"life{life}", {"user": users, "group": limits}, self.nodes, self.now)

    def shard_of(self, key: Key) -> int:
        return zlib.crc32(key.name.encode()) % self.shards

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.count), what))

    def run(self) -> None:
        self.at(self.seconds / 2, self.die)
        while self.events and self.events[0][0] < self.seconds:
            self.now, _, what = heapq.heappop(self.events)
            what()

    # ------------------------------------------------------------------ kernels

    def kernels(self) -> None:
        names = [*self.nodes]
        for user in range(len(names) * KERNELS // PER_USER):
            keys = (
                Key("user", f"user{user}", "leases"),
                Key("group", f"group{user // PER_GROUP}", "leases"),
            )
            home = names[user % len(names)]
            for place in (home, home, home, self.random.choice(names)):
                self.nodes[place].kernels.update(keys)
                self.at(self.random.expovariate(1 / THINK),
                        lambda n=place, k=keys: self.cell(self.nodes[n], k))  # fmt: skip

    def cell(self, node: Node, keys: tuple[Key, ...]) -> None:
        node.waiting.append((self.now, keys[0].name, keys))
        self.serve(node)

    def serve(self, node: Node) -> None:
        """Grant what the budgets allow, update the usage in the budgets, and send due reports."""
        for entry in [*node.waiting]:
            since, _, keys = entry
            if all(
                node.used[key] < node.budgets[self.shard_of(key)].most(key, self.now)
                for key in keys
            ):
                node.waiting.remove(entry)
                self.granted += 1
                self.hot += since == self.now
                self.waits.append(self.now - since)
                for key in keys:
                    node.used[key] += 1
                    self.total[key] += 1
                    self.worst[key] = max(self.worst[key], self.total[key])
                self.at(self.random.expovariate(1 / COMPUTE), lambda k=keys: self.over(node, k))
        self.tell(node)

    def over(self, node: Node, keys: tuple[Key, ...]) -> None:
        for key in keys:
            node.used[key] -= 1
            self.total[key] -= 1
        self.serve(node)
        self.at(self.random.expovariate(1 / THINK), lambda: self.cell(node, keys))

    def tell(self, node: Node) -> None:
        begun = time.thread_time()
        for shard, budgets in enumerate(node.budgets):
            uses = {
                key: Demand(node.used[key], kernels)
                for key, kernels in node.kernels.items()
                if self.shard_of(key) == shard
            }
            waits = [
                dict.fromkeys((key for key in keys if self.shard_of(key) == shard), 1)
                for _, _, keys in node.waiting
            ]
            budgets.use(uses, [wait for wait in waits if wait])
        self.node_cpu += time.thread_time() - begun
        for shard, budgets in enumerate(node.budgets):
            if budgets.due and not node.planned[shard]:
                node.planned[shard] = True
                wait = max(0.0, node.last[shard] + LEAST - self.now)
                self.at(wait, lambda s=shard: self.send(node, s))

    # ------------------------------------------------------------------ messages

    def beat(self, node: Node, shard: int) -> None:
        if self.now - node.last[shard] >= INTERVAL * 0.9:
            self.tell(node)
            self.send(node, shard)
        self.at(INTERVAL, lambda: self.beat(node, shard))

    def send(self, node: Node, shard: int) -> None:
        node.planned[shard], node.last[shard] = False, self.now
        begun = time.thread_time()
        text = json.dumps(report_to_json(node.budgets[shard].report(self.now)))
        self.node_cpu += time.thread_time() - begun
        self.messages[shard] += 1
        self.bytes += len(text)
        self.at(DELAY, lambda: self.received(shard, text))

    def received(self, shard: int, text: str) -> None:
        ledger = self.ledgers[shard]
        if ledger is None:
            return
        self.reports += 1
        counted = self.reports % SAMPLE == 0
        begun = time.thread_time()
        event = ev.Reported(now=self.now, report=report_from_json(json.loads(text)))
        actions = self.count_lines(ledger, event) if counted else ledger.handle(event)
        answers = [
            (action.answer.node, json.dumps(loan_to_json(action.answer)))
            for action in actions
            if isinstance(action, ev.Send)
        ]
        if not counted:
            self.ledger_cpu[shard] += time.thread_time() - begun
        if self.died_at and all(one is not None and one.serving for one in self.ledgers):
            self.served_at = self.served_at or self.now
        for name, answer in answers:
            self.messages[shard] += 1
            self.bytes += len(answer)
            self.at(DELAY, lambda n=name, a=answer: self.answered(self.nodes[n], shard, a))

    def count_lines(self, ledger: Ledger, event: ev.Event) -> list[ev.Action]:
        """Return the ledger's actions for an event; count the Python lines that the ledger runs."""
        found = 0

        def trace(_: FrameType, what: str, __: object) -> Any:
            nonlocal found
            found += what == "line"
            return trace

        sys.settrace(trace)
        try:
            return ledger.handle(event)
        finally:
            sys.settrace(None)
            self.lines.append(found)

    def answered(self, node: Node, shard: int, text: str) -> None:
        begun = time.thread_time()
        node.budgets[shard].answered(loan_from_json(json.loads(text)))
        self.node_cpu += time.thread_time() - begun
        self.serve(node)

    # ------------------------------------------------------------------ loss

    def die(self) -> None:
        self.died_at = self.now
        self.ledgers = [None] * self.shards
        self.at(NOTICE, self.start)

    def start(self) -> None:
        self.started_at = self.now
        self.ledgers = [self.ledger(1) for _ in range(self.shards)]


def measure(nodes: int, shards: int, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Return the costs for one number of nodes and shards."""
    found = Simulation(nodes, shards, seconds, seed)
    found.run()
    over = sum(
        most > (USER_SLICES if key.kind == "user" else GROUP_SLICES)
        for key, most in found.worst.items()
    )
    alive = seconds - NOTICE
    return {
        "nodes": nodes,
        "shards": shards,
        "simulated_s": seconds,
        "leases": found.granted,
        "over_quota": over,
        "leases_without_a_wait": found.hot / found.granted,
        "wait_p99_s": percentile(found.waits, 99),
        "messages_per_s": sum(found.messages) / alive,
        "messages_per_s_of_busiest_shard": max(found.messages) / alive,
        "messages_per_lease": sum(found.messages) / found.granted,
        "bytes_per_message": found.bytes / sum(found.messages),
        "ledger_cores": max(found.ledger_cpu) / alive,
        "ledger_lines_per_report": sum(found.lines) / max(1, len(found.lines)),
        "ledger_us_per_message": 1e6 * sum(found.ledger_cpu) / sum(found.messages),
        "node_cores": found.node_cpu / seconds / nodes,
        "serving_s": found.served_at - found.started_at if found.served_at else None,
    }


def empty_us() -> float:
    """Return the microseconds to encode and decode an empty report."""
    report, count = Report("node", 1, 1, Epoch(1, "a"), 0), 2000
    begun = time.thread_time()
    for _ in range(count):
        report_from_json(json.loads(json.dumps(report_to_json(report))))
    return 1e6 * (time.thread_time() - begun) / count


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure; return the result (see :mod:`.common`)."""
    parser = argparse.ArgumentParser(prog="cluster_plan")
    parser.add_argument("--nodes", default="10,100,1000")
    parser.add_argument("--shards", default="1,8")
    parser.add_argument("--seconds", type=float, default=120.0, help="simulated")
    parser.add_argument("--quick", action="store_true", help="a few seconds in all")
    options = parser.parse_args(argv)
    sizes = [int(n) for n in options.nodes.split(",")]
    seconds = options.seconds
    if options.quick:
        sizes, seconds = [10, 30], 60.0
    rows = [measure(sizes[0], 1, seconds)]
    rows += [measure(n, 1, seconds) for n in sizes[1:]]
    rows += [measure(sizes[-1], int(s), seconds) for s in options.shards.split(",") if s != "1"]
    last = rows[len(sizes) - 1]
    return {
        "empty_report_us": empty_us(),
        "rows": rows,
        "budgets": [
            budget("leases over a quota", sum(row["over_quota"] for row in rows), 0, ""),
            budget(f"one ledger for {sizes[-1]} nodes", last["ledger_cores"], CPU_BUDGET, "cores"),
            budget("a new ledger lends again", last["serving_s"] or 99.0, SERVING_BUDGET, "s"),
        ],
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=2)
