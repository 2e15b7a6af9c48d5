# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds which sessions use their device now, and tells the pool by taking and dropping holds.

All CUDA activity of a session is one hold, :data:`DEVICE_HOLD`. The broker takes this hold when a
call waits for a lease (see ``messages/guard``) or has passed the gate. It drops the hold after
``quiet_after`` seconds without a call, if no call is inside the driver and no graph is being
recorded. It drops the hold at once if another session waits and the agent reports that no cell runs
(:meth:`Activity.resting`). Each round reads one byte of each attached session. It reads the whole
page only if that byte shows that something may have changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Iterable, Mapping

from ...guard.page import DEVICES, Reading, device_name
from ...pool import events as e
from ...pool.model import SessionRecord
from ...pool.timeslice import Contender, Tallies, contended_devices, next_turn
from ...states import MOVING
from ..configuration import Configuration
from ..core import Core
from ..ratelimit import Pace
from ..sessions import LiveSession
from .control import CLOSED, OPEN, PAUSED, UNUSED, ControlPages

#: The hold that stands for the CUDA activity of a session. Agents may not use this name.
DEVICE_HOLD = "device"

#: Seconds between two rounds. A round reads the gate of each attached session.
LOOK = 0.25

#: After an agent's report that no cell runs, the broker reads the kernel's page twice. This is the
#: number of seconds between the two reads.
SETTLE = 0.02

#: The recording of a graph counts as abandoned after this many seconds without a CUDA call of the
#: session.
ABANDONED = 120.0

#: Seconds for which a read of a session's page stays valid: STALE for a busy session, REST for an
#: idle session.
STALE, REST = 1.0, 10.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What a page shows: whether calls have passed the gate, are inside the driver, or wait."""

    touched: bool = False
    inflight: bool = False
    waiting: bool = False

    @property
    def busy(self) -> bool:
        """Whether the session uses its device, or waits to use it."""
        return self.touched or self.inflight or self.waiting


_NOTHING = Seen()


class Activity:
    """Reads the pages of attached sessions, and takes and drops their :data:`DEVICE_HOLD`.

    If a session has no lease, taking this hold asks the pool for one.
    """

    def __init__(self, core: Core, pages: ControlPages, configuration: Configuration) -> None:
        self.attached: dict[str, LiveSession] = {}
        self._core = core
        self._pages = pages
        self._configuration = configuration
        self._now = asyncio.get_running_loop().time
        #: Whether another session waited in the last round and the pool may preempt a session in
        #: use for it.
        self._contended = False

    @property
    def quiet_after(self) -> float:
        """Seconds without a CUDA call after which a session is idle."""
        return self._configuration.settings.quiet_after

    def lease(self, session: LiveSession, attached: bool) -> None:
        """Read a session's page in the rounds if the session has a lease; otherwise stop that."""
        if attached and session.page is not None:
            if session.id not in self.attached:
                self.attached[session.id] = session
                # The session is about to use its new lease, so count it as busy now.
                session.use.busy_at = session.use.looked_at = self._now()
        elif self.attached.pop(session.id, None) is not None:
            session.use.counted = {}
            if session.page is None and session.use.held:
                # The broker gave up the page while the session used the device, so no round can see
                # the end of this use.
                asyncio.get_running_loop().call_soon(self.drop, session)
            elif session.use.held:
                self._watch_for_calls(session)

    def _watch_for_calls(self, session: LiveSession) -> None:
        """Check later whether a session that lost its slice while in use still wants a slice.

        This check is necessary because the rounds do not read the page of a session without a
        slice. It comes after ``quiet_after`` seconds, because an attached session without calls
        also counts as idle after this time. If no call of the session waits at the gate at the time
        of the check, the session counts as idle, and the pool does not restore it.
        """
        asyncio.get_running_loop().call_later(self.quiet_after, self._still_wanted, session)

    def _still_wanted(self, session: LiveSession) -> None:
        record = self._core.record(session.id)
        if record is None or not session.use.held or session.id in self.attached:
            return
        reading = self.read(session)
        waits = session.guards or (reading is not None and reading.waiting)
        if waits or record.state in MOVING:
            self._watch_for_calls(session)
        else:
            self.drop(session)

    # ------------------------------------------------------------------ one session

    def busy(self, session: LiveSession) -> bool:
        """Return whether the session has used its device since the last read, or uses it now."""
        touched = self._touched(session)
        reading = self.read(session)
        inside = reading is not None and (reading.inflight or reading.waiting)
        if touched or inside or self.recording(session):
            self._used(session, 0.0)
            return True
        return False

    def untouched(self, session: LiveSession) -> bool:
        """Return whether the session's page shows no use of its device since the last read."""
        gate, reading = self._pages.gate(session), self.read(session)
        if reading is None or gate not in (UNUSED, CLOSED):
            return False
        return not (reading.inflight or reading.waiting or reading.captures)

    def go_on(self, session: LiveSession, quiet_for: float) -> None:
        """Restore the hold of an earlier broker's session.

        The session last used its device ``quiet_for`` seconds ago.
        """
        session.use.held = True
        session.use.busy_at = self._now() - quiet_for

    def recording(self, session: LiveSession) -> bool:
        """Return whether the session was recording a graph at the last read. This counts as use.

        A recording without a CUDA call for ABANDONED seconds does not count, because it may never
        end.
        """
        use = session.use
        return bool(use.captures) and self._now() - use.captured_at < ABANDONED

    def read(self, session: LiveSession) -> Reading | None:
        """Read the whole page now, and store the result in ``session.use``."""
        reading = self._pages.read(session)
        if reading is None:
            return None
        use, record = session.use, self._core.record(session.id)
        use.read_at = self._now()
        use.waiting = reading.waiting
        if reading.captures and (reading.inflight or reading.waiting or not use.captures):
            use.captured_at = self._now()
        use.captures = reading.captures
        session.cuda = reading.cuda
        if record is not None:
            beyond = [*use.beyond, *[0] * len(record.slices)]
            pieces = zip(record.slices, reading.used, beyond, strict=False)
            use.counted = {piece.device: max(0, size + more) for piece, size, more in pieces}
        if reading.pins != use.pins:
            use.pins = reading.pins
            if use.pins:
                self._core.note("pinned", session, reason=use.pins)
        return reading

    def reading(self, session: LiveSession) -> Reading | None:
        """Read the page of an attached session now; return None for any other session."""
        return self._pages.read(session) if session.id in self.attached else None

    async def readings(self) -> dict[str, Reading]:
        """Return the pages of the attached sessions, read one after the other."""
        pace, found = Pace(), {}
        for session in [*self.attached.values()]:
            reading = self._pages.read(session)
            if reading is not None:
                found[session.id] = reading
            await pace.step()
        return found

    def counted(self, session: LiveSession) -> Mapping[str, int]:
        """Return the session's bytes on each device of its lease; {} without a page.

        While a session is idle, only the death of a process can change these bytes. So this method
        reads the page of an idle session only every REST seconds. Nearly all sessions are idle.
        """
        use = session.use
        untouched = not use.held and self._pages.gate(session) == UNUSED
        if untouched and self._now() - use.read_at < REST:
            return use.counted
        return use.counted if self.read(session) is not None else {}

    # ------------------------------------------------------------------ the rounds

    def look(self, session: LiveSession, elapsed: float = LOOK) -> Seen:
        """Read a session's page in a round, and tell the pool about a change of its use.

        ``elapsed`` is the number of seconds since the last round.
        """
        now, use = self._now(), session.use
        if use.contended is not self._contended:
            use.contended = self._contended
            self._pages.set_contended(session, self._contended)
        touched = self._touched(session)
        if session.page is None:  # the user has damaged the page
            self.lease(session, False)
            return _NOTHING
        if touched:
            self._used(session, elapsed)
            if now - use.looked_at >= STALE:
                use.looked_at = now
                self.read(session)
            return Seen(touched=True)
        if not use.held:
            return _NOTHING
        reading = self.read(session)
        if reading is not None and (reading.inflight or reading.waiting):
            # The session has a lease, so a thread at the gate waits for its time slice.
            self._used(session, elapsed if reading.inflight else 0.0)
            return Seen(inflight=bool(reading.inflight), waiting=bool(reading.waiting))
        if reading is not None and self.recording(session):
            self._used(session, 0.0)
            return _NOTHING  # nothing runs on the device while a graph is recorded
        if now - use.busy_at >= self.quiet_after:
            self.drop(session)
        return _NOTHING

    def begin_round(self) -> None:
        """Store whether the pool may preempt a session in use because another session waits.

        :meth:`look` writes this into the pages. If the pool may preempt a session in use, the
        guards limit how much work the sessions submit.
        """
        self._contended = bool(self._core.pool.settings.preempt) and self._core.anybody_waits()

    def _touched(self, session: LiveSession) -> bool:
        if self._pages.gate(session) != OPEN:
            return False
        self._pages.set_gate(session, UNUSED)
        session.use.captured_at = self._now()
        return True

    def _used(self, session: LiveSession, seconds: float) -> None:
        session.use.busy_at = self._now()
        session.use.busy_seconds += seconds
        if not session.use.held:
            self.take(session)

    def take(self, session: LiveSession) -> None:
        """Take the session's hold for CUDA activity, :data:`DEVICE_HOLD`.

        If the session has no lease, the pool counts the hold as a request for a lease.
        """
        session.use.held = True
        self._core.follow_clock()
        self._core.handle(
            e.HoldTaken(
                now=self._core.now(), session=session.id, hold=DEVICE_HOLD, kind="device",
                bound=self.bound(session),
            )
        )  # fmt: skip

    def bound(self, session: LiveSession) -> tuple[str, ...]:
        """Return the devices to which processes of a session without a lease are bound.

        cuInit needs no lease. It binds a process to the devices that are the session's home devices
        at the time of the call. The result is () if no process has called cuInit, or if the pool
        has already set the session's devices.
        """
        record = self._core.record(session.id)
        if record is None or record.state not in ("detached", "queued") or record.suspended:
            return ()
        if record.bound and record.state == "queued":
            return ()
        reading = self.read(session)
        if reading is None or not reading.cuda:
            return ()
        known = {device_name(device.uuid): device.uuid for device in self._core.pool.devices()}
        # For each home device of the session, take the device that a process sees in its place. If
        # no process does, take the home device.
        seen = [
            next((known[slot.sees[i]] for slot in reading.slots if slot.sees[i] in known), home)
            for i, home in enumerate(session.home[:DEVICES])
        ]
        return tuple(seen[: record.request.devices])

    def settle(self, session: LiveSession) -> None:
        """Tell the pool to which devices the session is bound, before it places the session."""
        bound = self.bound(session)
        if bound:
            self._core.handle(
                e.DevicesSettled(now=self._core.now(), session=session.id, bound=bound)
            )

    def cell_over(self, session: LiveSession) -> None:
        """Drop the hold of a session after its last cell, if no call uses the device.

        With the policy ``lazy``, this method does nothing. Without this method, the session would
        keep its slice for ``quiet_after`` seconds after its last call. If a thread still makes
        calls, the next round sees the calls. If the pool takes the slice before that round, the
        check before the suspend sees them.
        """
        record = self._core.record(session.id)
        if record is None or record.attach == "lazy" or not session.use.held:
            return
        if any(hold.id != DEVICE_HOLD for hold in record.holds):
            return
        if not self._occupied(session):
            self._touched(session)
            self.drop(session)

    def resting(self, session: LiveSession) -> None:
        """Drop the hold of a session without a running cell, if no call uses the device.

        While other sessions wait, the agent reports when no cell runs. But a thread that a cell
        started may still run, and may be between two calls. So the broker reads the page again
        SETTLE seconds later. If the thread makes a call in this time, the session stays busy until
        a round finds it idle.
        """
        if session.use.held and not self._occupied(session):
            self._touched(session)
            asyncio.get_running_loop().call_later(SETTLE, self._settled, session)

    def _settled(self, session: LiveSession) -> None:
        if self.attached.get(session.id) is not session or not session.use.held:
            return
        if self._pages.gate(session) != OPEN and not self._occupied(session):
            self.drop(session)

    def _occupied(self, session: LiveSession) -> bool:
        """Return whether a call is inside the driver or waits, or a graph is being recorded.

        If the page cannot be read, the result is True.
        """
        reading = self.read(session)
        if reading is None:
            return True
        return bool(reading.inflight or reading.waiting) or self.recording(session)

    def drop(self, session: LiveSession) -> None:
        """Drop the hold, because no call uses the device or waits for it."""
        session.use.held = False
        self._core.handle(
            e.HoldDropped(
                now=self._core.now(), session=session.id, hold=DEVICE_HOLD, cuda=session.cuda
            )
        )


#: A pause of a gate ends after this many time slices, even if the broker has died.
PAUSE = 2

#: The broker stops time slicing after this many time slices in a row without contention.
CALM = 10


class TimeShare:
    """Reads the attached sessions' pages in rounds; gives time slices while sessions contend.

    ``pool/timeslice.py`` decides which sessions contend, and which of them gets the next time
    slice. This class opens and pauses gates, and measures for how long each session uses its
    device. It pauses a gate only if at least two sessions that contend were busy in the same round.
    In all other cases, the driver shares the device well enough, and without gaps.

    The page says when a pause ends (``pause_until``), so a session can go on even if the broker
    dies.
    """

    def __init__(
        self,
        core: Core,
        pages: ControlPages,
        activity: Activity,
        configuration: Configuration,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity
        self._configuration = configuration
        self._log = log
        #: Whether time slicing is on now.
        self.running = False
        self._state = Tallies()
        self._used: dict[str, float] = {}
        self._paused: set[str] = set()
        self._quiet = 0
        self._at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin the rounds, which go on for as long as a session is attached."""
        if self._timer is None:
            pause = self._configuration.settings.turn if self.running else LOOK
            self._timer = asyncio.get_running_loop().call_later(pause, self._round)

    def close(self) -> None:
        """End the rounds, and open all paused gates."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._end_turns()

    # ------------------------------------------------------------------ rounds

    def _round(self) -> None:
        self._timer = None
        self._activity.begin_round()
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

    def _consider(self, busy: Iterable[LiveSession]) -> None:
        """Begin time slicing if the sessions that were busy in the last round contend."""
        records = [self._core.record(session.id) for session in busy]
        contenders = [_contender(record, busy=True) for record in records if record is not None]
        if contended_devices(contenders):
            self._state, self._used, self._quiet = Tallies(), {}, 0
            self._at = asyncio.get_running_loop().time()
            self.running = True

    # ------------------------------------------------------------------ turns

    def _turn(self) -> None:
        self._quiet = 0 if self._step() else self._quiet + 1
        if self._quiet >= CALM:
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
            # Count the time of a session whose call continues during another session's time slice,
            # because the call uses the device. Do not count a session that only waits for its time
            # slice.
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
