# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Growth that was just refused need not be asked for again before anything has changed.

Programs that look for the largest size that fits, or that retry, ask hundreds of times. So the page
says from how many bytes in all a growth is refused, and the guard refuses it without a message. The
pool decides by its events alone: the figure is withdrawn before the next one is handled, whatever
it is. So the guard never refuses what the pool would have granted. (It also ends by itself: a
broker that was killed withdraws nothing, and a later cell is to get a sentence of its own.)
"""

from __future__ import annotations

import time

from ..errors import Code
from .pages import Pages
from .sessions import Session

#: Seconds after which the broker is asked again in any case.
LASTS = 1.0

#: Refusals that come of the figures. Another may be over at once, without an event.
CODES = (Code.LIMIT, Code.NO_MEMORY, Code.QUOTA)


class Vain:
    """The sessions whose pages say that asking is pointless."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        #: By session: bytes in all from which its growth is refused, by place of the device.
        self._totals: dict[Session, dict[int, int]] = {}

    def refused(self, session: Session, ordinal: int, total: int) -> None:
        """A growth to ``total`` bytes of its device number ``ordinal`` was refused just now."""
        totals = self._totals.setdefault(session, {})
        totals[ordinal] = min(total, totals.get(ordinal, total))
        row = [totals.get(place, 0) for place in range(max(totals) + 1)]
        self._pages.set_vain(session, row, time.monotonic_ns() + int(LASTS * 1e9))

    def withdraw(self) -> None:
        """Something is about to change."""
        if self._totals:
            told, self._totals = self._totals, {}
            for session in told:
                self._pages.set_vain(session, (), 0)
