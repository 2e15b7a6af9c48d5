# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Machines of a cluster as processes on this machine: real brokers, agents, and a ledger."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import defaultdict
from contextlib import nullcontext, suppress
from pathlib import Path

from tests.broker import kit as broker_kit
from tests.broker.kit import wait_until

#: These times are short, so that tests notice a loss soon.
TTL, MARGIN, INTERVAL = 3.0, 0.5, 0.3

QUOTA = 2  # slices for each user


def family(pid):
    """Return a process and all its descendants."""
    children = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = path.read_text().rpartition(")")[2].split()[1]
            children[int(parent)].append(int(path.parent.name))
    found = [pid]
    for each in found:
        found += children[each]
    return found


def is_alive(pid):
    with suppress(OSError):
        return " Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    return False


def having_slices(sessions):
    return {name for name, session in sessions.items() if session["slices"]}


class Process:
    """A module of the cluster that runs as a process."""

    def __init__(self, folder, module, name, *arguments):
        self.folder, self.module, self.arguments = folder, module, arguments
        self.log = Path(folder) / f"{name}.log"
        self.process = None

    def start(self):
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"jupyter_gpupool.cluster.{self.module}",
                 *map(str, self.arguments)],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=broker_kit.environment(self.folder), cwd=broker_kit.ROOT,
            )  # fmt: skip
        return self

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait(60)
            self.process = None


class Cluster:
    """Three brokers with one GPU each, three agents, one ledger."""

    names = ("m0", "m1", "m2")
    make_broker = broker_kit.Broker
    #: After this many seconds without a report, the ledger counts a machine as silent.
    ttl = TTL

    def __init__(self, folder, *, sockets=None, of_node=None, **config):
        """``sockets`` is a folder for broker sockets. ``of_node`` maps a node to more options."""
        self.folder = Path(folder)
        shared = {
            "cluster_nodes": list(self.names),
            "quotas": {"*": {"leases": QUOTA}},
            "emulate": "1x1GiB,context=32MiB",
            "default_memory": "100MiB",
            **config,
        }
        self.brokers, self.agents = {}, {}
        self.address = self.folder / "ledger.sock"
        for name in self.names:
            (self.folder / name).mkdir()
            more = (of_node or {}).get(name, {})
            broker = self.make_broker(self.folder / name, **shared, **more, cluster_node=name)
            if sockets is not None:
                broker.socket = Path(sockets) / name / "broker.sock"
            self.brokers[name] = broker
            self.agents[name] = Process(
                self.folder, "agent_service", f"agent-{name}", "--broker", broker.socket,
                "--ledger", self.address, "--interval", INTERVAL,
            )  # fmt: skip
        config_file = self.brokers["m0"].config_file
        self.ledger = Process(
            self.folder, "ledger_service", "ledger", "--socket", self.address,
            "--config", config_file, "--ttl", TTL, "--margin", MARGIN,
        )  # fmt: skip
        self.kernels = []

    def start(self, *, ledger=True):
        if ledger:
            self.ledger.start()
        for name in self.names:
            self.start_broker(name)
            self.agents[name].start()
        return self

    def at(self, name):
        """Return a context in which processes start on a machine.

        The context of this class does nothing, because all its machines are on one host.
        """
        return nullcontext()

    def start_broker(self, name):
        assert self.brokers[name].started

    def kernel(self, name, label=""):
        kernel = broker_kit.Kernel(self.brokers[name], label)
        self.kernels.append(kernel)
        return kernel

    def order(self, **order):
        """Send an order to the ledger; return its view, or None if no ledger answers."""
        with suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as link:
            link.settimeout(20)
            link.connect(str(self.address))
            link.sendall(json.dumps({"order": "view", **order}).encode() + b"\n")
            with link.makefile() as lines:
                return json.loads(lines.readline())
        return None

    def wait_serving(self):
        wait_until(lambda: (self.order() or {}).get("serving"), "the ledger to lend")

    def sessions(self):
        """Return the sessions of all machines, by id, as each machine's broker shows them."""
        running = [broker for broker in self.brokers.values() if broker.process is not None]
        return {s["id"]: s for broker in running for s in broker.status()["sessions"]}

    def attached(self, sessions=None):
        """Return how many slices the machines have granted at one instant.

        This method asks the brokers one after the other. Between two answers, a machine may give
        back a slice, and another machine may grant one: the sum is then too large by one. So if the
        sum exceeds the quota, the method asks all brokers again. It counts only the sessions that
        have slices in both rounds: they had these slices at the same time, between the rounds.
        """
        found = having_slices(self.sessions() if sessions is None else sessions)
        return len(found if len(found) <= QUOTA else found & having_slices(self.sessions()))

    def losses(self):
        """Return how often each broker has noticed that no ledger answers."""
        return {n: b.log.read_text().count("does not answer") for n, b in self.brokers.items()}

    def answers(self):
        """Return how often each broker has noticed that a ledger answers again."""
        return {n: b.log.read_text().count("ledger answers") for n, b in self.brokers.items()}

    def end_kernels(self):
        for kernel in self.kernels:
            with suppress(OSError):
                kernel.close()
        self.kernels.clear()

    def close(self):
        self.end_kernels()
        for process in (self.ledger, *self.agents.values()):
            process.kill()
        for broker in self.brokers.values():
            broker.close()

    def logs(self):
        return "\n".join(
            f"== {path}\n{path.read_text()[-2000:]}"
            for path in (*self.folder.glob("*.log"), *self.folder.glob("*/*.log"))
            if path.stat().st_size
        )
