# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The loop around the pool: an event in, the journal written, the actions performed.

Everything happens in one thread, the event loop's. The order in :meth:`Runner.handle` is the
point: what the pool decided is committed to the journal *before* anything is done about it, so
that a broker killed at any instant finds at least what it had begun (see ``recovery``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import Any, Callable, Protocol

from ..errors import Code, RefusedError
from ..pool import events as e
from ..pool.machine import Pool
from ..pool.model import Refusal, SessionRecord, Slice
from .sessions import Session, Sessions
from .store.journal import Journal, Row
from .store.records import slices_to_json, to_json
from .store.rows import Ledger, RowBudget, steady

#: Seconds for which a changed hold may be missing in the journal. A restart does not need it: no
#: slice is taken before its agent has had the time to come back and tell (see ``recovery``).
FLUSH_AFTER = 0.25

#: What an answer is given to: (refusal or None, note for people).
Reply = Callable[[Refusal | None, str], None]


class Effects(Protocol):
    """Performs what takes time; each ends by handing an event to the runner."""

    def attach(self, action: e.Attach) -> None: ...
    def suspend(self, action: e.Suspend) -> None: ...
    def end_session(self, action: e.EndSession) -> None: ...


class Guarding(Protocol):
    """Keeps the guard in the sessions' processes informed; see ``guards``."""

    def about_to_change(self) -> None: ...
    def changed(self, session: Session) -> None: ...
    def granted(self, session: Session, epoch: int) -> None: ...
    def refused(self, session: Session, refusal: Refusal) -> None: ...
    def ended(self, session: Session, reason: str) -> None: ...


class Clock:
    """Seconds since the epoch that never go back, also not over a restart."""

    def __init__(self, not_before: float = 0.0) -> None:
        self._offset = max(time.time(), not_before) - time.monotonic()

    def now(self) -> float:
        """Return the time."""
        return time.monotonic() + self._offset


class Runner:
    """Has a pool, and is the only one to talk to it."""

    def __init__(
        self, pool: Pool, journal: Journal, sessions: Sessions, clock: Clock, log: logging.Logger
    ) -> None:
        self.pool = pool
        self.journal = journal
        self.sessions = sessions
        self.log = log
        self.now = clock.now
        self.effects: Effects | None = None
        self.guard: Guarding | None = None
        #: Called with each row as it happens; for those who watch.
        self.on_row: Callable[[Row], None] = lambda _row: None
        #: Called when the last session has ended, or the first has come.
        self.on_population: Callable[[int], None] = lambda _count: None
        #: Called with a session that has ended.
        self.on_gone: Callable[[Session], None] = lambda _session: None
        #: Called when a slice was given or given back.
        self.on_change: Callable[[], None] = lambda: None
        #: Called before the pool is told that a session has ended.
        self.on_ending: Callable[[e.SessionEnded], None] = lambda _event: None
        #: How often something happened on a device: a sample that was begun before is old news.
        self.changes: dict[str, int] = {}
        #: The state of each session that is not detached: most are, and they cost nothing.
        self.busy: dict[str, str] = {}
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._replies: dict[str, Reply] = {}
        self._dirty: set[str] = set()
        #: A transition is to be committed before anybody else gets his turn.
        self._owed = False
        #: Sessions whose agents are to hear of their lease, with the last reason.
        self._news: dict[str, str] = {}
        self._flush: asyncio.TimerHandle | None = None
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None
        self.ledger = Ledger(self)
        self._rows = RowBudget()
        self.stopped = False
        #: Grows with whatever a snapshot of the pool may show.
        self.version = 0

    # ------------------------------------------------------------------ for the rest of the broker

    def handle(self, event: e.Event) -> None:
        """Give the pool an event and perform what it decides.

        May be called from within (an action that fails at once is an event, too): then the event
        waits for its turn.
        """
        self.version += 1
        self._events.append(event)
        if self._handling or self.stopped:
            return
        self._handling = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._handling = False
            if self._owed:
                self.commit()
            self._tell_agents()
        self._schedule()

    def expect(self, rid: str, reply: Reply) -> None:
        """Call ``reply`` when the pool answers ``rid``."""
        self._replies[rid] = reply

    def forget(self, rid: str) -> bool:
        """Drop an expected answer; return whether it had not come."""
        return self._replies.pop(rid, None) is not None

    def record(self, session: str) -> SessionRecord | None:
        """Return the pool's record of a session, or None."""
        return self.pool.record(session) if session in self.pool else None

    def note(
        self, kind: str, session: Session | None = None, *, owner: str = "", **fields: Any
    ) -> None:
        """Append a row to the journal (committed with the next commit) and show it to watchers.

        ``owner`` is whose it is where there is no session; a row of nobody is for admins.
        """
        row = Row(
            time=self.now(),
            kind=kind,
            session=session.id if session else "",
            owner=session.owner.name if session else owner,
            **fields,
        )
        if self._rows.admits(row, row.time):
            self.on_row(self.journal.append(row))
            self._flush_later()

    def note_missing(self, *, all_of_them: bool = False) -> None:
        """Say in one row for each user which rows of theirs were too many to be written."""
        for owner, kinds in self._rows.summaries(self.now(), all_of_them=all_of_them):
            self.note(
                "omitted", owner=owner, detail={"rows": dict(kinds)},
                reason=f"{kinds.total()} rows about this user's kernels without a slice were too "
                "many to be kept.",
            )  # fmt: skip

    def dirty(self, session: str) -> None:
        """The session's record, or what we keep beside it, is to be written."""
        self.version += 1
        self._dirty.add(session)
        self._flush_later()

    def commit(self) -> None:
        """Write everything that is to be written, now."""
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
        self._owed = False
        self.journal.remember("clock", repr(self.now()))
        self.journal.commit()

    def push_lease(self, session: Session, reason: str = "") -> None:
        """Tell the session's agent how things stand."""
        record = self.record(session.id)
        if session.agent is not None and record is not None:
            session.agent.send(
                {
                    "type": "lease",
                    "state": record.state,
                    "epoch": record.epoch,
                    "slices": slices_to_json(record.slices),
                    "reason": reason,
                    "pinned_reason": record.pinned_reason,
                }
            )

    def stop(self) -> None:
        """Handle no further event: what is under way stays as it is in the journal."""
        self.stopped = True
        if self._wakeup is not None:
            self._wakeup.cancel()
        self.note_missing(all_of_them=True)
        self.commit()

    # ------------------------------------------------------------------ the loop

    def _step(self, event: e.Event) -> None:
        if self.guard is not None:
            self.guard.about_to_change()
        if isinstance(event, e.SessionEnded):
            self.on_ending(event)
        actions = self.pool.handle(event)
        named = getattr(event, "session", "")
        if named:
            self._dirty.add(named)
        urgent = False
        for action in actions:
            if action.session:
                self._dirty.add(action.session)
            if isinstance(action, e.StateChanged):
                self._count(action)
                self._changed(action.slices)
                self.ledger.change(action, event)
                self._owed |= not steady(action)
            urgent |= _must_be_written_first(action)
        if urgent:
            self.commit()
        elif self._dirty:
            self._flush_later()
        # Before anybody is told that he may go on.
        self._tell_guard(actions, event)
        for action in actions:
            self._perform(action)
        if isinstance(event, e.SessionEnded):
            self._gone(event)

    def _tell_guard(self, actions: list[e.Action], event: e.Event) -> None:
        if self.guard is None:
            return
        names = [a.session for a in actions if isinstance(a, (e.StateChanged, e.Resize))]
        if isinstance(event, e.RequestChanged):
            names.append(event.session)
        for name in dict.fromkeys(names):
            session = self.sessions.find(name)
            if session is not None:
                self.guard.changed(session)

    def _perform(self, action: e.Action) -> None:
        session = self.sessions.find(action.session)
        match action:
            case e.StateChanged():
                # Whether its own cells run, the agent knows better than we do.
                if session is not None and not steady(action):
                    self._news[session.id] = action.reason
            case e.HoldGranted(hold="device"):
                if session is not None and self.guard is not None:
                    self.guard.granted(session, action.epoch)
            case e.HoldGranted():
                self._granted(session, action)
            case e.HoldRefused(hold="device"):
                if session is not None and self.guard is not None:
                    self.guard.refused(session, action.refusal)
            case e.HoldRefused():
                wait = session.waits.pop(action.hold, None) if session else None
                if wait is not None and session is not None:
                    wait.connection.waiting -= 1
                    wait.connection.refuse(wait.request_id, refused(action.refusal))
                    self.note("refuse", session, reason=action.refusal.message,
                              detail={"what": "hold", "code": action.refusal.code})  # fmt: skip
            case e.QueueMoved():
                if session is not None and session.agent is not None:
                    session.agent.send(
                        {
                            "type": "queue",
                            "position": action.position,
                            "length": action.length,
                            "eta": action.eta,
                            "reason": action.reason,
                        }
                    )
            case e.Wanted():
                if session is not None:
                    session.wanted = action.epoch
                    if session.agent is not None:
                        session.agent.send({"type": "wanted"})
            case e.Answer():
                reply = self._replies.pop(action.rid, None)
                if reply is not None:
                    reply(action.refusal, action.note)
            case e.Resize():
                if session is not None:
                    self._news[session.id] = "resized"
            case e.Attach():
                self._changed(action.slices)
                assert self.effects is not None
                self.effects.attach(action)
            case e.Suspend():
                self._changed(action.slices)
                assert self.effects is not None
                self.effects.suspend(action)
            case e.EndSession():
                assert self.effects is not None
                self.effects.end_session(action)
            case e.Log():
                level = logging.getLevelName(action.level.upper())
                self.log.log(level, "%s: %s", action.code, action.message)
            case _:
                raise AssertionError(f"an action nobody performs: {action!r}")

    def _count(self, change: e.StateChanged) -> None:
        if change.new in ("detached", "ended"):
            self.busy.pop(change.session, None)
        else:
            self.busy[change.session] = change.new

    def _tell_agents(self) -> None:
        """Push each changed lease once: how it came about in several steps is no news."""
        news, self._news = self._news, {}
        for name, why in news.items():
            session = self.sessions.find(name)
            if session is not None:
                self.push_lease(session, why)

    def _granted(self, session: Session | None, action: e.HoldGranted) -> None:
        wait = session.waits.pop(action.hold, None) if session else None
        if wait is None:
            return  # taken without waiting: nobody asked to be told
        wait.connection.waiting -= 1
        wait.connection.answer(
            wait.request_id,
            {"epoch": action.epoch, "slices": slices_to_json(action.slices)},
        )

    # ------------------------------------------------------------------ internals

    def _gone(self, event: e.SessionEnded) -> None:
        session = self.sessions.remove(event.session)
        self.ledger.forget(event.session)
        self.busy.pop(event.session, None)
        if session is None:
            return
        self.note("close", session, reason=event.reason)
        self.commit()
        for wait in session.waits.values():
            wait.connection.waiting -= 1
            wait.connection.refuse(
                wait.request_id,
                refused(Refusal(Code.UNKNOWN_SESSION, f"The session has ended: {event.reason}.")),
            )
        session.waits.clear()
        for connection, message in session.take_early():
            connection.refuse(
                message.get("id"),
                refused(Refusal(Code.UNKNOWN_SESSION, f"The session has ended: {event.reason}.")),
            )
        if self.guard is not None:
            self.guard.ended(session, event.reason)
        if session.yielding is not None and not session.yielding[1].done():
            session.yielding[1].cancel()
        if session.agent is not None:
            session.agent.session = None
            session.agent.close()
        self.on_gone(session)
        self.on_population(len(self.sessions))

    def moved(self, device: str) -> None:
        """A process has left this device: what was seen of it before is old."""
        self.changes[device] = self.changes.get(device, 0) + 1
        self.on_change()

    def _changed(self, slices: tuple[Slice, ...]) -> None:
        for piece in slices:
            self.changes[piece.device] = self.changes.get(piece.device, 0) + 1
        if slices:
            self.on_change()

    def _flush_later(self) -> None:
        if self._flush is None and not self.stopped:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_AFTER, self.commit)

    def _schedule(self) -> None:
        """Have a Tick come when the pool wants one."""
        at = None if self.stopped else self.pool.next_wakeup()
        if at == self._wakeup_at and self._wakeup is not None:
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        self._wakeup_at = at
        if at is not None:
            delay = max(0.0, at - self.now())
            self._wakeup = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._wakeup = None
        self._wakeup_at = None
        self.handle(e.Tick(now=self.now()))


def _must_be_written_first(action: e.Action) -> bool:
    """Return whether the journal must know before ``action`` is performed.

    Not so for a hold more or less, nor while a slice is looked for: that is committed when it is
    clear what comes of it, which mostly is one commit for a whole grant.
    """
    if isinstance(action, e.StateChanged):
        return not steady(action) and action.new not in ("queued", "attaching")
    if isinstance(action, e.Attach):
        return bool(action.origin)
    return isinstance(action, (e.Suspend, e.EndSession, e.Resize))


def journaled(session: Session, record: SessionRecord) -> dict[str, Any]:
    """Return what a restart needs of a session."""
    return {
        "record": to_json(record),
        "uid": session.uid,
        "token_digest": session.token_digest,
        "kernel_id": session.kernel_id,
        "pid": session.process.pid if session.process else None,
        "start_time": session.process.start_time if session.process else None,
        "moving": dict(session.moving),
        "frozen": [[process.pid, process.start_time] for process in session.frozen],
        "queued_at": session.queued_at,
    }


def refused(refusal: Refusal) -> RefusedError:
    """Return a pool's refusal as the error that goes over the wire."""
    return RefusedError(
        refusal.message,
        code=refusal.code,
        next_step=refusal.next_step,
        details=refusal.details,
    )
