# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Real brokers, clients and processes for the tests. Each wait has a condition and a time limit."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from jupyter_gpupool.broker.pages.control import SHARED_MEMORY, folder_name
from jupyter_gpupool.broker.store.journal import Row
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import GPUPoolError
from tests.emulated import Faults

from . import forks

MiB = 1 << 20
ROOT = Path(__file__).parents[2]

#: PYTHONPATH of the processes that tests start. Its first folder is for the modules of the tests.
#: ``tests/light/README.md`` describes the modules in its second folder.
PYTHONPATH = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "light")))

#: Two small devices; a context takes memory, as on real GPUs.
MACHINE = "2x512MiB,context=32MiB"

#: The same machine with one device, for tests that need only one. A broker with one device starts
#: in three quarters of the time that a broker with two devices needs.
ONE = "1x512MiB,context=32MiB"
CAPACITY = (512 - 32) * MiB  # each device keeps room for a context
SINGLE = 512 * MiB  # a single device keeps no room for a context

#: Size that a session requests. A device has room for only one session of this size.
BIG = 300 * MiB


#: Seconds that a slow and busy machine may add to a delay that the product promises.
LATE = 25.0

#: The shortest and the longest pause, in seconds, between two checks of a condition. The pauses are
#: not shorter, because nearly every check sends a request to the broker.
LOOK, SELDOM = 0.02, 0.1


def children(broker, module):
    """Return the pids of the broker's child processes that run ``module``."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if (
            parent == broker.process.pid
            and f"devices.nvidia.child_programs\0{module}\0".encode() in command
        ):
            found.append(int(entry.name))
    return found


def wait_until(condition, what, seconds=60.0):
    """Call ``condition`` until its result is true, and return it; fail after ``seconds``."""
    begun = time.monotonic()
    while True:
        result = condition()
        if result:
            return result
        waited = time.monotonic() - begun
        assert waited < seconds, f"not within {seconds} s: {what}"
        time.sleep(min(max(LOOK, waited / 10), SELDOM))


class Raw:
    """A raw socket to the broker, to send what no proper client sends."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def send(self, data):
        self.socket.sendall(data)

    def say(self, **message):
        self.send(json.dumps({"v": 1, **message}).encode() + b"\n")

    def read(self):
        """Return the next message; None at the end of the connection."""
        try:
            line = self.file.readline()
        except ConnectionResetError:
            return None
        return json.loads(line) if line else None

    def read_all(self):
        """Return all messages until the broker closes the connection."""
        found = []
        while (message := self.read()) is not None:
            found.append(message)
        return found

    def close(self):
        self.file.close()
        self.socket.close()


class Broker:
    """A broker process with its own folder. A test may kill it and start it there again."""

    module = "jupyter_gpupool.broker"

    #: More environment variables, for a broker module of the tests.
    variables = {}

    def __init__(self, folder, **config):
        self.folder = Path(folder)
        self.socket = self.folder / "broker.sock"
        self.log = self.folder / "broker.log"
        self.config_file = self.folder / "config.json"
        self.process = None
        #: The broker's pid, and the number of the journal's last row, when the current test began.
        self._pid = None
        self._after = 0
        #: True if no other test may use this broker, even if its status looks like new.
        self.disturbed = False
        self.configure(**config)

    def begin(self):
        """Begin a test: from now on, ``rows`` skips the journal rows of earlier tests."""
        with self.client() as client:
            self._after = client.call("journal", limit=0)["seq"]
        self._pid = self.process.pid

    def rests(self):
        """End the sessions that are left; return whether this broker is as good as a new one."""
        if self.disturbed or self.process is None or self.process.pid != self._pid:
            return False
        with suppress(AssertionError, GPUPoolError):
            with self.client() as client:
                for session in client.call("status")["sessions"]:
                    client.call("close", session=session["id"])
            wait_until(lambda: as_new(self.status()), "rest", 10)
            return True
        return False

    def configure(self, **config):
        values = {
            "emulate": MACHINE,
            "state_dir": str(self.folder / "state"),
            "default_memory": BIG,
            "idle_timeout": 3600,
            "sample_interval": 0.2,
            "host_memory": "2GiB",
            "linger": 3600,
            "resume_headroom": 0,
            **config,
        }
        # Most tests need slices that do not grow, so the limit of a slice is its size.
        values.setdefault("default_limit", values["default_memory"])
        self.config_file.write_text(json.dumps({"GPUPool": values}))

    def start(self, *, wait=True, env=None):
        """Start the broker. Return its report when it is ready; without ``wait``, return None.

        A test without ``wait`` or with ``env`` is about the start itself. So this method executes
        the broker, as for a user. It forks all other brokers, see ``forks.py``.
        """
        reading, writing = os.pipe()
        arguments = ["--socket", str(self.socket), "--config", str(self.config_file)]
        with self.log.open("ab") as log:
            if wait and env is None:
                self.process = forks.start(
                    self.module, [*arguments, "--ready-fd", forks.DESCRIPTOR],
                    env={**environment(self.folder), **self.variables}, stdout=log.fileno(),
                    descriptor=writing,
                )  # fmt: skip
            else:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", self.module, *arguments, "--ready-fd", str(writing)],
                    stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=(writing,),
                    env=environment(self.folder) if env is None else env, cwd=ROOT,
                )  # fmt: skip
        os.close(writing)
        if not wait:
            os.close(reading)
            return None
        with os.fdopen(reading, "rb") as pipe:
            # On an idle machine, a broker with 64 emulated devices needs 8 s for its self-tests.
            spoke = select.select([pipe], [], [], 180)[0]
            assert spoke, f"no word from the broker: {self.tail()}"
            line = pipe.readline()
        answer = json.loads(line) if line else {"ok": False, "message": self.tail()}
        if not answer["ok"]:
            self.process.wait(60)
            self.process = None
        return answer

    @property
    def started(self):
        """Start the broker; fail if it does not answer."""
        answer = self.start()
        assert answer["ok"], answer
        return self

    def kill(self):
        """Send SIGKILL, as the OOM killer does."""
        self.process.kill()
        self.process.wait(60)
        self.process = None

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        code = self.process.wait(60)
        self.process = None
        return code

    def close(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
        # A killed broker leaves its folder of pages.
        remove(SHARED_MEMORY / folder_name(self.socket))

    def tail(self, size=4000):
        return self.log.read_text()[-size:] if self.log.exists() else ""

    def client(self, **kwargs):
        return Client(self.socket, **kwargs)

    def status(self):
        with self.client() as client:
            return client.call("status")

    def session(self, name):
        """Return a session from the status, or None if there is no such session."""
        return next((s for s in self.status()["sessions"] if s["id"] == name), None)

    def lost_its_journal(self):
        """Note that the broker has a new journal; the numbers of its rows start at 1 again."""
        self._after = 0

    def rows(self, *kinds):
        with self.client() as client:
            rows = client.journal(after=self._after)
        return [row for row in rows if not kinds or row["kind"] in kinds]

    @property
    def faults(self):
        self.disturbed = True
        return Faults(self.folder / "broker.sock.emulated")


def journal_rows(journal):
    """Return the committed rows of a journal, oldest first, read from its file."""
    columns = "seq, time, kind, session, owner, device, bytes, seconds, reason, detail"
    with closing(sqlite3.connect(f"file:{quote(str(journal.path))}?mode=ro", uri=True)) as db:
        found = db.execute(f"SELECT {columns} FROM events ORDER BY seq").fetchall()
    names = columns.split(", ")
    return [Row(**{**dict(zip(names, r, strict=True)), "detail": json.loads(r[9])}) for r in found]


class Kernel:
    """A session and its process, see ``child.py``."""

    module = "tests.broker.child"

    def __init__(self, broker, label="", *, memory=None, launch=True, agent=True, **request):
        self.broker = broker
        self.server = broker.client()
        if memory is not None:
            request["memory"] = memory
        answer = self.server.call(
            "open", kernel_id=f"k-{label}", label=label, request=request, **self.open_fields()
        )
        self.session, self.token, self.env = answer["session"], answer["token"], answer["env"]
        self.process = None
        if launch:
            try:
                self.launch(agent=agent)
            except BaseException:
                self.close()
                raise

    def open_fields(self):
        return {}

    def launch(self, *, agent=True, tell=True):
        self.process = forks.program(
            self.module, env={**environment(self.broker.folder), **self.env}
        )
        self.answer()
        if tell:
            self.server.call("launched", session=self.session, pid=self.process.pid)
        if agent:
            self.do("start")
            wait_until(lambda: self.link()["greeted"], "the agent's hello")

    def tell(self, do, **fields):
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self, seconds=90):
        assert select.select([self.process.stdout], [], [], seconds)[0], "the child is silent"
        line = self.process.stdout.readline()
        assert line, "the child has ended"
        answer = json.loads(line)
        assert "error" not in answer, answer
        return answer["ok"]

    def do(self, do, **fields):
        self.tell(do, **fields)
        return self.answer()

    def refused(self, do, **fields):
        """Send a command that must fail; return the error's code."""
        self.tell(do, **fields)
        assert select.select([self.process.stdout], [], [], 60)[0], "the child is silent"
        return json.loads(self.process.stdout.readline())["code"]

    def link(self):
        return self.do("link")

    def attach(self, hold="cell", **fields):
        """Take a hold, and wait for the slice."""
        self.do("ask", hold=hold, **fields)
        return self.do("got", hold=hold)

    def state(self):
        found = self.broker.session(self.session)
        return found["state"] if found else None

    @property
    def served(self):
        """True if the session has its slice. It is active, or idle after a while without a call."""
        return self.state() in ("active", "idle")

    def wait_state(self, *states, seconds=60):
        wait_until(lambda: self.state() in states, f"{self.session} {states}", seconds)

    def kill(self):
        self.process.kill()
        self.process.wait(60)

    def close(self):
        with suppress(Exception):
            self.server.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process.stdin.close()
            self.process.stdout.close()


def as_new(status):
    """Return whether the pool is like new: no session, no memory in use, and no problem."""
    return (
        not status["sessions"]
        and not status["host"]["used_bytes"]
        and not status["broker"]["journal_problem"]
        and all(
            d["can_suspend"]
            and not d["drained_reason"]
            and not d["memory_used"]  # None without sessions: the broker takes no samples then
            and d["memory_granted"] == d["memory_foreign"] == 0
            for d in status["devices"]
        )
    )


def environment(folder):
    """Return environment variables that hide the configuration of this machine and its user."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("GPUPOOL_", "JUPYTER_"))}
    return {
        **kept,
        "PYTHONPATH": PYTHONPATH,
        "JUPYTER_CONFIG_DIR": str(Path(folder) / "no-config"),
        "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_PREFER_ENV_PATH": "0",
    }


def short_folder():
    """Return a new folder with a name short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix="gpb-", dir="/tmp"))


def remove(folder):
    shutil.rmtree(folder, ignore_errors=True)
