# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real brokers that share a user's GPU-seconds, both for a day's budget and for fair shares."""

from __future__ import annotations

import pytest

from tests.broker.kit import remove, short_folder, wait_until

from .kit import Cluster

#: Budgets in GPU-seconds for a day. A kernel alone on a GPU uses one GPU-second per second.
FEW, MANY = 6, 36_000


@pytest.fixture
def cluster():
    """Return a function that starts a cluster with a daily budget of GPU-seconds for each user."""
    made = []

    def start(seconds, rule="window"):
        folder = short_folder()
        daily = {"seconds": seconds, "then": "stop", "rule": rule}
        found = Cluster(folder, quotas={"*": {"gpu_seconds_per_day": daily}})
        made.append((found, folder))
        found.start().wait_serving()
        return found

    yield start
    for found, folder in made:
        print(found.logs())
        found.close()
        remove(folder)


def reason(kernel):
    return kernel.broker.session(kernel.session)["wait_reason"]


def knows_of_more(kernel):
    (budget,) = kernel.broker.session(kernel.session)["budgets"]
    return budget["more_elsewhere"]


def used(cluster):
    """Return the GPU-seconds that each machine has counted today."""
    return {
        name: max((s["usage"]["today"] for s in broker.status()["sessions"]), default=0.0)
        for name, broker in cluster.brokers.items()
    }


def lent(cluster):
    """Return how many of today's GPU-seconds the ledger counts for each machine."""
    rows = {n["name"]: [r for r in n["counted"] if r[2] == "gpu-seconds"]
            for n in cluster.order()["nodes"]}  # fmt: skip
    return {name: max((row[-1] for row in found), default=0) for name, found in rows.items()}


def test_machines_together_use_at_most_one_budget(cluster):
    cluster = cluster(FEW)
    first, second, third = (cluster.kernel(name) for name in cluster.names)
    first.attach()
    second.attach()
    stopped = (
        "it was preempted: the GPU-seconds of today are used up; it goes on by itself when there "
        "are GPU-seconds again, in "
    )
    # A kernel that has stopped may continue with GPU-seconds that the other machine gives back. So
    # wait until all GPU-seconds are used.
    wait_until(lambda: sum(used(cluster).values()) >= FEW - 0.1, "all GPU-seconds to be used")
    for kernel in (first, second):
        wait_until(lambda kernel=kernel: reason(kernel).startswith(stopped), "the kernel to stop")
    assert not cluster.attached()
    counted = used(cluster)
    # The sum may exceed the budget, because a machine needs time to suspend its kernel. Without the
    # ledger, each of the two machines would have used a whole budget.
    assert FEW - 1 <= sum(counted.values()) < 2 * FEW, counted
    wait_until(lambda: not knows_of_more(third), "the third machine to know that")
    third.do("ask", hold="cell")
    assert third.refused("got", hold="cell") == "budget"
    assert used(cluster) == counted


def test_a_machine_continues_with_its_part_without_the_ledger(cluster):
    cluster = cluster(MANY)
    first = cluster.kernel("m0")
    first.attach()
    wait_until(lambda: lent(cluster)["m0"] > 300, "a part for the first machine")
    cluster.ledger.kill()
    wait_until(lambda: cluster.losses()["m0"], "the loss to be noticed")
    assert first.state() in ("active", "idle")
    cluster.kernel("m0").attach()
    other = cluster.kernel("m1")
    other.do("ask", hold="cell")
    other.wait_state("queued")
    assert reason(other).startswith(
        "you used up this machine's part of today's GPU-seconds, and the ledger of the "
        "cluster does not answer, so this machine can borrow no more now; there are more in "
    )
    cluster.ledger.start()
    other.do("got", hold="cell")


def test_a_restarted_broker_continues_with_its_part(cluster):
    cluster = cluster(MANY)
    first = cluster.kernel("m0")
    first.attach()
    wait_until(lambda: used(cluster)["m0"] > 1.5, "some use")
    before, part = used(cluster)["m0"], lent(cluster)["m0"]
    assert part > 300
    # Without the ledger, the broker continues with its part, and suspends no kernel.
    cluster.ledger.kill()
    cluster.brokers["m0"].kill()
    assert cluster.brokers["m0"].started
    first.wait_state("active", "idle")
    wait_until(lambda: used(cluster)["m0"] >= before, "the usage before the restart")
    assert first.broker.session(first.session)["suspends"] == 0
    cluster.ledger.start()
    cluster.wait_serving()
    wait_until(lambda: lent(cluster)["m0"] >= part, "the ledger to count the same part")
    assert sum(lent(cluster).values()) == lent(cluster)["m0"]
    assert first.broker.session(first.session)["suspends"] == 0


def test_usage_on_other_machines_counts_for_fair_shares(cluster):
    cluster = cluster(MANY)
    first, second = cluster.kernel("m0"), cluster.kernel("m1")
    first.attach()
    wait_until(lambda: used(cluster)["m0"] > 2, "some use")
    first.close()

    def counts():
        found = second.broker.session(second.session)["usage"]
        assert found["today"] == 0
        return found["counts"]

    # A machine reports its usage every half minute. The half-life of usage is hours, so the usage
    # hardly decays in this time.
    wait_until(lambda: counts() > 1.5, "the usage of the first machine")


def refills(cluster):
    """Return how much of the refill, in GPU-seconds a day, the ledger counts for each machine."""
    rows = {n["name"]: [r[-1] for r in n["counted"] if r[2] == "refill"]
            for n in cluster.order()["nodes"]}  # fmt: skip
    return {name: sum(found) for name, found in rows.items()}


def test_machines_share_a_budget_that_refills(cluster):
    cluster = cluster(FEW, rule="refill")
    first, second, third = (cluster.kernel(name) for name in cluster.names)
    first.attach()
    second.attach()
    wait_until(lambda: sum(used(cluster).values()) >= FEW - 0.1, "all GPU-seconds to be used")
    wait_until(lambda: not cluster.attached(), "the kernels to stop")
    counted = used(cluster)
    assert FEW - 1 <= sum(counted.values()) < 2 * FEW, counted
    wait_until(lambda: not knows_of_more(third), "the third machine to know that")
    third.do("ask", hold="cell")
    assert third.refused("got", hold="cell") == "budget"


def test_the_only_machine_with_use_gets_the_whole_refill(cluster):
    cluster = cluster(MANY, rule="refill")
    first, other = cluster.kernel("m0"), cluster.kernel("m1")
    first.attach()
    # In each second, the kernel uses 1 GPU-second, and 5/12 of a GPU-second refills.
    wait_until(lambda: used(cluster)["m0"] > 2, "some use")
    first.do("drop", hold="cell")
    first.server.call("release", session=first.session)
    wait_until(lambda: first.state() == "detached", "the release")
    wait_until(lambda: refills(cluster)["m0"] == MANY, "the whole refill")
    assert refills(cluster)["m1"] == 0
    wait_until(lambda: used(cluster)["m0"] == 0, "the GPU-seconds to come back")
    assert other.state() == "detached"
