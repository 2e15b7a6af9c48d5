# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Chooses the request to handle next: deficit round robin between users, in short turns.

All connections of a user share one place in the round. In one turn of the event loop, the
dispatcher handles requests for a quarter of a millisecond, and serves one user after the other.
Then the loop reads, accepts and runs its timers. A request that exceeds its user's budget waits in
the broker. Meanwhile the broker reads nothing more from the connection of this request. So if a
client floods the broker, the further requests wait in the client.

Prices are in points. A point is about 50 microseconds of the event loop. A request costs its price,
or the time that the event loop needs for it if this is more. Each user id has one budget: more
connections or processes do not add to it.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections import deque
from itertools import islice
from typing import Mapping, Protocol

from ...errors import Code, GPUPoolError, RefusedError
from ..ratelimit import TokenBucket
from .auth import User

#: TURN: the points of one turn of the event loop. QUANTUM: the points that a user gets each time
#: the dispatcher comes to the user in the round; this may happen more than once in a turn. A turn
#: is short, because a client needs several turns to connect and to get its answer.
TURN, QUANTUM = 5.0, 2.5

#: After this many requests, the broker runs the garbage collector for young objects. Python itself
#: runs it only when the number of new objects minus the number of freed objects reaches a limit. If
#: each new record replaces an old record, Python reaches the limit rarely. The collector then has
#: to check many new objects, which blocks the event loop for 4 ms in the middle of a request.
COLLECT = 16

#: An expensive request shortens the turns after it, but by at most this many points in total.
MAX_OWED = 100.0

#: Seconds that a read waits for its user's budget before it is refused.
PATIENCE = 2.0

#: Seconds between two checks of a budget.
LOOK = 0.01

#: MAX_UNREAD: the most unread bytes of all connections together. USER_UNREAD: the most unread bytes
#: of all connections of one user.
MAX_UNREAD, USER_UNREAD = 32 << 20, 8 << 20


class Requester(Protocol):
    """The functions of a connection that the dispatcher calls."""

    @property
    def account(self) -> UserAccount:
        """The account of the connection's user."""

    @property
    def buffered(self) -> int:
        """Bytes that were received but not yet handled."""

    @property
    def unread(self) -> int:
        """The number of sent bytes that the peer had not read at the last count."""

    def has_work(self) -> bool:
        """Return whether :meth:`step` would do anything now."""

    def step(self, now: float) -> tuple[float, bool]:
        """Handle one request or let it wait; return its price, and whether it is a read."""

    def go_on(self, *, read: bool) -> None:
        """Let the request that waited for the budget continue: the budget covers it now."""

    def give_up_read(self, error: GPUPoolError) -> None:
        """Refuse the read that waited for the budget: the budget did not cover it in time."""

    def next_price(self) -> float:
        """Return the price of the request that waits for the budget."""

    def close(self) -> None:
        """End the connection."""

    def read_on(self) -> None:
        """Read the rest of a long request, because it is this connection's turn."""

    def count_unread(self) -> None:
        """Count the bytes that the peer has not read."""

    def abuse(self, what: str, abort: bool = False) -> None:
        """Close the connection of a peer that misbehaves."""


class Dispatcher:
    """Keeps all users' accounts, and decides whose request the broker handles next."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._accounts: dict[User, UserAccount] = {}
        self._active: deque[UserAccount] = deque()
        self._turn_handle: asyncio.Handle | None = None
        self._timers: dict[User, asyncio.TimerHandle] = {}
        self._unread = 0
        #: Points by which the last turn was too long.
        self._owed = 0.0
        #: Requests since the last collection of garbage.
        self._served = 0
        #: ``delayed``: the number of reads that had to wait for their user's budget. ``busy``: the
        #: number of these reads that the broker has refused.
        self.delayed = 0
        self.busy = 0

    def account(self, uid: User) -> UserAccount:
        """Return the account of a user."""
        found = self._accounts.get(uid)
        if found is None:
            found = self._accounts[uid] = UserAccount(uid, self._loop.time())
        return found

    def close(self) -> None:
        """Stop handling requests."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._active.clear()
        if self._turn_handle is not None:
            self._turn_handle.cancel()

    # ------------------------------------------------------------------ what connections tell

    def joined(self, connection: Requester) -> None:
        """Note a new connection."""
        connection.account.connections.add(connection)

    def left(self, connection: Requester) -> None:
        """Note the end of a connection."""
        account = connection.account
        account.connections.discard(connection)
        account.buffered -= connection.buffered
        account.end_long(connection)
        self._count_unread(account, -connection.unread)
        if not account.connections:
            # Keep the account until its budgets are full again. Otherwise the user could reset the
            # budgets with a new connection.
            self._arm(account)

    def ready(self, connection: Requester) -> None:
        """Note that a connection has a request that can be handled now."""
        account = connection.account
        if connection in account.ready:
            return
        account.ready[connection] = None
        if not account.active:
            account.active = True
            self._active.append(account)
        if self._turn_handle is None:
            self._turn_handle = self._loop.call_soon(self._turn)

    def wait_act(self, connection: Requester) -> None:
        """Let a connection wait, because its next act exceeds its user's budget."""
        connection.account.waiting_acts.append(connection)
        self._arm(connection.account)

    def wait_read(self, connection: Requester) -> None:
        """Let a read wait, because it exceeds its user's budget."""
        self.delayed += 1
        connection.account.waiting_reads.append((connection, self._loop.time() + PATIENCE))
        self._arm(connection.account)

    def note_unread(self, connection: Requester, more: int) -> None:
        """Note that a connection has ``more`` unread bytes than before (or fewer, if negative).

        If a user, or all users together, have more unread bytes than allowed, this method closes
        connections with the most unread bytes.
        """
        account = connection.account
        self._count_unread(account, more)
        if more > 0 and account.unread > USER_UNREAD:
            self._relieve(account, USER_UNREAD)
        if more > 0 and self._unread > MAX_UNREAD:
            worst = max(self._accounts.values(), key=lambda a: a.unread)
            self._relieve(worst, worst.unread // 2)

    def _count_unread(self, account: UserAccount, more: int) -> None:
        account.unread += more
        self._unread += more

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        self._turn_handle = None
        # After an expensive request, a few turns handle no request, so that the loop can read from
        # connections and accept them.
        left = TURN - self._owed
        try:
            while self._active and left > 0:
                left -= self._serve_one(self._active.popleft(), left)
            if self._served >= COLLECT:
                self._served = 0
                gc.collect(1)  # all answers have been sent
        finally:
            # Even if one request raises an error, the dispatcher must handle the other requests.
            self._owed = min(MAX_OWED, max(0.0, -left))
            if self._active and self._turn_handle is None:
                self._turn_handle = self._loop.call_soon(self._turn)

    def _serve_one(self, account: UserAccount, left: float) -> float:
        """Give one user its share of the turn, at most ``left`` points; return the points used."""
        account.deficit = min(QUANTUM, account.deficit + QUANTUM)
        try:
            return self._spend(account, left)
        finally:
            if account.ready:
                self._active.append(account)
            else:
                account.active = False
                account.deficit = min(0.0, account.deficit)

    def _spend(self, account: UserAccount, left: float) -> float:
        """Handle requests until the user's share or ``left`` is used up; return their cost."""
        spent = 0.0
        while account.ready and account.deficit > 0 and spent < left:
            connection = next(iter(account.ready))
            del account.ready[connection]
            cost = self._serve(account, connection)
            account.deficit -= cost
            spent += cost
            if connection.has_work():
                self.ready(connection)
        return spent

    def _serve(self, account: UserAccount, connection: Requester) -> float:
        """Handle one request; return its cost."""
        # ``thread_time`` counts only the processor time of this thread. So the user does not pay
        # for time in which other processes run.
        before = time.thread_time()
        self._served += 1
        price, read = connection.step(self._loop.time())
        cost = max(price, (time.thread_time() - before) * POINTS_PER_SECOND)
        bucket = account.reads if read else account.acts
        bucket.pay(cost, self._loop.time())
        return cost

    # ------------------------------------------------------------------ over the budget

    def _arm(self, account: UserAccount) -> None:
        if account.uid not in self._timers:
            self._timers[account.uid] = self._loop.call_later(LOOK, self._look, account)

    def _look(self, account: UserAccount) -> None:
        """Continue requests that the budgets now cover; refuse reads that waited too long."""
        del self._timers[account.uid]
        now = self._loop.time()
        for connection in self._covered(account.acts, account.waiting_acts, now):
            account.waiting_acts.popleft()
            connection.go_on(read=False)
        reads = [entry[0] for entry in account.waiting_reads]
        for connection in self._covered(account.reads, reads, now):
            account.waiting_reads.popleft()
            connection.go_on(read=True)
        while account.waiting_reads and account.waiting_reads[0][1] <= now:
            connection, _ = account.waiting_reads.popleft()
            self.busy += 1
            connection.give_up_read(self._busy(account, now))
        if account.waiting_acts or account.waiting_reads:
            self._arm(account)
        elif account.rested(now):
            self._accounts.pop(account.uid, None)
        elif not account.connections:
            self._timers[account.uid] = self._loop.call_later(1.0, self._look, account)

    def _covered(
        self, bucket: TokenBucket, waiting: deque[Requester] | list[Requester], now: float
    ) -> list[Requester]:
        """Return the connections at the front of ``waiting`` that the budget covers now."""
        left, count = bucket.left(now), 0
        for connection in waiting:
            if left <= 0:
                break
            left -= connection.next_price()
            count += 1
        return [*islice(waiting, count)]

    def _busy(self, account: UserAccount, now: float) -> RefusedError:
        owed = sum(connection.next_price() for connection, _ in account.waiting_reads)
        seconds = max(LOOK, round(account.reads.seconds_until(owed, now), 2))
        return RefusedError(
            "Your processes send more requests than the broker handles for one user, so it did not "
            f"handle this request within {PATIENCE:g} s.",
            code=Code.BUSY,
            next_step=f"Try again in {seconds:g} s, and send fewer requests.",
            details={"retry_after": seconds},
        )

    def _relieve(self, account: UserAccount, most: int) -> None:
        """Close connections of the user until at most ``most`` of the user's bytes are unread.

        This method first closes the connection with the most unread bytes.
        """
        for connection in account.connections:
            connection.count_unread()
        while account.unread > most:
            worst = max(account.connections, key=lambda c: c.unread)
            worst.abuse("does not read its answers", abort=True)
            worst.count_unread()


#: Points in one second of the event loop.
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
    "recall": 10.0,
    "prioritise": 10.0,
    "end": 10.0,
    "account": 10.0,
    "lend": 20.0,
    "orders": 10.0,
    "perform": 50.0,
    "performed": 10.0,
    "leave": 20.0,
    "place": 20.0,
    "order": 200.0,
    "cluster": 20.0,
    "elsewhere": 20.0,
    "status": 8.0,
    "why": 8.0,
    "hour": 8.0,
    "journal": 16.0,
    "watch": 4.0,
    "ping": 1.0,
}

#: Points for a line that is no request.
BAD_PRICE = 4.0

#: A request costs one point more for each BYTES_PER_POINT bytes of its answer. An invalid line
#: costs one point more for each BYTES_PER_POINT bytes of the line.
BYTES_PER_POINT = 16 << 10

#: One user's budget for acts: points per second (half of the event loop's points), and the most
#: points in one burst.
ACTS = 10_000.0, 20_000.0

#: One user's budget for reads: points per second (a fifth of the event loop's points), and the most
#: points in one burst.
READS = 4_000.0, 8_000.0

#: The most long requests of one user that the broker reads at the same time.
MAX_LONG = 4

#: One user's budget for new connections: the number per second, and the most in one burst.
CONNECTS = 500.0, 1_000.0

#: If the broker closes a connection for abuse, this costs as much as this many new connections. So
#: a user who connects again at once has to wait.
ABUSE_PRICE = 25.0


class UserAccount:
    """One user's budgets, and the connections of that user that have a request to handle."""

    def __init__(self, uid: User, now: float) -> None:
        self.uid = uid
        self.acts = TokenBucket(*ACTS, now)
        self.reads = TokenBucket(*READS, now)
        self.connects = TokenBucket(*CONNECTS, now)
        self.connections: set[Requester] = set()
        self.watchers = 0
        #: ``long``: connections from which the broker reads the rest of a long request. ``longer``:
        #: connections whose long request waits for its turn.
        self.long: set[Requester] = set()
        self.longer: dict[Requester, None] = {}
        #: ``buffered``: bytes that the broker has received but not handled. ``unread``: bytes that
        #: the broker has sent but the peer has not read.
        self.buffered = 0
        self.unread = 0
        #: The number of messages that wait for ``launched``, which names the process of their
        #: session.
        self.early = 0
        #: ``ready``: connections with a request that can be handled now. ``deficit``: the points
        #: that the user may spend before the dispatcher goes on to the next user; negative after
        #: requests that cost more than the user had.
        self.ready: dict[Requester, None] = {}
        self.deficit = 0.0
        self.active = False
        #: Connections whose next act or whose read waits for the budget. ``waiting_reads`` also has
        #: the time at which the broker refuses the read.
        self.waiting_acts: deque[Requester] = deque()
        self.waiting_reads: deque[tuple[Requester, float]] = deque()

    def begin_long(self, connection: Requester) -> None:
        """Read the rest of a connection's long request now, or when its turn comes."""
        if len(self.long) < MAX_LONG:
            self.longer.pop(connection, None)
            self.long.add(connection)
        elif connection not in self.long:
            self.longer[connection] = None

    def end_long(self, connection: Requester) -> None:
        """End a long request, complete or not, and let the user's next long request be read."""
        self.longer.pop(connection, None)
        if connection in self.long:
            self.long.discard(connection)
            if self.longer:
                following = next(iter(self.longer))
                self.begin_long(following)
                following.read_on()

    def rested(self, now: float) -> bool:
        """Return whether the account equals a new account, so that the dispatcher can drop it."""
        return (
            not self.connections
            and not self.ready
            and all(b.full(now) for b in (self.acts, self.reads, self.connects))
        )
