# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Removes what brokers of this user left that were killed and have no successor.

A broker that ends in order leaves nothing, and one that is started again at the same socket finds
its files. What is left is of sockets that nobody uses any more: a test, a container, an old path.
Only where no broker and no kernel lives that could need it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from .. import machine
from ..devices.processes import identify
from ..endpoint import user_runtime_dir
from .pages import SHARED_MEMORY, SOCKET_FILE, folder_name

#: Seconds for which files are left alone: somebody may be starting a broker with them.
YOUNG = 600.0

#: The same for a folder that does not say whose it is, of an older version.
UNKNOWN_YOUNG = 86400.0

#: Beside a socket, by what is added to its name; the log stays for people.
_BESIDE = ("", ".lock", ".start", ".start.json", ".start.failed", ".pages", ".emulated")


def sweep(own: Path, log: logging.Logger, *, shared: Path = SHARED_MEMORY) -> None:
    """Remove the leftovers of dead brokers of this user; ``own`` is the socket of the caller.

    Reads ``/proc`` and the disk: not for an event loop.
    """
    used = _in_use()
    removed = [path for path in _dead_pages(own, used, shared) if _remove(path)]
    for socket in _dead_sockets(own, used, shared):
        removed += [path for path in _files_of(socket) if _remove(path)]
    if removed:
        log.info("Removed what killed brokers have left: %s", ", ".join(map(str, removed)))


def _in_use() -> set[Path]:
    """Return the sockets and the folders of pages that living processes of this user name."""
    found = set()
    with os.scandir("/proc") as entries:
        pids = [entry.name for entry in entries if entry.name.isdigit()]
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name == b"GPUPOOL_PAGE":
                    found.add(Path(os.fsdecode(value)).parent)
                elif name == b"GPUPOOL_SOCKET":
                    found.add(Path(os.fsdecode(value)))
    return found


def _dead_pages(own: Path, used: set[Path], shared: Path) -> list[Path]:
    found = []
    for folder in _ours(shared, f"gpupool-{os.geteuid()}-*"):
        if folder in used or folder.name == folder_name(own) or not folder.is_dir():
            continue
        socket = None
        with suppress(OSError, ValueError):
            name, namespace = (folder / SOCKET_FILE).read_text().split("\n")
            if namespace != machine.pid_namespace():
                continue  # of a container: whether its processes live is not to be seen here
            socket = Path(name)
        if not _is_old(folder, YOUNG if socket else UNKNOWN_YOUNG):
            continue
        if socket is None or not _broker_lives(socket):
            found.append(folder)
    return found


def _dead_sockets(own: Path, used: set[Path], shared: Path) -> list[Path]:
    found = []
    for folder in {machine.local_folder(), user_runtime_dir(), own.parent}:
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
    """Return the seconds for which the files of a dead broker are left alone; None for good.

    A container's kernels are not to be seen from here. They may have their broker started again
    with these files for as long as the machine runs.
    """
    _, namespace = _holder(lock)
    if not namespace:
        return UNKNOWN_YOUNG
    if namespace != machine.pid_namespace() and not _is_old(lock, _uptime() + YOUNG):
        return None
    return YOUNG


def _uptime() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _holder(lock: Path) -> tuple[int, str]:
    """Return who claimed a socket last: process and PID namespace, as far as the lock says it."""
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
    """Return whether the process that claimed the socket lives, or one with its number."""
    try:
        descriptor = os.open(f"{socket}.lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if identify(_holder(Path(f"{socket}.lock"))[0]) is not None:
            return True
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # of a container, perhaps
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
