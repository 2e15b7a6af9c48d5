# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``install-service`` on a machine with a running systemd, and what systemd does afterwards."""

from __future__ import annotations

import os

import pytest

from tests.broker.kit import wait_until
from tests.hub.test_hub import CHECK, FILL

from .kit import refusal

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root installs the machine's service"),
    pytest.mark.skipif(bool(refusal()), reason=refusal() or "none"),
    pytest.mark.timeout(1800),
]


def install(machine, *options):
    return machine.gpupool("install-service", *options)


def main_pid(machine):
    return int(machine.show("MainPID"))


def test_sessions_survive_restarts_kills_and_an_upgrade(machine):
    before = machine.run("ls", "/etc/systemd/system", "/etc/tmpfiles.d")
    shown = install(machine, "--dry-run", "--config", "/etc/gpupool/pool.py")
    assert "systemctl enable --now gpupool.socket gpupool.service" in shown
    assert machine.run("ls", "/etc/systemd/system", "/etc/tmpfiles.d") == before
    install(machine, "--config", "/etc/gpupool/pool.py")
    assert machine.show("ActiveState") == "active"
    assert machine.show("StatusText") == "Serving at /run/gpupool/broker.sock"

    # Two accounts compete for one GPU. The broker runs with the restrictions of its unit.
    ada, bob = machine.cells("ada"), machine.cells("bob")
    ada.run("%gpu 300MiB")
    ada.run(FILL % 7)
    bob.run(FILL % 9)
    found = {s["owner"]: s for s in machine.sessions()}
    assert found["ada"]["suspended_bytes"] > 0
    assert found["bob"]["slices"]
    ada.run(CHECK % 7)

    # After a restart, a kill and a hang, the next broker has all sessions, and no byte is lost.
    first = main_pid(machine)
    machine.run("systemctl", "restart", "gpupool.service")
    bob.run(CHECK % 9)
    second = main_pid(machine)
    assert second != first
    machine.run("kill", "-KILL", second)
    ada.run(CHECK % 7)
    third = main_pid(machine)
    assert third not in (0, second)
    drop_in = machine.root / "etc/systemd/system/gpupool.service.d/watchdog.conf"
    drop_in.parent.mkdir()
    drop_in.write_text("[Service]\nWatchdogSec=10\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "gpupool.service")
    fourth = main_pid(machine)
    machine.run("kill", "-STOP", fourth)
    bob.run(CHECK % 9)
    assert "Failed with result 'watchdog'" in machine.log()
    assert main_pid(machine) not in (0, fourth)

    # This stops the service, but not its socket. So the next connection starts the service again.
    machine.run("systemctl", "stop", "gpupool.service")
    ada.run(CHECK % 7)
    assert machine.show("ActiveState") == "active"

    # A second ``install-service`` is an upgrade. It keeps the configuration and the drop-in file.
    fifth = main_pid(machine)
    shown = install(machine)
    assert "Run systemctl restart gpupool.service" in shown, shown
    assert main_pid(machine) != fifth
    bob.run(CHECK % 9)
    assert {s["owner"] for s in machine.sessions()} == {"ada", "bob"}

    for cells in (ada, bob):
        cells.close()
    wait_until(lambda: not machine.sessions(), "the end of both sessions")
    drop_in.unlink()
    drop_in.parent.rmdir()
    install(machine, "--undo")
    assert machine.run("ls", "/etc/systemd/system", "/etc/tmpfiles.d") == before
    assert machine.call("systemctl", "cat", "gpupool.service").returncode != 0
    assert not (machine.root / "run/gpupool/broker.sock").exists()
