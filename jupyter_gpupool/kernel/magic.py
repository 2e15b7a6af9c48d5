# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``%gpu``: shows and changes the kernel's slice. An error is one message, never a traceback."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Mapping, Sequence

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_cell_magic, magics_class
from IPython.display import display

from ..errors import BrokerUnavailable, Code, GPUPoolError
from ..units import format_bytes, format_seconds, parse_bytes
from .advice import no_broker
from .cells import CellGate
from .command import OPTIONS, SUBCOMMANDS, parse_command
from .guard_state import NO_GUARD
from .holds import Slice
from .link import SessionLink
from .magic_display import (
    STAYS,
    HelpDisplay,
    LinesDisplay,
    PoolDisplay,
    SessionDisplay,
    device_names,
    stays,
)
from .waits import HOW_TO_STOP_MAGIC, TICK, WaitDisplay, describe, worth_showing

_NOT_POOLED = (
    "This kernel has no GPU pool session. Start a kernel whose name says Pooled GPU, or make "
    "one from this kernel with `jupyter gpupool wrap`."
)


@magics_class
class GPUMagics(Magics):  # type: ignore[misc]
    """The line magic ``%gpu``. It also refuses a ``%%gpu`` line that the gate has not executed."""

    def __init__(
        self, shell: Any, link: SessionLink | None, gate: CellGate | None, no_session: str = ""
    ) -> None:
        super().__init__(shell)
        self._no_session = no_session
        self.link = link
        self.gate = gate
        self._ids = itertools.count(1)

    @line_cell_magic  # type: ignore[untyped-decorator]
    def gpu(self, line: str, cell: str | None = None) -> None:
        """Show and change this kernel's share of the GPU pool. ``%gpu help`` lists everything.

        %gpu                      what this kernel has, asks for and waits for
        %gpu 12GiB                ask for 12 GiB of device memory
        %gpu memory 12GiB --limit 20GiB
        %gpu devices 2
        %gpu compute 50           a share of compute time, in per cent
        %gpu attach / %gpu release / %gpu keep 10m
        %gpu details              the same, with values that are rarely needed
        %gpu why                  why it waits, or who may take its slice
        %gpu pool                 the whole pool
        %%gpu 16GiB               16 GiB for this cell only (first line of a cell)
        """
        try:
            if cell is not None:
                raise GPUPoolError(
                    "%%gpu works only as the first line of a cell: the kernel waits for the slice "
                    "before the cell runs.",
                    next_step="Put %%gpu on the first line, or type %gpu with a size and then "
                    "%gpu attach.",
                )
            self._run(line)
        except GPUPoolError as error:
            if isinstance(error, BrokerUnavailable) and self.link is not None:
                error = no_broker(self.link, error)
            raise UsageError(str(error)) from None

    def _run(self, line: str) -> None:
        if self.link is not None:
            self.link.wait_ready()
        request = self.link.request if self.link is not None else {}
        command = parse_command(line, request)
        if command.name == "help":
            guarded = self.gate is not None and self.gate.guard.on
            display(HelpDisplay(request, guarded))
            return
        if self.link is None or self.gate is None:
            if self._no_session:
                raise GPUPoolError(
                    f"This kernel runs without a GPU: {self._no_session}",
                    code=Code.NOT_POOLED,
                    next_step="Then restart the kernel.",
                )
            raise GPUPoolError(_NOT_POOLED, code=Code.NOT_POOLED)
        if command.name in ("status", "details"):
            self._status(self.link, details=command.name == "details")
        elif command.name == "pool":
            display(PoolDisplay(self.link.call("status"), self.link.session))
        elif command.name == "why":
            answer = self.link.call("why")
            machines = []
            if answer.get("clustered") and answer["state"] == "queued":
                machines = self.link.call("elsewhere")["machines"]
            display(LinesDisplay([*answer["lines"], *answer["standing"], *machines]))
        elif command.name == "attach":
            self._attach(self.link, self.gate)
        elif command.name == "release":
            answer = self.link.call("release")
            print(answer.get("note") or "The GPU slice goes back to the pool.")
        elif command.name == "keep":
            answer = self.link.call("keep", **command.fields)
            seconds = format_seconds(float(command.fields["seconds"]))
            print(answer.get("note") or f"The GPU slice is kept for {seconds}, even when idle.")
        else:  # memory, devices, compute and priority change the request
            answer = self.link.call("request", **command.fields)
            print(_request_text(answer, self.gate.guard.on, command.fields))
            self.gate.request_changed()

    def _status(self, link: SessionLink, *, details: bool) -> None:
        try:
            snapshot = link.call("status")
        except BrokerUnavailable as error:
            # Show the agent's own values, which are still right. Also show the error, which
            # explains why the broker's values are missing.
            known = {"devices": list(link.devices.values())}
            session = {**_own_view(link), **self._guarded({})}
            problem = str(no_broker(link, error))
            display(SessionDisplay(session, known, problem, details=details))
            return
        own = next((s for s in snapshot.get("sessions", ()) if s.get("id") == link.session), None)
        caps = self.gate.caps.problem if self.gate is not None else ""
        session = {"kept_until": link.kept_until, **(own or _own_view(link))}
        session = {**session, **self._guarded(snapshot)}
        display(SessionDisplay(session, snapshot, caps, details=details))

    def _guarded(self, snapshot: Mapping[str, Any]) -> dict[str, Any]:
        """Return the guard's state and figures, as fields to add to the session's status."""
        if self.gate is None:
            return {}
        guard = self.gate.guard
        why = guard.problem
        if why == NO_GUARD:  # the broker knows the reason
            why = str((snapshot.get("settings") or {}).get("attach_reason") or why)
        return {"guard": guard.on, "guard_reason": why, "figures": guard.figures()}

    def _attach(self, link: SessionLink, gate: CellGate) -> None:
        """Wait for the slice in this cell.

        The wait blocks the kernel, as every magic does. An interrupt by the user ends the wait.
        """
        hold = f"manual-{next(self._ids)}"
        changed = threading.Event()
        shown = WaitDisplay(gate.publisher(), f"gpupool-{hold}", link, HOW_TO_STOP_MAGIC)
        interrupted = threading.Event()

        def stop() -> None:
            interrupted.set()

        try:
            if not link.take(hold, "manual"):
                with gate.interrupts.watch(stop):
                    wait = link.wait(hold, "manual", changed.set)
                    while wait.answer is None:
                        if interrupted.is_set():
                            raise GPUPoolError(
                                "You stopped the wait for a GPU slice; nothing on the GPU has "
                                "changed.",
                                next_step="Type %gpu attach to queue again.",
                            )
                        if link.given_up(wait):
                            raise link.unavailable()
                        if worth_showing(link, wait):
                            shown.show(describe(link))
                        changed.wait(TICK)
                        changed.clear()
                    if isinstance(wait.answer, GPUPoolError):
                        raise wait.answer
            gate.settle()
            slices = link.slices
        finally:
            shown.clear()
            link.drop(hold)
        print(_attached_text(link, slices))


def _attached_text(link: SessionLink, slices: Sequence[Slice]) -> str:
    if any(s.device not in link.devices for s in slices):
        try:
            link.call("status")
        except GPUPoolError:
            pass  # the kernel has the slice; only the device's name is unknown
    size = format_bytes(sum(s.bytes for s in slices))
    known = {"devices": list(link.devices.values())}
    uuids = [s.device for s in slices]
    where = device_names(uuids, known)
    if stays(uuids, known):
        return f"Attached: {size} on {where}. {STAYS}"
    return (
        f"Attached: {size} on {where}. The slice stays until the kernel is idle too long, or is "
        "idle while another kernel waits."
    )


def _request_text(answer: Any, guarded: bool, asked: Mapping[str, Any]) -> str:
    request = answer.get("request") or {}
    parts = []
    if isinstance(request.get("memory"), int):
        parts.append(f"{format_bytes(request['memory'])} of device memory")
    if isinstance(request.get("limit"), int) and request["limit"] != request.get("memory"):
        unguarded = "" if guarded else " (not enforced)"
        parts.append(f"limit {format_bytes(request['limit'])}{unguarded}")
    if isinstance(request.get("devices"), int) and request["devices"] > 1:
        parts.append(f"on each of {request['devices']} devices")
    if isinstance(request.get("compute"), int) and request["compute"] != 100:
        parts.append(f"{request['compute']} % of the compute time")
    if request.get("priority") and "priority" in asked:
        parts.append(f"in class {request['priority']}")
    text = "Asked for " + ", ".join(parts) + "." if parts else "The request is changed."
    note = answer.get("note") or ""
    if guarded and parts and not note:
        note = "The change takes effect on the next allocation."
    return f"{text} {note}".rstrip()


def _own_view(link: SessionLink) -> dict[str, Any]:
    """Return the agent's own data in the form of a status entry."""
    return {
        "id": link.session,
        "state": link.state,
        "attach": link.policy,
        "granted_bytes": sum(s.bytes for s in link.slices),
        "devices": [s.device for s in link.slices],
        "request": link.request,
        "pinned_reason": link.pinned_reason,
        "preempted": link.preempted,
        "kept_until": link.kept_until,
        "queue_position": link.queue.position if link.queue else None,
    }


_SIZES = ("4GiB", "8GiB", "16GiB")


def complete_gpu(_shell: Any, event: Any, limits: Mapping[str, Any] | None = None) -> list[str]:
    """Return the completions for a line with ``%gpu`` or ``%%gpu``.

    IPython calls this function as a ``complete_command`` hook. ``limits`` are the session's limits;
    the function offers no value above them.
    """
    limits = limits or {}
    words = str(event.line).split()
    at_end = not event.line or event.line.endswith(" ")
    before = words[1:] if at_end else words[1:-1]
    most = limits.get("memory")
    sizes = [s for s in _SIZES if not isinstance(most, int) or parse_bytes(s) <= most]
    if words and words[0].startswith("%%"):
        return sizes if not before else [f"--{name}" for name in OPTIONS]
    if not before:
        return [*SUBCOMMANDS, *sizes]
    examples = {
        "keep": ["10m", "1h"],
        "devices": ["1", "2"] if limits.get("devices") != 1 else ["1"],
        "compute": ["25", "50", "100"],
        "priority": [str(name) for name in limits.get("priorities") or ()],
        "memory": [*sizes, *(f"--{name}" for name in OPTIONS)],
    }
    if before[0] in examples:
        return examples[before[0]]
    if before[0] not in SUBCOMMANDS:
        return [f"--{name}" for name in OPTIONS]
    return []
