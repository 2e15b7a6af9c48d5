# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Requests into pool events, answers back. One method per message type of the protocol."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Mapping, Sequence

from ... import procfs
from ...config.settings import usable_attach
from ...errors import Code, RefusedError
from ...pool import events as e
from ...pool.limits import blame_default, default_request, fit_unasked
from ...pool.model import Refusal
from ...protocol import READS, VERSION, Message, encode
from ...states import POLICIES, AttachPolicy
from ..lives import Lives
from ..pages.control import Pages, environment
from ..pages.hints import Homes
from ..runner import Runner, refused
from ..sessions import Session
from ..store.history import MAX_ROWS, History, Page, Query
from ..store.journal import Row
from ..store.records import request_to_json
from ..transport.auth import Access, owner_of
from ..transport.connection import Connection, Counters
from ..transport.dispatch import POINTS_PER_SECOND, Dispatcher
from ..transport.listener import connection_limit
from .agent import Agents
from .guard import Guards
from .parsing import MAX_NAME, named, read_request
from .people import Wishes, note_refusal
from .snapshot import Shown, Snapshots

if TYPE_CHECKING:
    from ..gpu.maintenance import Maintenance

#: Connections that one user may have, for each session allowed; of all connections a part.
CONNECTIONS_PER_SESSION, USERS_SHARE = 8, 4

#: Connections of one user to which rows of the journal are pushed.
MAX_WATCHERS = 64

#: Messages by which a session's own processes first speak.
_OF_PROCESSES = frozenset({"hello", "attach", "grow"})


class Handlers:
    """What every connection talks to (see ``transport.connection.Service``).

    ``environment`` returns the variables that show a kernel its devices;
    ``usable_attach`` is the policy of a session that does not choose.
    """

    def __init__(
        self,
        runner: Runner,
        access: Access,
        snapshots: Snapshots,
        homes: Homes,
        *,
        attach: AttachPolicy,
        max_sessions: int,
        environment: Callable[[Sequence[str]], dict[str, str]],
        log: logging.Logger,
    ) -> None:
        self.runner = runner
        self.sessions = runner.sessions
        self.access = access
        self.attach = attach
        self.max_sessions = max_sessions
        self.environment = environment
        self.log = log
        self.counters = Counters()
        self.dispatcher = Dispatcher()
        self.history = History(runner.journal.path)
        self._shown = Shown(runner, snapshots)
        #: Why no device was found; empty if there are some.
        self.no_device = ""
        #: Whether kernels of this broker run under the guard on some device.
        self.guarded = False
        #: Why they do not, as a sentence.
        self.guard_problem = ""
        #: Why kernels cannot have a page although their devices are guarded; empty if they can.
        self.unguardable = ""
        #: Whether a kernel that cannot have a page is started all the same.
        self.allow_unguarded = False
        #: Where its library is, their pages, and what the guard in them asks.
        self.guard_directory = Path()
        self.pages: Pages | None = None
        self.guards: Guards | None = None
        #: Makes a session safe to kill; and why this driver needs that ("": it does not).
        self.retire: Callable[[Session, Callable[[bool], None]], None] = lambda _s, done: done(True)
        self.hazard: Callable[[], str] = lambda: ""
        #: Called once, when the first request has been handled that is more than a look.
        self.on_served: Callable[[], None] | None = None
        #: Takes devices out of service and gives them back; the application sets it.
        self.maintenance: Maintenance | None = None
        #: When (loop time) somebody last connected.
        self.last_connection = asyncio.get_running_loop().time()
        self._snapshots = snapshots
        self._homes = homes
        self._connections: set[Connection] = set()
        self._watchers: set[Connection] = set()
        self._most_connections = connection_limit()
        self.lives = Lives(runner, log)
        self.agents = Agents(runner, self.lives, snapshots, log)
        self.wishes = Wishes(runner, self.lives, self._acting)
        self._methods: dict[str, Callable[[Connection, Message], None]] = {
            "open": self._open,
            "launched": self._launched,
            "close": self._close,
            "hello": self.agents.hello,
            "hold": self.agents.hold,
            "drop": self.agents.drop,
            "cancel": self.agents.cancel,
            "yielded": self.agents.yielded,
            "resting": self.agents.resting,
            "request": self.wishes.request,
            "release": self.wishes.release,
            "keep": self.wishes.keep,
            "status": self._status,
            "journal": self._journal,
            "watch": self._watch,
            "ping": self._ping,
            "maintain": self._maintain,
            "retire": self._retire,
        }

    def use_guard(self, pages: Pages, guards: Guards) -> None:
        """From now on serve the guard in the sessions' processes."""
        self.pages, self.guards = pages, guards
        self._methods |= {"attach": guards.attach, "grow": guards.grow}
        self._methods |= {"home": guards.home, "page": guards.page}
        self._methods |= {"land": guards.land}
        self.wishes.on_request = guards.request_changed

    # ------------------------------------------------------------------ Service

    def connected(self, connection: Connection) -> None:
        uid = connection.peer.uid
        self.access.check_connect(connection.peer)
        most = min(
            max(1000, self.max_sessions * CONNECTIONS_PER_SESSION),
            self._most_connections // USERS_SHARE if self.access.machine_wide else 1 << 30,
        )
        if len(connection.account.connections) >= most:
            raise RefusedError(
                f"User id {uid} has {most} connections to the broker already.", code=Code.TOO_MANY
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
        if message["type"] not in READS:
            self.runner.version += 1
        speaker = connection.session
        if speaker is None and message["type"] in _OF_PROCESSES:
            speaker = self.sessions.find(message["session"])
        if speaker is not None:
            speaker.messages += 1
        method = self._methods.get(message["type"])
        if method is None:
            raise RefusedError(
                "No kernel of this broker runs under the guard.",
                code=Code.NO_GUARD,
                next_step="Restart the kernel.",
            )
        method(connection, message)
        if self.on_served is not None and message["type"] not in READS:
            served, self.on_served = self.on_served, None
            served()

    def disconnected(self, connection: Connection) -> None:
        self.runner.version += 1
        self._connections.discard(connection)
        if connection in self._watchers:
            self._watchers.remove(connection)
            connection.account.watchers -= 1
        if connection.early is not None:
            connection.early.drop_early(connection)
        for name in list(connection.opened):
            session = self.sessions.find(name)
            if session is not None and session.process is None:
                self.lives.end(
                    session, "the server that opened it went away before its kernel started"
                )
        if self.guards is not None:
            self.guards.gone(connection)
        session = connection.session
        if session is not None and session.agent is connection:
            self.lives.agent_gone(session)

    def close_all(self) -> None:
        """End every connection: the broker ends."""
        self.dispatcher.close()
        self.history.close()
        for connection in list(self._connections):
            connection.close()

    def show_row(self, row: Row) -> None:
        """Push a journal row to those who watch and may see it."""
        line = encode({"type": "event", **row.as_message()}) if self._watchers else b""
        for connection in [*self._watchers]:
            if self._may_see(connection, row):
                connection.send_line(line)

    # ------------------------------------------------------------------ a provisioner

    def _open(self, connection: Connection, message: Message) -> None:
        peer = connection.peer
        owner = owner_of(peer.uid, peer.gid)
        if self.no_device:
            raise RefusedError(
                f"This pool has no GPU: {self.no_device}",
                code=Code.NO_DEVICE,
                next_step="See `jupyter gpupool doctor`, or try c.GPUPool.emulate = '2x16GiB'.",
            )
        if sum(1 for s in self.sessions if s.uid == peer.uid) >= self.max_sessions:
            raise RefusedError(
                f"You have {self.max_sessions} sessions in this pool, the most for one user "
                "(c.GPUPool.max_sessions_per_user).",
                code=Code.TOO_MANY,
                next_step="Shut down kernels that you do not need, or ask your administrator.",
                details={"allowed": self.max_sessions},
            )
        attach = message.get("attach") or self.attach
        if attach not in POLICIES:
            raise RefusedError(
                f"There is no attach policy {attach[:40]!r}; there are cell, manual and lazy.",
                code=Code.BAD_REQUEST,
            )
        settings, fields = self.runner.pool.settings, message.get("request", {})
        request = read_request(default_request(settings), fields)
        capacities = self._snapshots.capacities()
        asked = named(fields)
        request = fit_unasked(request, asked, settings, owner.name, capacities)
        session, token = self.sessions.new(owner, peer.uid, message["kernel_id"][:MAX_NAME])
        session.home = self._homes.first(request)
        env = self.environment(session.home)
        guarded = self._guard_environment(session, env, request.limit)
        if not guarded:
            # Without a page nobody would ask at the first call.
            attach, _ = usable_attach(attach, False)
        self.sessions.add(session)
        outcome: list[tuple[Refusal | None, str]] = []
        rid = f"open {session.id}"
        self.runner.expect(rid, lambda refusal, note: outcome.append((refusal, note)))
        self.runner.handle(
            e.SessionOpened(
                now=self.runner.now(), session=session.id, owner=owner, request=request,
                attach=attach, label=message.get("label", "")[:MAX_NAME], rid=rid,
                lands=bool(guarded),
            )
        )  # fmt: skip
        self.runner.forget(rid)
        if outcome and outcome[0][0] is not None:
            self.sessions.remove(session.id)
            if self.pages is not None:
                self.pages.remove(session)
            refusal = blame_default(outcome[0][0], asked)
            note_refusal(self.runner, None, "open", refusal, owner=owner.name)
            raise refused(refusal)
        session.opener = connection
        connection.opened.add(session.id)
        self.lives.expect_launch(session)
        self.runner.note(
            "open",
            session,
            detail={
                "label": message.get("label", "")[:MAX_NAME],
                "kernel_id": session.kernel_id,
                "request": request_to_json(request),
                "attach": attach,
            },
        )
        self.runner.commit()
        self.runner.on_population(len(self.sessions))
        env |= guarded
        env |= {
            "GPUPOOL_SOCKET": str(self._snapshots.socket),
            "GPUPOOL_SESSION": session.id,
            "GPUPOOL_TOKEN": token,
            "GPUPOOL_ATTACH": attach,
        }
        connection.answer(
            message.get("id"),
            {
                "session": session.id,
                "token": token,
                "attach": attach,
                "request": request_to_json(request),
                "env": env,
                "config": self._snapshots.config(peer),
                "pid": os.getpid(),
                "broker": {"machine_wide": self.access.machine_wide},
                "retire": bool(self.hazard()),
            },
        )

    def _guard_environment(
        self, session: Session, env: Mapping[str, str], limit: int
    ) -> dict[str, str]:
        """Make the page of a new session; return the variables that put it under the guard."""
        home, problem = ",".join(session.home), self.unguardable
        if self.pages is not None and self.guarded:
            try:
                page = self.pages.create(session, [*session.home], limit)
                return environment(self.guard_directory, page, env, home)
            except OSError as error:
                problem = f"The page that it shares with the broker cannot be made: {error}."
        if not problem:
            return {}
        if not self.allow_unguarded:
            raise RefusedError(
                f"The kernel was not started, because it would run without the guard. {problem}",
                code=Code.NO_PAGE,
                next_step="Free memory where the pages are (`df -h /dev/shm /run`), or set "
                "c.GPUPool.allow_unguarded = True.",
            )
        self.log.error("Session %s runs without the guard. %s", session.id, problem)
        return {}

    def _launched(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        pid = message["pid"]
        process = procfs.identify(pid) if pid > 0 else None
        if process is None:
            raise RefusedError(f"There is no process {pid}.", code=Code.NO_PROCESS)
        if session.process == process:
            connection.answer(message.get("id"))
            return
        if session.process is not None:
            raise RefusedError(
                f"Session {session.id} already has process {session.process.pid}.",
                code=Code.ALREADY_LAUNCHED,
                next_step="Open a session for each process.",
            )
        uid = procfs.real_uid(pid)
        if uid != session.uid:
            raise RefusedError(
                f"Process {pid} belongs to user id {uid} and the session to {session.uid}.",
                code=Code.NOT_YOURS,
            )
        other = self.sessions.of_process(process)
        if other is not None:
            raise RefusedError(
                f"Process {pid} already belongs to session {other.id}.", code=Code.ALREADY_LAUNCHED
            )
        session.process = process
        session.opener = None
        connection.opened.discard(session.id)
        if session.launch_timer is not None:
            session.launch_timer.cancel()
            session.launch_timer = None
        self.lives.watch_process(session)
        self.runner.dirty(session.id)
        self.runner.commit()
        connection.answer(message.get("id"))
        for sender, waiting in session.take_early():
            if sender.open:
                sender.attempt(waiting, self._methods[waiting["type"]])

    def _close(self, connection: Connection, message: Message) -> None:
        session = self.sessions.find(message["session"])
        if session is not None:
            self._check_may_act(connection, session)
            self.lives.end(session, message.get("reason", "")[:MAX_NAME] or "closed by its server")
        connection.answer(message.get("id"))

    # ------------------------------------------------------------------ anybody

    def _status(self, connection: Connection, message: Message) -> None:
        if "id" not in message:
            return
        reads = connection.account.reads
        frugal = reads.left(asyncio.get_running_loop().time()) < reads.size / 2
        connection.send_line(
            self._shown.line(
                connection.peer, message["id"], self.counters.snapshot(), frugal=frugal
            )
        )

    def _journal(self, connection: Connection, message: Message) -> None:
        if "id" not in message:
            return
        self.runner.commit()
        peer = connection.peer
        owner = None if self.access.is_admin(peer) else owner_of(peer.uid, peer.gid).name
        query = Query(
            message.get("after", 0), message.get("limit", MAX_ROWS), message.get("session", ""),
            owner,
        )  # fmt: skip
        newest = self.runner.journal.seq

        def done(found: Page | sqlite3.Error) -> None:
            if isinstance(found, Page):
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
        self.history.ask(peer.uid, query, done)

    def _watch(self, connection: Connection, message: Message) -> None:
        if connection not in self._watchers:
            if connection.account.watchers >= MAX_WATCHERS:
                raise RefusedError(
                    f"User id {connection.peer.uid} already watches {MAX_WATCHERS} times.",
                    code=Code.TOO_MANY,
                )
            connection.account.watchers += 1
            self._watchers.add(connection)
        connection.answer(message.get("id"), {"seq": self.runner.journal.seq})

    def _retire(self, connection: Connection, message: Message) -> None:
        session = self._acting(connection, message)
        request = message.get("id")
        self.retire(session, lambda safe: connection.answer(request, {"safe": safe}))

    def _maintain(self, connection: Connection, message: Message) -> None:
        assert self.maintenance is not None
        self.maintenance.maintain(connection, message)

    def _ping(self, connection: Connection, message: Message) -> None:
        connection.answer(message.get("id"))

    # ------------------------------------------------------------------ internals

    def _acting(self, connection: Connection, message: Message) -> Session:
        """Return the session that the message is about, if its sender may act on it."""
        name = message.get("session")
        session = self.agents.session_of(connection) if name is None else self.sessions.get(name)
        self._check_may_act(connection, session)
        return session

    def _check_may_act(self, connection: Connection, session: Session) -> None:
        if not self.access.may_act(connection.peer, session.uid):
            raise RefusedError(
                f"Session {session.id} belongs to another user.",
                code=Code.NOT_ALLOWED,
                next_step="Ask its owner or an admin.",
            )

    def _may_see(self, connection: Connection, row: Row) -> bool:
        peer = connection.peer
        return row.owner == owner_of(peer.uid, peer.gid).name or self.access.is_admin(peer)
