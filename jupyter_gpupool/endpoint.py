# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds the broker's socket, and checks whether the socket can be trusted.

This module imports only the standard library, apart from modules of this package.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path

from . import local_machine
from .errors import BrokerUnavailable, Code

#: The environment variable that has the path of the broker's socket. The provisioner sets it for
#: kernels, and their children inherit it.
SOCKET_VARIABLE = "GPUPOOL_SOCKET"

#: The environment variable of a kernel without a session. Its value is a sentence that says why the
#: kernel has no session.
NO_SESSION_VARIABLE = "GPUPOOL_NO_SESSION"

#: The socket of the broker that an admin has set up for the whole machine.
MACHINE_SOCKET = Path("/run/gpupool/broker.sock")

#: A broker must start within this many seconds. At its start, it loads the driver and tests all
#: devices.
START_TIMEOUT = 90.0

#: Maximum bytes of a socket's path on Linux: the size of ``sun_path`` in ``struct sockaddr_un``
#: without the final zero byte. See unix(7).
MAX_SOCKET_PATH = 107


def user_runtime_dir() -> Path:
    """Return this user's folder for sockets: a short path in a local file system.

    The folder may not exist yet. It is the same in all logins, unless their XDG_RUNTIME_DIR
    differs. The folder is never in ``/run/user/UID``, for two reasons. The system deletes
    ``/run/user/UID`` at the last logout, while kernels and their broker continue to run. And
    processes of cron and tmux may not know that folder. If XDG_RUNTIME_DIR names a folder that is
    kept at logout, the result is in this folder.
    """
    chosen = _chosen_runtime_dir()
    return chosen / "gpupool" if chosen else local_machine.local_folder()


def _chosen_runtime_dir() -> Path | None:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    path = Path(base)
    if not base or local_machine.removed_at_logout(path) or not path.is_dir():
        return None
    return path


def find_socket(configured: str = "") -> Path:
    """Return the path at which the broker listens, or will listen after its start.

    The result is the first of these: ``configured`` (``c.GPUPool.socket``), ``$GPUPOOL_SOCKET``,
    the machine-wide socket if it exists, this user's own socket. If the user's own socket does not
    exist, a broker of the user may listen at another path. The lock file of its journal then names
    the socket, and the result is this socket.
    """
    chosen = configured or os.environ.get(SOCKET_VARIABLE, "")
    if chosen:
        return Path(chosen)
    if MACHINE_SOCKET.exists():
        return MACHINE_SOCKET
    own = user_runtime_dir() / "broker.sock"
    if own.exists() or _chosen_runtime_dir():
        return own
    for folder in (local_machine.state_dir(), local_machine.local_folder()):
        found = listening_at(folder / f"{journal_name(own)}.lock")
        if found is not None:
            return found
    return own


def journal_name(socket: Path) -> str:
    """Return the file name, without suffix, of the journal that a broker at ``socket`` writes.

    A user has several usual sockets on one machine, but only one journal for all of them. So a
    second broker at any of these sockets finds the journal locked. A broker at a socket with
    another name belongs to another pool, and has its own journal.
    """
    name = f"journal-{local_machine.machine_id()}"
    if is_usual_socket(socket):
        return name
    return f"{name}-{zlib.crc32(os.fsencode(socket)):08x}"


def is_usual_socket(socket: Path) -> bool:
    """Return whether ``socket`` has one of the paths that a user's kernels try by default."""
    usual = ("gpupool", f"gpupool-{os.geteuid()}")
    return socket.name == "broker.sock" and socket.parent.name in usual


def listening_at(lock: Path) -> Path | None:
    """Return the socket of the broker that holds the journal's ``lock``; None if it is not held."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
                return None
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return Path(json.loads(os.pread(descriptor, 4096, 0))["socket"])
        finally:
            os.close(descriptor)
    return None


def machine_service() -> bool:
    """Return whether the machine has the socket of a broker that serves all users."""
    with suppress(OSError):
        found = os.lstat(MACHINE_SOCKET)
        return stat.S_ISSOCK(found.st_mode) and found.st_uid == 0
    return False


def is_machine_path(path: Path) -> bool:
    """Return whether ``path`` is in ``/run``, but not in ``/run/user``.

    The broker of the whole machine has such a path. A service manager starts this broker, not
    a user.
    """
    return path.parts[:2] == ("/", "run") and path.parts[2:3] != ("user",)


def check_path(path: Path) -> None:
    """Refuse a path that no socket can have.

    Raises
    ------
    BrokerUnavailable
        With code ``bad-socket`` if the path is relative or too long for a unix socket.
    """
    length = len(os.fsencode(path))
    if length > MAX_SOCKET_PATH:
        raise BrokerUnavailable(
            f"The broker socket path has {length} bytes, and Linux allows {MAX_SOCKET_PATH}: "
            f"{path}.",
            code=Code.BAD_SOCKET,
            next_step="Set c.GPUPool.socket or GPUPOOL_SOCKET to a shorter path.",
        )
    if not path.is_absolute():
        raise BrokerUnavailable(
            f"The broker socket path must be absolute, but this path is not: {path}.",
            code=Code.BAD_SOCKET,
            next_step="Set c.GPUPool.socket or GPUPOOL_SOCKET to an absolute path.",
        )


def check_socket(path: Path) -> None:
    """Refuse a socket at ``path`` that another user could have created.

    Raises
    ------
    BrokerUnavailable
        With code ``no-broker`` if the path does not exist. With code ``bad-socket`` if the path is
        a symbolic link, is not a socket, or belongs to another user than this user or root.
    """
    check_path(path)
    try:
        found = os.lstat(path)
    except OSError:
        raise BrokerUnavailable(
            f"No GPU pool broker listens at {path}.",
            code=Code.NO_BROKER,
            next_step="Open a Pooled GPU kernel, which starts one, or run "
            "`jupyter gpupool broker`.",
        ) from None
    if stat.S_ISLNK(found.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISSOCK(found.st_mode):
        problem = "is not a socket"
    elif found.st_uid not in (os.getuid(), 0) and not mounted_by_root(path, found.st_uid):
        problem = f"belongs to user id {found.st_uid}, neither to you nor to root"
    else:
        return
    raise BrokerUnavailable(
        f"The broker socket {path} {problem}, so it is not used.",
        code=Code.BAD_SOCKET,
        next_step="Remove it, or set GPUPOOL_SOCKET to the right path.",
    )


#: This file has the user id of "nobody". In a user namespace, Linux shows this id as the owner of
#: each file whose real owner has no id in the namespace.
_NOBODY = Path("/proc/sys/kernel/overflowuid")


def mounted_by_root(path: Path, owner: int) -> bool:
    """Return whether ``path`` is in a safe folder that was mounted from outside the user namespace.

    In a user namespace, the machine's root has no user id, so its files seem to belong to "nobody".
    The folder is safe for two reasons: only root of this namespace can mount a folder, and only the
    folder's owner can write into it.
    """
    try:
        if owner != int(_NOBODY.read_text()) or whole_user_namespace():
            return False
        folder = path.parent.lstat()
        return (
            stat.S_ISDIR(folder.st_mode)
            and folder.st_uid == owner
            and not folder.st_mode & 0o022
            and path.parent.is_mount()
        )
    except (OSError, ValueError):
        return False


def whole_user_namespace(table: Path = Path("/proc/self/uid_map")) -> bool:
    """Return whether this process's user namespace has the same user ids as the machine."""
    rows = [line.split() for line in table.read_text().splitlines()]
    return rows == [["0", "0", "4294967295"]]


def dial(path: Path, seconds: float) -> socket.socket:
    """Return a socket that is connected to ``path``, in blocking mode.

    If many processes connect to a broker at the same time, the broker's queue of connections may be
    full for a moment. While the queue is full, a blocking ``connect`` waits, but a non-blocking
    ``connect`` fails with EAGAIN. A Python socket with a time-out is non-blocking. So this function
    uses a blocking socket, and sets the time-out with the socket option SO_SNDTIMEO.

    Raises
    ------
    OSError
        If no broker listens at ``path``, or the broker's queue stays full for ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            left = max(0.001, deadline - time.monotonic())
            _set_send_timeout(connection, left)
            connection.connect(str(path))
            # If a signal interrupts ``connect``, Python assumes that the connection is still made,
            # as in TCP. But on a unix socket, the call has failed: getpeername() then raises
            # ENOTCONN, and the loop tries again.
            connection.getpeername()
            _set_send_timeout(connection, 0.0)
            return connection
        except OSError as error:
            connection.close()
            if error.errno != errno.ENOTCONN:
                raise
            if time.monotonic() >= deadline:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from None
        except BaseException:
            connection.close()
            raise


def _set_send_timeout(connection: socket.socket, seconds: float) -> None:
    whole = int(seconds)
    timeval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
