# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Handles requests of people: change, release or keep a slice; show the pool and its history."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress

from ...errors import Code, GPUPoolError, RefusedError
from ...pool import events as e
from ...protocol import VERSION, Message, encode
from ..configuration import Configuration
from ..core import Core
from ..gpu.monitor import Monitor
from ..hour import HourBook
from ..lifecycle import Lifecycle
from ..sessions import LiveSession
from ..store.history import MAX_ROWS, JournalPage, JournalReader, Query
from ..store.journal import Row
from ..transport.auth import owner_of, shown
from ..transport.connection import Connection
from ..transport.dispatch import POINTS_PER_SECOND
from .explanation import explanation
from .parsing import acting, read_request
from .relay import Relay
from .snapshot import Snapshots, StatusAnswers

#: The most connections of one user to which the broker pushes rows of the journal.
MAX_WATCHERS = 64

#: The most requests that may wait for a new sample at the same time. A further request uses the
#: last sample.
MAX_LOOKS = 16

#: The broker refuses a ``keep`` for more seconds than this as a mistake. For a shorter ``keep``,
#: the option ``max_keep`` sets the limit.
YEAR = 365 * 86400


class PeopleMessages:
    """Handles the requests of people.

    These are ``request``, ``release``, ``keep``, ``status``, ``why``, ``hour``, ``journal``,
    ``watch`` and ``ping``.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        *,
        lifecycle: Lifecycle,
        monitor: Monitor,
        relay: Relay,
        snapshots: Snapshots,
        hour: HourBook,
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._lifecycle = lifecycle
        self._monitor = monitor
        self._relay = relay
        self._answers = StatusAnswers(core, snapshots)
        self._hour = hour
        self._history = JournalReader(core.journal.path)
        self._watchers: set[Connection] = set()
        self._looks: set[asyncio.Task[None]] = set()
        core.read_rows(self._show_row)
        core.stirs.read(self._show_stir)
        core.stirs.read_queue(self._show_queue)

    def close(self) -> None:
        """Stop reading the journal, because the broker ends."""
        self._history.close()

    def gone(self, connection: Connection) -> None:
        """Stop sending rows to a connection that has ended."""
        if connection in self._watchers:
            self._watchers.remove(connection)
            connection.account.watchers -= 1

    # ------------------------------------------------------------------ of a session

    def request(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        record = self._lifecycle.record(session)
        memory = read_request(record.request, message).memory
        # The guard counts the memory in use exactly, but the broker's copy of the count may be as
        # old as the last sample. So with a guard, each request for less than the slice needs a new
        # sample.
        guarded = session.page is not None and any(memory < s.bytes for s in record.slices)
        shrinks = memory < record.footprint or guarded
        if not shrinks or len(self._looks) >= MAX_LOOKS:
            self._request_now(connection, message)
            return
        # The last sample may show too much memory in use, because the kernel may have freed memory
        # since. So take a new sample first.
        task = asyncio.get_running_loop().create_task(self._look_first(connection, message))
        self._looks.add(task)
        task.add_done_callback(self._looks.discard)

    async def _look_first(self, connection: Connection, message: Message) -> None:
        with suppress(GPUPoolError):
            await self._monitor.look()
        if connection.open:
            connection.attempt(message, self._request_now)

    def _request_now(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        request = read_request(self._lifecycle.record(session).request, message)
        self._relay.ask(
            connection,
            message,
            session,
            lambda rid: e.RequestChanged(
                now=self._core.now(), session=session.id, request=request, rid=rid
            ),
        )

    def release(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        self._relay.ask(
            connection,
            message,
            session,
            lambda rid: e.ReleaseAsked(now=self._core.now(), session=session.id, rid=rid),
        )

    def keep(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        seconds = float(message["seconds"])
        if not 0 <= seconds <= YEAR:
            raise RefusedError(
                f"A slice cannot be kept for {seconds:g} seconds.",
                code=Code.BAD_REQUEST,
                next_step="Write for example %gpu keep 10m.",
            )
        until = self._core.now() + seconds
        self._relay.ask(
            connection,
            message,
            session,
            lambda rid: e.KeepAsked(now=self._core.now(), session=session.id, until=until, rid=rid),
        )

    # ------------------------------------------------------------------ what people look at

    def status(self, connection: Connection, message: Message) -> None:
        if "id" not in message:
            return
        reads = connection.account.reads
        frugal = reads.left(asyncio.get_running_loop().time()) < reads.size / 2
        connection.send_line(
            self._answers.line(
                connection.peer,
                message["id"],
                connection.service.counters.snapshot(),
                frugal=frugal,
            )
        )

    def why(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        # This event makes the pool plan again. Without the event, the times in the answer would be
        # those of the last plan.
        self._core.handle(e.Tick(now=self._core.now()))
        record = self._lifecycle.record(session)
        told = self._core.pool.why(session.id)
        clustered = bool(self._configuration.settings.cluster_nodes)
        connection.answer(message.get("id"), {**explanation(told, record), "clustered": clustered})

    def hour(self, connection: Connection, message: Message) -> None:
        """Answer with the last hour of the devices and the queue. The answer names no user."""
        connection.answer(message.get("id"), self._hour.shown())

    def journal(self, connection: Connection, message: Message) -> None:
        if "id" not in message:
            return
        self._core.commit()
        peer = connection.peer
        owner = None if self._configuration.access.is_admin(peer) else owner_of(peer.uid).name
        query = Query(
            message.get("after", 0), message.get("limit", MAX_ROWS), message.get("session", ""),
            owner,
        )  # fmt: skip
        newest = self._core.journal.seq

        def done(found: JournalPage | sqlite3.Error) -> None:
            if isinstance(found, JournalPage):
                head = f'{{"v":{VERSION},"type":"ok","id":{message["id"]},"seq":{newest},'
                rest = f'"more":{"true" if found.more else "false"},"rows":[{found.rows}]}}\n'
                connection.send_line((head + rest).encode())
                connection.end_read(found.seconds * POINTS_PER_SECOND)
            else:
                connection.refuse(
                    message["id"],
                    RefusedError(f"The journal cannot be read now ({found}).", code=Code.JOURNAL),
                )
                connection.end_read(0.0)

        connection.begin_read()
        self._history.ask(peer.uid, query, done)

    def watch(self, connection: Connection, message: Message) -> None:
        if connection not in self._watchers:
            if connection.account.watchers >= MAX_WATCHERS:
                raise RefusedError(
                    f"{shown(connection.peer.uid)} already has {MAX_WATCHERS} journal watchers, "
                    "and may have no more.",
                    code=Code.TOO_MANY,
                )
            connection.account.watchers += 1
            self._watchers.add(connection)
        connection.answer(message.get("id"), {"seq": self._core.journal.seq})

    def ping(self, connection: Connection, message: Message) -> None:
        connection.answer(message.get("id"))

    def _show_row(self, row: Row) -> None:
        """Push a journal row to the watching connections that may see it."""
        line = encode({"type": "event", **row.as_message()}) if self._watchers else b""
        for connection in [*self._watchers]:
            if self._may_see(connection, row.owner):
                connection.send_line(line)

    def _show_stir(self, name: str) -> None:
        """Tell the watchers that may see a session that it has changed without a journal row."""
        session = self._core.sessions.find(name) if self._watchers else None
        if session is None:
            return
        line = encode({"type": "stirred", "session": name})
        for connection in [*self._watchers]:
            if self._may_see(connection, session.owner.name):
                connection.send_line(line)

    def _show_queue(self) -> int:
        """Tell the watchers that may see an idle session about a change of the queue.

        After the change, more or fewer sessions may wait for the slice of an idle session. The
        message names one idle session that the watcher may see. Return the number of messages.
        """
        owners: dict[str, str] = {}
        for name, (_, idle_since) in self._core.pool.leases().items() if self._watchers else ():
            session = self._core.sessions.find(name) if idle_since is not None else None
            if session is not None:
                owners[session.owner.name] = name
        told = 0
        for connection in [*self._watchers]:
            peer = connection.peer
            found = owners.get(owner_of(peer.uid).name)
            if found is None and self._configuration.access.is_admin(peer):
                found = next(iter(owners.values()), None)
            if found is not None:
                connection.send_line(encode({"type": "stirred", "session": found}))
                told += 1
        return told

    def _may_see(self, connection: Connection, owner: str) -> bool:
        peer = connection.peer
        mine = owner == owner_of(peer.uid).name
        return mine or self._configuration.access.is_admin(peer)

    def _acting(self, connection: Connection, message: Message) -> LiveSession:
        return acting(self._core, self._configuration.access, connection, message)
