# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finishes the moves of processes that an earlier broker was moving when it ended.

The page of the session shows which processes these are, see :mod:`.landing`. Such a process is not
moved: it runs again on the devices that it sees. In the process, a thread waits for the move. It
now asks this broker to move the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection

from ... import procfs
from ...devices import GuardedDevices
from ...errors import GPUPoolError
from ...guard.page import (
    LANDING_MOVES,
    LANDING_NONE,
    LANDING_RESTORE,
    SEES_NONE,
    SEES_SLICE,
    Page,
    PageError,
    Slot,
    device_name,
)
from ...pool import events as e
from ...procfs import ProcessId
from ..core import Core
from ..pages.control import ControlPages
from ..sessions import LiveSession
from .actions import DeviceActions

#: The states of a process that is moving to its slice.
_MOVING = (LANDING_MOVES, LANDING_RESTORE)

#: The thread that waits for the move has this many seconds to ask the new broker.
AGAIN = 10.0

_NO_GPU = "The GPU on which the process initialised CUDA is no longer in the pool."


class LandingRecovery:
    """Lets processes run again that an earlier broker was moving."""

    def __init__(
        self,
        core: Core,
        actions: DeviceActions,
        service: GuardedDevices,
        pages: ControlPages,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._actions = actions
        self._service = service
        self._pages = pages
        self._log = log
        #: By session: processes that are still suspended, until the broker knows the session.
        self._found: dict[str, list[Slot]] = {}
        #: The tasks that let these processes run again.
        self._tasks: dict[ProcessId, asyncio.Task[None]] = {}

    def task_of(self, pid: int) -> asyncio.Task[None] | None:
        """Return the task that lets a process run again; None if the process runs."""
        return next((task for process, task in self._tasks.items() if process.pid == pid), None)

    def close(self) -> None:
        """Stop. The next broker goes on."""
        for task in self._tasks.values():
            task.cancel()

    async def recover(self, name: str, frozen: Collection[ProcessId] = ()) -> bool:
        """Let processes of session ``name`` run again if an earlier broker was moving them.

        Call this before the broker continues with the session. ``frozen`` are processes that the
        earlier broker has suspended on purpose after a move. Return whether a process is still
        suspended. :meth:`go_on` then tries again.

        If the thread that waits for a move was interrupted and does not ask, the process stays on
        its present device until it makes its next context.
        """
        page = await self._page(name)
        if page is None:
            return False
        stuck = []
        try:
            for slot in page.read().slots:
                process = process_of(slot)
                if slot.landing not in _MOVING or not procfs.alive(process):
                    continue
                if process in frozen:
                    page.set_landing(slot, LANDING_NONE)
                    continue
                trouble = await self._let_run(name, page, slot)
                if trouble:
                    self._log.error("Session %s: %s", name, trouble)
                    stuck.append(slot)
        except (OSError, PageError) as error:
            self._log.error("The landings of session %s are unknown: %s", name, error)
        finally:
            page.close()
        self._found[name] = stuck
        return bool(stuck)

    def forget(self, name: str) -> list[ProcessId]:
        """Note that a session was not recovered; return its processes that are still suspended."""
        return [process_of(slot) for slot in self._found.pop(name, ())]

    def go_on(self, session: LiveSession) -> None:
        """Bring back the processes of a recovered session that are still suspended."""
        for slot in self._found.pop(session.id, ()):
            process = process_of(slot)
            session.landing[process] = self._origin(slot)
            self._tasks[process] = asyncio.create_task(self._bring_back(session, slot))

    async def _let_run(self, name: str, page: Page, slot: Slot) -> str:
        """Let a process run again; return the problem or "".

        Raises
        ------
        OSError, PageError
            If the page cannot be read or written.
        """
        if self._unknown(slot):
            return _NO_GPU
        try:
            found = await self._service.landed(
                process_of(slot), session=name, origin=self._origin(slot),
                staying=lambda: page.set_landing(slot, LANDING_MOVES),
            )  # fmt: skip
        except GPUPoolError as error:
            return error.message
        if not found.problem:
            self._runs(name, page, slot)
        return found.problem

    async def _bring_back(self, session: LiveSession, slot: Slot) -> None:
        process = process_of(slot)

        def staying() -> None:
            if session.page is not None:
                with contextlib.suppress(OSError):  # a damaged page must not prevent the restore
                    session.page.set_landing(slot, LANDING_MOVES)

        try:
            while self._unknown(slot) and procfs.alive(process):
                await asyncio.sleep(AGAIN)
            lost = await self._service.bring_back(
                process, session=session.id, origin=self._origin(slot), staying=staying,
                on_kept=lambda problem: self._actions.kept(session, problem),
            )  # fmt: skip
            if lost:
                message = f"{lost} The process was moving to the GPU of its slice."
                self._actions.end_session(e.EndSession(session=session.id, message=message))
            elif session.page is not None:
                self._runs(session.id, session.page, slot)
        except (OSError, PageError) as error:
            self._log.error("The landings of session %s are unknown: %s", session.id, error)
        except Exception:
            self._log.exception("Process %d of session %s stays suspended", process.pid, session.id)
        finally:
            self._tasks.pop(process, None)
            session.landing.pop(process, None)

    def _runs(self, name: str, page: Page, slot: Slot) -> None:
        """Write into the page that a process runs again."""
        for now in page.read().slots:
            if process_of(now) != process_of(slot) or now.landing not in _MOVING:
                continue
            if now.landing == LANDING_RESTORE:
                # ``staying`` was not called: the earlier broker has restored it on its slice.
                page.set_sees(now, on_slice(now))
            page.set_landing(now, LANDING_MOVES)
            asyncio.get_running_loop().call_later(AGAIN, self._forget, name, slot)

    def _origin(self, slot: Slot) -> tuple[str, ...]:
        """Return the devices on which a process that an earlier broker was moving had contexts."""
        known = {device_name(d.uuid): d.uuid for d in self._core.pool.devices()}
        return tuple(known[name] for name in slot.sees if name in known)

    def _unknown(self, slot: Slot) -> bool:
        """Return whether a device that a process sees is not in the pool."""
        known = {device_name(d.uuid) for d in self._core.pool.devices()}
        return not {*slot.sees} <= {*known, SEES_NONE, SEES_SLICE}

    async def _page(self, name: str) -> Page | None:
        """Open the page that an earlier broker made for a session; return None if it is not found.

        After a logout, the path of the page is a link to the earlier broker's descriptor, or does
        not exist.
        """
        path = self._pages.path_of(name)
        try:
            if path.is_symlink() or not path.exists():
                # The search reads the file descriptors of all processes, so it takes a while.
                page = await asyncio.to_thread(Page.find, path, name)
                if page is None and path.is_symlink():
                    self._log.warning(
                        "The page of session %s was deleted, and no process has it open. A process "
                        "that was moving to its GPU waits until the broker finds the page.", name,
                    )  # fmt: skip
                return page
            return Page.open(path)
        except (OSError, PageError) as error:
            self._log.warning("The landings of session %s are unknown: %s", name, error)
        return None

    def _forget(self, name: str, slot: Slot) -> None:
        session = self._core.sessions.find(name)
        if session is None and procfs.alive(process_of(slot)):
            # The broker is still recovering its sessions and has not reached this one. Check again
            # later.
            asyncio.get_running_loop().call_later(AGAIN, self._forget, name, slot)
            return
        reading = self._pages.read(session) if session is not None else None
        if session is None or session.page is None or reading is None:
            return
        if process_of(slot) in session.landing:
            return  # its thread has asked
        for now in reading.slots:
            if process_of(now) == process_of(slot) and now.landing in _MOVING:
                session.page.set_landing(now, LANDING_NONE)


def process_of(slot: Slot) -> ProcessId:
    """Return the process of a slot."""
    return ProcessId(slot.pid, slot.start_time)


def on_slice(slot: Slot) -> list[int]:
    """Return the names of the devices that a process sees after a move to its slice."""
    return [SEES_SLICE if name else SEES_NONE for name in slot.sees]
