# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Emulated machines, and child processes that use them.

Only child processes use the driver, each with its own environment. The test process never loads the
driver.
"""

import ast
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from emucuda import Faults, build, environment

#: The time-out of an answer in seconds. A child that has not answered by then hangs.
TIMEOUT = 60

#: The program of a child. It executes the statements in each line of its input, and answers with
#: ``repr(_)``, where ``_`` is the value that the statements assign to this name.
TARGET = r"""
import ast, ctypes, hashlib, os, signal, sys
import numpy as np
from cuda.bindings import driver as D

class Failed(Exception):
    pass

def ok(result):
    if int(result[0]):
        raise Failed(int(result[0]))
    return result[1] if len(result) == 2 else result[1:]

def context(device=0):
    ok(D.cuInit(0))
    c = ok(D.cuDevicePrimaryCtxRetain(device))
    ok(D.cuCtxSetCurrent(c))
    return c

def bytes_of(n, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n, dtype=np.uint8)

def put(pointer, data):
    ok(D.cuMemcpyHtoD(int(pointer), data.ctypes.data, data.nbytes))

def get(pointer, n):
    data = np.zeros(n, dtype=np.uint8)
    ok(D.cuMemcpyDtoH(data.ctypes.data, int(pointer), n))
    return hashlib.sha256(data).hexdigest()

g = dict(globals())
for line in sys.stdin:
    try:
        exec(compile(ast.literal_eval(line), "<sent>", "exec"), g)
        out = repr(g.pop("_", None))
    except Failed as error:
        out = repr(("failed", error.args[0]))
    except BaseException as error:
        out = repr(("raised", f"{type(error).__name__}: {error}"))
    print("\x01" + out, flush=True)
"""


class Target:
    """A child process on an emulated machine."""

    def __init__(self, env, code=TARGET, within=()):
        self.process = subprocess.Popen(
            [*within, sys.executable, "-uc", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self.pid = self.process.pid
        self._buffer = b""

    def send(self, code):
        """Send statements without waiting."""
        self.process.stdin.write(repr(code).encode() + b"\n")
        self.process.stdin.flush()

    def reply(self, timeout=TIMEOUT):
        """Return the next answer; raise TimeoutError, or EOFError if the child ends."""
        deadline = time.monotonic() + timeout
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                if line.startswith(b"\x01"):
                    return ast.literal_eval(line[1:].decode())
                continue
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {timeout} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(f"the child ended with {self.process.wait(TIMEOUT)}")
            self._buffer += data

    def attempt(self, code, timeout=TIMEOUT):
        """Run statements; return the value of ``_``.

        Return ("failed", code) if a CUDA call fails, and ("raised", text) for another exception.
        """
        self.send(code)
        return self.reply(timeout)

    def do(self, code, timeout=TIMEOUT):
        """Run statements that must not fail; return the value of ``_``."""
        found = self.attempt(code, timeout)
        assert not isinstance(found, tuple) or found[:1] not in (("failed",), ("raised",)), found
        return found

    def hangs(self, seconds=0.3):
        """Return whether the statements are still running after ``seconds``."""
        return not select.select([self.process.stdout], [], [], seconds)[0]

    def is_hung(self):
        """Wait until the fault ``hang`` blocks the main thread; return whether it stays blocked."""
        # A blocked thread is in system call 202, futex(2). The argument 0x80 means a private
        # FUTEX_WAIT. The two zeros mean that the expected value is 0, and that there is no
        # time-out.
        wait = re.compile(r"202 0x[0-9a-f]+ 0x80 0x0 0x0 ")
        deadline = time.monotonic() + TIMEOUT
        while not wait.match(Path(f"/proc/{self.pid}/syscall").read_text()):
            assert time.monotonic() < deadline, "the call does not hang"
            time.sleep(0.001)
        return self.hangs(0)

    def signal(self, number):
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            # Wait until all threads have stopped. After ``send_signal``, they run for a moment, and
            # could answer a request of the driver.
            deadline = time.monotonic() + TIMEOUT
            while not self._stopped():
                assert time.monotonic() < deadline, "it did not stop"
                time.sleep(0.001)

    def _stopped(self):
        stats = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)  # this has no effect if the process has ended
        status = self.process.wait(TIMEOUT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return status


class Emulated:
    """An emulated machine for one test."""

    def __init__(self, machine, state_dir):
        self.env = environment(machine, state_dir)
        self.state_dir = state_dir
        self.faults = Faults(state_dir)
        self.children = []

    def target(self, *, within=(), **variables):
        """Start a child. ``within`` is a command that runs the child, such as ``unshare``."""
        child = Target({**self.env, **variables}, within=within)
        self.children.append(child)
        return child

    def run(self, code, *args, timeout=TIMEOUT, check=True, **variables):
        """Run a whole program; return its standard output."""
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, args)],
            env={**os.environ, **self.env, **variables},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def close(self):
        for child in self.children:
            child.kill()


@pytest.fixture(scope="session", autouse=True)
def libraries():
    """Compile the driver if its sources are newer than the libraries."""
    build.compile()


@pytest.fixture
def emulated(tmp_path):
    """Return a function that makes the test's machines."""
    made = []

    def make(machine="2x1GiB,context=32MiB"):
        made.append(Emulated(machine, tmp_path / f"machine{len(made)}"))
        return made[-1]

    yield make
    for machine in made:
        machine.close()


def wait_for(condition, timeout=TIMEOUT):
    """Wait until ``condition()`` is true; fail after ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.005)


@pytest.fixture
def until():
    return wait_for
