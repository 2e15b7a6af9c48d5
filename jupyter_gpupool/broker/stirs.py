# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Changes of a session that the journal does not have, for readers of the status.

The journal gets no row when a cell begins or ends, or when the place of a waiting session changes.
There are too many of these changes, and no report needs the rows. But a page that shows the session
should soon ask for the status again. So the broker tells readers of such a change once, when the
session has been quiet for ``SETTLED`` seconds. Several cells in quick succession are one change.

A change of the queue may concern every idle session, because other sessions may now begin or cease
to wait for its slice. The broker tells each reader that shows idle sessions only once, even if the
reader shows many of them. Each of these readers then asks for a status, so with many readers the
broker pauses before it tells them of the next change.
"""

from __future__ import annotations

import asyncio
from typing import Callable

#: An agent reports short cells every 0.05 s (``kernel/holds.py``). A longer pause means that the
#: cells have ended.
SETTLED = 0.06

#: Each reader that the broker tells of a change of the queue then asks for a status. So the broker
#: tells at most this many readers in a second, and makes a pause of at most LONGEST_PAUSE seconds:
#: readers of idle slices ask once a second anyway.
TOLD_A_SECOND = 64
LONGEST_PAUSE = 1.0


class Stirs:
    """Calls its readers with the id of a session that has changed and is quiet now."""

    def __init__(self) -> None:
        self._readers: list[Callable[[str], None]] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._queue_readers: list[Callable[[], int]] = []
        self._queue_timer: asyncio.TimerHandle | None = None
        #: The loop time before which the broker tells no reader of a further change of the queue.
        self._queue_from = 0.0

    def read(self, reader: Callable[[str], None]) -> None:
        """Call ``reader`` from now on."""
        self._readers.append(reader)

    def read_queue(self, reader: Callable[[], int]) -> None:
        """Call ``reader`` after each change of the queue from now on.

        ``reader`` returns the number of connections that it has told.
        """
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
        """Drop a change that the readers do not know yet. Safe to call if there is none."""
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
