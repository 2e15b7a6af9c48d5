# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Draws the pool as a picture made of text.

Pure: the module makes lines of text from a snapshot and a style.
"""

from __future__ import annotations

import string
import textwrap
import time
import unicodedata
from dataclasses import dataclass
from typing import Any, Iterable, Mapping, Sequence

from ..states import in_words
from ..units import (
    format_bytes,
    format_clock,
    format_grant,
    format_seconds,
    format_waited,
    guaranteed_bytes,
    idle_of,
    wait_of,
)

Snapshot = Mapping[str, Any]

#: Terminal colours (SGR codes of ECMA-48) by their meaning in the picture.
_COLOURS = {
    "running": "32",
    "idle": "33",
    "moving": "35",
    "foreign": "31",
    "free": "2",
    "dim": "2",
    "bold": "1",
    "alarm": "1;31",
    "emulated": "1;36",
}

#: By the meaning of a part of a bar: the character that fills the part on a terminal with Unicode,
#: and the character that fills it on any other terminal.
_FILLS = {
    "running": ("█", "#"),
    "idle": ("▒", "="),
    "moving": ("▞", "~"),
    "foreign": ("╳", "x"),
    "free": ("·", "."),
}
_WORDS = {
    "running": "running",
    "idle": "idle",
    "moving": "moving",
    "foreign": "outside the pool",
    "free": "free",
}
_KIND_OF_STATE = {
    "active": "running",
    "idle": "idle",
    "attaching": "moving",
    "detaching": "moving",
}
_LETTERS = string.ascii_uppercase + string.ascii_lowercase


@dataclass(frozen=True)
class Style:
    """How to draw: the number of columns, and whether to use colour and Unicode."""

    width: int = 80
    colour: bool = False
    unicode: bool = True

    def paint(self, text: str, colour: str) -> str:
        """Return ``text`` in ``colour``; unchanged if this style has no colours."""
        return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m" if self.colour and text else text

    def fill(self, kind: str) -> str:
        return _FILLS[kind][0 if self.unicode else 1]

    def cut(self, text: str, width: int) -> str:
        """Return ``text`` in at most ``width`` columns; an ellipsis marks a longer text."""
        text = printable(text)
        if columns(text) <= width:
            return text
        end = "…" if self.unicode else "..."
        while text and columns(text) + len(end) > width:
            text = text[:-1]
        return text + end[: max(0, width)]


def printable(text: str) -> str:
    """Return ``text`` with "?" in place of each control character.

    Users choose the labels of their sessions, so a label may contain control characters.
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def columns(text: str) -> int:
    """Return how many terminal columns ``text`` takes; wide characters take two."""
    return sum(1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


def draw(snapshot: Snapshot, style: Style) -> list[str]:
    """Return the lines of the whole picture: devices, sessions, queue, host memory."""
    place = {device["uuid"]: device["index"] for device in snapshot["devices"]}
    sessions = sorted(snapshot["sessions"], key=lambda s: _order(s, place))
    attached = (s["id"] for s in sessions if s.get("granted_bytes"))
    letters = dict(zip(attached, _LETTERS, strict=False))
    devices = snapshot["devices"]
    now = float(snapshot.get("now") or 0)
    # All bars have the same length, so that people can compare the bars. The longest text beside a
    # bar decides how much room is left for a bar.
    beside = max((len(_figures(device)) for device in devices), default=0)
    return [
        *_head(snapshot, style),
        *(line for d in devices for line in _device(d, sessions, letters, style, beside)),
        *_legend(snapshot, style),
        *_table(sessions, letters, now, style),
        *_queue(sessions, now, style),
        *_standing(snapshot, sessions, style),
        *_host(snapshot, style),
    ]


def _order(session: Snapshot, place: Mapping[str, int]) -> tuple[int, int, str]:
    """Return the sort key of a session: sessions with a slice by device, then the queue."""
    if session.get("granted_bytes"):
        return 0, place.get(str(session.get("device")), 0), str(session["id"])
    return 1, session.get("queue_position") or 1 << 30, str(session["id"])


def _head(snapshot: Snapshot, style: Style) -> list[str]:
    title = style.paint("GPU pool", "bold")
    label = "  " + style.paint("EMULATED", "emulated") if snapshot["emulated"] else ""
    used = 10 if snapshot["emulated"] else 0
    place = style.cut(f"  {snapshot['socket']}", max(0, style.width - 8 - used))
    lines = [f"{title}{label}{style.paint(place, 'dim')}"]
    problem = (snapshot.get("broker") or {}).get("journal_problem")
    if problem:
        lines.append(style.paint(style.cut(f"Journal: {problem}", style.width), "alarm"))
    if snapshot.get("driver_warning"):
        lines += style_warning(str(snapshot["driver_warning"]), style)
    for order in snapshot.get("maintenance") or ():
        lines.append(style.paint(style.cut(str(order["text"]), style.width), "alarm"))
    if snapshot.get("schedule"):
        lines += textwrap.wrap(_schedule(snapshot["schedule"]), style.width)
    if not snapshot["devices"]:
        lines += ["", style.paint("No GPU.", "alarm") + " `jupyter gpupool doctor` says why."]
    return lines


def _schedule(schedule: Snapshot) -> str:
    names = " and ".join(schedule["in_force"]) or "none"
    text = printable(f"Schedule in force: {names}")
    if schedule["next_change"] is None:
        return f"{text}."
    at = time.strftime("%a %d %b %H:%M", time.localtime(schedule["next_change"]))
    then = " and ".join(schedule["next"] or ()) or "none"
    return printable(f"{text}, until {at}; then {then}.")


def style_warning(text: str, style: Style) -> list[str]:
    """Return a warning as wrapped lines in the colour of alarms."""
    return [style.paint(line, "alarm") for line in textwrap.wrap(printable(text), style.width)]


def _figures(device: Snapshot) -> str:
    granted, free = format_bytes(device["memory_granted"]), device.get("memory_free")
    # If the device is out of service, the picture shows the reason in its next line.
    room = "not used" if device.get("drained_reason") else f"{format_bytes(free or 0)} free"
    busy = "" if device.get("utilisation") is None else f", {device['utilisation']} % busy"
    return f"{granted} of {format_bytes(device['memory_capacity'])} granted, {room}{busy}"


def _device(
    device: Snapshot,
    sessions: Sequence[Snapshot],
    letters: Mapping[str, str],
    style: Style,
    beside: int,
) -> list[str]:
    uuid = str(device["uuid"])
    title = f"GPU {device['index']}  "
    # The emulated driver names its GPUs "EMULATED NVIDIA GPU". Do not print the word a second time.
    unsaid = device["emulated"] and "EMULATED" not in str(device["name"]).upper()
    emulated = "  EMULATED" if unsaid else ""
    tier = f"  {device['tier']}"
    room = style.width - len(title) - len(emulated) - len(tier)
    name = style.cut(f"{device['name']}  {style.cut(uuid, 14)}", room)
    label = style.paint(emulated, "emulated") + style.paint(tier, "dim")
    lines = ["", style.paint(title, "bold") + name + label]

    capacity = max(1, int(device["memory_capacity"]))
    parts = [
        (_KIND_OF_STATE.get(s["state"], "running"), _share(s), letters.get(s["id"], ""))
        for s in sessions
        if s.get("granted_bytes") and uuid in _devices_of(s)
    ]
    if device.get("memory_foreign"):
        parts.append(("foreign", int(device["memory_foreign"]), ""))
    # The pool grants no memory of a device that is out of service. So the rest of the bar is blank.
    rest = " " if device.get("drained_reason") else style.fill("free")
    wide = style.width >= 72
    room = style.width - 2 - (beside + 1 if wide else 0)
    bar = f"[{_bar(parts, capacity, room, style, rest)}]"
    if wide:
        lines.append(f"{bar} {_figures(device)}")
    else:
        lines += [bar, style.cut(_figures(device), style.width)]
    if device.get("drained_reason"):
        reason = style.cut(f"Not used: {device['drained_reason']}", style.width)
        lines.append(style.paint(reason, "alarm"))
    elif not device.get("can_suspend", True):
        reason = device.get("tier_reason") or "the self-test failed"
        lines.append(style.cut(f"Cannot suspend: {reason}", style.width))
    return lines


def _devices_of(session: Snapshot) -> Sequence[str]:
    return session.get("devices") or [session["device"]] if session.get("device") else []


def _share(session: Snapshot) -> int:
    """Return the session's bytes on one of its devices; it has the same number on each device."""
    return int(session["granted_bytes"]) // max(1, len(_devices_of(session)))


def _bar(
    parts: Iterable[tuple[str, int, str]], capacity: int, room: int, style: Style, rest: str
) -> str:
    """Return a bar of ``room`` columns.

    Each part gets at least one column, so that a small part is visible, too. If the bar has no
    column left, the part gets none.
    """
    drawn: list[str] = []
    left = max(0, room)
    exact = 0.0
    used = 0
    for kind, size, letter in parts:
        exact += size / capacity * room
        columns = min(left, max(1, round(exact) - used))
        used, left = used + columns, left - columns
        text = (letter + style.fill(kind) * columns)[:columns]
        drawn.append(style.paint(text, kind))
    drawn.append(style.paint(rest * left, "free"))
    return "".join(drawn)


def _legend(snapshot: Snapshot, style: Style) -> list[str]:
    if not snapshot["devices"]:
        return []
    words = [f"{style.fill(k)} {word}" for k, word in _WORDS.items()]
    return ["", style.paint(style.cut("  ".join(words), style.width), "dim")]


def _table(
    sessions: Sequence[Snapshot], letters: Mapping[str, str], now: float, style: Style
) -> list[str]:
    if not sessions:
        return ["", "No kernel is in the pool."]
    titles = (
        *("", "SESSION", "OWNER", "GROUP", "STATE", "SLICE"),
        *("USES", "ON HOST", "WAITED", "GPU-S LEFT", "KERNEL"),
    )
    rows = [titles, *(_row(session, letters, now) for session in sessions)]
    keep = [n for n, title in enumerate(titles) if title not in _OPTIONAL or _used(rows[1:], n)]
    widths = {n: max(len(row[n]) for row in rows) for n in keep}
    lines = [""]
    for number, row in enumerate(rows):
        text = "  ".join(row[n].ljust(widths[n]) for n in keep).rstrip()
        text = style.cut(text, style.width)
        lines.append(style.paint(text, "bold") if number == 0 else text)
    notes = [(s["id"], str(s["pinned_reason"])) for s in sessions if s.get("pinned_reason")]
    lines += [style.cut(f"{_short(i)} cannot be suspended: {why}", style.width) for i, why in notes]
    for session in sessions:
        if session.get("overuse_bytes"):
            text = (
                f"{_short(session['id'])} has {format_bytes(session['overuse_bytes'])} more than "
                "its slice, allocated without the guard"
            )
            lines.append(style.cut(text, style.width))
    return lines


#: Columns that are left out while they are empty.
_OPTIONAL = frozenset({"GROUP", "USES", "ON HOST", "WAITED", "GPU-S LEFT", "KERNEL"})


def _used(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column] for row in rows)


def _row(session: Snapshot, letters: Mapping[str, str], now: float) -> tuple[str, ...]:
    state = in_words(session)
    idle = idle_of(session, now)
    if state == "idle" and idle is not None:
        state = f"idle {format_seconds(idle)}{_leaving(session, now)}"
    return (
        letters.get(session["id"], " "),
        _short(session["id"]),
        str(session["owner"]),
        printable(str(session.get("group") or "")),
        state,
        _granted(session) or "-",
        _uses(session) if session.get("granted_bytes") else "",
        _size(session.get("suspended_bytes")),
        # Round this time as the list of waiting sessions does, so that the table and the list show
        # the same time.
        format_waited(session.get("wait_seconds_total") or 0.0),
        _left(session),
        str(session.get("label") or ""),
    )


def _leaving(session: Snapshot, now: float) -> str:
    """Return a text about when an idle session loses its slice; "" if it keeps the slice.

    If a waiting session wants the slice, the text says only whether the session may lose it now.
    """
    if session.get("wanted"):
        kept = (session.get("keep_until") or 0.0) > now
        return ", kept" if kept else ", may move"
    leaves = session.get("leaves_at")
    return "" if leaves is None else f", leaves in {format_clock(leaves - now)}"


def _short(session_id: str) -> str:
    """Return the beginning of a session's id; `release` accepts any unique beginning."""
    return str(session_id)[:12]


def _uses(session: Snapshot) -> str:
    """Return the session's memory use: the guard's count, or else the last measurement."""
    counted = session.get("used_bytes")
    return _size(session.get("footprint_bytes") if counted is None else counted)


def _left(session: Snapshot) -> str:
    """Return what is left of the session's daily budget, in GPU-seconds; "" without a budget.

    If its user and its group both have a daily budget, the budget with less left counts. If one of
    them is used up, the text is "none".
    """
    found = [session.get(name) or {} for name in ("usage", "group_usage")]
    left = [u["daily"] - u["today"] for u in found if u.get("daily") is not None]
    if not left:
        return ""
    return "none" if any(u.get("spent") for u in found) else f"{max(0.0, min(left)):.0f}"


def _granted(session: Snapshot) -> str:
    granted = session.get("granted_bytes")
    return format_grant(granted, guaranteed_bytes(session)) if granted else ""


def _size(value: int | None) -> str:
    return format_bytes(value) if value else ""


def _queue(sessions: Sequence[Snapshot], now: float, style: Style) -> list[str]:
    waiting = [s for s in sessions if s["state"] == "queued"]
    if not waiting:
        return []
    lines = ["", style.paint("WAITING", "bold")]
    for session in waiting:
        # The status has no ``request`` of another user's session, only ``asks``. It also has no
        # estimate of how long that session will wait.
        request = session.get("request") or session.get("asks") or {}
        asks = ""
        if request.get("memory"):
            asks = f" asks for {format_bytes(request['memory'])}"
            if request.get("devices", 1) > 1:
                asks += f" on each of {request['devices']} GPUs"
        if session.get("owner") == "other":
            why = _others_wait(session, now)
        else:
            why = f", {wait_of(session, now)}"
            why += f": {session['wait_reason']}" if session.get("wait_reason") else ""
        place = f"{session['queue_position']}." if session.get("queue_position") else "-"
        text = printable(f"{_short(session['id'])}{asks}{why}")
        lines += textwrap.wrap(
            text, style.width, initial_indent=f"{place} ", subsequent_indent=" " * (len(place) + 1)
        )
    return lines


def _others_wait(session: Snapshot, now: float) -> str:
    """Return a text: what another user's kernel waits for, and how long it has waited so far."""
    what, since = session.get("waits_for"), session.get("queued_at")
    so_far = "" if since is None else format_waited(now - since)
    if not so_far:
        return f" and waits for {what}" if what else ""
    return f" and has waited {so_far}" + (f" for {what}" if what else "")


def _standing(snapshot: Snapshot, sessions: Sequence[Snapshot], style: Style) -> list[str]:
    """Return lines with the viewer's guarantees, shares and daily budgets, without duplicates."""
    found = [*(snapshot.get("standing") or ())]
    for session in sessions:
        found += session.get("standing") or ()
    lines = [""] if found else []
    for sentence in dict.fromkeys(found):
        lines += textwrap.wrap(printable(sentence), style.width, subsequent_indent="  ")
    return lines


def _host(snapshot: Snapshot, style: Style) -> list[str]:
    host = snapshot.get("host") or {}
    budget, used = host.get("budget_bytes"), host.get("used_bytes")
    if not budget:
        return []
    size = f"{format_bytes(used or 0)} of {format_bytes(budget)}"
    text = f" {size} host memory used by suspended state"
    room = max(10, min(24, style.width - len(text) - 2))
    parts = [("idle", used, "")] if used else []
    bar = _bar(parts, budget, room, style, style.fill("free"))
    return ["", f"[{bar}]{style.cut(text, style.width - room - 2)}"]
