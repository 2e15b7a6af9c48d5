# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Three machines in a real Ray cluster on this host. ``make test-cluster`` installs Ray."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool.cluster import desk
from jupyter_gpupool.cluster.node import RAY_FOLDER
from tests.broker import kit as broker_kit
from tests.broker.kit import remove, short_folder, wait_until

from .kit import QUOTA, Cluster, family, is_alive
from .test_brokers import two_and_a_third

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the environment of make test-cluster"
)


def ray_folder(cluster, name):
    """Return the folder in which Ray keeps the sockets and logs of a machine."""
    return cluster.folder / f"ray-{name}"


class RayNode:
    """``jupyter gpupool node`` as a process, with its raylet and its agent."""

    def __init__(self, cluster, name):
        self.cluster, self.name = cluster, name
        self.log = cluster.folder / f"node-{name}.log"
        self.process = None

    def start(self):
        cluster, broker = self.cluster, self.cluster.brokers[self.name]
        head = self.name == cluster.names[0]
        where = ["--head", "--port", str(cluster.port)] if head else ["--join", cluster.ray]
        with self.log.open("ab") as log, cluster.at(self.name):
            self.process = subprocess.Popen(
                [sys.executable, "-m", "jupyter_gpupool.cli", "node", *where, "--token",
                 str(cluster.token), "--config", str(broker.config_file), "--socket",
                 str(broker.socket)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**broker_kit.environment(cluster.folder), **(cluster.store if head else {}),
                     RAY_FOLDER: str(ray_folder(cluster, self.name))},
                cwd=broker_kit.ROOT,
            )  # fmt: skip
        return self

    def kill(self):
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(60)
            self.process = None


class RayCluster(Cluster):
    """A :class:`Cluster` in which Ray carries the messages and runs the ledger."""

    ttl = desk.TTL

    def __init__(self, folder, *, store=None, **options):
        super().__init__(folder, **options)
        self.store = store or {}  # variables that tell the head where Ray stores its state
        with socket.socket() as free:
            free.bind(("", 0))
            self.port = free.getsockname()[1]
        self.ray = f"{self.head_address()}:{self.port}"
        self.token = self.folder / "token"
        self.agents = {name: RayNode(self, name) for name in self.names}

    def head_address(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # this sends no packet
            return probe.getsockname()[0]

    def start(self):
        for name in self.names:
            self.start_broker(name)
        self.agents["m0"].start()
        wait_until(lambda: self.view() is not None, "the head and its ledger", 120)
        for name in self.names[1:]:
            self.agents[name].start()
        wait_until(lambda: (self.view() or {}).get("serving"), "the ledger to lend", 120)
        return self

    def command(self, *words):
        with self.at("m0"):
            return subprocess.Popen(
                [sys.executable, "-m", "jupyter_gpupool.cli", "cluster", *words,
                 "--address", self.ray, "--token", str(self.token)],
                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                cwd=broker_kit.ROOT, env=broker_kit.environment(self.folder),
            )  # fmt: skip

    def view(self):
        done = self.command("status", "--json")
        out, _ = done.communicate(timeout=120)
        return json.loads(out) if done.returncode == 0 else None

    def close(self):
        for name in reversed(self.names):
            self.agents[name].kill()
        super().close()


@pytest.fixture(scope="module")
def machines():
    folder = short_folder()
    found = RayCluster(folder)
    try:
        yield found.start()
    finally:
        print(found.logs())
        found.close()
        remove(folder)


def states(cluster):
    return {node["state"] for node in (cluster.view() or {"nodes": []})["nodes"]}


@pytest.fixture
def cluster(machines):
    yield machines
    assert machines.attached() <= QUOTA
    machines.end_kernels()
    wait_until(lambda: machines.attached() == 0, "all slices to come back")


def test_machines_share_a_quota_over_ray(cluster):
    first, _, third = two_and_a_third(cluster)
    assert {node["state"] for node in cluster.view()["nodes"]} == {"present"}
    first.close()
    third.do("got", hold="cell")


def test_ray_starts_a_killed_ledger_again(cluster):
    first, _, third = two_and_a_third(cluster)
    before = cluster.view()
    assert before["process"] in family(cluster.agents["m0"].process.pid)  # the head runs the ledger
    os.kill(before["process"], signal.SIGKILL)

    def lends_again():
        found = cluster.view()
        return found and found["serving"] and found["process"] != before["process"]

    wait_until(lends_again, "another ledger that lends")
    assert third.state() == "queued"
    first.close()
    third.do("got", hold="cell")


def test_kernels_keep_their_slices_after_their_node_ends(cluster):
    first, _, third = two_and_a_third(cluster)
    cluster.agents["m1"].kill()
    assert third.state() == "queued"
    assert cluster.attached() == QUOTA
    first.close()
    third.do("got", hold="cell")
    cluster.agents["m1"].start()
    wait_until(lambda: states(cluster) == {"present"}, "the machine to be back")


def test_raylet_and_agent_of_a_killed_node_end(cluster):
    node = cluster.agents["m2"]
    started = family(node.process.pid)
    node.process.kill()
    node.process.wait()
    wait_until(lambda: not any(map(is_alive, started)), "raylet and agent to end")
    node.start()
    wait_until(lambda: states(cluster) == {"present"}, "the machine to be back")


#: The raylet stops for this many seconds. Ray declares a silent machine dead in a tenth of this
#: time.
PAUSE = 60.0


def raylet_of(node):
    """Return the process of a machine's raylet."""
    family_of_node = family(node.process.pid)
    (found,) = [p for p in family_of_node if Path(f"/proc/{p}/comm").read_text() == "raylet\n"]
    return found


def test_no_slice_is_lost_if_a_raylet_stops_for_a_minute(cluster):
    first, second, third = two_and_a_third(cluster)
    node = cluster.agents["m1"]
    raylet = raylet_of(node)
    os.kill(raylet, signal.SIGSTOP)
    try:
        until = time.monotonic() + PAUSE
        while time.monotonic() < until:
            assert (cluster.attached(), third.state()) == (QUOTA, "queued")
            # This sleep is only the time between two checks. The loop always lasts the whole
            # minute.
            time.sleep(0.5)
    finally:
        os.kill(raylet, signal.SIGCONT)
    # During the pause, Ray has declared the machine dead. So the raylet ends, and then `node` ends.
    assert node.process.wait(60) == 1
    assert (cluster.attached(), third.state()) == (QUOTA, "queued")
    node.start()  # a service would do the same
    wait_until(lambda: states(cluster) == {"present"}, "the machine to be back", 120)
    assert second.state() in ("active", "idle")
    assert (cluster.attached(), third.state()) == (QUOTA, "queued")
    first.close()
    third.do("got", hold="cell")


def test_ray_carries_orders_to_drain_and_resume_a_machine(cluster):
    first = cluster.kernel("m1")
    first.attach()
    command = cluster.command("drain", "m1")
    wait_until(lambda: "draining" in states(cluster), "the machine to drain")
    assert command.poll() is None
    first.close()
    out, _ = command.communicate(timeout=60)
    assert (command.returncode, "no kernel has a slice there" in out) == (0, True)
    out, _ = cluster.command("resume", "m1").communicate(timeout=60)
    assert "m1 is back in the cluster." in out
    wait_until(lambda: states(cluster) == {"present"}, "all machines to be heard")


def test_a_hung_head_does_not_hang_a_command(cluster):
    with socket.create_server(("127.0.0.1", 0)) as hung:
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "jupyter_gpupool.cli", "cluster", "status", "--address",
             address, "--token", str(cluster.token)],
            capture_output=True, text=True, timeout=60, cwd=broker_kit.ROOT, check=False,
            env=broker_kit.environment(cluster.folder),
        )  # fmt: skip
    assert done.returncode == 1
    assert f"{address} did not answer" in done.stderr
    assert "The request was for the list of machines." in done.stderr


def test_users_cannot_join_without_the_token(cluster):
    wrong = cluster.folder / "wrong"
    wrong.write_text("0" * 64)
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.cli", "cluster", "status", "--address",
         cluster.ray, "--token", str(wrong), "--json"],
        capture_output=True, text=True, timeout=120, cwd=broker_kit.ROOT, check=False,
        env=broker_kit.environment(cluster.folder),
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert cluster.token.stat().st_mode & 0o077 == 0
