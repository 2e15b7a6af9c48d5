# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Keeps data for the next broker and for reports: the current sessions, and a row per event.

The data is in one SQLite file in WAL mode. A restart reads ``sessions``. Reports and timelines read
``events``, which is append-only. A commit is not synced to the disk. It survives the death of the
broker. It may not survive a crash of the machine, but after such a crash there are no sessions to
recover.

If the journal cannot be written (disk full, read-only), the pool continues to work:
:attr:`Journal.problem` has the reason, rows stay in memory, and every later commit tries again.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import sys
import time
from collections import deque
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Mapping

from ...errors import Code, GPUPoolError
from .history import LOCK_WAIT, tidy

#: Version of the tables below. The broker sets a file of an older version aside, and refuses a file
#: of a newer version.
SCHEMA_VERSION = 1

#: The most rows that are kept; older rows are dropped. A row takes about 200 bytes.
MAX_ROWS = 500_000

#: A disk with fewer free bytes than this counts as full.
LEAST_ROOM = 64 << 10

#: The default limit for the size of the file, in bytes. The write-ahead log is not included.
MAX_BYTES = 256 << 20

#: If the write-ahead log has this many bytes, the broker moves it into the file. SQLite then writes
#: the log from its beginning again.
MAX_LOG = 16 << 20

#: Commits between two checks of the log's size.
LOOK_AT_LOG = 32

#: One encoder for all calls: ``json.dumps`` with ``separators`` makes a new one in each call.
_encoded = json.JSONEncoder(separators=(",", ":")).encode

#: The most rows that are kept in memory while the file cannot be written.
MAX_PENDING = 20_000

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (id TEXT PRIMARY KEY, record TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    time REAL NOT NULL,
    kind TEXT NOT NULL,
    session TEXT NOT NULL,
    owner TEXT NOT NULL,
    device TEXT,
    bytes INTEGER,
    seconds REAL,
    reason TEXT NOT NULL,
    detail TEXT NOT NULL
);
CREATE INDEX events_session ON events (session, seq);
"""
_COLUMNS = "seq, time, kind, session, owner, device, bytes, seconds, reason, detail"


@dataclass(slots=True)
class Row:
    """One event. ``session`` and ``owner`` are empty if the event concerns no session.

    No table lists the values of ``kind``: each caller of :meth:`~..core.Core.note` chooses its own.
    ``TransitionRows`` in ``broker/runner.py`` writes the rows about changes of a session's state.
    To find the other kinds, search the broker for ``core.note(``.

    ``seconds`` is a duration: the wait before an attach, or the driver's part of a suspend.
    """

    time: float
    kind: str
    session: str = ""
    owner: str = ""
    device: str | None = None
    bytes: int | None = None
    seconds: float | None = None
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    seq: int = 0

    def as_message(self) -> dict[str, Any]:
        """Return the row as the protocol shows it."""
        return {
            "seq": self.seq,
            "time": self.time,
            "kind": self.kind,
            "session": self.session,
            "owner": self.owner,
            "device": self.device,
            "bytes": self.bytes,
            "seconds": self.seconds,
            "reason": self.reason,
            "detail": dict(self.detail),
        }


class JournalUnusable(GPUPoolError):
    """The journal can be neither read nor replaced."""

    code = Code.JOURNAL


def unusable(path: Path, verb: str, error: Exception) -> JournalUnusable:
    """Return the error for a journal that the broker cannot use or lock, with its remedy.

    ``verb`` is "used" or "locked".
    """
    reason = getattr(error, "strerror", None) or str(error)
    message = f"The journal {path} cannot be {verb} ({reason})."
    if _disk_is_full(path.parent, error):
        return JournalUnusable(
            message,
            code=Code.NO_SPACE,
            next_step=f"Make room on the disk of {path.parent}, or set c.GPUPool.state_dir to a "
            "folder on another disk.",
        )
    return JournalUnusable(
        message, next_step="Set c.GPUPool.state_dir to a folder that you may write."
    )


def _disk_is_full(folder: Path, error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    if "disk is full" in str(error):
        return True
    # SQLite calls most failed writes a "disk I/O error".
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return "disk I/O error" in str(error) and disk.f_bavail * disk.f_frsize < LEAST_ROOM


class Journal:
    """The journal in the file at ``path``. If necessary, it makes the file.

    Parameters
    ----------
    machine:
        The machine of this journal (:func:`jupyter_gpupool.local_machine.machine_id`). A file of
        another machine is refused, because its sessions do not run here.
    max_bytes:
        Returns the most bytes that the journal may take on the disk now. If the journal is larger,
        the broker drops the oldest rows.
    on_long:
        Called when the write-ahead log has become long. The caller must then run :meth:`tidy` in a
        thread.

    Raises
    ------
    JournalUnusable
        If the folder or the file cannot be used or made, or if the file belongs to another machine,
        to another user or to a newer version. The file does not change.
    """

    def __init__(
        self,
        path: Path,
        log: logging.Logger,
        *,
        machine: str = "",
        max_bytes: Callable[[], int] = lambda: MAX_BYTES,
        on_long: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._on_long = on_long
        self._log = log
        #: Why nothing can be written now; empty if writing works.
        self.problem = ""
        #: Why an older journal had to be set aside at the start; empty if none was set aside.
        self.set_aside = ""
        self._records: dict[str, str | None] = {}
        self._rows: deque[Row] = deque()
        self._meta: dict[str, str] = {}
        self._lost = 0
        self._commits = 0
        #: The size of the write-ahead log, in bytes, at which ``on_long`` is called next.
        self._long = MAX_LOG // 2
        #: Whether a checkpoint has switched ``synchronous`` off. The next commit switches it on.
        self._unsynced = False
        self._known: dict[str, str] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._inspect(machine)
            self._db = self._open()
        except (sqlite3.DatabaseError, ValueError) as error:
            if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
                # The file is locked or there is no permission, but the file is not damaged.
                raise self._unusable(error) from None
            self._db = self._replace(error)
        except OSError as error:
            raise self._unusable(error) from None
        self.seq = self._last_seq()
        self._known = dict(self._db.execute("SELECT name, value FROM meta"))
        if machine:
            self.remember("machine", machine)

    # ------------------------------------------------------------------ reading

    def records(self) -> dict[str, dict[str, Any]]:
        """Return the current sessions by id, as they were last committed."""
        found = {}
        for session, text in self._db.execute("SELECT id, record FROM sessions"):
            try:
                found[session] = json.loads(text)
            except ValueError:
                self._log.error("The journal's record of session %s is not JSON; dropped", session)
        return found

    def meta(self, name: str) -> str:
        """Return a stored value, or ""."""
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    def _log_size(self) -> int:
        """Return how many bytes of the write-ahead log are in use. Its file may be larger.

        The size comes from ``mxFrame``, which https://www.sqlite.org/walformat.html describes.
        """
        with self.path.with_name(f"{self.path.name}-shm").open("rb") as index:
            index.seek(16)
            return int.from_bytes(index.read(4), sys.byteorder) * self._frame

    # ------------------------------------------------------------------ writing

    def put(self, session: str, record: Mapping[str, Any] | None) -> None:
        """Keep a session's current record (None: it has ended) for the next commit."""
        self._records[session] = None if record is None else _encoded(record)

    def append(self, row: Row) -> Row:
        """Keep a row for the next commit and give it its number."""
        self.seq += 1
        row.seq = self.seq
        # A client's text may contain half of a surrogate pair, which SQLite refuses. A question
        # mark replaces it.
        row.reason = row.reason.encode("utf-8", "replace").decode()
        self._rows.append(row)
        if len(self._rows) > MAX_PENDING:
            self._rows.popleft()
            self._lost += 1
        return row

    def remember(self, name: str, value: str) -> None:
        """Keep a value for the next commit."""
        self._meta[name] = value
        self._known[name] = value

    def is_lost(self) -> bool:
        """Return whether the open file was deleted, so that later writes would be lost."""
        try:
            return not os.path.samestat(os.lstat(self.path), self._file)
        except OSError:
            return True

    def restore(self) -> None:
        """Make a new file after the old one was deleted. The caller must write the sessions again.

        Raises
        ------
        JournalUnusable
            If the new file cannot be made now.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for suffix in ("-wal", "-shm"):  # these files belong to the deleted file
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
            db = self._open()
        except (OSError, sqlite3.Error, ValueError) as error:
            raise self._unusable(error) from None
        self._db.close()
        self._db = db
        self._meta = {**self._known, **self._meta}

    def commit(self) -> bool:
        """Write everything that waits for the commit; return whether this worked. Never raises."""
        if not (self._records or self._rows or self._meta):
            return not self.problem
        try:
            with self._db:
                self._write()
        except sqlite3.Error as error:
            self._complain(error)
            return False
        self._records.clear()
        self._rows.clear()
        self._meta.clear()
        self._bound_log()
        if self.problem:
            self._log.warning(
                "The journal %s can be written again; %d rows were lost", self.path, self._lost
            )
            self.problem = ""
        return True

    def tidy(self) -> None:
        """Move the log into the file and drop the oldest rows. May be called in another thread.

        This method uses a new connection, so that the event loop does not wait for the disk.
        """
        try:
            tidy(self.path, keep_above=self.seq - MAX_ROWS, max_bytes=self._max_bytes())
        except sqlite3.Error as error:
            self._log.info("The journal %s was not tidied up: %s", self.path, error)

    def _bound_log(self) -> None:
        """If the log has become long, move it into the file; the next write starts a new log.

        While the broker writes without a pause, :meth:`tidy` never moves the whole log: new rows
        come into the log before :meth:`tidy` reaches its end. This method can move the whole log,
        because the broker writes nothing else meanwhile.

        This method does not sync the file, because a sync delays the event loop by 0.2 to 12 ms.
        The next :meth:`tidy` syncs the file. If the machine loses its power before that, rows are
        lost. The next commit writes a new header at the beginning of the log. It does not sync the
        header either. Such a sync would protect the file only if the disk already had all data of
        the old log.
        """
        self._commits += 1
        try:
            if self._unsynced:
                self._db.execute("PRAGMA synchronous = NORMAL")
                self._unsynced = False
            if self._commits % LOOK_AT_LOG:
                return
            size = self._log_size()
            if size < MAX_LOG // 2:
                self._long = MAX_LOG // 2
            elif size >= self._long:
                # Do not call ``on_long`` again until the log has grown further. Each :meth:`tidy`
                # competes with the commits for the disk and the file's lock.
                self._long = size + MAX_LOG // 8
                self._on_long()
            if size < MAX_LOG:
                return
            self._unsynced = True
            self._db.execute("PRAGMA synchronous = OFF")
            self._db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except (OSError, sqlite3.Error):
            pass  # the next commit tries again

    def close(self) -> None:
        """Commit and close the file."""
        self.commit()
        self._db.close()

    # ------------------------------------------------------------------ internals

    def _open(self) -> sqlite3.Connection:
        # The journal names kernels and users, so no other user may read it.
        descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self._file = os.fstat(descriptor)
        os.close(descriptor)
        db = sqlite3.connect(self.path, timeout=LOCK_WAIT)
        try:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # this takes effect only for a new file
            db.execute("PRAGMA journal_mode = WAL").fetchall()
            db.execute("PRAGMA synchronous = NORMAL")
            # The limit is high because a truncation is slow. SQLite truncates a longer log on the
            # event loop, which takes milliseconds. Then the log grows again, so the next sync must
            # also write data of the file system, which takes further milliseconds. The log exceeds
            # this limit only during a long read.
            db.execute(f"PRAGMA journal_size_limit = {2 * MAX_LOG}").fetchall()
            # Make no automatic checkpoints, because they would delay the event loop. tidy() and
            # _bound_log() make the checkpoints.
            db.execute("PRAGMA wal_autocheckpoint = 0").fetchall()
            version = db.execute("PRAGMA user_version").fetchone()[0]
            tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if version == 0 and tables == 0:
                with db:
                    db.executescript(_SCHEMA)
                    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            elif version != SCHEMA_VERSION:
                raise ValueError(
                    f"it has version {version}, but this broker needs {SCHEMA_VERSION}"
                )
            # A frame of the log is a page and its header.
            self._frame = int(db.execute("PRAGMA page_size").fetchone()[0]) + 24
            # Files of the first version lack this index. It serves queries of a user's rows.
            db.execute("CREATE INDEX IF NOT EXISTS events_owner ON events (owner, seq)")
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                raise ValueError(str(found))
        except BaseException:
            db.close()
            raise
        return db

    def _replace(self, error: Exception) -> sqlite3.Connection:
        """Set a damaged file aside and begin a new one."""
        aside = self.path.with_name(f"{self.path.name}.damaged-{int(time.time())}")
        try:
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):
                other = self.path.with_name(self.path.name + suffix)
                if other.exists():
                    other.rename(aside.with_name(aside.name + suffix))
            db = self._open()
        except (OSError, sqlite3.Error, ValueError) as second:
            raise self._unusable(second) from None
        self.set_aside = (
            f"The journal {self.path} was damaged ({error}). The broker renamed it to {aside.name} "
            "and began a new one. Restart the kernels that were open to use a GPU in them again."
        )
        self._log.error("%s", self.set_aside)
        return db

    def _write(self) -> None:
        for session, record in self._records.items():
            if record is None:
                self._db.execute("DELETE FROM sessions WHERE id = ?", (session,))
            else:
                self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?)", (session, record))
        self._db.executemany(
            f"INSERT INTO events ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    r.seq, r.time, r.kind, r.session, r.owner, r.device, r.bytes, r.seconds,
                    r.reason, _encoded(r.detail),
                )
                for r in self._rows
            ],
        )  # fmt: skip
        for name, value in self._meta.items():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (name, value))

    def _last_seq(self) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
        return int(row[0]) if row else 0

    def _complain(self, error: sqlite3.Error) -> None:
        problem = (
            f"The journal {self.path} cannot be written ({error}). The pool goes on, but if the "
            "broker restarted now, it might not know which kernels are suspended. Make room, or "
            "set c.GPUPool.state_dir to another folder."
        )
        if not self.problem:
            self._log.error("%s", problem)
        self.problem = problem

    def _inspect(self, machine: str) -> None:
        """Refuse a file of another user, another machine or a newer version.

        This method opens the file read-only, so that SQLite does not write to it either.
        """
        try:
            if os.lstat(self.path).st_uid != os.geteuid():
                raise self._not_ours("belongs to another user")
            name = f"{self.path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(name, uri=True, timeout=LOCK_WAIT)) as db:
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if version > SCHEMA_VERSION:
                    raise self._newer(version)
                row = db.execute("SELECT value FROM meta WHERE name = 'machine'").fetchone()
        except (FileNotFoundError, sqlite3.Error):
            return  # the file is new or damaged; opening it will show which
        if machine and row is not None and row[0] != machine:
            raise self._not_ours("belongs to another machine")

    def _not_ours(self, why: str) -> JournalUnusable:
        return JournalUnusable(
            f"The journal {self.path} {why}, so the broker did not change it.",
            next_step="Move the file away, or set c.GPUPool.state_dir to a folder of your own on "
            "this machine.",
        )

    def _newer(self, version: int) -> JournalUnusable:
        return JournalUnusable(
            f"A newer jupyter_gpupool wrote the journal {self.path}: the file has version "
            f"{version}, and this jupyter_gpupool can read version {SCHEMA_VERSION}. Neither the "
            "file nor the open kernels were changed.",
            code=Code.JOURNAL_NEWER,
            next_step="Install the newer version again. To keep this older version, end the open "
            "kernels and move the file away.",
        )

    def _unusable(self, error: Exception) -> JournalUnusable:
        return unusable(self.path, "used", error)
