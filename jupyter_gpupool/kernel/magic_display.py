# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The output of ``%gpu``: the same rows as HTML in a notebook and as text in a console."""

from __future__ import annotations

import html
import time
from typing import Any, Mapping, Sequence

from ..states import in_words
from ..units import (
    format_bytes,
    format_clock,
    format_grant,
    format_seconds,
    guaranteed_bytes,
    idle_of,
    wait_of,
)
from .command import SUBCOMMANDS
from .guard_state import MemoryFigures

_STYLE = (
    "border-collapse: collapse; font-size: var(--jp-code-font-size, 13px); "
    "color: var(--jp-content-font-color1, inherit)"
)

#: The text that users see for each state.
_STATES = {
    "detached": "no slice now; the next cell that needs one gets it",
    "queued": "waiting for a slice",
    "attaching": "getting its slice",
    "active": "in use",
    "idle": "idle",
    "detaching": "giving its slice back",
    "ended": "ended",
}


def _rows_text(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _rows_html(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(
        f'<tr><th style="text-align: left; padding: 1px 12px 1px 0">{html.escape(name)}</th>'
        f'<td style="text-align: left; padding: 1px 0">{html.escape(value)}</td></tr>'
        for name, value in rows
    )
    return f'<table class="gpupool-table" style="{_STYLE}">{cells}</table>'


def _table_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(head))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        style = 'style="text-align: left; padding: 1px 12px 1px 0"'
        inner = "".join(f"<{tag} {style}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    body = "".join(line("td", row) for row in rows)
    return (
        f'<table class="gpupool-table" style="{_STYLE}"><thead>{line("th", head)}</thead>'
        f"<tbody>{body}</tbody></table>"
    )


class _Display:
    """A result that IPython shows as HTML or as text."""

    def text(self) -> str:
        raise NotImplementedError

    def html(self) -> str:
        raise NotImplementedError

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": self.text(), "text/html": self.html()}


class SessionDisplay(_Display):
    """The output of ``%gpu`` for one session.

    ``session`` is the session's entry in the status snapshot. With ``details`` the output has all
    rows.
    """

    def __init__(
        self,
        session: Mapping[str, Any],
        snapshot: Mapping[str, Any] | None,
        problem: str = "",
        *,
        details: bool = False,
    ) -> None:
        self._rows = session_rows(session, snapshot or {}, details=details)
        self._problem = problem

    def text(self) -> str:
        text = _rows_text(self._rows)
        return f"{text}\n\n{self._problem}" if self._problem else text

    def html(self) -> str:
        note = f"<p>{html.escape(self._problem)}</p>" if self._problem else ""
        return _rows_html(self._rows) + note


def session_rows(
    session: Mapping[str, Any], snapshot: Mapping[str, Any], *, details: bool = False
) -> list[tuple[str, str]]:
    """Return the rows that describe ``session``, without rows for unknown values.

    With ``details``, the rows also show how the session gets its slice, its priority class, and
    whether the guard is on.
    """
    state = str(session.get("state", "detached"))
    text = _STATES.get(state, state)
    if state == "detached":
        text = _DETACHED.get(str(session.get("attach")), text)
    rows = [("GPU slice", text)]
    granted = session.get("granted_bytes") or 0
    if granted:
        where = device_names(session.get("devices") or (), snapshot)
        size = format_grant(granted, guaranteed_bytes(session))
        rows.append(("granted", f"{size} on {where}" if where else ""))
    figures: MemoryFigures | None = session.get("figures")
    if figures is not None and figures.granted:
        rows.append(("in use", _used(figures)))
    elif session.get("footprint_bytes"):
        rows.append(("in use", format_bytes(session["footprint_bytes"])))
    if session.get("suspended_bytes"):
        rows.append(("in host memory", format_bytes(session["suspended_bytes"])))
    elif figures is not None and figures.used and not figures.granted:
        rows.append(("in host memory", format_bytes(figures.used)))
    request = session.get("request") or {}
    if isinstance(request.get("memory"), int):
        rows.append(("asks for", _request(request, bool(session.get("guard")), details)))
    if figures is not None and figures.waiting:
        threads = "1 thread waits" if figures.waiting == 1 else f"{figures.waiting} threads wait"
        rows.append(("CUDA calls", f"{threads} for the slice"))
    if session.get("queue_position"):
        rows.append(("queue", _queue(session, snapshot)))
    if session.get("preempted"):
        rows.append(("preempted", str(session["preempted"])))
    if session.get("wait_reason"):
        rows.append(("waits because", str(session["wait_reason"])))
    elif not granted and (why := _all_out_of_service(snapshot)):
        rows.append(("no GPU now", why))
    if session.get("pinned_reason"):
        rows.append(("cannot be moved", str(session["pinned_reason"])))
    elif session.get("stays_reason"):
        rows.append(("stays", str(session["stays_reason"])))
    if session.get("host_note"):
        rows.append(("host memory", str(session["host_note"])))
    if granted:
        rows += _leaving_rows(session, snapshot)
    if session.get("standing"):
        rows.append(("share", " ".join(session["standing"])))
    if details and session.get("attach"):
        rows.append(("attaches", _ATTACH.get(str(session["attach"]), str(session["attach"]))))
    # Show this row also without ``details`` if the guard is off: nothing then enforces the slice.
    if "guard" in session and (details or not session["guard"]):
        rows.append(("guard", _GUARD if session["guard"] else f"off: {session['guard_reason']}"))
    if snapshot.get("emulated") or any(
        d.get("emulated") and d.get("uuid") in (session.get("devices") or ())
        for d in snapshot.get("devices") or ()
    ):
        rows.append(("note", "EMULATED devices: no real GPU is used"))
    return rows


#: Maps an attach policy to the text for a session without a slice. The text says how to get a
#: slice. Policy ``cell`` is absent, because it uses the text in ``_STATES``.
_DETACHED = {
    "manual": "no slice now; type %gpu attach to get one",
    "lazy": "no slice now; the next CUDA call gets it",
}

_ATTACH = {
    "cell": "when a cell starts",
    "manual": "only on %gpu attach",
    "lazy": "at the first CUDA call",
}


#: The text about a slice on a device that cannot suspend. The pool can still take such a slice
#: while the session has no state on the device.
STAYS = (
    "Once used, the slice stays until the kernel ends: state on this GPU cannot be moved to host "
    "memory."
)


_GUARD = "on: CUDA calls wait for the slice, allocations are kept within it"


def _used(figures: MemoryFigures) -> str:
    text = f"{format_bytes(figures.used)} of {format_bytes(figures.granted)}"
    if figures.limit > figures.granted:
        text += f", may grow to {format_bytes(figures.limit)}"
    return text


def _leaving_rows(session: Mapping[str, Any], snapshot: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows that show how long the session keeps its slice."""
    rows: list[tuple[str, str]] = []
    so = idle_of(session, float(snapshot.get("now") or 0))
    idle = "" if so is None else f"for {format_seconds(so)}"
    kept = float(session.get("kept_until") or 0.0)
    leaves, now = session.get("leaves_at"), snapshot.get("now")
    if stays(session.get("devices") or (), snapshot):
        rows.append(("stays", STAYS))
    elif kept > time.time():
        clock = time.strftime("%H:%M", time.localtime(kept))
        rows.append(("kept", f"until {clock}, {format_seconds(kept - time.time())} from now"))
    elif idle and session.get("wanted"):
        idle += "; may move to host memory at any moment: another kernel waits"
    elif idle and leaves is not None and now is not None and not _cannot_leave(session):
        idle += f"; back to the pool in {format_clock(leaves - now)}"
    return [("idle", idle), *rows] if idle else rows


def _cannot_leave(session: Mapping[str, Any]) -> bool:
    return bool(session.get("pinned_reason") or session.get("stays_reason"))


def stays(devices: Sequence[str], snapshot: Mapping[str, Any]) -> bool:
    """Return whether one of a slice's ``devices`` cannot suspend."""
    known = {d.get("uuid"): d for d in snapshot.get("devices") or ()}
    return any(known.get(uuid, {}).get("can_suspend") is False for uuid in devices)


def _request(request: Mapping[str, Any], guarded: bool, details: bool = True) -> str:
    text = format_bytes(request["memory"])
    limit = request.get("limit")
    if isinstance(limit, int) and limit > request["memory"]:
        text += f", limit {format_bytes(limit)}"
        if not guarded:
            text += " (not enforced)"
    if isinstance(request.get("devices"), int) and request["devices"] > 1:
        text += f", on each of {request['devices']} devices"
    if isinstance(request.get("compute"), int) and request["compute"] != 100:
        text += f", {request['compute']} % of the compute time"
    if details and request.get("priority"):
        text += f", class {request['priority']}"
    return text


def _queue(session: Mapping[str, Any], snapshot: Mapping[str, Any]) -> str:
    text = f"position {session['queue_position']}"
    if session.get("queue_length"):
        text += f" of {session['queue_length']}"
    if "now" in snapshot and (expected := wait_of(session, snapshot["now"])):
        text += f", {expected}"
    return text


def _all_out_of_service(snapshot: Mapping[str, Any]) -> str:
    """Return why all GPUs are out of service; "" if at least one GPU is in service."""
    reasons = [str(d.get("drained_reason") or "") for d in snapshot.get("devices") or ()]
    return "; ".join(dict.fromkeys(reasons)) if reasons and all(reasons) else ""


def device_names(devices: Sequence[str], snapshot: Mapping[str, Any]) -> str:
    """Return a text with the index and the name of each device.

    The text has the UUID of a device that ``snapshot`` does not contain.
    """
    known = {d.get("uuid"): d for d in snapshot.get("devices") or ()}
    names = []
    for uuid in devices:
        device = known.get(uuid)
        names.append(f"GPU {device['index']} ({device['name']})" if device else str(uuid))
    return ", ".join(names)


class PoolDisplay(_Display):
    """The output of ``%gpu pool``: all devices and all sessions.

    The output has only the values that this user may see.
    """

    def __init__(self, snapshot: Mapping[str, Any], own: str) -> None:
        self._devices = [_device_row(d) for d in snapshot.get("devices") or ()]
        self._sessions = [_session_row(s, own, snapshot) for s in snapshot.get("sessions") or ()]
        self._title = "GPU pool" + (" (EMULATED devices)" if snapshot.get("emulated") else "")
        length = snapshot.get("queue_length") or 0
        self._queue = f"{length} waiting" if length else "no kernel waits"

    _DEVICE_HEAD = ("device", "name", "free", "granted", "capacity", "note")
    _SESSION_HEAD = ("session", "owner", "state", "granted", "device", "queue")

    def text(self) -> str:
        parts = [f"{self._title}: {self._queue}", _table_text(self._DEVICE_HEAD, self._devices)]
        if self._sessions:
            parts.append(_table_text(self._SESSION_HEAD, self._sessions))
        return "\n\n".join(parts)

    def html(self) -> str:
        sessions = _table_html(self._SESSION_HEAD, self._sessions) if self._sessions else ""
        title = f"<p><b>{html.escape(self._title)}</b>: {html.escape(self._queue)}</p>"
        return f"{title}{_table_html(self._DEVICE_HEAD, self._devices)}{sessions}"


def _device_row(device: Mapping[str, Any]) -> list[str]:
    capacity = device.get("memory_capacity") or device.get("memory_total") or 0
    note = str(device.get("drained_reason") or "")
    if not note and device.get("can_suspend") is False:
        note = "slices cannot be moved to host memory here"
    return [
        f"GPU {device.get('index', '?')}",
        str(device.get("name", "")),
        "none" if device.get("drained_reason") else _size(device.get("memory_free")),
        _size(device.get("memory_granted")),
        _size(capacity),
        note,
    ]


def _session_row(session: Mapping[str, Any], own: str, snapshot: Mapping[str, Any]) -> list[str]:
    mine = session.get("id") == own
    device = session.get("device")
    return [
        "this kernel" if mine else str(session.get("label") or session.get("id", "")),
        str(session.get("owner", "")),
        in_words(session),
        _size(session.get("granted_bytes")),
        device_names([device], snapshot) if device else "",
        str(session.get("queue_position") or ""),
    ]


def _size(value: Any) -> str:
    return format_bytes(int(value)) if isinstance(value, (int, float)) else "?"


class LinesDisplay(_Display):
    """``%gpu why``: sentences, one per line."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines

    def text(self) -> str:
        return "\n".join(self._lines)

    def html(self) -> str:
        return "".join(f'<p style="margin: 2px 0">{html.escape(x)}</p>' for x in self._lines)


class HelpDisplay(_Display):
    """``%gpu help``."""

    def __init__(self, request: Mapping[str, Any], guarded: bool = False) -> None:
        self._rows = [
            *SUBCOMMANDS.values(),
            ("%%gpu 16GiB", "ask for this much memory for one cell only"),
        ]
        asks = _request(request, guarded, details=False) if request.get("memory") else ""
        self._now = f"This kernel asks for {asks}." if asks else ""

    def text(self) -> str:
        return _rows_text(self._rows) + (f"\n\n{self._now}" if self._now else "")

    def html(self) -> str:
        note = f"<p>{html.escape(self._now)}</p>" if self._now else ""
        return _rows_html(self._rows) + note
