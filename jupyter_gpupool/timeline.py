# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Draw a pool's history from the rows of the broker's journal: as text and as SVG.

A lane is the line of one session; it shows the session's ``state`` rows in the journal. The broker
writes these rows before it acts, so a lane may show a state that the notebook saw later or not at
all.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Iterable, Mapping, Sequence

from .units import format_bytes

JournalRow = Mapping[str, Any]


@dataclass(frozen=True)
class Span:
    """One session in one state for a while. Times are seconds since the epoch."""

    start: float
    end: float
    state: str
    device: str | None


@dataclass(frozen=True)
class Lane:
    """One session: its label and its spans, oldest first."""

    session: str
    label: str
    spans: tuple[Span, ...]


#: The character of a state in a text lane; an attached state shows its device's index instead.
_MARKS = {"detached": "·", "queued": "?", "attaching": "^", "detaching": "v", "suspended": "-"}
_COLOURS = {
    "detached": "#e8eaed",
    "queued": "#f6c244",
    "attaching": "#9fc5b4",
    "detaching": "#c9b3d9",
    "suspended": "#8fa3bf",
}
_DEVICE_COLOURS = ("#2a9d5c", "#2f6fd0", "#c8553d", "#7b4fb5", "#1d8a99", "#a87b12")


def lanes(rows: Iterable[JournalRow], end: float) -> list[Lane]:
    """Return one lane per session, in the order the sessions opened.

    ``rows`` are journal rows, oldest first. Each lane's last span ends at ``end``.
    """
    labels: dict[str, str] = {}
    changes: dict[str, list[tuple[float, str, str | None]]] = {}
    for row in rows:
        session = row.get("session")
        if not session:
            continue
        if row["kind"] == "open":
            labels[session] = row.get("detail", {}).get("label") or session[:8]
            changes[session] = [(row["time"], "detached", None)]
        elif row["kind"] == "state" and session in changes:
            detail = row.get("detail", {})
            state = detail["new"]
            if state == "detached" and detail.get("suspended_bytes"):
                state = "suspended"
            changes[session].append((row["time"], state, row.get("device")))
    result = []
    for session, steps in changes.items():
        ends = [*(at for at, _, _ in steps[1:]), end]
        spans = tuple(
            Span(at, until, state, device)
            for (at, state, device), until in zip(steps, ends, strict=True)
            if state != "ended" and until > at
        )
        result.append(Lane(session, labels[session], spans))
    return result


def draw_text(lanes: Sequence[Lane], devices: Sequence[str], width: int = 72) -> str:
    """Return the lanes as lines of text. The whole time has a width of ``width`` characters.

    ``devices`` are UUIDs in the order of their indices.
    """
    lanes = [lane for lane in lanes if lane.spans]
    if not lanes:
        return "(no sessions in the journal)"
    start = min(lane.spans[0].start for lane in lanes)
    end = max(lane.spans[-1].end for lane in lanes)
    step = max(end - start, 1e-9) / width
    name_width = max(len(lane.label) for lane in lanes)
    lines = []
    for lane in lanes:
        cells = [" "] * width
        # Draw short spans last, so that even the shortest one is visible.
        for span in sorted(lane.spans, key=lambda s: s.start - s.end):
            first = min(width - 1, int((span.start - start) / step))
            last = max(first + 1, int((span.end - start) / step))
            mark = _MARKS.get(span.state)
            if mark is None and span.device is not None:
                mark = str(devices.index(span.device)) if span.device in devices else "#"
            for column in range(first, min(last, width)):
                cells[column] = mark or "#"
        lines.append(f"{lane.label:>{name_width}}  {''.join(cells)}")
    ruler = f"{'0 s':<{width - 8}}{end - start:>6.1f} s"
    lines.append(f"{'':>{name_width}}  {ruler}")
    lines.append(
        f"{'':>{name_width}}  0 1 2  attached to that device    ^ attaching   v suspending\n"
        f"{'':>{name_width}}  -      suspended in host memory   ? waiting     · no GPU state"
    )
    return "\n".join(lines)


def draw_svg(lanes: Sequence[Lane], devices: Sequence[str], names: Sequence[str]) -> str:
    """Return the lanes as a stand-alone SVG picture; ``names`` label the devices."""
    start = min(lane.spans[0].start for lane in lanes)
    end = max(lane.spans[-1].end for lane in lanes)
    left, width, row, bar = 150, 700, 40, 24
    scale = width / max(end - start, 1e-9)
    height = row * len(lanes) + 110
    out = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {left + width + 20} {height}" '
            'font-family="system-ui, sans-serif" font-size="13" role="img" '
            'aria-label="Timeline of the notebooks that shared the pool">'
        ),
        f'<rect width="{left + width + 20}" height="{height}" fill="#ffffff"/>',
    ]
    for index, lane in enumerate(lanes):
        y = 16 + index * row
        label = escape(lane.label)
        out.append(
            f'<text x="{left - 12}" y="{y + 17}" text-anchor="end" fill="#202124">{label}</text>'
        )
        for span in lane.spans:
            x, w = left + (span.start - start) * scale, max(1.5, (span.end - span.start) * scale)
            colour = _COLOURS.get(span.state)
            where = ""
            if colour is None:
                number = devices.index(span.device) if span.device in devices else 0
                colour, where = _DEVICE_COLOURS[number % len(_DEVICE_COLOURS)], f" on GPU {number}"
            title = escape(f"{span.state}{where}, {span.end - span.start:.2f} s")
            out.append(
                f'<rect x="{x:.1f}" y="{y}" width="{w:.1f}" height="{bar}" fill="{colour}">'
                f"<title>{title}</title></rect>"
            )
    y = 16 + len(lanes) * row + 4
    for second in range(int(end - start) + 1):
        x = left + second * scale
        if second % max(1, int((end - start) / 10)) == 0:
            out.append(
                f'<text x="{x:.1f}" y="{y + 8}" fill="#5f6368" font-size="11">{second} s</text>'
            )
    legend = [(_DEVICE_COLOURS[i % len(_DEVICE_COLOURS)], name) for i, name in enumerate(names)]
    legend += [
        (_COLOURS["queued"], "waiting"),
        (_COLOURS["detaching"], "suspending"),
        (_COLOURS["suspended"], "in host memory"),
        (_COLOURS["attaching"], "restoring"),
        (_COLOURS["detached"], "no GPU state"),
    ]
    x, y = 12, y + 26
    for colour, name in legend:
        room = 44 + 7 * len(name)
        if x + room > left + width:
            x, y = 12, y + 24
        out.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{colour}"/>')
        out.append(f'<text x="{x + 20}" y="{y + 12}" fill="#202124">{escape(name)}</text>')
        x += room
    out.append("</svg>")
    return "\n".join(out) + "\n"


def describe(
    rows: Iterable[JournalRow], labels: Mapping[str, str], devices: Sequence[str]
) -> list[str]:
    """Return one line for each attach, resume, move and suspend, in the order of ``rows``.

    Most lines have the bytes or the seconds of the change.
    """
    first: float | None = None
    why: dict[str, str] = {}
    lines = []
    for row in rows:
        if first is None and row["kind"] == "open":
            first = row["time"]
        kind, session, detail = row["kind"], row.get("session") or "", row.get("detail") or {}
        if kind == "state" and detail.get("new") == "detaching":
            why[session] = row.get("reason") or ""
        where = _name(row.get("device"), devices)
        size, seconds = format_bytes(row.get("bytes") or 0), row.get("seconds") or 0.0
        waited = f", after waiting {seconds:.2f} s" if seconds >= 0.005 else ""
        if kind == "attach":
            text = f"attached to {where} with a slice of {size}{waited}"
        elif kind == "resume":
            took = detail.get("driver_seconds", 0.0)
            text = f"restored on {where} in {took:.2f} s{waited}"
        elif kind == "migrate":
            text = f"moved from {_name(detail.get('from'), devices)} to {where}"
        elif kind == "suspend":
            reason = f": {why[session]}" if why.get(session) else ""
            text = f"suspended from {where}, {size} to host memory in {seconds:.2f} s{reason}"
        else:
            continue
        since = row["time"] - (first if first is not None else row["time"])
        lines.append(f"{since:7.2f} s  {labels.get(session, session[:8])} {text}")
    return lines


def _name(device: str | None, devices: Sequence[str]) -> str:
    return f"GPU {devices.index(device)}" if device in devices else str(device)
