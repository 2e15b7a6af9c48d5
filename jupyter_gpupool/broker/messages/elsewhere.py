# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tells a kernel on this machine how other machines of the cluster affect its wait."""

from __future__ import annotations

from collections.abc import Callable

from ...cluster.considering import considered, elsewhere, sentences
from ...cluster.placing import PlacementRequest
from ...protocol import Message
from ..cluster_views import View
from ..configuration import Configuration
from ..core import Core
from ..transport.connection import Connection
from .parsing import acting

Look = Callable[[Connection, "int | None", Callable[["View | None"], None]], None]


class ElsewhereMessages:
    """Handles ``elsewhere``.

    Parameters
    ----------
    look:
        Gets the ledger's view of all machines, and calls the given function with it. The function
        gets None if the broker has no recent view.
    """

    def __init__(self, core: Core, configuration: Configuration, node: str, *, look: Look) -> None:
        self._core = core
        self._configuration = configuration
        self._node = node
        self._look = look

    def elsewhere(self, connection: Connection, message: Message) -> None:
        """Answer with sentences for people, and with what each other machine has or lacks."""
        acting(self._core, self._configuration.access, connection, message)
        self._look(
            connection, message.get("id"),
            lambda view: connection.attempt(message, lambda c, m: self._answer(c, m, view)),
        )  # fmt: skip

    def _answer(self, connection: Connection, message: Message, view: View | None) -> None:
        # Find the session again, because it may have ended while the broker asked the ledger.
        session = acting(self._core, self._configuration.access, connection, message)
        request = self._core.pool.request(session.id)
        wanted = PlacementRequest(
            session.owner.name, request.memory, request.devices, session.model, session.data
        )
        found = considered(view, self._node, wanted)
        told = elsewhere(view, self._node, session.owner.name, session.owner.group)
        connection.answer(message.get("id"), {
            "machines": [*told, *sentences(self._node, wanted, found)],
            "considered": [[name, text] for name, text in found.items()],
        })  # fmt: skip
