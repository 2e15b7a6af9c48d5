# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A real Jupyter Server, as installed, and a real broker on emulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import requests
import websocket

from tests.broker import forks
from tests.broker.kit import environment, wait_until
from tests.users import as_user

TOKEN = "t"

KERNEL = "gpupool-python3"

#: Code that puts data on the device, so that a suspend has state to move.
USE_GPU = """
from cuda.core import Device
device = Device(); device.set_current(); stream = device.create_stream()
buffer = device.allocate(64 << 20, stream=stream); buffer.fill(7, stream=stream); stream.sync()
"""


def server_environment(folder, socket, home=None):
    env = environment(folder)
    # The server must read the installed configuration, which enables the extension.
    del env["JUPYTER_NO_CONFIG"], env["JUPYTER_PREFER_ENV_PATH"]
    home = str(home or folder)
    return {
        **env,
        "GPUPOOL_SOCKET": str(socket),
        "HOME": home,
        "IPYTHONDIR": f"{home}/ipython",
        "JUPYTER_RUNTIME_DIR": f"{home}/runtime",
        "JUPYTER_DATA_DIR": f"{home}/data",
        "JUPYTER_CONFIG_DIR": f"{home}/no-config",
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }


class Server:
    """A ServerApp in a separate process; ``user`` is the user id that it runs as."""

    def __init__(self, folder, socket, *options, user=None, home=None):
        self.folder = Path(home or folder)
        self.log = self.folder / "server.log"
        self.process = None
        self._sockets = []
        info = self.folder / "runtime"
        info.mkdir(exist_ok=True)
        if user is not None:
            os.chown(self.folder, user, user)
            os.chown(info, user, user)
        command = [
            *(sys.executable, "-m", "jupyter_server", "--no-browser", "--ServerApp.port=0"),
            *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={self.folder}"),
            *("--ServerApp.allow_unauthenticated_access=False", "--ServerApp.ip=127.0.0.1"),
            *([] if os.geteuid() or user is not None else ["--allow-root"]),
            # Use Unix sockets. The server would choose a TCP port before the kernel binds the port.
            # If another process bound it first, the server would get no answer from the kernel, and
            # would reset its clients after a minute.
            "--KernelManager.transport=ipc",
            # Without this option, jupyter_lsp would start Node, npm and R to find language servers.
            "--LanguageServerManager.autodetect=False",
            *options,
        ]
        if user is not None:
            command = [*as_user(user), *command]
        with open(self.log, "wb") as log:
            env = server_environment(self.folder, socket, home)
            self.process = forks.jupyter_server(command, env=env, log=log)

        def ready():
            assert self.process.poll() is None, self.log.read_text()
            found = [*info.glob(f"jpserver-{self.process.pid}.json")]
            with suppress(ValueError):
                return json.loads(found[0].read_text()) if found else None

        try:
            self.url = wait_until(ready, "the server's own file", 240)["url"].rstrip("/")
            wait_until(self._answers, "the server to answer", 60)
        except BaseException:
            self.end()
            raise

    def _answers(self):
        with suppress(requests.ConnectionError):
            return self.request("GET", "/api/status").ok

    def request(self, method, path, json=None, token=TOKEN, **more):
        headers = {"Authorization": f"token {token}"} if token else {}
        return requests.request(
            method, self.url + path, headers=headers, json=json, timeout=60, **more
        )

    def api(self, path, method="GET", status=200, **body):
        """Call a route of the extension; fail if the status of its answer is not ``status``."""
        answer = self.request(method, f"/gpupool/api{path}", json=body or None)
        assert answer.status_code == status, (answer.status_code, answer.text, self.tail())
        return answer.json()

    def start_kernel(self, name=KERNEL):
        answer = self.request("POST", "/api/kernels", json={"name": name})
        assert answer.status_code == 201, (answer.text, self.tail())
        return answer.json()["id"]

    def stop_kernel(self, kernel):
        assert self.request("DELETE", f"/api/kernels/{kernel}").status_code == 204

    def metrics(self):
        """Return our samples of /metrics, as a dict: name and labels of the sample -> value."""
        text = self.request("GET", "/metrics").text
        lines = [x for x in text.splitlines() if x.startswith("jupyter_gpupool_")]
        return {x.rsplit(" ", 1)[0]: float(x.rsplit(" ", 1)[1]) for x in lines}

    def socket(self, path, token=TOKEN):
        url = f"{self.url.replace('http', 'ws', 1)}{path}?token={token}"
        self._sockets.append(websocket.create_connection(url, timeout=60))
        return self._sockets[-1]

    def events(self):
        return Events(self.socket("/gpupool/api/events"))

    def cells(self, kernel):
        return Cells(self.socket(f"/api/kernels/{kernel}/channels"))

    def tail(self, size=6000):
        return self.log.read_text()[-size:]

    def end(self):
        for socket in self._sockets:
            socket.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
                raise


class Events:
    """The websocket of the extension."""

    def __init__(self, socket):
        self.socket = socket
        self.seen = []

    def until(self, condition, seconds=60):
        """Return the next message that meets ``condition``."""
        deadline = time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, self.seen[-20:]
            message = json.loads(self.socket.recv())
            self.seen.append(message)
            if condition(message):
                return message

    def kind(self, kind, **data):
        """Return the next message of this kind whose ``data`` has these values."""
        return self.until(lambda m: m["type"] == kind and data.items() <= m.get("data", m).items())

    def close(self):
        self.socket.close()


def execute_request(code):
    """Return the id of a request to run a cell, and the request as a websocket's text.

    ipykernel does not abort the next request if this one fails.
    """
    name = os.urandom(8).hex()
    header = {
        "msg_id": name,
        "msg_type": "execute_request",
        "username": "u",
        "session": "s",
        "version": "5.3",
        "date": "2026-01-01T00:00:00Z",
    }
    content = {
        "code": code,
        "silent": False,
        "store_history": True,
        "allow_stdin": False,
        "stop_on_error": False,
    }
    message = {
        "header": header,
        "parent_header": {},
        "metadata": {},
        "content": content,
        "channel": "shell",
        "buffers": [],
    }
    return name, json.dumps(message)


class Cells:
    """The channels of one kernel."""

    def __init__(self, socket):
        self.socket = socket

    def begin(self, code):
        name, text = execute_request(code)
        self.socket.send(text)
        return name

    def end(self, name):
        while True:
            message = json.loads(self.socket.recv())
            if (
                message["msg_type"] == "execute_reply"
                and message["parent_header"].get("msg_id") == name
            ):
                return message["content"]

    def run(self, code):
        reply = self.end(self.begin(code))
        assert reply["status"] == "ok", reply
        return reply

    def close(self):
        self.socket.close()
