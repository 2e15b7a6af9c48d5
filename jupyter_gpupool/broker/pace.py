# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Long work on the event loop in short parts, and how often somebody may ask.

Between two parts the loop answers requests. A look at a thousand sessions takes tens of
milliseconds of Python: in one piece, a kernel that asks for a slice meanwhile waits for all of it.
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


class Bucket:
    """A token bucket that may be overdrawn by one request.

    Parameters
    ----------
    rate, size:
        Points a second, and the most that it holds.
    """

    __slots__ = ("_at", "_left", "rate", "size")

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate, self.size = rate, size
        self._left, self._at = size, now

    def left(self, now: float) -> float:
        """Return the points in it; below zero it is overdrawn."""
        self._left = min(self.size, self._left + (now - self._at) * self.rate)
        self._at = now
        return self._left

    def pay(self, points: float, now: float) -> None:
        """Take points out."""
        self._left = self.left(now) - points

    def seconds_until(self, points: float, now: float) -> float:
        """Return the seconds until it holds ``points``."""
        return max(0.0, (points - self.left(now)) / self.rate)
