# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A machine with a running systemd, and JupyterHub on it.

The machine is a Podman container that sees the files of the host. What the container writes stays
in memory, and is lost when the container ends. The container uses the network and the processors
of the host.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import requests

from jupyter_gpupool.endpoint import MACHINE_SOCKET
from tests.broker import kit
from tests.broker.kit import wait_until
from tests.containers.podman import LIMITS, PODMAN, left, new_name, remove, sweep
from tests.hub.kit import HUB, Hub

SYSTEMD = Path("/lib/systemd/systemd")

#: An interpreter that every account may run.
PYTHON = HUB / "bin" / "python"

#: The files in this folder are in memory.
SHM = Path("/dev/shm")

#: The program that runs a user's cells.
CELLS = Path(__file__).with_name("cells.py")

#: Services of systemd that the container must not run.
MASKED = ("udevd", "udev-trigger", "sysctl", "modules-load", "binfmt", "timesyncd")


def refusal():
    """Return what this machine lacks for the tests, or ""."""
    if not SYSTEMD.exists():
        return "systemd is not installed"
    if not (shutil.which("podman") and (HUB / ".ready").exists()):
        return "run make test-service, which installs what is needed"
    return ""


class Systemd:
    """A container that acts as a machine with systemd. Call :meth:`start` first."""

    def __init__(self):
        self.name = new_name()
        self.folder = SHM / self.name
        self.root = self.folder / "root"
        #: A folder of the host. The container sees it under the same path.
        self.shared = kit.short_folder()
        self._cells = []

    def start(self):
        sweep()
        for name in left(path.name for path in SHM.iterdir()):
            _forget(SHM / name)
        above, work, temporary = (self.folder / name for name in ("above", "work", "tmp"))
        for path in (self.root, above, work, temporary):
            path.mkdir(parents=True)
        temporary.chmod(0o1777)
        layers = f"lowerdir=/,upperdir={above},workdir={work}"
        subprocess.run(
            ["mount", "-t", "overlay", "overlay", "-o", layers, self.root], check=True, timeout=60
        )
        for path in (self.root / "run").iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        # Remove the host's own services. Mask the services of systemd that would change the host's
        # devices and its Linux kernel.
        units = self.root / "etc/systemd/system"
        for path in units.glob("*.wants"):
            shutil.rmtree(path)
        for name in MASKED:
            (units / f"systemd-{name}.service").symlink_to("/dev/null")
        subprocess.run(
            [
                *PODMAN, "run", "--detach", "--name", self.name, *LIMITS, "--privileged",
                "--systemd=always", "--network=host", f"--volume={temporary}:/tmp",
                f"--volume={self.shared}:{self.shared}",
                "--rootfs", self.root, SYSTEMD,
            ],
            check=True, timeout=120, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(
            lambda: self.call("systemctl", "is-system-running").stdout.strip()
            in ("running", "degraded"),
            "systemd to have started", 120,
        )  # fmt: skip

    def command(self, *words, user="root"):
        """Return a command for the host that runs ``words`` as ``user`` in the container."""
        become = (
            [] if user == "root" else ["runuser", "-u", user, "--", "env", f"HOME=/home/{user}"]
        )
        return [*PODMAN, "exec", "--interactive", "--workdir=/", self.name, *become, *words]

    def call(self, *words, user="root", timeout=300):
        return subprocess.run(
            self.command(*map(str, words), user=user), capture_output=True, text=True,
            timeout=timeout, check=False,
        )  # fmt: skip

    def run(self, *words, user="root", timeout=300):
        """Run a command in the container until it ends; return its output, and
        fail if the command fails.
        """
        done = self.call(*words, user=user, timeout=timeout)
        assert done.returncode == 0, (words, done.stdout, done.stderr, self.tail())
        return done.stdout.strip()

    def gpupool(self, *words, user="root"):
        return self.run(PYTHON, "-m", "jupyter_gpupool.cli", *words, user=user)

    def show(self, name, unit="gpupool.service"):
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", f"--property={name}", unit)

    def sessions(self):
        return json.loads(self.gpupool("status", "--json"))["sessions"]

    def cells(self, user):
        process = subprocess.Popen(
            self.command(str(PYTHON), str(CELLS), user=user),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=sys.stderr, text=True,
        )  # fmt: skip
        cells = UserCells(process, self.tail)
        self._cells.append(cells)
        return cells

    def log(self):
        """Return systemd's log of the tests' units. It has the units' own output, too."""
        return self.call(
            "journalctl", "--no-pager", "--output=short-monotonic", "--unit=gpupool*",
            "--unit=jupyter*",
        ).stdout  # fmt: skip

    def tail(self, size=6000):
        return self.log()[-size:]

    def close(self):
        for cells in self._cells:
            cells.close()
        remove(self.name)
        _forget(self.folder)
        kit.remove(self.shared)


def _forget(folder):
    """Remove the files that a machine has written."""
    subprocess.run(
        ["umount", "--lazy", folder / "root"], check=False, timeout=60, stderr=subprocess.DEVNULL
    )
    kit.remove(folder)


class UserCells:
    """Runs cells in a Pooled GPU kernel of a user.

    ``process`` runs the program ``cells.py`` as this user. If the program ends too early, ``tail``
    returns the log for the error message.
    """

    def __init__(self, process, tail):
        self._process = process
        self._tail = tail

    def run(self, code):
        """Run a cell; return its output, and fail if the cell fails."""
        self.send(code)
        return self.answer()

    def send(self, code):
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()

    def answer(self):
        line = self._process.stdout.readline()
        assert line, ("the program has ended", self._tail())
        done, text = json.loads(line)
        assert done, (text, self._tail())
        return text

    def close(self):
        """End the kernel; a second call does nothing."""
        if not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait(120)
            self._process.stdout.close()


class SystemdHub(Hub):
    """JupyterHub as a unit of the machine; each server of a user is a unit, too."""

    UNIT = "jupyterhub.service"

    def __init__(self, machine, **options):
        self.machine = machine
        super().__init__(machine.shared, MACHINE_SOCKET, **options)
        with (self.folder / "hub.py").open("a") as file:
            file.write(
                'c.JupyterHub.spawner_class = "systemdspawner.SystemdSpawner"\n'
                "c.SystemdSpawner.isolate_tmp = True\n"
                'c.SystemdSpawner.mem_limit = "4G"\n'
            )

    def start(self):
        programs = self.installed.bin
        self.machine.run(
            "systemd-run", f"--unit={self.UNIT}", f"--working-directory={self.folder}",
            f"--setenv=PATH={programs}:{os.environ['PATH']}", programs / "jupyterhub",
            "-f", self.folder / "hub.py",
        )  # fmt: skip
        wait_until(self._answers, "the Hub to answer", 240)

    def _answers(self):
        assert self.machine.show("ActiveState", self.UNIT) == "active", self.tail()
        try:
            return self.call("GET", "/", bare=True).ok
        except requests.ConnectionError:
            return False

    def stop(self):
        self.machine.run("systemctl", "stop", self.UNIT)

    def close(self):
        for cells in self._cells:
            cells.close()
        self.machine.call("systemctl", "stop", "jupyter*")

    def tail(self, size=6000):
        return self.machine.tail(size)
