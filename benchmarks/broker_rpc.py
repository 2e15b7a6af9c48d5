# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Latency of the broker's answers, and what a session costs the broker, with 1 to 1,000 sessions.

The broker is a real process on an emulated machine of 16 devices. Each session is a real process
with its own connection. The baseline is a bare asyncio echo server on a unix socket, in its own
process. In the same run, the same client code calls the broker and the echo server.

``hold_drop`` is the time of the messages that an attached session sends for one cell. The session
sends a hold, a drop and a ping. The broker answers only the ping, after it has handled the hold and
the drop.

``grant`` is the time from the hold of a detached session to the broker's answer. The pool grants
the slice from free memory. The time includes the writing of the journal. The baseline of ``grant``
is ``cold_ping``: the sessions' processes send their pings in turn, one ping at a time. The
pings wake as many processes as the grants do, but the broker makes no decision.

``at_rest`` is the cost of the broker and its children with a thousand idle sessions on 8 devices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import budget, pss, rss, summary
from jupyter_gpupool.client import Client

MiB = 1 << 20
DEVICES = 16

#: The most milliseconds that a grant may take (p99, end to end), and the number of sessions of the
#: step that this limit applies to.
GRANT_BUDGET_MS, GRANT_SESSIONS = 2.0, 300

#: Limits for the broker and its children together, while all sessions are idle. MEMORY_BUDGET is in
#: bytes (PSS). CPU_BUDGET is a share of one core. The benchmark measures both with IDLE_SESSIONS
#: sessions on IDLE_DEVICES devices.
MEMORY_BUDGET = 500e6
CPU_BUDGET = 0.01
IDLE_SESSIONS, IDLE_DEVICES = 1000, 8

#: Least number of timed grants.
GRANTS = 600

#: Size of each session's slice. It is small, so all sessions fit on the machine at once.
SLICE = 96 * MiB


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return latencies in milliseconds, memory in bytes, CPU as share of one core."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer devices, sessions and rounds")
    parser.add_argument("--devices", type=int, default=0)
    parser.add_argument("--sessions", type=int, nargs="*", default=[])
    options = parser.parse_args(argv)
    devices = options.devices or (4 if options.quick else DEVICES)
    steps = options.sessions or ([1, 10, 50] if options.quick else [1, 10, 100, 300, 1000])
    rounds = 300 if options.quick else 2000
    with tempfile.TemporaryDirectory(prefix="gpb", dir="/tmp") as name:
        folder = Path(name)
        with echo_server(folder) as path:
            echo = summary(ping_times(path, rounds))
        with broker(folder, devices) as pid:
            found = measure(folder, pid, steps, rounds)
        (folder / "rest").mkdir()
        count = min(IDLE_SESSIONS, steps[-1])
        with broker(folder / "rest", IDLE_DEVICES) as pid:
            rest = measure_rest(folder / "rest" / "b.sock", pid, count)
    chosen = next((one for one in found if one["sessions"] == GRANT_SESSIONS), found[-1])
    for one in found:
        for kind in ("ping", "cold_ping", "hold_drop", "grant"):
            one[kind]["ratio_p50_to_echo"] = one[kind]["p50"] / echo["p50"]
        one["grant"]["ratio_p99_to_cold_ping"] = one["grant"]["p99"] / one["cold_ping"]["p99"]
    return {
        "emulated": True,
        "devices": devices,
        "echo_ms": echo,
        "by_sessions": found,
        "at_rest": rest,
        "budgets": [
            budget(f"grant from free memory, p99, {chosen['sessions']} sessions on {devices} "
                   "devices", chosen["grant"]["p99"], GRANT_BUDGET_MS, "ms"),
            budget(f"broker and children, {count} idle sessions on {IDLE_DEVICES} devices, PSS",
                   rest["pss_bytes"] / 1e6, MEMORY_BUDGET / 1e6, "MB"),
            budget(f"broker and children, {count} idle sessions on {IDLE_DEVICES} devices, CPU",
                   100 * rest["cpu_share"], 100 * CPU_BUDGET, "% of a core"),
        ],
    }  # fmt: skip


# --------------------------------------------------------------------------- the servers


@contextmanager
def echo_server(folder: Path) -> Iterator[Path]:
    """Yield the socket of an echo server, to measure the least cost of a round trip.

    The server runs in another process.
    """
    path = folder / "echo.sock"
    ready, child = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ready)
        asyncio.run(echo_for_ever(path, child))
        os._exit(0)
    os.close(child)
    os.read(ready, 1)
    os.close(ready)
    try:
        yield path
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


class Echo(asyncio.Protocol):
    """Sends back the data that it receives."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


async def echo_for_ever(path: Path, ready: int) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Echo, str(path))
    os.write(ready, b"1")
    await server.serve_forever()


@contextmanager
def broker(folder: Path, devices: int) -> Iterator[int]:
    """Run a broker; yield its pid."""
    config = folder / "config.json"
    settings = {
        "emulate": f"{devices}x80GiB",
        "state_dir": str(folder / "state"),
        "default_memory": SLICE,
        "default_limit": SLICE,
        "idle_timeout": 86400,
        "linger": 86400,
        "max_sessions_per_user": 100_000,
    }
    config.write_text(json.dumps({"GPUPool": settings}))
    reading, writing = os.pipe()
    with (folder / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "jupyter_gpupool.broker", "--config", str(config),
                "--socket", str(folder / "b.sock"), "--ready-fd", str(writing),
            ],
            stderr=log, pass_fds=(writing,),
            env={**os.environ, "JUPYTER_NO_CONFIG": "1", "JUPYTER_CONFIG_DIR": str(folder)},
        )  # fmt: skip
    os.close(writing)
    try:
        if not select.select([reading], [], [], 600)[0]:
            raise TimeoutError("the broker did not start")
        answer = json.loads(os.read(reading, 65536) or b"{}")
        if not answer.get("ok"):
            raise RuntimeError((folder / "broker.log").read_text())
        yield process.pid
    finally:
        os.close(reading)
        process.terminate()
        process.wait(120)


# --------------------------------------------------------------------------- one peer


class Peer:
    """One blocking connection without a thread: the smallest possible client."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(str(path))
        self.file = self.socket.makefile("rb")
        self.ids = 0

    def send(self, kind: str, /, **fields: Any) -> None:
        self.socket.sendall(json.dumps({"v": 1, "type": kind, **fields}).encode() + b"\n")

    def call(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        """Send a request; return its answer, and ignore the messages before the answer."""
        self.ids += 1
        self.send(kind, id=self.ids, **fields)
        return self.until(lambda m: m.get("id") == self.ids)

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first message for which ``wanted`` is true; answer each ``yield`` message."""
        while True:
            message: dict[str, Any] = json.loads(self.file.readline())
            if message["type"] == "yield":
                self.send("yielded", epoch=message["epoch"], yielded=True, cuda=False)
            if wanted(message):
                if message["type"] == "error":
                    raise RuntimeError(message["message"])
                return message


def ping_times(path: Path, rounds: int) -> list[float]:
    """Return the milliseconds of successive pings."""
    peer = Peer(path)
    return [timed(lambda: peer.call("ping")) for _ in range(rounds)]


def timed(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - begun)


# --------------------------------------------------------------------------- sessions


class Member:
    """A forked process that acts as one session, and obeys commands from a pipe."""

    def __init__(self, path: Path, server: Client, number: int) -> None:
        answer = server.call("open", kernel_id=f"k{number}", label=f"n{number}", timeout=60)
        commands, self._tell = os.pipe()
        self._hear, results = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._tell)
            os.close(self._hear)
            status = 1
            try:
                serve(path, answer["session"], answer["token"], commands, results)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(commands)
        os.close(results)
        server.call("launched", session=answer["session"], pid=self.pid, timeout=60)

    def do(self, what: str) -> Any:
        """Run a command in the process and return its result."""
        self.tell(what)
        return self.told()

    def tell(self, what: str) -> None:
        """Begin a command in the process."""
        os.write(self._tell, what.encode() + b"\n")

    def told(self) -> Any:
        """Return the result of the command."""
        data = b""
        while not data.endswith(b"\n"):
            chunk = os.read(self._hear, 1 << 20)
            if not chunk:
                raise RuntimeError("a session's process has ended")
            data += chunk
        return json.loads(data)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._tell)
        os.close(self._hear)


def serve(path: Path, session: str, token: str, commands: int, results: int) -> None:
    """Act as a session: send ``hello``, then obey commands."""
    peer = Peer(path)
    peer.call("hello", session=session, token=token)

    def hold_drop() -> None:
        peer.send("hold", hold="h", kind="cell", wait=False)
        peer.send("drop", hold="h")
        peer.call("ping")

    def grant() -> float:
        taken = timed(lambda: peer.call("hold", hold="g", kind="cell", wait=True))
        peer.send("drop", hold="g")
        return taken

    def give_back() -> None:
        peer.call("release")
        peer.until(lambda m: m["type"] == "lease" and m["state"] == "detached")

    with os.fdopen(commands) as lines:
        for line in lines:
            what, _, count = line.strip().partition(" ")
            result: Any = None
            if what == "hold_drop":
                result = [timed(hold_drop) for _ in range(int(count))]
            elif what == "ping":
                result = timed(lambda: peer.call("ping"))
            elif what == "grant":
                result = grant()
            elif what == "give_back":
                give_back()
            os.write(results, json.dumps(result).encode() + b"\n")


# --------------------------------------------------------------------------- measuring


def measure(folder: Path, pid: int, steps: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Return one dict for each number of sessions."""
    path = folder / "b.sock"
    empty = rss(pid)
    members: list[Member] = []
    found = []
    # Client has a thread, and a fork does not copy a thread. So the forked process uses a Peer of
    # its own and no Client.
    try:
        for count in steps:
            with Client(path) as server:
                while len(members) < count:
                    members.append(Member(path, server, len(members)))
                one = measure_step(path, pid, members, rounds)
            one["sessions"] = count
            one["broker_rss_bytes"] = rss(pid)
            one["broker_rss_per_session_bytes"] = (rss(pid) - empty) / count
            found.append(one)
            print(json.dumps({k: v for k, v in one.items() if not isinstance(v, dict)}),
                  {k: (round(v["p50"], 3), round(v["p99"], 3)) for k, v in one.items()
                   if isinstance(v, dict)}, flush=True)  # fmt: skip
    finally:
        for member in members:
            member.close()
    return found


def measure_rest(path: Path, pid: int, count: int) -> dict[str, Any]:
    """Return the cost of a broker and its children with ``count`` idle sessions."""
    members: list[Member] = []
    try:
        with Client(path) as server:
            while len(members) < count:
                members.append(Member(path, server, len(members)))
        for member in members:
            member.do("ping")  # its result proves that the broker has handled the hello
        family = [pid, *children(pid)]
        begun, used = time.monotonic(), sum(map(cpu, family))
        time.sleep(10)
        share = (sum(map(cpu, family)) - used) / (time.monotonic() - begun)
        return {
            "sessions": count,
            "devices": IDLE_DEVICES,
            "processes": len(family),
            "pss_bytes": sum(map(pss, family)),
            "broker_pss_bytes": pss(pid),
            "cpu_share": share,
        }
    finally:
        for member in members:
            member.close()


def measure_step(path: Path, pid: int, members: Sequence[Member], rounds: int) -> dict[str, Any]:
    """Measure the broker with these sessions, then detach them; return the figures."""
    grants: list[float] = []
    spent = 0.0
    wanted = min(rounds, max(GRANTS, len(members)))
    cold = [members[i % len(members)].do("ping") for i in range(wanted)]
    while len(grants) < wanted:
        used = cpu(pid)
        for member in members[: wanted - len(grants)]:
            grants.append(member.do("grant"))
        spent += cpu(pid) - used
        if len(grants) == wanted:
            break
        all_give_back(members)
    hold_drop = members[0].do(f"hold_drop {rounds}")
    result = {
        "ping": summary(ping_times(path, rounds)),
        "hold_drop": summary(hold_drop),
        "cold_ping": summary(cold),
        "grant": summary(grants),
        #: The broker's CPU time while it granted slices, divided by the number of grants. The
        #: broker's other work in this time counts, too.
        "grant_cpu_us": spent / len(grants) * 1e6,
    }
    all_give_back(members)
    return result


def all_give_back(members: Sequence[Member]) -> None:
    """Detach all sessions."""
    for member in members:
        member.tell("give_back")
    for member in members:
        member.told()


def cpu(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
