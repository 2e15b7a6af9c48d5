# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""News for waiting sessions: their place in the queue and how long they will probably wait."""

from __future__ import annotations

import math

from .estimate import ESTIMATED, Ahead, moving
from .events import Action, QueueMoved, StateChanged
from .evidence import Expected
from .facts import Facts
from .schedule import Plan
from .session import Session
from .words import Scene, reason

#: If the queue has at most this many sessions, each session gets its news at once.
AT_ONCE = 8
#: In a longer queue, the sessions get news at most once in this many seconds. But a session that
#: begins to wait gets its first news at once.
INTERVAL = 1.0

#: A session gets no news of a new estimate if both of its times differ from the old estimate by at
#: most this part of the remaining wait.
SAME = 0.1


class News:
    """Informs waiting sessions of their place in the queue, as often as is useful."""

    def __init__(self) -> None:
        self._told_at = -INTERVAL
        self._stale = False
        self._ahead: Ahead | None = None

    def next_at(self, plan: Plan) -> float:
        """Return when news for a session is next due; infinity if never."""
        return self._told_at + INTERVAL if self._stale and plan.queue else math.inf

    def run(self, facts: Facts, plan: Plan, actions: list[Action], *, tick: bool) -> list[Action]:
        """Return the news that is due. A session that has just begun to wait always gets news.

        ``actions`` are the actions that follow from the event. News becomes due when a session has
        changed its state, or when the event is a ``tick``.
        """
        steps = [a for a in actions if isinstance(a, StateChanged)]
        joined = {a.session for a in steps if a.new == "queued"}
        self._stale = self._stale or bool(steps) or tick
        if not self._stale:
            return []
        everybody = len(plan.queue) <= AT_ONCE or facts.now >= self._told_at + INTERVAL
        if everybody:
            self._stale = False
            self._ahead = None
            if len(plan.queue) > AT_ONCE:
                self._told_at = facts.now
        news: list[Action] = []
        scene = Scene(facts, plan)
        for position, s in enumerate(plan.queue if everybody or joined else (), 1):
            if everybody or s.id in joined:
                self._expect(facts, plan, s, position)
                news += _tell(facts, plan, s, position, scene)
        return news

    def _expect(self, facts: Facts, plan: Plan, s: Session, position: int) -> None:
        """Note how long ``s`` will probably wait."""
        why, wait = plan.reasons.get(s.id), s.wait
        planned = why is not None and why.rule == "planned"
        if why is None or why.rule not in ESTIMATED:
            wait.expected = None  # the session waits for something other than the leases of others
            return
        last = wait.figures[-1] if wait.figures else None
        if last is None or (last.position, last.moving) != (position, planned):
            if planned:
                last = moving(s, why.devices, position, facts)
            else:
                # In a long queue, a session that joins soon after a simulation gets its figure from
                # this simulation.
                self._ahead = self._ahead or Ahead(facts, plan)
                last = self._ahead.figure(s, position)
            if last is not None:
                wait.figures.append(last)
        found = None if last is None else facts.evidence.expected(last, facts.now)
        if not _same(wait.expected, found, facts.now):
            wait.expected = found


def _same(old: Expected | None, new: Expected | None, now: float) -> bool:
    """Return whether ``new`` is so close to ``old`` that the session needs no news."""
    if old is None or new is None:
        return old is new
    close = SAME * (new.until - now)
    return abs(new.until - old.until) <= close and abs(new.since - old.since) <= close


def _tell(facts: Facts, plan: Plan, s: Session, position: int, scene: Scene) -> list[Action]:
    told = position, len(plan.queue), reason(facts, plan, s, scene), s.wait.expected
    if s.wait.told == told:
        return []
    s.wait.told = told
    left = None if told[3] is None else told[3].left(facts.now)
    waited = max(0.0, facts.now - s.queued_at)
    return [
        QueueMoved(
            session=s.id, position=position, length=told[1], reason=told[2],
            expected=left, waited=waited,
        )
    ]  # fmt: skip
