# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Follows the time of day: applies each change of schedule once, on time, and notices clock steps.

The timer that sends the pool a ``Tick`` is in :mod:`.runner`.

The pool's clock counts only the seconds for which the machine is awake. Schedules and the windows
of daily budgets use the time of day, which jumps when somebody sets the clock or the machine
sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Callable

from .configuration import Configuration
from .core import Core

#: The longest time in seconds between two checks of the time of day. A timer does not count the
#: time for which the machine sleeps. So only a check of the time of day shows that the machine has
#: slept, or that somebody has set the clock.
LOOK = 15.0

#: A timer may fire a little before a change of schedule. The timekeeper then sets the timer again,
#: for at least this many seconds.
LEAST = 0.01

#: The key in the journal's metadata for the schedules that were last in force.
IN_FORCE = "schedules"


class Timekeeper:
    """Follows the calendar and the clock.

    Parameters
    ----------
    apply:
        Tells the rest of the broker that ``configuration.settings`` have changed.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        apply: Callable[[], None],
        log: logging.Logger,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._apply = apply
        self._log = log
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._noted = core.journal.meta(IN_FORCE)

    def start(self) -> None:
        """Follow the calendar from now on. Call this again after the configuration has changed."""
        self.close()
        self._note()
        self._look()

    def close(self) -> None:
        """Stop: change no setting from now on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Apply the schedules that are in force now, and set a timer for the next change."""
        self._timer = None
        # First tell the pool about a step of the clock. The pool needs the correct time of day to
        # compute the times of the new rules.
        self._core.follow_clock()
        now = self._clock()
        if self._configuration.follow_calendar(now):
            self._note()
            self._apply()
        change = self._configuration.timetable.next_change(now)
        wait = LOOK if change is None else min(LOOK, max(LEAST, change[0] - self._clock()))
        self._timer = asyncio.get_running_loop().call_later(wait, self._look)

    def _names(self) -> str:
        return ", ".join(self._configuration.timetable.names(self._configuration.rules))

    def _note(self) -> None:
        """If other schedules are in force now, write their names to the log and the journal."""
        names = self._names()
        if names == self._noted:
            return
        self._noted = names
        self._core.journal.remember(IN_FORCE, names)
        text = f"In force: {names}" if names else "No schedule is in force"
        self._core.note("schedule", reason=text)
        self._log.info("%s", text)
