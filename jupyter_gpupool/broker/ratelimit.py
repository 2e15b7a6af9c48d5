# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Limits the requests, rows, log records and loop time that one user or one cause may take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Callable, Hashable

from .store.journal import Row

#: Rows of the journal that a user may cause: per second, and in one burst.
ROWS = 5.0, 2000.0

#: One summary row covers the surplus rows of this many seconds.
SUMMARY = 60.0

#: Kinds of rows that cost a client nothing and record no use of a device.
_CHEAP = frozenset({"open", "close", "refuse", "queue"})

#: The most log records of one cause in PERIOD seconds: MOST_CAUSED if the records name a cause or
#: have a traceback, otherwise MOST.
MOST, MOST_CAUSED = 100, 10
PERIOD = 60.0

#: The most causes that the filter remembers at the same time.
MAX_CAUSES = 1000


class TokenBucket:
    """A token bucket. A payment may take more tokens than the bucket holds.

    It reads no clock: the time is an argument of each method.

    Parameters
    ----------
    rate, size:
        Tokens that flow into the bucket in a second, and the most that the bucket holds.
    """

    __slots__ = ("_at", "_left", "rate", "size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate, self.size = rate, size
        self._left, self._at = size, now

    def left(self, now: float) -> float:
        """Return the number of tokens in the bucket, which may be below zero."""
        self._left = min(self.size, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left

    def full(self, now: float) -> bool:
        """Return whether the bucket is full."""
        return self.left(now) >= self.size

    def pay(self, tokens: float, now: float) -> None:
        """Take tokens out."""
        self._left = self.left(now) - tokens

    def seconds_until(self, tokens: float, now: float) -> float:
        """Return the seconds until the bucket holds ``tokens``."""
        return max(0.0, (tokens - self.left(now)) / self.rate)


@dataclass(slots=True)
class _Rows:
    """One user's bucket and unwritten rows."""

    bucket: TokenBucket
    #: The number of rows that were not written, by kind, and the time of the first of these rows.
    missing: Counter[str] = field(default_factory=Counter)
    since: float = 0.0

    def miss(self, kind: str, now: float) -> None:
        if not self.missing:
            self.since = now
        self.missing[kind] += 1

    def take_missing(self) -> Counter[str]:
        found, self.missing = self.missing, Counter()
        return found


class RowBudget:
    """Limits the rows of the journal that one user may cause without using a device.

    It costs a client nothing to open and close sessions, to send requests that the pool refuses,
    and to queue. Without a limit, one user could push the history of all other users out of the
    journal. Rows about use (slices, suspends and resumes) need time in the driver, so the broker
    always writes them. Times are seconds of any clock that does not go back.
    """

    def __init__(self) -> None:
        self._users: dict[str, _Rows] = {}

    def admits(self, row: Row, now: float) -> bool:
        """Return whether to write the row. If not, count it for :meth:`summaries`."""
        cheap = row.kind in _CHEAP or (row.kind == "state" and row.device is None)
        if not cheap or not row.owner:
            return True
        user = self._users.get(row.owner)
        if user is None:
            user = self._users[row.owner] = _Rows(TokenBucket(*ROWS, now))
        if user.bucket.left(now) >= 1:
            user.bucket.pay(1, now)
            return True
        user.miss(row.kind, now)
        return False

    def summaries(self, now: float, *, all_of_them: bool = False) -> list[tuple[str, Counter[str]]]:
        """Return the users whose rows were not written, with the number of these rows by kind."""
        found = []
        for owner, user in list(self._users.items()):
            if user.missing and (all_of_them or now - user.since >= SUMMARY):
                found.append((owner, user.take_missing()))
            elif not user.missing and user.bucket.full(now):
                del self._users[owner]
        return found


class LogLimit(logging.Filter):
    """Limits what one cause can write to the log, so that no client can fill root's disk.

    The first record of a cause after a period says how many of the cause's records the filter
    dropped in that period.

    The cause of a record is its text before its arguments are filled in. A record may add to its
    cause with ``extra={"cause": ...}``, so that one user's errors do not hide another user's
    record.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By cause: the start of its period, the number of records in the period, and how many of
        #: these were dropped.
        self._causes: dict[Hashable, tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written."""
        now, key = self._clock(), _cause(record)
        begun, count, dropped = self._causes.get(key, (now, 0, 0))
        if now - begun >= PERIOD:
            if dropped:
                record.msg = f"{record.getMessage()} ({dropped} more of these were not logged)"
                record.args = ()
            begun, count, dropped = now, 0, 0
        caused = record.exc_info or getattr(record, "cause", None) is not None
        passes = count < (MOST_CAUSED if caused else MOST)
        if key not in self._causes and len(self._causes) >= MAX_CAUSES:
            self._causes.clear()
        self._causes[key] = begun, count + 1, dropped + (not passes)
        return passes


def _cause(record: logging.LogRecord) -> Hashable:
    text = str(record.msg)[:80]
    if text.startswith("%s") and isinstance(record.args, tuple) and record.args:
        text = str(record.args[0])[:80]
    return record.name, record.levelno, text, getattr(record, "cause", None)


#: Seconds that one part of long work may take, and seconds that the loop then has for other work.
PART, REST = 0.0003, 0.001


class Pace:
    """Does long work on the event loop in short parts: await :meth:`step` after each item.

    Python takes tens of milliseconds to read a thousand sessions. Without pauses, this work would
    delay a kernel that asks for a slice meanwhile.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def step(self) -> None:
        """Pause if this part has taken long enough; otherwise return at once."""
        if time.perf_counter() - self._began >= PART:
            await asyncio.sleep(REST)
            self._began = time.perf_counter()
