# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Brokers forked from a process that has imported the broker's modules.

The imports are a third of the CPU time of a broker's start, and the tests start hundreds of
brokers. The process that forks them, the server, has no thread, no event loop and no configuration.
A forked broker gets its own arguments, environment, working folder and standard streams before any
of the broker's code runs. It runs its module as ``python -m`` does. It differs from an executed one
only in ``/proc``: its parent is the server, and ``cmdline`` and ``environ`` there are the server's.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: In the arguments: the number that the last descriptor has in the broker.
DESCRIPTOR = "{descriptor}"

_SIZE = struct.Struct("!I")


class Forked:
    """A forked broker, with what the tests use of :class:`subprocess.Popen`."""

    def __init__(self, pid, status):
        self.pid = pid
        self.returncode = None
        self._status = status
        # The pid may be another process's once the server has waited for this one.
        self._handle = os.pidfd_open(pid)

    def poll(self):
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked broker {self.pid}", timeout)
            self.returncode = int(os.read(self._status, 20))
            self._close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def _close(self):
        os.close(self._status)
        os.close(self._handle)

    def __del__(self):
        if self.returncode is None:
            self._close()


@lru_cache(maxsize=1)
def _server():
    """Start this process's server; return the socket to it. It ends when the socket closes."""
    mine, its = socket.socketpair()
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(its.fileno())],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(its.fileno(),),
            env=_environment(os.environ), cwd=ROOT,
        )  # fmt: skip

    def end():
        mine.close()
        process.wait(60)

    atexit.register(end)
    return mine


def _environment(env):
    light = str(ROOT / "tests" / "light")
    return {**env, "PYTHONPATH": os.pathsep.join((str(ROOT), light))}


def start(module, arguments, *, env, stdout, descriptor):
    """Start ``python -m module arguments...`` as :class:`subprocess.Popen` would."""
    server = _server()
    ours, its = os.pipe()
    try:
        request = {"module": module, "arguments": arguments, "env": env, "cwd": str(ROOT)}
        data = json.dumps(request).encode()
        socket.send_fds(server, [_SIZE.pack(len(data))], [stdout.fileno(), descriptor, its])
        server.sendall(data)
        pid = int.from_bytes(_read(server, 4), "big")
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(its)
    return Forked(pid, ours)


def _read(connection, size):
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EOFError("the process that forks brokers has ended")
        data += more
    return data


# ---------------------------------------------------------------------- the server


def _serve(connection):
    """Fork a broker for each request; return in the broker, with its request."""
    statuses = {}  # the pid of each broker: where its exit status is written
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        ready, _, _ = select.select([connection, wake], [], [])
        if wake in ready:
            with suppress(BlockingIOError):
                wake.recv(4096)
            _report(statuses)
        if connection not in ready:
            continue
        head, given, _, _ = socket.recv_fds(connection, _SIZE.size, 3)
        if not head:
            os._exit(0)
        head += _read(connection, _SIZE.size - len(head))
        request = json.loads(_read(connection, *_SIZE.unpack(head)))
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (connection, wake, waker):
                end.close()
            for status in (*statuses.values(), given.pop()):
                os.close(status)
            return request, given
        stdout, descriptor, status = given
        os.close(stdout)
        os.close(descriptor)
        statuses[pid] = status
        connection.sendall(pid.to_bytes(4, "big"))


def _report(statuses):
    """Write the exit status of each broker that has ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = statuses.pop(pid)
        with suppress(BrokenPipeError):  # a test that has dropped its broker reads nothing
            os.write(pipe, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _become(request, given):
    """Make this process one that ``python -m`` has started."""
    stdout, descriptor = given
    os.dup2(stdout, 1)
    os.dup2(stdout, 2)
    os.close(stdout)
    os.set_inheritable(descriptor, True)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    words = [word.replace(DESCRIPTOR, str(descriptor)) for word in request["arguments"]]
    sys.argv[1:] = words
    sys.orig_argv[:] = [sys.executable, "-m", request["module"], *words]
    return request["module"]


if __name__ == "__main__":
    import gc
    import runpy

    import jupyter_gpupool.broker.app  # noqa: F401

    gc.collect()
    gc.freeze()  # a collection would copy the pages that all brokers share
    name = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    runpy.run_module(name, run_name="__main__", alter_sys=True)
