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
from ..runner import Runner
from ..sessions import Session
from .activity import Activity
from .control import PAUSED, UNUSED, Pages

#: A paused gate opens by itself after so many turns.
PAUSE = 2

#: Turns without contention after which there are none any more.
REST = 10


class TurnKeeper:
    """Executes the plans for all devices of one broker."""

    def __init__(
        self, runner: Runner, pages: Pages, activity: Activity, log: logging.Logger, *, turn: float
    ) -> None:
        #: Seconds.
        self.turn = turn
        self._runner = runner
        self._pages = pages
        self._activity = activity
        self._log = log
        self._state = Tallies()
        self._used: dict[str, float] = {}
        self._paused: set[str] = set()
        self._quiet = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        activity.on_round = self.consider

    @property
    def running(self) -> bool:
        """Whether turns are being kept now."""
        return self._timer is not None

    def consider(self, busy: Iterable[Session]) -> None:
        """Begin to keep turns if these sessions, busy at the last look, contend."""
        if self.running:
            return
        records = [self._runner.record(session.id) for session in busy]
        contenders = [_contender(record, busy=True) for record in records if record is not None]
        if contended_devices(contenders):
            self._state, self._used, self._quiet = Tallies(), {}, 0
            self._activity.elsewhere = True
            self._at = asyncio.get_running_loop().time()
            self._wait()

    def close(self) -> None:
        """Keep no turns any more; open what is paused."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._activity.elsewhere = False
        for name in [*self._paused]:
            self._open(name)

    # ------------------------------------------------------------------ one turn

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.turn, self._next)

    def _next(self) -> None:
        try:
            contended = self._step()
        except Exception:
            self._log.exception("Compute shares are not enforced for now")
            self.close()
            return
        self._quiet = 0 if contended else self._quiet + 1
        if self._quiet >= REST or self._runner.stopped:
            self.close()
        else:
            self._wait()

    def _step(self) -> bool:
        now = asyncio.get_running_loop().time()
        elapsed, self._at = now - self._at, now
        contenders = []
        for session in list(self._activity.attached.values()):
            seen = self._activity.look(session, elapsed)
            record = self._runner.record(session.id)
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
        until = time.monotonic_ns() + int(PAUSE * self.turn * 1e9)
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
