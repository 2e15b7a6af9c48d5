# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attacks a broker as a hostile user could: it runs one kind of attack for a given time.

``python benchmarks/attack.py SOCKET KIND SECONDS`` needs only the standard library, so any user can
run it. The last line on stdout is a JSON object. It has the bytes that the attack sent and
received, the number of connections that were closed, the number of failed attempts to
connect, and the number of answers with each error code ("ok" counts the answers without an error).
The benchmark ``neighbours`` and its tests use this script. Use it only against your own broker.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from collections import Counter
from typing import Any, Callable

#: Number of connections of a flood.
CONNECTIONS = 32


def line(kind: str, **fields: Any) -> bytes:
    return json.dumps({"v": 1, "type": kind, **fields}).encode() + b"\n"


class Attack:
    """One attacker. It opens connections for ``seconds`` and counts what happens."""

    def __init__(self, path: str, seconds: float) -> None:
        self.path = path
        self.ends = time.monotonic() + seconds
        self.sent = 0
        self.received = 0
        self.closed = 0
        self.failed = 0
        #: Number of answers by error code; "ok" counts the answers without an error.
        self.codes: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.ends

    def rest(self) -> None:
        """Wait until the attack's time is over."""
        while not self.over:
            time.sleep(0.05)

    def connect(self, *, wait: bool = True) -> socket.socket | None:
        """Return a connection or None; with ``wait``, try again until the attack's time is over."""
        while not self.over:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(5)
            try:
                made.connect(self.path)
                return made
            except OSError:
                self.failed += 1
                made.close()
            if not wait:
                break
            time.sleep(0.01)
        return None

    def ask(self, connection: socket.socket, kind: str, **fields: Any) -> dict[str, Any]:
        """Return the answer to one request."""
        connection.sendall(line(kind, id=1, **fields))
        data = b""
        while not data.endswith(b"\n"):
            chunk = connection.recv(1 << 16)
            if not chunk:
                raise ConnectionError("closed")
            data += chunk
        answer: dict[str, Any] = json.loads(data.splitlines()[-1])
        self.codes[answer.get("code", "ok")] += 1
        return answer

    def flood(self, payload: bytes, *, connections: int = CONNECTIONS) -> None:
        """Send ``payload`` repeatedly, read the answers, and replace each closed connection."""
        selector = selectors.DefaultSelector()

        def add() -> None:
            made = self.connect()
            if made is not None:
                made.setblocking(False)
                selector.register(made, selectors.EVENT_READ | selectors.EVENT_WRITE, [b"", b""])

        for _ in range(connections):
            add()
        while not self.over and selector.get_map():
            for key, events in selector.select(0.1):
                connection, state = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                try:
                    if events & selectors.EVENT_READ:
                        data = connection.recv(1 << 18)
                        if not data:
                            raise ConnectionError("closed")
                        self.received += len(data)
                        state[1] = self._look_at(state[1] + data)
                    if events & selectors.EVENT_WRITE:
                        # After a partial send, send the rest of the payload. Otherwise the broker
                        # would get an incomplete line, and that would be a different attack.
                        rest = state[0] or payload
                        count = connection.send(rest)
                        self.sent += count
                        state[0] = rest[count:]
                except BlockingIOError:
                    continue
                except OSError:
                    self.closed += 1
                    selector.unregister(connection)
                    connection.close()
                    add()
        for key in [*selector.get_map().values()]:
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()

    def _look_at(self, data: bytes) -> bytes:
        """Count the complete answers in ``data`` by error code; return the incomplete last line."""
        *lines, rest = data.split(b"\n")
        for text in lines:
            head = text[:200]
            code = head.partition(b'"code":"')[2].partition(b'"')[0].decode() or "ok"
            self.codes[code] += 1
        return rest[:1000]

    # ------------------------------------------------------------------ kinds

    def ping(self) -> None:
        self.flood(line("ping", id=1) * 200)

    def status(self) -> None:
        self.flood(line("status", id=1) * 50)

    def journal(self) -> None:
        self.flood(line("journal", id=1, limit=10000) * 64)

    def journal_of_nobody(self) -> None:
        self.flood(line("journal", id=1, limit=10000, session="nobody") * 64)

    def rubbish(self) -> None:
        """Send invalid requests: numbers that are too long, deep nesting, lines without JSON."""
        self.flood(
            b'{"v":1,"type":"keep","id":1,"session":"x","seconds":' + b"9" * 400 + b"}\n"
            b'{"v":1,"type":"keep","id":1,"session":"x","seconds":1e999}\n'
            b'{"v":1,"type":"hold","id":1,"hold":' + b"[" * 5000 + b"\n"
            b"no JSON\n"
        )  # fmt: skip

    def refused(self) -> None:
        """Send requests that the pool refuses, to try to fill the journal with refusals."""
        self.flood(line("open", id=1, kernel_id="k", request={"memory": 1 << 50}) * 20)

    def acts(self) -> None:
        """Send ``yielded`` and ``drop`` from a process that has no session."""
        self.flood((line("yielded", id=1, epoch=1, yielded=True) + line("drop", hold="h")) * 100)

    def churn(self) -> None:
        """Connect, send a ping, and disconnect without reading the answer."""
        while not self.over:
            made = self.connect(wait=False)
            if made is not None:
                with contextlib.suppress(OSError):
                    self.sent += made.send(line("ping", id=1))
                made.close()
                self.closed += 1

    def slow(self) -> None:
        """Open a thousand connections that each send one byte every 0.2 s."""
        made = [one for _ in range(1000) if (one := self.connect())]
        while not self.over:
            for one in made:
                with contextlib.suppress(OSError):
                    self.sent += one.send(b"{")
            time.sleep(0.2)
        for one in made:
            one.close()

    def unfinished(self) -> None:
        """Send 250 kB of a request on each of 200 connections, and never send the line break."""
        made = [one for _ in range(200) if (one := self.connect())]
        for one in made:
            # If the broker has stopped reading, each connection waits for a time-out of 0.5 s.
            if self.over:
                break
            one.settimeout(0.5)
            with contextlib.suppress(OSError):
                one.sendall(b'{"v":1,"x":"' + b"x" * 250_000)
                self.sent += 250_000
        self.rest()
        for one in made:
            one.close()

    def open_close(self) -> None:
        connection = self.connect()
        with contextlib.suppress(OSError):
            while not self.over and connection is not None:
                answer = self.ask(connection, "open", kernel_id="x" * 200, label="y" * 200)
                if "session" in answer:
                    self.ask(connection, "close", session=answer["session"], reason="z" * 200)

    def opens(self) -> None:
        """Open as many sessions as the broker allows."""
        connection = self.connect()
        with contextlib.suppress(OSError):
            while not self.over and connection is not None:
                if "session" not in self.ask(connection, "open", kernel_id="x" * 200):
                    time.sleep(0.05)

    def early(self) -> None:
        """Send long ``hello`` messages for a session whose process the broker does not know yet."""
        connection = self.connect()
        if connection is None:
            return
        opened: dict[str, Any] = {}
        while "session" not in opened:  # another attack may have all sessions of the user
            if self.over:
                return
            opened = self.ask(connection, "open", kernel_id="x")
        who = {"session": opened["session"], "token": opened["token"]}
        holds = [{"id": f"{n:0200}", "kind": "cell"} for n in range(900)]
        self.flood(line("hello", holds=holds, junk="j" * 20_000, **who), connections=100)
        connection.close()

    def unread(self) -> None:
        """Ask for the largest answers and read none of them."""
        made = [one for _ in range(300) if (one := self.connect())]
        asked = line("journal", id=1, limit=9000) + line("status", id=2) * 50
        for one in made:
            with contextlib.suppress(OSError):
                one.sendall(asked)
                self.sent += len(asked)
        self.rest()
        for one in made:
            one.close()


KINDS: dict[str, Callable[[Attack], None]] = {
    name: method
    for name, method in vars(Attack).items()
    if callable(method) and name[0] != "_" and name not in ("rest", "connect", "ask", "flood")
}


def main_attack(path: str, kind: str, seconds: float) -> dict[str, Any]:
    """Run one kind of attack; return the counts."""
    attack = Attack(path, seconds)
    KINDS[kind](attack)
    return {
        "sent": attack.sent, "received": attack.received, "closed": attack.closed,
        "failed": attack.failed, "codes": dict(attack.codes),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main_attack(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
