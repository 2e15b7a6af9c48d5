# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Choose the journal's file, and check that this broker may go on with the sessions in it.

If two brokers wrote one journal, both would drive the kernels in it. So the journal has a lock,
which a broker keeps for its whole life. The lock names its broker's socket, so that a second broker
can name the first one to its clients.

Each kernel looks for its broker at one socket. A broker at another socket could read the kernel's
session in the journal, but the kernel would never find this broker. A broker at the kernel's socket
with another journal would not know the session. In both cases, the broker refuses to start while a
process of such a session lives.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sqlite3
import struct
import time
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from ... import local_machine
from ...endpoint import MACHINE_SOCKET, journal_name
from ...errors import BrokerUnavailable, Code, GPUPoolError
from ...procfs import ProcessId, alive
from ...startrecord import BadRecord, read_record
from .journal import Journal, JournalUnusable, unusable

#: The number of tries for the lock, and seconds between two tries. One try is not enough, because a
#: client that checks the lock holds it for an instant.
TRIES, PAUSE = 10, 0.02


@dataclass(frozen=True)
class Place:
    """The journal's path.

    If the path is not in the configured folder, ``note`` says why.
    """

    path: Path
    note: str = ""


def place(state_dir: Path, socket: Path) -> Place:
    """Return the journal's place for the broker at ``socket``.

    Raises
    ------
    FolderError
        If ``state_dir`` is on a network and no folder of this machine can be used.
    """
    name = f"{journal_name(socket)}.sqlite"
    kind = local_machine.network_file_system(state_dir)
    if not kind:
        return Place(state_dir / name)
    folder = local_machine.make_private(local_machine.local_folder())
    return Place(
        folder / name,
        f"{state_dir} is on a network file system ({kind}), where a journal is not safe, so the "
        f"journal is in {folder}. To choose another folder, set c.GPUPool.state_dir to a local "
        "folder.",
    )


class JournalLock:
    """The right to write the journal at ``path``, from construction to :meth:`close`.

    Raises
    ------
    BrokerUnavailable
        Code ``already-running`` if a living broker has the lock; the details name its socket.
    JournalUnusable
        If the lock's file cannot be made.
    """

    def __init__(self, path: Path, socket: Path) -> None:
        self.path = path.with_suffix(".lock")
        self._socket = socket
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._descriptor = self._take()
        except OSError as error:
            raise unusable(path, "locked", error) from None

    def is_lost(self) -> bool:
        """Return whether the lock's file was deleted, so that a second broker could start."""
        return not _same(self._descriptor, self.path)

    def restore(self) -> None:
        """Make the lock's file again.

        Raises
        ------
        OSError, BrokerUnavailable
            If the file cannot be made now, or if another broker already has the lock.
        """
        old, self._descriptor = self._descriptor, self._take(tries=0)
        os.close(old)

    def close(self) -> None:
        """Release the lock. Its file stays: without the file, two processes could get the lock."""
        os.close(self._descriptor)

    def _take(self, tries: int = TRIES) -> int:
        descriptor = os.open(
            self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        try:
            for left in range(tries, -1, -1):
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not left:
                        raise self._held(descriptor) from None
                    time.sleep(PAUSE)
            text = {
                "pid": os.getpid(),
                "socket": str(self._socket),
                "boot": local_machine.boot_id(),
            }
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(text).encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _held(self, descriptor: int) -> BrokerUnavailable:
        pid, socket = "unknown", ""
        with suppress(OSError, ValueError, TypeError, KeyError):
            holder = json.loads(os.pread(descriptor, 4096, 0))
            pid, socket = str(holder["pid"]), str(holder["socket"])
        return BrokerUnavailable(
            f"A GPU pool broker (process {pid}) already uses this machine's journal and listens "
            f"at {socket or 'an unknown place'}.",
            code=Code.ALREADY_RUNNING,
            next_step="Use that broker, or end it first. Or set another c.GPUPool.socket and "
            "another c.GPUPool.state_dir for this broker.",
            details={"socket": socket},
        )


def take_over(path: Path, state_dir: Path, socket: Path, log: logging.Logger) -> None:
    """If this machine has a journal of an older version, copy it to ``path``.

    The name of the older file does not show to which machine it belongs. The file belongs to this
    machine in two cases: its sessions are of this boot, or its folder is local, so that no other
    machine can have written it.

    Raises
    ------
    BrokerUnavailable
        If the broker of the older version lives.
    JournalUnusable
        If the older journal cannot be copied. The broker then leaves it as it is and does not
        start, because with an empty journal the pool would lose kernels that may still live.
    """
    if path.exists():
        return
    local = not local_machine.network_file_system(state_dir)
    for old, listened in _older_names(state_dir, socket):
        try:
            if os.lstat(old).st_uid != os.geteuid():
                continue
            if (
                not local
                and _holder(old) == 0
                and _boot(old, "immutable=1") != local_machine.boot_id()
            ):
                continue  # a broker on another machine has it open
            _check_ended(old, listened, socket)
            if not _copy(old, path, any_boot=local):
                continue
        except FileNotFoundError:
            continue
        except (OSError, sqlite3.Error) as error:
            raise JournalUnusable(
                f"The journal {old} of an older version cannot be moved to {path}: {error}.",
                next_step="Make room or correct the permissions. Or, if all pooled kernels have "
                f"ended, move the old journal away: mv {old} {old}.old",
            ) from None
        for suffix in ("-wal", "-shm", ""):
            with suppress(OSError):  # nothing reads the old journal again
                old.with_name(old.name + suffix).unlink()
        log.info("Moved the journal %s of an older version to %s", old, path)
        return


def _copy(old: Path, path: Path, *, any_boot: bool) -> bool:
    """Copy ``old`` to ``path``; return False if the sessions in ``old`` are of another boot.

    If ``any_boot`` is true, the boot does not matter.

    ``path`` exists only after the copy is complete.
    """
    temporary = path.with_name(f"{path.name}.new")
    try:
        if not any_boot and _boot(old, "mode=ro") != local_machine.boot_id():
            return False
        with closing(sqlite3.connect(f"{old.absolute().as_uri()}?mode=ro", uri=True)) as source:
            temporary.unlink(missing_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            os.close(os.open(temporary, flags, 0o600))
            with closing(sqlite3.connect(temporary)) as copy:
                source.backup(copy)
                # The rename below moves only one file. In this mode, SQLite keeps no log in a
                # second file.
                copy.execute("PRAGMA journal_mode = DELETE")
        _sync(temporary)
        temporary.rename(path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()
    return True


def _boot(journal: Path, option: str) -> str:
    """Return the boot to which the sessions of a journal belong.

    With the option ``immutable=1``, SQLite takes no locks, which may not work on a network file
    system. It also ignores the write-ahead log.
    """
    with closing(sqlite3.connect(f"{journal.absolute().as_uri()}?{option}", uri=True)) as db:
        row = db.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
    return str(row[0]) if row else ""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_ended(old: Path, listened: Path, own: Path) -> None:
    """Refuse a journal of an older version if the broker that wrote it still lives.

    A broker of an older version locks only its socket, and somebody may have deleted the file of
    this lock. So this function first looks at SQLite's locks: SQLite locks an open journal, and the
    operating system shows which process holds these locks.
    """
    holder = _holder(old)
    # This broker itself has locked ``own``, so the lock of ``own`` shows no older broker.
    if holder is None and listened != own:
        with suppress(OSError):
            lock = os.open(f"{listened}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = 0
            finally:
                os.close(lock)
    if holder is not None:
        process = f" (process {holder})" if holder > 0 else ""
        raise BrokerUnavailable(
            f"A GPU pool broker of an older version{process} uses the journal {old} and listens at "
            f"{listened}.",
            code=Code.ALREADY_RUNNING,
            next_step="Use that broker, or end it first.",
            details={"socket": str(listened)},
        )


#: ``struct flock`` of Linux on 64-bit machines: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")


def _holder(journal: Path) -> int | None:
    """Return the id of a process that has the journal open; None if there is no such process.

    The result is 0 if this process cannot know the id: the other process runs in another container
    or, on a network file system, on another machine.
    """
    for suffix in ("", "-shm"):
        with suppress(FileNotFoundError):
            descriptor = os.open(f"{journal}{suffix}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
                found = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted))
            finally:
                os.close(descriptor)
            if found[0] != fcntl.F_UNLCK:
                return max(0, int(found[4]))
    return None


def _older_names(state_dir: Path, socket: Path) -> Iterable[tuple[Path, Path]]:
    """Yield the paths where an older version may have kept this broker's journal.

    The second item of each pair is the socket of the older broker.
    """
    uid = os.geteuid()
    sockets = [
        socket,
        Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}") / "gpupool" / "broker.sock",
        local_machine.LOGIN_FOLDERS / str(uid) / "gpupool" / "broker.sock",
        Path(f"/tmp/gpupool-{uid}/broker.sock"),
    ]
    if socket == MACHINE_SOCKET:
        yield state_dir / "journal.sqlite", socket
        return
    mine = journal_name(socket)
    for one in dict.fromkeys(sockets):
        if one == socket or journal_name(one) == mine:
            yield state_dir / f"journal-{zlib.crc32(os.fsencode(one)):08x}.sqlite", one


def _same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


class SessionsElsewhere(GPUPoolError):
    """Living kernels of this journal look for their broker at another socket."""

    code = Code.SESSIONS_ELSEWHERE


class JournalElsewhere(GPUPoolError):
    """Living kernels of this socket have their sessions in another journal."""

    code = Code.JOURNAL_ELSEWHERE


def check_home(journal: Journal, socket: Path) -> None:
    """Refuse the sessions of living kernels that look for their broker at another socket.

    Raises
    ------
    SessionsElsewhere
        If there are such kernels; the details name their socket. Nothing was changed.
    """
    home = journal.meta("socket")
    if (
        not home
        or journal.meta("boot") != local_machine.boot_id()
        or _same_place(Path(home), socket)
    ):
        return
    pids = living(journal.records())
    if pids:
        raise SessionsElsewhere(
            f"{_kernels(pids)} a GPU pool broker at {home}, which has ended. A broker at {socket} "
            f"would take over the sessions, but the kernels look for their broker at {home}.",
            next_step=f"Start the broker there: jupyter gpupool broker --socket {home}. If no "
            "broker can listen there any more, start this broker with --take-over. It then frees "
            "the GPU memory of idle kernels, but these kernels cannot ask for a GPU again until "
            "you restart them.",
            details={"socket": home},
        )


def check_record(socket: Path, path: Path) -> None:
    """Refuse to use ``path`` as the journal while this socket's kernels are in another journal.

    The start record of a broker that died names the journal of that broker.

    Raises
    ------
    JournalElsewhere
        If a process of a session in that journal lives.
    """
    try:
        record = read_record(socket)
    except BadRecord:
        return  # another user may have written the record
    if record is None or not record.journal or _same_place(Path(record.journal), path):
        return
    pids = living(_read(Path(record.journal)))
    if pids:
        folder = Path(record.journal).parent
        raise JournalElsewhere(
            f"{_kernels(pids)} this broker, but the sessions are in the journal "
            f"{record.journal}, and this configuration uses the journal {path}.",
            next_step=f"Set c.GPUPool.state_dir to {str(folder)!r}, or end the kernels: processes "
            f"{', '.join(map(str, pids))}.",
        )


def living(stored: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the process ids of the journal's kernels that still run."""
    found = []
    for entry in stored.values():
        try:
            if alive(ProcessId(int(entry["pid"]), int(entry["start_time"]))):
                found.append(int(entry["pid"]))
        except (KeyError, TypeError, ValueError):
            continue  # its kernel has not started yet, or the record is unreadable
    return sorted(found)


def _kernels(pids: list[int]) -> str:
    if len(pids) == 1:
        return f"A kernel (process {pids[0]}) depends on"
    return f"{len(pids)} kernels (processes {', '.join(map(str, pids))}) depend on"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sessions of this boot in the journal at ``path``; none if it is unreadable."""
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return {}
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
            if row is None or row[0] != local_machine.boot_id():
                return {}
            rows = db.execute("SELECT id, record FROM sessions").fetchall()
        return {name: json.loads(text) for name, text in rows}
    except (OSError, sqlite3.Error, ValueError):
        return {}


def _same_place(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
