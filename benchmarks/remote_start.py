# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Start of a kernel on another machine, from the request to its first answer, against one here.

Kernels of both kinds are pooled, belong to the same user and server, and start in turns. The
machines are brokers and agents on this host, with MUNGE daemons. With Ray in the environment, Ray
carries the orders. Otherwise a ledger that listens on a unix socket carries them.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from collections.abc import Sequence
from typing import Any

from benchmarks.common import budget, percentile, summary
from tests.broker.kit import remove, short_folder
from tests.cluster.kit import family
from tests.cluster.remotes import HostingBroker, Server, identified

#: The most milliseconds that a start may take beyond a start of a pooled kernel on this machine.
BUDGET_MS = 300.0


def cluster_class() -> tuple[str, Any]:
    """Return the name of the transport of the orders, and the class of such a cluster."""
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


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return starts in milliseconds, and their difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (5 if options.quick else 30)
    took: dict[bool, list[float]] = {False: [], True: []}
    spent: dict[bool, list[float]] = {False: [], True: []}
    carrier, make = cluster_class()
    with identified(make) as cluster:
        kept = cluster.kernel("m0")
        kept.attach()
        # A remote kernel asks for all the free memory of m1. m0 has less, so it starts on m1.
        (device,) = cluster.brokers["m1"].status()["devices"]
        memory = device["memory_free"]
        processes = [*cluster.brokers.values(), *cluster.agents.values(), cluster.ledger]
        beside = [p for one in processes if one.process for p in family(one.process.pid)]
        home = short_folder()
        server = Server(cluster, home)
        try:
            order, dice = list(took), random.Random(0)
            for number in range(rounds + 1):
                dice.shuffle(order)
                for remote in order:
                    seconds, processor, node = server.do("timed", remote, memory, beside)
                    if remote and node != "m1":
                        raise RuntimeError(f"the kernel started on {node}")
                    if number:  # the first start of each kind warms the file cache
                        took[remote].append(seconds * 1000)
                        spent[remote].append(processor * 1000)
        finally:
            server.close()
            remove(home)
    more = percentile(took[True], 50) - percentile(took[False], 50)
    return {
        "what": "milliseconds from the request to the kernel's first answer",
        "rounds": rounds,
        "emulated": True,
        "carried_by": carrier,
        "kernels": {"here": summary(took[False]), "another machine": summary(took[True])},
        "difference_p50_ms": more,
        # Processor time of kernel, server, brokers, agents and ledger. On a busy machine, only this
        # figure is useful.
        "processor_ms": {"here": summary(spent[False]), "another machine": summary(spent[True])},
        "processor_difference_p50_ms": percentile(spent[True], 50) - percentile(spent[False], 50),
        "budgets": [budget("kernel start on another machine, p50", more, BUDGET_MS, "ms")],
    }
