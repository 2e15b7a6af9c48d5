# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The agents of two machines carry orders between their brokers, and the results back.

An agent sends a letter to the ledger, and the ledger passes it on to the agent of the machine that
the letter names. A letter may be lost. In this case the broker that waits for the result gives up
after a time-out, or at once if the ledger did not accept the letter. With MUNGE, an agent cannot
read or make a credential. It can only lose letters or report a false result. With tokens of a Hub,
an agent can read and make credentials, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ..errors import Code, GPUPoolError, RefusedError
from ..protocol import error_message
from .broker_calls import BrokerCalls

#: Seconds in which this machine's broker must execute an order.
PATIENCE = 60.0
#: ``WAIT``: the agent asks the broker for orders. If the broker has none, it may wait this many
#: seconds for one. ``GRACE``: after this wait, the answer may take this many more seconds.
WAIT, GRACE = 5.0, 10.0

_LOG = logging.getLogger(__name__)

PassOn = Callable[[str, str], Awaitable[None]]


def letter_in(text: str) -> dict[str, Any] | None:
    """Return the letter in a text from the ledger; None if the text is the ledger's answer."""
    if not text.startswith('{"letter":'):
        return None
    found = json.loads(text)["letter"]
    return found if isinstance(found, dict) else None


class Mail:
    """Carries letters between this machine's broker and the other agents.

    Parameters
    ----------
    relay:
        Makes the ledger pass a text on to the agent of a machine; raises ``OSError`` if it fails.
    """

    def __init__(self, link: BrokerCalls, relay: PassOn) -> None:
        self._link, self._relay = link, relay
        self._tasks: set[asyncio.Task[None]] = set()

    async def fetch(self) -> None:
        """Fetch the orders of this machine's broker and send them, until cancelled."""
        try:
            while True:
                found = await self._link.call("orders", WAIT + GRACE, wait=WAIT)
                for order in found["orders"]:
                    self._spawn(self._send_order({**order, "from": found["node"]}))
        finally:
            for task in self._tasks:
                task.cancel()

    def arrived(self, letter: dict[str, Any]) -> None:
        """Handle another agent's letter: an order for this machine's broker, or a result."""
        self._spawn(self._result(letter) if "result" in letter else self._order(letter))

    async def _send_order(self, order: dict[str, Any]) -> None:
        """Send an order; if the ledger does not accept it, give the broker an error at once."""
        if not await self._send(order["node"], order):
            # The other machine may have received the order, although the ledger did not answer. So
            # the error code tells the sender that the result is unknown.
            lost = RefusedError(
                f"{order['node']} cannot be reached: the ledger, which passes orders on, does not "
                "answer.",
                code=Code.UNREACHABLE,
                next_step="Kernels there probably still run. Try again, or ask your administrator.",
            )
            result = json.dumps(error_message(lost, None))
            await self._result({"name": order["name"], "result": result})

    async def _send(self, node: str, letter: dict[str, Any]) -> bool:
        """Send a letter; return whether the ledger has accepted it."""
        try:
            await self._relay(node, json.dumps({"letter": letter}, separators=(",", ":")))
        except OSError as error:
            _LOG.warning("A message to the machine %s is lost: %s", node, error)
            return False
        return True

    async def _order(self, letter: dict[str, Any]) -> None:
        try:
            found = await self._link.call("perform", PATIENCE, credential=letter["credential"])
            result = found["result"]
        except GPUPoolError as error:
            result = json.dumps(error_message(error, None))
        except OSError as error:
            _LOG.warning("An order was not carried out: %s", error)
            return
        await self._send(letter["from"], {"name": letter["name"], "result": result})

    async def _result(self, letter: dict[str, Any]) -> None:
        try:
            await self._link.call(
                "performed", PATIENCE, name=letter["name"], result=letter["result"]
            )
        except (OSError, GPUPoolError) as error:
            _LOG.warning("The broker did not accept the result of an order: %s", error)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._safely(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _safely(work: Awaitable[None]) -> None:
        try:
            await work
        except (KeyError, TypeError, ValueError) as error:
            _LOG.warning(
                "A message of another machine is malformed: %s: %s", type(error).__name__, error
            )
