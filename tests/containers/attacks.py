# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attacks by a hostile container. This program runs inside it, with the standard library only.

Run ``python attacks.py KIND...``, with ``attack.py`` of the benchmarks in the same folder. Each
kind of attack runs in its own process. The program prints "ready". It then reads a line of JSON:
what the attacker knows about another user's session. A second line ends the attacks. The program
then writes one line of JSON for each kind: the broker's answers by code, and everything that the
attack has reached.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

import attack

#: The layout of a page, see ``guard/src/page.h``.
HEADER, SLOTS, SLOT = 4096, 256, 256
SIZE = HEADER + SLOTS * SLOT

#: An attack lasts at most this many seconds.
LONGEST = 600.0

#: This attack reads the lines of standard input itself.
QUEUE = "queue"

#: The number of sessions of an attack that needs several sessions.
MANY = 8


class Over(Exception):
    """The attack's time ended while the attack opened a connection."""


class Session:
    """A session of the attacker, its page, and a process that does nothing."""

    def __init__(self, attacker, **fields):
        self.attacker = attacker
        opened = {}
        while "session" not in opened:  # other attacks of this user may have used up its budget
            self.server = attacker.dial()
            opened = attacker.ask(self.server, "open", kernel_id="k", attach="lazy", **fields)
        self.who = {"session": opened["session"], "token": opened["token"]}
        self.child = os.fork()
        while not self.child:
            signal.pause()
        attacker.ask(self.server, "launched", session=self.who["session"], pid=self.child)
        with attacker.dial() as connection:
            connection.sendall(attack.line("page", id=1, **self.who))
            _, (self.page,), _, _ = socket.recv_fds(connection, 1 << 16, 1)
        self.start_time = int(
            Path(f"/proc/{self.child}/stat").read_text().rpartition(")")[2].split()[19]
        )

    def ask(self, kind, **fields):
        """Send a request as a process of the session, on a new connection."""
        self.attacker.ask_once(kind, **self.who, **fields)

    def slot(self, number, pid, start_time, *, inflight=0, flags=3, pins=0, used=0):
        """Write a process into a slot of the page."""
        data = struct.pack("<IIQIIIIQ", 1, pid, start_time, inflight, 0, flags, pins, used)
        os.pwrite(self.page, data, HEADER + number * SLOT)

    def use(self, inflight=1):
        """Write into the page as a process does whose call has passed the gate.

        With ``inflight=0``, the call has returned.
        """
        os.pwrite(self.page, b"\0", 8)  # the gate is open
        self.slot(0, self.child, self.start_time, inflight=inflight)

    def close(self):
        os.kill(self.child, signal.SIGKILL)
        os.waitpid(self.child, 0)
        os.close(self.page)
        self.server.close()


class Hostile(attack.Attack):
    """Attacks that need a container, or another user's session."""

    def __init__(self, path, victim):
        super().__init__(path, LONGEST)
        self.victim = victim
        #: ``told``: whether the signal to end has come. ``first``: whether the attack is in its
        #: first round. An attack always completes its first round.
        self.told = self.first = False
        #: What the attack has reached. This list must stay empty.
        self.reached = []

    def refused(self):
        """Send requests that the pool refuses, with names of other users and
        control codes for a terminal.
        """
        forged = {"owner": "ada", "user": "ada", "uid": 0, "label": "\x1b[2J\ud800" + "x" * 150}
        self.flood(attack.line("open", id=1, kernel_id="../" * 60,
                               request={"memory": 1 << 50}, **forged) * 20)  # fmt: skip

    def guesses(self):
        """Send requests for the victim's session with a guessed token, each on a new connection."""
        names = {"session": self.victim["session"], "token": "guessed"}
        fields = {"hello": {}, "attach": {}, "home": {}, "page": {},
                  "land": {"step": "begin"}, "grow": {"device": 0, "bytes": 1}}  # fmt: skip
        for _ in self.rounds():
            for kind, more in fields.items():
                self.try_once(kind, **names, **more)

    def stolen(self):
        """Use another user's session with its true token, and try requests that need no token."""
        names = {"session": self.victim["session"]}
        secret = {**names, "token": self.victim["token"]}
        for _ in self.rounds():
            for kind in ("hello", "attach", "home", "page"):
                self.try_once(kind, **secret)
            for kind, more in {"close": {}, "release": {}, "end": {}, "retire": {},
                               "keep": {"seconds": 60}, "request": {"memory": 1},
                               "prioritise": {"priority": "batch"},
                               "launched": {"pid": os.getpid()}}.items():  # fmt: skip
                self.try_once(kind, **names, **more)

    @property
    def over(self):
        return not self.first and (self.told or super().over)

    def connect(self, *, wait=True):
        made = super().connect(wait=wait)
        if made is not None:
            made.settimeout(60)  # a slow machine answers late
        return made

    def rounds(self):
        """Yield once for each round of the attack, until the attack ends.

        The first round always runs. On a slow machine, the time of the attack may end before the
        first round begins.
        """
        self.first = True
        yield
        self.first = False
        while not self.over:
            yield

    def try_once(self, kind, **fields):
        """Send a request on a new connection.

        If the broker accepts the request, the attack has reached the victim.
        """
        answer = self.ask_once(kind, **fields)
        if answer and "code" not in answer:
            self.reached.append(kind)

    def ask_once(self, kind, **fields):
        """Return the answer to a request on a new connection; {} if there is no answer."""
        with contextlib.suppress(OSError), self.dial() as made:
            return self.ask(made, kind, **fields)
        return {}

    def dial(self):
        """Return a connection, or end the attack when its time is over."""
        made = self.connect()
        if made is None:
            raise Over
        return made

    def descriptors(self):
        """Send requests with 250 open files each, about the most that one message can carry."""
        files = [os.open("/dev/null", os.O_RDONLY)] * 250
        made = self.dial()
        while not self.over:
            try:
                socket.send_fds(made, [attack.line("ping", id=1)], files)
                self.sent += len(files)
                made.recv(1 << 16)
            except OSError:
                made.close()
                made = self.dial()

    def unread_pages(self):
        """Request the attacker's page again and again. Read the answers only at the end."""
        session = Session(self)
        made = [one for _ in range(20) if (one := self.connect())]
        while not self.over:
            for one in made:
                one.setblocking(False)
                with contextlib.suppress(OSError):
                    self.sent += one.send(attack.line("page", id=1, **session.who))
            time.sleep(0.005)  # without this pause, the process takes a whole core
        for one in made:
            kept = 0
            with contextlib.suppress(OSError):
                while True:
                    data, found, _, _ = socket.recv_fds(one, 1 << 16, 64)
                    for descriptor in found:
                        os.close(descriptor)
                    kept += len(found)
                    if not data:
                        break
            if kept > 1:
                self.reached.append(f"{kept} files of the broker waited in one connection")
        session.close()

    def damage(self):
        """Damage the attacker's page in many ways. Make the broker read each damaged page.

        The session of a damaged page has a slice.
        """
        ways = {
            "noise": lambda f: os.pwrite(f, os.urandom(SIZE), 0),
            "ones": lambda f: os.pwrite(f, b"\xff" * SIZE, 0),
            "noise in the slots": lambda f: os.pwrite(f, os.urandom(SIZE - HEADER), HEADER),
            "ones in the slots": lambda f: os.pwrite(f, b"\xff" * (SIZE - HEADER), HEADER),
            "empty": lambda f: os.ftruncate(f, 0),
            "short": lambda f: os.ftruncate(f, HEADER + 100),
            "long": lambda f: os.ftruncate(f, 1 << 40),
            "another version": lambda f: os.pwrite(f, struct.pack("<I", 99), 4),
            "many devices": lambda f: os.pwrite(f, struct.pack("<I", 1 << 31), 12),
            "append": lambda f: fcntl.fcntl(f, fcntl.F_SETFL, os.O_APPEND),
            "a file lease": lambda f: fcntl.fcntl(f, 1024, fcntl.F_WRLCK),  # F_SETLEASE
        }
        for _ in self.rounds():
            for change in ways.values():
                session = Session(self)
                session.ask("attach")
                session.use(0)
                with contextlib.suppress(OSError):
                    change(session.page)
                session.ask("grow", device=0, bytes=1 << 20)
                session.ask("home")
                self.ask_once("status")
                session.close()

    def false_processes(self):
        """Write processes that do not exist, and the victim's process, into the attacker's pages.

        The pages change before each check by the broker.
        """
        sessions = [Session(self, request={"memory": 40 << 20}) for _ in range(MANY)]
        for session in sessions:
            session.ask("attach")
        number = 1 << 20
        while not self.over:
            for session in sessions:
                session.use()
                for slot in range(1, 40):
                    number += 1
                    session.slot(slot, number % (1 << 22), number, pins=15, used=1 << 40)
                session.slot(40, self.victim["pid"], self.victim["start_time"], inflight=1)
            time.sleep(0.05)  # the pages change more often than the broker reads them
        for session in sessions:
            session.close()

    def names_victim(self):
        """Start processes whose environment says that they belong to the victim's session."""
        children = []
        env = {"GPUPOOL_SESSION": self.victim["session"], "GPUPOOL_TOKEN": self.victim["token"]}
        for _ in range(30):
            child = os.fork()
            if not child:
                os.execve("/bin/sleep", ["sleep", "600"], env)
            children.append(child)
            self.sent += 1
        self.rest()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def reads(self):
        """Search all files and processes that the container shows for the other user's secret."""
        place = Path(self.path).parent
        secret = self.victim["secret"].encode()
        for _ in self.rounds():
            files = [*place.rglob("*"), *Path("/dev/shm").rglob("*"), *Path("/tmp").rglob("*")]
            for process in Path("/proc").glob("[0-9]*"):
                files += [process / name for name in ("environ", "cmdline", "maps")]
            for above in ("..", "../..", "../users", "../broker.sock.pages", "../users/ada"):
                files += [*(place / above).glob("*.page"), *(place / above).glob("broker.sock*")]
            for file in files:
                with contextlib.suppress(OSError):
                    if file.is_file() and file.stat().st_size < 1 << 20:
                        self.reached += [str(file)] * (secret in file.read_bytes())
            for kind in ("status", "journal", "hour"):
                answer = self.ask_once(kind)
                self.reached += [kind] * (secret in json.dumps(answer).encode())

    def queue(self):
        """Hold both GPUs with calls that do not end, and let more sessions wait for a GPU.

        When a line arrives on standard input, release one GPU.
        """
        sessions = [Session(self, request={"memory": 450 << 20}) for _ in range(MANY)]
        asking = []
        for session in sessions:
            session.slot(0, session.child, session.start_time, inflight=1)
            asking.append(self.dial())
            asking[-1].sendall(attack.line("attach", id=1, **session.who))
        for connection in asking[:2]:
            connection.recv(1 << 16)
        print("holds", flush=True)
        sys.stdin.readline()
        sessions[0].slot(0, sessions[0].child, sessions[0].start_time)
        sessions[0].ask("release")
        sys.stdin.readline()


KINDS = {
    name: method
    for name, method in {**vars(attack.Attack), **vars(Hostile)}.items()
    if callable(method)
    and name[0] != "_"
    and name
    not in ("connect", "ask", "flood", "ask_once", "try_once", "dial", "rounds", "rest", "over")
}


def run(kind, victim):
    """Attack until SIGUSR1; print the answers, and what the attack has reached."""
    one = Hostile(os.environ["GPUPOOL_SOCKET"], victim)
    signal.signal(signal.SIGUSR1, lambda *_: setattr(one, "told", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    with contextlib.suppress(Over):
        KINDS[kind](one)
    seen = {"kind": kind, "sent": one.sent, "codes": Counter(one.codes),
            "reached": sorted({*one.reached})}  # fmt: skip
    os.write(1, json.dumps(seen).encode() + b"\n")


def main():
    print("ready", flush=True)
    victim = json.loads(sys.stdin.readline())
    # Block the signal until a child has set its handler. The child then unblocks the signal.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    children = []
    for kind in sys.argv[1:]:
        child = os.fork()
        if not child:
            code = 1
            try:
                run(kind, victim)
                code = 0
            except BaseException:  # the child must not run the parent's code below
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    if QUEUE not in sys.argv:
        sys.stdin.readline()
        for child in children:
            os.kill(child, signal.SIGUSR1)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, ended)))


if __name__ == "__main__":
    main()
