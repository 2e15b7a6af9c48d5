# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Lets only one broker use the file of a socket, and accepts connections to this socket."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import resource
import select
import socket
import stat
from collections import deque
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Callable

from ... import local_machine
from ...endpoint import check_path, is_machine_path
from ...errors import BrokerUnavailable, Code, RefusedError
from ...protocol import encode, error_message
from .auth import User, peer_of, shown
from .connection import Connection, Service
from .dispatch import Dispatcher

#: The most connections that Linux queues until the broker accepts them (listen(2)). Hundreds of
#: notebooks may start at the same time.
BACKLOG = 512


def is_machine_wide(path: Path) -> bool:
    """Return whether a broker at ``path`` serves all users: it runs as root, below ``/run``."""
    return os.geteuid() == 0 and is_machine_path(path)


class Claim:
    """The right to listen at ``path``, from construction to :meth:`close`.

    Parameters
    ----------
    given:
        A socket that a service manager has bound to ``path``. The socket outlives this process:
        clients that connect while no broker runs wait for the next broker, and are not refused.

    Raises
    ------
    BrokerUnavailable
        Code ``bad-socket`` if the path cannot be trusted, ``already-running`` if a broker listens
        there.
    """

    def __init__(self, path: Path, given: socket.socket | None = None) -> None:
        check_path(path)
        self.path = path
        self.machine_wide = is_machine_wide(path)
        self._make_folder()
        self._lock = self._take_lock()
        self._given = given
        self._bound: tuple[int, int] | None = None
        try:
            self._remove_stale()
        except BaseException:
            self._give_up_lock()
            raise

    def bind(self) -> socket.socket:
        """Return a listening socket."""
        if self._given is not None:
            return self._take_given(self._given)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Other users must not connect, even between bind and chmod.
        before = os.umask(0o177)
        try:
            listening.bind(str(self.path))
            # At once, because a client that finds the file before is refused.
            listening.listen(BACKLOG)
        except OSError as error:
            listening.close()
            raise self._refuse(f"cannot be made ({error.strerror})") from None
        finally:
            os.umask(before)
        if self.machine_wide:
            self.path.chmod(0o666)
        self._note_bound()
        return listening

    def is_lost(self) -> bool:
        """Return whether the socket's or the lock's file no longer belongs to this broker."""
        if not _is_at(self._lock, self._lock_path):
            return True
        try:
            found = os.lstat(self.path)
        except OSError:
            return True
        return (found.st_dev, found.st_ino) != self._bound

    def restore(self) -> socket.socket | None:
        """Claim the path again; return a new listening socket if the old one is gone.

        The new socket is this broker's own, even if a service manager had bound the old socket.

        Raises
        ------
        BrokerUnavailable
            If the path is not free now: its folder cannot be made, or another broker claims it.
        """
        self._make_folder()
        if not _is_at(self._lock, self._lock_path):
            old, self._lock = self._lock, self._take_lock()
            os.close(old)
        with suppress(OSError):
            found = os.lstat(self.path)
            if (found.st_dev, found.st_ino) == self._bound:
                return None
        self._drop_given()
        self._remove_stale()
        return self.bind()

    def close(self) -> None:
        """Remove the socket's file, if it still belongs to this broker, and release the lock.

        The machine's broker leaves the socket's file. Without this file, a kernel that starts
        before the machine's next broker would start a broker for its own user.
        """
        try:
            found = os.lstat(self.path)
            mine = self._given is None and not self.machine_wide
            if mine and (found.st_dev, found.st_ino) == self._bound:
                self.path.unlink()
        except OSError:
            pass  # another process removed it before this broker did
        self._drop_given()
        self._give_up_lock()

    # ------------------------------------------------------------------ internals

    def _take_given(self, given: socket.socket) -> socket.socket:
        self._note_bound()
        # The broker, not the service manager, decides who may connect.
        self.path.chmod(0o666 if self.machine_wide else 0o600)
        # Listen on a copy. The Door closes the copy, and the given socket stays open.
        listening = given.dup()
        listening.setblocking(False)
        listening.listen(BACKLOG)
        return listening

    def _drop_given(self) -> None:
        if self._given is not None:
            self._given.close()  # the service manager has another descriptor of this socket
            self._given = None

    def _note_bound(self) -> None:
        found = os.lstat(self.path)
        self._bound = (found.st_dev, found.st_ino)

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
            what = f"needs the folder {folder}, which cannot be made ({error.strerror})"
            raise self._refuse(what) from None
        found = os.lstat(folder)
        if stat.S_ISLNK(found.st_mode) or not stat.S_ISDIR(found.st_mode):
            raise self._refuse(f"is in {folder}, which is a symbolic link or not a folder")
        if found.st_uid not in (os.geteuid(), 0):
            raise self._refuse(f"is in a folder of user id {found.st_uid}")
        if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
            raise self._refuse("is in a folder to which other users may write")

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
                    next_step="Use that broker, or end it first.",
                ) from None
            if _is_at(lock, name):
                break
            # Between os.open and flock, the broker that held the lock removed the lock's file. So
            # this lock protects nothing. Try again, because another broker may have made a new
            # file.
            os.close(lock)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n{local_machine.pid_namespace()}\n".encode(), 0)
        return lock

    def _give_up_lock(self) -> None:
        """Remove the lock's file, then release the lock."""
        if _is_at(self._lock, self._lock_path):
            with suppress(OSError):
                self._lock_path.unlink()
        os.close(self._lock)

    def _remove_stale(self) -> None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            self._drop_given()
            return
        if not stat.S_ISSOCK(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a socket"
            raise self._refuse(f"is already there and is {kind}")
        if found.st_uid != os.geteuid():
            raise self._refuse(f"is already there and belongs to user id {found.st_uid}")
        # This broker has the lock. But another broker may still listen here, if somebody has
        # deleted the file of that broker's lock.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(str(self.path))
            except OSError as error:
                if error.errno != errno.EAGAIN:  # EAGAIN: a broker listens, and its queue is full
                    # No broker listens at this file. If systemd has passed a socket to this broker,
                    # the socket's own file is lost, so no client can reach the socket.
                    self._drop_given()
                    self.path.unlink()
                    return
        if self._given is not None:
            # The service manager's socket has answered. This broker has the lock, so no other
            # broker listens at that socket.
            return
        raise self._refuse("is in use by another program", Code.ALREADY_RUNNING)


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether ``path`` is the file that is open as ``descriptor``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except OSError:
        return False


#: The most connections that are accepted in one turn of the event loop.
ACCEPTS = 32

#: The most connections of one user that may wait here for the user's budget. The broker refuses
#: further connections.
LOBBY = 128

#: Seconds for which the broker accepts no connections when no descriptors are left.
PAUSE = 0.2

#: If the broker lacks descriptors, it logs this at most once in this many seconds.
COMPLAIN = 60.0

#: Descriptors that the broker needs for other things than connections.
RESERVED = 64


def connection_limit() -> int:
    """Return the most connections for which this process has descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, soft - RESERVED)


class Door:
    """Accepts connections until :meth:`close`: a few in each turn of the loop, within budgets.

    asyncio's own server accepts all connections in its backlog at once, before anything else runs,
    and makes a transport for each connection. So a user could keep the loop busy by connecting and
    disconnecting all the time. Here, a connection that exceeds its user's budget waits as a bare
    socket.

    ``make`` returns the protocol of a new connection. ``user`` is the user to whom the socket
    belongs; "" for the socket for all users.
    """

    def __init__(
        self,
        listening: socket.socket,
        make: Callable[[], Connection],
        dispatcher: Dispatcher,
        log: logging.Logger,
        user: str = "",
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._user = user
        self._listening = listening
        self._make = make
        self._dispatcher = dispatcher
        self._log = log
        self._lobby: dict[User, deque[socket.socket]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._complained_at = float("-inf")
        listening.setblocking(False)
        self._loop.add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listening.fileno())
        self._listening.close()
        if self._timer is not None:
            self._timer.cancel()
        for waiting in self._lobby.values():
            for accepted in waiting:
                accepted.close()
        self._lobby.clear()

    # ------------------------------------------------------------------ internals

    def _accept(self) -> None:
        for _ in range(ACCEPTS):
            try:
                accepted, _address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._complain(error)
                self._loop.remove_reader(self._listening.fileno())
                self._loop.call_later(PAUSE, self._again)
                return
            self._admit(accepted)

    def _complain(self, error: OSError) -> None:
        if self._loop.time() - self._complained_at >= COMPLAIN:
            self._complained_at = self._loop.time()
            self._log.error(
                "The broker can accept no connection now: %s. Raise its limit of open files "
                "(LimitNOFILE, ulimit -n)", error.strerror,
            )  # fmt: skip

    def _again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listening.fileno(), self._accept)

    def _admit(self, accepted: socket.socket) -> None:
        """Serve a connection now or later, or refuse it."""
        accepted.setblocking(False)
        try:
            uid = peer_of(accepted, self._user).uid
        except OSError:
            accepted.close()
            return
        account, waiting = self._dispatcher.account(uid), self._lobby.get(uid)
        left = account.connects.left(self._loop.time())
        if left < account.connects.size / 2 and _hung_up(accepted):
            accepted.close()  # this user often connects and disconnects at once
        elif waiting is None and left >= 1:
            self._serve(accepted, uid)
        elif waiting is None or len(waiting) < LOBBY:
            self._lobby.setdefault(uid, deque()).append(accepted)
            if self._timer is None:
                self._timer = self._loop.call_later(0.01, self._look)
        else:
            self._turn_away(accepted, uid)

    def _serve(self, accepted: socket.socket, uid: User) -> None:
        self._dispatcher.account(uid).connects.pay(1, self._loop.time())
        task = self._loop.create_task(self._start(accepted))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:
            accepted.close()

    def _look(self) -> None:
        """Serve the waiting connections that their users' budgets now allow."""
        self._timer = None
        now = self._loop.time()
        for uid, waiting in [*self._lobby.items()]:
            account = self._dispatcher.account(uid)
            while waiting and account.connects.left(now) >= 1:
                accepted = waiting.popleft()
                if _hung_up(accepted):
                    accepted.close()
                else:
                    self._serve(accepted, uid)
            if not waiting:
                del self._lobby[uid]
        if self._lobby:
            self._timer = self._loop.call_later(0.01, self._look)

    def _turn_away(self, accepted: socket.socket, uid: User) -> None:
        try:
            accepted.send(_refusal(uid, self._dispatcher.account(uid).connects.rate))
        except OSError:
            pass  # the peer has left already
        accepted.close()


def _hung_up(accepted: socket.socket) -> bool:
    """Return whether the peer has closed the connection."""
    poll = select.poll()
    poll.register(accepted, 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


@lru_cache(maxsize=64)
def _refusal(uid: User, rate: float) -> bytes:
    """Return the error for a connection that is refused because too many connections of the same
    user wait (:data:`LOBBY`).
    """
    error = RefusedError(
        f"{shown(uid)} connects to the broker more often than {rate:g} times a second.",
        code=Code.BUSY,
        next_step="Use one connection for several requests.",
        details={"retry_after": LOBBY / rate},
    )
    return encode(error_message(error, None))


class Server:
    """Accepts connections for ``service`` at one socket; a new socket replaces the old one."""

    def __init__(self, service: Service, log: logging.Logger) -> None:
        self._service = service
        self._log = log
        self._door: Door | None = None

    def serve(self, listening: socket.socket) -> None:
        """Accept connections at ``listening`` instead of at the previous socket."""
        door = Door(
            listening, lambda: Connection(self._service), self._service.dispatcher, self._log
        )
        self.close()
        self._door = door

    def close(self) -> None:
        """Stop accepting connections."""
        if self._door is not None:
            self._door.close()
