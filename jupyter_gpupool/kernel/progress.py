# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a waiting cell shows, and how it leaves no trace.

The display is the first output of its cell: nothing has been printed yet when a cell waits. So one
``clear_output`` when the wait is over removes it from the notebook, saved file included.
"""

from __future__ import annotations

import html
import time
from typing import Any, Callable

from ..units import format_bytes, format_seconds, format_wait
from .link import Link
from .values import Wait

#: Seconds of waiting before anything is shown: an ordinary attach is over by then.
PATIENCE = 0.25

HOW_TO_STOP = "Interrupt the kernel to stop waiting; the cell will not run."
HOW_TO_STOP_CALL = "A CUDA call of this cell waits; interrupt the kernel to end the cell."

Publish = Callable[[str, dict[str, Any]], None]


def describe(link: Link) -> str:
    """Return one line on what this hold is waiting for."""
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


def sentence(reason: str) -> str:
    """Return the broker's ``reason`` with a capital and a full stop; names stay as they are."""
    text = reason.strip()
    first = text.split(" ", 1)[0]
    if first.rstrip(",;:").isalpha():
        text = text[0].upper() + text[1:]
    return text if not text or text.endswith((".", "!", "?")) else f"{text}."


def worth_showing(link: Link, wait: Wait) -> bool:
    """Return whether the user should hear of this wait (yet)."""
    return link.queue is not None or time.monotonic() - wait.since >= PATIENCE


class WaitDisplay:
    """The line in the cell: published once, updated when its text changes, cleared at the end."""

    def __init__(self, publish: Publish, display_id: str, hint: str = HOW_TO_STOP) -> None:
        self._publish = publish
        self._id = display_id
        self._hint = hint
        self._shown = ""
        #: Messages that the cell's output area got from here.
        self.published = 0

    @property
    def shown(self) -> bool:
        """Whether the cell shows the line now."""
        return bool(self._shown)

    def show(self, text: str) -> None:
        """Show ``text``; nothing is sent if it is what the cell shows already."""
        if text == self._shown:
            return
        self._shown = text
        markup = (
            '<div class="gpupool-wait" style="color: var(--jp-ui-font-color2, #666)">'
            f"&#x23f3; {html.escape(text)}<br><small>{html.escape(self._hint)}</small></div>"
        )
        self._data(f"{text} {self._hint}", markup)

    def clear(self) -> None:
        """Remove the line, and all that the cell shows. Safe to call when nothing was shown."""
        if self._shown:
            self._shown = ""
            self.published = 0
            self._publish("clear_output", {"wait": False})

    def empty(self) -> None:
        """Leave nothing to see of the line, where the cell shows other things as well."""
        if self._shown:
            self._shown = ""
            self._data("", "")

    def _data(self, text: str, markup: str) -> None:
        kind = "update_display_data" if self.published else "display_data"
        self.published += 1
        self._publish(
            kind,
            {
                "data": {"text/plain": text, "text/html": markup},
                # For a front end that must remove the line itself: the kernel was restarted.
                "metadata": {"gpupool": {"wait": True}},
                "transient": {"display_id": self._id},
            },
        )
