# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Give each event to the pool, write the pool's decision to the journal, and act on it.

The order in :meth:`Runner.handle` matters: the runner commits the pool's decision to the journal
*before* it acts on the decision. If the broker is killed, the journal shows the next broker every
action that the killed broker had begun (see ``recovery``). One action is an exception: an attach
of a session without suspended state needs no call of the driver, so the runner commits it together
with its result, before it changes the page and answers. This module also sends the pool its
``Tick``, and it imports all parts that perform actions.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Callable

from ..errors import Code
from ..pool import events as e
from ..pool.model import Refusal, SessionRecord
from ..states import ATTACHED, WAITING
from .core import Core, refused
from .gpu.actions import DeviceActions
from .gpu.health import SuddenEnds
from .gpu.monitor import Monitor
from .hour import HourBook
from .messages.guard import GuardMessages
from .pages import activity
from .sessions import LiveSession
from .store.records import slices_to_json
from .store.usage import UsageBook

#: Events that only report measured memory. The runner does not call ``changed`` after them, because
#: a measurement itself changes neither what a session has nor what it waits for.
_SAMPLES = (e.DeviceMemorySeen, e.HostMemorySeen)


class Runner:
    """Gives events to the pool and performs the actions that the pool returns.

    No other part of the broker gives events to the pool.
    """

    def __init__(
        self,
        core: Core,
        *,
        actions: DeviceActions,
        guard: GuardMessages,
        monitor: Monitor,
        sudden_ends: SuddenEnds,
        usage: UsageBook,
        hour: HourBook,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self._core = core
        self._actions = actions
        self._guard = guard
        self._monitor = monitor
        self._sudden_ends = sudden_ends
        self._usage = usage
        self._hour = hour
        self._changed = changed
        self._rows = TransitionRows(core)
        self._events: deque[e.Event] = deque()
        self._handling = False
        self._stopped = False
        #: Whether a session's state has changed since the last commit, other than between active
        #: and idle. The runner then commits before the event loop runs another task.
        self._owed = False
        #: The sessions whose agents do not know their changed lease yet. By session: the reason of
        #: the last change.
        self._news: dict[str, str] = {}
        self._wakeup: asyncio.TimerHandle | None = None
        self._wakeup_at: float | None = None

    def handle(self, event: e.Event) -> None:
        """Give the pool an event and perform what the pool decides; see :class:`core.Core`."""
        self._core.touched()
        self._events.append(event)
        if self._handling or self._stopped:
            return
        self._handling = True
        try:
            while self._events:
                self._step(self._events.popleft())
        finally:
            self._handling = False
            if self._owed:
                self._commit()
            self._tell_agents()
        self._schedule()

    def stop(self) -> None:
        """Handle no more events. The journal keeps the state of the actions under way."""
        self._stopped = True
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._core.stop()

    # ------------------------------------------------------------------ the loop

    def _step(self, event: e.Event) -> None:
        self._guard.about_to_change()
        if isinstance(event, e.SessionEnded):
            self._sudden_ends.ending(event)
        actions = self._core.pool.handle(event)
        if named := getattr(event, "session", ""):
            self._core.mark(named)
        urgent = waits = queue = False
        for action in actions:
            if action.session:
                self._core.mark(action.session)
            if isinstance(action, e.StateChanged):
                self._core.set_state(action.session, action.new)
                self._core.moved([piece.device for piece in action.slices])
                self._rows.changed(action, event)
                self._usage.changed(action)
                waits |= action.new == "queued"
                queue |= "queued" in (action.old, action.new)
                self._owed |= not steady(action)
                if steady(action):
                    self._core.stirs.note(action.session)
            urgent |= _must_be_written_first(action)
        if waits:
            self._hour.count_queue()
        if queue:
            self._core.stirs.note_queue()
        if urgent:
            self._commit()
        elif self._core.marked:
            self._core.flush_later()
        # The broker writes the pages before it performs the actions, because no process may go on
        # before its page shows the new state.
        self._update_pages(actions, event)
        if self._changed is not None and not isinstance(event, _SAMPLES):
            self._changed()
        for action in actions:
            self._perform(action)
        if isinstance(event, e.SessionEnded):
            self._gone(event)
        if isinstance(event, (e.SessionOpened, e.SessionEnded, e.Recovered)):
            self._monitor.wake()

    def _commit(self) -> None:
        self._owed = False
        self._core.commit()

    def _update_pages(self, actions: list[e.Action], event: e.Event) -> None:
        names = [a.session for a in actions if isinstance(a, (e.StateChanged, e.Resize))]
        if isinstance(event, e.RequestChanged):
            names.append(event.session)
        for name in dict.fromkeys(names):
            session = self._core.sessions.find(name)
            if session is not None:
                self._guard.changed(session)

    def _perform(self, action: e.Action) -> None:
        match action:
            case e.Answer():
                self._core.answered(action.rid, action.refusal, action.note)
            case e.Log():
                level = logging.getLevelName(action.level.upper())
                self._core.log.log(level, "%s: %s", action.code, action.message)
            case e.Attach():
                self._core.moved([piece.device for piece in action.slices])
                self._rows.attach_begins(action.session)
                self._actions.attach(action)
            case e.Suspend():
                self._core.moved([piece.device for piece in action.slices])
                self._actions.suspend(action)
            case e.Warn():
                self._warn(action)
            case e.EndSession():
                self._actions.end_session(action)
            case _:
                session = self._core.sessions.find(action.session)
                if session is not None:
                    self._tell(session, action)

    def _warn(self, action: e.Warn) -> None:
        session = self._core.sessions.find(action.session)
        if session is not None:
            session.send({"type": "notice", "message": action.message})
            detail = {"stage": action.stage, "ends_at": action.ends_at}
            self._core.note("warn", session, reason=action.message, detail=detail)

    def _tell(self, session: LiveSession, action: e.Action) -> None:
        """Tell the processes of a session about an action that concerns them."""
        match action:
            case e.StateChanged():
                # If only a hold began or ended, the agent needs no message: it knows which of its
                # cells run.
                if not steady(action):
                    self._news[session.id] = action.reason
            case e.Resize():
                self._news[session.id] = "resized"
            case e.HoldGranted(hold=activity.DEVICE_HOLD):
                self._guard.granted(session, action.epoch)
            case e.HoldRefused(hold=activity.DEVICE_HOLD):
                self._guard.refused(session, action.refusal)
            case e.HoldGranted():
                wait = session.waits.pop(action.hold, None)
                if wait is not None:  # if it is None, no request waits for an answer
                    slices = slices_to_json(action.slices)
                    wait.answer({"epoch": action.epoch, "slices": slices})
            case e.HoldRefused():
                wait = session.waits.pop(action.hold, None)
                if wait is not None:
                    wait.refuse(refused(action.refusal))
                    self._core.note("refuse", session, reason=action.refusal.message,
                              detail={"what": "hold", "code": action.refusal.code})  # fmt: skip
            case e.QueueMoved():
                self._core.stirs.note(session.id)
                session.send(
                    {
                        "type": "queue",
                        "position": action.position,
                        "length": action.length,
                        "waited": action.waited,
                        "left": action.expected,
                        "reason": action.reason,
                    }
                )
            case e.Wanted():
                session.wanted = action.epoch
                if session.agent is not None:
                    session.agent.send({"type": "wanted"})
            case _:
                raise AssertionError(f"an action that no code performs: {action!r}")

    def _tell_agents(self) -> None:
        """Send each agent its changed lease once, after the pool has handled all events."""
        news, self._news = self._news, {}
        for name, why in news.items():
            session = self._core.sessions.find(name)
            if session is not None:
                self._core.push_lease(session, why)

    def _gone(self, event: e.SessionEnded) -> None:
        session = self._core.sessions.remove(event.session)
        self._rows.forget(event.session)
        self._core.set_state(event.session, "ended")
        if session is None:
            return
        self._core.note("close", session, reason=event.reason)
        self._core.commit()
        ended = refused(Refusal(Code.UNKNOWN_SESSION, f"The session has ended: {event.reason}."))
        for wait in session.waits.values():
            wait.refuse(ended)
        session.waits.clear()
        for connection, message in session.take_early():
            connection.refuse(message.get("id"), ended)
        self._guard.ended(session, event.reason)
        if session.yielding is not None and not session.yielding[1].done():
            session.yielding[1].cancel()
        session.disconnect_agent()
        session.disconnect_members()
        self._actions.end_frozen(session.id, session.frozen)

    # ------------------------------------------------------------------ the pool's clock

    def _schedule(self) -> None:
        """Set the timer for the next ``Tick``, at the time that the pool asked for."""
        at = None if self._stopped else self._core.pool.next_wakeup()
        if at == self._wakeup_at and self._wakeup is not None:
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup = None
        self._wakeup_at = at
        if at is not None:
            delay = max(0.0, at - self._core.now())
            self._wakeup = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._wakeup = None
        self._wakeup_at = None
        self.handle(e.Tick(now=self._core.now()))


def steady(change: e.StateChanged) -> bool:
    """Return True if a hold began or ended and the lease did not change."""
    return {change.old, change.new} == ATTACHED


def _must_be_written_first(action: e.Action) -> bool:
    """Return whether the broker must commit to the journal before it performs ``action``.

    A change of a session's state needs no such commit if only a hold began or ended, or if the new
    state is ``queued`` or ``attaching``. The broker commits ``queued`` and ``attaching`` together
    with the session's next state, so a grant usually takes only one commit.
    """
    if isinstance(action, e.StateChanged):
        return not steady(action) and action.new not in WAITING
    if isinstance(action, e.Attach):
        return bool(action.origin)
    return isinstance(action, (e.Suspend, e.EndSession, e.Resize))


class TransitionRows:
    """Writes transitions as rows of the journal, for reports and timelines.

    Every change of a session's state gets a row ``state``, except a change between active and idle.
    After an attach, each device gets a row: ``attach``, or ``resume`` if suspended state came back.
    If the state came from another device, a row ``migrate`` follows. After a suspend, each device
    gets a row ``suspend``. The other rows name no device: ``preempt`` (before ``suspend``, if the
    session was in use), ``release`` (the session gave back a slice without state), ``queue`` and
    ``refuse``.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        #: For each session with an attach under way: its record when the attach began.
        self._before: dict[str, SessionRecord] = {}

    def attach_begins(self, session: str) -> None:
        """Keep the session's record: after the attach, it shows where the state was before."""
        record = self._core.record(session)
        if record is not None:
            self._before[session] = record

    def forget(self, session: str) -> None:
        """Forget a session that has ended."""
        self._before.pop(session, None)

    def changed(self, change: e.StateChanged, cause: e.Event) -> None:
        """Write a transition and its rows for devices; ``cause`` is the event that caused it."""
        session = self._core.sessions.find(change.session)
        if session is None or steady(change):
            return
        record = self._core.record(change.session)
        first = change.slices[0] if change.slices else None
        group = {"group": session.owner.group} if session.owner.group else {}
        busy = {"busy_seconds": round(session.use.busy_seconds, 3)} if session.page else {}
        self._core.note(
            "state",
            session,
            device=first.device if first else None,
            bytes=sum(s.bytes for s in change.slices) or None,
            reason=change.reason,
            detail={
                "old": change.old,
                "new": change.new,
                "epoch": change.epoch,
                "suspended_bytes": record.suspended_bytes if record else 0,
                **group,
                **busy,
            },
        )
        if change.old == "attaching" and change.new in ATTACHED:
            self._attached(session, change, cause)
        elif change.old == "detaching":
            self._suspended(session, change, cause)
        if change.new == "queued":
            session.queued_at = change.now
            self._core.note("queue", session, reason=change.reason)

    def _attached(self, session: LiveSession, change: e.StateChanged, cause: e.Event) -> None:
        waited = max(0.0, change.now - session.queued_at) if session.queued_at else 0.0
        session.queued_at = 0.0
        before = self._before.pop(session.id, None)
        origins = [piece.device for piece in before.suspended] if before is not None else []
        for index, piece in enumerate(change.slices):
            self._core.note(
                "resume" if origins else "attach",
                session,
                device=piece.device,
                bytes=piece.bytes,
                seconds=waited,
                reason=change.reason,
                detail={"driver_seconds": getattr(cause, "seconds", 0.0)},
            )
            if origins and origins[index] != piece.device:
                self._core.note("migrate", session, device=piece.device, bytes=piece.bytes,
                          detail={"from": origins[index]})  # fmt: skip

    def _suspended(self, session: LiveSession, change: e.StateChanged, cause: e.Event) -> None:
        if isinstance(cause, e.SuspendDone):
            record = self._core.record(session.id)
            if record is not None and record.preempted:
                self._core.note("preempt", session, reason=record.preempted)
            for piece in cause.suspended:
                self._core.note("suspend", session, device=piece.device, bytes=piece.bytes,
                          seconds=cause.seconds, reason=change.reason)  # fmt: skip
            if not cause.suspended:
                self._core.note("release", session, reason=change.reason)
        elif isinstance(cause, e.SuspendRefused):
            self._core.note("refuse", session, reason=cause.message,
                      detail={"what": "suspend", "kind": cause.kind})  # fmt: skip
