# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Memory that a machine needs to be in a cluster, against the memory of its broker.

The benchmark measures both in the same run. Processes of this host play three machines. With Ray in
the environment, each machine runs ``jupyter gpupool node``. Otherwise each machine runs an agent,
and one ledger listens on a unix socket.

``pss_bytes`` divides each memory page among all processes of this host that share it. This figure
is too low, because the processes of all three machines share pages here. ``rss_bytes`` counts a
page once for each process that has it. This figure is too high, because a real machine needs a
shared page only once. The true figure of one machine is between the two.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import budget, pss, rss
from tests.broker.kit import remove, short_folder, wait_until
from tests.cluster.kit import Cluster, family

#: Pairs: a text, and the part of a machine to which a process belongs if its command line contains
#: the text. The first pair that matches counts.
PARTS = (
    ("cluster.ray_agent", "agent"),
    ("cluster.agent_service", "agent"),
    ("gcs_server", "Ray's head"),
    ("jupyter_gpupool.cli", "node"),
    ("ray", "raylet and what it starts"),  # for example its agents and ray::IDLE
)

#: Kernels with a slice while the memory is read.
KERNELS = 2

#: The most PSS in MB of a machine's part of a cluster, by transport. The head of a Ray cluster also
#: has the cluster's tables, so it has no limit.
BUDGET_MB = {"Ray": 500, "a unix socket": 50}

#: Seconds between two readings, and by which fraction the memory of a machine at rest may change.
BETWEEN, CHANGE = 5.0, 0.01


def carrier_and_class() -> tuple[str, type[Cluster]]:
    """Return the name of the transport of the reports, and the class of a cluster with it."""
    if importlib.util.find_spec("ray") is not None:
        from tests.cluster.test_ray import RayCluster

        return "Ray", RayCluster
    return "a unix socket", Cluster


def part_of(pid: int) -> str:
    """Return the part of a machine that a process belongs to."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return next((part for word, part in PARTS if word in words), "other")


def parts_of(process: Any) -> dict[str, dict[str, int]]:
    """Return the memory of a process and its descendants by part, in bytes."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for pid in family(process.pid):
        try:
            part, taken = part_of(pid), {"pss_bytes": pss(pid), "rss_bytes": rss(pid)}
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended meanwhile
        for field, value in taken.items():
            found[part][field] += value
    return {part: dict(values) for part, values in sorted(found.items())}


def machines(cluster: Cluster) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each machine with the memory of its broker and of its part of the cluster."""
    for name in cluster.names:
        parts = parts_of(cluster.agents[name].process)
        broker = parts_of(cluster.brokers[name].process)
        yield (
            name,
            {
                "broker": total(broker),
                "cluster": total(parts),
                "parts": parts,
                "ratio_pss": total(parts)["pss_bytes"] / total(broker)["pss_bytes"],
            },
        )


def settled(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Wait until no machine's memory changes, then return the result of :func:`machines`.

    Ray starts some of its helper processes only after a while.
    """
    looks: list[dict[str, dict[str, Any]]] = [dict(machines(cluster))]

    def rests() -> bool:
        time.sleep(BETWEEN)
        looks.append(dict(machines(cluster)))
        before, now = ([m["cluster"]["pss_bytes"] for m in look.values()] for look in looks[-2:])
        return all(abs(b - a) <= CHANGE * a for a, b in zip(before, now, strict=True))

    wait_until(rests, "the memory of all machines to stay the same", 120)
    return looks[-1]


def total(parts: dict[str, dict[str, int]]) -> dict[str, int]:
    """Return the sum of all parts."""
    return {f: sum(part[f] for part in parts.values()) for f in ("pss_bytes", "rss_bytes")}


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return bytes by machine and part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="no difference: one look is enough")
    parser.parse_args(argv)
    carrier, make = carrier_and_class()
    folder = short_folder()
    cluster = make(folder)
    try:
        cluster.start()
        for name in cluster.names[:KERNELS]:
            cluster.kernel(name).attach()
        wait_until(lambda: cluster.attached() == KERNELS, "the slices")
        found = settled(cluster)
    finally:
        cluster.close()
        remove(folder)
    return {
        "what": "bytes of a machine's broker, and of what makes the machine part of a cluster",
        "emulated": True,
        "carried_by": carrier,
        "machines": found,
        "budgets": [
            budget(
                f"memory of a machine for its part of a cluster, over {carrier}, PSS",
                max(
                    machine["cluster"]["pss_bytes"] / 1e6
                    for machine in found.values()
                    if "Ray's head" not in machine["parts"]
                ),
                BUDGET_MB[carrier],
                "MB",
            )
        ],
    }
