# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Three real brokers share one quota. Agents and ledger are processes, and the tests kill them."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from contextlib import suppress
from threading import Thread
from types import SimpleNamespace

import pytest

from jupyter_gpupool.broker import shared
from jupyter_gpupool.broker.transport.auth import Access, Peer
from jupyter_gpupool.cli import main
from jupyter_gpupool.errors import GPUPoolError, RefusedError
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
    if machines.ledger.process is None:  # killed by a failed test
        machines.ledger.start()
    machines.wait_serving()
    yield machines
    print(machines.logs())
    assert machines.attached() <= QUOTA
    machines.end_kernels()
    wait_until(lambda: machines.attached() == 0, "all slices to come back")
    for name in machines.names:
        if state_of(machines, name) != "present":  # left by a failed test
            machines.order(order="resume", node=name)
            wait_node(machines, name, "present")


def two_and_a_third(cluster):
    """Return a kernel on each machine: the first two have slices, and the third one waits."""
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
        "your kernels on this machine use none of your quota of 2 slices, and kernels on other "
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


def test_a_restarted_ledger_counts_all_slices_in_use(cluster):
    first, _, third = two_and_a_third(cluster)
    cluster.ledger.kill()
    cluster.ledger.start()
    cluster.wait_serving()
    counted = [row for node in cluster.order()["nodes"] for row in node["counted"]]
    assert sum(row[-1] for row in counted) == QUOTA
    assert third.state() == "queued"
    first.close()
    third.do("got", hold="cell")


def test_slices_of_a_killed_brokers_kernels_still_count(cluster):
    first, _, third = two_and_a_third(cluster)
    cluster.brokers["m0"].kill()
    assert cluster.brokers["m0"].started
    first.wait_state("active", "idle")
    cluster.wait_serving()
    assert third.state() == "queued"
    first.close()
    third.do("got", hold="cell")


def test_a_broker_that_starts_again_obeys_no_earlier_ledger(cluster):
    broker = cluster.brokers["m0"]

    def token():
        """Return the fencing token that the broker reports to its agent."""
        with broker.client() as agent:
            return json.loads(agent.call("account", wait=0)["report"])["epoch"]

    cluster.agents["m0"].kill()
    before = token()
    assert before[1]
    broker.kill()
    assert broker.started
    assert token() == before
    cluster.agents["m0"].start()
    wait_node(cluster, "m0", "present")


def test_kernels_keep_their_slices_while_the_ledger_is_gone(cluster):
    first = cluster.kernel("m0")
    first.attach()
    wait_until(
        lambda: not any(n["counted"] for n in cluster.order()["nodes"] if n["name"] != "m0"),
        "what kernels before had on other machines to be given back",
    )
    cluster.ledger.kill()
    second = cluster.kernel("m1")
    second.do("ask", hold="cell")
    second.wait_state("queued")
    lost = "the ledger of the cluster does not answer"
    wait_until(lambda: lost in reason(cluster, second), "the loss to be noticed")
    assert first.state() in ("active", "idle")
    cluster.ledger.start()
    second.do("got", hold="cell")


def test_the_successor_of_a_killed_agent_loses_no_slice(cluster):
    first = cluster.kernel("m0")
    first.attach()
    cluster.agents["m0"].kill()
    cluster.agents["m0"].start()
    second, third = cluster.kernel("m0"), cluster.kernel("m1")
    second.attach()
    third.do("ask", hold="cell")
    third.wait_state("queued")


def state_of(cluster, name):
    view = cluster.order() or {"nodes": []}
    return next((node["state"] for node in view["nodes"] if node["name"] == name), None)


def wait_node(cluster, name, state):
    wait_until(lambda: state_of(cluster, name) == state, f"{name} to be {state}")


def test_a_draining_machine_lets_its_kernels_keep_their_slices(cluster):
    first, _, third = two_and_a_third(cluster)
    waiting = cluster.kernel("m0")
    waiting.do("ask", hold="cell")
    cluster.order(order="drain", node="m0")
    wait_node(cluster, "m0", "draining")
    wait_until(lambda: "leaves the cluster" in reason(cluster, waiting), "the reason to say that")
    # Kill and restart the ledger and the broker. The machine must still drain, and the slice of its
    # kernel must still count for the quota.
    cluster.ledger.kill()
    cluster.ledger.start()
    cluster.brokers["m0"].kill()
    assert cluster.brokers["m0"].started
    first.wait_state("active", "idle")
    waiting.wait_state("queued")  # the waiting kernel asks the new broker again
    wait_node(cluster, "m0", "draining")
    assert (third.state(), waiting.state()) == ("queued", "queued")
    first.do("drop", hold="cell")  # the cell ends: an idle kernel leaves a drained GPU
    wait_node(cluster, "m0", "left")
    third.do("got", hold="cell")
    assert waiting.state() == "queued"
    third.close()
    cluster.order(order="resume", node="m0")
    waiting.do("got", hold="cell")
    assert state_of(cluster, "m0") == "present"


def test_leave_waits_for_the_kernels_of_this_machine(cluster, capsys):
    first = cluster.kernel("m1")
    first.attach()
    socket = str(cluster.brokers["m1"].socket)
    done = []
    command = Thread(target=lambda: done.append(main(["cluster", "leave", "--socket", socket])))
    command.start()
    try:
        wait_node(cluster, "m1", "draining")
        assert not done
    finally:
        first.close()
        command.join(60)
    assert done == [0]
    assert "Waiting for 1 kernel with a slice here." in capsys.readouterr().out
    assert state_of(cluster, "m1") == "left"
    cluster.order(order="resume", node="m1")
    wait_node(cluster, "m1", "present")


def look(cluster, name, capsys, *words):
    """Return what ``status --cluster`` prints on a machine."""
    main(["status", "--cluster", "--socket", str(cluster.brokers[name].socket), *words])
    return capsys.readouterr().out


def test_each_machine_shows_the_whole_cluster(cluster, capsys):
    first, _, third = two_and_a_third(cluster)

    def machines():
        found = json.loads(look(cluster, "m2", capsys, "--json"))["view"]
        return {node["name"]: node for node in found["nodes"]} if found else None

    def all_known():
        found = machines()
        shown = [n["summary"] for n in (found or {}).values() if n["summary"]]
        figures = [(summary["granted"] >> 20, summary["waiting"]) for summary in shown]
        return found if figures == [(100, 0), (100, 0), (0, 1)] else None

    found = wait_until(all_known, "all machines to have reported")
    assert [row[2:] for row in found["m0"]["counted"]] == [["leases", "", 1]]
    summary = found["m0"]["summary"]
    assert [free for _, free in summary["gpus"]] == [summary["free"]]
    assert [number for _, number in summary["sessions"]] == [1]
    socket = str(cluster.brokers["m2"].socket)
    assert main(["why", third.session, "--socket", socket]) == 0
    told = capsys.readouterr().out
    assert "On m0 (last report " in told
    assert "may use 1 lease." in told
    assert re.search(r"m0: yes, it has room \([^)]+\) and nobody waits\.", told), told
    assert re.search("^m0 +present +1 +[A-Za-z]", look(cluster, "m2", capsys), re.MULTILINE)
    cluster.agents["m1"].kill()
    wait_until(lambda: "m1       silent for " in look(cluster, "m2", capsys), "m1 to be silent")
    text = look(cluster, "m2", capsys)
    assert "m1: its figures are" in text
    cluster.agents["m1"].start()
    first.close()
    third.do("got", hold="cell")


def test_a_machine_without_the_ledger_shows_only_itself(cluster, capsys):
    cluster.wait_serving()
    assert "present" in look(cluster, "m0", capsys)
    cluster.ledger.kill()
    lost = "The ledger of the cluster does not answer m0. Its last answer came"
    wait_until(lambda: lost in look(cluster, "m0", capsys), "the loss to be noticed")
    assert re.search("^m0 +here +1 +[A-Za-z].* 0 B ", look(cluster, "m0", capsys), re.MULTILINE)
    cluster.ledger.start()


class Reading:
    """A stand-in for a broker. Each status shows the next list of sessions with a slice."""

    process = True

    def __init__(self, *readings):
        self._readings = [*readings]

    def status(self):
        shown = self._readings.pop(0)
        return {"sessions": [{"id": name, "slices": [1]} for name in shown]}


@pytest.mark.parametrize(
    ("readings", "attached"),
    [
        # Between the readings of m0 and m1, "a" gives back its slice, and "c" on m1 gets it.
        ({"m0": ["ab", "b"], "m1": ["c", "c"]}, 2),
        ({"m0": ["ab", "ab"], "m1": ["c", "c"]}, 3),
        ({"m0": ["a"], "m1": ["c"]}, 2),
    ],
)
def test_a_slice_that_moves_between_readings_counts_once(readings, attached):
    found = object.__new__(Cluster)
    found.brokers = {name: Reading(*each) for name, each in readings.items()}
    assert found.attached() == attached


#: Bytes of each kernel of a :class:`Churn`.
BYTES = 4 << 20


class Churn:
    """Takes and drops slices on all machines, and kills the processes that enforce the quota.

    Each kernel keeps its own bytes on the GPU, and reads them back whenever it gets a slice.
    """

    #: Steps between two kills.
    STEPS = 40

    def __init__(self, cluster, seed):
        self.cluster, self.chance = cluster, random.Random(seed)
        self.kernels = [cluster.kernel(name) for name in cluster.names for _ in range(2)]
        self.waiting, self.holding = {}, {}
        self.granted = self.asked = self.kills = self.read = 0
        self.filled = set()

    def step(self):
        """Let one kernel ask for a slice or give its slice back; then call :meth:`look`."""
        kernels = [kernel for kernel in self.kernels if kernel not in self.waiting]
        if kernels:
            kernel = self.chance.choice(kernels)
            if kernel in self.holding:
                self.give_back(kernel)
            else:
                self.asked += 1
                self.waiting[kernel] = f"h{self.asked}"
                kernel.do("ask", hold=self.waiting[kernel])
            self.look()
        else:
            wait_until(self.look, "a waiting kernel to be served")

    def look(self):
        """Check the quota, and use each new slice; return whether a kernel got one."""
        sessions = self.cluster.sessions()
        assert self.cluster.attached(sessions) <= QUOTA
        served = [k for k in self.waiting if sessions[k.session]["state"] in ("active", "idle")]
        for kernel in served:
            self.holding[kernel] = self.waiting.pop(kernel)
            kernel.do("got", hold=self.holding[kernel])
            if kernel in self.filled:
                self.read += kernel.do("check")
            else:
                kernel.do("alloc", bytes=BYTES, byte=1 + self.kernels.index(kernel))
                self.filled.add(kernel)
        self.granted += len(served)
        return bool(served)

    def give_back(self, kernel):
        """End the cell, and repeat the order to release the slice until the slice is back."""
        kernel.do("drop", hold=self.holding.pop(kernel))

        def is_released():
            with suppress(GPUPoolError), kernel.broker.client() as client:
                client.call("release", session=kernel.session)
            return kernel.state() not in ("active", "idle")

        wait_until(is_released, "the slice to come back")

    def kill(self):
        """Kill the ledger, an agent or a broker, and start it again."""
        self.kills += 1
        name = self.chance.choice(self.cluster.names)
        victim = self.chance.choice(["ledger", "agent", "broker"])
        if victim == "broker":
            broker = self.cluster.brokers[name]
            broker.kill()
            assert broker.started
            for kernel in self.holding:
                if kernel.broker is broker:
                    kernel.wait_state("active", "idle")
        else:
            process = self.cluster.ledger if victim == "ledger" else self.cluster.agents[name]
            process.kill()
            process.start()


@pytest.mark.long
def test_ten_thousand_leases_exceed_no_quota_despite_kills(cluster):
    granted = kills = read = 0
    for seed in range(100):
        churn = Churn(cluster, seed)
        while churn.granted < 100:
            for _ in range(churn.STEPS):
                churn.step()
            churn.kill()
        granted, kills, read = granted + churn.granted, kills + churn.kills, read + churn.read
        # Each kernel still has one session: no kill has led to a second session.
        assert set(cluster.sessions()) == {kernel.session for kernel in churn.kernels}
        cluster.end_kernels()
        print(f"{granted} leases, {kills} kills, {read >> 20} MiB read back")
    assert granted >= 10_000
    assert read > 9_000 * BYTES


def test_only_admins_and_the_agent_may_lend_limits():
    settings = SimpleNamespace(cluster_agent="gpupool")
    limits = object.__new__(shared.SharedLimits)
    limits._configuration = SimpleNamespace(settings=settings, access=Access(True, 0))
    limits.check_agent(SimpleNamespace(peer=Peer(1, 0, 0)))
    with pytest.raises(RefusedError, match="Only the user gpupool may lend limits"):
        limits.check_agent(SimpleNamespace(peer=Peer(1, 65534, 65534)))


def test_a_broker_of_one_machine_imports_no_cluster_module():
    code = (
        "import sys, jupyter_gpupool.broker.app, jupyter_gpupool.provisioner, jupyter_gpupool.cli;"
        "print([n for n in sys.modules if 'cluster' in n or n == 'ray' or n.endswith('.shared')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
