# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Limits what one user or one cause may use: requests, journal rows, log records, loop time."""

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

#: The broker does not write the rows above the limit. One summary row counts them for this many
#: seconds.
SUMMARY = 60.0

#: Kinds of rows that cost a client nothing and record no use of a device.
_CHEAP = frozenset({"open", "close", "refuse", "queue"})

#: How many log records of one cause the filter lets pass in PERIOD seconds: MOST_CAUSED if the
#: records name a cause or have a traceback, otherwise MOST.
MOST, MOST_CAUSED = 100, 10
PERIOD = 60.0

#: The most causes that the filter remembers at the same time.
MAX_CAUSES = 1000


class TokenBucket:
    """A token bucket. A payment may take more tokens than are left in the bucket.

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
    #: ``missing``: by kind, the number of rows that were not written. ``since``: the time of the
    #: first of these rows.
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
        """Return users with rows that were not written, and the number of these rows by kind."""
        found = []
        for owner, user in list(self._users.items()):
            if user.missing and (all_of_them or now - user.since >= SUMMARY):
                found.append((owner, user.take_missing()))
            elif not user.missing and user.bucket.full(now):
                del self._users[owner]
        return found


class LogLimit(logging.Filter):
    """Limits what one cause can write to the log, so that no client can fill root's disk.

    If the filter has dropped records of a cause in a period, the cause's first record after the
    period says how many.

    The cause of a record is the text of the record without its arguments. With ``extra={"cause":
    ...}``, the cause also includes this value, for example a user. So the errors of one user do not
    hide the records of another user.
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


#: PART: seconds that one part of long work may take. REST: seconds that the event loop has for
#: other work after each part.
PART, REST = 0.0003, 0.001


class Pace:
    """Splits long work on the event loop into short parts. Await :meth:`step` after each item.

    Python takes tens of milliseconds to read a thousand sessions. Without pauses, this work would
    delay a kernel that asks for a slice meanwhile.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def step(self) -> None:
        """Pause for REST seconds if this part has taken PART seconds; otherwise return at once."""
        if time.perf_counter() - self._began >= PART:
            await asyncio.sleep(REST)
            self._began = time.perf_counter()
