# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A real JupyterHub with its proxy, real accounts, and a broker with the service's rights.

These tests have two forms. The long form, ``make test-hub``, has its own environment and makes its
own accounts. The short form uses the environment and the account of all other tests.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import requests
import websocket

from jupyter_gpupool.cli.service_files import CAPABILITIES
from tests.broker import kit
from tests.broker.kit import wait_until
from tests.ports import free_ports
from tests.server.kit import Cells

#: ``make test-hub`` makes this environment.
HUB = kit.ROOT / ".venv-hub"
EXAMPLES = kit.ROOT / "examples"
TOKEN, OURS = "token-of-the-test", "token-of-the-broker"


class Installed(NamedTuple):
    """An environment with JupyterHub: the folder of its programs, and its proxy."""

    bin: Path
    proxy: Path


#: The environment of the long form. Every account can read its files. Its proxy is a Node.js
#: program, as on real sites.
OWN = Installed(HUB / "bin", HUB / "chp" / "node_modules" / ".bin" / "configurable-http-proxy")

#: The environment of the short form. Its proxy is a PyPI package, so this form needs no other
#: package registry.
TESTS = Installed(
    Path(sys.executable).parent, Path(sys.executable).with_name("configurable-http-proxy")
)


class Account:
    """An account on this machine that exists during a test."""

    def __init__(self, name):
        self.name = name
        subprocess.run(["useradd", "--create-home", name], check=True, timeout=60)

    def close(self):
        """End all processes of this user, such as servers of a killed Hub, and
        remove the account.
        """
        uid = pwd.getpwnam(self.name).pw_uid

        def running():
            found = []
            for folder in Path("/proc").glob("[0-9]*"):
                with suppress(OSError):
                    if folder.stat().st_uid == uid:
                        os.kill(int(folder.name), signal.SIGKILL)
                        found.append(folder.name)
            return found

        wait_until(lambda: not running(), f"the end of the processes of {self.name}")
        subprocess.run(
            ["userdel", "--remove", self.name], check=True, timeout=60, stderr=subprocess.DEVNULL
        )


class MachineBroker(kit.Broker):
    """The machine's broker. It runs as root, with only the capabilities of the service's unit."""

    def start(self):
        names = ",".join("+" + name.removeprefix("CAP_").lower() for name in CAPABILITIES)
        reading, writing = os.pipe()
        command = [
            *("setpriv", f"--bounding-set=-all,{names}", "--no-new-privs"),
            *(sys.executable, "-m", "jupyter_gpupool.broker", "--socket", str(self.socket)),
            *("--config", str(self.folder / "pool.py"), "--config", str(self.config_file)),
            *("--ready-fd", str(writing)),
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(writing,),
                env=kit.environment(self.folder), cwd=kit.ROOT,
            )  # fmt: skip
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            assert select.select([pipe], [], [], 120)[0], self.tail()
            assert json.loads(pipe.readline() or b"{}").get("ok"), self.tail()


class Hub:
    """JupyterHub with the configuration of the example and changes for the test.

    ``course`` lists the users who have the example's role. ``environment`` and ``arguments`` are
    additional environment variables and arguments of the users' servers.
    """

    def __init__(self, folder, pool_socket, *, course, installed=OWN, environment=(), arguments=()):
        self.folder = Path(folder)
        self.installed = installed
        self.log = self.folder / "hub.log"
        self.process = None
        #: More environment variables for the Hub.
        self.variables = {}
        self._cells = []
        self.ports = dict(zip(("public", "api", "hub"), free_ports(3), strict=True))
        token = self.folder / "hub-token"
        token.write_text(OURS)
        for name in ("jupyterhub/jupyterhub_config.py", "hub_groups.py"):
            text = (EXAMPLES / name).read_text()
            assert "/etc/gpupool/hub-token" in text
            text = text.replace("/etc/gpupool/hub-token", str(token))
            text = text.replace("http://127.0.0.1:8081", f"http://127.0.0.1:{self.ports['hub']}")
            target = "pool.py" if name == "hub_groups.py" else "example.py"
            (self.folder / target).write_text(text)
        environment = {
            "GPUPOOL_SOCKET": str(pool_socket),
            "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
            **dict(environment),
        }  # fmt: skip
        scopes = ["admin:users", "admin:servers", "access:servers", "admin:groups"]
        (self.folder / "hub.py").write_text(f"""
c = get_config()
c.JupyterHub.load_roles, c.JupyterHub.load_groups = [], {{}}
load_subconfig({str(self.folder / "example.py")!r})
next(r for r in c.JupyterHub.load_roles if r["name"] == "gpu-course")["users"] = {course!r}
c.JupyterHub.load_groups["research"]["users"] = []
c.JupyterHub.bind_url = "http://127.0.0.1:{self.ports["public"]}"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{self.ports["hub"]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{self.ports["api"]}"
c.ConfigurableHTTPProxy.command = [{str(installed.proxy)!r}]
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allow_all = True
c.DummyAuthenticator.password = "unused by the test"
c.JupyterHub.services.append({{"name": "test", "api_token": {TOKEN!r}}})
c.JupyterHub.load_roles.append(
    {{"name": "test", "scopes": {scopes!r}, "services": ["test"]}}
)
c.Spawner.environment = {environment!r}
c.Spawner.cmd = [{str(installed.bin / "jupyterhub-singleuser")!r}]
c.Spawner.args = {[*arguments]!r}
c.Spawner.start_timeout = c.Spawner.http_timeout = 240
c.Spawner.default_url = "/tree"
""")

    def start(self):
        path = f"{self.installed.bin}:{os.environ['PATH']}"
        environment = {**kit.environment(self.folder), "PATH": path, **self.variables}
        # Without these two variables, the Hub finds the installed kernels and extensions, as on a
        # real site.
        for name in ("JUPYTER_NO_CONFIG", "JUPYTER_PREFER_ENV_PATH"):
            environment.pop(name)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [str(self.installed.bin / "jupyterhub"), "-f", str(self.folder / "hub.py")],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                env=environment, start_new_session=True,
            )  # fmt: skip
        wait_until(self._answers, "the Hub to answer", 240)

    def _answers(self):
        assert self.process.poll() is None, self.tail()
        try:
            return self.call("GET", "/", bare=True).ok
        except requests.ConnectionError:
            return False

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)
        self.process = None

    def close(self):
        """End the Hub, and then its proxy and its servers, which outlive the Hub."""
        for cells in self._cells:
            cells.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            proxy = self.folder / "jupyterhub-proxy.pid"
            if proxy.exists():  # the proxy has its own session
                with suppress(ProcessLookupError):
                    os.kill(int(proxy.read_text()), signal.SIGKILL)
        wait_until(lambda: not self._end_servers(), "the end of the Hub's servers and kernels")

    def _end_servers(self):
        """Kill the servers and kernels that still run; return the ids of the killed processes."""
        mark = f"JUPYTERHUB_API_URL=http://127.0.0.1:{self.ports['hub']}/".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
                    found.append(folder.name)
        return found

    def call(self, method, path, body=None, *, bare=False):
        """Call the Hub's REST API; fail if it reports an error."""
        answer = requests.request(
            method, f"http://127.0.0.1:{self.ports['public']}/hub/api{path}", json=body,
            headers={"Authorization": f"token {TOKEN}"}, timeout=240,
        )  # fmt: skip
        assert bare or answer.ok, (answer.status_code, answer.text, self.tail())
        return answer

    def spawn(self, user, server=""):
        """Start a server of a user; return its path behind the proxy."""
        known = self.call("GET", f"/users/{user}", bare=True)
        if known.status_code == 404:
            self.call("POST", f"/users/{user}")
        where = f"/users/{user}/servers/{server}" if server else f"/users/{user}/server"
        self.call("POST", where)

        def ready():
            servers = self.call("GET", f"/users/{user}").json()["servers"]
            return servers.get(server, {}).get("ready")

        wait_until(ready, f"the server of {user}: {self.tail()}", 300)
        return f"/user/{user}/{server}/" if server else f"/user/{user}/"

    def kernel(self, path, running=""):
        """Return an object that runs cells in a pooled kernel of a server.

        ``running`` is the id of a kernel that already runs. Without an id, start a new kernel.
        """
        base, headers = f"127.0.0.1:{self.ports['public']}{path}api/kernels", {
            "Authorization": f"token {TOKEN}"
        }  # fmt: skip
        if not running:
            answer = requests.post(
                f"http://{base}", json={"name": "gpupool-python3"}, headers=headers, timeout=240
            )
            assert answer.status_code == 201, (answer.text, self.tail())
            running = answer.json()["id"]
        channels = f"ws://{base}/{running}/channels"

        def connected():
            # The proxy waits 20 s for the server, and the server waits until the kernel answers.
            # On a busy machine, the kernel may start more slowly.
            with suppress(websocket.WebSocketBadStatusException):
                return websocket.create_connection(channels, header=headers, timeout=240)

        cells = Cells(wait_until(connected, f"a websocket to the kernel: {self.tail()}", 240))
        self._cells.append(cells)
        return cells

    def tail(self, size=6000):
        return self.log.read_text()[-size:] if self.log.exists() else ""
