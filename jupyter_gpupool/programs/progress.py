# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Shows on standard error what a program waits for: one line that changes, or several lines.

On a terminal, the module draws one line again and again, and removes it at the end of the wait. It
draws this line only while the program is in the foreground, because the terminal may stop a
background job that writes. Without a terminal, the module writes a new line from time to time.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Callable

from ..errors import Code, RefusedError
from ..kernel.link import SessionLink
from ..text import sentence
from ..units import format_bytes, format_range, format_seconds

#: The line appears only after a wait of this many seconds. Most waits are shorter, and show no
#: line.
PATIENCE = 1.0

#: The changing line is drawn every REDRAW seconds. The first pause between two plain lines is PLAIN
#: seconds, and each later pause is twice as long, up to PLAIN_MOST seconds.
REDRAW = 1.0
PLAIN, PLAIN_MOST = 30.0, 600.0


def waiting_for(link: SessionLink, memory: int, waited: float, *, begun: bool = True) -> str:
    """Return one line about what a program waits for.

    ``memory`` is the size of the slice in bytes. ``waited`` is the number of seconds that the
    program has waited. ``begun`` says whether the program already runs.
    """
    size = link.request.get("memory") or memory
    what = f"a GPU slice of {format_bytes(size)}" if size else "a GPU slice"
    if link.unreachable_for():
        if link.reviver.expected:
            return "The GPU pool's broker has ended; the program waits until it is back."
        return f"Waiting for the GPU pool's broker at {link.path}."
    taken = ""
    if link.preempted and not (link.queue is not None and link.preempted in link.queue.reason):
        taken = sentence(f"the pool took the GPU from this program: {link.preempted}") + " "
    if link.state == "attaching" and link.queue is None:
        return f"Getting {what}." if not begun else f"Bringing the program back to {what}."
    text = f"{taken}Waiting for {what}"
    queue = link.queue
    if queue is not None:
        text += f": position {queue.position} of {queue.length}"
        if left := queue.left():
            text += f", {format_range(*left)} left"
    text += f". Waited {format_seconds(waited)}."
    return f"{text} {sentence(queue.reason)}".rstrip() if queue is not None else text


def too_long(link: SessionLink | None, seconds: float, option: str) -> RefusedError:
    """Return the error for a wait that has reached the limit set by ``option``."""
    queue = link.queue if link is not None else None
    why = queue.reason.strip().rstrip(".") if queue is not None else ""
    last = f"The last reason: {why}. " if why else ""
    return RefusedError(
        f"No GPU slice became free within {format_seconds(seconds)} ({option}).",
        code=Code.WAIT_TIMEOUT,
        next_step=f"{last}Try again later, ask for less memory, or wait longer.",
    )


class Progress:
    """Shows the wait of one program.

    Parameters
    ----------
    write:
        Shows a text to people: a line, or the control characters that remove a drawn line.
    screen:
        The descriptor of the terminal on which one line changes; None means plain lines.
    prefix:
        The beginning of each plain line.
    """

    def __init__(self, write: Callable[[str], None], screen: int | None, prefix: str) -> None:
        self._write = write
        self._screen = screen
        self._prefix = prefix
        self._since: float | None = None
        self._due = 0.0
        self._pause = PLAIN
        self._drawn = False
        self._told = False

    @property
    def waited(self) -> float:
        """The seconds waited so far; 0.0 if the program does not wait."""
        return 0.0 if self._since is None else time.monotonic() - self._since

    def waits(self, describe: Callable[[float], str]) -> None:
        """Note that the program waits, and show the next line if it is due.

        ``describe`` gets the seconds waited so far, and returns the text of the line.
        """
        now = time.monotonic()
        if self._since is None:
            self._since, self._due, self._pause = now, now + PATIENCE, PLAIN
        if now < self._due:
            return
        text = describe(now - self._since)
        if self._screen is None:
            self.say(text)
            self._told = True
            self._due, self._pause = now + self._pause, min(2 * self._pause, PLAIN_MOST)
        else:
            self._due = now + REDRAW
            if in_foreground(self._screen):
                self._write(f"\r{fitted(text, self._screen)}\x1b[K")
                self._drawn = True

    def over(self, say: bool = True) -> None:
        """Note that the wait is over, if there was one."""
        self.clear()
        if self._told and say and self._since is not None:
            self.say(f"The program has its GPU slice after {format_seconds(self.waited)}.")
        self._since, self._told = None, False

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._drawn:
            self._drawn = False
            self._write("\r\x1b[K")

    def say(self, text: str) -> None:
        """Write a line that stays on the screen."""
        self.clear()
        self._write(f"{self._prefix}{text}\n")

    @property
    def pause(self) -> float:
        """Seconds until the next drawing is due."""
        return max(0.05, self._due - time.monotonic()) if self._since is not None else REDRAW


def in_foreground(screen: int) -> bool:
    """Return whether this process is in the foreground of the terminal ``screen``."""
    try:
        return os.tcgetpgrp(screen) == os.getpgrp()
    except OSError:
        return False


def fitted(text: str, screen: int) -> str:
    """Return ``text`` cut to one line of the terminal."""
    try:
        columns = os.get_terminal_size(screen).columns
    except OSError:
        columns = shutil.get_terminal_size().columns
    width = max(20, (columns or 80) - 1)
    return text if len(text) <= width else f"{text[: width - 3]}..."
