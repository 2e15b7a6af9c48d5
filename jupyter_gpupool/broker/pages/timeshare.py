# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compute shares: while sessions contend for a device, the gate is open for one at a time.

``pool/timeslice.py`` decides who contends and who is next; this opens and pauses gates, and
measures. Nothing runs, and no gate is ever paused, unless sessions that were busy in the same look
contend: otherwise the driver shares the device well enough, and without gaps.

A pause ends by itself (``pause_until``), so a broker that dies in the middle blocks nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Iterable

from ...pool.model import SessionRecord
from ...pool.timeslice import Contender, Tallies, contended_devices, next_turn
from ..configuration import Configuration
from ..core import Core
from ..sessions import Session
from .activity import LOOK, Activity
from .control import PAUSED, UNUSED, Pages

#: A paused gate opens by itself after so many turns.
PAUSE = 2

#: Turns without contention after which there are none any more.
REST = 10


class TimeShare:
    """Looks at the attached sessions in rounds; keeps turns while some of them contend."""

    def __init__(
        self,
        core: Core,
        pages: Pages,
        activity: Activity,
        configuration: Configuration,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity
        self._configuration = configuration
        self._log = log
        #: Whether turns are being kept now.
        self.running = False
        self._state = Tallies()
        self._used: dict[str, float] = {}
        self._paused: set[str] = set()
        self._quiet = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look from now on, for as long as a session is attached."""
        if self._timer is None:
            pause = self._configuration.settings.turn if self.running else LOOK
            self._timer = asyncio.get_running_loop().call_later(pause, self._round)

    def close(self) -> None:
        """Look no more, and open what is paused."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_turns()

    # ------------------------------------------------------------------ rounds

    def _round(self) -> None:
        self._timer = None
        try:
            if self.running:
                self._turn()
            else:
                self._look()
        except Exception:
            self._log.exception("The pages could not be read")
            self._end_turns()
        if self.running or self._activity.attached:
            self.start()

    def _look(self) -> None:
        sessions = [*self._activity.attached.values()]
        busy = [session for session in sessions if self._activity.look(session, LOOK).busy]
        if len(busy) > 1:
            self._consider(busy)

    def _consider(self, busy: Iterable[Session]) -> None:
        """Begin to keep turns if these sessions, busy at the last look, contend."""
        records = [self._core.record(session.id) for session in busy]
        contenders = [_contender(record, busy=True) for record in records if record is not None]
        if contended_devices(contenders):
            self._state, self._used, self._quiet = Tallies(), {}, 0
            self._at = asyncio.get_running_loop().time()
            self.running = True

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        self._quiet = 0 if self._step() else self._quiet + 1
        if self._quiet >= REST:
            self._end_turns()

    def _end_turns(self) -> None:
        self.running = False
        for name in [*self._paused]:
            self._open(name)

    def _step(self) -> bool:
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        contenders = []
        for session in list(self._activity.attached.values()):
            seen = self._activity.look(session, elapsed)
            record = self._core.record(session.id)
            if record is None or session.id not in self._activity.attached:
                continue
            # A session that only waits for its turn uses nothing; a call that runs on into the
            # turn of another does.
            if seen.touched or seen.inflight:
                self._used[session.id] = self._used.get(session.id, 0.0) + elapsed
            used = self._used.get(session.id, 0.0)
            contenders.append(_contender(record, busy=seen.busy, used=used))
        found = next_turn(self._state, contenders, now)
        self._state = found.state
        for name in self._paused - found.wait:
            self._open(name)
        until = time.monotonic_ns() + int(PAUSE * self._configuration.settings.turn * 1e9)
        self._paused = {name for name in found.wait if name in self._activity.attached}
        for name in self._paused:
            self._pages.set_gate(self._activity.attached[name], PAUSED, pause_until=until)
        return bool(found.contended)

    def _open(self, name: str) -> None:
        self._paused.discard(name)
        session = self._activity.attached.get(name)
        if session is not None and self._pages.gate(session) == PAUSED:
            self._pages.set_gate(session, UNUSED)


def _contender(record: SessionRecord, *, busy: bool, used: float = 0.0) -> Contender:
    return Contender(
        session=record.id,
        share=record.request.compute,
        devices=tuple(piece.device for piece in record.slices),
        busy=busy,
        used=used,
    )
