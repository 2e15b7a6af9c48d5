# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A Sphinx directive ``mermaid`` that draws the state diagram of ``states.md`` as a static SVG.

The directive can draw only this diagram. Each state has a fixed place, chosen so that the life of a
session runs clockwise. The page loads no script, and the build needs no other tool.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

WIDTH, HEIGHT, BOX = 800, 330, (104, 36)

#: The centre of each state's box. Every state can lead to ``ended``. So a text replaces the arrows
#: to ``ended``.
PLACES = {
    "detached": (90, 160),
    "queued": (270, 60),
    "attaching": (480, 60),
    "active": (700, 60),
    "idle": (700, 260),
    "detaching": (480, 260),
    "ended": (90, 290),
}
#: The fill and the border colour of each state. The colour shows whether the session has no slice,
#: waits for a slice, gets or loses a slice, has a slice, or has ended.
FILLS = {
    "detached": ("#f5f5f5", "#9aa0a6"),
    "queued": ("#fdf4dd", "#c48a00"),
    "attaching": ("#f1ecf9", "#7b4fb5"),
    "active": ("#e9f6ee", "#2a9d5c"),
    "idle": ("#e9f6ee", "#2a9d5c"),
    "detaching": ("#f1ecf9", "#7b4fb5"),
    "ended": ("#fbeceb", "#c8553d"),
}

Point = tuple[float, float]


def steps(text: str) -> list[tuple[str, str]]:
    """Return the arrows between named states of a Mermaid state diagram, as old and new state.

    Raises
    ------
    ValueError
        If the diagram names a state that has no place in PLACES.
    """
    found = re.findall(r"^\s*(\w+)\s*-->\s*(\w+)", text, re.MULTILINE)
    unknown = sorted({name for step in found for name in step} - set(PLACES))
    if unknown:
        raise ValueError(f"docs/state_diagram.py has no place for the state {unknown[0]!r}.")
    return found


def svg(arrows: list[tuple[str, str]]) -> str:
    """Return the picture as SVG."""
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            'aria-label="The states of a session; the tables below say the same" '
            'style="max-width: 100%; background: #fff; border-radius: 10px" '
            'font-family="system-ui, sans-serif" font-size="14">'
        ),
        (
            '<defs><marker id="step" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L10 5L0 10z" fill="#5f6368"/></marker>'
            "</defs>"
        ),
    ]
    for old, new in arrows:
        (x1, y1), (x2, y2) = _between(old, new, (new, old) in arrows)
        parts.append(
            f'<path d="M{x1:.0f} {y1:.0f}L{x2:.0f} {y2:.0f}" stroke="#5f6368" fill="none" '
            'marker-end="url(#step)"/>'
        )
    for name, (x, y) in PLACES.items():
        fill, stroke = FILLS[name]
        parts.append(
            f'<rect x="{x - BOX[0] / 2}" y="{y - BOX[1] / 2}" width="{BOX[0]}" height="{BOX[1]}" '
            f'rx="8" fill="{fill}" stroke="{stroke}"/>'
            f'<text x="{x}" y="{y + 5}" text-anchor="middle" fill="#202124">{name}</text>'
        )
    x, y = PLACES["ended"]
    parts.append(
        f'<text x="{x + 62}" y="{y + 5}" fill="#5f6368" font-size="12">from every state</text>'
        "</svg>"
    )
    return "\n".join(parts)


def _between(old: str, new: str, both_ways: bool) -> tuple[Point, Point]:
    """Return the two ends of an arrow, on the edges of the two boxes."""
    (x1, y1), (x2, y2) = PLACES[old], PLACES[new]
    dx, dy = x2 - x1, y2 - y1
    length = (dx * dx + dy * dy) ** 0.5
    # If arrows go both ways between two boxes, shift each arrow to its right, so that the arrows
    # lie side by side.
    shift = 7 if both_ways else 0
    sx, sy = -dy / length * shift, dx / length * shift
    return _edge(x1 + sx, y1 + sy, dx, dy, (x1, y1)), _edge(x2 + sx, y2 + sy, -dx, -dy, (x2, y2))


def _edge(x: float, y: float, dx: float, dy: float, centre: Point) -> Point:
    """Return where a ray leaves the box around ``centre``. It starts inside the box at (x, y)."""
    half = (BOX[0] / 2, BOX[1] / 2)
    ways = []
    for position, delta, middle, size in ((x, dx, centre[0], half[0]), (y, dy, centre[1], half[1])):
        if delta:
            ways.append(((middle + (size if delta > 0 else -size)) - position) / delta)
    way = min(ways)
    return x + dx * way, y + dy * way


class StateDiagram(Directive):
    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            picture = svg(steps("\n".join(self.content)))
        except ValueError as error:
            return [self.state.document.reporter.warning(str(error), line=self.lineno)]
        return [nodes.raw("", f'<p class="state-diagram">{picture}</p>', format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive; called by Sphinx."""
    app.add_directive("mermaid", StateDiagram)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
