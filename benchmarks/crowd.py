# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Small processes that act as sessions of a broker and take a slice on command. Not a benchmark."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from jupyter_gpupool.client import Client
from jupyter_gpupool.protocol import Message

_PR_SET_PDEATHSIG = 1


class Member:
    """A forked process that acts as a session. Create all members before any thread starts."""

    def __init__(self) -> None:
        parent = os.getpid()
        reading, self._tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                # The child also ends if its parent is killed.
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                os.close(self._tell)
                if os.getppid() == parent:
                    _serve(reading)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(reading)
        self.session = ""
        #: Whether the process holds a slice or waits for one.
        self.wants = False

    def join(self, client: Client, socket: Path, label: str) -> None:
        """Make the process a session of the broker."""
        opened = client.call("open", kernel_id=f"bench-{label}", label=f"{label}.ipynb", request={})
        self.session = opened["session"]
        client.call("launched", session=self.session, pid=self.pid)
        self._say(f"{socket} {self.session} {opened['token']}")

    def take(self) -> None:
        """Ask for a slice, wait for it, and keep it."""
        self.wants = True
        self._say("take")

    def leave(self) -> None:
        """Give the slice back at once, or stop waiting."""
        self.wants = False
        self._say("leave")

    def _say(self, line: str) -> None:
        os.write(self._tell, line.encode() + b"\n")

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._tell)


def _serve(commands: int) -> None:
    made: list[Client] = []

    def pushed(message: Message) -> None:
        if message["type"] == "yield":
            made[0].send("yielded", epoch=message["epoch"], yielded=True, cuda=False)

    with os.fdopen(commands) as lines:
        socket, session, token = lines.readline().split()
        made.append(Client(socket, on_push=pushed))
        client = made[0]
        client.call("hello", session=session, token=token, cuda=False)
        for line in lines:
            if line == "take\n":
                client.start("hold", hold="cell", kind="cell", wait=True)
            else:
                client.start("cancel", hold="cell")  # after the grant, this drops the hold
                client.start("release")


def settle(client: Client, wanted: dict[str, set[str]], seconds: float = 60) -> dict[str, Any]:
    """Wait until each session is in one of its ``wanted`` states; return the broker's status."""
    deadline = time.monotonic() + seconds
    while True:
        status = client.call("status")
        states = {session["id"]: session["state"] for session in status["sessions"]}
        if all(states.get(name) in allowed for name, allowed in wanted.items()):
            return status
        if time.monotonic() > deadline:
            raise TimeoutError(f"the sessions did not come to rest: {states}")
        time.sleep(0.05)
