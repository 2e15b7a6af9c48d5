# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspends kernels that have called cuInit and nothing else, for an admin's pause.

``torch.cuda.is_available()`` is enough to call cuInit. Such a process has no context and no slice,
so the pool never suspends it. But it has the driver's device files open. If the driver can suspend
it (see ``docs/driver-facts.md``), the broker asks the driver to do so during a pause. From then on,
the pool treats the kernel as suspended. When the kernel gets its next slice, on any GPU, this
broker or a later broker restores it.
"""

from __future__ import annotations

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

WAITS = ("detached", "queued")


class UnleasedSuspends:
    """Suspends and restores sessions without a lease."""

    def __init__(
        self,
        core: Core,
        service: GuardedDevices,
        pages: ControlPages,
        activity: Activity,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._service = service
        self._pages = pages
        self._activity = activity
        self._log = log
        #: By order and session: the processes about which the broker has asked the driver.
        self._tried: dict[tuple[str, float, str], tuple[int, ...]] = {}

    # ------------------------------------------------------------------ before a pause is complete

    async def suspend(self, devices: list[str], order: tuple[str, float]) -> None:
        """If the driver can, suspend the kernels without a context that see one of ``devices``.

        If the broker has already asked the driver about these processes for this ``order``, it does
        not ask again.
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
            try:
                await self._suspend(session, *candidate)
            # The pause continues, and the broker asks the user to restart the kernel.
            except Exception as error:
                self._log.error("Session %s was not suspended: %r", session.id, error)

    def forget(self, order: tuple[str, float]) -> None:
        """Note that an order is over."""
        self._tried = {key: pids for key, pids in self._tried.items() if key[:2] != order}

    def _candidate(
        self, session: LiveSession, devices: list[str]
    ) -> tuple[ProcessId, SessionRecord] | None:
        """Return the process and record of a session if it should be suspended, or None.

        Such a session has no lease and no suspended state, and sees one of ``devices``.
        """
        # This call updates the devices that the session sees. The commit before the suspend writes
        # them to the journal.
        self._activity.settle(session)
        record = self._core.record(session.id)
        if record is None or record.state not in WAITS or record.suspended:
            return None
        if session.process is None or session.landing or session.page is None:
            return None
        seen = record.bound
        if len(seen) != record.request.devices or not {*seen} & {*devices}:
            return None
        return session.process, record

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
            outcome = await self._service.suspend(process, record.bound, session=session.id)
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
                # During the suspend, the pool has given the session a slice.
                await self._restored(session)
                return
            self._core.dirty(session.id)
            self._core.note("set-aside", session, device=record.bound[0])
            self._core.commit()
        finally:
            if not done:
                self._pages.no_longer_aside(session)

    # ------------------------------------------------------------------ after the pause

    async def resume(self) -> None:
        """Restore the kernels that were suspended for a pause, except those that wait for a slice.

        The broker restores a waiting kernel when the kernel gets its slice.
        """
        for session in [*self._core.sessions]:
            record = self._core.record(session.id)
            if record is None or record.state != "detached" or not record.suspended:
                continue
            if record.suspended_bytes or not session.frozen or not self._pages.is_aside(session):
                continue
            try:
                if not await self._restored(session):
                    continue  # the broker tries again when the kernel gets its next slice
            except Exception as error:  # the broker tries again at the next slice
                self._log.error("Session %s stays suspended: %r", session.id, error)
                continue
            self._core.handle(e.SetAside(now=self._core.now(), session=session.id, suspended=()))
            self._pages.no_longer_aside(session)
            self._core.dirty(session.id)
            self._core.commit()

    async def _restored(self, session: LiveSession) -> bool:
        for process in reversed(session.frozen):
            _, trouble = await self._service.landed(process, session=session.id)
            if trouble:
                self._log.warning("Session %s: %s", session.id, trouble)
                return False
        session.frozen = ()
        return True
