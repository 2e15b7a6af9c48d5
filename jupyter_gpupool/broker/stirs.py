# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Changes of a session that the journal does not have, for readers of the status.

The end of a cell, its beginning, and news of a wait write no row: there are too many, and nothing
is lost with them. But a page that shows the session should look again soon. So the broker tells
readers of such a change once, when the session has been quiet for ``SETTLED`` seconds: cells in
quick succession are one change.

A change of the queue may concern every idle session, because others may now begin or cease to wait
for its slice. The broker tells each reader that shows idle sessions once, however many it shows.
Each of them then asks for a status, so with many readers the broker pauses before it tells them of
the next change.
"""

from __future__ import annotations

import asyncio
from typing import Callable

#: An agent reports short cells every 0.05 s (``kernel/holds.py``): a longer pause is the end.
SETTLED = 0.06

#: Readers that may be told of changes of the queue in a second, each of which then asks for a
#: status, and the longest pause: readers of idle slices ask once a second anyway.
TOLD_A_SECOND = 64
LONGEST_PAUSE = 1.0


class Stirs:
    """Calls its readers with the id of a session that has changed and is quiet now."""

    def __init__(self) -> None:
        self._readers: list[Callable[[str], None]] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._queue_readers: list[Callable[[], int]] = []
        self._queue_timer: asyncio.TimerHandle | None = None
        #: Before this time of the loop no change of the queue is told.
        self._queue_from = 0.0

    def read(self, reader: Callable[[str], None]) -> None:
        """Call ``reader`` from now on."""
        self._readers.append(reader)

    def read_queue(self, reader: Callable[[], int]) -> None:
        """Call ``reader`` from now on after changes of the queue; it returns how many it told."""
        self._queue_readers.append(reader)

    def note(self, session: str) -> None:
        """Note a change."""
        self.forget(session)
        loop = asyncio.get_running_loop()
        self._timers[session] = loop.call_later(SETTLED, self._tell, session)

    def note_queue(self) -> None:
        """Note a change of the queue."""
        if self._queue_timer is None:
            loop = asyncio.get_running_loop()
            at = max(loop.time() + SETTLED, self._queue_from)
            self._queue_timer = loop.call_at(at, self._tell_queue)

    def forget(self, session: str) -> None:
        """Drop a change that is not told yet. Safe to call without one."""
        timer = self._timers.pop(session, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """Drop all changes: the broker ends."""
        for session in [*self._timers]:
            self.forget(session)
        if self._queue_timer is not None:
            self._queue_timer.cancel()
            self._queue_timer = None

    def _tell_queue(self) -> None:
        self._queue_timer = None
        told = sum(reader() for reader in self._queue_readers)
        pause = min(told / TOLD_A_SECOND, LONGEST_PAUSE)
        self._queue_from = asyncio.get_running_loop().time() + pause

    def _tell(self, session: str) -> None:
        self._timers.pop(session, None)
        for reader in self._readers:
            reader(session)
