# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Starts ``jupyter gpupool run`` as a user does, with real processes and real terminals.

Most commands are forks of a process that has already imported the modules, because the imports
would take most of a command's CPU time (``tests/broker/forks.py``). A command on a terminal, or a
command that a shell starts, is a new Python process.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import ExitStack, suppress

from tests.broker import forks, kit

#: The words that start ``jupyter gpupool``. They run the same code as the installed script.
CLI = [sys.executable, "-m", "jupyter_gpupool.cli"]

#: The words that start a program that calls CUDA and does not know the pool. Each line of JSON on
#: its input is an order to the program.
GPU = [sys.executable, "-m", "tests.broker.guarded_child"]


def environment(broker, **more):
    """Return environment variables with which a command uses this broker and no user's files."""
    return {
        **kit.environment(broker.folder),
        "GPUPOOL_SOCKET": str(broker.socket),
        "GPUPOOL_RUNS": str(broker.folder / "runs"),
        **more,
    }


def run(broker, *words, input_=b"", timeout=120, **env):
    """Run a command of ``jupyter gpupool`` until it ends."""
    with ExitStack() as stack:
        given, out, err = (
            stack.enter_context(os.fdopen(os.memfd_create(name), "w+b"))
            for name in ("stdin", "stdout", "stderr")
        )
        given.write(input_)
        given.seek(0)
        process = forks.command(
            words, env=environment(broker, **env),
            standard=[stream.fileno() for stream in (given, out, err)],
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


class Program:
    """A program under ``jupyter gpupool run``, with pipes as its streams."""

    def __init__(self, broker, *options, command=GPU, **env):
        self.broker = broker
        self.errors = broker.folder / f"errors-{time.monotonic_ns()}"
        stdin, ours = os.pipe()
        read, stdout = os.pipe()
        streams = os.fdopen(ours, "wb"), os.fdopen(read, "rb")
        try:
            with self.errors.open("wb") as errors:
                self.process = forks.command(
                    ["run", *options, "--", *command], env=environment(broker, **env),
                    standard=[stdin, stdout, errors.fileno()],
                )  # fmt: skip
        finally:
            os.close(stdin)
            os.close(stdout)
        self.process.stdin, self.process.stdout = streams

    @property
    def stderr(self):
        return self.errors.read_text()

    def line(self, seconds=90):
        """Return the next line that the program prints, or "" if it has ended."""
        ready = select.select([self.process.stdout], [], [], seconds)[0]
        assert ready, f"the program is silent: {self.stderr}"
        return self.process.stdout.readline().decode()

    def tell(self, do, **fields):
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self):
        line = self.line()
        assert line, f"the program has ended: {self.stderr}"
        found = json.loads(line)
        assert "error" not in found, found
        return found["ok"]

    def do(self, do, **fields):
        self.tell(do, **fields)
        return self.answer()

    def wait(self, seconds=90):
        """Wait for the program's end; return its exit code."""
        return self.process.wait(seconds)

    def end(self):
        """Close the program's input, so that it ends; return its exit code."""
        self.process.stdin.close()
        return self.wait()

    def close(self):
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):
                    stream.close()


def session_of(broker, label):
    """Return the session with this label; None if there is none."""
    return next((s for s in broker.status()["sessions"] if s.get("label") == label), None)


def state_of(broker, label):
    found = session_of(broker, label)
    return found["state"] if found else None


class Terminal:
    """A terminal for one test, and a program on it.

    The program is the leader of the terminal's session.
    """

    def __init__(self, broker, command, **env):
        # ``forkpty`` would fork the process of the tests, and copy the locks of its threads. So
        # this code opens the terminal itself.
        self.fd, inner = pty.openpty()
        self.resize(80, 24)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", _LEADER, os.ttyname(inner), *command],
            stdin=inner, stdout=inner, stderr=inner, start_new_session=True,
            env=environment(broker, TERM="xterm", **env), cwd=kit.ROOT,
        )  # fmt: skip
        os.close(inner)

    def resize(self, columns, lines):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def type(self, data):
        os.write(self.fd, data)

    def read_until(self, text, seconds=90):
        """Return the text before ``text`` on the terminal. Later calls read on after ``text``."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"{text!r} is not shown: {self.seen!r}"
            if select.select([self.fd], [], [], left)[0]:
                try:
                    chunk = os.read(self.fd, 4096)
                except OSError:  # no process has the terminal open any more
                    chunk = b""
                assert chunk, f"{text!r} was not shown: {self.seen!r}"
                self.seen += chunk
        before, _, self.seen = self.seen.partition(text)
        return before

    def wait(self, seconds=90):
        return self.process.wait(seconds)

    def hang_up(self):
        """Close the terminal, as if its window was closed."""
        os.close(self.fd)
        self.fd = -1

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


#: A program that makes the terminal its controlling terminal, and then executes the command.
_LEADER = """
import fcntl, os, sys, termios
descriptor = os.open(sys.argv[1], os.O_RDWR)
fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
os.close(descriptor)
os.execv(sys.argv[2], sys.argv[2:])
"""
