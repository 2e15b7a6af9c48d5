# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A wait for a slice: the line that the cell shows, and the interrupt that ends the wait.

This module is for cells that wait before they run. In such a cell the line is the only output, so
one ``clear_output`` removes it from the notebook and from the saved file. ``call_waits`` is for
cells that wait while they run.

ipykernel notices SIGINT during an ``await`` only when the await ends, and ignores SIGINT between
cells. A wait therefore sets its own signal handler. A wait on the main thread sets the handler for
its whole time. A subshell thread cannot set handlers. For a wait in such a thread, the main
thread's event loop sets the handler, but only while SIGINT would otherwise be ignored. While a cell
runs on the main thread, an interrupt ends that cell and not the wait, and the line about the wait
says so.
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
        """Wait at most ``tick`` seconds until the alarm rings.

        If it has rung since the last call, return at once.
        """
        try:
            await within(self._rung.wait(), tick)
        except asyncio.TimeoutError:
            pass
        self._rung.clear()


class Interrupts:
    """The waits of this process; an interrupt by the user ends them.

    ``on_main_loop`` runs a function soon on the main thread's event loop, from any thread.
    """

    def __init__(self, on_main_loop: Callable[[Callable[[], None]], Any]) -> None:
        self._on_main_loop = on_main_loop
        #: The wake-up function of each wait. No lock protects this dict, because the signal handler
        #: may run between any two bytecodes of the main thread, even while the main thread holds
        #: the lock. A lock is not necessary, because single operations on a dict are atomic.
        self._waits: dict[object, Callable[[], None]] = {}
        #: Whether the main thread's loop repeatedly calls ``_look``. Only that loop uses this flag.
        self._looks = False

    @contextmanager
    def watch(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call ``wake`` for each interrupt.

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
        """Return whether an interrupt now would end the waits; any thread may call this."""
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
    """Raised when the user interrupts the wait for a slice; the cell has not run."""

    code = Code.INTERRUPTED


def interrupted() -> GPUWaitInterrupted:
    return GPUWaitInterrupted(
        "You stopped the wait for a GPU slice; nothing on the GPU has changed, and the cell has "
        "not run.",
        next_step="Run it again to queue again, or give it the tag no-gpu if it needs no GPU.",
    )


def stopped(link: SessionLink) -> str:
    """Return the line below a cell that the user has interrupted while its CUDA call waited."""
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

#: This text replaces HOW_TO_STOP_CALL and HOW_TO_STOP_PREEMPTED if the user interrupts the kernel
#: and the wait continues (``guard/src/wait.c``).
HOW_TO_STOP_HELD = (
    "The interrupt changed nothing, because a library such as JAX waits in a call. If the call "
    "ends now, arrays that it may reuse (donated arguments) can be lost. "
    "Interrupt the kernel once more to end the call."
)

#: The hint in a cell after the pool has taken its slice.
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
    """Return a sentence with the rule by which the pool took the slice of a running cell."""
    return sentence(f"the pool took the GPU from this cell: {why}")


def worth_showing(link: SessionLink, wait: HoldWait, *, patient: bool = False) -> bool:
    """Return whether to show this wait now (with ``patient``: only after PATIENCE seconds)."""
    return (link.queue is not None and not patient) or time.monotonic() - wait.since >= PATIENCE


_QUIET = "color: var(--jp-ui-font-color2, #666)"

#: JupyterLab's extension shows this type as text with buttons; other front ends show HTML or text.
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
        #: Messages that this display has sent to the cell's output area.
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
        # The mark ``wait``: after a restart of the kernel, a front end removes an output with this
        # mark.
        self._data(" ".join(lines), markup, {"wait": True}, {WAIT_TYPE: data})

    def leave(self, text: str) -> None:
        """Replace the line by ``text``, which stays: it says what happened to the cell."""
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
        """Make the line empty, because the cell shows other output, too."""
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
