# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Three real brokers with one quota: agents and ledger are processes, and are killed."""

from __future__ import annotations

import random
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker import shared
from jupyter_gpupool.broker.transport.auth import Access, Peer
from jupyter_gpupool.errors import RefusedError
from tests.broker.kit import remove, short_folder, wait_until

from .kit import QUOTA, Cluster


@pytest.fixture(scope="module")
def machines():
    folder = short_folder()
    found = Cluster(folder).start()
    yield found
    found.close()
    remove(folder)


@pytest.fixture
def cluster(machines):
    machines.wait_serving()
    yield machines
    print(machines.logs())
    assert machines.attached() <= QUOTA
    machines.end_kernels()
    wait_until(lambda: machines.attached() == 0, "all slices to come back")


def two_and_a_third(cluster):
    """Attach a kernel on each of two machines; let a third one ask."""
    first, second, third = (cluster.kernel(name) for name in cluster.names)
    for kernel in (first, second):
        kernel.attach()
    third.do("ask", hold="cell")
    third.wait_state("queued")
    return first, second, third


def reason(cluster, kernel):
    return kernel.broker.session(kernel.session)["wait_reason"]


def test_a_quota_counts_on_all_machines(cluster):
    first, _, third = two_and_a_third(cluster)
    assert reason(cluster, third) == (
        "your quota of 2 slices is in use by no kernel of yours here, and kernels on other "
        "machines use the rest"
    )
    first.close()
    third.do("got", hold="cell")
    assert cluster.attached() == QUOTA


def test_a_lease_within_the_budget_needs_no_ledger(cluster):
    first, second = cluster.kernel("m0"), cluster.kernel("m0")
    first.attach()
    wait_until(
        lambda: [row[-1] for node in cluster.order()["nodes"] for row in node["counted"]] == [2],
        "what both kernels would use to be lent",
    )
    cluster.ledger.kill()
    second.attach()
    cluster.ledger.start()


def test_a_killed_ledger_forgets_nothing_that_is_in_use(cluster):
    first, _, third = two_and_a_third(cluster)
    cluster.ledger.kill()
    cluster.ledger.start()
    cluster.wait_serving()
    counted = [row for node in cluster.order()["nodes"] for row in node["counted"]]
    assert sum(row[-1] for row in counted) == QUOTA
    assert third.state() == "queued"
    first.close()
    third.do("got", hold="cell")


def test_a_killed_broker_still_counts_what_its_kernels_have(cluster):
    first, _, third = two_and_a_third(cluster)
    cluster.brokers["m0"].kill()
    assert cluster.brokers["m0"].started
    first.wait_state("active", "idle")
    cluster.wait_serving()
    assert third.state() == "queued"
    first.close()
    third.do("got", hold="cell")


def test_without_the_ledger_kernels_keep_their_slices(cluster):
    first = cluster.kernel("m0")
    first.attach()
    cluster.ledger.kill()
    second = cluster.kernel("m1")
    wait_until(lambda: "does not answer" in cluster.brokers["m1"].tail(), "the loss to be noticed")
    second.do("ask", hold="cell")
    second.wait_state("queued")
    assert "the ledger of the cluster does not answer" in reason(cluster, second)
    assert first.state() in ("active", "idle")
    cluster.ledger.start()
    second.do("got", hold="cell")


def test_a_killed_agent_is_replaced_without_a_loss(cluster):
    first = cluster.kernel("m0")
    first.attach()
    cluster.agents["m0"].kill()
    cluster.agents["m0"].start()
    second, third = cluster.kernel("m0"), cluster.kernel("m1")
    second.attach()
    third.do("ask", hold="cell")
    third.wait_state("queued")


def churn(cluster, steps, seed):
    """Take and drop slices anywhere, and kill; return how many were granted."""
    chance, granted = random.Random(seed), 0
    kernels = [cluster.kernel(name) for name in cluster.names for _ in range(2)]
    waiting, holding, number = {}, {}, 0
    for step in range(steps):
        kernel = chance.choice(kernels)
        if kernel in holding:
            kernel.do("drop", hold=holding.pop(kernel))
            kernel.server.call("release", session=kernel.session)
        elif kernel not in waiting:
            number += 1
            waiting[kernel] = f"h{number}"
            kernel.do("ask", hold=f"h{number}")
        for other in [*waiting]:
            if other.state() in ("active", "idle"):
                hold = waiting.pop(other)
                other.do("got", hold=hold)
                holding[other] = hold
                granted += 1
        if step % 12 == 11:
            victim = chance.choice(["ledger", "agent", "broker"])
            name = chance.choice(cluster.names)
            if victim == "ledger":
                cluster.ledger.kill()
                cluster.ledger.start()
            elif victim == "agent":
                cluster.agents[name].kill()
                cluster.agents[name].start()
            else:
                cluster.brokers[name].kill()
                assert cluster.brokers[name].started
                for other in kernels:
                    if other.broker.socket == cluster.brokers[name].socket and other in holding:
                        other.wait_state("active", "idle")
        assert cluster.attached() <= QUOTA
    return granted


@pytest.mark.long
def test_ten_thousand_leases_with_kills_exceed_no_quota(cluster):
    granted = 0
    for seed in range(1000):
        granted += churn(cluster, 240, seed)
        cluster.end_kernels()
        if granted >= 10_000:
            break
    assert granted >= 10_000


def test_only_the_agent_may_lend():
    settings = SimpleNamespace(cluster_agent="gpupool")
    limits = object.__new__(shared.SharedLimits)
    limits._configuration = SimpleNamespace(settings=settings, access=Access(True, 0))
    limits._check(SimpleNamespace(peer=Peer(1, 0, 0)))
    with pytest.raises(RefusedError, match="Only the user gpupool may lend limits"):
        limits._check(SimpleNamespace(peer=Peer(1, 65534, 65534)))


def test_a_broker_of_one_machine_loads_nothing_of_clusters():
    code = (
        "import sys, jupyter_gpupool.broker.app, jupyter_gpupool.provisioner, jupyter_gpupool.cli;"
        "print([n for n in sys.modules if 'cluster' in n or n == 'ray' or n.endswith('.shared')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
