# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The ledger as a Ray actor, and an agent's connection to it.

Ray carries messages, and restarts the ledger on Ray's head when the ledger dies. Ray has no other
task: cells and brokers do not use Ray. A hostile program with the cluster's token can run any
program as Ray's user. So it can change how much of the limits each machine may use, drain the
machines, and do with letters what an agent can do (see :mod:`.mail`). It can do no other harm to
brokers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import ray
from ray.exceptions import RayError

from ..config import load_settings
from ..deadlines import within
from .courier import AGAIN, carry
from .desk import MARGIN, TTL, Desk
from .ledger_events import Limits
from .overlay import limits_of

_LOG = logging.getLogger(__name__)

NAMESPACE, NAME = "gpupool", "ledger"

#: ``POLL``: an agent calls the ledger to get answers. If the ledger has none, the call waits there
#: for at most this many seconds. ``PATIENCE``: the time-out of every call, in seconds.
POLL, PATIENCE = 10.0, 15.0
#: Seconds without an answer after which an agent ends. ``node`` then starts a new agent, which
#: connects to Ray again. This is necessary after a restart of Ray's head: a process that connected
#: before the restart may never find the new ledger.
SILENT = 30.0
#: The most answers and letters that the ledger keeps for a node that does not fetch them. If there
#: are more, it drops the oldest. Only the last answers matter, and if a letter is lost, one order
#: fails.
KEPT = 256


class LedgerActor:
    """The actor that Ray runs: a desk, and the answers that wait for each node."""

    def __init__(self, limits: Limits, members: Sequence[str], ttl: float, margin: float) -> None:
        self._arguments = limits, members, ttl, margin
        self._desk: Desk | None = None
        self._answers: dict[str, asyncio.Queue[str]] = {}

    async def report(self, text: str) -> None:
        """Handle a report of a node."""
        desk = self._open()
        desk.report(text)
        if desk.superseded.is_set():
            ray.actor.exit_actor()

    async def collect(self, node: str, wait: float) -> list[str]:
        """Wait at most ``wait`` seconds for an answer to a node; return all its answers."""
        queue, found = self._queue(node), []
        try:
            found.append(await within(queue.get(), wait))
        except asyncio.TimeoutError:
            return []
        while not queue.empty():
            found.append(queue.get_nowait())
        return found

    async def relay(self, node: str, text: str) -> None:
        """Pass a letter on to the agent of a node."""
        self._open().pass_on(node, text)

    async def view(self) -> dict[str, Any]:
        """Return :meth:`.desk.Desk.view` and the ledger's process id."""
        return {**self._open().view(), "process": os.getpid()}

    async def fence(self, node: str) -> None:
        """Record that no kernel runs on a node any more."""
        self._open().fence(node)

    async def drain(self, node: str, drains: bool) -> None:
        """Order a node to drain and to leave, or to come back."""
        self._open().drain(node, drains)

    async def change(self, limits: Limits, members: Sequence[str]) -> None:
        """Replace the limits and the members."""
        self._open().change(limits, members)

    def _open(self) -> Desk:
        if self._desk is None:
            limits, members, ttl, margin = self._arguments
            self._desk = Desk(limits, members, self._post, ttl=ttl, margin=margin)
        return self._desk

    def _queue(self, node: str) -> asyncio.Queue[str]:
        return self._answers.setdefault(node, asyncio.Queue())

    def _post(self, node: str, answer: str) -> None:
        queue = self._queue(node)
        if queue.qsize() >= KEPT:
            queue.get_nowait()
        queue.put_nowait(answer)


def connect(address: str) -> None:
    """Connect to the Ray cluster at ``address`` as a driver: Ray gives a driver no tasks to run."""
    ray.init(
        address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False,
        ignore_reinit_error=True,
    )  # fmt: skip


def the_ledger(
    limits: Limits, members: Sequence[str], *, ttl: float = TTL, margin: float = MARGIN
) -> Any:
    """Return the cluster's ledger; start it if none runs."""
    actor = ray.remote(LedgerActor)
    return actor.options(
        name=NAME, get_if_exists=True, lifetime="detached", max_restarts=-1, num_cpus=0,
        # Run the ledger on the head. If it ran on another machine and that machine died, the next
        # ledger would have to wait for a report of the dead machine.
        resources={"node:__internal_head__": 0.001}, max_concurrency=1000,
    ).remote(limits, list(members), ttl, margin)  # fmt: skip


class RayLedger:
    """An agent's connection to the ledger. After a failed call, it looks for the ledger again."""

    def __init__(self, node: str, limits: Limits, members: Sequence[str], ttl: float) -> None:
        self.answers: asyncio.Queue[str] = asyncio.Queue()
        self._node, self._limits, self._members, self._ttl = node, limits, members, ttl
        self._actor: Any = None
        self._answered = time.monotonic()
        self._failure = ""

    async def send(self, report: str) -> None:
        """Send a report; raise ``OSError`` if no ledger accepts it."""
        await self._call("report", report)

    async def relay(self, node: str, text: str) -> None:
        """Make the ledger pass a letter on; raise ``OSError`` if no ledger accepts it."""
        await self._call("relay", node, text)

    async def collect(self) -> None:
        """Collect answers until cancelled."""
        while True:
            try:
                for answer in await self._call("collect", self._node, POLL):
                    self.answers.put_nowait(answer)
            except OSError:
                await asyncio.sleep(AGAIN)

    async def watch(self) -> None:
        """Return after :data:`SILENT` seconds without an answer of a ledger."""
        while (left := self._answered + SILENT - time.monotonic()) > 0:
            await asyncio.sleep(left)
        _LOG.warning("The ledger has not answered for %g s (%s)", SILENT, self._failure[:300])

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._actor is None:
                # Use a thread: a call that creates an actor blocks while Ray's head is missing.
                self._actor = await asyncio.to_thread(
                    the_ledger, self._limits, self._members, ttl=self._ttl, margin=self._ttl / 4
                )
            call = getattr(self._actor, method).remote(*arguments)
            found = await within(call, PATIENCE)
            self._answered = time.monotonic()
            return found
        except (RayError, ValueError, asyncio.TimeoutError) as error:
            self._actor, self._failure = None, f"{method}: {type(error).__name__} {error}"
            raise ConnectionResetError(f"The ledger does not answer: {error}") from None


async def run_agent(
    address: str, broker: Path, config: Sequence[Path], *, ttl: float, interval: float
) -> None:
    """Carry the reports of this machine's broker to the ledger, and the answers back.

    After :data:`SILENT` seconds without an answer of the ledger, end the process.
    """
    settings = load_settings(config)
    connect(address)
    name = settings.cluster_node or gethostname()
    ledger = RayLedger(name, limits_of(settings.pool), settings.cluster_nodes, ttl)
    works = (
        carry(broker, ledger.send, ledger.answers, ledger.relay, interval=interval),
        ledger.collect(),
        ledger.watch(),
    )
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        logging.shutdown()
        # End at once: a normal exit would wait for a thread, and a call of Ray may block the
        # thread.
        os._exit(1)
    finally:
        for task in tasks:
            task.cancel()


def ask(address: str, method: str, *arguments: Any) -> Any:
    """Call a method of the cluster's ledger; return its answer. It may take minutes to fail."""
    connect(address)
    try:
        actor = ray.get_actor(NAME)
    except ValueError:
        raise LookupError("no ledger runs there yet, because no machine has joined") from None
    return ray.get(getattr(actor, method).remote(*arguments), timeout=PATIENCE)
