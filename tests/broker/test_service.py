# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The machine's broker under a service manager, and users' own brokers on this machine."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from jupyter_gpupool.broker import supervisor as supervisor_module
from jupyter_gpupool.broker.supervisor import VARIABLES, Supervisor
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import RefusedError

from . import kit
from .kit import Kernel

#: The watchdog ends the broker after this many seconds without a message from the broker.
WATCHDOG = 3


class Managed(kit.Broker):
    """A broker under a service manager. The test acts as systemd: socket activation and notify."""

    def __init__(self, folder, **config):
        super().__init__(folder, **config)
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(self.socket))
        self.listening.listen(64)
        self.notified = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.notified.bind(str(folder / "notify"))
        self.notified.settimeout(60)

    def start(self):
        environment = {
            **kit.environment(self.folder), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "gpupool.socket",
            "NOTIFY_SOCKET": str(self.folder / "notify"), "WATCHDOG_USEC": str(WATCHDOG * 1000000),
        }  # fmt: skip
        # systemd sets LISTEN_PID between fork and exec. Here, a shell does that.
        become = f'exec 3<&{self.listening.fileno()}; export LISTEN_PID=$$; exec "$@"'
        command = [
            *("bash", "-c", become, "bash", sys.executable, "-m", "jupyter_gpupool.broker"),
            *("--socket", str(self.socket), "--config", str(self.config_file)),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=kit.ROOT,
                pass_fds=(self.listening.fileno(),), env=environment,
            )  # fmt: skip

    def hear(self, word):
        """Wait until the broker sends ``word``."""
        while True:
            if word in self.notified.recv(4096).decode().split("\n"):
                return

    def close(self):
        super().close()
        self.listening.close()
        self.notified.close()


@pytest.fixture
def parts():
    return Managed, Kernel, {"emulate": kit.ONE}


def test_clients_wait_during_a_restart_under_a_service_manager(make_broker):
    broker = make_broker()
    broker.start()
    broker.hear("READY=1")
    broker.hear("WATCHDOG=1")
    one = Kernel(broker, "one")
    try:
        one.attach()
        before, broken = broker.status()["pid"], broker.socket.stat().st_ino
        broker.kill()
        answers = []
        client = threading.Thread(target=lambda: answers.append(broker.status()["pid"]))
        client.start()  # no broker runs: only the manager's socket listens
        broker.start()
        client.join(60)
        assert answers == [broker.process.pid] != [before], broker.tail()
        broker.hear("READY=1")
        one.wait_state("active", "idle")
        assert broker.stop(signal.SIGTERM) == 0
        broker.hear("STOPPING=1")
        assert broker.socket.stat().st_ino == broken  # systemd still listens there
    finally:
        one.close()


def test_children_do_not_inherit_the_managers_variables():
    here = {
        **dict.fromkeys(VARIABLES, "1"), "LISTEN_PID": "1", "WATCHDOG_PID": "1", "HOME": "/"
    }  # fmt: skip
    supervisor = Supervisor(here)
    assert here == {"HOME": "/"}
    # ``LISTEN_PID`` names another process, so the supervisor must not use the socket.
    assert supervisor.listening(kit.ROOT / "x") is None


def test_message_to_a_missing_address_does_no_harm():
    name = f"gpupool-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.bind(f"\0{name}")
        Supervisor({"NOTIFY_SOCKET": f"@{name}"}).ready("here")
        assert to.recv(100) == b"READY=1\nSTATUS=here"
    Supervisor({"NOTIFY_SOCKET": f"@{name}"}).ready("gone")


def test_lost_ready_message_is_repeated_and_pings_continue(folder, monkeypatch):
    monkeypatch.setattr(supervisor_module, "AGAIN", 0.01)
    real, failures = socket.socket, [OSError(errno.EMFILE, "too many files")] * 3
    to = real(socket.AF_UNIX, socket.SOCK_DGRAM)
    to.bind(str(folder / "notify"))
    to.setblocking(False)

    def make(*given, **named):
        if failures:
            raise failures.pop()
        return real(*given, **named)

    async def listen():
        monkeypatch.setattr(supervisor_module.socket, "socket", make)
        variables = {"NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "30000"}
        supervisor = Supervisor(variables)
        supervisor.ready("here")  # this message fails; so do two later ones of keep_alive
        alive = asyncio.ensure_future(supervisor.keep_alive())
        heard, loop = [], asyncio.get_running_loop()
        while heard[-1:] != ["WATCHDOG=1"] or "READY=1\nSTATUS=here" not in heard:
            heard.append((await asyncio.wait_for(loop.sock_recv(to, 100), 60)).decode())
        alive.cancel()
        return heard

    with to:
        assert asyncio.run(listen()).count("READY=1\nSTATUS=here") == 1


class Own(kit.Broker):
    """A user's own broker at one of the usual places."""

    module = "tests.broker.served_broker"

    def __init__(self, folder, **config):
        super().__init__(folder, **config)
        self.socket = self.folder / "gpupool" / "broker.sock"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's socket is the machine's service")
def test_users_own_broker_refuses_new_kernels_beside_a_service(folder):
    broker = Own(folder, emulate=kit.ONE).started
    one = None
    try:
        one = Kernel(broker, "one")
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(folder / "service.sock"))
            with Client(broker.socket) as client, pytest.raises(RefusedError) as refused:
                client.call("open", kernel_id="two", label="two", request={})
            assert refused.value.code == "stands-aside"
            one.attach()
            assert one.served
            one.close()
            # The broker would stay for an hour (``linger``) if there were no service.
            assert broker.process.wait(60) == 0, broker.tail()
            broker.process = None
    finally:
        if one is not None:
            one.close()
        broker.close()
