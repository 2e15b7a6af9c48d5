# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A Ray cluster of machines with separate networks. The tests cut the machines' cables."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.broker.kit import environment, wait_until

from .hosts import Hosts, can_have_hosts
from .kit import is_alive
from .remotes import a_server, identified
from .test_ray_kernels import RayTriple

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="needs the environment of make test-cluster",
    ),
    pytest.mark.skipif(not can_have_hosts(), reason="needs root and the program ip (iproute2)"),
]


@pytest.fixture(scope="module")
def cluster():
    with Hosts(RayTriple.names) as hosts:

        class Wired(RayTriple):
            """Machines that reach each other through cables only."""

            def at(self, name):
                return hosts.at(name)

            def head_address(self):
                return hosts.address["m0"]

            def start_broker(self, name):
                # Execute the broker on its machine. A forked broker would have the network of the
                # process that forks it.
                broker = self.brokers[name]
                with self.at(name):
                    answer = broker.start(env={**environment(broker.folder), **broker.variables})
                assert answer["ok"], answer

        with identified(Wired, hosts.address) as found:
            found.hosts = hosts
            yield found


@pytest.fixture
def server(cluster):
    with a_server(cluster) as found:
        yield found


def network(pid):
    return Path(f"/proc/{pid}/ns/net").readlink()


#: Starts a thread that counts, and writes each number to a file at once. The file shows that the
#: kernel runs while its machine is unreachable.
COUNT = """
import os, threading, time
def count(path):
    for number in range(1_000_000):
        with open(path, "w") as file:
            file.write(str(number))
        time.sleep(0.05)
os.makedirs(os.path.dirname({path!r}), exist_ok=True)
threading.Thread(target=count, args=({path!r},), daemon=True).start()
x = 7
print(os.getpid())
"""


def state(cluster, name):
    return {node["name"]: node["state"] for node in cluster.view()["nodes"]}[name]


def keep_node(cluster, name):
    """If the node process of a machine has ended, start it again, as systemd would."""
    node = cluster.agents[name]
    if node.process is not None and node.process.poll() is not None:
        node.process = None
        node.start()


def test_a_cut_cable_ends_no_kernel_and_starts_no_second_one(cluster, server):
    path = f"/tmp/{cluster.folder.name}-count/number"
    assert server.do("start") == "m1"
    pid = int(server.do("run", COUNT.format(path=path)))
    # The kernel is in the network of m1. The server and this test are in two other networks.
    assert network(pid) == network(cluster.brokers["m1"].process.pid)
    assert len({network(p) for p in (pid, os.getpid(), server.process.pid)}) == 3
    assert "100 MiB" in server.do("run", "%gpu attach\n%gpu")
    had = cluster.brokers["m1"].status()["sessions"][0]

    cluster.hosts.cut("m1")
    wait_until(lambda: state(cluster, "m1") == "silent", "the ledger to miss m1", 120)
    # The server does not report the kernel as dead. The kernel computes and keeps its slice.
    assert server.do("alive") is True
    number = int(Path(path).read_text() or 0)
    wait_until(lambda: int(Path(path).read_text() or 0) > number + 5, "the kernel to count")
    (now,) = cluster.brokers["m1"].status()["sessions"]
    assert (now["pid"], now["state"], now["device"]) == (pid, had["state"], had["device"])
    wait_until(lambda: cluster.losses()["m1"], "m1 to miss the ledger", 60)
    # The ledger still counts at least one of the user's two slices for m1, so it cannot lend this
    # slice to another machine.
    view = cluster.view()
    counted = {
        node["name"]: sum(row[-1] for row in node["counted"] if row[2] == "leases")
        for node in view["nodes"]
    }
    assert counted["m1"] >= 1, json.dumps(view)

    cluster.hosts.mend("m1")

    def is_back():
        keep_node(cluster, "m1")
        return state(cluster, "m1") == "present"

    wait_until(is_back, "m1 to be back", 180)
    assert server.do("run", "print(x, os.getpid())") == f"7 {pid}"
    assert server.do("interrupt") == "KeyboardInterrupt"
    assert len(cluster.brokers["m1"].status()["sessions"]) == 1
    assert server.do("restart") == "m1"
    assert not is_alive(pid)
    assert server.do("shutdown") is False
    wait_until(lambda: not cluster.brokers["m1"].status()["sessions"], "the end of its session")


def test_machines_go_on_when_the_heads_cable_is_cut(cluster):
    kernel = cluster.kernel("m2")
    kernel.attach()
    cluster.hosts.cut("m0")
    wait_until(lambda: cluster.losses()["m2"], "m2 to miss the ledger", 60)
    assert kernel.state() in ("active", "idle")
    # The limits that the ledger lent m2 have expired. Sessions on m2 keep their slices, and get no
    # new ones.
    second = cluster.kernel("m2")
    second.do("ask", hold="cell")
    second.wait_state("queued")
    cluster.hosts.mend("m0")

    def all_present():
        for name in cluster.names:
            keep_node(cluster, name)
        view = cluster.view()
        return view and view["serving"] and {n["state"] for n in view["nodes"]} == {"present"}

    wait_until(all_present, "all machines to be back", 240)
    second.do("got", hold="cell")
    assert kernel.state() in ("active", "idle")
    cluster.end_kernels()
