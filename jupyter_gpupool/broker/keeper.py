# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Puts back what somebody deletes under a living broker: socket, locks, journal, pages.

logind removes ``/run/user/UID`` and, with ``RemoveIPC=yes``, a user's files in ``/dev/shm`` when
the last login ends; kernels in tmux or of a server that goes on have their broker and their state
all the same. A look costs a few microseconds for each file, so that it is taken every second.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Awaitable, Callable

from ..errors import GPUPoolError
from .journal_file import JournalLock
from .listener import Claim
from .runner import Runner

#: Seconds between two looks.
LOOK = 1.0

#: Seconds between two times at which the kept files are made young: systemd-tmpfiles removes what
#: nobody has used for 10 days in /tmp and for 30 in /var/tmp.
TOUCH = 86400.0

#: Bytes of a file beside the socket that is remembered to be written again.
MAX_KEPT = 1 << 20

#: Suffixes of what others make again, or have locked.
_NOT_KEPT = (".sock", ".lock", ".start", ".failed", ".log", ".old")


class Keeper:
    """Looks after the files of one broker.

    ``serve`` begins to accept connections at a socket that was made anew.
    """

    def __init__(
        self,
        claim: Claim,
        lock: JournalLock,
        runner: Runner,
        serve: Callable[[socket.socket], Awaitable[None]],
        log: logging.Logger,
    ) -> None:
        self._claim = claim
        self._lock = lock
        self._runner = runner
        self._serve = serve
        self._log = log
        #: Puts back the sessions' pages and the links to the guard.
        self.keep_pages: Callable[[], Awaitable[None]] = _nothing
        #: Puts back the copy of the start record that is beside the journal.
        self.keep_record: Callable[[], None] = lambda: None
        #: Of each file beside the socket: which version (inode, time), mode, content.
        self._kept: dict[Path, tuple[tuple[int, int], int, bytes]] = {}
        self._problems: dict[str, str] = {}
        self._touch_at = time.monotonic() + TOUCH

    async def run(self) -> None:
        """Look for as long as the broker serves."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK)

    async def look(self) -> None:
        """Look once, and put back what is missing."""
        await self._try("socket", self._keep_socket)
        await self._try("journal", self._keep_journal)
        await self._try("page of a session", self._keep_pages)

    async def _try(self, what: str, keep: Callable[[], Awaitable[None]]) -> None:
        """What cannot be put back now is tried at each look, and said once."""
        try:
            await keep()
        except (OSError, GPUPoolError) as error:
            if self._problems.get(what) != str(error):
                self._log.error("The %s cannot be put back yet: %s", what, error)
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
            await self._serve(listening)
        for path, (_, mode, content) in self._kept.items():
            if not path.exists():
                _write(path, mode, content)
        self._reopen_log()
        self._log.warning("The socket %s was deleted and is back", self._claim.path)

    def _remember(self) -> None:
        """Keep what lies beside the socket and is ours: how this broker is started again."""
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
        """Go on with the log at its name, if it was deleted with the socket."""
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
        self.keep_record()
        journal = self._runner.journal
        if not journal.is_lost():
            return
        journal.restore()
        for session in self._runner.sessions:
            self._runner.dirty(session.id)
        self._runner.commit()
        self._log.warning("The journal %s was deleted; its sessions are in it again", journal.path)

    async def _keep_pages(self) -> None:
        await self.keep_pages()


def _write(path: Path, mode: int, content: bytes) -> None:
    with suppress(FileExistsError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(content)


async def _nothing() -> None:
    """Until there are pages."""
