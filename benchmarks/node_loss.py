# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time until the cluster shows that a machine is dead or hung, against the age of its reports.

To make a machine die, the benchmark sends SIGKILL to all processes of the machine's part of the
cluster. To make a machine hang, the benchmark sends SIGSTOP to the same processes. After some time,
the broker of another machine shows the machine as silent. The baseline, in the same run, is the age
of the machine's last report while the machine works.

With Ray in the environment, Ray carries the reports, and these processes are ``jupyter gpupool
node`` and its descendants. Otherwise, the reports go to a ledger that listens on a unix socket, and
these processes are the machine's agent and its descendants.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.common import budget, summary
from benchmarks.node_memory import carrier_and_class
from tests.broker.kit import remove, short_folder, wait_until
from tests.cluster.kit import Cluster, family

#: The benchmark kills or stops the machine LOST, and asks the broker of the machine ASKED.
LOST, ASKED = "m1", "m2"

#: The most milliseconds from the time-out of a machine's reports until another broker shows the
#: machine as silent. The broker renews its view of the cluster at most once a second.
ADDED_MS = 2000.0

#: Seconds between two requests for the cluster's view. The broker may renew its view only once a
#: second.
BETWEEN = 0.2


def node(cluster: Cluster) -> dict[str, Any]:
    """Return what the broker of ASKED shows about the machine LOST; {} if it shows nothing."""
    with cluster.brokers[ASKED].client() as client:
        view = client.call("cluster", timeout=30)["view"]
    rows = view["nodes"] if view else []
    return next((row for row in rows if row["name"] == LOST), {})


def seconds_until(cluster: Cluster, state: str) -> float:
    """Return the number of seconds until the broker of ASKED shows LOST in ``state``."""
    began = time.monotonic()

    def is_shown() -> bool:
        time.sleep(BETWEEN)
        return bool(node(cluster).get("state") == state)

    wait_until(is_shown, f"{LOST} to be {state}", 180)
    return time.monotonic() - began


def send(cluster: Cluster, number: int) -> None:
    """Send a signal to all processes of LOST's part of the cluster, parents before children."""
    for pid in family(cluster.agents[LOST].process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def ages(cluster: Cluster, looks: int) -> Iterator[float]:
    """Yield, at each look, the age of the last report of LOST, in milliseconds."""
    for _ in range(looks):
        time.sleep(1.1)  # after this time, the broker has a new view
        if found := node(cluster):
            yield found["age"] * 1000


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round")
    options = parser.parse_args(argv)
    rounds = 1 if options.quick else 3
    carrier, make = carrier_and_class()
    folder = short_folder()
    cluster = make(folder)
    took: dict[str, list[float]] = {"dead": [], "hung": []}
    try:
        cluster.start()
        agent = cluster.agents[LOST]
        seconds_until(cluster, "present")
        well = list(ages(cluster, 5 * rounds))
        for _ in range(rounds):
            for how, number in (("dead", signal.SIGKILL), ("hung", signal.SIGSTOP)):
                send(cluster, number)
                took[how].append(seconds_until(cluster, "silent") * 1000)
                send(cluster, signal.SIGKILL)
                agent.kill()
                agent.start()
                # Do not measure the time until LOST is back. All machines run on this host, so the
                # new agent may reach Ray through the raylet of another machine.
                seconds_until(cluster, "present")
    finally:
        cluster.close()
        remove(folder)
    return {
        "what": "milliseconds until a broker shows that another machine is silent",
        "rounds": rounds,
        "emulated": True,
        "carried_by": carrier,
        "age_of_reports_ms": summary(well),
        "notices": {how: summary(times) for how, times in took.items()},
        "budgets": [
            budget(
                f"a {how} machine is shown as silent, after the time-out of {cluster.ttl:g} s, max",
                max(times) - cluster.ttl * 1000,
                ADDED_MS,
                "ms",
            )
            for how, times in took.items()
        ],
    }
