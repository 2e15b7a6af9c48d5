# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""SIGTERM and SIGINT end the broker within :data:`WITHIN` seconds, whatever it is doing.

After the first signal, the broker ends in order. If it is still starting, it abandons the start. If
the broker has not ended in time, a thread forces the end. So even a broker whose event loop is
blocked, or whose child process does not end, gives up its lock. A second signal forces the end at
once. After a forced end, as after a crash, the next broker finishes or undoes the driver calls that
were under way (see ``recovery``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, Callable, Coroutine, TypeVar

_T = TypeVar("_T")

#: The most seconds from the first signal to the end of the process.
WITHIN = 4.0


class Stopped(Exception):
    """The broker was asked to end while it was starting."""


class Ending:
    """Notes the request to end the broker, and forces the end if necessary.

    Parameters
    ----------
    force:
        Ends the process. Called in a thread or a signal handler.
    """

    def __init__(self, force: Callable[[int], Any] = os._exit) -> None:
        self._force = force
        #: Whether the broker was asked to end.
        self.asked = False
        self._over = threading.Event()
        # The signal handler wakes the thread through a pipe. It must not set a ``threading.Event``
        # for this, because the code that the signal interrupts may hold the lock of the event.
        self._reading, self._writing = os.pipe()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._event = asyncio.Event()
        self._signals = 0
        self._last_acts: list[Callable[[], None]] = []
        threading.Thread(target=self._see_to_it, name="gpupool-end", daemon=True).start()

    def listen(self) -> None:
        """Handle the signals from now on. Call this in the main thread."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            signal.signal(number, self._on_signal)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # the parent process may block them

    def attach(self) -> None:
        """Let the signals wake the running event loop from now on."""
        self._loop = asyncio.get_running_loop()
        if self.asked:
            self._event.set()

    def before_force(self, act: Callable[[], None]) -> None:
        """Call ``act`` before a forced end, which skips the broker's usual clean-up.

        ``act`` removes files that would hinder the next start.
        """
        self._last_acts.append(act)

    def ask(self) -> None:
        """End the broker. Call this in the main thread or from a signal handler."""
        if not self.asked:
            self.asked = True
            os.write(self._writing, b"!")
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(self._event.set)
            except RuntimeError:
                pass  # the loop is closed: the broker is ending

    def over(self) -> None:
        """Note that the broker has done its work. No forced end is needed after this."""
        self._over.set()
        if not self.asked:
            os.write(self._writing, b"!")

    async def wait(self) -> None:
        """Wait until the broker is asked to end."""
        await self._event.wait()

    async def unless_asked(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return what ``work`` returns.

        Raises
        ------
        Stopped
            If the broker is asked to end before ``work`` has ended. This method then cancels
            ``work``, and waits only briefly for its end.
        """
        task = asyncio.ensure_future(work)
        asked = asyncio.ensure_future(self.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self.asked and not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=WITHIN / 8)
                raise Stopped
            return await task
        finally:
            asked.cancel()

    # ------------------------------------------------------------------ internals

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            self._end_now(f"The broker received a second {signal.Signals(number).name}")
        self.ask()

    def _see_to_it(self) -> None:
        os.read(self._reading, 1)
        if not self._over.wait(WITHIN):
            self._end_now(f"The broker did not end within {WITHIN:g} s")
        os.close(self._reading)
        os.close(self._writing)

    def _end_now(self, why: str) -> None:
        # Write to stderr without ``logging``: the thread that the signal interrupted may hold the
        # lock of a log handler.
        with suppress(OSError):  # perhaps no process reads stderr any more
            text = f"{why}, so it ended by force; the next broker continues from the journal\n"
            os.write(2, text.encode())
        for act in self._last_acts:
            act()
        self._force(1)
