# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A ledger in an event loop, with a clock: it gets reports as text, and sends answers as text."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import Code, RefusedError
from ..protocol import error_message
from ..units import format_seconds
from . import ledger_events as ev
from .ledger import Ledger
from .messages import loan_to_json, report_from_json

_LOG = logging.getLogger(__name__)

#: ``TTL``: a machine without an answer of the ledger for this many seconds grants nothing more of
#: shared limits. ``MARGIN``: the ledger waits this many seconds longer before it lends the ceilings
#: of a fenced machine to other machines.
TTL, MARGIN = 8.0, 2.0


_REPORTS = "The fenced machine %s reports again, so the ledger counts again what its kernels have"
_BORROWED = (
    "%s was fenced, or had left the cluster. The ledger counts this machine again, because another "
    "ledger may have lent it parts of the limits since then. If the machine is dead, fence it again"
)

#: The most characters of the view that the ledger sends to a node. The node's broker would reject a
#: longer message.
MOST_TEXT = 120_000


def view_text(found: dict[str, Any]) -> str:
    """Return what all nodes have, as text for one node.

    If the text would be too long, this function leaves out the details, and if necessary the last
    nodes, too.
    """
    nodes, brief = found["nodes"], False
    while True:
        kept = {**found, "nodes": nodes, "left_out": len(found["nodes"]) - len(nodes)}
        text = json.dumps({"view": kept}, separators=(",", ":"))
        if len(text) <= MOST_TEXT:
            return text
        if brief:
            nodes = nodes[: len(nodes) * MOST_TEXT // len(text)]
        else:
            nodes, brief = [_brief(node) for node in nodes], True


def _brief(node: dict[str, Any]) -> dict[str, Any]:
    """Return a node without the details of its summary; they become None, which means unknown."""
    summary = node.get("summary")
    return node if summary is None else {
        **node, "summary": {**summary, "gpus": None, "sessions": None, "data": None},
    }  # fmt: skip


class Desk:
    """A ledger in an event loop.

    Parameters
    ----------
    post:
        Sends an answer, as text, to a node. The answer may be lost.
    """

    def __init__(
        self,
        limits: ev.Limits,
        members: Iterable[str],
        post: Callable[[str, str], None],
        *,
        ttl: float = TTL,
        margin: float = MARGIN,
    ) -> None:
        self._ledger = Ledger(
            secrets.token_hex(8), limits, members, time.monotonic(), ttl=ttl, margin=margin
        )
        self._post = post
        self._timer: asyncio.TimerHandle | None = None
        self._strangers: set[str] = set()
        #: Set when a later ledger has taken over.
        self.superseded = asyncio.Event()

    def report(self, text: str) -> str:
        """Handle a report; return the name of its node.

        Raises
        ------
        ValueError, KeyError, TypeError, IndexError
            If ``text`` is not a report.
        """
        report = report_from_json(json.loads(text))
        self._do(ev.Reported(now=time.monotonic(), report=report))
        if report.looks:
            self._post(report.node, view_text(self.view()))
        return report.node

    def pass_on(self, node: str, text: str) -> None:
        """Send a letter to the agent of a node.

        If the letter is an order and the node is silent, send a refusal to the order's sender
        instead. Without the refusal, the sender's broker would wait for a minute.
        """
        known = self._ledger.nodes.get(node)
        age = 0.0 if known is None else time.monotonic() - known.seen
        if age <= self._ledger.ttl or not self._return(node, text, age):
            self._post(node, text)

    def _return(self, node: str, text: str, age: float) -> bool:
        """Send a refusal to an order's sender; return False if ``text`` is no order."""
        try:
            letter = json.loads(text)["letter"]
            sender, name = str(letter["from"]), str(letter["name"])
        except (ValueError, KeyError, TypeError):
            return False
        refusal = RefusedError(
            f"{node} does not answer: its agent last reported {format_seconds(age)} ago.",
            code=Code.UNREACHABLE,
            next_step="Kernels there probably still run. Try again, or ask your administrator.",
        )
        result = json.dumps(error_message(refusal, None))
        self._post(sender, json.dumps({"letter": {"name": name, "result": result}},
                                      separators=(",", ":")))  # fmt: skip
        return True

    def fence(self, node: str) -> None:
        """Record an admin's statement that no kernel runs on a node any more."""
        self._do(ev.Fenced(now=time.monotonic(), node=node))

    def drain(self, node: str, drains: bool) -> None:
        """Order a node to drain and to leave, or to come back."""
        self._do(ev.DrainAsked(now=time.monotonic(), node=node, drains=drains))

    def change(self, limits: ev.Limits, members: Iterable[str]) -> None:
        """Replace the limits and the members."""
        now = time.monotonic()
        self._do(ev.LimitsChanged(now=now, limits=limits))
        self._do(ev.MembersChanged(now=now, names=frozenset(members)))

    def view(self) -> dict[str, Any]:
        """Return a view for people: the members, and how much of each limit counts for each."""
        self._do(ev.Tick(now=time.monotonic()))
        return {
            "epoch": list(self._ledger.epoch),
            "serving": self._ledger.serving,
            "nodes": [
                {
                    "name": node.name,
                    "life": node.life,
                    "state": node.state,
                    "age": node.age,
                    "counted": [[*key, amount] for key, amount in node.counted.items()],
                    "summary": None if node.summary is None else node.summary._asdict(),
                }
                for node in self._ledger.views()
            ],
        }

    def _do(self, event: ev.Event) -> None:
        for action in self._ledger.handle(event):
            if isinstance(action, ev.Send):
                text = json.dumps(loan_to_json(action.answer), separators=(",", ":"))
                self._post(action.answer.node, text)
            elif isinstance(action, ev.Stranger):
                if action.node not in self._strangers:
                    self._strangers.add(action.node)
                    _LOG.warning(
                        "%s reports, but c.GPUPool.cluster_nodes does not name it", action.node
                    )
            elif isinstance(action, ev.FenceDropped):
                _LOG.warning(_REPORTS if action.reported else _BORROWED, action.node)
            else:
                _LOG.warning("A later ledger (%s) has taken over", action.by.ledger)
                self.superseded.set()
        at = self._ledger.next_wakeup()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if at < float("inf"):
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(
                max(0.0, at - time.monotonic()), lambda: self._do(ev.Tick(now=time.monotonic()))
            )
