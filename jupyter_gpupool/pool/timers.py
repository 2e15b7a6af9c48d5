# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""When the clock alone changes something: one alarm per session, in a heap.

A session's alarm mostly moves to later (every cell postpones the idle time-out), so an alarm that
goes off early is set anew and one that must come earlier is added: the heap never needs a search.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush

from .lease import Session


class Timers:
    """The alarms of all sessions."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Session]] = []
        self._count = 0

    def set(self, session: Session, at: float) -> None:
        """Let ``session`` be due at ``at`` and not before; ``math.inf`` for never."""
        session.wake = at
        if at < session.timer:
            session.timer = at
            self._count += 1
            heappush(self._heap, (at, self._count, session))

    def due(self, now: float) -> list[Session]:
        """Return the sessions that are due by ``now``, each once, earliest first."""
        found: list[Session] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            at, _, session = heappop(heap)
            if at != session.timer:
                continue
            session.timer = math.inf
            if session.wake <= now:
                session.wake = math.inf
                found.append(session)
            elif session.wake < math.inf:
                self.set(session, session.wake)
        return found

    def next(self) -> float | None:
        """Return when the next session is due, None if no clock is needed."""
        heap = self._heap
        while heap:
            at, _, session = heap[0]
            if at == session.timer and at == session.wake:
                return at
            heappop(heap)
            if at == session.timer:
                session.timer = math.inf
                if session.wake < math.inf:
                    self.set(session, session.wake)
        return None

    def trim(self, sessions: int) -> None:
        """Drop alarms that were overtaken, once they outnumber the sessions."""
        if len(self._heap) > 4 * sessions + 64:
            self._heap = [item for item in self._heap if item[0] == item[2].timer]
            heapify(self._heap)

    def __len__(self) -> int:
        return len(self._heap)
