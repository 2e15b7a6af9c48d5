# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the broker has not been told yet of the holds of an attached session.

Most cells are over in milliseconds, and waking the broker twice for each costs more than the cell
gate itself. While its session is attached the agent alone decides (it answers a ``yield``), so the
broker may hear late: of a cell that lasts, after :data:`BRIEF` seconds; of shorter ones, that there
were some, once in that time for all of them.
"""

from __future__ import annotations

import threading
from typing import Any, Callable, ContextManager

#: Seconds. Far below what a person sees, and the idle time-outs that count from it; long enough
#: for a notebook's stream of short cells to be a few messages.
BRIEF = 0.05


class Untold:
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
