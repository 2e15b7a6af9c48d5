# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Restore a broker's files when somebody deletes them; remove the files of killed brokers.

logind removes ``/run/user/UID`` and, with ``RemoveIPC=yes``, a user's files in ``/dev/shm`` when
the last login ends. A kernel in tmux, or a kernel whose server continues to run, still needs its
broker and the broker's files. So the broker checks its files. It checks every second, because a
check takes only a few microseconds for each file.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Awaitable, Callable, Sequence

from ... import local_machine, procfs
from ...daemon import broker_environment
from ...devices import vendor
from ...endpoint import user_runtime_dir
from ...errors import GPUPoolError
from ...startfailures import forgive
from ...startrecord import (
    BadRecord,
    StartRecord,
    change_record,
    copy_path,
    read_record,
    remove_copy,
    remove_record,
    write_copy,
    write_record,
)
from ..core import Core
from ..pages.control import SHARED_MEMORY, SOCKET_FILE, folder_name
from ..pages.setup import GuardSetup
from ..transport.listener import Claim, is_machine_wide
from .journal_file import JournalLock

#: Seconds between two checks.
LOOK = 1.0

#: Seconds between two updates of the files' times. Without these updates, systemd-tmpfiles would
#: remove the files after 10 days in /tmp, or after 30 days in /var/tmp.
TOUCH = 86400.0

#: The broker restores no file beside the socket that has more bytes than this.
MAX_KEPT = 1 << 20

#: Suffixes of the files beside the socket that :class:`FileKeeper` does not restore. Other code
#: restores them, or processes have locked them.
_NOT_KEPT = (".sock", ".lock", ".start", ".failed", ".log", ".old")


class StartRecordFile:
    """The record with which clients start this broker again after it has died.

    Parameters
    ----------
    command:
        The command that starts this broker again, without ``--socket``. It is empty if clients
        cannot start the broker.
    """

    def __init__(self, socket: Path, command: Sequence[str], log: logging.Logger) -> None:
        self._socket = socket
        self._command = [*command]
        self._log = log
        self._record: StartRecord | None = None
        self._served = False

    def mention_predecessor(self) -> None:
        """If the previous broker died, log this: a killed broker cannot log its own death."""
        with suppress(BadRecord):
            before = read_record(self._socket)
            if before is not None:
                self._log.warning(
                    "The previous broker (process %d) died: %s", before.pid,
                    before.crashed or "it was killed, perhaps because memory was short (see dmesg)",
                )  # fmt: skip

    def write(self, journal: Path) -> None:
        """Write the record, if clients can start this broker again."""
        if is_machine_wide(self._socket) or not self._command:
            return
        command = [*self._command, "--socket", str(self._socket)]
        try:
            environment = broker_environment(os.environ)
            self._record = write_record(
                self._socket, command, environment, str(journal), vendor.VARIABLES
            )
            forgive(self._socket)
            if self._served:
                self._change(served=True)  # a client has connected before the record was written
        except OSError as error:
            self._log.warning("If this broker dies, nothing will start it again: %s", error)
            return
        try:
            write_copy(self._record)
        except OSError as error:
            self._log.warning("The start record has no copy beside the journal: %s", error)

    def keep(self) -> None:
        """Write the copy beside the journal again, if it was deleted."""
        if self._record is not None and not copy_path(Path(self._record.journal)).exists():
            write_copy(self._record)

    def forget(self) -> None:
        """Remove the start record of this broker or, if it has none, of the previous broker.

        Somebody has asked this broker to end, so no client may start it again.
        """
        record = self._record
        with suppress(BadRecord):
            record = record or read_record(self._socket)
        if record is not None:
            remove_copy(record.journal)
        remove_record(self._socket)

    def served(self) -> None:
        """Note that this broker has served a client, so clients start it again if it is killed."""
        if not self._served:
            self._served = True
            self._change(served=True)

    def crashed(self, error: Exception) -> None:
        """Note in the record that an error has ended this broker."""
        self._change(crashed=f"{type(error).__name__}: {error}"[:500])

    def _change(self, **changes: Any) -> None:
        if self._record is None:
            return
        self._record = change_record(self._socket, self._record, **changes)
        # If the copy is missing, do not write it again: a broker that ends in order removes it.
        if copy_path(Path(self._record.journal)).exists():
            with suppress(OSError):
                write_copy(self._record)


class FileKeeper:
    """Restores the deleted files of one broker.

    ``serve`` gets the new socket and accepts connections at it.
    """

    def __init__(
        self,
        claim: Claim,
        lock: JournalLock,
        core: Core,
        *,
        setup: GuardSetup,
        start_record: StartRecordFile,
        serve: Callable[[socket.socket], None],
        log: logging.Logger,
    ) -> None:
        self._claim = claim
        self._lock = lock
        self._core = core
        self._setup = setup
        self._start_record = start_record
        self._serve = serve
        self._log = log
        #: The files beside the socket, by path: version (inode, time of change), mode and content.
        self._kept: dict[Path, tuple[tuple[int, int], int, bytes]] = {}
        self._problems: dict[str, str] = {}
        self._touch_at = time.monotonic() + TOUCH

    async def run(self) -> None:
        """Check as long as the broker serves."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Check once, and restore missing files."""
        await self._try("socket", self._keep_socket)
        await self._try("journal", self._keep_journal)
        await self._try("page of a session", self._setup.keep)

    async def _try(self, what: str, keep: Callable[[], Awaitable[None]]) -> None:
        """Restore a file; log a failure once, and try again at each check."""
        try:
            await keep()
        except (OSError, GPUPoolError) as error:
            if self._problems.get(what) != str(error):
                self._log.error("The %s cannot be restored yet: %s", what, error)
            self._problems[what] = str(error)
        else:
            self._problems.pop(what, None)

    # ------------------------------------------------------------------ the socket

    async def _keep_socket(self) -> None:
        if not self._claim.is_lost():
            self._remember()
            if time.monotonic() >= self._touch_at:
                self._touch_at = time.monotonic() + TOUCH
                for path in self._kept:
                    with suppress(OSError):
                        os.utime(path)
            return
        listening = self._claim.restore()
        if listening is not None:
            self._serve(listening)
        for path, (_, mode, content) in self._kept.items():
            if not path.exists():
                _write(path, mode, content)
        self._reopen_log()
        self._log.warning("The socket %s was deleted and is back", self._claim.path)

    def _remember(self) -> None:
        """Read into memory the files beside the socket that the next broker here would need."""
        prefix = f"{self._claim.path.stem}."
        with os.scandir(self._claim.path.parent) as entries:
            found = [e for e in entries if e.name.startswith(prefix)]
        for entry in found:
            if entry.name.endswith(_NOT_KEPT):
                continue
            with suppress(OSError):
                now = entry.stat(follow_symlinks=False)
                version = (now.st_ino, now.st_mtime_ns)
                path = Path(entry.path)
                if not stat.S_ISREG(now.st_mode) or now.st_size > MAX_KEPT:
                    continue
                if path not in self._kept or self._kept[path][0] != version:
                    self._kept[path] = version, stat.S_IMODE(now.st_mode), path.read_bytes()

    def _reopen_log(self) -> None:
        """Open a new log if the log was deleted with the socket."""
        with suppress(OSError):
            name = str(Path("/proc/self/fd/2").readlink())
            path = Path(name.removesuffix(" (deleted)"))
            if name == str(path) or path.parent != self._claim.path.parent:
                return
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            log = os.open(path, flags, 0o600)
            for descriptor in (1, 2):
                os.dup2(log, descriptor)
            os.close(log)

    # ------------------------------------------------------------------ the journal

    async def _keep_journal(self) -> None:
        if self._lock.is_lost():
            self._lock.restore()
            self._log.warning("The lock %s was deleted and is back", self._lock.path)
        self._start_record.keep()
        journal = self._core.journal
        if not journal.is_lost():
            return
        journal.restore()
        for session in self._core.sessions:
            self._core.dirty(session.id)
        self._core.commit()
        self._log.warning("The journal %s was deleted and is back, with all sessions", journal.path)


def _write(path: Path, mode: int, content: bytes) -> None:
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)


#: A file that is younger than this many seconds stays, because a starting broker may use it.
YOUNG = 600.0

#: The same limit for a folder that does not name its broker, and for a lock that does not name a
#: PID namespace. An older version made them, so this process cannot know whether their broker
#: lives.
UNKNOWN_YOUNG = 86400.0

#: The files beside a socket, as suffixes of its name. The log is not among them: it stays for
#: people.
_BESIDE = ("", ".lock", ".start", ".start.json", ".start.failed", ".pages", ".emulated")


def sweep(own: Path, log: logging.Logger, *, shared: Path = SHARED_MEMORY) -> None:
    """Remove the files of killed brokers of this user; ``own`` is the socket of the caller.

    A broker that ends in order leaves no files. If a broker is killed, the next broker at the same
    socket uses its files. So files stay behind only at a socket where no broker starts again: the
    socket of a test or a container, or a socket at an old path. This function removes these files.
    It keeps files that a living broker or kernel may need.

    This function reads ``/proc`` and the disk, so do not call it in an event loop.
    """
    used = _in_use()
    removed = [path for path in _dead_pages(own, used, shared) if _remove(path)]
    for dead in _dead_sockets(own, used, shared):
        removed += [path for path in _files_of(dead) if _remove(path)]
    if removed:
        log.info("Removed files of killed brokers: %s", ", ".join(map(str, removed)))


def _in_use() -> set[Path]:
    """Return the sockets and page folders that this user's processes have in their environment."""
    found = set()
    for pid in procfs.all_pids():
        named = procfs.variables(pid, ["GPUPOOL_PAGE", "GPUPOOL_SOCKET"]) or {}
        if "GPUPOOL_PAGE" in named:
            found.add(Path(named["GPUPOOL_PAGE"]).parent)
        if "GPUPOOL_SOCKET" in named:
            found.add(Path(named["GPUPOOL_SOCKET"]))
    return found


def _dead_pages(own: Path, used: set[Path], shared: Path) -> list[Path]:
    found = []
    for folder in _ours(shared, f"gpupool-{os.geteuid()}-*"):
        if folder in used or folder.name == folder_name(own) or not folder.is_dir():
            continue
        socket = None
        with suppress(OSError, ValueError):
            name, namespace = (folder / SOCKET_FILE).read_text().split("\n")
            if namespace != local_machine.pid_namespace():
                # This process cannot see the processes of the container to which the folder
                # belongs.
                continue
            socket = Path(name)
        if not _is_old(folder, YOUNG if socket else UNKNOWN_YOUNG):
            continue
        if socket is None or not _broker_lives(socket):
            found.append(folder)
    return found


def _dead_sockets(own: Path, used: set[Path], shared: Path) -> list[Path]:
    found = []
    for folder in {local_machine.local_folder(), user_runtime_dir(), own.parent}:
        if not _is_ours(folder):
            continue
        for lock in _ours(folder, "*.sock.lock"):
            socket = lock.with_name(lock.name.removesuffix(".lock"))
            pages = socket.with_name(f"{socket.name}.pages")
            names = {socket, pages, shared / folder_name(socket)}
            if socket == own or used & names or _broker_lives(socket):
                continue
            young = _young(lock)
            if young is not None and all(_is_old(path, young) for path in _files_of(socket)):
                found.append(socket)
    return found


def _young(lock: Path) -> float | None:
    """Return the seconds for which a dead broker's files stay; None if they always stay.

    This process cannot see the kernels of a container. As long as the machine runs, these kernels
    may start their broker again with these files.
    """
    _, namespace = _holder(lock)
    if not namespace:
        return UNKNOWN_YOUNG
    if namespace != local_machine.pid_namespace() and not _is_old(lock, _uptime() + YOUNG):
        return None
    return YOUNG


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _holder(lock: Path) -> tuple[int, str]:
    """Return the process and PID namespace that last claimed a socket, if the lock names them."""
    with suppress(OSError, ValueError):
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            pid, *rest = os.read(descriptor, 100).decode(errors="replace").split()
        finally:
            os.close(descriptor)
        return int(pid), rest[0] if rest else ""
    return 0, ""


def _files_of(socket: Path) -> list[Path]:
    names = [socket.with_name(socket.name + suffix) for suffix in _BESIDE]
    names.append(socket.with_suffix(".config.json"))
    return [path for path in names if os.path.lexists(path)]


def _broker_lives(socket: Path) -> bool:
    """Return whether a broker may live at the socket.

    The lock names the process that claimed the socket. The result is True if a process with this
    pid lives, even if Linux has given the pid to another process since. The result is also True if
    any process has locked the lock's file.
    """
    try:
        descriptor = os.open(f"{socket}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if procfs.identify(_holder(Path(f"{socket}.lock"))[0]) is not None:
            return True
        # Perhaps a broker in a container has the lock.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (OSError, ValueError):
        return True
    finally:
        os.close(descriptor)
    return False


def _ours(folder: Path, pattern: str) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.glob(pattern) if _is_ours(path)]
    return []


def _is_ours(path: Path) -> bool:
    try:
        return os.lstat(path).st_uid == os.geteuid()
    except OSError:
        return False


def _is_old(path: Path, seconds: float) -> bool:
    with suppress(OSError):
        return time.time() - os.lstat(path).st_mtime > seconds
    return True


def _remove(path: Path) -> bool:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError:
        return False
    return True
