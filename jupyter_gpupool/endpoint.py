# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Where the broker's socket is, and whether it can be trusted. Standard library only."""

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

#: The variable that names the socket to a process and its children. The provisioner sets it for
#: kernels.
SOCKET_VARIABLE = "GPUPOOL_SOCKET"

#: A kernel without a session gets this variable. Its value is the reason, as a sentence.
NO_SESSION_VARIABLE = "GPUPOOL_NO_SESSION"

#: The socket of the broker that an admin has set up for the whole machine.
MACHINE_SOCKET = Path("/run/gpupool/broker.sock")

#: The most seconds that a broker may take to start. It loads the driver and tests every device.
START_TIMEOUT = 90.0

#: Size of ``sun_path`` in ``struct sockaddr_un`` on Linux without the final zero (unix(7)).
MAX_SOCKET_PATH = 107


def user_runtime_dir() -> Path:
    """Return this user's folder for sockets: short, local, the same in all logins.

    The folder may not exist yet. It is never ``/run/user/UID``. The system deletes that folder at
    the last logout, while kernels and their broker continue to run. Also, processes of cron and
    tmux may not know that folder. If XDG_RUNTIME_DIR names another folder, the result is inside it.
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

    It is the first of these: ``configured`` (``c.GPUPool.socket``), ``$GPUPOOL_SOCKET``, the
    machine-wide socket if it exists, this user's own socket. If the user's own socket does not
    exist but the user's broker lives, the result is the socket that the lock of the broker's
    journal names.
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
    """Return the name, without its suffix, of the journal of the broker at ``socket``.

    All usual sockets of one user on one machine share one journal. So a second broker, at any of
    these sockets, finds the journal locked. A socket with another name belongs to another pool.
    """
    name = f"journal-{local_machine.machine_id()}"
    if is_usual_socket(socket):
        return name
    return f"{name}-{zlib.crc32(os.fsencode(socket)):08x}"


def is_usual_socket(socket: Path) -> bool:
    """Return whether ``socket`` is at one of the places where a user's kernels look by default."""
    usual = ("gpupool", f"gpupool-{os.geteuid()}")
    return socket.name == "broker.sock" and socket.parent.name in usual


def listening_at(lock: Path) -> Path | None:
    """Return the socket of the broker that holds the journal's ``lock``; None if no broker does."""
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
    """Return whether ``path`` is a path of the machine's broker, a service that no user starts."""
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
        Code ``no-broker`` if the path does not exist; ``bad-socket`` if it is a symbolic link, is
        not a socket, or belongs neither to this user nor to root.
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


#: In a user namespace, a file whose real owner is not known there shows this user id as its owner.
_NOBODY = Path("/proc/sys/kernel/overflowuid")


def mounted_by_root(path: Path, owner: int) -> bool:
    """Return whether ``path`` was mounted from outside this user namespace.

    In a user namespace the machine's root has no user id, and its files seem to belong to "nobody".
    The path is safe, because only root of this namespace can mount, and no other user can write
    into the mounted folder.
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
    """Return whether the user ids of this process's namespace are those of the machine itself."""
    rows = [line.split() for line in table.read_text().splitlines()]
    return rows == [["0", "0", "4294967295"]]


def dial(path: Path, seconds: float) -> socket.socket:
    """Return a socket that is connected to ``path``, in blocking mode.

    If many processes connect to a broker at the same time, its queue of connections is full for a
    moment. While the queue is full, a blocking ``connect`` waits, but a non-blocking ``connect``
    fails with EAGAIN. A Python socket with a time-out is non-blocking. So this function uses a
    blocking socket with the operating system's own time-out.

    Raises
    ------
    OSError
        If nothing listens there, or its queue stays full for ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            left = max(0.001, deadline - time.monotonic())
            _set_send_timeout(connection, left)
            connection.connect(str(path))
            # If a signal interrupts a connect, Python assumes that the connect continues, as in
            # TCP. On a unix socket, the connect has failed.
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
