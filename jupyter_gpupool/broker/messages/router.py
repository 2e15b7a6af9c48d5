# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Passes each message to its method; accepts, refuses and ends connections."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Callable

from ...errors import Code, RefusedError
from ...protocol import Message
from ..configuration import Configuration
from ..core import Core
from ..gpu.maintenance import Maintenance
from ..lifecycle import Lifecycle
from ..request_fields import READS
from ..store.files import StartRecordFile
from ..transport.auth import shown
from ..transport.connection import Connection, Counters
from ..transport.dispatch import Dispatcher
from ..transport.listener import connection_limit
from .admin import AdminMessages
from .agent import AgentMessages
from .guard import GuardMessages
from .people import PeopleMessages
from .provisioner import ProvisionerMessages

if TYPE_CHECKING:
    # Loaded only on a machine of a cluster.
    from ..shared import SharedLimits
    from .elsewhere import ElsewhereMessages
    from .remote import RemoteMessages

#: One user may have 8 connections for each allowed session, and at least 1000. If the broker serves
#: all users of the machine, one user may have at most a quarter of all connections.
CONNECTIONS_PER_SESSION, USERS_SHARE = 8, 4

#: A process of a session may send these types of messages on a new connection. The session that the
#: message names then counts the message. (``home``, ``page`` and ``land`` are not counted.)
_OF_PROCESSES = frozenset({"hello", "attach", "grow"})


class Router:
    """Receives the messages of every connection (see ``transport.connection.Service``)."""

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        *,
        lifecycle: Lifecycle,
        provisioner: ProvisionerMessages,
        agent: AgentMessages,
        guard: GuardMessages,
        people: PeopleMessages,
        admin: AdminMessages,
        maintenance: Maintenance,
        start_record: StartRecordFile,
        shared: SharedLimits | None,
        remote: RemoteMessages | None,
        elsewhere: ElsewhereMessages | None,
        log: logging.Logger,
    ) -> None:
        self.log = log
        self.counters = Counters()
        self.dispatcher = Dispatcher()
        #: Loop time of the last new connection.
        self.last_connection = asyncio.get_running_loop().time()
        self._core = core
        self._configuration = configuration
        self._lifecycle = lifecycle
        self._guard = guard
        self._people = people
        self._start_record = start_record
        self._shared = shared
        self._remote = remote
        self._connections: set[Connection] = set()
        self._most_connections = connection_limit()
        self._methods: dict[str, Callable[[Connection, Message], None]] = {
            "open": provisioner.open,
            "launched": provisioner.launched,
            "retire": provisioner.retire,
            "close": provisioner.close,
            "hello": agent.hello,
            "hold": agent.hold,
            "drop": agent.drop,
            "cancel": agent.cancel,
            "yielded": agent.yielded,
            "resting": agent.resting,
            "attach": guard.attach,
            "grow": guard.grow,
            "home": guard.home,
            "page": guard.page,
            "land": guard.land,
            "request": people.request,
            "release": people.release,
            "keep": people.keep,
            "status": people.status,
            "why": people.why,
            "hour": people.hour,
            "journal": people.journal,
            "watch": people.watch,
            "ping": people.ping,
            "maintain": maintenance.maintain,
            "recall": admin.recall,
            "prioritise": admin.prioritise,
            "end": admin.end,
            "account": shared.account if shared is not None else _alone,
            "lend": shared.lend if shared is not None else _alone,
            "cluster": shared.cluster if shared is not None else _alone,
            "leave": shared.leave if shared is not None else _alone,
            "elsewhere": elsewhere.elsewhere if elsewhere is not None else _alone,
            "place": remote.place if remote is not None else _alone,
            "order": remote.order if remote is not None else _alone,
            "orders": remote.orders if remote is not None else _alone,
            "perform": remote.perform if remote is not None else _alone,
            "performed": remote.performed if remote is not None else _alone,
        }

    def connected(self, connection: Connection) -> None:
        """Accept a connection, or refuse it."""
        access = self._configuration.access
        access.check_connect(connection.peer)
        sessions = self._configuration.settings.max_sessions_per_user
        most = min(
            max(1000, sessions * CONNECTIONS_PER_SESSION),
            self._most_connections // USERS_SHARE if access.machine_wide else 1 << 30,
        )
        if len(connection.account.connections) >= most:
            raise RefusedError(
                f"{shown(connection.peer.uid)} already has {most} connections to the broker, and "
                "may have no more.",
                code=Code.TOO_MANY,
            )
        if len(self._connections) >= self._most_connections:
            raise RefusedError(
                f"The broker has {self._most_connections} connections, and no file descriptors "
                "for more.",
                code=Code.TOO_MANY,
                next_step="Close other kernels, or have an admin raise the broker's limit of open "
                "files.",
            )
        self._connections.add(connection)
        self.last_connection = asyncio.get_running_loop().time()

    def received(self, connection: Connection, message: Message) -> None:
        """Pass a request to its method."""
        reads = message["type"] in READS
        if not reads:
            self._core.touched()
        speaker = connection.session
        if speaker is None and message["type"] in _OF_PROCESSES:
            speaker = self._core.sessions.find(message["session"])
        if speaker is not None:
            speaker.messages += 1
        self._methods[message["type"]](connection, message)
        if not reads:
            self._start_record.served()

    def disconnected(self, connection: Connection) -> None:
        """After the end of a connection, end its waits, requests, and sessions without a kernel."""
        self._core.touched()
        self._connections.discard(connection)
        self._people.gone(connection)
        if self._shared is not None:
            self._shared.gone(connection)
        if self._remote is not None:
            self._remote.gone(connection)
        if connection.early is not None:
            connection.early.drop_early(connection)
        for name in list(connection.opened):
            session = self._core.sessions.find(name)
            if session is not None and session.process is None:
                self._lifecycle.end(
                    session, "the server that opened it disconnected before the kernel started"
                )
        self._guard.gone(connection)
        session = connection.session
        if session is not None and session.agent is connection:
            self._lifecycle.agent_gone(session)
        elif session is not None:
            self._lifecycle.member_gone(session, connection)

    def close(self) -> None:
        """End every connection, because the broker ends."""
        self.dispatcher.close()
        self._people.close()
        if self._shared is not None:
            self._shared.close()
        if self._remote is not None:
            self._remote.close()
        for connection in list(self._connections):
            connection.close()


def _alone(connection: Connection, message: Message) -> None:  # noqa: ARG001
    raise RefusedError(
        "This broker is not in a cluster: it shares no limits with other machines.",
        code=Code.BAD_REQUEST,
        next_step="Set c.GPUPool.cluster_nodes, and start the broker again.",
    )
