# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What requests cost, and what each user may spend. Pure: the time is an argument.

Prices are in points; a point is about 50 microseconds of the event loop. A price is the least that
a request costs: one that takes the loop longer costs what it took. The budget is the user's, by
user id: more connections or more processes give no more of it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Mapping

if TYPE_CHECKING:
    from .connection import Connection

#: Points that a second of the event loop is worth.
POINTS_PER_SECOND = 20_000.0

#: Points by kind of request; see also BYTES_PER_POINT.
PRICES: Mapping[str, float] = {
    "open": 50.0,
    "launched": 10.0,
    "retire": 10.0,
    "close": 20.0,
    "hello": 6.0,
    "hold": 2.0,
    "drop": 2.0,
    "cancel": 2.0,
    "attach": 4.0,
    "home": 4.0,
    "grow": 4.0,
    "page": 10.0,
    "land": 10.0,
    "yielded": 2.0,
    "resting": 2.0,
    "request": 10.0,
    "release": 10.0,
    "keep": 10.0,
    "maintain": 20.0,
    "status": 8.0,
    "journal": 16.0,
    "watch": 4.0,
    "ping": 1.0,
}

#: Points for a line that is no request.
BAD_PRICE = 4.0

#: Bytes, received or sent, that cost a point beside the price of their request.
BYTES_PER_POINT = 16 << 10

#: Points a second, and points at once, of one user's acts: half of the event loop.
ACTS = 10_000.0, 20_000.0

#: The same of reads: a fifth.
READS = 4_000.0, 8_000.0

#: Long requests of one user that are read at the same time.
MAX_LONG = 4

#: Connections a second, and at once.
CONNECTS = 500.0, 1_000.0

#: What a connection costs, in connections, that had to be closed for abuse: whoever connects again
#: at once has to wait.
ABUSE_PRICE = 25.0


class Bucket:
    """A token bucket that may be overdrawn by one request.

    Parameters
    ----------
    rate, size:
        Points a second, and the most that it holds.
    """

    __slots__ = ("_at", "_left", "rate", "size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate, self.size = rate, size
        self._left, self._at = size, now

    def left(self, now: float) -> float:
        """Return the points in it; below zero it is overdrawn."""
        self._left = min(self.size, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left

    def pay(self, points: float, now: float) -> None:
        """Take points out."""
        self._left = self.left(now) - points

    def seconds_until(self, points: float, now: float) -> float:
        """Return the seconds until it holds ``points``."""
        return max(0.0, (points - self.left(now)) / self.rate)


class Account:
    """One user's budgets, and the connections of that user that have something to be handled."""

    def __init__(self, uid: int, now: float) -> None:
        self.uid = uid
        self.acts = Bucket(*ACTS, now)
        self.reads = Bucket(*READS, now)
        self.connects = Bucket(*CONNECTS, now)
        self.connections: set[Connection] = set()
        self.watchers = 0
        #: Connections in the middle of a long request: those that are read, and those that wait.
        self.long: set[Connection] = set()
        self.longer: dict[Connection, None] = {}
        #: Bytes received and not handled; bytes sent and not read.
        self.buffered = 0
        self.unread = 0
        #: Messages that wait for the ``launched`` of their session.
        self.early = 0
        #: Connections with a request for this turn, and points that the user may spend in it.
        self.ready: deque[Connection] = deque()
        self.deficit = 0.0
        self.active = False
        #: Connections whose request waits for the budget; reads with the time of their refusal.
        self.waiting_acts: deque[Connection] = deque()
        self.waiting_reads: deque[tuple[Connection, float]] = deque()

    def begin_long(self, connection: Connection) -> None:
        """A connection has a long request that is not complete: its turn comes now or later."""
        if len(self.long) < MAX_LONG:
            self.longer.pop(connection, None)
            self.long.add(connection)
        elif connection not in self.long:
            self.longer[connection] = None

    def end_long(self, connection: Connection) -> None:
        """The request is complete, or the connection has ended: the next one may be read."""
        self.longer.pop(connection, None)
        if connection in self.long:
            self.long.discard(connection)
            if self.longer:
                following = next(iter(self.longer))
                self.begin_long(following)
                following.read_on()

    def rested(self, now: float) -> bool:
        """Return whether a new account would be the same."""
        return (
            not self.connections
            and not self.ready
            and all(b.left(now) >= b.size for b in (self.acts, self.reads, self.connects))
        )
