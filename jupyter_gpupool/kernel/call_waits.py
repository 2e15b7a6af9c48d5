# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a running cell shows while its CUDA calls wait, and after a preemption.

The cell may have printed output before the wait, and ``clear_output`` would remove that output,
too. So the agent sends ``clear_output`` only if the line about the wait is the only output of the
request. Otherwise the agent makes the line empty. The text about a preemption stays visible.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, Callable, Mapping

from ..threads import start_thread
from ..units import format_seconds
from .guard_state import Guard
from .link import SessionLink
from .waits import (
    HOW_TO_STOP_CALL,
    HOW_TO_STOP_HELD,
    HOW_TO_STOP_PREEMPTED,
    PATIENCE,
    TICK,
    WaitDisplay,
    describe,
    describe_preempted,
    taken,
)

#: Message types that a cell's output area shows.
_OUTPUTS = frozenset({"stream", "display_data", "execute_result", "error", "update_display_data"})


class RunningRequest:
    """A running execute request."""

    __slots__ = ("away", "away_since", "before", "begun", "display", "parent", "remedy", "silent",
                 "times", "waits", "why")  # fmt: skip

    def __init__(self, parent: Mapping[str, Any], silent: bool, before: int) -> None:
        self.begun = time.monotonic()
        self.parent = parent
        self.silent = silent
        #: How many outputs this kernel had published when the cell's output area was last empty.
        self.before = before
        self.display: WaitDisplay | None = None
        #: Whether a CUDA call of this request has waited for a slice, and the kernel still has
        #: none.
        self.waits = False
        #: ``times``: how often the pool took the slice during this request. ``why`` and ``remedy``:
        #: the reason and the advice of the last preemption. ``away``: the seconds without a slice.
        #: ``away_since``: the time (``time.monotonic()``) when the kernel lost its slice; 0.0 while
        #: it has a slice.
        self.times = 0
        self.why = self.remedy = ""
        self.away = self.away_since = 0.0

    def preempted(self, why: str, remedy: str, since: float) -> None:
        """Note that the pool has taken the kernel's slice."""
        if not self.away_since:
            self.times += 1
            self.why, self.remedy, self.away_since = why, remedy, since

    def resumed(self) -> None:
        """Note that the kernel has a slice again."""
        if self.away_since:
            self.away += time.monotonic() - self.away_since
            self.away_since = 0.0

    def story(self, back: bool) -> str:
        """Return a text about the preemptions so far; ``back``: the kernel has a slice again."""
        away = f"for {format_seconds(max(1.0, self.away))}"
        if self.times > 1:
            away = f"{self.times} times, {away} in all,"
        end = "then continued" if back else "ended before a GPU was free again"
        story = f"This cell was without a GPU {away} and {end}."
        return f"{story} {taken(self.why)} {self.remedy}".rstrip()


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

    # ------------------------------------------------------------------ install and uninstall

    def install(self) -> None:
        """Begin to count the outputs that this kernel publishes."""
        session = self._kernel.session
        original = session.send

        def send(stream: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            # Count an output before it is sent. Otherwise the publishing thread could read a count
            # without this output.
            if (message if isinstance(message, str) else message.get("msg_type")) in _OUTPUTS:
                self._outputs += 1
            return original(stream, message, *args, **kwargs)

        self._send = original
        session.send = send

    def uninstall(self) -> None:
        """Stop counting the outputs, and stop showing waits."""
        self._stopped = True
        self._news.set()
        if self._send is not None:
            self._kernel.session.send = self._send
            self._send = None

    # ------------------------------------------------------------------ requests

    def begin(self, silent: bool) -> int:
        """Note that an execute request begins, and return its key.

        Called in the request's thread.
        """
        key = next(self._keys)
        self._running[key] = RunningRequest(self._kernel.get_parent(), silent, self._outputs)
        return key

    def end(self, key: int) -> bool:
        """Note the end of a request, before its reply is sent.

        Return True if a CUDA call of the request has waited for a slice and the kernel still has
        none.
        """
        # Remove the request before the wait for the lock, because an interrupt may end this wait.
        running = self._running.pop(key)
        # If the watching thread has found this request, it shows it before it releases the lock.
        with self._lock:
            shown = running.display is not None
        waits = running.waits and not self._link.attached
        if shown:
            self._clear(running)
        return waits

    # ------------------------------------------------------------------ the wait

    def news(self) -> None:
        """Check whether a call waits.

        This method must be quick, because it runs in the thread that handles the broker's pushes.
        """
        if self._stopped or not self._running:
            return
        # Record the wait in this thread already. The watching thread may look too late, when an
        # interrupt has ended the call.
        if self._guard.waiting() and (running := self._oldest()) is not None:
            running.waits = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gpupool-waits", daemon=True)
            start_thread(self._thread)
        self._news.set()

    def _run(self) -> None:
        while not self._stopped:
            self._news.wait()
            self._news.clear()  # before the look at the requests, so that no later push is lost
            self._watch()

    def _watch(self) -> None:
        """Show waits longer than PATIENCE seconds; return after PATIENCE seconds without a wait."""
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
                if self._link.attached:
                    for running in list(self._running.values()):
                        running.waits = False
                self._clear_all()
                if now - quiet >= PATIENCE:  # the push may be earlier than the page
                    return
            if self._news.wait(TICK):
                self._news.clear()
                quiet = time.monotonic()

    def _oldest(self) -> RunningRequest | None:
        """Return the oldest request that is not silent. Its cell shows the wait."""
        running = [*self._running.values()]
        return next((request for request in running if not request.silent), None)

    def _show(self) -> None:
        with self._lock:
            running = self._oldest()
            if running is None:
                return
            why, since = self._link.preempted, self._link.preempted_at
            preempted = bool(why) and running.begun <= since
            if not preempted and time.monotonic() - running.begun < PATIENCE:
                return  # the cell is new, so a call of an earlier cell may wait
            if running.display is None:
                name = f"gpupool-call-{running.parent['header']['msg_id']}"
                publish = self._publisher(running)
                running.display = WaitDisplay(publish, name, self._link, HOW_TO_STOP_CALL)
            running.waits = True
            held = HOW_TO_STOP_HELD if self._guard.held() else ""
            if preempted:
                running.preempted(why, self._link.remedy, since)
                hint = held or HOW_TO_STOP_PREEMPTED
                running.display.show(describe_preempted(self._link), hint)
            elif self._guard.waiting():
                running.display.show(describe(self._link), held)

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
                    # Send this message directly, without the queue of the publishing thread. In the
                    # queue it would come after the outputs that already wait there.
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

        # ``clear`` runs in the publishing thread, so that the thread publishes no output between
        # the check of the count and ``clear_output``.
        self._kernel.iopub_thread.schedule(clear)

    def _publisher(self, running: RunningRequest) -> Callable[[str, dict[str, Any]], None]:
        kernel, parent = self._kernel, running.parent

        def publish(kind: str, content: dict[str, Any]) -> None:
            kernel.session.send(kernel.iopub_socket, kind, content, parent=parent)

        return publish
