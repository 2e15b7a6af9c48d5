# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a notebook shows: a waiting cell, the line under an error, and the output of ``%gpu``."""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any
from unittest import mock

from jupyter_gpupool.errors import BrokerUnavailable, GPUPoolError
from jupyter_gpupool.kernel.advice import explain, no_broker
from jupyter_gpupool.kernel.call_waits import RunningRequest
from jupyter_gpupool.kernel.command import parse_cell_header, parse_command
from jupyter_gpupool.kernel.frameworks import OURS_VARIABLE, Visible
from jupyter_gpupool.kernel.guard_state import MemoryFigures
from jupyter_gpupool.kernel.holds import CallRefusal, QueuePlace, Slice
from jupyter_gpupool.kernel.link import SessionLink
from jupyter_gpupool.kernel.magic import GPUMagics
from jupyter_gpupool.kernel.magic_display import HelpDisplay, PoolDisplay, SessionDisplay
from jupyter_gpupool.kernel.waits import (
    HOW_TO_STOP,
    HOW_TO_STOP_CALL,
    HOW_TO_STOP_PREEMPTED,
    describe,
    describe_preempted,
    interrupted,
    stopped,
)
from jupyter_gpupool.kernel.ways import ways
from jupyter_gpupool.pool.running import REMEDIES

from .sheet import Sheet

GiB = 1 << 30
SOCKET = "/run/user/1000/gpupool/broker.sock"
REASON = "all 32 GiB in use by running cells"


def link(path: str = SOCKET, **changes: Any) -> SessionLink:
    """Return the link of an agent to its session, as it is while a broker runs."""
    found = SessionLink(path, "s1", "token")
    found._down_since = None
    found.request = {"memory": 8 * GiB, "limit": 8 * GiB, "devices": 1}
    found.limits = {"memory": 16 * GiB}
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def waiting(sheet: Sheet) -> None:
    """Write what a cell shows while it waits, and at the end of the wait."""
    place = QueuePlace(2, 3, REASON, 1000.0, (1024.0, 1058.0))
    with mock.patch("time.monotonic", return_value=1000.0):
        sheet.put("It waits in the queue", describe(link(queue=place)))
        long = link(queue=QueuePlace(2, 3, REASON, 953.0))
        sheet.put("It waits, and has no estimate", describe(long))
    sheet.put("It is getting its slice", describe(link(state="attaching")))
    sheet.put("Its state is being restored", describe(link(state="attaching", suspended=True)))
    sheet.put("It has sent its request", describe(link()))
    sheet.put("Below each of these, before the cell", HOW_TO_STOP)
    sheet.put("Below each of these, in a CUDA call", HOW_TO_STOP_CALL)
    taken = "a kernel of a higher priority class needs the GPU"
    gone = link(state="queued", suspended=True, preempted=taken, queue=place)
    with mock.patch("time.monotonic", return_value=1000.0):
        sheet.put("Its slice is taken in its middle", describe_preempted(gone))
    sheet.put("Below that", HOW_TO_STOP_PREEMPTED)
    cell = RunningRequest({}, False, 0)
    cell.times, cell.why, cell.away, cell.remedy = 1, taken, 12.0, REMEDIES[taken]
    sheet.put("It goes on", cell.story(True))
    cell.times, cell.away = 3, 95.0
    sheet.put("It goes on once more", cell.story(True))
    sheet.put("It ends before that", cell.story(False))
    sheet.put("The wait was interrupted", str(interrupted()), interrupted().code)
    sheet.put("The wait of a CUDA call was interrupted", stopped(link()))
    sheet.put("The same, with state in host memory", stopped(link(suspended=True)))
    held = {"session": "s2", "own": True, "label": "alpha.ipynb", "bytes": 6 * GiB, "use": "busy"}
    helps = ways({"starts_with_bytes": 3 * GiB, "holders": [held]})
    sheet.put("What helps against the wait", " ".join(helps))
    away = link()
    away._down_since = 1.0
    sheet.put("No broker answers", describe(away))
    away.reviver.expected = True
    sheet.put("The broker is being started again", describe(away))
    service = link("/run/gpupool/broker.sock")
    service._down_since = 1.0
    service.reviver.expected = True
    sheet.put("The machine's broker does not answer", describe(service))
    missing = BrokerUnavailable(f"No GPU pool broker listens at {SOCKET}.", code="no-broker")
    sheet.put("No broker answered in time", str(no_broker(link(), missing)), missing.code)
    whole = BrokerUnavailable("No GPU pool broker answers.", code="no-broker")
    sheet.put("No broker of the machine answered", str(no_broker(service, whole)), whole.code)
    silent = link().unavailable()
    sheet.put("A running broker does not answer", str(silent), silent.code)


class Guard:
    """Acts as the guard of a session, and reports the figures that its constructor got."""

    on = True

    def __init__(self, figures: MemoryFigures | None = None, managed: bool = True) -> None:
        self._figures = figures
        self._managed = managed

    def figures(self) -> MemoryFigures | None:
        return self._figures

    def refuses_managed(self) -> bool:
        return not self._managed


def errors(sheet: Sheet) -> None:
    """Write the line below the error of a cell."""
    oom = "CUDA out of memory. Tried to allocate 3.00 GiB."
    full = MemoryFigures(used=7 * GiB, granted=8 * GiB, limit=12 * GiB, waiting=0)
    attached = {"attached": True, "slices": (Slice("GPU-5d1c", 8 * GiB),)}

    def put(
        situation: str, guard: Guard, refused: CallRefusal | None, text: str, own: SessionLink
    ) -> None:
        name = "OutOfMemoryError" if "memory" in text else "RuntimeError"
        sheet.put(situation, explain(own, guard, refused, name, text))

    put("Out of memory, under the guard", Guard(full), None, oom, link(**attached))
    put("Out of memory, without the guard", Guard(), None, oom, link(**attached))
    most = link(**attached, limits={"memory": 8 * GiB})
    put("Out of memory, and a larger slice is not allowed", Guard(full), None, oom, most)
    put("Out of memory, without a slice", Guard(), None, oom, link())
    limit = CallRefusal(
        "grow",
        "limit",
        "This kernel asked for 5 GiB in addition to its slice of 8 GiB; the limit of this kernel "
        "is 12 GiB",
        "Free memory in the kernel.",
    )
    put("A CUDA call asked for more than the limit", Guard(full), limit, oom, link(**attached))
    full_pool = CallRefusal("grow", "no-memory", "Nothing is free on this GPU", "Try again later")
    put("A CUDA call found no free memory", Guard(full), full_pool, oom, link(**attached))
    not_ready = "CUDA error: system not yet initialized"
    put("A CUDA call waited and got no slice", Guard(), None, not_ready, link())
    away = link()
    away._down_since = 1.0
    away.down = BrokerUnavailable(f"No GPU pool broker listens at {SOCKET}.", code="no-broker")
    put("A CUDA call waited, and no broker answered", Guard(), None, not_ready, away)
    managed = "CUDA error: operation not supported"
    put("Managed memory is refused", Guard(managed=False), None, managed, link(**attached))


def visible(sheet: Sheet) -> None:
    """Write what an assignment to CUDA_VISIBLE_DEVICES prints."""
    for text, situation in (("3", "names no GPU of this kernel"), ("0,3", "names one too many")):
        shown = io.StringIO()
        with (
            mock.patch.dict(os.environ, {OURS_VARIABLE: "GPU-5d1c"}),
            contextlib.redirect_stderr(shown),
        ):
            Visible(lambda: ["GPU-5d1c"]).check(text)
        sheet.put(f"CUDA_VISIBLE_DEVICES {situation}", shown.getvalue())


# --------------------------------------------------------------------------- %gpu

SNAPSHOT = {
    "devices": [
        {
            "uuid": "GPU-5d1c", "index": 0, "name": "NVIDIA H100", "can_suspend": True,
            "memory_free": 4 * GiB, "memory_granted": 12 * GiB, "memory_capacity": 16 * GiB,
        },
        {
            "uuid": "GPU-7e2f", "index": 1, "name": "NVIDIA H100", "can_suspend": True,
            "memory_capacity": 16 * GiB, "memory_granted": 0, "drained_reason": "Xid 79",
        },
        {
            "uuid": "MIG-11aa", "index": 2, "name": "NVIDIA H100 MIG", "can_suspend": False,
            "memory_free": 8 * GiB, "memory_granted": 0, "memory_capacity": 8 * GiB,
        },
    ],
    "sessions": [
        {"id": "s1", "owner": "ada", "state": "active", "granted_bytes": 8 * GiB,
         "device": "GPU-5d1c", "label": "train.ipynb"},
        {"id": "s2", "owner": "ada", "state": "queued", "granted_bytes": 0, "queue_position": 1,
         "label": "viz.ipynb"},
        {"id": "s3", "owner": "other", "state": "idle", "granted_bytes": 4 * GiB,
         "device": "GPU-5d1c"},
    ],
    "queue_length": 1,
    "now": 1000.0,
    "settings": {"idle_timeout": 300.0},
}  # fmt: skip

SESSION: dict[str, Any] = {
    "id": "s1", "state": "active", "attach": "lazy", "granted_bytes": 8 * GiB,
    "devices": ["GPU-5d1c"],
    "request": {"memory": 8 * GiB, "limit": 12 * GiB, "devices": 1, "compute": 50,
                "priority": "notebook"},
    "figures": MemoryFigures(6 * GiB, 8 * GiB, 12 * GiB, 0), "guard": True, "guard_reason": "",
}  # fmt: skip

COMMANDS = (
    "atach", "help me", "memory", "memory twelve", "1,500", "0GiB", "12GiB --limt 20GiB",
    "12GiB --limit", "12GiB --limit 8GiB", "devices two", "compute 101", "keep soon", "keep",
    "priority a b",
)  # fmt: skip


def magic(sheet: Sheet) -> None:
    """Write what ``%gpu`` shows."""
    gone = {"granted_bytes": 0, "devices": [], "figures": None}

    def put(situation: str, **changes: Any) -> None:
        sheet.put(f"%gpu {situation}", SessionDisplay({**SESSION, **changes}, SNAPSHOT).text())

    put("of a kernel that computes")
    details = SessionDisplay(SESSION, SNAPSHOT, details=True)
    sheet.put("%gpu details of the same kernel", details.text())
    put("of a kernel in a group, with a grown slice",
        slices=[{"device": SESSION["devices"][0], "granted_bytes": SESSION["granted_bytes"]}],
        request={**SESSION["request"], "memory": 4 * GiB},
        standing=["Your group is bio.", "You have 70 of 100 GPU-seconds left today."])  # fmt: skip
    put("of an idle kernel", state="idle", idle_since=960.0, leaves_at=1260.0)
    put("of an idle kernel while others wait", state="idle", idle_since=960.0, wanted=True)
    put("of an idle kernel that stays", state="idle", idle_since=600.0,
        stays_reason="The driver refused to suspend it.")  # fmt: skip
    put("of a kernel that the driver cannot move", pinned_reason="it uses managed memory")
    put("of a kernel on a GPU that cannot suspend", devices=["MIG-11aa"])
    put("of a waiting kernel", state="queued", queue_position=2, queue_length=3, queued_at=900.0,
        wait_reason=REASON, **{**gone, "figures": MemoryFigures(0, 0, 12 * GiB, 2)})  # fmt: skip
    put("of one that was preempted", state="queued", queue_position=1, queue_length=3,
        preempted="a kernel of a higher priority class needs the GPU",
        suspended_bytes=6 * GiB, wait_reason=REASON, **gone)  # fmt: skip
    put("of a suspended kernel", state="detached", suspended_bytes=6 * GiB, **gone)
    put("without a slice, policy manual", state="detached", attach="manual", **gone)
    put("without a slice, policy cell", state="detached", attach="cell", **gone,
        guard=False, guard_reason="the broker does not guard this kernel")  # fmt: skip
    put("while its state moves", state="detaching")
    put("while it gets a slice", state="attaching", **gone)
    sheet.put("%gpu pool", PoolDisplay(SNAPSHOT, "s1").text())
    sheet.put("%gpu help", HelpDisplay(SESSION["request"], guarded=True).text())
    sheet.sub("Input that %gpu refuses")
    for line in COMMANDS:
        sheet.put(f"%gpu {line}", _refused(lambda line=line: parse_command(line, {})))
    for header in ("%%gpu", "%%gpu attach", "%%gpu much"):
        sheet.put(header, _refused(lambda header=header: parse_cell_header(header, {})))
    plain = GPUMagics.__new__(GPUMagics)
    plain.link, plain.gate, plain._no_session = None, None, ""
    sheet.put("%gpu in a kernel without the pool", _refused(lambda: plain._run("")), "not-pooled")


def _refused(call: Any) -> str:
    try:
        call()
    except GPUPoolError as error:
        return str(error)
    raise AssertionError("it was accepted")
