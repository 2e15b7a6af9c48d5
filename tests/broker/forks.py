# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fork brokers and other test programs from processes that have already imported the modules.

Imports take most of the CPU time of a broker's start, and the tests start hundreds of brokers with
several children each. A process that forks test programs is called a server. A server has no
thread, no event loop and no configuration.

One server forks brokers. A forked broker gets its own arguments, environment, working folder and
standard streams before any of the broker's code runs. It runs its module as ``python -m`` does, and
``/proc`` shows its own command line and environment. Only its parent is different: the parent is
the server. The same server forks other Python programs of the tests (:func:`run`).

Other servers fork kernels (:func:`kernels`). These servers have imported ipykernel, the agent,
numpy and cuda.bindings. One of them starts with the guard preloaded, like a kernel of the pool. The
guard reads its variables at the first CUDA call, so a forked kernel can still set them.

Two more servers fork programs that act as kernels (:func:`program`, ``child.py``). These servers
have imported cuda.core, which does not load the driver yet. One more server forks Jupyter Servers,
and one forks the commands of ``jupyter gpupool`` (:func:`command`).

All workers of a test run use the same servers. The servers' sockets are in the folder that the
variable ``TESTS_FORKS`` names; ``tests/conftest.py`` makes it. A process without this variable
starts its own servers.

A forked broker also forks its children if they use the emulated driver. The dynamic loader reads
its variables only when a program is executed, and a forked process is not. So the server must start
with the variables of the emulated driver, and the forked self-test loads the guard itself.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import fcntl
import importlib
import importlib.util
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from contextlib import contextmanager, suppress
from functools import lru_cache
from inspect import signature
from pathlib import Path
from unittest.mock import patch

from jupyter_gpupool import daemon
from jupyter_gpupool.devices import child
from jupyter_gpupool.guard import install
from tests.emulated import library_dir

ROOT = Path(__file__).parents[2]

#: The folder of the emulated driver, for ``LD_LIBRARY_PATH``. The dynamic loader reads this
#: variable only when a program is executed.
EMULATED = str(library_dir())

#: A placeholder in the arguments. The forked process replaces it by the number of the descriptor
#: that it gets in addition to its standard streams.
DESCRIPTOR = "{descriptor}"

#: Bytes that the server adds to its own command line and environment as padding. A forked process
#: overwrites both, with the padding, by its own command line and environment.
_ROOM = {"arguments": 600, "environment": 16_000}

#: Size in bytes of the longest request, with its arguments and its environment.
_LONGEST = 1 << 17

#: The variables that the dynamic loader reads.
_LOADER = ("LD_PRELOAD", "LD_LIBRARY_PATH")

#: What each kind of server imports for the processes that it forks. Nothing here loads the driver.
_IMPORTS = {
    "brokers": (
        "jupyter_gpupool.broker.app", "jupyter_gpupool.devices.nvidia.checkpoint",
        "jupyter_gpupool.devices.nvidia.nvml", "jupyter_gpupool.devices.nvidia.child_programs",
        "jupyter_gpupool.devices.nvidia.service", "pynvml", "cuda.core.checkpoint",
    ),
    # ipykernel and IPython import the modules of lines 2 and 3 when they start. The cells of the
    # tests import the modules of the last line.
    "kernels": (
        "ipykernel.kernelapp", "jupyter_gpupool.kernel.agent",
        "IPython.core.oinspect", "IPython.extensions.storemagic", "pdb", "sqlite3",
        "tornado.platform.asyncio",
        "cuda.bindings.driver", "numpy",
    ),
    "programs": ("cuda.core", "jupyter_gpupool.kernel.link"),
    # Jupyter Server, and the extensions that are installed beside it.
    "servers": (
        "jupyter_server.serverapp", "jupyter_gpupool.server", "jupyter_gpupool.provisioner",
        "jupyter_server.services.kernels.connection.channels", "jupyter_lsp.serverextension",
        "jupyter_server_terminals", "jupyterlab.labapp", "notebook.app", "nbconvert.exporters",
    ),
    "commands": (
        "jupyter_gpupool.cli.commands", "jupyter_gpupool.cli.status",
        "jupyter_gpupool.cli.maintenance", "jupyter_gpupool.programs.detached",
        "jupyter_gpupool.programs.execution", "jupyter_gpupool.starting",
    ),
}  # fmt: skip

#: The Python interpreters whose kernels are forked. Each interpreter has its own servers.
kernel_pythons = {sys.executable}

#: Largest number of descriptors in a request.
_DESCRIPTORS = 4

#: The server writes a pid as this many bytes into the pipe of its answer.
_PID = 4


class Forked:
    """A forked broker, with the methods of :class:`subprocess.Popen` that the tests use."""

    def __init__(self, server, pid, status):
        self._server = server
        self.pid = pid
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None
        #: A pipe that becomes readable when the process ends: the server writes its exit status.
        self.status = status
        # A descriptor for signals. The pid alone is unsafe: after the server has reaped this
        # process, the pid may belong to another process.
        self.handle = None
        with suppress(ProcessLookupError):  # the process has ended
            self.handle = os.pidfd_open(pid)

    def poll(self):
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked broker {self.pid}", timeout)
            self.returncode = int(os.read(self.status, 20) or self._server.fail())
            self._close()
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None and self.handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.handle, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def _close(self):
        os.close(self.status)
        if self.handle is not None:
            os.close(self.handle)

    def __del__(self):
        if self.returncode is None:
            self._close()


class _Server:
    """A connection to the server with a given name; starts this server if it does not run yet."""

    def __init__(self, name, modules, loader=(), python=sys.executable):
        self._name = name
        path = _folder() / name
        with _alone(path):
            self._socket = _connected(path)
            if self._socket is None:
                _started.append(_launch(path, modules, dict(loader), python))
                self._socket = _connected(path)
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)
        self._errors = path.with_suffix(".errors")

    def fork(self, request, descriptors):
        """Send a request as one message, so that two threads can send at the same time."""
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        except BrokenPipeError:
            self.fail()

    def fail(self):
        """Raise an error that says why the server ended. The next test starts another server."""
        if _servers.get(self._name) is self:
            del _servers[self._name]
        self.close()
        said = self._errors.read_text(errors="replace")
        raise EOFError(f"the process {self.pid} that forks {self._name} has ended: {said}")

    def close(self):
        """Close this connection; the server ends with the last connection to it."""
        self._socket.close()


#: The servers that this process uses, by name.
_servers: dict[str, _Server] = {}

#: The servers that this process has started. A server may serve other processes after this process
#: has ended.
_started: list[subprocess.Popen] = []


def _server(name, modules, loader=dict, python=sys.executable):
    found = _servers.get(name)
    if found is None:
        found = _servers.setdefault(name, _Server(name, modules, loader(), python))
    return found


def _brokers():
    return _server("brokers", "brokers", _emulated)


def _kernels(python, guarded):
    number = f"{zlib.crc32(python.encode()):x}"
    if guarded:
        return _server(f"guarded-kernels-{number}", "kernels", _guard_loader, python)
    return _server(f"kernels-{number}", "kernels", python=python)


def _programs(guarded):
    if guarded:
        return _server("guarded-programs", "programs", _guard_loader)
    return _server("programs", "programs", _emulated)


def _folder():
    """Return the folder of the servers' sockets: the test run's, or else this process's own."""
    return Path(os.environ.get("TESTS_FORKS") or _own_folder())


@lru_cache(maxsize=1)
def _own_folder():
    return tempfile.mkdtemp(prefix="gpupool-")


@atexit.register
def _leave():
    """Close the connections to the servers. Wait until the servers of this process have ended."""
    for server in _servers.values():
        server.close()
    for process in _started:
        if os.environ.get("TESTS_FORKS"):
            # With a return code, Python does not warn that the server is still running.
            process.returncode = process.poll() or 0
        else:
            process.wait(60)
    if _own_folder.cache_info().currsize:
        shutil.rmtree(_own_folder(), ignore_errors=True)


@contextmanager
def own():
    """Use servers of this process only. All forked processes then descend from this process."""
    started = len(_started)
    with (
        tempfile.TemporaryDirectory(prefix="gpupool-") as folder,  # short enough for a socket
        patch.dict(os.environ, TESTS_FORKS=folder),
        patch.dict(_servers, clear=True),
    ):
        yield
        for server in _servers.values():
            server.close()
        for process in _started[started:]:
            process.wait(60)
        del _started[started:]


@contextmanager
def _alone(path):
    """Hold the lock for a server's name. No server of this name starts or ends under the lock."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _connected(path):
    """Return a connection to the server that listens at ``path``, or None."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except (FileNotFoundError, ConnectionRefusedError):
        connection.close()
        return None
    return connection


def _launch(path, modules, loader, python):
    """Start a server, and wait until it listens."""
    path.unlink(missing_ok=True)
    ready, its = os.pipe()
    room = "-" * _ROOM["arguments"]
    with path.with_suffix(".errors").open("wb") as errors:
        process = subprocess.Popen(
            [python, "-m", __name__, str(path), str(its), modules, room],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            pass_fds=(its,), env={**_environment(), **loader}, cwd=ROOT,
        )  # fmt: skip
    os.close(its)
    with os.fdopen(ready, "rb") as pipe:
        assert pipe.read() == b"1", path.with_suffix(".errors").read_text(errors="replace")
    return process


def _emulated():
    return {"LD_LIBRARY_PATH": EMULATED}


def _guard_loader():
    """Return the variables with which a process starts under the guard."""
    folder = _folder() / "guard"
    folder.mkdir(exist_ok=True)
    return install.session_environment(install.guard_directory(folder), Path(), _emulated())


def _environment():
    light = str(ROOT / "tests" / "light")
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith(("GPUPOOL_", "JUPYTER_"))},
        "PYTHONPATH": os.pathsep.join((str(ROOT), light)),
        "OPENBLAS_NUM_THREADS": "1",  # a forked process does not get numpy's threads
        "ROOM": "-" * _ROOM["environment"],
    }


@contextmanager
def instead_of_launches():
    """Let this process fork the brokers that the product would execute."""

    execute = daemon._spawn

    def spawn(command, env, log, ready, give_up):
        python, option, module, *arguments, _ = command
        if (python, option) != (sys.executable, "-m"):
            return execute(command, env, log, ready, give_up)
        return start(
            module, [*arguments, DESCRIPTOR], env=env, stdout=log, descriptor=ready, folder="/",
        ).pid  # fmt: skip

    with patch.object(daemon, "_spawn", spawn):
        yield


def start(module, arguments, *, env, stdout, descriptor, folder=str(ROOT)):
    """Start ``python -m module arguments...`` as :class:`subprocess.Popen` would."""
    command = [sys.executable, "-m", module, *arguments]
    request = {"command": command, "env": {**env}, "cwd": folder, "standard": [1, 2]}
    return _fork(_brokers(), request, [stdout, stdout, descriptor])


def run(command, *, env, standard, folder=str(ROOT)):
    """Start a Python program; ``standard`` is its stdin, stdout and stderr."""
    request = {"command": [*command], "env": {**env}, "cwd": folder, "standard": [0, 1, 2]}
    return _fork(_brokers(), request, [*standard])


def kernels(command, *, env, stdin=None, stdout=None, stderr=None, cwd=None, **options):
    """Start a kernel as :class:`subprocess.Popen` does; fork it if possible, or execute it."""
    guarded = _guarded(env)
    plain = all(env.get(name) == os.environ.get(name) for name in _LOADER)
    python, *rest = command
    forkable = python in kernel_pythons and rest[:2] == ["-m", "ipykernel_launcher"]
    if not forkable or not (guarded or plain):
        return subprocess.Popen(
            command, env=env, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, **options
        )
    request = {"command": command, "env": env, "cwd": str(cwd or Path.cwd()), "standard": [0, 1, 2]}
    nothing = open(os.devnull, "rb")  # noqa: SIM115
    outputs = [number if given is None else given for number, given in ((1, stdout), (2, stderr))]
    try:
        process = _fork(_kernels(python, guarded), request, [nothing.fileno(), *outputs])
    except BaseException:
        nothing.close()
        raise
    process.stdin = nothing
    return process


def jupyter_server(command, *, env, log, folder=str(ROOT)):
    """Start a Jupyter Server that logs into the file ``log``; execute it if it cannot be forked."""
    plain = all(env.get(name) == os.environ.get(name) for name in _LOADER)
    if command[:3] != [sys.executable, "-m", "jupyter_server"] or not plain:
        return subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder
        )
    request = {"command": command, "env": {**env}, "cwd": folder, "standard": [0, 1, 2]}
    with open(os.devnull, "rb") as nothing:
        streams = [nothing.fileno(), log.fileno(), log.fileno()]
        return _fork(_server("servers", "servers"), request, streams)


def command(words, *, env, standard, folder=str(ROOT)):
    """Start ``jupyter gpupool words...`` with these three standard streams."""
    assert all(env.get(name) == os.environ.get(name) for name in _LOADER), "read at the start only"
    line = [sys.executable, "-m", "jupyter_gpupool.cli", *words]
    request = {"command": line, "env": {**env}, "cwd": folder, "standard": [0, 1, 2]}
    return _fork(_server("commands", "commands"), request, [*standard])


def program(module, *, env):
    """Start ``python -m module`` with pipes for text; execute it if it cannot be forked."""
    command = [sys.executable, "-m", module]
    guarded = _guarded(env)
    if not guarded and (_guard(env) or not can_run(command, env)):
        return subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
    request = {"command": command, "env": {**env}, "cwd": str(ROOT), "standard": [0, 1, 2]}
    stdin, ours = os.pipe()
    read, stdout = os.pipe()
    streams = open(ours, "w"), open(read)  # noqa: SIM115
    try:
        process = _fork(_programs(guarded), request, [stdin, stdout, 2])
    except BaseException:
        for stream in streams:
            stream.close()
        raise
    finally:
        os.close(stdin)
        os.close(stdout)
    process.stdin, process.stdout = streams
    return process


def _guarded(env):
    """Return whether the dynamic loader would load the guard in front of the emulated driver."""
    loaded = _guard(env)
    folder, *rest = env.get("LD_LIBRARY_PATH", "").split(":")
    return (
        rest == [EMULATED]
        and loaded == [f"{folder}/{install.LIBRARIES[0]}"]
        and os.path.samefile(loaded[0], install.library())  # noqa: PTH121
    )


def can_run(command, env):
    """Return whether a forked process can run this command as an executed process would.

    A forked process finds the server's driver, which is the emulated one. So the command's
    environment must name the emulated driver.
    """
    driver = env.get("LD_LIBRARY_PATH", "").split(":")[len(_guard(env)) :]
    return command[0] == sys.executable and driver == [EMULATED]


def parent():
    """Return the pid of the server that forks brokers; the server is their parent."""
    return _brokers().pid


def _fork(server, request, descriptors):
    ours, its = os.pipe()
    try:
        try:
            server.fork(request, [*descriptors, its])
        finally:
            os.close(its)
        pid = int.from_bytes(os.read(ours, _PID), "big") or server.fail()
        return Forked(server, pid, ours)
    except BaseException:
        os.close(ours)
        raise


# ---------------------------------------------------------------------- the server


def _listen(path, ready):
    """Return the listening socket, and report to the process that started this server."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    listener.bind(str(path))
    listener.listen(64)
    os.write(ready, b"1")
    os.close(ready)
    return listener


def _serve(path, listener):
    """Fork a process for each request. Return only in a forked process, with its request.

    The server ends when its last connection is closed.
    """
    statuses = {}  # pid -> the pipe for the exit status
    clients = []
    wake, waker = socket.socketpair()
    for end in (wake, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno())
    while True:
        readable, _, _ = select.select([listener, wake, *clients], [], [])
        if wake in readable:
            with suppress(BlockingIOError):
                wake.recv(4096)
            _report(statuses)
        if listener in readable:
            clients.append(listener.accept()[0])
        for client in [client for client in clients if client in readable]:
            data, given, flags, _ = socket.recv_fds(client, _LONGEST, _DESCRIPTORS)
            if not data:
                clients.remove(client)
                client.close()
                if not clients:
                    clients += _last(path, listener)
                continue
            assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC), flags
            request = json.loads(data)
            ready, its = os.pipe()
            pid = os.fork()
            if not pid:
                os.setsid()  # now: no other process knows the pid and can ask for its group
                os.close(its)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (listener, wake, waker, *clients):
                    end.close()
                for status in (*statuses.values(), ready, given.pop()):
                    os.close(status)
                return request, given
            os.close(its)
            os.read(ready, 1)
            *others, status = given
            for descriptor in (ready, *others):
                os.close(descriptor)
            statuses[pid] = status
            _tell(status, pid.to_bytes(_PID, "big"))


def _last(path, listener):
    """Return the connection of a process that is just connecting. If none is, end this server."""
    with path.with_suffix(".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process connects
            return [_accepted(listener)]
        with suppress(BlockingIOError):
            return [listener.accept()[0]]
        path.unlink()
        os._exit(0)


def _accepted(listener):
    select.select([listener], [], [])
    return listener.accept()[0]


def _report(statuses):
    """Write the exit status of each forked process that has ended."""
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pipe = statuses.pop(pid)
        _tell(pipe, b"%d" % os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _tell(pipe, data):
    with suppress(BrokenPipeError):  # nobody reads the pipe after a test has dropped its broker
        os.write(pipe, data)


def _become(request, given):
    """Give this process the streams, the command line and the environment of its request."""
    for number in request["standard"]:
        descriptor = given.pop(0)
        os.dup2(descriptor, number)
        os.close(descriptor)
    command = request["command"]
    if sys.argv[3] in ("kernels", "servers", "commands"):
        _search(request["cwd"], request["env"])
    for descriptor in given:
        os.set_inheritable(descriptor, True)
        command = [word.replace(DESCRIPTOR, str(descriptor)) for word in command]
    _rename(command, request["env"], request["cwd"])
    return command


def _run(command):
    """Run a module as ``python -m`` does, or a script."""
    if command[1] == "-m":
        sys.argv[1:] = command[3:]
        subprocess.Popen = _Popen
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        _load_guard(os.environ)
        sys.argv[:] = command[1:]
        sys.path[0] = str(Path(command[1]).parent)
        for name in command[1:]:  # the program's module may be imported already
            sys.modules.pop(name, None)
        runpy.run_path(command[1], run_name="__main__")


def _end(code):
    """End this process as Python does, but do not free its objects.

    To free its objects, Python would write to each memory page that this process shares with the
    server. The page faults would take 15 to 40 ms. The exit handlers of the libraries still run,
    including those of the guard and the driver.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except OSError:
        sys.exit(code)  # Python changes the exit code, because it cannot flush either
    ctypes.PyDLL(None).exit(code)


def _search(folder, env):
    """Set ``sys.path`` as in a process that starts with this folder and environment."""
    own = os.environ["PYTHONPATH"].split(":")
    given = filter(None, env.get("PYTHONPATH", "").split(":"))
    installed = (entry for entry in sys.path[1:] if entry not in own)
    # ``installed`` lacks ROOT, because ROOT is in the server's own PYTHONPATH. Add ROOT, because
    # the package in ROOT is installed.
    sys.path[:] = dict.fromkeys([folder, *given, *installed, str(ROOT)])


def _rename(command, env, folder):
    """Give this process a command line, an environment and a working folder, also for /proc."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    if "EMUCUDA_MACHINE" in env and importlib.util.find_spec("_emucuda_pytorch"):
        importlib.import_module("_emucuda_pytorch")  # as emucuda.pth does when Python starts
    sys.orig_argv[:] = command
    where = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    _write(command, *map(int, where[:2]))
    _write([f"{name}={value}" for name, value in env.items()], *map(int, where[2:]))


def _write(words, begin, end):
    """Overwrite the bytes in which /proc finds this process's arguments or its variables."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


# ---------------------------------------------------------------------- a broker's children


class _Popen(subprocess.Popen):
    """Forks a broker's child if a forked process can run it; executes every other process."""

    def _execute_child(self, args, *rest):
        names = signature(super()._execute_child).parameters
        given = dict(zip(names, (args, *rest), strict=True))
        env = given["env"] or os.environ
        if [*args[1:2]] != [str(child.SCRIPT)] or not can_run(args, env):
            super()._execute_child(args, *rest)
            return
        self.pid = os.fork()
        if not self.pid:
            _run_child(args, env, given["cwd"], given["p2cread"], given["c2pwrite"])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[end] for end in ends))


def _guard(env):
    """Return the libraries in ``LD_PRELOAD``, which the dynamic loader loads before a program."""
    return env.get("LD_PRELOAD", "").split()


def _load_guard(env):
    """Load the libraries in ``LD_PRELOAD``, such as the self-test's guard, as the loader would."""
    for library in _guard(env):
        ctypes.CDLL(library, os.RTLD_GLOBAL | os.RTLD_NOW)


def _run_child(command, env, folder, stdin, stdout):
    """Run a broker's child program in this newly forked process, then end the process."""
    code = 1
    try:
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        asyncio.events._set_running_loop(None)
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.setsid()
        _rename(command, env, folder)
        _load_guard(env)
        sys.argv[:] = command[1:]
        sys.modules.pop(command[2], None)
        child.main()
        code = 0
    except BaseException:  # no exception may reach the broker's code above
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    import gc

    place = Path(sys.argv[1])
    heard = _listen(place, int(sys.argv[2]))
    for name in _IMPORTS[sys.argv[3]]:
        with suppress(ImportError):  # the forked broker reports that NVIDIA's packages are missing
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to pages that all brokers share
    line = _become(*_serve(place, heard))
    code = 0
    try:
        _run(line)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise  # the code is a text, which Python prints
        code = end.code or 0
    _end(code)
