# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The table of ``jupyter gpupool top``: the slice of each session, and its use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Mapping, Sequence

from ..states import in_words
from ..units import format_bytes, format_seconds, format_waited, idle_of
from .picture import Style, columns, printable

Snapshot = Mapping[str, Any]

#: The columns by which the table can be sorted. ``<`` and ``>`` step through them in this order.
SORTS = ("waste", "slice", "used", "busy", "unused", "idle", "waits", "owner")

#: The table shows BUSY and UNUSED of a session, and sorts it by waste, only if the session has had
#: a slice for at least this many seconds.
LEAST = 1.0


@dataclass(frozen=True)
class TopRow:
    """One session. A value is None if it is not known, or if this user may not see it."""

    id: str
    owner: str
    name: str
    gpus: str
    state: str
    priority: str
    slice: int
    used: int | None
    #: ``unused``: for how many seconds the session had a slice, but did not use CUDA. ``busy``: the
    #: session used CUDA for this fraction (from 0 to 1) of the time in which it had a slice.
    busy: float | None
    unused: float | None
    idle: float | None
    kept: float | None
    recalled: float | None
    waits: float | None

    @property
    def waste(self) -> float | None:
        """The product of the slice in bytes and ``unused`` in seconds."""
        return None if self.unused is None else self.slice * self.unused


def rows(snapshot: Snapshot) -> list[TopRow]:
    """Return a row for each session of a status."""
    now = float(snapshot["now"])
    place = {device["uuid"]: device["index"] for device in snapshot["devices"]}
    return [_row(session, now, place) for session in snapshot["sessions"]]


def _row(session: Snapshot, now: float, place: Mapping[str, int]) -> TopRow:
    counted, busy = session.get("counted_seconds"), session.get("busy_seconds")
    share = unused = None
    if counted is not None and busy is not None and counted >= LEAST:
        share, unused = min(1.0, busy / counted), max(0.0, counted - busy)
    used = session.get("used_bytes")
    used = session.get("footprint_bytes") if used is None else used
    since = session.get("queued_at") if session["state"] == "queued" else None
    return TopRow(
        id=str(session["id"]),
        owner=printable(str(session["owner"])),
        name=printable(str(session.get("label") or "")),
        gpus=",".join(str(place.get(uuid, "?")) for uuid in session.get("devices") or ()),
        state=in_words(session),
        priority=str(session.get("priority") or ""),
        slice=int(session.get("granted_bytes") or 0),
        used=used if session.get("granted_bytes") else None,
        busy=share,
        unused=unused,
        idle=idle_of(session, now),
        kept=_left(session.get("keep_until"), now),
        recalled=_left(session.get("recall_at"), now),
        waits=None if since is None else max(0.0, now - since),
    )


def _left(at: float | None, now: float) -> float | None:
    return None if at is None or at <= now else at - now


def in_order(found: Sequence[TopRow], sort: str, *, inverted: bool = False) -> list[TopRow]:
    """Return the rows sorted by the column ``sort``; rows without a value there come last."""

    def value(row: TopRow) -> Any:
        return getattr(row, sort)

    known = [row for row in found if value(row) is not None]
    # Sort owners from A to Z and numbers from the largest to the smallest; ``inverted`` reverses
    # this order. Rows with the same value are sorted by id.
    known.sort(key=lambda row: row.id)
    known.sort(key=value, reverse=(sort != "owner") != inverted)
    rest = sorted((row for row in found if value(row) is None), key=lambda row: row.id)
    return [*known, *rest]


def _size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)


def _time(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _kept(row: TopRow) -> str:
    if row.recalled is not None:
        return f"back in {format_seconds(row.recalled)}"
    return "" if row.kept is None else format_seconds(row.kept)


def _waits(row: TopRow) -> str:
    """Return how long the session has waited, rounded as everywhere else."""
    return "" if row.waits is None else format_waited(row.waits)


#: For each column: its title; its name in ``SORTS`` ("" if the table cannot be sorted by it); a
#: function that returns the text of a row; and whether the column contains numbers.
_COLUMNS: tuple[tuple[str, str, Callable[[TopRow], str], bool], ...] = (
    ("SESSION", "", lambda row: row.id[:12], False),
    ("OWNER", "owner", lambda row: row.owner, False),
    ("KERNEL", "", lambda row: row.name[:24], False),
    ("GPU", "", lambda row: row.gpus, False),
    ("STATE", "", lambda row: row.state, False),
    ("SLICE", "slice", lambda row: format_bytes(row.slice) if row.slice else "", True),
    ("USED", "used", lambda row: _size(row.used) if row.slice else "", True),
    ("BUSY", "busy", lambda row: "" if row.busy is None else f"{row.busy:.0%}", True),
    ("UNUSED", "unused", lambda row: _time(row.unused), True),
    ("IDLE", "idle", lambda row: _time(row.idle), True),
    ("KEPT", "", _kept, True),
    ("WAITS", "waits", _waits, True),
)


def lines(found: Sequence[TopRow], sort: str, style: Style) -> list[str]:
    """Return the heading and one line for each row. A mark shows the sorted column."""
    mark = "▼" if style.unicode else "v"
    titles = [f"{title}{mark}" if by == sort else title for title, by, _, _ in _COLUMNS]
    cells = [[text(row) for _, _, text, _ in _COLUMNS] for row in found]
    widths = [max(columns(row[n]) for row in (titles, *cells)) for n in range(len(titles))]
    return [
        style.cut(
            "  ".join(
                _pad(text, width, right=figure)
                for text, width, (_, _, _, figure) in zip(row, widths, _COLUMNS, strict=True)
            ).rstrip(),
            style.width,
        )
        for row in (titles, *cells)
    ]


def _pad(text: str, width: int, *, right: bool) -> str:
    space = " " * (width - columns(text))
    return space + text if right else text + space


def head(snapshot: Snapshot, style: Style) -> list[str]:
    """Return one line for the pool, and one line for each GPU."""
    sessions = snapshot["sessions"]
    having = sum(bool(session.get("granted_bytes")) for session in sessions)
    emulated = "  EMULATED" if snapshot["emulated"] else ""
    gpus = len(snapshot["devices"])
    waiting = snapshot["queue_length"]
    text = f"GPU pool{emulated}  {gpus} GPU{'' if gpus == 1 else 's'}, "
    found = [f"{text}{having} of {len(sessions)} kernels have a slice, {waiting} waiting"]
    for device in snapshot["devices"]:
        granted, capacity = device["memory_granted"], device["memory_capacity"]
        busy = device.get("utilisation")
        text = f"{format_bytes(granted)} of {format_bytes(capacity)} granted"
        text += ", busy: not known" if busy is None else f", {busy} % busy"
        if device.get("drained_reason"):
            text += f", not used: {printable(str(device['drained_reason']))}"
        full = round(20 * min(1.0, granted / max(1, capacity)))
        bar = style.fill("running") * full + style.fill("free") * (20 - full)
        found.append(f"GPU {device['index']:<2} [{bar}] {text}")
    return [style.cut(line, style.width) for line in found]
