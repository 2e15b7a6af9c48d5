# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Makes the sessions' shared pages, keeps them equal to the pool's records, removes them.

Each session that runs under the guard has one small file in a folder of this broker. The guard runs
in the session's processes, and reads in this file what they may do. It sends a message only when
the gate is closed or memory is short. If a user damages a page, the broker stops using the page:
its session goes on without the page's functions, and other sessions are not affected.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Mapping, Sequence

from ... import local_machine, procfs
from ...guard.install import session_environment
from ...guard.page import (
    CLOSED,
    DEVICES,
    LANDING_ASIDE,
    LANDING_NONE,
    OPEN,
    PAUSED,
    SLOT_CONTEXT,
    SLOT_CUDA,
    UNUSED,
    Page,
    PageError,
    Reading,
    device_name,
)
from ...pool.model import SessionRecord
from ...procfs import ProcessId
from ...states import ATTACHED
from ..configuration import Configuration
from ..ratelimit import Pace
from ..sessions import LiveSession, LiveSessions
from .translation import Translation

__all__ = ["CLOSED", "OPEN", "PAUSED", "UNUSED", "ControlPages", "environment", "page_folder"]

#: The folder of shared memory, if the machine has it.
SHARED_MEMORY = Path("/dev/shm")

#: The name of a file in a folder of pages. The file names the socket and the PID namespace of the
#: broker that made the folder.
SOCKET_FILE = "socket"

_SUFFIX = ".page"


class ControlPages:
    """Every page of one broker.

    Parameters
    ----------
    folder:
        See :func:`page_folder`.
    context_bytes:
        The bytes to charge for a context.
    """

    def __init__(
        self,
        folder: Path,
        sessions: LiveSessions,
        configuration: Configuration,
        log: logging.Logger,
        *,
        context_bytes: int = 0,
    ) -> None:
        self.folder = folder
        self._configuration = configuration
        self._socket = configuration.socket
        self._mode = 0o711 if configuration.machine_wide else 0o700
        #: The folder's inode and time of change at the last check.
        self._seen = (0, 0)
        self.context_bytes = context_bytes
        self._sessions = sessions
        self._log = log
        self._translation = Translation()

    # ------------------------------------------------------------------ life

    def make_folder(self) -> None:
        """Make the folder if necessary, and its file that names the socket (see ``store/files``).

        Raises
        ------
        OSError
            If the folder cannot be made.
        """
        own_folder(self.folder, self._mode)
        mark = self.folder / SOCKET_FILE
        if not mark.exists():
            with suppress(OSError):  # a full disk does not matter here
                mark.write_text(f"{self._socket}\n{local_machine.pid_namespace()}")

    def _make_folder_of(self, path: Path) -> None:
        """Make the folder of a page: this broker's folder, or that of an earlier broker."""
        if path.parent == self.folder:
            self.make_folder()
        else:
            own_folder(path.parent, self._mode)

    def create(self, session: LiveSession, devices: Sequence[str], limit: int) -> Path:
        """Make the page of a new session, with a closed gate.

        ``devices`` are the devices that the session's processes see before the first lease.

        Raises
        ------
        OSError
            If the page cannot be made, mostly because shared memory is full.
        """
        path = self._path(session)
        self.make_folder()  # another process may have deleted the folder
        uid = session.uid if isinstance(session.uid, int) else os.geteuid()
        session.page = Page.create(path, session.id, uid)
        self._set_policy(session.page)
        session.page.set_devices(devices[:DEVICES])
        session.page.set_grant([], limit, 0)
        session.home = tuple(devices)
        session.cuda = False  # becomes True when a slot of the page shows CUDA
        return path

    def adopt(self, session: LiveSession, *, used: bool) -> None:
        """Open the page that an earlier broker made for a session, if the session has a page.

        ``used`` says whether the session has already used a device. If it has, this method does not
        replace a lost page by a new one.
        """
        path = self._place(session)
        try:
            if not os.path.lexists(path) or path.is_symlink():
                session.page = self._find(session, path, used)
            else:
                session.page = Page.open(path)
            if session.page is None:
                if _named_page(session) is not None:
                    self._log.error("Session %s goes on unguarded: no page at %s", session.id, path)
                return
            if session.page.gate() == PAUSED:
                # An earlier broker paused the gate for a time slice and died; the pause is over.
                # Calls do not change a paused gate, so without this line the session would always
                # look idle.
                session.page.set_gate(UNUSED)
        except (OSError, PageError) as error:
            self._log.error("Session %s goes on unguarded: %s", session.id, error)
            session.page = None
            return
        self._set_policy(session.page)
        session.home = session.page.devices()

    def _set_policy(self, page: Page) -> None:
        managed = self._configuration.settings.managed_memory == "allow"
        page.set_policy(managed=managed, context_bytes=self.context_bytes)

    def _place(self, session: LiveSession) -> Path:
        """Return the path of a session's page, as the session's processes know it.

        A broker of another version or at another socket may have made the page in another folder.
        The kernel's environment has this path. If the kernel and the broker belong to different
        users, the broker accepts the path only in one folder: the folder in shared memory for this
        socket, which an earlier broker may have used.
        """
        path = self._path(session)
        if os.path.lexists(path):
            return path
        named = _named_page(session)
        if named is None or named.name != path.name:
            return path
        once = SHARED_MEMORY / folder_name(self._socket)
        return named if session.uid == os.geteuid() or named.parent == once else path

    def _find(self, session: LiveSession, path: Path, used: bool) -> Page | None:
        """Restore the deleted page of a session; return None if that is not possible.

        It is not possible if the session had no page or belongs to another user, or if ``used`` is
        true and no process has the page open. This method makes a new page only if no process can
        have the old page, because two pages would split the session's accounts.
        """
        if session.uid != os.geteuid() or _named_page(session) != path:
            return None
        page = Page.find(path, session.id)
        self._make_folder_of(path)
        if page is not None:
            page.restore()
            self._log.warning("The page of session %s was deleted and is back", session.id)
        elif not used:
            path.unlink(missing_ok=True)  # the path may be a link that an earlier broker made
            page = Page.create(path, session.id, os.geteuid())
            page.set_grant([], 0, 0)
        else:
            self._log.error(
                "The page of session %s was deleted, and no process has it open", session.id
            )
        return page

    async def keep(self) -> None:
        """Restore the deleted pages of living sessions.

        Raises
        ------
        OSError
            If that is not possible now.
        """
        self.make_folder()
        now = _version(self.folder)
        changed = self._seen != now  # a file in the folder has appeared or disappeared
        problem, pace = None, Pace()
        for session in [*self._sessions]:
            await pace.step()
            page = session.page
            if page is None or not (changed or page.path.parent != self.folder):
                continue
            try:
                self.restore(session)
            except OSError as error:
                problem = error
        if problem is not None:
            raise problem
        self._seen = now

    def restore(self, session: LiveSession) -> None:
        """Restore the path of the session's page if the path was deleted.

        Raises
        ------
        OSError
            If that is not possible now.
        """
        page = session.page
        if page is None or not page.is_lost():
            return
        if session.uid != os.geteuid():
            raise PermissionError(f"The page {page.path} of user id {session.uid} was deleted")
        self._make_folder_of(page.path)
        page.restore()
        self._log.warning("The page of session %s was deleted and is back", session.id)

    def remove(self, session: LiveSession) -> None:
        """Remove the page of a session that has ended."""
        page, session.page = session.page, None
        self._translation.forget(session)
        if page is not None:
            # Processes of the ended session may still run, so the gate must be closed.
            with suppress(OSError):
                page.set_gate(CLOSED)
            with suppress(OSError):
                page.remove()

    def sweep(self) -> None:
        """Remove the pages of unknown sessions."""
        with suppress(OSError):
            for path in self.folder.glob(f"*{_SUFFIX}"):
                if path.name.removesuffix(_SUFFIX) not in self._sessions:
                    path.unlink(missing_ok=True)

    def path_of(self, name: str) -> Path:
        """Return the path for the page of session ``name``, even if the page does not exist."""
        return self.folder / f"{name}{_SUFFIX}"

    def _path(self, session: LiveSession) -> Path:
        return self.path_of(session.id)

    def close(self) -> bool:
        """Close the pages. If no session has a page, remove the folder and return True."""
        empty = True
        for session in self._sessions:
            if session.page is not None:
                session.page.close()
                session.page, empty = None, False
        if empty:
            shutil.rmtree(self.folder, ignore_errors=True)
        return empty

    # ------------------------------------------------------------------ equal to the record

    def follow(self, session: LiveSession, record: SessionRecord) -> bool:
        """Write the record into the page; return whether the page shows a lease now.

        With a lease, this method opens a closed gate. It does not change an open gate, or a gate
        that is paused for the time slice of another session. Without a lease, it closes the gate.
        During a suspend it changes nothing, because the suspend sets the gate.
        """
        page = session.page
        if page is None:
            return False
        attached = record.state in ATTACHED and bool(record.slices)
        try:
            if attached:
                uuids = [piece.device for piece in record.slices]
                sizes = [piece.bytes for piece in record.slices]
                # The driver's own memory counts in the slice, so less is left for allocations.
                beyond = [*session.use.beyond, *[0] * len(sizes)]
                left = [max(0, s - more) for s, more in zip(sizes, beyond, strict=False)]
                page.set_devices(uuids[:DEVICES])
                session.home = tuple(uuids)
                page.set_grant(left[:DEVICES], max(record.request.limit, *sizes), record.epoch)
                if page.gate() == CLOSED:
                    page.set_gate(UNUSED)
            elif record.state != "detaching":
                page.set_gate(CLOSED)
                page.set_grant([], record.request.limit, record.epoch)
        except (OSError, PageError) as error:
            self._damaged(session, error)
            return False
        return attached

    def set_home(self, session: LiveSession, devices: Sequence[str]) -> None:
        """Write into the page the devices that a session's processes see without a lease."""
        if session.page is None or tuple(devices) == session.home:
            return
        try:
            session.page.set_devices(devices[:DEVICES])
        except (OSError, PageError) as error:
            self._damaged(session, error)
        session.home = tuple(devices)

    def set_room(self, session: LiveSession, room: Sequence[int]) -> None:
        """Write into the page the bytes by which the grant could grow now on each device."""
        if session.page is not None:
            try:
                session.page.set_room(room[:DEVICES])
            except OSError as error:
                self._damaged(session, error)

    # ------------------------------------------------------------------ what a page says

    def gate(self, session: LiveSession) -> int:
        """Return the gate; :data:`CLOSED` if the page cannot be used any more."""
        if session.page is not None:
            try:
                return session.page.gate()
            except (OSError, PageError) as error:
                self._damaged(session, error)
        return CLOSED

    def set_gate(self, session: LiveSession, gate: int, *, pause_until: int = 0) -> None:
        """Open, close or pause the gate."""
        if session.page is not None:
            try:
                session.page.set_gate(gate, pause_until=pause_until)
            except OSError as error:
                self._damaged(session, error)

    def set_contended(self, session: LiveSession, contended: bool) -> None:
        """Write into the page whether the pool may preempt the session for a waiting session."""
        if session.page is not None:
            try:
                session.page.set_contended(contended)
            except OSError as error:
                self._damaged(session, error)

    def read(self, session: LiveSession) -> Reading | None:
        """Return the page's data on living processes; None if the page cannot be read.

        Processes of a container write the process ids that they have in the container. The result
        has the process ids that they have in the broker's namespace.

        The result leaves out a process that died by SIGKILL, even if it died during a call. Its
        slot stays until another process of the session needs it.
        """
        if session.page is None:
            return None
        try:
            reading = session.page.read()
        except (OSError, PageError) as error:
            self._damaged(session, error)
            return None
        # A page may contain anything, for example the same process 256 times. So put the processes
        # into a set, where each occurs only once.
        known = {ProcessId(slot.pid, slot.start_time) for slot in reading.slots}
        here = self._translation.here(session, known)
        there = tuple(
            slot if (found := here[process]) == process else replace(slot, pid=found.pid)
            for slot in reading.slots
            if (process := ProcessId(slot.pid, slot.start_time)) in here
        )
        return replace(reading, slots=there)

    def translated(self, session: LiveSession, number: int, beside: int) -> int:
        """Translate process id ``number`` from the PID namespace of process ``beside`` to ours.

        The result is the id of the process in the broker's namespace. It is 0 if no such process is
        in this namespace, or if the session asks too often.
        """
        return self._translation.number(session, number, beside)

    def set_vain(self, session: LiveSession, totals: Sequence[int], until: int) -> None:
        """Write, for each device, the smallest total to which the guard refuses growth.

        If ``totals`` is (), the guard asks the broker each time.
        """
        if session.page is not None:
            try:
                session.page.set_vain(totals[:DEVICES], until)
            except OSError as error:
                self._damaged(session, error)

    def moved(
        self, session: LiveSession, suspended: Sequence[ProcessId], moves: Mapping[str, str]
    ) -> None:
        """Write into the page which devices the processes see after a restore on other devices.

        The restore moves all suspended processes, with or without a context. The slot of a process
        without a context still names the devices that the process saw before the suspend, so this
        method changes the slot.
        """
        reading = self.read(session) if moves else None
        names = {device_name(old): device_name(new) for old, new in moves.items()}
        for slot in reading.slots if reading is not None else ():
            sees = [names.get(name, name) for name in slot.sees]
            if ProcessId(slot.pid, slot.start_time) in suspended and sees != [*slot.sees]:
                with suppress(OSError):  # the next read finds the page damaged
                    if session.page is not None:
                        session.page.set_sees(slot, sees)

    def set_aside(self, session: LiveSession) -> bool:
        """Make the driver queries of processes without a context wait; return whether they wait.

        They do not if the broker is moving a process, or if the page cannot be read. All other
        calls of the processes wait at the closed gate.
        """
        reading = self.read(session)
        for slot in reading.slots if reading is not None else ():
            if slot.landing not in (LANDING_NONE, LANDING_ASIDE):
                return False
        for slot in reading.slots if reading is not None else ():
            if slot.flags & SLOT_CUDA and not slot.flags & SLOT_CONTEXT:
                with suppress(OSError):  # the next read finds the page damaged
                    if session.page is not None:
                        session.page.set_landing(slot, LANDING_ASIDE)
        return reading is not None

    def is_aside(self, session: LiveSession) -> bool:
        """Return whether :meth:`set_aside` is in force."""
        reading = self.read(session)
        return reading is not None and any(s.landing == LANDING_ASIDE for s in reading.slots)

    def no_longer_aside(self, session: LiveSession) -> None:
        """End :meth:`set_aside`, so that the processes may query the driver again.

        Call this when the driver has resumed the processes.
        """
        reading = self.read(session)
        for slot in reading.slots if reading is not None else ():
            if slot.landing == LANDING_ASIDE:
                with suppress(OSError):
                    if session.page is not None:
                        session.page.set_landing(slot, LANDING_NONE)

    def _damaged(self, session: LiveSession, error: Exception) -> None:
        self._log.error(
            "The broker stops using the damaged page of session %s: %s", session.id, error,
            extra={"cause": session.uid},
        )  # fmt: skip
        if session.page is not None:
            session.page.close()
            session.page = None


def environment(directory: Path, page: Path, base: Mapping[str, str], home: str) -> dict[str, str]:
    """Return the variables to add to ``base`` for a guarded kernel that sees ``home``."""
    return {**session_environment(directory, page, base), "GPUPOOL_VISIBLE": home}


def page_folder(socket: Path, *, machine_wide: bool, shared: Path = SHARED_MEMORY) -> Path:
    """Return the folder for the pages of the broker at ``socket``; make it if necessary.

    The folder is in shared memory. If the machine has no shared memory, or if another user has made
    a file with the folder's name in it, the folder is beside the socket. The folder of the
    machine's broker is always beside its socket, below ``/run``. Any user may fill shared memory,
    and logind deletes a user's files in it at the last logout.

    Raises
    ------
    OSError
        If the folder cannot be made in either place.
    """
    beside = socket.with_name(socket.name + ".pages")
    if machine_wide:
        return own_folder(beside, 0o711)
    try:
        return own_folder(shared / folder_name(socket), 0o700)
    except OSError:
        return own_folder(beside, 0o700)


def folder_name(socket: Path) -> str:
    """Return the name of the folder in shared memory for the broker at ``socket``."""
    return f"gpupool-{os.geteuid()}-{hashlib.sha256(os.fsencode(socket)).hexdigest()[:12]}"


def _version(folder: Path) -> tuple[int, int]:
    """Return a value that changes when ``folder`` or a file in it appears or disappears."""
    found = os.lstat(folder)
    return found.st_ino, found.st_mtime_ns


def _named_page(session: LiveSession) -> Path | None:
    """Return the path of the page that the environment of the session's kernel names, or None."""
    if session.process is None:
        return None
    named = procfs.variables(session.process.pid, ["GPUPOOL_PAGE"])
    return Path(named["GPUPOOL_PAGE"]) if named else None


def own_folder(path: Path, mode: int) -> Path:
    """Make the folder ``path`` if necessary, set its mode, and return its path.

    Raises
    ------
    OSError
        If the folder cannot be made or belongs to another user.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    found = os.lstat(path)
    # Any user may have made a file of this name in /dev/shm before this broker.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user")
    path.chmod(mode)
    return path
