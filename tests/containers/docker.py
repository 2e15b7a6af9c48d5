# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A Docker daemon only for the tests, and a JupyterHub whose DockerSpawner uses it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

from tests.broker import kit
from tests.broker.kit import wait_until
from tests.hub.kit import EXAMPLES, Hub

from .podman import LIMITS, PODMAN

#: The image of the users' servers.
IMAGE = "localhost/gpupool-test:trixie"


def refusal():
    """Return what this machine lacks, or ""."""
    return "" if shutil.which("dockerd") else "run make test-containers, which installs Docker"


class Docker:
    """A daemon with its own socket, files and network. It changes no firewall rule."""

    def __init__(self):
        self.folder = kit.short_folder()
        self.host = f"unix://{self.folder}/docker.sock"
        self.log = self.folder / "docker.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    # If the tests end or are killed, Linux ends the daemon, too.
                    *("setpriv", "--pdeathsig", "TERM"),
                    "dockerd", "--host", self.host, "--iptables=false", "--ip6tables=false",
                    "--bridge=none", f"--data-root={self.folder}/data",
                    f"--exec-root={self.folder}/exec", f"--pidfile={self.folder}/pid",
                    *(word.replace("--ulimit", "--default-ulimit") for word in LIMITS),
                ],
                stdout=log, stderr=log,
            )  # fmt: skip
        wait_until(self._answers, "Docker's daemon", 60)
        saved = subprocess.Popen(
            [*PODMAN, "save", "--quiet", "--format=docker-archive", IMAGE], stdout=subprocess.PIPE
        )
        with saved.stdout:
            self.run("load", stdin=saved.stdout)
        assert saved.wait(60) == 0
        self.run("network", "create", "hub")
        (found,) = json.loads(self.run("network", "inspect", "hub"))
        #: The address of this machine in the network of the containers.
        self.address = found["IPAM"]["Config"][0]["Gateway"]

    def _answers(self):
        assert self.process.poll() is None, self.log.read_text()[-4000:]
        return self._call("version").returncode == 0

    def _call(self, *words, **options):
        return subprocess.run(
            ["docker", *words], capture_output=True, text=True, timeout=300, check=False,
            env={**os.environ, "DOCKER_HOST": self.host}, **options,
        )  # fmt: skip

    def run(self, *words, **options):
        """Run a Docker command; return its output, and fail if the command fails."""
        done = self._call(*words, **options)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout.strip()

    def close(self):
        if self.process.poll() is None:
            if names := self._call("ps", "--all", "--quiet").stdout.split():
                self._call("rm", "--force", *names)
            self._call("network", "rm", "hub")
            self.process.terminate()
        self.process.wait(60)
        kit.remove(self.folder)


class DockerHub(Hub):
    """JupyterHub with the example files for one machine and for DockerSpawner."""

    def __init__(self, machine, docker, **options):
        super().__init__(machine.folder, machine.socket, **options)
        place = machine.place
        text = (EXAMPLES / "containers" / "jupyterhub_config.py").read_text()
        assert "/run/gpupool/users/{raw_username}" in text
        (self.folder / "docker.py").write_text(text.replace("/run/gpupool", str(place)))
        # Mount the emulated GPUs, as a container runtime would add real GPUs to the container.
        emulated = f"{place}/broker.sock.emulated"
        url = f":{self.ports['hub']}"
        with (self.folder / "hub.py").open("a") as file:
            file.write(f"""
load_subconfig({str(self.folder / "docker.py")!r})
c.JupyterHub.hub_bind_url = "http://0.0.0.0{url}"
c.JupyterHub.hub_connect_url = "http://{docker.address}{url}"
c.DockerSpawner.cmd = ["python3", "-m", "jupyterhub.singleuser"]
c.DockerSpawner.extra_create_kwargs = {{"user": "1000"}}
c.DockerSpawner.extra_host_config = {{}}
c.DockerSpawner.volumes[{emulated!r}] = {emulated!r}
c.DockerSpawner.environment |= {{
    "GPUPOOL_SOCKET": "{machine.socket}", "HOME": "/tmp",
    "JUPYTERHUB_SINGLEUSER_APP": "jupyter_server.serverapp.ServerApp",
}}
""")
        self.variables = {
            "DOCKER_HOST": docker.host, "HUB_HOST": docker.address, "SERVER_IMAGE": IMAGE,
        }  # fmt: skip

    def _end_servers(self):
        return []  # the daemon ends the servers
