# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Kernels that have called cuInit and nothing else, suspended for an admin's pause.

``torch.cuda.is_available()`` is enough for that: such a process has no context and no slice, so the
pool never suspends it, but it has the driver's device files open. Where the driver can suspend it
(it is asked; see ``docs/driver-facts.md``), the pause has that done. To the pool it is suspended
then: its next slice restores it, on whichever GPU, also after a broker was killed.
"""

from __future__ import annotations

import asyncio
import logging

from ...devices import GuardedDevices
from ...pool import events as e
from ...pool.model import SessionRecord, Slice
from ..pages.activity import Activity
from ..pages.control import Pages
from ..pages.quiesce import quiesce
from ..runner import Runner
from ..sessions import Session
from .actions import DRAIN, DRAIN_POLL

WAITS = ("detached", "queued")


class SetAside:
    """Suspends and restores sessions without a lease."""

    def __init__(
        self,
        runner: Runner,
        devices: GuardedDevices,
        pages: Pages,
        activity: Activity,
        log: logging.Logger,
    ) -> None:
        self._runner = runner
        self._devices = devices
        self._pages = pages
        self._activity = activity
        self._log = log
        #: By order and session: the processes that the driver was asked about.
        self._tried: dict[tuple[str, float, str], tuple[int, ...]] = {}

    # ------------------------------------------------------------------ before a pause is complete

    async def suspend(self, devices: list[str], order: tuple[str, float]) -> None:
        """Suspend whoever sees one of ``devices`` and has no context, where the driver does that.

        For one ``order`` the driver is asked about the same processes once.
        """
        for session in [*self._runner.sessions]:
            record = self._candidate(session, devices)
            reading = self._activity.read(session) if record is not None else None
            if record is None or reading is None:
                continue
            key, pids = (*order, session.id), tuple(slot.pid for slot in reading.slots)
            if self._tried.get(key) == pids:
                continue
            self._tried[key] = pids
            try:
                await self._suspend(session, record)
            except Exception as error:  # the pause goes on, and asks for a restart of the kernel
                self._log.error("Session %s was not suspended: %r", session.id, error)

    def forget(self, order: tuple[str, float]) -> None:
        """An order is over."""
        self._tried = {key: pids for key, pids in self._tried.items() if key[:2] != order}

    def _candidate(self, session: Session, devices: list[str]) -> SessionRecord | None:
        """Return the record of a session that only looked at one of ``devices``, else None."""
        self._activity.settle(session)  # what it sees is journalled before anything is suspended
        record = self._runner.record(session.id)
        if record is None or record.state not in WAITS or record.suspended:
            return None
        if session.process is None or session.landing or session.page is None:
            return None
        seen = record.bound
        if len(seen) != record.request.devices or not {*seen} & {*devices}:
            return None
        return record

    async def _suspend(self, session: Session, record: SessionRecord) -> None:
        self._runner.dirty(session.id)
        self._runner.commit()
        assert session.process is not None
        if not self._pages.set_aside(session):
            return
        done = False
        try:
            if not await self._drained(session):
                return
            outcome = await self._devices.suspend(session.process, record.bound, session=session.id)
            if outcome.status != "suspended":
                if outcome.status not in ("nothing", "gone"):
                    self._log.warning("Session %s: %s", session.id, outcome.message)
                return
            session.frozen = outcome.processes
            state = tuple(Slice(uuid, outcome.freed.get(uuid, 0)) for uuid in record.bound)
            self._runner.handle(
                e.SetAside(now=self._runner.now(), session=session.id, suspended=state)
            )
            now = self._runner.record(session.id)
            done = now is not None and now.suspended == state
            if not done:
                await self._restored(session)  # it was given a slice elsewhere meanwhile
                return
            self._runner.dirty(session.id)
            self._runner.note("set-aside", session, device=record.bound[0])
            self._runner.commit()
        finally:
            if not done:
                self._pages.no_longer_aside(session)

    async def _drained(self, session: Session) -> bool:
        """Wait until no call of the session can be on its way into the driver."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + DRAIN
        while (reading := self._activity.read(session)) is not None:
            if not reading.inflight:
                return await quiesce([slot.pid for slot in reading.slots])
            if loop.time() >= give_up:
                break
            await asyncio.sleep(DRAIN_POLL)
        return False

    # ------------------------------------------------------------------ after it

    async def resume(self) -> None:
        """Restore whoever was suspended here and does not wait for a slice, which restores it."""
        for session in [*self._runner.sessions]:
            record = self._runner.record(session.id)
            if record is None or record.state != "detached" or not record.suspended:
                continue
            if record.suspended_bytes or not session.frozen or not self._pages.is_aside(session):
                continue
            try:
                if not await self._restored(session):
                    continue  # its next slice restores it, if that is possible at all
            except Exception as error:  # everybody else is resumed; its next slice tries again
                self._log.error("Session %s stays suspended: %r", session.id, error)
                continue
            self._runner.handle(
                e.SetAside(now=self._runner.now(), session=session.id, suspended=())
            )
            self._pages.no_longer_aside(session)
            self._runner.dirty(session.id)
            self._runner.commit()

    async def _restored(self, session: Session) -> bool:
        for process in reversed(session.frozen):
            _, trouble = await self._devices.landed(process, session=session.id)
            if trouble:
                self._log.warning("Session %s: %s", session.id, trouble)
                return False
        session.frozen = ()
        return True
