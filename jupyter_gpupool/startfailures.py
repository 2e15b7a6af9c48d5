# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Outcomes of attempts to restart a broker: when to try again, and when to give up.

Each process that wants to restart the broker reads and writes these outcomes, in a file beside the
start record. The module uses only the standard library, because kernels also use it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Sequence

from .errors import GPUPoolError
from .startrecord import StartRecord, read_private, write_private

#: After this many failed starts in a row, callers get an error and no longer wait for a broker.
ATTEMPTS = 3

#: If ``MOST_DEATHS`` brokers in a row crash, or die before they have served a kernel, and all
#: of them within ``WINDOW`` seconds, callers get an error, and the next start must wait.
MOST_DEATHS, WINDOW = 10, 600.0

#: The pause in seconds before the next start. The index is the number of recent brokers that
#: crashed, or died before they served a kernel. The longest pause is only 5 s: if another program
#: kills the brokers, a kernel must not wait long for the next one.
DEATH_PAUSES = (0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 5.0)

#: If there were at least this many starts in the last WINDOW seconds, messages to waiting kernels
#: mention the starts.
MANY_STARTS = 3

#: The file keeps the times of at most this many starts.
_MOST_STARTS = 200

#: The seconds from the last failure to the next attempt. The index is the number of failures in a
#: row.
PAUSES = (0.0, 0.5, 2.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True)
class Failures:
    """The outcomes of the latest attempts to restart the broker."""

    #: Starts that failed in a row.
    count: int = 0
    #: When a process may next try to start the broker (``time.time()``).
    due: float = 0.0
    message: str = ""
    next_step: str = ""
    #: The code of the last failure.
    code: str = ""
    #: The times of the broker's restarts in the last :data:`WINDOW` seconds.
    starts: tuple[float, ...] = ()
    #: The deaths of useless brokers (:attr:`StartRecord.useless`), and of brokers that were killed
    #: while they started: the times at which a process noticed these deaths. If any other broker
    #: dies, the list becomes empty.
    deaths: tuple[float, ...] = ()
    #: The pid of the broker whose death was counted last.
    counted: int = 0

    @property
    def given_up(self) -> bool:
        """Whether callers get the last error at once, without another attempt at a start."""
        return self.count >= ATTEMPTS

    @property
    def sentence(self) -> str:
        """The message for kernels that wait for the broker."""
        return f"The GPU pool's broker ended and cannot be started again: {self.message}"

    def pause(self, now: float) -> float:
        """Return for how many seconds failed starts still delay the next attempt."""
        # If the clock was set back, ``due`` is too far away. That must not lengthen the pause.
        return min(_pause(self.count), max(0.0, self.due - now))

    def delay(self, now: float) -> float:
        """Return the seconds to wait before the next attempt, after failed starts and deaths."""
        deaths = min(len(_recent(self.deaths, now)), len(DEATH_PAUSES) - 1)
        return max(self.pause(now), DEATH_PAUSES[deaths])

    def often(self, now: float) -> str:
        """Return in words how often the broker was restarted lately; "" if only a few times."""
        starts = len(_recent(self.starts, now))
        if starts < MANY_STARTS:
            return ""
        return f"already restarted {starts} times in the last {WINDOW / 60:g} minutes"


def failures_path(socket: Path) -> Path:
    """Return the file with the outcomes of the latest attempts."""
    return socket.with_name(socket.name + ".start.failed")


def read_failures(socket: Path) -> Failures:
    """Return the outcomes of the latest attempts; no outcomes if the file cannot be trusted."""
    try:
        found = read_private(failures_path(socket)) or {}
        return Failures(
            count=int(found.get("count", 0)),
            due=float(found.get("due", 0.0)),
            message=str(found.get("message", "")),
            next_step=str(found.get("next_step", "")),
            code=str(found.get("code", "")),
            starts=tuple(float(at) for at in found.get("starts", ())),
            deaths=tuple(float(at) for at in found.get("deaths", ())),
            counted=int(found.get("counted", 0)),
        )
    except (GPUPoolError, TypeError, ValueError, OverflowError):
        return Failures()


def note_failure(
    socket: Path,
    before: Failures,
    message: str,
    next_step: str,
    *,
    code: str = "",
    final: bool = False,
) -> Failures:
    """Write that a start has failed; return the outcomes so far.

    ``final`` is true if another attempt would fail in the same way.
    """
    count = max(before.count + 1, ATTEMPTS if final else 0)
    due = time.time() + _pause(count)
    now = replace(before, count=count, due=due, message=message, next_step=next_step, code=code)
    # If the disk is full, this failure is not written. Other callers then wait for as long as a
    # start may take.
    with contextlib.suppress(OSError):
        write_private(failures_path(socket), asdict(now))
    return now


def _pause(count: int) -> float:
    """Return the seconds to wait after ``count`` failures in a row."""
    return PAUSES[min(count, len(PAUSES) - 1)]


def note_start(socket: Path, before: Failures) -> None:
    """Write that a start has succeeded, and when."""
    now = time.time()
    starts = (*_recent(before.starts, now), now)[-_MOST_STARTS:]
    known = Failures(starts=starts, deaths=before.deaths, counted=before.counted)
    with contextlib.suppress(OSError):
        write_private(failures_path(socket), asdict(known))


def note_death(socket: Path, before: Failures, record: StartRecord) -> Failures:
    """Write that the broker of ``record`` has died; return the outcomes so far.

    A second call for the same broker changes nothing.
    """
    if record.pid == before.counted:
        return before
    now = time.time()
    deaths = (*_recent(before.deaths, now), now)[-MOST_DEATHS:] if record.useless else ()
    known = replace(before, deaths=deaths, counted=record.pid)
    with contextlib.suppress(OSError):
        write_private(failures_path(socket), asdict(known))
    return known


def note_killed(socket: Path, before: Failures) -> None:
    """Write that a broker was killed while it started."""
    now = time.time()
    known = replace(before, deaths=(*_recent(before.deaths, now), now)[-MOST_DEATHS:])
    with contextlib.suppress(OSError):
        write_private(failures_path(socket), asdict(known))


def too_often(before: Failures) -> bool:
    """Return whether MOST_DEATHS recent brokers in a row crashed, or never served a kernel.

    While callers get the error about these deaths, the answer is False. After the pause that
    follows the error, one more broker may then start.
    """
    return not before.given_up and len(_recent(before.deaths, time.time())) >= MOST_DEATHS


def _recent(times: Sequence[float], now: float) -> tuple[float, ...]:
    return tuple(at for at in times if 0 <= now - at < WINDOW)


def forgive(socket: Path) -> None:
    """Write that a broker serves: earlier failed starts no longer count.

    Raises
    ------
    OSError
        If the file cannot be written.
    """
    known = read_failures(socket)
    if known.count:
        served = replace(known, count=0, due=0.0, message="", next_step="", code="")
        write_private(failures_path(socket), asdict(served))
