# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the user can do about a wait: advice from the broker while a cell waits.

JupyterLab shows buttons in place of these sentences (``labextension/src/waits``).
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any, Mapping

from ..errors import GPUPoolError
from ..protocol import Message
from ..units import format_bytes, typed_bytes
from .link import SessionLink

#: The shortest time between two requests for advice, in seconds. SOON applies if the kernel's place
#: in the queue has changed. Otherwise AGAIN applies.
AGAIN = 10.0
SOON = 1.0

#: The advice names at most this many of the user's own kernels.
MOST_NAMED = 3


class Ways:
    """Requests the broker's advice at intervals, and does not wait for the answer."""

    def __init__(self, link: SessionLink) -> None:
        self._link = link
        self._asked: Future[Message] | None = None
        self._about: object = None
        self._at = 0.0
        self._found: tuple[str, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """Return the advice in the broker's last answer; send the next request if it is due."""
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            if not asked.cancelled() and asked.exception() is None:
                self._found = ways(asked.result())
        place, now = self._link.queue, time.monotonic()
        about = place and (place.position, place.length, place.reason)
        pause = AGAIN if about == self._about else SOON
        if self._link.state != "queued":
            self._found = ()
        elif self._asked is None and now - self._at >= pause:
            self._about, self._at = about, now
            try:
                self._asked = self._link.start_call("why")
            except GPUPoolError:
                self._found = ()  # the line about the wait says that there is no broker
        return self._found


def ways(answer: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the advice in the broker's answer to ``why``, as sentences."""
    found = []
    size = answer.get("starts_with_bytes")
    if isinstance(size, int):
        found.append(
            f"This cell would start now with {format_bytes(size)}: stop waiting, run %gpu "
            f"{typed_bytes(size)}, then run the cell again."
        )
    held: dict[str, int] = {}
    for lease in answer.get("holders") or ():
        if lease.get("own") and lease.get("use") != "leaving":
            name = str(lease.get("label") or lease.get("session"))
            held[name] = held.get(name, 0) + int(lease.get("bytes") or 0)
    for name, bytes_ in [*held.items()][:MOST_NAMED]:
        found.append(
            f"Your kernel {name} has {format_bytes(bytes_)}: to free this memory, run %gpu release "
            "there."
        )
    return tuple(found)
