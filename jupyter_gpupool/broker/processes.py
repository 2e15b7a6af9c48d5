# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The moment at which a process ends, on the event loop."""

from __future__ import annotations

import asyncio
import os
from typing import Callable

from ..procfs import ProcessId, alive, open_pidfd

#: Seconds between looks at ``/proc`` where the kernel has no pidfd (before Linux 5.3).
POLL = 0.25


class Death:
    """Calls ``on_death`` once, from the event loop, when ``process`` has ended.

    Not to be confused with the agent's connection: a child of the kernel can keep that open.
    """

    def __init__(self, process: ProcessId, on_death: Callable[[], None]) -> None:
        self.process = process
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._descriptor = open_pidfd(process.pid)
        if self._descriptor is not None:
            self._loop.add_reader(self._descriptor, self._ended)
        else:
            self._timer = self._loop.call_later(POLL, self._look)
        # The pid may have been reused between its identification and pidfd_open.
        if not alive(process):
            self._loop.call_soon(self._ended)

    def close(self) -> None:
        """Stop watching. Safe to call twice."""
        self._on_death = _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def _look(self) -> None:
        if alive(self.process):
            self._timer = self._loop.call_later(POLL, self._look)
        else:
            self._ended()

    def _ended(self) -> None:
        report, self._on_death = self._on_death, _nothing
        self.close()
        report()


def _nothing() -> None:
    pass
