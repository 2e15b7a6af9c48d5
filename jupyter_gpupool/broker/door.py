# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Accepts connections: a few in each turn of the loop, and of each user so many a second.

asyncio's own server accepts as many connections at once as its backlog is long, before anything
else runs, and makes a transport for each. A user who connects and leaves all the time would keep
the loop busy with that. Here a connection over its user's budget waits as a bare socket.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import select
import socket
from collections import deque
from functools import lru_cache
from typing import Callable

from ..errors import Code, RefusedError
from ..protocol import encode, error_message
from .auth import peer_of
from .connection import Connection
from .dispatch import Dispatcher

#: Connections accepted in one turn of the event loop.
ACCEPTS = 32

#: Connections of one user that may wait here for the budget; more are refused.
LOBBY = 128

#: Seconds for which nothing is accepted when there are no descriptors left.
PAUSE = 0.2

#: Seconds between two words in the log about that.
COMPLAIN = 60.0

#: Descriptors that are for other things than connections.
RESERVED = 64


def connection_limit() -> int:
    """Return how many connections this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - RESERVED)


class Door:
    """Accepts from a listening socket until :meth:`close`.

    ``make`` returns the protocol of a new connection.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        dispatcher: Dispatcher,
        log: logging.Logger,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._make = make
        self._dispatcher = dispatcher
        self._log = log
        self._lobby: dict[int, deque[socket.socket]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._complained_at = float("-inf")
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._lobby.values():
            for accepted in waiting:
                accepted.close()
        self._lobby.clear()

    # ------------------------------------------------------------------ internals

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._complain(error)
                self._loop.remove_reader(self._listening.fileno())
                self._loop.call_later(PAUSE, self._again)
                return
            self._admit(accepted)

    def _complain(self, error: OSError) -> None:
        if self._loop.time() - self._complained_at >= COMPLAIN:
            self._complained_at = self._loop.time()
            self._log.error(
                "No connection can be accepted now: %s; raise the broker's limit (LimitNOFILE, "
                "ulimit -n)", error.strerror,
            )  # fmt: skip

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        """Serve a connection now, or later, or not."""
        accepted.setblocking(False)
        try:
            uid = peer_of(accepted).uid
        except OSError:
            accepted.close()
            return
        account, waiting = self._dispatcher.account(uid), self._lobby.get(uid)
        left = account.connects.left(self._loop.time())
        if left < account.connects.size / 2 and _hung_up(accepted):
            accepted.close()  # by a user who does that often
        elif waiting is None and left >= 1:
            self._serve(accepted, uid)
        elif waiting is None or len(waiting) < LOBBY:
            self._lobby.setdefault(uid, deque()).append(accepted)
            if self._timer is None:
                self._timer = self._loop.call_later(0.01, self._look)
        else:
            self._turn_away(accepted, uid)

    def _serve(self, accepted: socket.socket, uid: int) -> None:
        self._dispatcher.account(uid).connects.pay(1, self._loop.time())
        task = self._loop.create_task(self._start(accepted))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:
            accepted.close()

    def _look(self) -> None:
        """Serve those of the lobby whose user's budget allows it by now."""
        self._timer = None
        now = self._loop.time()
        for uid, waiting in [*self._lobby.items()]:
            account = self._dispatcher.account(uid)
            while waiting and account.connects.left(now) >= 1:
                accepted = waiting.popleft()
                if _hung_up(accepted):
                    accepted.close()
                else:
                    self._serve(accepted, uid)
            if not waiting:
                del self._lobby[uid]
        if self._lobby:
            self._timer = self._loop.call_later(0.01, self._look)

    def _turn_away(self, accepted: socket.socket, uid: int) -> None:
        try:
            accepted.send(_refusal(uid, self._dispatcher.account(uid).connects.rate))
        except OSError:
            pass  # it has left already
        accepted.close()


def _hung_up(accepted: socket.socket) -> bool:
    """Return whether the peer has closed the connection: nobody would read an answer."""
    poll = select.poll()
    poll.register(accepted, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


@lru_cache(maxsize=64)
def _refusal(uid: int, rate: float) -> bytes:
    """Return the line for a connection that cannot even wait."""
    error = RefusedError(
        f"User id {uid} connects to the broker more often than {rate:g} times a second.",
        code=Code.BUSY,
        next_step="Use one connection for several requests.",
        details={"retry_after": LOBBY / rate},
    )
    return encode(error_message(error, None))
