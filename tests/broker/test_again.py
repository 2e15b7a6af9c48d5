# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A kernel's start succeeds even if the broker dies between two steps of the start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing

import pytest

from jupyter_gpupool import starting
from jupyter_gpupool.client import ClientAgain
from jupyter_gpupool.endpoint import START_TIMEOUT
from jupyter_gpupool.errors import BrokerUnavailable

from .kit import wait_until


def kill(broker):
    """Kill the running broker; return when nothing answers at its socket."""
    if broker.process is not None:
        broker.kill()
        return
    if starting.answers(broker.socket):
        os.kill(broker.status()["pid"], signal.SIGKILL)
    wait_until(lambda: not starting.answers(broker.socket), "the broker to be gone")


@pytest.fixture
def client(make_broker):
    """Yield a client that restarts the broker if it does not answer; then kill the last broker."""
    broker = make_broker().started

    def find():
        assert starting.answers(broker.socket) or starting.revive(broker.socket)
        return broker.socket

    with closing(ClientAgain(find, timeout=START_TIMEOUT)) as client:
        client.broker = broker
        yield client
        kill(broker)


@pytest.fixture
def process():
    """A process that does nothing until the test ends it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_session_can_launch_after_its_broker_was_killed(client, process):
    opened = client.call("open", kernel_id="k", label="k")
    kill(client.broker)
    client.call("launched", session=opened["session"], pid=process.pid)
    (session,) = client.broker.status()["sessions"]
    assert (session["id"], session["pid"]) == (opened["session"], process.pid)
    assert session["state"] == "detached"


def test_session_opens_after_the_brokers_death(client):
    first = client.broker.status()["pid"]
    client.call("ping")
    kill(client.broker)
    assert client.call("open", kernel_id="k", label="k")["pid"] != first


def test_launch_is_repeated_when_its_answer_was_lost(client, process):
    opened = client.call("open", kernel_id="k", label="k")
    for _ in range(2):
        client.call("launched", session=opened["session"], pid=process.pid)
        kill(client.broker)
    client.call("launched", session=opened["session"], pid=process.pid)


def test_client_raises_an_error_if_no_broker_can_be_started(tmp_path):
    def find():
        raise BrokerUnavailable("No GPU pool broker could be started.", code="start-failed")

    with pytest.raises(BrokerUnavailable, match="could be started"):
        ClientAgain(find, timeout=START_TIMEOUT).call("ping")
