# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Long work on the event loop, done in short parts: between two parts the loop answers requests.

A look at a thousand sessions takes tens of milliseconds of Python. In one piece, a kernel that asks
for a slice meanwhile waits for all of it.
"""

from __future__ import annotations

import asyncio
import time

#: Seconds that one part may take, and seconds that the loop has for everybody else after it.
PART, REST = 0.0003, 0.001


class Pace:
    """Await :meth:`step` after each item: it pauses when a part has taken long enough."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def step(self) -> None:
        """Pause if this part has taken long enough; otherwise return without a switch."""
        if time.perf_counter() - self._began >= PART:
            await asyncio.sleep(REST)
            self._began = time.perf_counter()
