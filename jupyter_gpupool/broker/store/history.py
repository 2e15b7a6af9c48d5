# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads pages of the journal for clients, and trims the journal, outside of the event loop.

SQLite may wait for the disk. So one thread reads one page at a time, and serves the users in
rotation. The rows and bytes of a page are limited, and SQLite finds the rows of a page by an index.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from typing import Any, Callable
from urllib.parse import quote

from ..transport.auth import User

#: The most rows and bytes of one answer.
MAX_ROWS, MAX_BYTES = 1000, 256 << 10

#: Rows fetched between two checks of the page's size.
FETCH = 50

_COLUMNS = "seq, time, kind, session, owner, device, bytes, seconds, reason, detail"


@dataclass(frozen=True)
class Query:
    """Asks for at most ``limit`` rows whose number is above ``after``.

    If ``session`` or ``owner`` is set, the query asks only for rows of that session or owner.
    """

    after: int = 0
    limit: int = MAX_ROWS
    session: str = ""
    owner: str | None = None


@dataclass(frozen=True)
class JournalPage:
    """One page of rows of the journal.

    ``rows`` contains JSON objects with commas between them. ``more`` is true if further rows exist.
    """

    rows: str
    more: bool
    #: Seconds of processor time for this page.
    seconds: float = 0.0


Done = Callable[[JournalPage | sqlite3.Error], None]


class JournalReader:
    """Answers queries of the journal at ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gpupool-history")
        #: The queries that wait, by user. The user whose turn is next comes first.
        self._waiting: dict[User, deque[tuple[Query, Done]]] = {}
        self._reading = False
        self._closed = False

    def ask(self, uid: User, query: Query, done: Done) -> None:
        """Call ``done`` later, in the event loop, with the page or the error."""
        self._waiting.setdefault(uid, deque()).append((query, done))
        self._next()

    def close(self) -> None:
        """Stop answering queries."""
        self._closed = True
        self._waiting.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        if self._reading or self._closed or not self._waiting:
            return
        uid = next(iter(self._waiting))
        waiting = self._waiting.pop(uid)
        query, done = waiting.popleft()
        if waiting:
            self._waiting[uid] = waiting  # behind the queries of other users
        self._reading = True
        future = self._loop.run_in_executor(self._thread, self._read, query)
        future.add_done_callback(lambda future: self._finish(future, done))

    def _finish(self, future: asyncio.Future[JournalPage | sqlite3.Error], done: Done) -> None:
        self._reading = False
        if not self._closed and not future.cancelled():
            done(future.result())
            self._next()

    def _read(self, query: Query) -> JournalPage | sqlite3.Error:
        try:
            # Each page has its own connection, because the file may be replaced before the next
            # page.
            before = time.thread_time()
            db = sqlite3.connect(
                f"file:{quote(str(self._path))}?mode=ro", uri=True, timeout=LOCK_WAIT
            )
            try:
                page = read_page(db, query)
                return replace(page, seconds=time.thread_time() - before)
            finally:
                db.close()
        except sqlite3.Error as error:
            return error


def read_page(db: sqlite3.Connection, query: Query) -> JournalPage:
    """Return the page that ``query`` asks for."""
    conditions, values = ["seq > ?"], [max(0, query.after)]  # type: list[str], list[Any]
    if query.session:
        conditions.append("session = ?")
        values.append(query.session)
    if query.owner is not None:
        conditions.append("owner = ?")
        values.append(query.owner)
    limit = max(0, min(query.limit, MAX_ROWS))
    cursor = db.execute(
        f"SELECT {_COLUMNS} FROM events WHERE {' AND '.join(conditions)} ORDER BY seq LIMIT ?",
        (*values, limit + 1),
    )
    rows: list[str] = []
    size = 0
    while found := cursor.fetchmany(FETCH):
        for row in found:
            if len(rows) == limit or size > MAX_BYTES:
                return JournalPage(",".join(rows), True)
            rows.append(_encoded(row))
            size += len(rows[-1])
    return JournalPage(",".join(rows), False)


def _encoded(row: tuple[Any, ...]) -> str:
    """Return a row as JSON text, with the same fields as ``journal.Row.as_message``."""
    seq, time, kind, session, owner, device, size, seconds, reason, detail = row
    return (
        f'{{"seq":{seq},"time":{time!r},"kind":{quoted(kind)},"session":{quoted(session)},'
        f'"owner":{quoted(owner)},"device":{_or_null(device, quoted)},'
        f'"bytes":{_or_null(size, str)},'
        f'"seconds":{_or_null(seconds, repr)},"reason":{quoted(reason)},"detail":{detail}}}'
    )


def _or_null(value: Any, encoded: Callable[[Any], str]) -> str:
    return "null" if value is None else encoded(value)


#: Seconds to wait while another connection has locked the file. This wait may block the event loop.
LOCK_WAIT = 0.2

#: STEP: the most rows or pages in one transaction of :func:`tidy`. BREATH: the seconds between two
#: transactions. STEP is small, because the event loop may have to wait until a transaction ends.
STEP = 500
BREATH = 0.002


def tidy(path: Path, *, keep_above: int, max_bytes: int) -> None:
    """Drop rows up to number ``keep_above``, then the oldest until ``max_bytes`` suffice.

    This function also moves the write-ahead log into the file. It works in small steps, because the
    broker's own commits wait for each step.

    Raises
    ------
    sqlite3.Error
        If the file is missing, or locked for too long.
    """
    # With ``mode=rw``, SQLite raises an error if somebody has deleted the file. It does not make a
    # new file.
    name = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(name, uri=True, timeout=LOCK_WAIT)) as db:
        _drop(db, "seq <= ?", keep_above)
        while (excess := _used_bytes(db) - max_bytes) > 0:
            first, count = db.execute("SELECT min(seq), count(*) FROM events").fetchone()
            if not count:
                break
            # Estimate the number of rows from their average size. The loop then checks the size
            # again.
            rows = max(STEP, round(count * min(1.0, excess / max_bytes)))
            _drop(db, "seq < ?", first + rows)
        db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()


def _drop(db: sqlite3.Connection, which: str, value: int) -> None:
    found = f"SELECT seq FROM events WHERE {which} ORDER BY seq LIMIT {STEP}"
    while db.execute(f"DELETE FROM events WHERE seq IN ({found})", (value,)).rowcount:
        db.commit()
        time.sleep(BREATH)
    db.commit()
    while db.execute("PRAGMA freelist_count").fetchone()[0]:
        before = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA incremental_vacuum({STEP})").fetchall()
        db.commit()
        if db.execute("PRAGMA page_count").fetchone()[0] == before:
            # A file of the first version does not shrink: it keeps its free pages for new rows.
            return
        time.sleep(BREATH)


def _used_bytes(db: sqlite3.Connection) -> int:
    size, pages, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))
