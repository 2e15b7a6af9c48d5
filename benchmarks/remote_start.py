# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time to start a kernel on another machine, against the time to start one on this machine.

The time is from the request to the kernel's first answer. There are two baselines: a kernel on the
server's own machine in the cluster, and a kernel on a machine that is in no cluster. All kernels
are Pooled GPU kernels of the same user. The three kinds of starts take turns, in a random order.
Each machine of the cluster is a broker, an agent and a MUNGE daemon on this host. With Ray in the
environment, Ray carries the orders to start a kernel. Otherwise, a ledger that listens on a unix
socket carries them.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.common import budget, percentile, summary
from tests.broker.kit import Broker, remove, short_folder
from tests.cluster.kit import family
from tests.cluster.remotes import ROOTS, HostingBroker, Server, identified

#: Where a kernel starts: on a machine in no cluster, on the server's machine in the cluster, or on
#: another machine of the cluster.
ALONE, HERE, AWAY = "no cluster", "here", "another machine"

#: A start on another machine may take at most this many milliseconds longer than a start on the
#: server's machine.
BUDGET_MS = 300.0


def cluster_class() -> tuple[str, Any]:
    """Return the name of the transport of the orders, and the class of a cluster with it."""
    if importlib.util.find_spec("ray") is not None:
        from tests.cluster.test_ray_kernels import RayTriple

        return "Ray", RayTriple
    from tests.cluster.kit import Cluster

    class Pair(Cluster):
        names = ("m0", "m1")
        make_broker = HostingBroker

        def start(self) -> Any:
            super().start()
            self.wait_serving()
            return self

    return "a unix socket", Pair


@contextmanager
def machine_alone() -> Iterator[Any]:
    """Run a broker that is in no cluster; yield it as the machine m0."""
    folder = short_folder()
    sockets = Path("/run") / folder.name if ROOTS else folder
    broker = Broker(folder, emulate="1x1GiB,context=32MiB", default_memory="100MiB")
    broker.socket = sockets / "broker.sock"
    try:
        if not broker.start()["ok"]:
            raise RuntimeError(broker.tail())
        yield SimpleNamespace(folder=folder, brokers={"m0": broker}, at=lambda _: nullcontext())
    finally:
        broker.close()
        remove(folder)
        remove(sockets)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return starts in milliseconds, and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (5 if options.quick else 30)
    took: dict[str, list[float]] = {ALONE: [], HERE: [], AWAY: []}
    spent: dict[str, list[float]] = {ALONE: [], HERE: [], AWAY: []}
    carrier, make = cluster_class()
    with identified(make) as cluster, machine_alone() as alone:
        kept = cluster.kernel("m0")
        kept.attach()
        # A remote kernel asks for all free memory of m1. It does not fit on m0, because ``kept``
        # has a slice there. So it starts on m1.
        (device,) = cluster.brokers["m1"].status()["devices"]
        memory = device["memory_free"]
        processes = [*cluster.brokers.values(), *cluster.agents.values(), cluster.ledger]
        beside = [p for one in processes if one.process for p in family(one.process.pid)]
        home, other = short_folder(), short_folder()
        server, single = Server(cluster, home), Server(alone, other)
        own = family(alone.brokers["m0"].process.pid)
        try:
            order, dice = list(took), random.Random(0)
            for number in range(rounds + 1):
                dice.shuffle(order)
                for where in order:
                    chosen, near = (single, own) if where == ALONE else (server, beside)
                    found = chosen.do("timed", where == AWAY, memory, near)
                    seconds, processor, node = found
                    if where == AWAY and node != "m1":
                        raise RuntimeError(f"the kernel started on {node}")
                    if number:  # omit the first start: it warms the file cache
                        took[where].append(seconds * 1000)
                        spent[where].append(processor * 1000)
        finally:
            server.close()
            single.close()
            remove(home)
            remove(other)
    here = percentile(took[HERE], 50)
    more = percentile(took[AWAY], 50) - here
    return {
        "what": "milliseconds from the request to the kernel's first answer",
        "rounds": rounds,
        "emulated": True,
        "carried_by": carrier,
        "kernels": {where: summary(times) for where, times in took.items()},
        "difference_p50_ms": more,
        "difference_of_the_cluster_p50_ms": here - percentile(took[ALONE], 50),
        # Processor time of the kernel, the server, the brokers, the agents and the ledger. Use this
        # figure on a busy machine, because other work there makes the start itself longer.
        "processor_ms": {where: summary(times) for where, times in spent.items()},
        "processor_difference_p50_ms": percentile(spent[AWAY], 50) - percentile(spent[HERE], 50),
        "budgets": [budget("kernel start on another machine, p50", more, BUDGET_MS, "ms")],
    }
