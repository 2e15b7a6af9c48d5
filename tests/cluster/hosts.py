# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Machines with separate networks: each machine is a network namespace on one bridge.

Only root can create network namespaces. A process in a namespace reaches the other machines only
through the bridge, as a host does through a switch. If a test cuts the cable of a machine, packets
are lost, but no connection is reset, and no process learns of the loss.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_NEWNET = 0x40000000


def can_have_hosts():
    """Return whether this process may create network namespaces, and the program ``ip`` exists."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


def ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)


def _lock_one():
    """Lock a number that no other run has; return the lock file and the number.

    With different numbers, two runs at the same time have different networks. Linux frees the lock
    of a killed run.
    """
    for number in range(250):
        lock = Path(f"/run/gpupool-network-{number}.lock").open("a")  # noqa: SIM115
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock, number
        lock.close()
    raise AssertionError("all networks are in use")


class Hosts:
    """A network of machines. ``address`` maps a machine's name to its IP address."""

    def __init__(self, names):
        self.names = names
        self._lock, self._id = _lock_one()
        self._bridge = f"gpb{self._id}"
        self._own = f"10.213.{self._id}.254"
        self.address = {name: f"10.213.{self._id}.{n + 1}" for n, name in enumerate(names)}

    def __enter__(self):
        self.close()  # remove the network of a killed run
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{self._own}/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for name, address in self.address.items():
            space, cable = self._space(name), self._cable(name)
            ip("netns", "add", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", cable, "master", self._bridge, "up")
            ip("-n", space, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")
            # Programs on the machine need a default route to find the machine's own address.
            ip("-n", space, "route", "add", "default", "via", self._own)
        return self

    def __exit__(self, *error):
        self.close()
        self._lock.close()

    def close(self):
        for name in self.names:
            ip("netns", "del", self._space(name), check=False)
            ip("link", "del", self._cable(name), check=False)
        ip("link", "del", self._bridge, check=False)

    @contextmanager
    def at(self, name):
        """Enter a machine for the length of a block. Processes that the block starts stay there."""
        with open("/proc/thread-self/ns/net") as before:
            with open(f"/run/netns/{self._space(name)}") as space:
                _enter(space.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def cut(self, name):
        """Cut the cable of a machine."""
        ip("link", "set", self._cable(name), "down")

    def mend(self, name):
        ip("link", "set", self._cable(name), "up")

    def _space(self, name):
        return f"{self._bridge}-{name}"

    def _cable(self, name):
        return f"{self._bridge}c{name}"


def _enter(space):
    if _LIBC.setns(space, _NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
