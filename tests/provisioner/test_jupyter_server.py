# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A real Jupyter Server with our provisioner: kernels start, restart, crash, end,
and are interrupted or culled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import psutil
import pytest
import requests
import websocket
from scripted_broker import ScriptedBroker

from jupyter_gpupool.errors import RefusedError
from tests.broker import forks
from tests.ports import free_port
from tests.server.kit import execute_request


class Server:
    """A ServerApp in a separate process, to which tests talk as JupyterLab does."""

    def __init__(self, folder: Path, port: int, *options: str, **env: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        command = [
            *(sys.executable, "-m", "jupyter_server", "--allow-root", "--no-browser"),
            *(f"--ServerApp.port={port}", "--ServerApp.port_retries=0"),
            *("--IdentityProvider.token=t", f"--ServerApp.root_dir={folder}"),
            # With TCP, another process could bind a kernel's port before the kernel does.
            "--KernelManager.transport=ipc",
            # Without this option, jupyter_lsp starts Node, npm and R.
            "--LanguageServerManager.autodetect=False",
            *options,
        ]
        with open(self.log, "wb") as log:
            self.process = forks.jupyter_server(
                command, env={**os.environ, **env}, log=log, folder=str(Path.cwd())
            )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.get("/api/status")
                return
            except requests.ConnectionError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def request(self, method: str, path: str, /, **json_: Any) -> requests.Response:
        headers = {"Authorization": "token t"}
        return requests.request(
            method, self.url + path, headers=headers, json=json_ or None, timeout=60
        )

    def get(self, path: str) -> Any:
        return self.request("GET", path).json()

    def open(self, name: str = "gpupool-python3", path: str = "train.ipynb") -> Any:
        return self.request(
            "POST",
            "/api/sessions",
            kernel={"name": name},
            name=path,
            path=path,
            type="notebook",
        )

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


class Channel:
    """The websocket of one kernel."""

    def __init__(self, server: Server, kernel: str) -> None:
        url = server.url.replace("http", "ws") + f"/api/kernels/{kernel}/channels?token=t"
        self.socket = websocket.create_connection(url, timeout=60)

    def execute(self, code: str) -> str:
        name, text = execute_request(code)
        self.socket.send(text)
        return str(name)

    def until(self, wanted: Callable[[Any], bool]) -> Any:
        while True:
            message = json.loads(self.socket.recv())
            if wanted(message):
                return message

    def reply(self, msg_id: str) -> Any:
        return self.until(
            lambda m: (
                m["msg_type"] == "execute_reply" and m["parent_header"].get("msg_id") == msg_id
            )
        )["content"]

    def close(self) -> None:
        self.socket.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*options: str, **env: str) -> Server:
        servers.append(Server(tmp_path, free_port(), *options, **env))
        return servers[-1]

    yield start
    for found in servers:
        if found.process.poll() is None:
            found.end()


def test_rest_calls_control_a_kernel(broker: ScriptedBroker, server: Callable[..., Server]) -> None:
    jupyter = server()
    session = jupyter.open().json()
    kernel = session["kernel"]["id"]
    opened = broker.wait_for("open")
    assert opened["label"] == "train.ipynb"
    assert opened["kernel_id"] == kernel
    broker.wait_for("hello")
    channel = Channel(jupyter, kernel)
    assert channel.reply(channel.execute("1 + 1"))["status"] == "ok"
    broker.wait_for("drop")
    broker.ask_back()

    # Interrupt the kernel while a cell waits for its slice.
    broker.hold_back()
    waiting = channel.execute("ran = True")
    broker.wait_for("hold", count=2)
    broker.push("queue", position=1, length=1, waited=0.0, left=None, reason="")
    channel.until(lambda m: m["msg_type"] == "display_data")
    state = jupyter.get(f"/api/kernels/{kernel}")["execution_state"]
    assert state == "busy"  # so that the server does not cull the kernel
    assert jupyter.request("POST", f"/api/kernels/{kernel}/interrupt").status_code == 204
    assert channel.reply(waiting)["ename"] == "GPUWaitInterrupted"
    broker.wait_for("cancel")

    # Restart the kernel while a cell waits.
    waiting = channel.execute("ran = True")
    broker.wait_for("hold", count=3)
    assert jupyter.request("POST", f"/api/kernels/{kernel}/restart").status_code == 200
    broker.wait_for("open", count=2)
    broker.wait_for("hello", count=2)
    assert [m["session"] for m in broker.seen("close")] == ["s1"]
    assert list(broker.sessions) == ["s2"]
    channel.close()

    # Shut the kernel down.
    assert jupyter.request("DELETE", f"/api/kernels/{kernel}").status_code == 204
    broker.wait_for("close", session="s2")
    assert broker.sessions == {}


def test_a_crashed_kernel_gets_a_new_session(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server(
        "--KernelRestarter.time_to_dead=0.2", "--AsyncIOLoopKernelRestarter.time_to_dead=0.2"
    )
    kernel = jupyter.open().json()["kernel"]["id"]
    pid = broker.wait_for("launched")["pid"]
    broker.wait_for("hello")
    os.kill(pid, signal.SIGKILL)
    broker.wait_for("open", count=2)
    again = broker.wait_for("launched", count=2)["pid"]
    assert again != pid
    broker.wait_for("close", session="s1")
    broker.wait_for("hello", count=2)
    channel = Channel(jupyter, kernel)
    assert channel.reply(channel.execute("1 + 1"))["status"] == "ok"
    channel.close()


def test_a_culled_kernel_ends_its_session(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server(
        "--MappingKernelManager.cull_idle_timeout=1",
        "--MappingKernelManager.cull_interval=1",
        "--MappingKernelManager.cull_connected=True",
    )
    jupyter.open()
    # Do not wait for "hello": on a busy machine, the server culls the kernel before its agent sends
    # that message.
    broker.wait_for("launched")
    broker.wait_for("close")
    assert broker.sessions == {}


def test_sessions_end_with_their_server(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server()
    jupyter.open()
    broker.wait_for("hello")
    jupyter.end()
    broker.wait_for("close")
    assert broker.sessions == {}


def test_kernels_end_when_their_server_is_killed(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server()
    jupyter.open()
    kernel = psutil.Process(broker.wait_for("launched")["pid"])
    broker.wait_for("hello")
    jupyter.process.kill()
    jupyter.process.wait()
    kernel.wait(30)


def test_pool_can_be_the_default_provisioner(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server(JUPYTER_DEFAULT_PROVISIONER_NAME="gpupool-provisioner")
    session = jupyter.open("python3").json()
    broker.wait_for("hello")
    channel = Channel(jupyter, session["kernel"]["id"])
    assert channel.reply(channel.execute("1 + 1"))["status"] == "ok"
    channel.close()
    broker.wait_for("hold")


def test_the_servers_configuration_reaches_the_kernel(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    jupyter = server("--GPUPoolProvisioner.memory=2GiB", "--GPUPoolProvisioner.priority=batch")
    jupyter.open()
    request = broker.wait_for("open")["request"]
    assert request == {"memory": 2 << 30, "priority": "batch"}


def test_user_reads_the_refusal_of_the_broker(
    broker: ScriptedBroker, server: Callable[..., Server]
) -> None:
    def refuse(message: Any) -> None:
        raise RefusedError(
            "You have 3 kernels with a GPU and may have 3.", next_step="Shut one down."
        )

    broker.scripts["open"] = refuse
    jupyter = server()
    answer = jupyter.open()
    assert answer.status_code == 500  # the server's sessions API turns every error into a 500
    assert answer.json()["message"] == (
        "You have 3 kernels with a GPU and may have 3. Shut one down."
    )


def test_a_slow_broker_does_not_stop_the_server(
    broker: ScriptedBroker, server: Callable[..., Server], in_background: Any
) -> None:
    jupyter = server()
    broker.hold_back("ping")  # The provisioner waits for the broker's first answer
    in_background(lambda: jupyter.open())
    broker.wait_for("ping")
    assert jupyter.get("/api/kernels") is not None  # meanwhile, the broker does not answer
    del broker.scripts["ping"]
    broker.die()
    broker.start()
