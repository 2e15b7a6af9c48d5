# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's own data of each session, such as process, token and connections."""

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

#: MAX_EARLY: the most messages of one session that may wait for ``launched``. MAX_EARLY_OF_USER:
#: the most such messages of all sessions of one user.
MAX_EARLY, MAX_EARLY_OF_USER = 16, 256


def digest(token: str) -> str:
    """Return the hash of a token.

    The hash is enough to check a token. The journal contains only the hash, so nobody can read a
    token in the journal.
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
    #: ``captures``: the number of streams that record a graph. ``captured_at``: loop time of the
    #: last CUDA call of the session that the broker has noticed.
    captures: int = 0
    captured_at: float = float("-inf")
    #: Whether the session has the hold for its CUDA activity. This is a copy of the pool's data,
    #: because a question to the pool takes longer.
    held: bool = False
    #: Why the session cannot be suspended; empty if no reason is known.
    pins: str = ""
    #: Whether the session's page says that the pool may preempt the session for a session that
    #: waits; None until this broker has written this into the page.
    contended: bool | None = None
    #: ``busy_at``: loop time at which the broker last saw the session use CUDA. ``looked_at``: loop
    #: time at which a round last read the whole page because of new CUDA calls; at first, the time
    #: at which the lease began.
    busy_at: float = float("-inf")
    looked_at: float = float("-inf")
    #: Loop time at which its whole page was last read.
    read_at: float = float("-inf")
    #: Seconds with CUDA calls during its leases.
    busy_seconds: float = 0.0
    #: Seconds for which the session had a lease under earlier brokers. ``busy_seconds`` does not
    #: include their time.
    attached_before: float = 0.0
    #: ``beyond``: for each device of the slice, the bytes that the driver uses minus the bytes that
    #: the guard charges. The devices have the order in which the processes see them. ``explained``:
    #: by device, the bytes of the last sample that are overhead of the driver, so they are no
    #: overuse.
    beyond: tuple[int, ...] = ()
    explained: Mapping[str, int] = field(default_factory=dict)
    #: The processes in its page when ``beyond`` and ``explained`` were measured.
    processes: Collection[ProcessId] = ()
    #: ``overuse``: the device bytes that the session uses beyond its slices, in the last sample.
    #: ``overused``: the number of consecutive samples with such bytes.
    overuse: int = 0
    overused: int = 0


@dataclass(eq=False)
class LiveSession:
    """The broker's own data of one session. The pool's record has the other data."""

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
    #: A timer that runs while the broker waits for the agent to reconnect. When the time is over,
    #: the agent's holds end.
    grace: asyncio.TimerHandle | None = None
    #: A timer that runs from ``open`` to ``launched``.
    launch_timer: asyncio.TimerHandle | None = None
    #: By connection: the message that waits for ``launched``. The kernel's process or one of its
    #: children has sent it.
    early: dict[Connection, Message] = field(default_factory=dict)
    #: The ``yield`` request that the agent has not answered yet: its epoch, and a future for the
    #: answer (yielded, cuda).
    yielding: tuple[int, asyncio.Future[tuple[bool, bool | None]]] | None = None
    #: Whether a process of the session has called cuInit, as its agent or its page last showed;
    #: None if unknown.
    cuda: bool | None = None
    #: By device: the bytes that a suspend moves to host memory now. The journal has these numbers,
    #: because the broker may restart during the suspend.
    moving: Mapping[str, int] = field(default_factory=dict)
    #: The pool's time at which the session last began to wait; 0.0 after an attach. The journal's
    #: row of the attach shows how long it waited.
    queued_at: float = 0.0
    #: The number of messages that the agent and the guards of the session have sent.
    messages: int = 0
    #: The page that the broker shares with the guard in the session's processes; None without a
    #: guard.
    page: Page | None = None
    #: The devices that a process of the session sees if it calls cuInit now.
    home: tuple[str, ...] = ()
    #: The last epoch in which other sessions waited for this session's slice; -1 if there was none.
    #: In this epoch, the agent must report when its cells end.
    wanted: int = -1
    #: The threads that wait at the gate and have asked for a lease. By the thread's connection: the
    #: id of its request.
    guards: dict[Connection, int | None] = field(default_factory=dict)
    #: Its page's data when last read; see ``activity``.
    use: Use = field(default_factory=Use)
    #: For each process that moves to the session's slice now: the devices that it leaves. A process
    #: makes its context on such a device before it moves.
    landing: dict[ProcessId, tuple[str, ...]] = field(default_factory=dict)
    #: Whether the driver now suspends or restores the session for a pause, without a lease.
    setting_aside: bool = False
    #: The GPU model and the folders that the kernel needs; empty if no cluster has chosen the
    #: machine by them.
    model: str = ""
    data: tuple[str, ...] = ()
    #: How many moves of its processes to its slice have failed since the last successful move.
    not_landed: int = 0
    #: Its suspended processes, children first; empty once they are resumed.
    frozen: tuple[ProcessId, ...] = ()
    #: Counts the restores that the driver refused one after the other, although the device had room
    #: and the state still existed.
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
        """Return whether the process ``pid`` may belong to this session.

        The caller has already checked two things: the environment of ``pid`` names this session,
        and ``pid`` does not descend from the session's process.
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
    def leaves(self) -> frozenset[str]:
        """The devices that processes leave now to move to the session's slice."""
        return frozenset(uuid for origin in self.landing.values() for uuid in origin)

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
        """If the connection is a member's, note that the hold belongs to this member."""
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
        # Leave out the holds. The broker does not know the process yet, so the process has no lease
        # that holds could keep.
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
            If the session does not exist, if the token is wrong, or if the session belongs to
            another user.
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

    The end of the agent's connection would come too late: a child of the kernel can keep this
    connection open after the kernel has ended.
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
        # If the process ended before pidfd_open, Linux may have given its pid to a new process.
        # Then the descriptor is for the wrong process.
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
