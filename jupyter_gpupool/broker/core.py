# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The data that every part of the broker uses: the pool, the sessions, the journal, the clock.

Everything happens in one thread, the thread of the event loop. A part gives the pool an event with
:meth:`Core.handle`. This calls ``runner``, which performs what the pool decides.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Callable, Collection

from ..errors import RefusedError
from ..pool import events as e
from ..pool.machine import Pool
from ..pool.model import Refusal, SessionRecord
from ..pool.running import REMEDIES
from ..pool.session_view import PoolView
from .ratelimit import RowBudget
from .sessions import LiveSession, LiveSessions
from .stirs import Stirs
from .store.journal import Journal, Row
from .store.records import journaled, slices_to_json

#: The broker writes a changed hold to the journal within this many seconds. This is early enough
#: for a restarted broker: its pool takes no slice before the session's agent has had time to
#: reconnect (see ``recovery``).
FLUSH_AFTER = 0.25

#: The broker ignores a jump of the time of day by fewer seconds than this, because the time of day
#: and the monotonic clock never run at exactly the same speed.
CLOCK_STEP = 1.0

#: Receives an answer: (refusal or None, note for people).
Reply = Callable[[Refusal | None, str], None]

#: Receives each row of the journal as it is written.
RowReader = Callable[[Row], None]


class Clock:
    """A clock in seconds since the epoch. It never goes back, even if the broker restarts."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()
        #: The time of day minus :meth:`now`, in seconds, at the last call of :meth:`follow`.
        self.ahead = 0.0

    def now(self) -> float:
        """Return the time."""
        return time.monotonic() + self._offset

    def follow(self) -> float:
        """Return by how many seconds the time of day has jumped since the last call, or 0.

        The time of day jumps when somebody sets the clock, or when the machine has slept. This
        method adds the jump to ``ahead``. It ignores jumps below :data:`CLOCK_STEP`.
        """
        step = time.time() - self.time_of_day()
        if abs(step) < CLOCK_STEP:
            return 0.0
        self.ahead += step
        return step

    def time_of_day(self) -> float:
        """Return the time of day that the pool uses for the windows of daily budgets."""
        return self.now() + self.ahead


class Core:
    """The pool, and the broker's state around it.

    Parameters
    ----------
    handle:
        Gives the pool an event and performs what the pool decides: :meth:`runner.Runner.handle`. A
        part may call ``handle`` while an earlier call still runs, for example if an action fails at
        once. The pool then gets the new event after the earlier events.
    """

    def __init__(
        self,
        pool: Pool,
        journal: Journal,
        sessions: LiveSessions,
        clock: Clock,
        log: logging.Logger,
        *,
        handle: Callable[[e.Event], None],
    ) -> None:
        self.pool = pool
        self.journal = journal
        self.sessions = sessions
        self.log = log
        self.now = clock.now
        self._clock = clock
        self.handle = handle
        #: For each device: how often a process has come to the device or has left it. If this
        #: number has grown since the start of a sample, the sample is stale.
        self.changes: dict[str, int] = {}
        #: Set whenever ``changes`` grows.
        self.changed = asyncio.Event()
        #: The state of each session that is not detached. Detached sessions are missing, because
        #: most sessions are detached.
        self.busy: dict[str, str] = {}
        #: A number that grows with each change that a snapshot of the pool may show.
        self.version = 0
        self._replies: dict[str, Reply] = {}
        self._dirty: set[str] = set()
        self._flush: asyncio.TimerHandle | None = None
        self._rows = RowBudget()
        self._readers: list[RowReader] = []
        #: Tells clients that show the status about changes for which the journal gets no row.
        self.stirs = Stirs()
        self._stopped = False

    # ------------------------------------------------------------------ the pool

    @property
    def ahead(self) -> float:
        """The time of day minus :attr:`now`, in seconds, at the last measurement by the clock."""
        return self._clock.ahead

    def record(self, session: str) -> SessionRecord | None:
        """Return the pool's record of a session, or None."""
        return self.pool.record(session) if session in self.pool else None

    def view(self) -> PoolView:
        """Return the pool as it is now. This reads all sessions."""
        return self.pool.view(self.now())

    def follow_clock(self) -> None:
        """Tell the pool about a jump of the time of day, if there was one.

        Timers may fire late after a machine has woken up, so parts also call this method before
        each request. Without this call, the pool could apply yesterday's budget to a request, and
        refuse the request although today's budget allows it.
        """
        if step := self._clock.follow():
            way = "forward" if step > 0 else "back"
            self.log.info("The machine's clock jumped %s by %.0f s", way, abs(step))
            self.handle(e.ClockSet(now=self.now(), ahead=self.ahead))
            self.touched()

    def expect(self, rid: str, reply: Reply) -> None:
        """Call ``reply`` when the pool answers ``rid``."""
        self._replies[rid] = reply

    def forget(self, rid: str) -> bool:
        """Stop waiting for the answer to ``rid``; return True if the pool has not answered yet."""
        return self._replies.pop(rid, None) is not None

    def answered(self, rid: str, refusal: Refusal | None, note: str) -> None:
        """Pass the pool's answer to the function that expects it."""
        reply = self._replies.pop(rid, None)
        if reply is not None:
            reply(refusal, note)

    def moved(self, devices: Collection[str]) -> None:
        """Note that a process came to or left these devices: earlier samples of them are stale."""
        for device in devices:
            self.changes[device] = self.changes.get(device, 0) + 1
        if devices:
            self.changed.set()

    def touched(self) -> None:
        """Note that a new snapshot would differ from the last."""
        self.version += 1

    def set_state(self, session: str, state: str) -> None:
        """Store a session's state in :attr:`busy`."""
        if state in ("detached", "ended"):
            self.busy.pop(session, None)
        else:
            self.busy[session] = state

    def anybody_waits(self) -> bool:
        """Return whether a session is in the queue."""
        return "queued" in self.busy.values()

    # ------------------------------------------------------------------ the journal

    def read_rows(self, reader: RowReader) -> None:
        """Call ``reader`` with each row from now on."""
        self._readers.append(reader)

    def stop_reading(self, reader: RowReader) -> None:
        """Stop calling ``reader``."""
        self._readers.remove(reader)

    def note(
        self, kind: str, session: LiveSession | None = None, *, owner: str = "", **fields: Any
    ) -> None:
        """Append a row to the journal, and show the row to readers. The next commit writes it.

        ``owner`` is the user of a row without a session; only admins see a row without an owner.
        """
        row = Row(
            time=self.now(),
            kind=kind,
            session=session.id if session else "",
            owner=session.owner.name if session else owner,
            **fields,
        )
        if self._rows.admits(row, row.time):
            self.journal.append(row)
            for reader in self._readers:
                reader(row)
            self.flush_later()

    def note_missing(self, *, all_of_them: bool = False) -> None:
        """For each user whose rows were too many, write a row with the number of omitted rows."""
        for owner, kinds in self._rows.summaries(self.now(), all_of_them=all_of_them):
            self.note(
                "omitted", owner=owner, detail={"rows": dict(kinds)},
                reason="There were too many rows about this user's kernels without a slice, so the "
                f"journal leaves out {kinds.total()} of them.",
            )  # fmt: skip

    def dirty(self, session: str) -> None:
        """Mark the session's record; a commit writes it within FLUSH_AFTER seconds."""
        self.version += 1
        self._dirty.add(session)
        self.flush_later()

    @property
    def marked(self) -> bool:
        """Whether there are marked records, which the next commit writes."""
        return bool(self._dirty)

    def mark(self, session: str) -> None:
        """Mark the session's record for the next commit. The caller must commit."""
        self._dirty.add(session)

    def commit(self) -> None:
        """Write and commit all pending changes now."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        for name in self._dirty:
            session, record = self.sessions.find(name), self.record(name)
            if session is None or record is None or record.state == "ended":
                self.journal.put(name, None)
            else:
                self.journal.put(name, journaled(session, record))
        self._dirty.clear()
        self.journal.remember("clock", repr(self.now()))
        self.journal.remember("awake", repr(time.monotonic()))
        self.journal.commit()

    def stop(self) -> None:
        """Write all pending changes. From now on, only :meth:`commit` writes later changes."""
        self._stopped = True
        self.stirs.stop()
        self.note_missing(all_of_them=True)
        self.commit()

    def flush_later(self) -> None:
        """Commit within FLUSH_AFTER seconds."""
        if self._flush is None and not self._stopped:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_AFTER, self.commit)

    # ------------------------------------------------------------------ the agents

    def push_lease(self, session: LiveSession, reason: str = "") -> None:
        """Send the state of the session's lease to its agent and to its members."""
        record = self.record(session.id)
        if session.has_listeners and record is not None:
            session.send(
                {
                    "type": "lease",
                    "state": record.state,
                    "epoch": record.epoch,
                    "slices": slices_to_json(record.slices),
                    "reason": reason,
                    "pinned_reason": record.pinned_reason,
                    "preempted": record.preempted,
                    "remedy": REMEDIES.get(record.preempted, ""),
                }
            )


def refused(refusal: Refusal) -> RefusedError:
    """Return the error that tells a client why the pool refuses its request."""
    return RefusedError(
        refusal.message,
        code=refusal.code,
        next_step=refusal.next_step,
        details=refusal.details,
    )
