# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs a command in a session: waits for a slice, starts the command, returns its exit code.

The main thread waits for signals, for the end of the child process and for news from the broker. A
second thread opens the session, and may have to start a broker for that. The broker itself notices
the end of the child, so this module need not close the session.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Callable, Mapping

from ..errors import GPUPoolError
from ..kernel.holds import HoldWait
from ..kernel.link import SessionLink
from ..states import WAITING
from .opening import (
    NAME_VARIABLE,
    Asked,
    ProgramSession,
    open_session,
    own_environment,
    with_devices,
)
from .progress import Progress, too_long, waiting_for
from .terminal import (
    AWAITED,
    FORWARDED,
    NOT_RUN,
    CommandProcess,
    exit_code,
    has_terminal,
    is_for_us_alone,
)

#: The main thread sleeps for at most this many seconds. It wakes earlier if a step is due.
QUIET = 60.0

#: To end a command, :class:`Run` sends SIGTERM. If the command still runs after this many seconds,
#: :class:`Run` sends SIGKILL.
LAST = 10.0

#: The hold of a command that keeps its slice from its start to its end.
HOLD = "run"


@dataclass(frozen=True)
class RunOptions:
    """How to run a command."""

    asked: Asked
    #: The name of the session that people see.
    name: str
    #: Whether the command keeps its slice from its start to its end.
    holds: bool = False
    #: Seconds to wait for the first slice; None means as long as the pool allows.
    max_wait: float | None = None
    socket: str = ""
    #: Whether the program gets its name in the variable NAME_VARIABLE. A detached command and a
    #: command with ``--name`` get it.
    named: bool = False

    def holds_from_start(self, session: ProgramSession) -> bool:
        """Return whether the command starts only after the session has got its slice."""
        return self.holds or not session.guarded


class Run:
    """Waits for the session of one command, starts the command, and follows it to its end.

    Parameters
    ----------
    child:
        The process that becomes the command.
    progress:
        Shows what the command waits for.
    on_open, on_wait, on_start:
        Called in the main thread: when the command's session is open, when a command that has not
        yet started has a place in the queue, and when the command starts.
    """

    def __init__(
        self,
        child: CommandProcess,
        options: RunOptions,
        progress: Progress,
        *,
        on_open: Callable[[ProgramSession], None] = lambda _: None,
        on_wait: Callable[[], None] = lambda: None,
        on_start: Callable[[], None] = lambda: None,
    ) -> None:
        self._child = child
        self._options = options
        self._progress = progress
        self._on_open = on_open
        self._on_wait = on_wait
        self._on_start = on_start
        self._environ = own_environment(os.environ)
        self._main = threading.get_ident()
        self._opened: tuple[ProgramSession, SessionLink] | None = None
        self._problem: GPUPoolError | None = None
        self._told_open = self._told_wait = False
        self._wait: HoldWait | None = None
        self._had_slice = False
        self._refusals = 0
        self._terminal = has_terminal()
        self._kill_at: float | None = None
        #: Why the pool ended the command or did not start it; None if neither happened.
        self.refused: GPUPoolError | None = None
        self._said: list[str] = []

    def run(self) -> int:
        """Run the command; return its exit code when it has ended."""
        threading.Thread(target=self._open, name="gpupool-open", daemon=True).start()
        try:
            while self._child.status is None:
                self._look()
                if self._child.status is None:
                    self._sleep()
        finally:
            self._progress.clear()
            if self._opened is not None:
                self._opened[1].close()
        if self._child.problem:
            self._progress.say(self._child.problem)
        if self.refused is not None:
            self._progress.say(str(self.refused))
            return NOT_RUN
        return exit_code(self._child.status)

    # ------------------------------------------------------------------ the second thread

    def _open(self) -> None:
        try:
            session = open_session(
                self._options.asked,
                label=self._options.name,
                process=lambda: self._child.pid,
                attach="lazy",
                socket=self._options.socket,
            )
            link = session.link(on_lost=self._tell, on_notice=self._tell, on_news=self._wake)
            link.start()
            self._opened = session, link
        except GPUPoolError as error:
            self._problem = error
        except Exception as error:
            self._problem = GPUPoolError(f"The session could not be opened: {error!r}.")
        self._wake()

    def _tell(self, text: str) -> None:
        self._said.append(text)
        self._wake()

    def _wake(self) -> None:
        """End the main thread's sleep. Any thread may call this."""
        signal.pthread_kill(self._main, signal.SIGCHLD)

    # ------------------------------------------------------------------ the main thread

    def _sleep(self) -> None:
        """Wait for a signal or for news, and forward signals to the child."""
        info = signal.sigtimedwait(AWAITED, self._pause())
        while info is not None:
            number = info.si_signo
            if number == signal.SIGCONT:
                self._child.wake()
            elif number in FORWARDED and is_for_us_alone(info, self._child.pid):
                self._child.send(number)
            info = signal.sigtimedwait(AWAITED, 0)

    def _pause(self) -> float:
        """Return how many seconds the main thread may sleep until its next step is due."""
        waited, most = self._progress.waited, self._options.max_wait
        if self._kill_at is not None:
            return max(0.05, self._kill_at - time.monotonic())
        if not waited:
            return QUIET
        left = most - waited if most is not None and not self._had_slice else QUIET
        return min(self._progress.pause, max(0.05, left))

    def _look(self) -> None:
        stopped = self._child.look()
        if self._child.status is not None:
            return
        if stopped is not None and self._terminal:
            self._progress.clear()
            self._child.stop_as_it_did(stopped)
        while self._said:
            self._progress.say(self._said.pop(0))
        if self._kill_at is not None:
            if time.monotonic() >= self._kill_at:
                self._child.send(signal.SIGKILL)
                self._kill_at = time.monotonic() + LAST
            return
        if self._problem is not None:
            self._refuse(self._problem)
        elif self._opened is not None:
            session, link = self._opened
            if not self._told_open:
                self._told_open = True
                self._on_open(session)
            if self._child.started:
                self._watch_calls(session, link)
            elif self._options.holds_from_start(session):
                self._wait_for_hold(session, link)
            else:
                self._start(session.environment(self._environ))

    def _start(self, env: Mapping[str, str]) -> None:
        found = dict(env)
        if self._options.named:
            found[NAME_VARIABLE] = self._options.name
        self._child.start(found)
        if not self._child.problem:
            self._on_start()

    def _wait_for_hold(self, session: ProgramSession, link: SessionLink) -> None:
        """Start the command as soon as the session has its slice."""
        if self._wait is None:
            self._wait = link.wait(HOLD, "manual", self._wake)
        answer = self._wait.answer
        if isinstance(answer, GPUPoolError):
            self._refuse(answer)
        elif answer is not None:
            self._progress.over()
            self._had_slice = True
            self._start(with_devices(session.environment(self._environ), link))
        elif link.given_up(self._wait):
            self._refuse(link.unavailable())
        else:
            # The state "queued" does not prove that the pool has accepted the request: before the
            # pool refuses a request, the session is in this state for a moment.
            if not self._told_wait and (link.queue is not None or link.state == "attaching"):
                self._told_wait = True
                self._on_wait()
            self._show_wait(session, link, begun=False)

    def _watch_calls(self, session: ProgramSession, link: SessionLink) -> None:
        """Show what the CUDA calls of the command wait for."""
        if link.attached:
            self._had_slice = True
        if link.refusals != self._refusals:
            self._refusals = link.refusals
            refused = link.refused
            if refused is not None and refused.what == "attach":
                self._progress.say(f"{refused.message} {refused.next_step}".rstrip())
        waits = link.queue is not None
        # If the broker ends during a wait, ``link.queue`` becomes None. The command still waits,
        # until the session has its slice.
        if self._progress.waited:
            waits |= link.state in WAITING
        if waits and not link.attached:
            self._show_wait(session, link, begun=True)
        else:
            self._progress.over(say=link.attached)

    def _show_wait(self, session: ProgramSession, link: SessionLink, *, begun: bool) -> None:
        self._progress.waits(lambda waited: waiting_for(link, session.memory, waited, begun=begun))
        most = self._options.max_wait
        if most is not None and not self._had_slice and self._progress.waited >= most:
            refusal = too_long(link, most, "--max-wait")
            if self._wait is not None:
                link.drop(HOLD)
            self._refuse(refusal)

    def _refuse(self, error: GPUPoolError) -> None:
        """End the command because of ``error``, or prevent its start."""
        self.refused = error
        self._progress.over(say=False)
        self._kill_at = time.monotonic() + LAST
        if self._child.started:
            self._child.send(signal.SIGTERM)
        else:
            self._child.give_up()
