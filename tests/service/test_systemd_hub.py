# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""JupyterHub with SystemdSpawner, the machine's service, and two accounts."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.broker.kit import wait_until
from tests.hub.test_hub import CHECK, FILL

from .kit import SystemdHub, refusal

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root installs the machine's service"),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
    pytest.mark.timeout(1800),
]


@pytest.fixture
def hub(machine):
    found = SystemdHub(machine, course=["bob"])
    try:
        found.start()
        groups = machine.root / "etc/gpupool/hub_groups.py"
        shutil.copy(found.folder / "pool.py", groups)
        for name in ("hub_groups", "pool"):
            groups.with_name(f"{name}.py").chmod(0o644)
        machine.gpupool(
            "install-service", "--config", "/etc/gpupool/hub_groups.py",
            "--config", "/etc/gpupool/pool.py",
        )  # fmt: skip
        yield found
    finally:
        found.close()
        machine.gpupool("install-service", "--undo")


def owners(machine):
    return {session["owner"]: session for session in machine.sessions()}


def test_users_of_systemd_spawner_share_one_gpu_through_restarts(machine, hub):
    path = hub.spawn("ada")
    other = hub.spawn("bob", "second")
    mine, theirs = hub.kernel(path), hub.kernel(other)
    # Ada's server is a separate unit. It runs as Ada's account, and has its own /tmp.
    assert machine.show("User", "jupyter-ada-singleuser.service") == "1001"
    assert machine.show("PrivateTmp", "jupyter-ada-singleuser.service") == "yes"
    mine.run("%gpu 300MiB")
    mine.run(FILL % 7)
    theirs.run(FILL % 9)  # the GPU has room for one kernel: the first one is suspended
    found = owners(machine)
    assert {name: s["group"] for name, s in found.items()} == {"ada": "students", "bob": "course"}
    assert found["ada"]["suspended_bytes"] > 0
    mine.run(CHECK % 7)

    # A restart of the broker, or of the Hub with its proxy, ends no server and no kernel.
    machine.run("systemctl", "restart", "gpupool.service")
    theirs.run(CHECK % 9)
    hub.stop()
    hub.start()
    hub.kernel(path, found["ada"]["kernel_id"]).run(CHECK % 7)
    assert set(owners(machine)) == {"ada", "bob"}

    # When a server ends, its unit, its kernels and their sessions end, too.
    hub.call("DELETE", "/users/ada/server")
    wait_until(lambda: set(owners(machine)) == {"bob"}, "the end of the stopped server's kernels")
    hub.kernel(other, found["bob"]["kernel_id"]).run(CHECK % 9)
