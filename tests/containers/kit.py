# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Containers made without a container runtime, and the machine's broker outside them.

Each container has its own process numbers, mounts, network, control groups, 64 KiB of shared
memory and root file system. The file system has Python and ipykernel, but no jupyter_gpupool. The
container can reach the broker only through the mounted folder.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from jupyter_client import BlockingKernelClient

from jupyter_gpupool import cgroups
from tests import namespaces
from tests.broker import kit
from tests.broker.kit import wait_until

BOX = Path(__file__).with_name("box.py")
SITE = next(Path(p) for p in sys.path if p.endswith("site-packages"))

#: Packages that are not in the image.
_OURS = ("jupyter_gpupool", "_editable", "emucuda", "_emucuda")


class Machine(kit.Broker):
    """The machine's broker, with containers of several users."""

    def __init__(self, folder, **config):
        self.place = Path("/run") / f"gpb-{os.getpid()}-{secrets.token_hex(2)}"
        super().__init__(folder, user_sockets=True, **config)
        self.socket = self.place / "broker.sock"
        self.boxes = []
        #: The class of the machine's containers.
        self.kind = Box

    def user(self, name):
        """Make the folder of a user, as Docker does for a volume, and return the folder.

        The broker already serves the folder when this method returns.
        """
        folder = self.place / "users" / name
        folder.mkdir(exist_ok=True)
        wait_until((folder / self.socket.name).exists, f"the socket of {name}")
        return folder

    def box(self, user="", **options):
        box = self.kind(self, user, **options)
        self.boxes.append(box)
        return box

    def clear(self):
        """End all containers, and forget all users."""
        for box in self.boxes:
            box.close()
        self.boxes = []
        for folder in (self.place / "users").iterdir():
            if folder.is_symlink():
                folder.unlink()
            elif folder.name != ".inside":
                shutil.rmtree(folder)
        wait_until(lambda: not self.status()["sessions"], "the end of the containers' sessions")

    def close(self):
        for box in self.boxes:
            box.close()
        super().close()
        kit.remove(self.place)


@contextmanager
def running(**config):
    """Yield a machine whose broker has not started yet; at the end, stop it and show its log."""
    folder = kit.short_folder()
    folder.chmod(0o755)
    found = Machine(folder, reclaim_after=0, **config)
    try:
        yield found
    finally:
        print(found.tail())
        found.close()
        kit.remove(folder)


class Box:
    """One container. It mounts the folder of ``user``; with an empty ``user``, it mounts none.

    ``users_from``: the user id that the container's root has on the machine; 0 if the container has
    no user namespace. ``memory``: the memory limit of its control group, in bytes. ``writable``:
    whether the container may write to the mounted folder, as after a mistake of an admin.
    """

    def __init__(self, machine, user="", *, uid=1000, users_from=0, memory=0, writable=False):
        self.machine = machine
        self.user = user
        self.shared = machine.folder / f"box-{secrets.token_hex(4)}"
        self.shared.mkdir()
        os.chown(self.shared, uid + users_from, uid + users_from)
        self._spec = {"uid": uid, "users_from": users_from}
        self._group = control_group(memory) if memory else None
        self._writable = writable
        self._processes, self._kernels = [], []

    def start(self, *arguments, env=None, **options):
        """Start Python in a new container.

        The containers of all calls share the folder ``self.shared``.
        """
        place = str(self.machine.place)
        root = self.machine.folder / f"root-{secrets.token_hex(4)}"
        root.mkdir()
        mounts = [
            (sys.base_prefix, sys.base_prefix, False),
            (str(SITE), "/image/all", False),
            (str(self.shared), str(self.shared), True),
        ]
        if self.user:
            # Mount the emulated GPUs, as a container runtime would add real GPUs to the container.
            emulated = f"{place}/broker.sock.emulated"
            mounts += [
                (f"{place}/users/{self.user}", place, self._writable),
                (emulated, emulated, True),
            ]
        names = (p.name for p in SITE.iterdir() if not p.name.startswith(_OURS))
        spec = {
            **self._spec,
            "root": str(root),
            "mounts": mounts,
            "links": [(f"/image/python/{name}", f"/image/all/{name}") for name in names],
            "command": [f"{sys.base_prefix}/bin/python3", *arguments],
            "env": {
                "PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": "/image/python",
                "PYTHONDONTWRITEBYTECODE": "1", "GPUPOOL_SOCKET": f"{place}/broker.sock",
                **(env or {}),
            },
        }  # fmt: skip
        return self._launch(_inside(self._group), (), sys.executable, spec, options)

    def _launch(self, before, namespace, python, spec, options):
        """Start ``box.py`` with the interpreter ``python``, in new namespaces.

        The command line begins with the words ``before``. ``namespace`` has more options for
        ``unshare``, for more namespaces.
        """
        process = subprocess.Popen(
            [*before, "unshare", *namespace, "--mount", "--ipc", "--net", "--uts", "--cgroup",
             *namespaces.OWN_NUMBERS[1:], str(python), str(BOX)],
            stdin=subprocess.PIPE, text=True, start_new_session=True, **options,
        )  # fmt: skip
        self._processes.append(process)
        process.stdin.write(json.dumps(spec) + "\n")
        process.stdin.flush()
        return process

    def run(self, code, *arguments, timeout=120, **options):
        """Run a program until it ends; return its output."""
        process = self.start(
            "-c", code, *map(str, arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            **options,
        )  # fmt: skip
        text, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, text
        return text.strip()

    def kernel(self, **options):
        kernel = BoxKernel(self, **options)
        self._kernels.append(kernel)
        return kernel

    def close(self):
        for kernel in self._kernels:
            kernel.close()
        for process in self._processes:
            self.kill(process)
            process.stdin.close()
            if process.stdout is not None:
                process.stdout.close()
        if self._group is not None:
            wait_until(lambda: not (self._group / "cgroup.procs").read_text(), "an empty group")
            self._group.rmdir()

    def kill(self, process):
        """Kill a process that :meth:`start` has returned, and its whole container."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


def control_group(limit):
    """Return a new control group with a memory limit in bytes."""
    for base, file in ((cgroups.ROOT, "memory.max"),
                       (cgroups.ROOT / "memory", "memory.limit_in_bytes")):  # fmt: skip
        group = base / f"gpb-{secrets.token_hex(4)}"
        with suppress(OSError):
            group.mkdir()
            if (group / file).exists():
                (group / file).write_text(str(limit))
                return group
            group.rmdir()
    pytest.skip("this process may not make a control group with a memory limit")


def _inside(group):
    """Return the prefix that makes a command run in the control group.

    Without a group, return [].
    """
    if group is None:
        return []
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]


class BoxKernel:
    """A kernel of the mounted kernelspec.

    The client reaches the kernel through Unix sockets in the container's shared folder.
    """

    def __init__(self, box, **env):
        self.box = box
        folder = box.machine.place / "users" / box.user / "inside"
        spec = json.loads(
            (folder / "share/jupyter/kernels/gpupool-python3/kernel.json").read_text()
        )
        name = secrets.token_hex(3)
        self.file = box.shared / f"{name}.json"
        ports = {f"{port}_port": at for at, port in enumerate(
            ("shell", "iopub", "stdin", "control", "hb"), start=1)}  # fmt: skip
        self.file.write_text(json.dumps({
            "transport": "ipc", "ip": str(box.shared / name), "key": secrets.token_hex(16),
            "signature_scheme": "hmac-sha256", "kernel_name": "gpupool-python3", **ports,
        }))  # fmt: skip
        self.file.chmod(0o644)
        command = [word.replace("{connection_file}", str(self.file)) for word in spec["argv"]]
        self.log = (box.shared / f"{name}.log").open("ab")
        self.process = box.start(*command[1:], env=env, stdout=self.log, stderr=self.log)
        self.client = BlockingKernelClient(connection_file=str(self.file))
        self.client.load_connection_file()
        sockets = [Path(f"{box.shared / name}-{at}") for at in ports.values()]
        wait_until(lambda: self._listens(sockets), "the kernel's sockets")
        self.client.start_channels(hb=False)
        self.client.wait_for_ready(timeout=120)
        self.run("")

    def _listens(self, sockets):
        assert self.process.poll() is None, self.said()
        return all(path.exists() for path in sockets)

    def said(self):
        return Path(self.log.name).read_text()

    def run(self, code, timeout=120):
        """Run a cell; return its output, and fail if the cell fails."""
        text = []

        def hook(message):
            content = message["content"]
            text.append(content.get("text") or content.get("data", {}).get("text/plain", ""))
            if message["msg_type"] == "error":
                text.append("\n".join(content["traceback"]))

        reply = self.client.execute_interactive(
            code, timeout=timeout, output_hook=hook, allow_stdin=False, store_history=False
        )
        assert reply["content"]["status"] == "ok", "".join(text) + self.said()
        return "".join(text).strip()

    @property
    def session(self):
        """The session of this kernel in the broker's status."""
        found = self.run("import os; print(os.environ['GPUPOOL_SESSION'])")
        return self.box.machine.session(found.splitlines()[-1])

    def kill(self):
        self.box.kill(self.process)

    def close(self):
        self.client.stop_channels()
        self.log.close()
