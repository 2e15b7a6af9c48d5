# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The values of a session's lease and queue, and the holds that the broker has not heard of yet.

Most cells are over in milliseconds, and waking the broker twice for each costs more than the cell
gate itself. While its session is attached the agent alone decides (it answers a ``yield``), so the
broker may hear late: of a cell that lasts, after :data:`BRIEF` seconds; of shorter ones, that there
were some, once in that time for all of them.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, ContextManager, Mapping, NamedTuple

from ..errors import GPUPoolError
from ..protocol import Message

#: Seconds. Far below what a person sees, and the idle time-outs that count from it; long enough
#: for a notebook's stream of short cells to be a few messages.
BRIEF = 0.05


class Slice(NamedTuple):
    """Bytes of device memory on the device with this UUID."""

    device: str
    bytes: int


def slices_of(message: Mapping[str, Any]) -> tuple[Slice, ...]:
    return tuple(Slice(str(s["device"]), int(s["bytes"])) for s in message.get("slices") or ())


class HoldWait:
    """One hold that waits for its lease.

    ``answer`` is None while it waits, then the broker's ``ok``, or the error that ended it.
    ``on_change`` is called, in any thread, whenever something about the wait may have changed.
    """

    def __init__(self, hold: str, kind: str, on_change: Callable[[], None]) -> None:
        self.hold = hold
        self.kind = kind
        self.on_change = on_change
        self.since = time.monotonic()
        self.asked = False
        #: Attempts to reach the broker that had failed when the wait began.
        self.failures = 0
        self.answer: Message | GPUPoolError | None = None


class QueuePlace(NamedTuple):
    """Where a waiting session stands; ``position`` 1 is next, ``eta`` in seconds or None."""

    position: int
    length: int
    eta: float | None
    reason: str


class CallRefusal(NamedTuple):
    """The broker's answer to a CUDA call that got no slice or no memory.

    ``what`` is ``attach`` or ``grow``.
    """

    what: str
    code: str
    message: str
    next_step: str


class LateReports:
    """Holds not told of yet, by id, and the thread that tells of them.

    Parameters
    ----------
    lock:
        The link's. Every method but :meth:`close` is called with it held, and so are the others.
    lasting, over:
        Tell the broker of a hold, by its id and kind: of one that goes on, of one that has ended.
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
        #: The last one that began and ended without a word, with its kind.
        self._over: tuple[str, str] | None = None
        self._wanted = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, hold: str, kind: str) -> None:
        """A hold begins: told of soon, if it lasts."""
        self._holds[hold] = kind
        if not self._wanted.is_set():
            self._wanted.set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gpupool-told", daemon=True)
                self._thread.start()

    def end(self, hold: str) -> bool:
        """A hold ends; return whether it had not been told of, so that its end need not be."""
        kind = self._holds.pop(hold, None)
        if kind is None:
            return False
        self._over = hold, kind
        return True

    def forget(self) -> None:
        """The broker knows all, or need not: it has been told in another way."""
        self._holds.clear()
        self._over = None

    def tell(self) -> None:
        """Tell now."""
        holds, self._holds = self._holds, {}
        over, self._over = self._over, None
        for hold, kind in holds.items():
            self._tell_lasting(hold, kind)
        if over is not None and not holds:
            self._tell_over(*over)

    def close(self) -> None:
        """End the thread; what is untold stays so."""
        self._closed.set()
        self._wanted.set()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            if self._closed.wait(BRIEF):
                return
            with self._lock:
                self._wanted.clear()
                self.tell()
