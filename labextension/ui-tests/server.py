# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs a real JupyterLab, a real broker and its neighbours for the browser tests.

A neighbour is another kernel that uses the broker's devices.

Prints one line of JSON when all is ready: the server's ``url``, the ``control`` socket and the
``folder`` that the server serves. The control socket takes one line of JSON per connection,
``{"do": NAME, ...}``, and answers ``{"ok": ...}`` or ``{"error": ...}``; see :class:`Stage`.

This program ends when its standard input ends, so it also ends if the test runner is killed. It
first ends all processes that it has started.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import time
import traceback
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from jupyter_gpupool.client import Client  # noqa: E402
from tests.broker import kit as brokers  # noqa: E402
from tests.cluster import remotes  # noqa: E402
from tests.cluster.identities import has_munge  # noqa: E402
from tests.emulated import Faults  # noqa: E402
from tests.server.kit import as_user, server_environment  # noqa: E402

GiB = 1 << 30

#: The broker's options, with two devices. Each device has room for one notebook of the default size
#: and for a small one. The pictures of the documentation use larger devices
#: (``GPUPOOL_UI_DEVICE``).
POOL = {
    "emulate": f"2x{os.environ.get('GPUPOOL_UI_DEVICE', '8GiB')},context=256MiB,bandwidth=2GiB/s",
    "default_memory": "6GiB",
    "default_limit": "6GiB",
    "max_memory_per_kernel": "7GiB",
    "host_memory": "16GiB",
    "idle_timeout": 3600,
}
if os.environ.get("GPUPOOL_UI_TURNS") == "no":  # the pictures take longer than a time slice
    POOL["preempt"] = ["class", "guarantee", "burst"]

#: The user id of the neighbours. No account has this id. Only root can start processes of another
#: user, so without root it is None.
NEIGHBOUR = 21001 if os.geteuid() == 0 else None

#: The user id of a visitor: a third user, who has a server and is not an admin of the pool. Without
#: root it is None, too.
VISITOR = 21002 if os.geteuid() == 0 else None

_LIBC = ctypes.CDLL(None)
_SET_CHILD_SUBREAPER = 36


class Lab:
    """A server with JupyterLab and Notebook 7 that runs this checkout's built extension."""

    def __init__(self, folder, socket, *options, user=None):
        self.folder = folder
        self.log = folder / "server.log"
        for name in ("files", "runtime", "tmp"):
            (folder / name).mkdir(parents=True)
        # An editable installation has no data files. So create the layout that `pip install`
        # creates.
        extensions = folder / "share/jupyter/labextensions/@jupyter-gpupool"
        extensions.mkdir(parents=True)
        built = Path(os.environ.get("GPUPOOL_LABEXTENSION", ROOT / "jupyter_gpupool/labextension"))
        if not (built / "package.json").exists():
            raise FileNotFoundError(f"{built}: the extension is not built, run jlpm build:prod")
        (extensions / "labextension").symlink_to(built)
        if user is not None:
            for path in (folder, *folder.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)
        environment = {
            **server_environment(folder, socket),
            "JUPYTER_PATH": f"{folder}/share/jupyter:{ROOT}/share/jupyter",
            "JUPYTERLAB_GALATA_ROOT_DIR": str(folder / "files"),
            "TMPDIR": str(folder / "tmp"),
            # Galata's configuration asks for the user's name. An id without an account has no name,
            # so LOGNAME gives one.
            **({} if user is None else {"LOGNAME": f"uid-{user}"}),
        }
        command = [
            *([] if user is None else as_user(user)),
            *(sys.executable, "-m", "jupyterlab", f"--config={HERE / 'jupyter_server_config.py'}"),
            *([] if os.geteuid() or user is not None else ["--allow-root"]),
            *options,
        ]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=folder,
                env=environment, start_new_session=True,
            )  # fmt: skip

    def url(self):
        """Wait until the server is ready; return its URL."""

        def told():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            for path in (self.folder / "runtime").glob(f"jpserver-{self.process.pid}.json"):
                with suppress(ValueError):
                    return json.loads(path.read_text())["url"].rstrip("/")
            return None

        return brokers.wait_until(told, "the server's own file", 90)

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(15)


class Neighbour(brokers.Kernel):
    """A kernel of the user with the id ``user``.

    If this process does not run as root, the kernel belongs to the user of this process.
    """

    def __init__(self, broker, label, user=NEIGHBOUR, **request):
        self.user = user if NEIGHBOUR is not None else None
        super().__init__(_Door(broker, self.user), label, launch=False, **request)
        self.broker = broker

    def launch(self):
        command = [sys.executable, "-m", self.module]
        if self.user is not None:
            command = [*as_user(self.user), *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**brokers.environment(self.broker.folder), **self.env},
        )  # fmt: skip
        self.answer()
        self.server.call("launched", session=self.session, pid=self.process.pid)
        self.do("start")
        brokers.wait_until(lambda: self.link()["greeted"], "the agent's hello")


class _Door:
    """Connects to the broker as a neighbour's user."""

    def __init__(self, broker, user):
        self.folder, self.socket, self.user = broker.folder, broker.socket, user

    def client(self):
        with _as(self.user):
            return Client(self.socket)


@contextmanager
def _as(user):
    """Set the effective user id to ``user`` in this block, so that the broker sees this user."""
    if user is None:
        yield
        return
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


class Stage:
    """Runs the tests' commands.

    ``do_NAME`` gets the fields of command NAME, and returns values that JSON can contain.
    """

    def __init__(self):
        self.folder = brokers.short_folder()
        self.folder.chmod(0o755)  # the neighbours run as other users
        self.broker = brokers.Broker(self.folder, **POOL)
        if NEIGHBOUR is not None:
            self.broker.socket = Path("/run") / self.folder.name / "broker.sock"
        self.labs = []
        self.neighbours = {}
        #: The two machines of a cluster; None until a test asks for them. ``_machines`` ends them.
        self.cluster = None
        self._machines = ExitStack()
        self._lock = threading.RLock()

    def open(self):
        lab = self._lab("lab", *self._options())
        assert self.broker.start()["ok"]
        return {"url": lab.url(), "folder": str(lab.folder / "files")}

    def _options(self):
        # Give the server the same configuration as the broker. If the two differed, the panel would
        # show a notice.
        options = json.loads(self.broker.config_file.read_text())["GPUPool"]
        pairs = [
            (name, value)
            for name, given in options.items()
            for value in (given if isinstance(given, list) else [given])
        ]
        return (
            *(f"--GPUPool.{name}={value}" for name, value in pairs),
            "--GPUPoolExtension.slow_resume=0",
            "--GPUPoolExtension.idle_warning=8",
        )

    def _lab(self, name, *options, socket=None, user=None):
        lab = Lab(self.folder / name, socket or self.broker.socket, *options, user=user)
        self.labs.append(lab)
        return lab

    # ------------------------------------------------------------------ the broker

    def do_kill(self):
        """Kill the broker as the OOM killer would."""
        if self.broker.process is not None:
            self.broker.kill()

    def do_start(self, **config):
        """Start the broker, with these options in place of those in ``POOL``."""
        self.broker.configure(**{**POOL, **config})
        answer = self.broker.start()
        assert answer["ok"], answer

    def do_options(self, **config):
        """Change options of the running broker."""
        self.broker.configure(**{**POOL, **config})
        before = self._reloads()
        self.broker.process.send_signal(signal.SIGHUP)
        brokers.wait_until(lambda: self._reloads() > before, "the new options")

    def _reloads(self):
        return len(self.broker.rows("config"))

    def do_maintain(self, action, device="", reason=""):
        """Give an admin's order, about one device or all: pause, drain or resume."""
        with self.broker.client() as client:
            client.call("maintain", action=action, device=device, reason=reason, timeout=60)

    def do_status(self):
        return self.broker.status()

    def do_why(self, name):
        """Return what ``jupyter gpupool why`` prints about a session, as data."""
        return json.loads(self._command("why", "--json", name))

    def do_picture(self):
        """Return what ``jupyter gpupool status`` prints."""
        return self._command("status")

    def _command(self, *words):
        command = [sys.executable, "-m", "jupyter_gpupool.cli", *words]
        done = subprocess.run(
            [*command, "--socket", str(self.broker.socket)], capture_output=True, text=True,
            cwd=ROOT, env={**brokers.environment(self.folder), "COLUMNS": "200"}, timeout=60,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    def do_rows(self, kinds=()):
        return self.broker.rows(*kinds)

    def do_fresh(self, **config):
        """End the broker and the neighbours; start a broker with these options and no sessions."""
        for name in list(self.neighbours):
            self.do_leave(name)
        self.do_kill()
        brokers.remove(self.folder / "state")
        brokers.remove(self._emulated)
        self.do_start(**config)

    @property
    def _emulated(self):
        return self.broker.socket.with_name(self.broker.socket.name + ".emulated")

    def do_fault(self, name, **params):
        """Set a fault of the emulated driver, such as slow copies, until the next ``fresh``."""
        Faults(self._emulated).set(name, **params)

    # ------------------------------------------------------------------ neighbours

    def do_neighbour(self, name, gib=6, hold=True, alloc=0, **request):
        """Start a neighbour that requests ``gib`` GiB; with ``hold``, it attaches and computes."""
        found = Neighbour(self.broker, name, memory=int(gib * GiB), **request)
        self.neighbours[name] = found
        found.launch()
        if hold:
            found.attach()
            if alloc:
                found.do("alloc", bytes=int(alloc * GiB), byte=7)
        return found.session

    def do_asks(self, name):
        """Let a neighbour ask for its slice and wait."""
        self.neighbours[name].do("ask", hold="cell")

    def do_rests(self, name):
        """Let a neighbour end its work."""
        self.neighbours[name].do("drop", hold="cell")

    def do_leave(self, name):
        """End a neighbour."""
        self.neighbours.pop(name).close()

    # ------------------------------------------------------------------ servers

    def do_lab_without_gpu(self):
        """Start a server on a machine without a driver; return its address."""
        options = ("--GPUPoolProvisioner.memory=1GiB",)
        return self._lab(f"bare{len(self.labs)}", *options, socket=self.folder / "bare.sock").url()

    def do_lab_of_visitor(self):
        """Start a server of a user who is no admin of the pool; return its address and folder."""
        lab = self._lab(f"visitor{len(self.labs)}", *self._options(), user=VISITOR)
        return {"url": lab.url(), "folder": str(lab.folder / "files")}

    # ------------------------------------------------------------------ two machines

    def do_lab_in_cluster(self):
        """Start two machines, m0 and m1, and a server on m0.

        The server's kernels start on m1, because m1 has more free memory.

        Return the server's address and folder, or None if MUNGE is missing.
        """
        if not has_munge():
            return None
        self.cluster = self._machines.enter_context(remotes.identified(remotes.Pair))
        self.cluster.wait_serving()
        self.do_fill("m0")
        folder = self.folder / "far"
        # ``Lab`` puts this folder into JUPYTER_PATH, which Jupyter searches before the user's own
        # folder.
        remotes.write_remote_kernelspec(folder / "share/jupyter", memory="200MiB")
        socket = self.cluster.brokers["m0"].socket
        user = remotes.USER if remotes.ROOTS else None
        self.labs.append(lab := Lab(folder, socket, user=user))
        return {"url": lab.url(), "folder": str(lab.folder / "files")}

    def do_fill(self, machine):
        """Fill a machine with a kernel of 900 MiB, and wait until the ledger knows it.

        The kernel of the previous call ends first.
        """
        self.cluster.end_kernels()
        kernel = brokers.Kernel(self.cluster.brokers[machine], memory=900 << 20)
        self.cluster.kernels.append(kernel)
        kernel.attach()
        brokers.wait_until(lambda: self._emptiest() != machine, "the ledger to know it")

    def _emptiest(self):
        """Return the name of the machine with the most free memory, by the ledger's figures."""
        nodes = self.cluster.order()["nodes"]
        return max(nodes, key=lambda node: node["summary"]["free"])["name"]

    def do_machine(self, name):
        """Return the status that the broker of a machine reports."""
        return self.cluster.brokers[name].status()

    def do_silence(self, name, ends=False):
        """Kill the cluster agent of a machine; with ``ends``, start the killed agent again."""
        agent = self.cluster.agents[name]
        agent.start() if ends else agent.kill()

    def do_log(self):
        """Return the logs and the journal's last rows, to find the cause of a failure."""
        texts = [lab.log.read_text()[-6000:] for lab in self.labs]
        with suppress(Exception):  # the broker may be away
            texts += [json.dumps(row) for row in self.broker.rows()[-60:]]
        return "\n".join([*texts, self.broker.tail()])

    # ------------------------------------------------------------------ requests, and the end

    def answer(self, line):
        """Return the answer to a line of the control socket."""
        try:
            command = json.loads(line)
            method = getattr(self, "do_" + command.pop("do"))
            with self._lock:
                return {"ok": method(**command)}
        except Exception:
            return {"error": traceback.format_exc()}

    def end(self):
        for neighbour in self.neighbours.values():
            neighbour.close()
        for lab in self.labs:
            lab.end()
        self._machines.close()
        self.broker.close()
        kill_descendants()
        brokers.remove(self.folder)
        if NEIGHBOUR is not None:
            brokers.remove(self.broker.socket.parent)


def kill_descendants():
    """Kill all remaining processes.

    ``main`` makes this process a subreaper: it becomes the parent of its orphaned descendants. So
    these are among our children, too.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = children()
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        time.sleep(0.02)
    raise TimeoutError(f"processes are left: {children()}")


def children():
    path = f"/proc/self/task/{os.getpid()}/children"
    return [int(pid) for pid in Path(path).read_text().split()]


class _Control(socketserver.StreamRequestHandler):
    def handle(self):
        answer = self.server.stage.answer(self.rfile.readline())
        # The client may be gone, because its test has timed out.
        with suppress(BrokenPipeError):
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _ControlServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


def main():
    _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at Ctrl-C, the runner closes our input
    stage = Stage()
    control = stage.folder / "control.sock"
    try:
        ready = stage.open()
        with _ControlServer(str(control), _Control) as server:
            server.stage = stage
            threading.Thread(target=server.serve_forever, daemon=True).start()
            print(json.dumps({**ready, "control": str(control)}), flush=True)
            sys.stdin.read()
            server.shutdown()
    finally:
        stage.end()


if __name__ == "__main__":
    main()
