# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Where the broker's socket is, and whether it may be trusted. Standard library only."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from .errors import BrokerUnavailable

#: Names the socket for everything below a process that sets it (the provisioner does).
SOCKET_VARIABLE = "GPUPOOL_SOCKET"

#: The broker an admin has set up for the whole machine.
MACHINE_SOCKET = Path("/run/gpupool/broker.sock")

#: ``sun_path`` of ``struct sockaddr_un`` on Linux, less the terminating zero (unix(7)).
MAX_SOCKET_PATH = 107


def user_runtime_dir() -> Path:
    """Return (not make) this user's folder for sockets: short, local, gone at logout or reboot."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "gpupool"
    return Path(tempfile.gettempdir()) / f"gpupool-{os.getuid()}"


def find_socket(configured: str = "") -> Path:
    """Return the path at which the broker is, or will be started.

    In this order: ``configured`` (``c.GPUPool.socket``), ``$GPUPOOL_SOCKET``, the machine-wide
    socket if it exists, this user's own.
    """
    chosen = configured or os.environ.get(SOCKET_VARIABLE, "")
    if chosen:
        return Path(chosen)
    if MACHINE_SOCKET.exists():
        return MACHINE_SOCKET
    return user_runtime_dir() / "broker.sock"


def is_machine_path(path: Path) -> bool:
    """Return whether a broker at ``path`` is the machine's: a service that no user starts."""
    return path.parts[:2] == ("/", "run") and path.parts[2:3] != ("user",)


def check_path(path: Path) -> None:
    """Refuse a path no socket can have.

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
            code="bad-socket",
            next_step="Set c.GPUPool.socket or GPUPOOL_SOCKET to a shorter path.",
        )
    if not path.is_absolute():
        raise BrokerUnavailable(
            f"The broker socket path must be absolute, and this is not: {path}.",
            code="bad-socket",
            next_step="Set c.GPUPool.socket or GPUPOOL_SOCKET to an absolute path.",
        )


def check_socket(path: Path) -> None:
    """Refuse to talk to something at ``path`` that another user could have put there.

    Raises
    ------
    BrokerUnavailable
        Code ``no-broker`` if nothing is there; ``bad-socket`` if it is a symbolic link, not a
        socket, or neither this user's nor root's.
    """
    check_path(path)
    try:
        found = os.lstat(path)
    except OSError:
        raise BrokerUnavailable(
            f"No GPU pool broker listens at {path}.",
            code="no-broker",
            next_step="Open a Pooled GPU kernel, which starts one, or run "
            "`jupyter gpupool broker`.",
        ) from None
    if stat.S_ISLNK(found.st_mode):
        problem = "is a symbolic link"
    elif not stat.S_ISSOCK(found.st_mode):
        problem = "is not a socket"
    elif found.st_uid not in (os.getuid(), 0):
        problem = f"belongs to user id {found.st_uid}, neither to you nor to root"
    else:
        return
    raise BrokerUnavailable(
        f"The broker socket {path} {problem}, so it is not used.",
        code="bad-socket",
        next_step="Remove it, or set GPUPOOL_SOCKET to the right path.",
    )
