# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fixtures for sessions under the guard on an emulated machine. The test acts as the broker.

All code that uses the driver runs in a child process with its own environment.
"""

import ast
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

import pytest

from jupyter_gpupool.guard import build as guard_build
from jupyter_gpupool.guard import page as pages
from tests.emulated import build as emulator_build
from tests.emulated import environment

HERE = Path(__file__).parent

#: Seconds that a test waits for a child's answer. A child without an answer hangs.
TIMEOUT = 60

#: The code of a child. The child executes the statements that the test sends, and answers with
#: repr(_). Calls of C.* release the interpreter's lock, as in most frameworks. Calls of P.* keep
#: the lock.
CHILD = r"""
import ast, ctypes, os, signal, sys, threading, time

C = ctypes.CDLL("libcuda.so.1")
P = ctypes.PyDLL("libcuda.so.1")

def context(device=0):
    assert C.cuInit(0) == 0
    c = ctypes.c_void_p()
    error = C.cuDevicePrimaryCtxRetain(ctypes.byref(c), device)
    return error or C.cuCtxSetCurrent(c)

def alloc(n):
    p = ctypes.c_uint64()
    error = C.cuMemAlloc_v2(ctypes.byref(p), ctypes.c_size_t(n))
    return error or p.value

def number(call, *args):
    n = ctypes.c_int(-1)
    error = call(ctypes.byref(n), *args)
    return ("error", error) if error else n.value

g = dict(globals())
for line in sys.stdin:
    try:
        exec(compile(ast.literal_eval(line), "<sent>", "exec"), g)
        out = repr(g.pop("_", None))
    except BaseException as error:
        out = repr(("raised", type(error).__name__, str(error)))
    print("\x01" + out, flush=True)
"""


class Child:
    """A process of the session."""

    def __init__(self, env, command=None):
        self.process = subprocess.Popen(
            command or [sys.executable, "-uc", CHILD],
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

    def line(self, timeout=TIMEOUT):
        """Return the next line of output; raise TimeoutError or EOFError."""
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no answer within {timeout} s")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise EOFError(f"the child ended with {self.process.wait(TIMEOUT)}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def reply(self, timeout=TIMEOUT):
        """Wait until the child has run the sent statements; return the value of ``_``."""
        while not (line := self.line(timeout)).startswith("\x01"):
            pass
        return ast.literal_eval(line[1:])

    def do(self, code, timeout=TIMEOUT):
        """Run statements in the child; return the value of ``_``."""
        self.send(code)
        return self.reply(timeout)

    def answers(self, seconds):
        """Return whether the child writes anything within ``seconds``."""
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def end(self):
        """Close the child's input, so that the child ends; return its status."""
        self.process.stdin.close()
        return self.process.wait(TIMEOUT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)  # this has no effect if the process has ended
        status = self.process.wait(TIMEOUT)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        return status


class Broker:
    """A broker on a socket.

    The test sets ``answer``: a function that gets a message and returns the answer as a dict, or
    None for no answer.
    """

    def __init__(self, path):
        self.path = path
        self.messages = []
        #: Requests before cuInit. The broker answers them at once, and does not add them to
        #: ``messages``.
        self.homes = []
        #: Requests for a lost page. For each request, the broker calls ``page``. ``page`` returns
        #: true if it has put the page back.
        self.pages = []
        self.page = lambda: False
        self.passes = []  # the answer to a request for a page carries these descriptors
        self.home = lambda: None
        self.open = 0  # connections that wait for an answer
        self.answer = lambda message: None
        self._changed = threading.Condition()
        self._connections = set()
        self._listener = None
        self.start()

    def start(self):
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener):
        with contextlib.suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError), connection:
            with self._changed:
                self._connections.add(connection)
            line = b""
            while not line.endswith(b"\n") and (data := connection.recv(4096)):
                line += data
            if line:
                message = json.loads(line)
                if message["type"] == "page":
                    self.pages.append(message)
                    kind = "ok" if self.page() else "error"
                    answer = b'{"v":1,"id":1,"type":"%s"}\n' % kind.encode()
                    socket.send_fds(connection, [answer], self.passes)
                    return
                if message["type"] == "home":
                    self.homes.append(message)
                    self.home()
                    connection.sendall(b'{"v":1,"id":1,"type":"ok"}\n')
                    return
                with self._changed:
                    self.messages.append(message)
                    self.open += 1
                    self._changed.notify_all()
                try:
                    reply = self.answer(message)
                    if reply is not None:
                        connection.sendall(json.dumps({"v": 1, "id": 1, **reply}).encode() + b"\n")
                    connection.recv(1)
                finally:
                    with self._changed:
                        self.open -= 1
                        self._changed.notify_all()
        with self._changed:
            self._connections.discard(connection)

    def wait(self, condition):
        """Wait until ``condition(self)`` is true, or fail."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), TIMEOUT), self.messages

    def asked(self, count):
        """Wait until ``count`` requests have come."""
        self.wait(lambda b: len(b.messages) >= count)

    def stop(self):
        """Close the socket and all connections, as if the broker were killed."""
        # close() does not wake the thread that waits in accept(), and this thread keeps the socket
        # open. shutdown() wakes the thread.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


class Session:
    """A session on an emulated machine, with its page, its broker and its processes."""

    def __init__(self, folder, directory, machine):
        self.folder = folder
        self.page_path = folder / "page"
        self.page = pages.Page.create(self.page_path, "s-1", os.getuid())
        self.broker = Broker(folder / "b.sock")
        self.directory = directory
        self.children = []
        emulated = environment(machine, folder / "machine", base={})
        self.machine_env = {**emulated, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self.env = {
            **emulated,
            "LD_PRELOAD": str(directory / "libcuda.so.1"),
            "LD_LIBRARY_PATH": f"{directory}:{emulated['LD_LIBRARY_PATH']}",
            "GPUPOOL_PAGE": str(self.page_path),
            "GPUPOOL_SOCKET": str(self.broker.path),
            "GPUPOOL_SESSION": "s-1",
            "GPUPOOL_TOKEN": 't"1',
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }
        self.uuids = self._uuids()
        self.page.set_policy(managed=False, context_bytes=32 << 20)
        self.grant(self.uuids)

    def _uuids(self):
        code = (
            "import ctypes; L = ctypes.CDLL('libcuda.so.1'); L.cuInit(0); n = ctypes.c_int()\n"
            "L.cuDeviceGetCount(ctypes.byref(n)); b = ctypes.create_string_buffer(16)\n"
            "for i in range(n.value): L.cuDeviceGetUuid_v2(b, i); print(b.raw.hex())"
        )
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **self.machine_env},
            capture_output=True, text=True, check=True, timeout=TIMEOUT,
        )  # fmt: skip
        return [f"GPU-{uuid.UUID(text)}" for text in done.stdout.split()]

    def grant(self, uuids, each=512 << 20, limit=1 << 30, epoch=1):
        """Give the session a lease of the devices: write the grant and open the gate."""
        self.page.set_devices(uuids)
        self.page.set_grant([each] * len(uuids), limit, epoch)
        self.page.set_gate(pages.UNUSED)

    def attach_on_request(self, message=None):
        """Answer a message as the broker would. If the message is "attach", open the gate first."""
        if message["type"] == "attach":
            self.page.set_gate(pages.UNUSED)
        return {"type": "ok", "epoch": 1}

    def child(self, command=None, **variables):
        """Start a process of the session with these environment variables (None removes one)."""
        env = {**self.env, **variables}
        made = Child({k: v for k, v in env.items() if v is not None}, command)
        self.children.append(made)
        return made

    def run(self, *command, check=True, **variables):
        """Run a program in the session, and wait for its end."""
        env = {**os.environ, **self.env, **variables}
        done = subprocess.run(
            [str(part) for part in command],
            env={k: v for k, v in env.items() if v is not None},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        if check:
            assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
        return done

    def python(self, code, *args, **variables):
        """Run Python statements in a process of the session; return what they print."""
        return self.run(sys.executable, "-c", code, *args, **variables).stdout.strip()

    def slots(self):
        return self.page.read().slots

    def close(self):
        for child in self.children:
            child.kill()
        self.broker.stop()
        self.page.close()


def wait_for(condition, timeout=TIMEOUT):
    """Wait until ``condition()`` returns a true value; return this value."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(0.002)
    return found


@pytest.fixture(name="compile_c", scope="session")
def compiler():
    """Return :func:`compile_c`.

    Tests get the function from this fixture, because they cannot import it. Several test folders
    have a module ``conftest``, so the module's name does not say which one is meant.
    """
    return compile_c


def compile_c(target, *sources, flags=()):
    """Compile a test's C program or library."""
    command = ["cc", "-std=gnu11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, *flags, *map(str, sources), "-o", str(target)], check=True)
    return target


@pytest.fixture(scope="session")
def guard_dir(tmp_path_factory):
    """Compile guard and emulated driver if needed; return a folder of links to the guard."""
    emulator_build.compile()
    guard_build.compile()
    folder = tmp_path_factory.mktemp("guard")
    for name in ("libcuda.so.1", "libcuda.so"):
        (folder / name).symlink_to(guard_build.DEFAULT_OUT / "libcuda.so.1")
    return folder


@pytest.fixture
def short_path():
    """Return a folder whose path is short enough for a socket."""
    folder = Path(tempfile.mkdtemp(prefix="gpg"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def make_session(guard_dir, short_path):
    """Return a function that makes a session."""
    made = []

    def make(machine="2x1GiB,context=32MiB"):
        folder = short_path / str(len(made))
        folder.mkdir()
        made.append(Session(folder, guard_dir, machine))
        return made[-1]

    yield make
    for session in made:
        session.close()


@pytest.fixture
def session(make_session):
    return make_session()


@pytest.fixture
def until():
    return wait_for


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Return a function that compiles a C file of this folder and returns the result's path.

    The function compiles a file only once for the same flags.
    """
    folder = tmp_path_factory.mktemp("c")
    made = {}

    def get(name, *flags, output=None):
        key = (name, flags)
        if key not in made:
            made[key] = compile_c(folder / (output or f"{name}{len(made)}"), HERE / f"{name}.c",
                                  flags=flags)  # fmt: skip
        return made[key]

    return get
