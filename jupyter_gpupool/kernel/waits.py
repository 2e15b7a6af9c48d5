# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A wait for a slice: the line that the cell shows meanwhile, and the interrupt that ends it.

Two kinds of wait exist. A cell may wait before it runs: the line is the cell's first output, so
one ``clear_output`` removes it from the notebook, saved file included. Or a CUDA call waits at the
guard's gate in the middle of a cell, which may have printed something. ``clear_output`` would
remove that, too, so it is sent only if the request has published nothing but the line; otherwise
the line becomes empty and stays where it is.

ipykernel notices SIGINT during an ``await`` only when the await ends, and ignores SIGINT between
cells. A wait therefore sets its own handler: on the main thread, for as long as it waits; for a
subshell thread, which cannot set handlers, through the main thread's event loop, and only while
the signal would otherwise be ignored.
"""

from __future__ import annotations

import asyncio
import html
import itertools
import signal
import threading
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Mapping

from ..errors import Code, GPUPoolError
from ..units import format_bytes, format_seconds, format_wait
from .guard_state import Guard
from .holds import HoldWait
from .link import SessionLink

#: Longest time, in seconds, between two checks of a wait. A change wakes it at once; the tick is
#: for an interrupt whose wake-up is lost.
TICK = 0.1


class Alarm:
    """Wakes one coroutine from any thread, and from a signal handler."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()
        self.interrupted = False

    def ring(self) -> None:
        """Wake the coroutine, so that it checks for a change."""
        try:
            self._loop.call_soon_threadsafe(self._rung.set)
        except RuntimeError:
            pass  # the loop is closed: the kernel ends

    def interrupt(self) -> None:
        """Note an interrupt by the user, and ring."""
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
    """The waits of this process, which an interrupt ends.

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


class GPUWaitInterrupted(GPUPoolError):
    """The user interrupted the wait for a slice; the cell has not run."""

    code = Code.INTERRUPTED


def interrupted() -> GPUWaitInterrupted:
    return GPUWaitInterrupted(
        "The wait for a GPU slice was interrupted; the cell has not run.",
        next_step="Run it again to queue again, or give it the tag no-gpu if it needs no GPU.",
    )


# ---------------------------------------------------------------------- what a wait shows

#: Seconds of waiting before anything is shown: an ordinary attach is over by then.
PATIENCE = 0.25

HOW_TO_STOP = "Interrupt the kernel to stop waiting; the cell will not run."
HOW_TO_STOP_CALL = "A CUDA call of this cell waits; interrupt the kernel to end the cell."

#: What a cell shows whose slice was taken in its middle.
HOW_TO_STOP_PREEMPTED = (
    "Its GPU state is in host memory and comes back by itself; the cell then goes on. "
    "Interrupt the kernel to end the cell."
)

Publish = Callable[[str, dict[str, Any]], None]


def describe(link: SessionLink) -> str:
    """Return one line on this hold's wait."""
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
    if queue.eta is not None:
        text += f", about {format_seconds(max(1.0, queue.eta))}"
    elif waited := format_wait(link.queued_for()):
        text += f". {sentence(waited).rstrip('.')}"
    return f"{text}. {sentence(queue.reason)}".rstrip()


def describe_preempted(link: SessionLink) -> str:
    """Return why the slice of a running cell was taken, and what it is waiting for."""
    text = describe(link)
    told = link.queue is not None and link.preempted in link.queue.reason
    return text if told else f"{taken(link.preempted)} {text}"


def taken(why: str) -> str:
    """Return the sentence that says by which rule the slice of a running cell was taken."""
    return sentence(f"the GPU was taken from this cell: {why}")


def sentence(reason: str) -> str:
    """Return the broker's ``reason`` with a capital and a full stop; names stay as they are."""
    text = reason.strip()
    first = text.split(" ", 1)[0]
    if first.rstrip(",;:").isalpha():
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def worth_showing(link: SessionLink, wait: HoldWait) -> bool:
    """Return whether to show this wait to the user (yet)."""
    return link.queue is not None or time.monotonic() - wait.since >= PATIENCE


_QUIET = "color: var(--jp-ui-font-color2, #666)"


class WaitDisplay:
    """The line in the cell: published once, updated when its text changes, cleared at the end."""

    def __init__(self, publish: Publish, display_id: str, hint: str = HOW_TO_STOP) -> None:
        self._publish = publish
        self._id = display_id
        self._hint = hint
        self._shown = ""
        #: Messages that this display has sent to the cell's output area.
        self.published = 0

    @property
    def shown(self) -> bool:
        """Whether the cell shows the line now."""
        return bool(self._shown)

    def show(self, text: str, hint: str = "") -> None:
        """Show ``text``; send nothing if the cell already shows it."""
        if text == self._shown:
            return
        self._shown, hint = text, hint or self._hint
        markup = (
            f'<div class="gpupool-wait" style="{_QUIET}">'
            f"&#x23f3; {html.escape(text)}<br><small>{html.escape(hint)}</small></div>"
        )
        # By this mark, a front end removes the line after a restart of the kernel.
        self._data(f"{text} {hint}", markup, {"wait": True})

    def leave(self, text: str) -> None:
        """Show ``text`` for good: it tells what has happened to the cell."""
        self._shown = ""
        markup = f'<div class="gpupool-preempted" style="{_QUIET}">{html.escape(text)}</div>'
        self._data(text, markup, {"preempted": True})

    def clear(self) -> None:
        """Remove the line, and all that the cell shows. Safe to call when nothing was shown."""
        if self._shown:
            self._shown = ""
            self.published = 0
            self._publish("clear_output", {"wait": False})

    def empty(self) -> None:
        """Make the line empty, because the cell shows other output, too."""
        if self._shown:
            self._shown = ""
            self._data("", "", {"wait": True})

    def _data(self, text: str, markup: str, about: Mapping[str, bool]) -> None:
        kind = "update_display_data" if self.published else "display_data"
        self.published += 1
        self._publish(
            kind,
            {
                "data": {"text/plain": text, "text/html": markup},
                "metadata": {"gpupool": dict(about)},
                "transient": {"display_id": self._id},
            },
        )


# ---------------------------------------------------------------------- waits of CUDA calls

#: Message types that a cell's output area shows.
_OUTPUTS = frozenset({"stream", "display_data", "execute_result", "error", "update_display_data"})


class RunningRequest:
    """A running execute request."""

    __slots__ = ("away", "away_since", "before", "begun", "display", "parent", "silent", "times",
                 "why")  # fmt: skip

    def __init__(self, parent: Mapping[str, Any], silent: bool, before: int) -> None:
        self.begun = time.monotonic()
        self.parent = parent
        self.silent = silent
        #: This kernel's number of published outputs when the cell was last empty.
        self.before = before
        self.display: WaitDisplay | None = None
        #: How often its slice was taken in its middle, why the last time, the seconds without one,
        #: and since when (``time.monotonic()``) it has none now; 0.0 if it has.
        self.times = 0
        self.why = ""
        self.away = self.away_since = 0.0

    def preempted(self, why: str, since: float) -> None:
        """Note that its slice was taken."""
        if not self.away_since:
            self.times += 1
            self.why, self.away_since = why, since

    def resumed(self) -> None:
        """Note that it has a slice again."""
        if self.away_since:
            self.away += time.monotonic() - self.away_since
            self.away_since = 0.0

    def story(self, back: bool) -> str:
        """Return what happened, for people; ``back``: it got a slice again."""
        often = "" if self.times == 1 else f"{self.times} times, "
        end = "went on" if back else "ended before one was free again"
        return (
            f"This cell was without a GPU {often}for {format_seconds(max(1.0, self.away))}, and "
            f"{end}. {taken(self.why)}"
        )


class CallWaits:
    """Shows in the running cell the reason why its CUDA calls wait."""

    def __init__(self, kernel: Any, link: SessionLink, guard: Guard) -> None:
        self._kernel = kernel
        self._link = link
        self._guard = guard
        #: Protects the displays.
        self._lock = threading.Lock()
        self._running: dict[int, RunningRequest] = {}
        self._keys = itertools.count(1)
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._send: Callable[..., Any] | None = None
        self._outputs = 0

    # ------------------------------------------------------------------ in and out

    def install(self) -> None:
        """Begin to count the outputs that this kernel publishes."""
        session = self._kernel.session
        original = session.send

        def send(stream: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            # Counted before it is sent, so that the publishing thread reads a complete count.
            if (message if isinstance(message, str) else message.get("msg_type")) in _OUTPUTS:
                self._outputs += 1
            return original(stream, message, *args, **kwargs)

        self._send = original
        session.send = send

    def uninstall(self) -> None:
        """Stop counting and showing."""
        self._stopped = True
        self._news.set()
        if self._send is not None:
            self._kernel.session.send = self._send
            self._send = None

    # ------------------------------------------------------------------ requests

    def begin(self, silent: bool) -> int:
        """Note that an execute request begins, in its thread; return its key."""
        key = next(self._keys)
        self._running[key] = RunningRequest(self._kernel.get_parent(), silent, self._outputs)
        return key

    def end(self, key: int) -> None:
        """Note the end of a request, before its reply is sent."""
        running = self._running.pop(key)
        if running.display is not None:
            self._clear(running)

    # ------------------------------------------------------------------ the wait

    def news(self) -> None:
        """Check whether a call waits. Runs in the thread of the broker's pushes, so it is quick."""
        if self._stopped or not self._running:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpupool-waits", daemon=True)
            self._thread.start()
        self._news.set()

    def _run(self) -> None:
        while not self._stopped:
            self._news.wait()
            self._watch()

    def _watch(self) -> None:
        """Show waits that last longer than PATIENCE; return after that time without a wait."""
        since = quiet = time.monotonic()
        while self._running and not self._stopped:
            now = time.monotonic()
            if self._link.preempted:
                quiet = now
                self._show()
            elif self._guard.waiting():
                quiet = now
                if now - since >= PATIENCE:
                    self._show()
            else:
                since = now
                self._clear_all()
                if now - quiet >= PATIENCE:  # a push may be faster than the page
                    return
            if self._news.wait(TICK):
                self._news.clear()
                quiet = time.monotonic()
        self._news.clear()

    def _show(self) -> None:
        with self._lock:
            # The oldest request, because a subshell's cell runs beside the main one.
            for key, running in list(self._running.items()):
                if running.silent or key not in self._running:
                    continue
                why, since = self._link.preempted, self._link.preempted_at
                preempted = bool(why) and running.begun <= since
                if not preempted and time.monotonic() - running.begun < PATIENCE:
                    return  # too young to wait so long: the last cell waited
                if running.display is None:
                    name = f"gpupool-call-{running.parent['header']['msg_id']}"
                    publish = self._publisher(running)
                    running.display = WaitDisplay(publish, name, HOW_TO_STOP_CALL)
                if preempted:
                    running.preempted(why, since)
                    running.display.show(describe_preempted(self._link), HOW_TO_STOP_PREEMPTED)
                elif self._guard.waiting():
                    running.display.show(describe(self._link))
                return

    def _clear_all(self) -> None:
        for running in list(self._running.values()):
            if running.display is not None:
                self._clear(running)

    def _clear(self, running: RunningRequest) -> None:
        def clear() -> None:
            with self._lock:
                display = running.display
                if display is None or not display.shown:
                    return
                running.resumed()
                if running.times:
                    display.leave(running.story(not self._link.preempted))
                elif self._outputs == running.before + display.published:
                    # Not through the thread's queue: later outputs in that queue must follow it.
                    self._kernel.session.send(
                        self._kernel.iopub_thread.socket,
                        "clear_output",
                        {"wait": False},
                        parent=running.parent,
                    )
                    running.display = None
                    running.before = self._outputs
                else:
                    display.empty()

        # In the publishing thread, so that no output comes between the check and the clear.
        self._kernel.iopub_thread.schedule(clear)

    def _publisher(self, running: RunningRequest) -> Callable[[str, dict[str, Any]], None]:
        kernel, parent = self._kernel, running.parent

        def publish(kind: str, content: dict[str, Any]) -> None:
            kernel.session.send(kernel.iopub_socket, kind, content, parent=parent)

        return publish
