# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests that kill and restart the head of a real Ray cluster, without and with Redis as a store."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress

import pytest

from tests.broker.kit import remove, short_folder, wait_until

from .kit import QUOTA, family
from .test_brokers import two_and_a_third
from .test_ray import RayCluster, ray_folder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the environment of make test-cluster"
)

#: Ray needs at most this many seconds to notice the loss, to end its processes and to start again.
PATIENCE = 180


@pytest.fixture
def redis():
    """Start a Redis server for this test, and yield the address of the server."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is missing")
    folder = short_folder()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )

    def answers():
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return True
        return False

    wait_until(answers, "Redis to listen")
    yield f"127.0.0.1:{port}"
    server.kill()
    server.wait()
    remove(folder)


@pytest.fixture(params=("no store", "redis"))
def cluster(request):
    store = {}
    if request.param == "redis":
        store = {"RAY_REDIS_ADDRESS": request.getfixturevalue("redis")}
    folder = short_folder()
    found = RayCluster(folder, store=store)
    try:
        yield found.start()
        found.end_kernels()
    finally:
        print(found.logs())
        found.close()
        remove(folder)


def test_no_quota_is_exceeded_when_the_head_is_lost(cluster):
    first, _, third = two_and_a_third(cluster)
    head, losses = cluster.agents["m0"], cluster.losses()
    for pid in family(head.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    head.process.wait()
    # Delete Ray's note of the address of the cluster. With the note, Ray would think that the head
    # still runs, because the raylets of the other machines run on this host, too.
    (ray_folder(cluster, "m0") / "ray_current_cluster").unlink(missing_ok=True)
    wait_until(
        lambda: all(cluster.losses()[name] > losses[name] for name in cluster.names),
        "the brokers to notice the loss",
    )
    assert (cluster.attached(), third.state()) == (QUOTA, "queued")

    answers = cluster.answers()

    def lends_again():
        for node in cluster.agents.values():
            if node.process.poll() is not None:
                node.start()  # a service would do the same
        now = cluster.answers()
        return all(now[name] > answers[name] for name in cluster.names)

    wait_until(lends_again, "a ledger that answers", PATIENCE)
    wait_until(lambda: (cluster.view() or {}).get("serving"), "it to lend", PATIENCE)
    assert (cluster.attached(), third.state()) == (QUOTA, "queued")
    first.close()
    third.do("got", hold="cell")
