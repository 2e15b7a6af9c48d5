# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Classes for a session's slice, its wait for a slice, and the late reports of its holds.

Most cells end within milliseconds. Two messages to the broker for each cell would cost more than
the cell gate itself. So the agent reports a hold to the broker late. It may do this, because only
the agent decides whether an attached session gives up its slice (in its answer to a ``yield``).
After :data:`BRIEF` seconds, the agent reports each hold that still lasts. If all holds have ended,
the agent reports only the last of them.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, ContextManager, Mapping, NamedTuple

from ..errors import GPUPoolError
from ..protocol import Message
from ..threads import start_thread
from ..units import format_wait

#: Seconds until the agent reports a hold. People do not notice this delay. The idle time-outs start
#: with the report, and they are longer than the delay. But the delay is long enough to save
#: messages: a notebook with many short cells sends only a few reports.
BRIEF = 0.05


class Slice(NamedTuple):
    """Some device memory: the UUID of the device, and the number of bytes."""

    device: str
    bytes: int


def slices_of(message: Mapping[str, Any]) -> tuple[Slice, ...]:
    return tuple(Slice(str(s["device"]), int(s["bytes"])) for s in message.get("slices") or ())


class HoldWait:
    """One hold that waits for its lease.

    ``answer`` is None during the wait. After the wait it is the broker's ``ok``, or the error that
    ended the wait. The link calls ``on_change`` whenever the state of the wait may have changed.
    This call may happen in any thread.
    """

    def __init__(self, hold: str, kind: str, on_change: Callable[[], None]) -> None:
        self.hold = hold
        self.kind = kind
        self.on_change = on_change
        self.since = time.monotonic()
        self.asked = False
        #: The link's count of failed attempts to connect, at the beginning of the wait.
        self.failures = 0
        self.answer: Message | GPUPoolError | None = None


class QueuePlace(NamedTuple):
    """A waiting session's place in the queue; the session with ``position`` 1 is the next.

    ``since`` is the beginning of the wait. ``expected`` is the earliest and the latest time at
    which the wait will probably end. Both are times of ``time.monotonic()``.
    """

    position: int
    length: int
    reason: str
    since: float
    expected: tuple[float, float] | None = None

    def time(self) -> str:
        """Return a text with the time waited so far and the expected time left."""
        return format_wait(time.monotonic() - self.since, self.left())

    def left(self) -> tuple[float, float] | None:
        """Return the shortest and the longest time left, in seconds.

        Return None if the expected times are unknown, or if the latest time has passed.
        """
        if self.expected is None:
            return None
        least, most = (at - time.monotonic() for at in self.expected)
        return (max(0.0, least), most) if most > 0 else None


class CallRefusal(NamedTuple):
    """The broker's refusal of a CUDA call.

    ``what`` is ``attach`` if the call needed a slice, and ``grow`` if it needed a larger slice.
    """

    what: str
    code: str
    message: str
    next_step: str


class LateReports:
    """The holds that the broker does not know yet, and the thread that reports them.

    Parameters
    ----------
    lock:
        The link's lock. The caller must hold this lock, except for :meth:`close`. The reporting
        thread holds this lock while it calls ``lasting`` and ``over``.
    lasting, over:
        Functions that get a hold's id and kind: ``lasting`` reports a hold that continues, ``over``
        reports a hold that has ended.
    """

    def __init__(
        self,
        lock: ContextManager[Any],
        lasting: Callable[[str, str], None],
        over: Callable[[str, str], None],
    ) -> None:
        self._lock = lock
        self._tell_lasting = lasting
        self._tell_over = over
        self._holds: dict[str, str] = {}
        #: The id and kind of the last hold that ended before it was reported.
        self._over: tuple[str, str] | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, hold: str, kind: str) -> None:
        """Note that a hold begins; the thread soon reports it if it still lasts."""
        self._holds[hold] = kind
        if not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gpupool-reports", daemon=True
                )
                start_thread(self._thread)

    def end(self, hold: str) -> bool:
        """Record that a hold ends; return True if the broker does not know this hold yet."""
        kind = self._holds.pop(hold, None)
        if kind is None:
            return False
        self._over = hold, kind
        return True

    def forget(self) -> None:
        """Drop all reports, because the next ``hello`` message lists the holds."""
        self._holds.clear()
        self._over = None

    def send(self) -> None:
        """Send the reports now."""
        holds, self._holds = self._holds, {}
        over, self._over = self._over, None
        for hold, kind in holds.items():
            self._tell_lasting(hold, kind)
        if over is not None and not holds:
            self._tell_over(*over)

    def close(self) -> None:
        """End the thread without sending the remaining reports."""
        self._closed.set()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed.wait(BRIEF):
                return
            with self._lock:
                self._wanted.clear()
                self.send()
