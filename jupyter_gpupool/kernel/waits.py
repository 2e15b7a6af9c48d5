# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Shows a line in a cell that waits for a slice, and ends the wait on an interrupt by the user.

This module is for cells that wait before they run. The line is then the only output of the cell, so
one ``clear_output`` removes the line from the notebook and from the saved file. ``call_waits`` is
for cells that wait while they run.

ipykernel notices SIGINT during an ``await`` only when the await ends, and ignores SIGINT between
cells. So each wait needs its own signal handler. A wait on the main thread sets the handler until
the wait ends. A subshell thread cannot set a signal handler. For a wait in a subshell thread, the
main thread's event loop sets the handler, but only while no cell runs on the main thread. While a
cell runs there, an interrupt ends that cell and not the wait. The line about the wait says this.
"""

from __future__ import annotations

import asyncio
import html
import signal
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping

from ..deadlines import within
from ..errors import Code, GPUPoolError
from ..text import sentence
from ..units import format_bytes
from .holds import HoldWait
from .link import SessionLink
from .ways import Ways

#: The longest time between two checks of a wait, in seconds. A change wakes the waiting thread at
#: once. But the wake-up after an interrupt can be lost, so the thread also checks regularly.
TICK = 0.1


class Alarm:
    """Wakes one coroutine from any thread, and from a signal handler."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self.interrupted = False

    def ring(self) -> None:
        """Wake the coroutine, which then looks for a change."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:
            pass  # the kernel ends: its loop is closed

    def interrupt(self) -> None:
        """Note an interrupt by the user, and wake the coroutine."""
        self.interrupted = True
        self.ring()

    async def wait(self, tick: float = TICK) -> None:
        """Wait until the alarm rings, but at most ``tick`` seconds.

        If the alarm has rung since the last call, return at once.
        """
        try:
            await within(self._rung.wait(), tick)
        except asyncio.TimeoutError:
            pass
        self._rung.clear()


class Interrupts:
    """The waits of this process; an interrupt by the user ends them.

    ``on_main_loop`` schedules a function on the main thread's event loop. Any thread may call it.
    """

    def __init__(self, on_main_loop: Callable[[Callable[[], None]], Any]) -> None:
        self._on_main_loop = on_main_loop
        #: The wake-up function of each wait. This dict must not have a lock: the signal handler
        #: interrupts the main thread, and would wait without end for a lock that the main thread
        #: holds. Single operations on a dict are atomic, so no lock is necessary.
        self._waits: dict[object, Callable[[], None]] = {}
        #: Whether the main thread's event loop calls ``_look`` each TICK seconds. Only functions in
        #: that loop read or set this flag.
        self._looks = False

    @contextmanager
    def watch(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake`` for each interrupt by the user during the ``with`` block.

        The signal handler calls ``wake``, so ``wake`` must do no more than set flags.
        """
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

    def heard(self) -> bool:
        """Return whether an interrupt would now end the waits. Any thread may call this method."""
        return signal.getsignal(signal.SIGINT) == self._handle

    def _arm(self) -> None:
        if not self._looks:
            self._look()

    def _look(self) -> None:
        """Set the SIGINT handler if SIGINT is ignored now; look again after TICK seconds."""
        if self._waits and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        self._looks = bool(self._waits)
        if self._looks:
            asyncio.get_running_loop().call_later(TICK, self._look)

    def _disarm(self) -> None:
        if not self._waits and self.heard():
            signal.signal(signal.SIGINT, signal.SIG_IGN)


class GPUWaitInterrupted(GPUPoolError):
    """Raised if the user interrupts a cell's wait for a slice before the cell runs."""

    code = Code.INTERRUPTED


def interrupted() -> GPUWaitInterrupted:
    return GPUWaitInterrupted(
        "You stopped the wait for a GPU slice; nothing on the GPU has changed, and the cell has "
        "not run.",
        next_step="Run it again to queue again, or give it the tag no-gpu if it needs no GPU.",
    )


def stopped(link: SessionLink) -> str:
    """Return the line to show after an interrupt of a cell whose CUDA call waited for a slice."""
    where = " The kernel's GPU state stays in host memory." if link.suspended else ""
    return (
        "GPU pool: you stopped the wait for a GPU slice. Nothing on the GPU has changed, and the "
        f"lines before the call that waited have run.{where}"
    )


# ---------------------------------------------------------------------- what a wait shows

#: Seconds of waiting before the cell shows a line. An ordinary attach takes less time.
PATIENCE = 0.25

HOW_TO_STOP = "Interrupt the kernel to stop waiting; the cell will not run."
HOW_TO_STOP_BESIDE = (
    "Another cell of this kernel runs. Interrupt the kernel once to end that cell, and a second "
    "time to end this wait; this cell then will not run."
)
HOW_TO_STOP_MAGIC = "Interrupt the kernel to stop waiting; the cell ends here."
HOW_TO_STOP_CALL = "A CUDA call of this cell waits; interrupt the kernel to end the cell."

#: If the wait continues after an interrupt by the user (``guard/src/wait.c``), the cell shows this
#: text in place of HOW_TO_STOP_CALL or HOW_TO_STOP_PREEMPTED.
HOW_TO_STOP_HELD = (
    "The interrupt changed nothing, because a library such as JAX waits in a call. If the call "
    "ends now, arrays that it may reuse (donated arguments) can be lost. "
    "Interrupt the kernel once more to end the call."
)

#: The cell shows this hint after the pool has taken the kernel's slice.
HOW_TO_STOP_PREEMPTED = (
    "Its GPU state is in host memory and comes back by itself; the cell then goes on. "
    "Interrupt the kernel to end the cell."
)

Publish = Callable[[str, dict[str, Any]], None]


def describe(link: SessionLink) -> str:
    """Return one line about the kernel's wait."""
    if link.unreachable_for():
        return link.reviver.describe()
    size = link.request.get("memory")
    what = f"a GPU slice of {format_bytes(size)}" if isinstance(size, int) else "a GPU slice"
    if link.state == "attaching":
        if link.suspended:
            return f"Bringing the state of this kernel back to {what}."
        return f"Attaching {what}."
    queue = link.queue
    if queue is None:
        return f"Waiting for {what}."
    text = f"Waiting for {what}: position {queue.position} of {queue.length}"
    if time_left := queue.time():
        text += f", {time_left}"
    return f"{text}. {sentence(queue.reason)}".rstrip()


def describe_preempted(link: SessionLink) -> str:
    """Return why the pool took the slice of a running cell, and what the cell waits for."""
    text = describe(link)
    told = link.queue is not None and link.preempted in link.queue.reason
    return text if told else f"{taken(link.preempted)} {text}"


def taken(why: str) -> str:
    """Return a sentence that says why the pool took the slice of a running cell."""
    return sentence(f"the pool took the GPU from this cell: {why}")


def worth_showing(link: SessionLink, wait: HoldWait, *, patient: bool = False) -> bool:
    """Return whether the cell should show this wait now.

    It shows the wait after PATIENCE seconds. Without ``patient`` it also shows the wait as soon as
    the session has a place in the queue.
    """
    return (link.queue is not None and not patient) or time.monotonic() - wait.since >= PATIENCE


_QUIET = "color: var(--jp-ui-font-color2, #666)"

#: The MIME type of the data that JupyterLab's extension shows as text with buttons. Other front
#: ends show the same output as HTML or as plain text.
WAIT_TYPE = "application/vnd.gpupool.wait+json"


class WaitDisplay:
    """The line about a wait in a cell.

    This class publishes the line, updates it on changes, and clears it at the end.
    """

    def __init__(
        self, publish: Publish, display_id: str, link: SessionLink, hint: str = HOW_TO_STOP
    ) -> None:
        self._publish = publish
        self._id = display_id
        self._link = link
        self._ways = Ways(link)
        self._hint = hint
        self._shown: tuple[str, ...] = ()
        #: How many messages this display has sent to the cell's output area since the last clear.
        self.published = 0

    @property
    def shown(self) -> bool:
        """Whether the cell shows the line now."""
        return bool(self._shown)

    def show(self, text: str, hint: str = "") -> None:
        """Show ``text`` and what the user can do; send nothing if the cell already shows this."""
        hint = hint or self._hint
        lines = (text, *self._ways.sentences(), hint)
        if lines == self._shown:
            return
        self._shown = lines
        small = "<br>".join(html.escape(line) for line in lines[1:])
        markup = (
            f'<div class="gpupool-wait" style="{_QUIET}">'
            f"{html.escape(text)}<br><small>{small}</small></div>"
        )
        place = self._link.queue
        time_left = place.time() if place is not None else ""
        # JupyterLab updates this time each second, like the times in its chip and its panel.
        time_told = time_left if time_left in text else ""
        data = {"session": self._link.session, "text": text, "time": time_told, "hint": hint}
        # After a restart of the kernel, a front end removes an output that has the mark ``wait``.
        self._data(" ".join(lines), markup, {"wait": True}, {WAIT_TYPE: data})

    def leave(self, text: str) -> None:
        """Replace the line by ``text``, which says what happened to the cell. The text stays."""
        self._shown = ()
        markup = f'<div class="gpupool-preempted" style="{_QUIET}">{html.escape(text)}</div>'
        self._data(text, markup, {"preempted": True})

    def clear(self) -> None:
        """Remove the line and all other output of the cell. Does nothing if no line is shown."""
        if self._shown:
            self._shown = ()
            self.published = 0
            self._publish("clear_output", {"wait": False})

    def empty(self) -> None:
        """Replace the line by an empty output; do not clear the cell, which has other output."""
        if self._shown:
            self._shown = ()
            self._data("", "", {"wait": True})

    def _data(
        self,
        text: str,
        markup: str,
        about: Mapping[str, bool],
        more: Mapping[str, Any] | None = None,
    ) -> None:
        kind = "update_display_data" if self.published else "display_data"
        self.published += 1
        self._publish(
            kind,
            {
                "data": {"text/plain": text, "text/html": markup, **(more or {})},
                "metadata": {"gpupool": dict(about)},
                "transient": {"display_id": self._id},
            },
        )
