# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ending a wait by an interrupt, on whichever thread it waits.

ipykernel's own handling of SIGINT during an ``await`` is noticed only when the await ends, and it
ignores SIGINT between cells. A wait therefore brings its own handler: on the main thread for as
long as it waits; for a subshell thread, which cannot set handlers, by way of the main thread's
event loop, and only while the signal would otherwise be ignored.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import contextmanager
from typing import Any, Callable, Iterator

#: Longest time, in seconds, between two looks at a wait. A change wakes it at once; the tick is
#: the backstop for an interrupt whose wake-up is lost.
TICK = 0.1


class Alarm:
    """Wakes one coroutine from any thread, and from a signal handler."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self.interrupted = False

    def ring(self) -> None:
        """Something has changed: look again."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:
            pass  # the loop is closed: the kernel is going

    def interrupt(self) -> None:
        """The user interrupted."""
        self.interrupted = True
        self.ring()

    async def wait(self, tick: float = TICK) -> None:
        """Return when the alarm has rung since the last call, or after ``tick`` seconds."""
        try:
            await asyncio.wait_for(self._rung.wait(), tick)
        except asyncio.TimeoutError:
            pass
        self._rung.clear()


class Interrupts:
    """The waits of this process that an interrupt ends.

    ``on_main_loop`` runs a function soon on the main thread's event loop, from any thread.
    """

    def __init__(self, on_main_loop: Callable[[Callable[[], None]], Any]) -> None:
        self._on_main_loop = on_main_loop
        #: Wake-up calls by wait. No lock: the handler may run between any two bytecodes of the
        #: main thread, and single operations on a dict are atomic.
        self._waits: dict[object, Callable[[], None]] = {}

    @contextmanager
    def watch(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake`` (from a signal handler: it must only set flags) for each interrupt."""
        key = object()
        on_main = threading.current_thread() is threading.main_thread()
        self._waits[key] = wake
        previous: Any = None
        if on_main:
            previous = signal.signal(signal.SIGINT, self._handle)
        else:
            self._on_main_loop(self._arm)
        try:
            yield
        finally:
            self._waits.pop(key, None)
            if on_main:
                signal.signal(signal.SIGINT, previous)
            else:
                self._on_main_loop(self._disarm)

    def _handle(self, _signum: int, _frame: Any) -> None:
        for wake in list(self._waits.values()):
            wake()

    def _arm(self) -> None:
        # Not while a cell runs on the main thread: then the interrupt is meant for that cell.
        if self._waits and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)

    def _disarm(self) -> None:
        if not self._waits and signal.getsignal(signal.SIGINT) == self._handle:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
