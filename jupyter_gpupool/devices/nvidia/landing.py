# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One process moved to other devices, without the rest of its session.

A process is bound to the devices that it saw at cuInit. If its session has its slice elsewhere
when it wants its first context, it takes one where it is, and is then suspended there and restored
on the slice. See ``guard/src/landing.c`` and ``broker/gpu/landing.py``.
"""

from __future__ import annotations

from typing import Callable, Mapping, Sequence

from ...procfs import ProcessId
from ..model import ResumeOutcome
from .operations import Operation


async def land(
    operation: Operation,
    devices: Sequence[str],
    origin: Sequence[str],
    need: Mapping[str, int],
    everything: Sequence[str],
    *,
    restoring: Callable[[], None],
) -> ResumeOutcome:
    """Move the process of ``operation`` from ``origin[i]`` to ``devices[i]``.

    ``restoring`` is called when it is suspended, before the driver is told where to restore it.
    Whatever the driver refuses leaves the process running where it was (``refused``, ``no-room``;
    ``stay`` if the driver does not move it), unless the driver lost it (``failed``, ``hung``).
    """
    suspended = await operation.suspend(origin)
    if suspended.status in ("gone", "failed", "hung"):
        return ResumeOutcome(suspended.status, suspended.message)
    if suspended.status != "suspended":
        text = suspended.message or "The driver offers no way to suspend it."
        return ResumeOutcome("refused", text, stay=suspended.status != "drain")
    restoring()
    outcome = await operation.again().resume(devices, origin, need, everything)
    if outcome.status in ("no-room", "refused"):
        back = await undo(operation)
        if back:
            return ResumeOutcome("failed", back)
        return ResumeOutcome(outcome.status, outcome.message, stay=outcome.stay)
    return ResumeOutcome(
        outcome.status,
        outcome.message,
        suspended.seconds + outcome.seconds,
        operation.driver_seconds,
    )


async def undo(operation: Operation) -> str:
    """Let the process of ``operation`` run where it is; return what stands in the way."""
    trouble = await operation.again().undo([operation.root])
    return trouble[1] if trouble else ""


async def interrupted(operation: Operation, process: ProcessId) -> tuple[str, str]:
    """Find a process whose landing a broker left in its middle, and let it run where it is.

    Return the driver's state as it was found, and what stands in the way of running.
    """
    state = await operation.state()
    if state in ("locked", "checkpointed"):
        trouble = await operation.again().undo([process])
        return state, trouble[1] if trouble else ""
    return state, ""
