# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Containers of Podman, from images with different Debian releases.

``make test-containers`` makes the images. An image has Debian's Python and ipykernel, but no
jupyter_gpupool.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from jupyter_gpupool.procfs import identify

from .kit import Box

#: In this folder, ``make`` notes which images exist.
_IMAGES = Path(__file__).parents[2] / ".images"

#: Podman's default limits are too high for a process without CAP_SYS_RESOURCE. So set these limits.
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")

#: Prefer runc: crun of Debian 12 refuses a machine that has control groups of versions 1 and 2.
PODMAN = ("podman", *(("--runtime", "runc") if shutil.which("runc") else ()))


def images():
    """Return the names of the existing images."""
    return sorted(path.stem for path in _IMAGES.glob("*.ready"))


def new_name():
    """Return a new name for a container. It has the pid of the tests, for :func:`sweep`."""
    return f"gpupool-test-{os.getpid()}-{secrets.token_hex(4)}"


def left(names):
    """Return those of ``names`` that are names of containers whose tests no longer run."""
    made = (re.fullmatch(r"gpupool-test-(\d+)-[0-9a-f]+", name) for name in names)
    return [match[0] for match in made if match and not identify(int(match[1]))]


def sweep():
    """Remove the containers of tests that were killed."""
    listed = subprocess.run(
        [*PODMAN, "ps", "--all", "--format={{.Names}}"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    for name in left(listed.split()):
        remove(name)


def remove(name):
    subprocess.run(
        [*PODMAN, "rm", "--force", "--time=0", "--ignore", name],
        stdout=subprocess.DEVNULL, check=False, timeout=120,
    )  # fmt: skip


class PodmanBox(Box):
    """A container of the image ``image``; :class:`Box` has the other parameters."""

    image = ""

    def __init__(self, *where, memory=0, **rest):
        super().__init__(*where, **rest)
        self._memory = [f"--memory={memory}"] if memory else []
        self._names = {}

    def start(self, *arguments, env=None, **options):
        name = new_name()
        place = str(self.machine.place)
        mounts = [f"{self.shared}:{self.shared}"]
        if self.user:
            # Mount the emulated GPUs, as a container runtime would add real GPUs to the container.
            emulated = f"{place}/broker.sock.emulated"
            access = "" if self._writable else ":ro"
            mounts += [f"{place}/users/{self.user}:{place}{access}", f"{emulated}:{emulated}"]
        uid, first = self._spec["uid"], self._spec["users_from"]
        variables = {
            "HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1",
            "GPUPOOL_SOCKET": f"{place}/broker.sock", **(env or {}),
        }  # fmt: skip
        process = subprocess.Popen(
            [
                *PODMAN, "run", "--rm", "--interactive", "--name", name, *LIMITS,
                "--network=none", "--shm-size=64k", f"--user={uid}:{uid}",
                *([f"--uidmap=0:{first}:65536", f"--gidmap=0:{first}:65536"] if first else []),
                *(f"--volume={mount}" for mount in mounts),
                *(f"--env={key}={value}" for key, value in variables.items()),
                *self._memory, f"localhost/gpupool-test:{self.image}", "python3", *arguments,
            ],
            stdin=subprocess.PIPE, text=True, start_new_session=True, **options,
        )  # fmt: skip
        self._names[process.pid] = name
        self._processes.append(process)
        return process

    def kill(self, process):
        remove(self._names[process.pid])
        process.wait(60)
