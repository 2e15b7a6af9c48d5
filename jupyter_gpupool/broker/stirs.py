# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Changes of a session that the journal does not have, for readers of the status.

The end of a cell, its beginning, and news of a wait write no row: there are too many, and nothing
is lost with them. But a page that shows the session should look again soon. So each such change is
told once, when the session has been quiet for ``SETTLED`` seconds: cells that follow each other at
once are no news.
"""

from __future__ import annotations

import asyncio
from typing import Callable

#: An agent reports short cells every 0.05 s (``kernel/holds.py``): a longer pause is the end.
SETTLED = 0.06


class Stirs:
    """Calls its readers with the id of a session that has changed and is quiet now."""

    def __init__(self) -> None:
        self._readers: list[Callable[[str], None]] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def read(self, reader: Callable[[str], None]) -> None:
        """Call ``reader`` from now on."""
        self._readers.append(reader)

    def note(self, session: str) -> None:
        """Note a change."""
        self.forget(session)
        loop = asyncio.get_running_loop()
        self._timers[session] = loop.call_later(SETTLED, self._tell, session)

    def forget(self, session: str) -> None:
        """Drop a change that is not told yet. Safe to call without one."""
        timer = self._timers.pop(session, None)
        if timer is not None:
            timer.cancel()

    def stop(self) -> None:
        """Drop all changes: the broker ends."""
        for session in [*self._timers]:
            self.forget(session)

    def _tell(self, session: str) -> None:
        self._timers.pop(session, None)
        for reader in self._readers:
            reader(session)
