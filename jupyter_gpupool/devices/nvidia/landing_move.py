# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Move one process to the devices of its session's slice.

A process is bound to the devices that it saw at cuInit. When the process makes its first context,
its session's slice may be on another device. In this case the process makes the context on the
device that it is bound to, and then *lands*: the broker suspends only this process, and restores it
on the device of the slice. See ``guard/src/landing.c``, ``broker/gpu/landing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Mapping, Sequence

from ...procfs import ProcessId
from ..model import Continued, ResumeOutcome, SuspendOutcome
from .operations import Operation


@dataclass(frozen=True)
class LandingMove:
    """A move of a process from ``origin[i]`` to ``devices[i]``.

    ``need`` has the bytes that must be free on each of ``devices``, and ``at_least`` those that
    must be free on each device of ``origin`` before a refused move is undone. ``everything`` has
    all GPUs of the machine.

    The move calls ``restoring`` after the suspend and before the restore. If it then restores the
    process on ``origin``, it calls ``staying`` before that.
    """

    devices: Sequence[str]
    origin: Sequence[str]
    need: Mapping[str, int]
    at_least: Mapping[str, int]
    everything: Sequence[str]
    restoring: Callable[[], None]
    staying: Callable[[], None]

    async def land(self, operation: Operation) -> ResumeOutcome:
        """Move the process of ``operation``.

        If the result is ``refused`` or ``no-room``, the process runs on its old devices. ``stay``
        is True if the driver cannot move the process. If ``operation.kept`` is not empty, the
        process is still suspended, and :meth:`Operation.bring_back` can restore it on its old
        devices. After ``failed`` or ``hung``, the driver has lost the process.
        """
        operation.require(operation.root, self.at_least)
        suspended = await operation.suspend(self.origin)
        if suspended.status in ("gone", "failed", "hung"):
            return ResumeOutcome(suspended.status, suspended.message)
        if suspended.status != "suspended":
            text = suspended.message or "The driver offers no way to suspend the process."
            refused = operation.refused or suspended
            return ResumeOutcome("refused", text, stay=refused.status != "drain")
        self.restoring()
        outcome = await operation.again().resume(
            self.devices, self.origin, self.need, self.everything
        )
        if outcome.status in ("no-room", "refused"):
            self.staying()
            trouble = await operation.undo(operation.touched)
            if trouble:
                return ResumeOutcome("failed", trouble[1])
            text = operation.keep(SuspendOutcome("drain", outcome.message)).message
            return ResumeOutcome(outcome.status, text, stay=outcome.stay)
        return replace(
            outcome,
            seconds=suspended.seconds + outcome.seconds,
            driver_seconds=operation.driver_seconds,
        )


async def interrupted(
    operation: Operation,
    process: ProcessId,
    at_least: Mapping[str, int],
    staying: Callable[[], None],
    *,
    patience: float,
) -> Continued:
    """After a broker has died while it moved a process: let the process continue without a move.

    A restore begins only if the bytes ``at_least`` are free on each device, and after a call of
    ``staying``. It waits ``patience`` seconds for the room.
    """
    state = await operation.state()
    if state == "hung":
        return Continued(
            state, f"Process {process.pid} is stopped, or the driver does not answer for it."
        )
    if state == "failed":
        return Continued(state, f"The driver has lost the state of process {process.pid}.")
    if state not in ("locked", "checkpointed"):
        return Continued(state)
    if state == "checkpointed":
        staying()
    again = operation.again()
    again.require(process, at_least)
    trouble = await again.undo([process], patience=patience)
    if trouble:
        return Continued("failed" if trouble[0] == "failed" else "hung", trouble[1])
    if again.kept:
        return Continued(state, again.kept_why, refused=again.kept_with_room)
    stopped = process in again.unsettled
    return Continued(state, f"Process {process.pid} is stopped (SIGSTOP)." if stopped else "")
