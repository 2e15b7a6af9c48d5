# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels on other machines through a real Ray cluster of three machines on this host."""

from __future__ import annotations

import importlib.util
import os
import signal

import pytest

from tests.broker.kit import wait_until

from .kit import is_alive
from .remotes import USER, HostingBroker, RemoteKernel, User, a_server, identified
from .test_ray import RayCluster

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the environment of make test-cluster"
)


class RayTriple(RayCluster):
    """Three machines that start kernels for each other. Each has a MUNGE daemon."""

    make_broker = HostingBroker


@pytest.fixture(scope="module")
def cluster():
    with identified(RayTriple) as found:
        yield found


@pytest.fixture
def server(cluster):
    with a_server(cluster) as found:
        yield found


@pytest.fixture
def user(cluster):
    found = User(cluster)
    yield found
    found.close()


ASKED = "import os, sys; x = 1; print(os.getuid(), os.getpid(), 'ray' in sys.modules)"


def test_ray_carries_orders_for_a_kernel_on_another_machine(cluster, server):
    name, words = server.do("refused", 900 << 30)
    assert (name, "No machine of the cluster can take" in words) == ("KernelNotStarted", True)
    assert server.do("start") == "m1"
    uid, pid, ray = server.do("run", ASKED).split()
    assert (uid, ray) == (str(USER), "False")
    (session,) = cluster.brokers["m1"].status()["sessions"]
    assert session["pid"] == int(pid)
    assert "100 MiB" in server.do("run", "%gpu attach\n%gpu")
    assert server.do("interrupt") == "KeyboardInterrupt"
    assert server.do("run", "print(x)") == "1"
    # Another ledger replaces the killed ledger, and carries the next orders.
    before = cluster.view()["process"]
    os.kill(before, signal.SIGKILL)
    assert server.do("alive") is True

    def is_replaced():
        found = cluster.view()
        return found and found["serving"] and found["process"] != before

    wait_until(is_replaced, "another ledger that lends")
    assert server.do("interrupt") == "KeyboardInterrupt"
    assert server.do("run", "print(x)") == "1"
    # A restarted kernel keeps its machine and its connection, but has another process.
    assert server.do("restart") == "m1"
    again = int(server.do("run", ASKED).split()[1])
    assert again != int(pid)
    assert not is_alive(int(pid))
    os.kill(again, signal.SIGKILL)
    assert server.do("died") == -9
    assert server.do("restart") == "m1"
    assert server.do("shutdown") is False
    wait_until(lambda: not cluster.brokers["m1"].status()["sessions"], "the end of its session")


def test_ray_carries_refusals_of_another_machine(cluster, user):
    answer = RemoteKernel(user, kernel="no-such").answer
    assert answer["code"] == "not-there"
    assert "On m1, there is no kernelspec 'no-such'" in answer["message"]
    sealed = user.seal("m2", do="poll", kernel_id="k")
    assert user.call("order", node="m2", credential=sealed)["result"]["running"] is False
    again = user.call("order", node="m2", credential=sealed)
    assert again["code"] == "bad-credential"
    elsewhere = user.seal("m2", do="poll", kernel_id="k")
    found = user.call("order", node="m1", credential=elsewhere)
    assert "it is for the machine m2, but this machine is m1" in found["message"]


def test_a_kernel_runs_on_while_the_agent_of_its_machine_is_away(cluster, user):
    kernel = RemoteKernel(user)
    try:
        kernel.connect()
        assert kernel.run("x = 2") == ""
        cluster.agents["m1"].kill()
        # The server and the kernel exchange their messages without Ray.
        assert kernel.run("print(x)") == "2"
        cluster.agents["m1"].start()
        wait_until(lambda: "running" in kernel.order("poll"), "the machine to answer", 120)
        assert kernel.order("poll") == {"running": True, "code": None}
        assert RemoteKernel(user, kernel_id=kernel.id).answer["code"] == "duplicate"
    finally:
        kernel.end()
