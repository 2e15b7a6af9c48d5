# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels that the service's broker starts for servers on other machines, under a real systemd."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hub.test_hub import CHECK, FILL

from .conftest import CONFIG
from .kit import PYTHON, refusal

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root installs the machine's service"),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
    pytest.mark.timeout(1800),
]

ORDERS = Path(__file__).with_name("orders.py")
SPEC = "remote-python3"
CLUSTER = """
c.GPUPool.cluster_nodes = ["solo"]
c.GPUPool.cluster_node = "solo"
c.GPUPool.cluster_address = "127.0.0.1"
c.GPUPool.cluster_identity = "munge"
"""

#: A cell that prints the rights of the kernel's process, and what the process has inherited.
LOOK = """
import os, re
from pathlib import Path
status = Path("/proc/self/status").read_text()
print(os.getuid(), re.search("NoNewPrivs:\\\\s*(.)", status)[1],
      int(re.search("CapBnd:\\\\s*(.*)", status)[1], 16) >> 21 & 1,
      Path("/proc/self/oom_score_adj").read_text().strip(), os.access(os.environ["HOME"], os.W_OK))
"""


class Orders:
    """A user whose server is on another machine."""

    def __init__(self, machine, user):
        self.process = subprocess.Popen(
            machine.command(str(PYTHON), str(ORDERS), user=user),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
        )  # fmt: skip

    def __call__(self, **order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the program has ended"
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


@pytest.fixture
def solo(machine):
    """The machine with a service that belongs to a cluster and hosts kernels."""
    if not shutil.which("munged", path=f"/usr/sbin:{os.environ['PATH']}"):
        pytest.skip("MUNGE is missing: apt-get install munge")
    before = machine.run("ls", "/etc/systemd/system")
    config = machine.root / "etc/gpupool/solo.py"
    config.write_text(CONFIG + CLUSTER)
    key = machine.root / "etc/munge/munge.key"
    if not key.exists():
        machine.run("/usr/sbin/mungekey", "--create")
    machine.run("systemctl", "start", "munge")
    spec = machine.root / "usr/local/share/jupyter/kernels" / SPEC
    spec.mkdir(parents=True)
    found = json.loads(machine.run(PYTHON, "-c", SPECS))
    found["metadata"] = {"supported_encryption": "curve"}
    (spec / "kernel.json").write_text(json.dumps(found))
    machine.gpupool("install-service", "--config", "/etc/gpupool/solo.py")
    yield machine
    machine.gpupool("install-service", "--undo")
    shutil.rmtree(spec)
    assert machine.run("ls", "/etc/systemd/system") == before


SPECS = """
import json
from jupyter_client.kernelspec import KernelSpecManager
print(json.dumps(KernelSpecManager().get_kernel_spec("python3").to_dict()))
"""


@pytest.fixture
def ada(solo):
    found = Orders(solo, "ada")
    yield found
    found.close()


def test_hosted_kernels_have_no_limits_and_outlive_the_broker(solo, ada):
    pid = ada(start=SPEC)
    assert isinstance(pid, int), pid
    uid = solo.run("id", "-u", "ada")
    assert ada(code=LOOK) == f"{uid} 0 1 0 True"
    ada(code=FILL % 7)
    assert [s["owner"] for s in solo.sessions()] == ["ada"]

    # The kernel is in the cgroup of the broker's unit. Still, the kernel survives a restart of the
    # unit, and a kill of the broker.
    first = solo.show("MainPID")
    solo.run("systemctl", "restart", "gpupool.service")
    assert ada(do="poll") == {"running": True, "code": None}
    second = solo.show("MainPID")
    assert second != first
    solo.run("kill", "-KILL", second)
    ada(code=CHECK % 7)
    # After the kill, no broker runs for a moment, but systemd keeps the socket open. This order
    # waits in the queue of the socket until the next broker runs.
    assert ada(do="poll") == {"running": True, "code": None}
    assert solo.show("MainPID") not in ("0", second)

    assert ada(do="signal", signal=9) == {"running": True}
    while ada(do="poll")["running"]:
        pass
    assert ada(do="clean") == {}
