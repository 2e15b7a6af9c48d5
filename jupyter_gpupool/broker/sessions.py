# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the broker knows of each session besides the pool's record: process, token, connections."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping

from .. import procfs
from ..errors import Code, GPUPoolError, RefusedError
from ..guard.page import Page
from ..pool.model import Owner
from ..procfs import ProcessId, alive, open_pidfd
from ..protocol import Message
from .gpu.refusals import Refusals
from .transport.auth import Peer, User
from .transport.connection import Connection

#: The most messages of one session, and of all sessions of a user, that may wait for ``launched``.
MAX_EARLY, MAX_EARLY_OF_USER = 16, 256


def digest(token: str) -> str:
    """Return the hash of a token.

    The broker needs only the hash to check a token. The journal has the hash, and a reader of the
    journal cannot use it as a token.
    """
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass
class PendingHold:
    """A hold request that has no answer yet."""

    connection: Connection
    request_id: int | None

    def answer(self, fields: Mapping[str, Any]) -> None:
        """Answer the request."""
        self.connection.end_wait()
        self.connection.answer(self.request_id, fields)

    def refuse(self, error: GPUPoolError) -> None:
        """Answer the request with an error."""
        self.connection.end_wait()
        self.connection.refuse(self.request_id, error)


@dataclass
class Use:
    """A session's use of its devices, as last read from its page."""

    #: Bytes by device, contexts included; empty before the first read.
    counted: Mapping[str, int] = field(default_factory=dict)
    #: Threads that wait at the gate.
    waiting: int = 0
    #: The number of streams that record a graph, and the loop time of their last CUDA call.
    captures: int = 0
    captured_at: float = float("-inf")
    #: Whether the session has the hold for its CUDA activity. This is a copy, because asking the
    #: pool costs more.
    held: bool = False
    #: Why the session cannot be suspended; empty if no reason is known.
    pins: str = ""
    #: Whether its page says that other sessions wait for its memory; None until this broker has
    #: written the page.
    contended: bool | None = None
    #: ``busy_at``: loop time at which the broker last saw the session use CUDA. ``looked_at``: loop
    #: time at which the broker last checked this.
    busy_at: float = float("-inf")
    looked_at: float = float("-inf")
    #: Loop time at which its whole page was last read.
    read_at: float = float("-inf")
    #: Seconds with CUDA calls during its leases.
    busy_seconds: float = 0.0
    #: Seconds with a lease before this broker began to count ``busy_seconds``.
    attached_before: float = 0.0
    #: ``beyond``: for each device, the bytes that the driver uses minus the bytes that the guard
    #: charges, in the order in which the processes see their devices. ``explained``: by device, how
    #: many of these bytes the last sample explains.
    beyond: tuple[int, ...] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    #: The processes in its page when ``beyond`` and ``explained`` were measured.
    processes: Collection[ProcessId] = ()
    #: The device bytes that the session uses beyond its slices, and the number of consecutive
    #: samples that have shown this.
    overuse: int = 0
    overused: int = 0


@dataclass(eq=False)
class LiveSession:
    """What the broker knows of one session besides the pool's record."""

    id: str
    owner: Owner
    uid: User
    token_digest: str
    kernel_id: str
    #: The kernel's process, once launched.
    process: ProcessId | None = None
    #: The connection that opened the session, until the session is launched.
    opener: Connection | None = None
    agent: Connection | None = None
    #: By connection of a member: the holds of the member. A member is another program of the
    #: session, or the program that started the session.
    members: dict[Connection, set[str]] = field(default_factory=dict)
    death: Death | None = None
    #: By hold: the request that waits for it.
    waits: dict[str, PendingHold] = field(default_factory=dict)
    #: A timer that runs while the agent may reconnect and report holds that the broker does not
    #: know.
    grace: asyncio.TimerHandle | None = None
    #: A timer that runs from ``open`` to ``launched``.
    launch_timer: asyncio.TimerHandle | None = None
    #: By connection: a message that the process or one of its children sent before ``launched``.
    early: dict[Connection, Message] = field(default_factory=dict)
    #: The open ``yield`` request to the agent: epoch, and future for (yielded, cuda).
    yielding: tuple[int, asyncio.Future[tuple[bool, bool | None]]] | None = None
    #: Whether the process has called cuInit, as its agent last reported.
    cuda: bool | None = None
    #: The bytes that a suspend under way moves, by device. The journal keeps them for a broker that
    #: restarts during the suspend.
    moving: Mapping[str, int] = field(default_factory=dict)
    #: The time at which its present wait began, for the journal.
    queued_at: float = 0.0
    #: The number of messages that the agent and the guards of the session have sent.
    messages: int = 0
    #: The page that it shares with the guard in its processes; None without a guard.
    page: Page | None = None
    #: The devices that its processes see before a lease.
    home: tuple[str, ...] = ()
    #: The epoch of its lease, if other sessions wait for this lease. In this case, the agent must
    #: report when its cells end.
    wanted: int = -1
    #: By connection of a thread that waits at the gate and has asked for a lease: the request's id.
    guards: dict[Connection, int | None] = field(default_factory=dict)
    #: Its page's data when last read; see ``activity``.
    use: Use = field(default_factory=Use)
    #: The devices on which its processes make a context before they move to the session's slice.
    landing: tuple[str, ...] = ()
    #: The GPU model and the folders that it needs, if a cluster used them to choose the machine.
    model: str = ""
    data: tuple[str, ...] = ()
    #: The number of failed moves of its processes since the last success.
    not_landed: int = 0
    #: Its suspended processes, children first; empty once they are resumed.
    frozen: tuple[ProcessId, ...] = ()
    #: The consecutive restores that the driver refused although the device had room and the state
    #: still existed.
    refusals: Refusals = field(default_factory=Refusals)
    #: ``host_limit``: why its state can never fit into host memory, or "" if the state can fit.
    #: ``host_short``: the notice to its user while host memory is short, otherwise "".
    host_limit: str = ""
    host_short: str = ""
    #: Whether the broker has made its processes safe to kill, see ``actions.retire``.
    retired: bool = False

    def token_is(self, token: str) -> bool:
        """Return whether ``token`` is this session's."""
        return hmac.compare_digest(self.token_digest, digest(token))

    def may_have(self, pid: int) -> bool:
        """Return whether a process may belong to this session.

        The caller knows that the process's environment names this session, and that the process
        does not descend from the session's process.
        """
        if isinstance(self.uid, int) and procfs.real_uid(pid) != self.uid:
            return False
        if self.process is None:
            return isinstance(self.uid, int)
        return not procfs.apart(pid, self.process.pid)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send the session's agent and members a message."""
        if self.agent is not None:
            self.agent.send(message)
        for member in self.members:
            member.send(message)

    @property
    def has_listeners(self) -> bool:
        """Whether an agent or a member is connected."""
        return self.agent is not None or bool(self.members)

    @property
    def member_holds(self) -> frozenset[str]:
        """The holds of all members."""
        return frozenset(hold for holds in self.members.values() for hold in holds)

    def connect_member(self, connection: Connection, holds: Iterable[str]) -> None:
        """Register the connection of a member that has these holds."""
        self.members[connection] = set(holds)
        connection.speaks_for(self)

    def note_hold(self, connection: Connection, hold: str) -> None:
        """Note that a hold belongs to this connection, if the connection is a member's."""
        if connection in self.members:
            self.members[connection].add(hold)

    def forget_hold(self, connection: Connection, hold: str) -> None:
        """Note that a hold has ended."""
        if connection in self.members:
            self.members[connection].discard(hold)

    def disconnect_members(self) -> None:
        """End the connections of all members."""
        members, self.members = self.members, {}
        for connection in members:
            connection.speaks_for(None)
            connection.close()

    def connect_agent(self, connection: Connection) -> None:
        """Register the connection of the session's agent."""
        self.agent = connection
        connection.speaks_for(self)

    def disconnect_agent(self) -> None:
        """End the connection of the session's agent, if there is one."""
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.speaks_for(None)
            agent.close()

    def put_early(self, connection: Connection, message: Message) -> None:
        """Keep a message until the session's process is known.

        Raises
        ------
        RefusedError
            If this connection, session or user already has too many kept messages.
        """
        if connection.early is not None:
            raise RefusedError(
                "A message of this connection already waits for the launch.", code=Code.DUPLICATE
            )
        if len(self.early) >= MAX_EARLY or connection.account.early >= MAX_EARLY_OF_USER:
            raise RefusedError(
                f"The process of session {self.id} is not known yet, and too many messages already "
                "wait for this process.",
                code=Code.NOT_LAUNCHED,
                next_step="Try again once the Jupyter server has told the broker which process it "
                "is.",
            )
        connection.hold_early(self)
        # The broker does not know the process yet, so the process has no lease and needs no holds.
        self.early[connection] = {k: v for k, v in message.items() if k != "holds"}

    def drop_early(self, connection: Connection) -> None:
        """Forget the message of a connection that has ended."""
        if self.early.pop(connection, None) is not None:
            connection.hold_early(None)

    def take_early(self) -> list[tuple[Connection, Message]]:
        """Return the kept messages, and forget them."""
        found = [*self.early.items()]
        for connection, _ in found:
            self.drop_early(connection)
        return found

    def stop_timers(self) -> None:
        """Cancel the timers, and stop watching for the end of the session's process."""
        for timer in (self.grace, self.launch_timer):
            if timer is not None:
                timer.cancel()
        self.grace = self.launch_timer = None
        if self.death is not None:
            self.death.close()
            self.death = None


class LiveSessions:
    """All sessions by id and by process."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSession] = {}
        #: The monotonic time at which a session was last added or removed.
        self.changed_at = time.monotonic()

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._by_id.values()))

    def __contains__(self, session: object) -> bool:
        return session in self._by_id

    def new(self, owner: Owner, uid: User, kernel_id: str) -> tuple[LiveSession, str]:
        """Return a session with a new id, and its token."""
        token = secrets.token_urlsafe(32)
        while (name := secrets.token_hex(6)) in self._by_id:
            pass
        session = LiveSession(name, owner, uid, digest(token), kernel_id)
        return session, token

    def add(self, session: LiveSession) -> None:
        """Add a session."""
        self._by_id[session.id] = session
        self.changed_at = time.monotonic()

    def remove(self, session: str) -> LiveSession | None:
        """Forget a session; return it if it was known."""
        found = self._by_id.pop(session, None)
        if found is not None:
            self.changed_at = time.monotonic()
            found.stop_timers()
        return found

    def find(self, session: str) -> LiveSession | None:
        """Return a session, or None."""
        return self._by_id.get(session)

    def get(self, session: str) -> LiveSession:
        """Return a session.

        Raises
        ------
        RefusedError
            With code ``unknown-session``.
        """
        found = self._by_id.get(session)
        if found is None:
            raise RefusedError(
                f"There is no session {session[:40]!r} in this pool.",
                code=Code.UNKNOWN_SESSION,
                next_step="`jupyter gpupool status` lists the sessions.",
            )
        return found

    def proven(self, peer: Peer, message: Message) -> LiveSession:
        """Return the session that a message names.

        The message's token proves that the sender belongs to the session.

        Raises
        ------
        RefusedError
            If the session does not exist, or the token or the user is not the session's.
        """
        session = self.get(message["session"])
        if not session.token_is(message["token"]):
            raise RefusedError("The token is not valid for this session.", code=Code.BAD_TOKEN)
        if peer.uid != session.uid:
            raise RefusedError(
                f"The session belongs to {_of(session.uid)}, but you are {_of(peer.uid)}.",
                code=Code.NOT_YOURS,
            )
        return session

    def of_process(self, process: ProcessId) -> LiveSession | None:
        """Return the session whose kernel is ``process``, or None."""
        return next((s for s in self._by_id.values() if s.process == process), None)


def _of(user: User) -> str:
    return f"user id {user}" if isinstance(user, int) else f"user {user}"


#: Seconds between checks of ``/proc`` where the kernel has no pidfd (before Linux 5.3).
POLL = 0.25


class Death:
    """Calls ``on_death`` once, from the event loop, when ``process`` has ended.

    The agent's connection does not show this: a child of the kernel can keep it open.
    """

    def __init__(self, process: ProcessId, on_death: Callable[[], None]) -> None:
        self.process = process
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = open_pidfd(process.pid)
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._ended)
        else:
            self._timer = self._loop.call_later(POLL, self._look)
        # Between the identification of the process and pidfd_open, Linux may have given the pid to
        # a new process.
        if not alive(process):
            self._loop.call_soon(self._ended)

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._on_death = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self) -> None:
        if alive(self.process):
            self._timer = self._loop.call_later(POLL, self._look)
        else:
            self._ended()

    def _ended(self) -> None:
        report, self._on_death = self._on_death, _nothing
        self.close()
        report()


def _nothing() -> None:
    pass
