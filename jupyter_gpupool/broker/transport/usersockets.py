# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Serves a separate socket for each user who has kernels in containers.

A user id in a container does not name a user of the machine. So the mounted folder shows to which
user a container belongs. Root (or Docker, or the kubelet) makes a folder ``users/NAME`` beside the
machine's socket, and starts the container with this folder mounted at the path where the machine
has the folder of its socket. This module finds the folder and serves a socket in it. Every peer of
this socket belongs to the user NAME. Only the broker's own user may enter the
machine's ``users``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...containers.content import NAME, Content
from ...endpoint import check_path
from ...errors import GPUPoolError
from .connection import Connection, Service
from .listener import BACKLOG, Door

#: Seconds between two searches for new or removed folders.
LOOK = 0.5

#: The allowed names of users' folders. Hidden folders are the broker's own.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")

#: The folder below the folder of users that contains the files for all containers.
_MADE = ".inside"


@dataclass(frozen=True)
class _Served:
    """A user's socket that the broker serves now; ``door`` accepts its connections.

    ``folder`` is a descriptor of the user's folder. It stays open while the broker serves the
    socket, so that no other folder gets the same inode. ``socket`` is the device and inode of the
    socket's file.
    """

    door: Door
    folder: int
    socket: tuple[int, int]


class UserSockets:
    """Serves a socket in each user's folder below ``folder``; makes ``folder`` if necessary.

    Parameters
    ----------
    name:
        The name of the socket in each folder.
    content:
        The other files that a container needs.
    mounts:
        Names of folders that must exist in a user's folder, so that other folders of the machine
        can be mounted there.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        service: Service,
        content: Content,
        log: logging.Logger,
        *,
        mounts: tuple[str, ...] = (),
    ) -> None:
        self._folder = folder
        self._name = name
        self._service = service
        self._content = content
        self._mounts = mounts
        self._log = log
        self._served: dict[str, _Served] = {}
        #: By name: the descriptor of a folder whose socket was removed. The broker no longer serves
        #: this folder, but it serves a new folder of the same name.
        self._revoked: dict[str, int] = {}
        #: By name: why the broker cannot serve the folder. The broker logs each reason once.
        self._refused: dict[str, str] = {}

    def prepare(self) -> None:
        """Make the folder of users before anybody else does.

        Raises
        ------
        OSError
            If the folder cannot be made or its mode cannot be set.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)  # an account that can enter this folder can act as every user

    async def run(self) -> None:
        """Look for folders until cancelled."""
        try:
            await asyncio.to_thread(self._content.make, self._folder / _MADE)
        except (OSError, GPUPoolError) as error:
            self._log.error("There are no sockets for containers: %s", error)
            return
        while True:
            await self._look()
            await asyncio.sleep(LOOK)

    def close(self) -> None:
        """Stop accepting connections; the files stay for the next broker."""
        for served in self._served.values():
            served.door.close()
            os.close(served.folder)
        self._served.clear()
        for name in [*self._revoked]:
            os.close(self._revoked.pop(name))

    # ------------------------------------------------------------------ internals

    async def _look(self) -> None:
        with suppress(OSError):
            names = {entry.name for entry in os.scandir(self._folder) if entry.name != _MADE}
            for name in [*self._served]:
                if name not in names or not self._is_whole(name):
                    self._revoke(name)
            for name in sorted(names):
                if name in self._served or self._is_revoked(name):
                    continue
                problem = await self._serve(name)
                if problem != self._refused.get(name, ""):
                    self._refused[name] = problem
                    if problem:
                        self._log.error(
                            "There is no socket for containers in %s, because this path %s",
                            self._folder / name, problem,
                        )  # fmt: skip

    def _is_revoked(self, name: str) -> bool:
        folder = self._revoked.get(name)
        if folder is None:
            return False
        found = os.fstat(folder)
        return (found.st_dev, found.st_ino) == _identity(self._folder / name)

    def _is_whole(self, name: str) -> bool:
        return self._served[name].socket == _identity(self._folder / name / self._name)

    async def _serve(self, name: str) -> str:
        """Serve a socket in a user's folder; return "", or why the broker cannot serve it."""
        folder = self._folder / name
        problem = _problem(folder)
        if problem:
            return problem
        path = folder / self._name
        try:
            check_path(path)
            folder.chmod(0o755)  # the users of a container need the rights of "others"
            for mount in self._mounts:
                (folder / mount).mkdir(exist_ok=True)
            await asyncio.to_thread(self._content.link, self._folder / _MADE, folder / NAME)
            opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except (OSError, GPUPoolError) as error:
            return f"cannot be used ({error})"
        try:
            listening = _bind(path)
        except OSError as error:
            os.close(opened)
            return f"cannot be used ({error})"
        door = Door(
            listening, lambda: Connection(self._service, name), self._service.dispatcher,
            self._log, user=name,
        )  # fmt: skip
        self._served[name] = _Served(door, opened, _identity(path))
        if name in self._revoked:
            os.close(self._revoked.pop(name))
        self._log.info("Containers of user %s are served at %s", name, path)
        return ""

    def _revoke(self, name: str) -> None:
        """Stop serving a user whose folder or socket was removed."""
        served = self._served.pop(name)
        served.door.close()
        # The broker does not make the socket again, because somebody may be removing the whole
        # folder.
        self._revoked[name] = served.folder
        for connection in [*self._service.dispatcher.account(name).connections]:
            connection.close()
        self._log.info("Containers of user %s are no longer served: the socket is gone", name)


def _identity(path: Path) -> tuple[int, int]:
    """Return the device and inode of the file at ``path``; (0, 0) if there is no file."""
    try:
        found = os.lstat(path)
    except OSError:
        return 0, 0
    return found.st_dev, found.st_ino


def _problem(folder: Path) -> str:
    """Return why a folder cannot be a user's folder, or ""."""
    if not _NAME.fullmatch(folder.name):
        return "has a name that is not allowed: use at most 64 letters, digits and ._@+-"
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return "can be changed by another user than the broker's"
    return ""


def _bind(path: Path) -> socket.socket:
    """Return a listening socket at ``path``. It replaces the socket of an earlier broker."""
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listening.bind(str(path))
        _let_all_connect(path)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _let_all_connect(path: Path) -> None:
    """Set the mode of a socket so that all users may connect to it.

    A container that may write in the folder may have replaced the socket with a link. So this
    function opens the file, checks it, and changes the mode of the open file. It does not change
    the umask, because all threads share the umask.
    """
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise OSError("another file has taken the place of its socket")
        Path(f"/proc/self/fd/{found}").chmod(0o666)
    finally:
        os.close(found)
