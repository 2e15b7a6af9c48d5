# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Messages about kernels on other machines: where a kernel starts, and orders that agents carry."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ...cluster.placing import Placement, PlacementRequest, place
from ...errors import Code, GPUPoolError, RefusedError
from ...protocol import MAX_REQUEST, Message, encode, error_message, raise_for
from ..cluster_views import View, summary_of
from ..configuration import Configuration
from ..core import Core
from ..hosting import Hosting
from ..request_fields import RESULT
from ..transport.auth import owner_of
from ..transport.connection import Connection

#: Another machine must answer an order within this many seconds. The start of a kernel on that
#: machine may take 50 s.
PATIENCE = 60.0
#: How many orders may wait for an answer from other machines: MOST_OF_USER orders of one user, and
#: MOST orders of all users. MOST_HERE: how many orders of one user to this machine may be under
#: way.
MOST_OF_USER, MOST, MOST_HERE = 64, 1000, 8
#: An answer to the agent's ``orders`` is full when its credentials have this many characters. The
#: agent gets the remaining orders in the next answer.
MOST_FETCHED = 1 << 20
#: The most seconds that an ``orders`` request of the agent waits for orders.
LONGEST = 60.0


@dataclass(slots=True)
class _SentOrder:
    uid: int
    #: The user's connection, or None if it has ended. An order without a connection still counts
    #: for the user's limit until its answer comes, because the agent has fetched the order.
    connection: Connection | None
    request: int | None
    node: str
    credential: str
    timer: asyncio.TimerHandle


def result_text(result: Message) -> str:
    """Return the result of an order as text for the agents; a too long result gives a refusal.

    A result may contain the log of a kernel. The user controls the text of the log, and its escapes
    in JSON can make it six times as long.
    """
    try:
        text = json.dumps(result)
        length = len(encode({"result": text}))
    except RecursionError:
        length = -1
    if 0 <= length <= MAX_REQUEST - 1024 and len(text) <= RESULT.most:
        return text
    why = "is nested too deeply" if length < 0 else f"is too long for a message ({length} bytes)"
    error = RefusedError(f"The result of this order {why}.", code=Code.TOO_LONG)
    return json.dumps(error_message(error, None))


class RemoteMessages:
    """Answers the messages about kernels on other machines.

    Users send ``place`` and ``order``. Agents send ``orders``, ``perform`` and ``performed``.

    Parameters
    ----------
    look:
        Gets the ledger's view of all machines, and calls the given function with it. The function
        gets None if the broker has no recent view.
    check_agent:
        Refuses a peer that is not the cluster's agent.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        hosting: Hosting,
        node: str,
        *,
        look: Callable[[Connection, int | None, Callable[[View | None], None]], None],
        check_agent: Callable[[Connection], None],
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._hosting = hosting
        self._node = node
        self._look = look
        self._check_agent = check_agent
        self._orders: dict[str, _SentOrder] = {}
        #: Orders that the agent has not fetched yet.
        self._new: list[str] = []
        self._agent: tuple[Connection, int | None, asyncio.TimerHandle] | None = None
        #: The connection of the agent's last ``orders`` request, or None if this connection has
        #: ended.
        self._link: Connection | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        #: By user: the number of the user's orders to this machine that are under way.
        self._here: Counter[int] = Counter()

    # ------------------------------------------------------------------ users

    def place(self, connection: Connection, message: Message) -> None:
        """Ask the ledger for a view of all machines; answer on which machine a kernel may start."""
        settings = self._configuration.settings
        wanted = PlacementRequest(
            owner_of(connection.peer.uid).name,
            int(message.get("memory") or settings.pool.default_memory),
            int(message.get("devices") or 1),
            str(message.get("model") or ""),
            tuple(message.get("data") or ()),
        )
        self._look(
            connection, message.get("id"),
            lambda view: connection.attempt(message, lambda c, m: self._placed(c, m, wanted, view)),
        )  # fmt: skip

    def _placed(
        self, connection: Connection, message: Message, wanted: PlacementRequest, view: View | None
    ) -> None:
        if view is None:
            raise RefusedError(
                "The ledger of the cluster does not answer, so no machine can be chosen.",
                code=Code.NO_HEAD,
                next_step="Try again, or ask your administrator.",
            )
        data = self._configuration.settings.cluster_data
        own = {"name": self._node, "summary": summary_of(self._core, data)._asdict()}
        nodes = [{**node, **(own if node["name"] == self._node else {})} for node in view["nodes"]]
        found: Placement = place(nodes, wanted)
        if not found.node:
            raise RefusedError(
                f"No machine of the cluster can take this kernel: {found.reasons}.",
                code=Code.NO_MACHINE,
                next_step="Ask for less or for another model, or try again later.",
            )
        connection.answer(message.get("id"), {
            "node": found.node,
            "considered": [list(row) for row in found.considered],
            "identity": self._configuration.settings.cluster_identity,
        })  # fmt: skip

    def order(self, connection: Connection, message: Message) -> None:
        """Send an order to another machine; pass on the answer of that machine's broker."""
        node, credential = message["node"], message["credential"]
        uid = _account(connection)
        if node == self._node:
            if self._here[uid] >= MOST_HERE:
                raise RefusedError(
                    f"The broker now carries out {self._here[uid]} of your orders for this "
                    f"machine; at most {MOST_HERE} are allowed.",
                    code=Code.TOO_MANY,
                    next_step="Try again later.",
                )
            self._here[uid] += 1
            self._spawn(self._perform_here(connection, message.get("id"), credential))
            return
        if node not in self._configuration.settings.cluster_nodes:
            raise RefusedError(
                f"There is no machine {node[:80]!r} in this cluster.", code=Code.BAD_REQUEST
            )
        of_user = sum(o.uid == uid for o in self._orders.values())
        if of_user >= MOST_OF_USER or len(self._orders) >= MOST:
            raise RefusedError(
                f"Too many orders wait for other machines: {of_user} of yours (at most "
                f"{MOST_OF_USER} may wait), and {len(self._orders)} of all users (at most {MOST}).",
                code=Code.TOO_MANY,
                next_step="Try again later.",
            )
        if self._link is None:
            raise self._unreachable(node, f"no agent of the cluster runs on {self._node}")
        name = secrets.token_hex(8)
        timer = asyncio.get_running_loop().call_later(PATIENCE, self._give_up, name)
        self._orders[name] = _SentOrder(uid, connection, message.get("id"), node, credential, timer)
        self._new.append(name)
        self._deliver()

    async def _perform_here(
        self, connection: Connection, request: int | None, credential: str
    ) -> None:
        uid = _account(connection)
        try:
            result = result_text(await self._hosting.perform(credential))
        finally:
            self._here[uid] -= 1
            if not self._here[uid]:
                del self._here[uid]
        self._answer(connection, request, json.loads(result))

    def _answer(self, connection: Connection, request: int | None, answer: Message) -> None:
        try:
            fields = raise_for(answer)
        except GPUPoolError as error:
            connection.refuse(request, error)
            return
        kept = {k: v for k, v in fields.items() if k not in ("type", "id", "v")}
        connection.answer(request, {"result": kept})

    def _give_up(self, name: str) -> None:
        order = self._forget(name)
        if order is not None and order.connection is not None:
            order.connection.refuse(
                order.request, self._unreachable(order.node, f"it was silent for {PATIENCE:g} s")
            )

    @staticmethod
    def _unreachable(node: str, why: str) -> RefusedError:
        return RefusedError(
            f"{node} does not answer: {why}.",
            code=Code.UNREACHABLE,
            next_step="Kernels there probably still run. Try again, or ask your administrator.",
        )

    # ------------------------------------------------------------------ the agent

    def orders(self, connection: Connection, message: Message) -> None:
        """Answer with the orders for other machines; wait at most ``wait`` seconds for one."""
        self._check_agent(connection)
        self._release_agent()
        wait = min(max(float(message.get("wait", 0.0)), 0.0), LONGEST)
        timer = asyncio.get_running_loop().call_later(wait, self._release_agent)
        self._agent = connection, message.get("id"), timer
        self._link = connection
        self._deliver()

    def perform(self, connection: Connection, message: Message) -> None:
        """Carry out an order from another machine; answer with the result as text."""
        self._check_agent(connection)
        self._spawn(self._perform(connection, message.get("id"), message["credential"]))

    def performed(self, connection: Connection, message: Message) -> None:
        """Pass on the result of an order that was sent to another machine."""
        self._check_agent(connection)
        try:
            answer = json.loads(message["result"])
            if answer["type"] not in ("ok", "error"):
                raise ValueError(answer["type"])
        except (ValueError, TypeError, KeyError):
            raise RefusedError("This is no result of an order.", code=Code.BAD_REQUEST) from None
        order = self._forget(message["name"])
        if order is not None and order.connection is not None:
            self._answer(order.connection, order.request, answer)
        connection.answer(message.get("id"))

    async def _perform(self, connection: Connection, request: int | None, credential: str) -> None:
        connection.answer(request, {"result": result_text(await self._hosting.perform(credential))})

    def _deliver(self) -> None:
        if self._new and self._agent is not None:
            self._release_agent()

    def _release_agent(self) -> None:
        """Answer the agent's waiting ``orders`` request with the orders that are new."""
        if self._agent is None:
            return
        (connection, request, timer), self._agent = self._agent, None
        timer.cancel()
        rows, size = [], 0
        while self._new and size < MOST_FETCHED:
            name = self._new.pop(0)
            if name in self._orders:
                rows.append((name, self._orders[name]))
                size += len(self._orders[name].credential)
        connection.answer(request, {
            "node": self._node,
            "orders": [
                {"name": name, "node": o.node, "credential": o.credential} for name, o in rows
            ],
        })  # fmt: skip

    # ------------------------------------------------------------------ the end of things

    def gone(self, connection: Connection) -> None:
        """Forget the requests of a connection that has ended."""
        if self._link is connection:
            self._link = None
        if self._agent is not None and self._agent[0] is connection:
            self._agent[2].cancel()
            self._agent = None
        for name in [n for n, o in self._orders.items() if o.connection is connection]:
            # An order that the agent has fetched still counts for the user's limit. Otherwise, a
            # user could close the connection after each order, and so begin any number of orders.
            self._orders[name] = replace(self._orders[name], connection=None)
            if name in self._new:
                self._forget(name)

    def close(self) -> None:
        """Cancel all timers and orders. Requests that still wait get no answer."""
        if self._agent is not None:
            self._agent[2].cancel()
            self._agent = None
        for name in [*self._orders]:
            self._forget(name)
        for task in self._tasks:
            task.cancel()
        self._hosting.close()

    def _forget(self, name: str) -> _SentOrder | None:
        order = self._orders.pop(name, None)
        if order is not None:
            order.timer.cancel()
        return order

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _account(connection: Connection) -> int:
    """Return the user id of the peer; refuse a user of a container, who has no account here."""
    uid = connection.peer.uid
    if isinstance(uid, str):
        raise RefusedError(
            "To start kernels on other machines, a user needs an account on this machine. A user "
            "of a container has no account.",
            code=Code.NOT_SERVED,
            next_step="Use a kernel without gpupool-remote-provisioner.",
        )
    return uid
