# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Bounds what one cause can write to the broker's log, so that no client can fill root's disk."""

from __future__ import annotations

import logging
import time
from typing import Callable, Hashable

#: Records of one cause in a PERIOD (seconds): of any, and of those that name a cause or carry a
#: traceback.
MOST, MOST_CAUSED = 100, 10
PERIOD = 60.0

#: Causes remembered at once.
MAX_CAUSES = 1000


class LogLimit(logging.Filter):
    """Lets so many records of each cause pass; the next one that passes says how many did not.

    The cause is the record's text before its arguments are filled in. A record may add to that with
    ``extra={"cause": ...}``: of what one user does wrong, another's record must not be lost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By cause: the begin of its period, records in it, and those of them that were dropped.
        self._causes: dict[Hashable, tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written."""
        now, key = self._clock(), _cause(record)
        begun, count, dropped = self._causes.get(key, (now, 0, 0))
        if now - begun >= PERIOD:
            if dropped:
                record.msg = f"{record.getMessage()} ({dropped} more of these were not logged)"
                record.args = ()
            begun, count, dropped = now, 0, 0
        caused = record.exc_info or getattr(record, "cause", None) is not None
        passes = count < (MOST_CAUSED if caused else MOST)
        if key not in self._causes and len(self._causes) >= MAX_CAUSES:
            self._causes.clear()
        self._causes[key] = begun, count + 1, dropped + (not passes)
        return passes


def _cause(record: logging.LogRecord) -> Hashable:
    text = str(record.msg)[:80]
    if text.startswith("%s") and isinstance(record.args, tuple) and record.args:
        text = str(record.args[0])[:80]
    return record.name, record.levelno, text, getattr(record, "cause", None)
