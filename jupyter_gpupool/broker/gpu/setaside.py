# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspends kernels that have called cuInit and nothing else, for an admin's pause.

``torch.cuda.is_available()`` is enough to call cuInit. Such a process has no context and no slice,
so the pool never suspends it. But it has the driver's device files open, and a pause is complete
only when they are closed. So the broker asks the driver to suspend the process for the pause. Not
every driver can do this (see ``docs/driver-facts.md``). After the suspend, the pool treats the
kernel as suspended. When the kernel gets its next slice, on any GPU, this broker or a later broker
restores it.
"""

from __future__ import annotations

import asyncio
import logging

from ...devices import GuardedDevices
from ...pool import events as e
from ...pool.model import SessionRecord, Slice
from ...procfs import ProcessId
from ..core import Core
from ..pages.activity import Activity
from ..pages.control import ControlPages
from ..pages.quiesce import drain
from ..sessions import LiveSession
from .actions import DeviceActions

WAITS = ("detached", "queued")

#: A pause waits at most this many seconds for the suspends. A suspend may last longer if the driver
#: refuses it, and cannot restore a process that it has suspended already.
PATIENCE = 10.0


class UnleasedSuspends:
    """Suspends and restores sessions without a lease."""

    def __init__(
        self,
        core: Core,
        actions: DeviceActions,
        service: GuardedDevices,
        *,
        pages: ControlPages,
        activity: Activity,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._actions = actions
        self._service = service
        self._pages = pages
        self._activity = activity
        self._log = log
        #: By order and session: the ids of the processes that the broker has tried to suspend.
        self._tried: dict[tuple[str, float, str], tuple[int, ...]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ before a pause is complete

    async def suspend(self, devices: list[str], order: tuple[str, float]) -> None:
        """Suspend the kernels that see one of ``devices`` and have no context, if the driver can.

        The broker tries this only once for the same ``order`` and the same processes of a kernel.
        The method waits at most PATIENCE seconds; the suspends then go on.
        """
        for session in [*self._core.sessions]:
            candidate = self._candidate(session, devices)
            reading = self._activity.read(session) if candidate is not None else None
            if candidate is None or reading is None:
                continue
            key, pids = (*order, session.id), tuple(slot.pid for slot in reading.slots)
            if self._tried.get(key) == pids:
                continue
            self._tried[key] = pids
            session.setting_aside = True
            task = asyncio.create_task(self._try(session, *candidate))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=PATIENCE)

    def close(self) -> None:
        """Stop. The next broker goes on."""
        for task in self._tasks:
            task.cancel()

    def forget(self, order: tuple[str, float]) -> None:
        """Note that an order is over."""
        self._tried = {key: pids for key, pids in self._tried.items() if key[:2] != order}

    def _candidate(
        self, session: LiveSession, devices: list[str]
    ) -> tuple[ProcessId, SessionRecord] | None:
        """Return the process and the record of a session that the pause must suspend, or None.

        Such a session has no lease and no suspended state, and sees one of ``devices``.
        """
        # This call updates ``record.bound``, the devices that the session sees. ``_suspend`` writes
        # them to the journal before it calls the driver.
        self._activity.settle(session)
        record = self._core.record(session.id)
        if record is None or record.state not in WAITS or record.suspended:
            return None
        if session.process is None or session.landing or session.page is None:
            return None
        if session.setting_aside:
            return None
        seen = record.bound
        if len(seen) != record.request.devices or not {*seen} & {*devices}:
            return None
        return session.process, record

    async def _try(self, session: LiveSession, process: ProcessId, record: SessionRecord) -> None:
        try:
            await self._suspend(session, process, record)
            if all(tried[2] != session.id for tried in self._tried):
                # The order has ended during the suspend.
                await self._resume(session)
        # After an error, the pause continues. The broker then asks the user to restart the kernel.
        except Exception as error:
            self._log.error("Session %s was not suspended: %r", session.id, error)
        finally:
            session.setting_aside = False

    async def _suspend(
        self, session: LiveSession, process: ProcessId, record: SessionRecord
    ) -> None:
        self._core.dirty(session.id)
        self._core.commit()
        if not self._pages.set_aside(session):
            return
        done = False
        try:
            if await drain(lambda: self._activity.read(session)) or session.page is None:
                return
            outcome = await self._service.suspend(
                process, record.bound, session=session.id,
                on_kept=lambda message: self._actions.kept(session, message),
            )  # fmt: skip
            if outcome.status == "gone":
                self._actions.end_frozen(session.id, outcome.processes)
            if outcome.status in ("failed", "hung"):
                self._actions.end_session(e.EndSession(session=session.id, message=outcome.message))
            if outcome.status != "suspended":
                if outcome.status not in ("nothing", "gone"):
                    self._log.warning("Session %s: %s", session.id, outcome.message)
                return
            session.frozen = outcome.processes
            state = tuple(Slice(uuid, outcome.freed.get(uuid, 0)) for uuid in record.bound)
            self._core.handle(e.SetAside(now=self._core.now(), session=session.id, suspended=state))
            now = self._core.record(session.id)
            done = now is not None and now.suspended == state
            if not done:
                # The pool has given the session a slice during the suspend, so the session must
                # run.
                await self._restore(session)
                return
            self._core.dirty(session.id)
            self._core.note("set-aside", session, device=record.bound[0])
            self._core.commit()
        except asyncio.CancelledError:
            done = True  # the mark stays in the page, where the next broker reads it
            raise
        finally:
            if not done:
                self._pages.no_longer_aside(session)

    # ------------------------------------------------------------------ after the pause

    async def resume(self) -> None:
        """Restore the detached kernels that were suspended for a pause.

        A kernel that waits for a slice stays suspended. The broker restores it when it gets the
        slice.
        """
        for session in [*self._core.sessions]:
            await self._resume(session)

    async def _resume(self, session: LiveSession) -> None:
        record = self._core.record(session.id)
        if record is None or record.state != "detached" or not record.suspended:
            return
        if record.suspended_bytes or not session.frozen or not self._pages.is_aside(session):
            return
        try:
            if not await self._restored(session):
                return  # the broker tries again when the kernel gets its next slice
        except Exception as error:  # the broker tries again at the next slice
            self._log.error("Session %s stays suspended: %r", session.id, error)
            return
        self._core.handle(e.SetAside(now=self._core.now(), session=session.id, suspended=()))
        self._pages.no_longer_aside(session)
        self._core.dirty(session.id)
        self._core.commit()

    async def _restore(self, session: LiveSession) -> None:
        """Restore a session that has a slice; try again until it runs, ends or is lost."""
        for process in reversed(session.frozen):
            lost = await self._service.bring_back(
                process, session=session.id,
                on_kept=lambda problem: self._actions.kept(session, problem),
            )  # fmt: skip
            if lost:
                self._actions.end_session(e.EndSession(session=session.id, message=lost))
                return
        session.frozen = ()

    async def _restored(self, session: LiveSession) -> bool:
        for process in reversed(session.frozen):
            found = await self._service.landed(process, session=session.id)
            if found.problem:
                self._log.warning("Session %s: %s", session.id, found.problem)
                return False
        session.frozen = ()
        return True
