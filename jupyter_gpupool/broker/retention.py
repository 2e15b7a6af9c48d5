# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps the journal's file small while its broker writes it; not for the event loop."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path

#: Seconds to wait for another connection that has the file locked. The event loop waits, too.
LOCK_WAIT = 0.2

#: Rows or pages in one transaction, and seconds between two: the event loop waits for each.
STEP = 500
BREATH = 0.002


def tidy(path: Path, *, keep_above: int, max_bytes: int) -> None:
    """Drop rows up to ``keep_above``, then the oldest until the file fits; empty the log into it.

    In small steps, because the broker's own commits wait for each.

    Raises
    ------
    sqlite3.Error
        If the file is not there, or locked for too long.
    """
    # Not to make it, if somebody has deleted it.
    name = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(name, uri=True, timeout=LOCK_WAIT)) as db:
        _drop(db, "seq <= ?", keep_above)
        while (excess := _used_bytes(db) - max_bytes) > 0:
            first, count = db.execute("SELECT min(seq), count(*) FROM events").fetchone()
            if not count:
                break
            # By their average size, and a look afterwards at what that gave back.
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
            return  # a file of the first version: it keeps its pages, and fills them again
        time.sleep(BREATH)


def _used_bytes(db: sqlite3.Connection) -> int:
    size, pages, free = (
        db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("page_size", "page_count", "freelist_count")
    )
    return int(size * (pages - free))
