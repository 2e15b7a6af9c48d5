# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Servers of JupyterHub in Docker containers, with the files of ``examples``."""

from __future__ import annotations

import os

import pytest

from tests.broker import kit
from tests.broker.kit import wait_until
from tests.hub.kit import HUB
from tests.hub.test_hub import CHECK, FILL

from .docker import IMAGE, Docker, DockerHub, refusal
from .kit import running
from .podman import images

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the machine's broker"),
    pytest.mark.skipif(
        bool(refusal()) or IMAGE.partition(":")[2] not in images() or not (HUB / ".ready").exists(),
        reason="run make test-containers, which installs what is needed",
    ),
    pytest.mark.timeout(1800),
]


@pytest.fixture
def site():
    """A Hub, a Docker daemon, and a machine whose one GPU has room for only one of two kernels."""
    with running(emulate=kit.ONE, default_memory=250 * kit.MiB) as machine:
        docker = hub = None
        try:
            docker = Docker()
            hub = DockerHub(machine, docker, course=["bob@example.org"])
            hub.start()
            yield hub, docker, machine.started
        finally:
            if hub is not None:
                hub.close()
                print(hub.tail())
            if docker is not None:
                docker.close()


def owners(machine):
    return {session["owner"]: session for session in machine.status()["sessions"]}


def test_users_of_docker_spawner_share_one_gpu_through_restarts(site):
    hub, docker, machine = site
    ada, bob = "ada", "bob@example.org"
    for name in (ada, bob):
        # Make the user's folder before Docker would make it. The emulated GPUs are mounted in this
        # folder, so the broker must fill the folder before the container starts.
        machine.user(name)
    path = hub.spawn(ada)
    mine, theirs = hub.kernel(path), hub.kernel(hub.spawn(bob))
    mine.run("%gpu 300MiB")
    mine.run(FILL % 7)
    theirs.run(FILL % 9)  # the GPU has room for one kernel, so the broker suspends ada's kernel
    found = owners(machine)
    # Both containers run as user id 1000. The broker knows the owners by the mounted folders.
    assert found.keys() == {ada, bob}
    assert found[ada]["suspended_bytes"] > 0
    mine.run(CHECK % 7)

    # Kill the broker and restart the Hub. No server, no kernel and no byte may be lost.
    machine.kill()
    assert machine.started
    theirs.run(CHECK % 9)
    hub.stop()
    hub.start()
    hub.kernel(path, found[ada]["kernel_id"]).run(CHECK % 7)
    assert set(owners(machine)) == {ada, bob}

    # A session ends if Docker kills its container, or if the Hub stops its server.
    (name,) = docker.run("ps", "--quiet", "--filter", f"name=jupyter-{ada}").split()
    docker.run("kill", name)
    wait_until(lambda: set(owners(machine)) == {bob}, "the end of the killed container's session")
    hub.call("DELETE", f"/users/{bob}/server")
    wait_until(lambda: not owners(machine), "the end of the stopped server's session")
