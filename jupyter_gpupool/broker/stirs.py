# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tells readers of the status about changes for which the journal gets no row.

The journal gets no row when a cell begins or ends, or when the place of a waiting session changes.
There are too many of these changes, and no report needs the rows. But a page that shows the session
should soon ask for the status again. So the broker tells the page about the change as soon as the
session has been quiet for ``SETTLED`` seconds. Several cells in quick succession count as one
change.

A change of the queue may concern every idle session, because other sessions may start or stop
waiting for the idle session's slice. Each reader that shows idle sessions gets one message, even if
it shows many idle sessions. Each reader then asks for a status. So, after a message to many
readers, the broker pauses before it tells them about the next change.
"""

from __future__ import annotations

import asyncio
from typing import Callable

#: After this many seconds without a change, a session counts as quiet. While short cells run one
#: after the other, an agent reports every 0.05 s (``kernel/holds.py``). So a longer pause means
#: that the cells have ended.
SETTLED = 0.06

#: A reader that learns of a change of the queue asks for a status. So the broker tells at most
#: TOLD_A_SECOND readers per second: after each change of the queue, it pauses before it tells the
#: next change. A pause has at most LONGEST_PAUSE seconds, because readers of idle slices ask once a
#: second anyway.
TOLD_A_SECOND = 64
LONGEST_PAUSE = 1.0


class Stirs:
    """Calls its readers with the id of a session that has changed and is quiet now."""

    def __init__(self) -> None:
        self._readers: list[Callable[[str], None]] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._queue_readers: list[Callable[[], int]] = []
        self._queue_timer: asyncio.TimerHandle | None = None
        #: The loop time at which the broker may tell readers of the next change of the queue.
        self._queue_from = 0.0

    def read(self, reader: Callable[[str], None]) -> None:
        """Call ``reader`` from now on."""
        self._readers.append(reader)

    def read_queue(self, reader: Callable[[], int]) -> None:
        """Call ``reader`` after each change of the queue from now on.

        ``reader`` returns the number of connections to which it has sent a message.
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
        """Drop the session's change if the readers do not know this change yet."""
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
