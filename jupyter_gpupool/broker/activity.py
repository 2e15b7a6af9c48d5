# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Who uses its device now: read from the pages of attached sessions, told to the pool as holds.

All CUDA activity of a session is one hold, :data:`DEVICE_HOLD`. It is taken when a call waits for
a lease (see ``guards``) or the gate was passed, and dropped when nothing was seen for
``quiet_after`` seconds and no call is inside the driver. One byte is read for each attached
session and look; its whole page only if that byte says that something may have changed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Mapping

from ..guard.page import Reading
from ..pool import events as e
from .pages import OPEN, UNUSED, Pages
from .runner import Runner
from .sessions import Session

#: The hold that stands for the CUDA activity of a session. Agents may not use this name.
DEVICE_HOLD = "device"

#: Seconds between two looks at the gates.
LOOK = 0.25

#: Seconds for which what was read of a busy session's page is good enough.
STALE = 1.0


class Activity:
    """Looks at the pages of attached sessions, while there are some."""

    def __init__(
        self, runner: Runner, pages: Pages, log: logging.Logger, *, quiet_after: float
    ) -> None:
        self.quiet_after = quiet_after
        self.attached: dict[str, Session] = {}
        self._runner = runner
        self._pages = pages
        self._log = log
        self._timer: asyncio.TimerHandle | None = None
        self._now = asyncio.get_running_loop().time

    def lease(self, session: Session, attached: bool) -> None:
        """A lease has come or gone: look at the session from now on, or no more."""
        if attached and session.page is not None:
            if session.id not in self.attached:
                self.attached[session.id] = session
                # Who has just got its lease is about to use it.
                session.use.busy_at = session.use.looked_at = self._now()
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(LOOK, self._round)
        elif self.attached.pop(session.id, None) is not None:
            session.use.counted = {}

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.attached.clear()

    # ------------------------------------------------------------------ one session

    def busy(self, session: Session) -> bool:
        """Return whether it was used since the last look, or has calls inside the driver."""
        touched = self._touched(session)
        reading = self.read(session)
        if touched or (reading is not None and reading.inflight):
            self._used(session)
            return True
        return False

    def read(self, session: Session) -> Reading | None:
        """Read the whole page now, and keep what it says in ``session.use``."""
        reading = self._pages.read(session)
        if reading is None:
            return None
        use, record = session.use, self._runner.record(session.id)
        use.waiting = reading.waiting
        session.cuda = reading.cuda
        if record is not None:
            pieces = zip(record.slices, reading.used, strict=False)
            use.counted = {piece.device: size for piece, size in pieces}
        if reading.pins != use.pins:
            use.pins = reading.pins
            if use.pins:
                self._runner.note("pinned", session, reason=use.pins)
        return reading

    def counted(self, session: Session) -> Mapping[str, int]:
        """Return the bytes that it has on each device of its lease, read now; {} without a page."""
        return session.use.counted if self.read(session) is not None else {}

    # ------------------------------------------------------------------ the rounds

    def _round(self) -> None:
        try:
            for session in list(self.attached.values()):
                self._look(session)
        except Exception:
            self._log.exception("A look at the pages failed")
        self._timer = None
        if self.attached and not self._runner.stopped:
            self._timer = asyncio.get_running_loop().call_later(LOOK, self._round)

    def _look(self, session: Session) -> None:
        now, use = self._now(), session.use
        if session.forced:
            return
        if self._touched(session):
            self._used(session)
            if now - use.looked_at >= STALE:
                use.looked_at = now
                self.read(session)
            return
        if not self._held(session):
            return
        reading = self.read(session)
        if reading is not None and (reading.inflight or reading.waiting):
            self._used(session)  # who waits while there is a lease waits for its turn
        elif now - use.busy_at >= self.quiet_after:
            self._runner.handle(
                e.HoldDropped(
                    now=self._runner.now(), session=session.id, hold=DEVICE_HOLD, cuda=session.cuda
                )
            )

    def _touched(self, session: Session) -> bool:
        if self._pages.gate(session) != OPEN:
            return False
        self._pages.set_gate(session, UNUSED)
        return True

    def _used(self, session: Session) -> None:
        now, use = self._now(), session.use
        use.busy_seconds += min(LOOK, max(0.0, now - use.busy_at))
        use.busy_at = now
        if not self._held(session):
            self.take(session)

    def _held(self, session: Session) -> bool:
        record = self._runner.record(session.id)
        return record is not None and any(hold.id == DEVICE_HOLD for hold in record.holds)

    def take(self, session: Session) -> None:
        """Take the hold, or ask for a lease with it."""
        record = self._runner.record(session.id)
        bound: tuple[str, ...] = ()
        if record is not None and record.state == "detached" and not record.suspended:
            reading = self.read(session)
            if reading is not None and reading.cuda:
                # cuInit was called without a lease: its processes see their home devices.
                bound = session.home[: record.request.devices]
        self._runner.handle(
            e.HoldTaken(
                now=self._runner.now(), session=session.id, hold=DEVICE_HOLD, kind="device",
                bound=bound,
            )
        )  # fmt: skip
