# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The socket's file: made so that nobody else can stand in for it, and only one broker has it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from .. import machine
from ..endpoint import check_path, is_machine_path
from ..errors import BrokerUnavailable, Code

#: Connections the kernel may keep for us until we accept them: a class that starts at ten o'clock.
BACKLOG = 512


def is_machine_wide(path: Path) -> bool:
    """Return whether a broker at ``path`` serves everybody: it is root's and below ``/run``."""
    return os.geteuid() == 0 and is_machine_path(path)


class Claim:
    """The right to listen at ``path``, held from construction to :meth:`close`.

    Raises
    ------
    BrokerUnavailable
        Code ``bad-socket`` if the path can not be trusted, ``already-running`` if a broker has it.
    """

    def __init__(self, path: Path) -> None:
        check_path(path)
        self.path = path
        self.machine_wide = is_machine_wide(path)
        self._make_folder()
        self._lock = self._take_lock()
        self._bound: tuple[int, int] | None = None
        try:
            self._remove_stale()
        except BaseException:
            self._give_up_lock()
            raise

    def bind(self) -> socket.socket:
        """Return a listening socket."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Never connectable by others, not even between bind and chmod.
        before = os.umask(0o177)
        try:
            listening.bind(str(self.path))
        except OSError as error:
            listening.close()
            raise self._refuse(f"cannot be made ({error.strerror})") from None
        finally:
            os.umask(before)
        if self.machine_wide:
            self.path.chmod(0o666)
        found = os.lstat(self.path)
        self._bound = (found.st_dev, found.st_ino)
        listening.listen(BACKLOG)
        return listening

    def is_lost(self) -> bool:
        """Return whether the socket's or the lock's file is not ours any more."""
        if not _is_at(self._lock, self._lock_path):
            return True
        try:
            found = os.lstat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._bound

    def restore(self) -> socket.socket | None:
        """Claim the path again; return a new listening socket if the old one is not there.

        Raises
        ------
        BrokerUnavailable
            If the path cannot be had now: its folder cannot be made, or another broker tries.
        """
        self._make_folder()
        if not _is_at(self._lock, self._lock_path):
            old, self._lock = self._lock, self._take_lock()
            os.close(old)
        with suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._bound:
                return None
        self._remove_stale()
        return self.bind()

    def close(self) -> None:
        """Remove the socket's file, if it still is ours, and give up the lock."""
        try:
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._bound:
                self.path.unlink()
        except OSError:
            pass  # somebody tidied up before us
        self._give_up_lock()

    # ------------------------------------------------------------------ internals

    def _refuse(self, what: str, code: Code = Code.BAD_SOCKET) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"The broker socket {self.path} {what}.",
            code=code,
            next_step="Set c.GPUPool.socket or GPUPOOL_SOCKET to a path in a folder of your own.",
        )

    def _make_folder(self) -> None:
        folder = self.path.parent
        mode = 0o755 if self.machine_wide else 0o700
        try:
            folder.mkdir(parents=True, mode=mode)
            folder.chmod(mode)  # mkdir's mode is subject to the umask
        except FileExistsError:
            pass
        except OSError as error:
            raise self._refuse(f"needs the folder {folder} ({error.strerror})") from None
        found = os.lstat(folder)
        if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
            raise self._refuse("is in something that is not a folder, or is a symbolic link")
        if found.st_uid not in (os.geteuid(), 0):
            raise self._refuse(f"is in a folder of user id {found.st_uid}")
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise self._refuse("is in a folder that other users may write")

    @property
    def _lock_path(self) -> Path:
        return self.path.with_name(self.path.name + ".lock")

    def _take_lock(self) -> int:
        name = self._lock_path
        while True:
            try:
                lock = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise self._refuse(f"cannot be locked: {name} ({error.strerror})") from None
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                words = os.pread(lock, 100, 0).decode(errors="replace").split()
                holder = words[0] if words else "unknown"
                os.close(lock)
                raise BrokerUnavailable(
                    f"A GPU pool broker (process {holder}) already listens at {self.path}.",
                    code=Code.ALREADY_RUNNING,
                    next_step="Use that one, or end it first.",
                ) from None
            if _is_at(lock, name):
                break
            # Its holder ended and removed it between our two calls: there may be a new one.
            os.close(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n{machine.pid_namespace()}\n".encode(), 0)
        return lock

    def _give_up_lock(self) -> None:
        """Remove the lock's file while we hold it, and let go; who opened it before looks again."""
        if _is_at(self._lock, self._lock_path):
            with suppress(OSError):
                self._lock_path.unlink()
        os.close(self._lock)

    def _remove_stale(self) -> None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a socket"
            raise self._refuse(f"is already there and is {kind}")
        if found.st_uid != os.geteuid():
            raise self._refuse(f"is already there and belongs to user id {found.st_uid}")
        # We have the lock; but somebody may have removed the lock's file under a living broker.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except OSError:
                self.path.unlink()
                return
        raise self._refuse("is already there and somebody listens", Code.ALREADY_RUNNING)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` is the very file that is open as ``descriptor``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False
