# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The words of the agent: a slice, a place in the queue, a wait. No I/O."""

from __future__ import annotations

import time
from typing import Any, Callable, Mapping, NamedTuple

from ..errors import GPUPoolError
from ..protocol import Message


class Slice(NamedTuple):
    """Bytes of device memory on the device with this UUID."""

    device: str
    bytes: int


def slices_of(message: Mapping[str, Any]) -> tuple[Slice, ...]:
    return tuple(Slice(str(s["device"]), int(s["bytes"])) for s in message.get("slices") or ())


class Wait:
    """One hold that waits for its lease.

    ``answer`` is None while it waits, then the broker's ``ok``, or the error that ended it.
    ``on_change`` is called, in any thread, whenever something about the wait may have changed.
    """

    def __init__(self, hold: str, kind: str, on_change: Callable[[], None]) -> None:
        self.hold = hold
        self.kind = kind
        self.on_change = on_change
        self.since = time.monotonic()
        self.asked = False
        #: Attempts to reach the broker that had failed when the wait began.
        self.failures = 0
        self.answer: Message | GPUPoolError | None = None


class Queue(NamedTuple):
    """Where a waiting session stands; ``position`` 1 is next, ``eta`` in seconds or None."""

    position: int
    length: int
    eta: float | None
    reason: str


class Refused(NamedTuple):
    """The broker's answer to a CUDA call that got no slice or no memory.

    ``what`` is ``attach`` or ``grow``.
    """

    what: str
    code: str
    message: str
    next_step: str
