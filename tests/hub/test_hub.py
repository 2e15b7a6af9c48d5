# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""JupyterHub with two accounts. The accounts share a GPU through the machine's broker.

The Hub has the configuration of ``examples/jupyterhub``. ``make test-hub`` makes the environment.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.broker import kit
from tests.broker.kit import wait_until

from .kit import HUB, OWN, TOKEN, Account, Hub, MachineBroker

pytestmark = [
    pytest.mark.skipif(
        not (HUB / ".ready").exists(), reason="run make test-hub, which installs it"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make accounts and be the service"),
]

#: A cell that puts data on the device. A suspend must keep this data.
FILL = """
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
buffer = device.allocate(64 << 20, stream=stream); buffer.fill(%d, stream=stream); stream.sync()
"""

#: A cell that fails if a byte of the data has changed.
CHECK = """
import ctypes
from cuda.bindings import driver
host = (ctypes.c_ubyte * buffer.size)()
(error,) = driver.cuMemcpyDtoH(ctypes.addressof(host), int(buffer.handle), buffer.size)
assert int(error) == 0 and bytes(host) == bytes([%d]) * buffer.size
"""


@pytest.fixture
def site():
    """A machine with two users, its broker, and a Hub."""
    folder = kit.short_folder()
    folder.chmod(0o755)
    where = Path("/run") / f"gpb-{os.getpid()}"
    names = [f"gpool-{who}-{os.getpid()}" for who in ("ada", "bob")]
    broker = MachineBroker(
            folder, emulate=kit.ONE, reclaim_after=0, default_memory=250 * kit.MiB,
            preempt=["class", "guarantee", "burst"],  # "turns" would take a kernel's slice
        )  # fmt: skip
    broker.socket = where / "broker.sock"
    accounts, hub = [], None
    try:
        for name in names:
            accounts.append(Account(name))
        hub = Hub(
            folder, broker.socket, course=names[1:],
            # The culler needs recent activity times.
            environment={"JUPYTERHUB_ACTIVITY_INTERVAL": "1"},
        )  # fmt: skip
        hub.start()
        broker.start()
        yield hub, broker, *names
    finally:
        if hub is not None:
            hub.close()
            print(hub.tail())
        broker.close()
        print(broker.tail())
        for account in accounts:
            account.close()
        kit.remove(folder)
        kit.remove(where)


def owners(broker):
    return {session["owner"]: session for session in broker.status()["sessions"]}


@pytest.mark.timeout(1800)
def test_two_users_of_a_hub_share_one_gpu_through_restarts(site):
    hub, broker, ada, bob = site
    path = hub.spawn(ada)
    mine = hub.kernel(path)
    theirs = hub.kernel(hub.spawn(bob, "second"))  # bob's named server: its kernels are bob's
    mine.run("%gpu 300MiB")
    mine.run(FILL % 7)
    theirs.run(FILL % 9)  # the GPU has room for one kernel: the first one is suspended
    found = owners(broker)
    assert {name: session["group"] for name, session in found.items()} == {
        ada: "students", bob: "course"  # the group of bob comes from a role of the Hub
    }  # fmt: skip
    assert found[ada]["suspended_bytes"] > 0
    mine.run(CHECK % 7)

    hub.call("POST", "/groups/research/users", {"users": [ada]})
    broker.kill()
    broker.start()
    theirs.run(CHECK % 9)
    hub.kernel(path)
    groups = {s["group"] for s in broker.status()["sessions"] if s["owner"] == ada}
    # The earlier kernel keeps the group "students", and the new kernel has "research".
    assert groups == {"students", "research"}

    # The servers and kernels survive a restart of the Hub.
    hub.stop()
    hub.start()
    assert set(owners(broker)) == {ada, bob}
    hub.call("DELETE", f"/users/{ada}/server")
    wait_until(lambda: set(owners(broker)) == {bob}, "the end of the stopped server's kernels")


@pytest.mark.timeout(1800)
def test_culler_ends_an_idle_server_and_keeps_a_waiting_server(site):
    hub, broker, ada, bob = site
    theirs = hub.kernel(hub.spawn(bob))
    theirs.run(FILL % 9)
    theirs.run("%gpu keep 10m")
    mine = hub.kernel(hub.spawn(ada))
    mine.run("%gpu 300MiB")
    cell = mine.begin(FILL % 7)
    wait_until(lambda: owners(broker)[ada]["state"] == "queued", "a cell that waits")
    culler = subprocess.Popen(
        [
            str(OWN.bin / "python"), "-m", "jupyterhub_idle_culler", "--timeout=15",
            "--cull-every=1", f"--url=http://127.0.0.1:{hub.ports['hub']}/hub/api",
        ],
        env={**os.environ, "JUPYTERHUB_API_TOKEN": TOKEN},
    )  # fmt: skip
    try:
        # The kernel of the other server keeps the only GPU until the culler ends this server.
        assert mine.end(cell)["status"] == "ok"
    finally:
        culler.kill()
        culler.wait(60)
    assert set(owners(broker)) == {ada}
