# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Containers by Podman, from images of a Debian release; ``make test-containers`` makes them.

An image has Debian's Python and ipykernel, and no jupyter_gpupool.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

from .kit import Box

#: Where ``make`` notes which images there are.
_IMAGES = Path(__file__).parents[2] / ".images"

#: Podman raises these limits to more than a process without CAP_SYS_RESOURCE may have.
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")

#: crun of Debian 12 refuses a machine whose control groups are of both versions.
PODMAN = ("podman", *(("--runtime", "runc") if shutil.which("runc") else ()))


def images():
    """Return the names of the images that are there."""
    return sorted(path.stem for path in _IMAGES.glob("*.ready"))


class PodmanBox(Box):
    """A container of the image ``image``; further parameters see :class:`Box`."""

    image = ""

    def __init__(self, *where, memory=0, **rest):
        super().__init__(*where, **rest)
        self._memory = [f"--memory={memory}"] if memory else []
        self._names = {}

    def start(self, *arguments, env=None, **options):
        name = f"gpupool-test-{os.getpid()}-{secrets.token_hex(4)}"
        place = str(self.machine.place)
        mounts = [f"{self.shared}:{self.shared}"]
        if self.user:
            emulated = f"{place}/broker.sock.emulated"  # as a runtime adds the devices
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
        subprocess.run(
            [*PODMAN, "rm", "--force", "--time=0", "--ignore", self._names[process.pid]],
            stdout=subprocess.DEVNULL, stderr=sys.stderr, check=False, timeout=60,
        )  # fmt: skip
        process.wait(60)
