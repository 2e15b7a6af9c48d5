# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Write the worked example of ``how-it-works.md`` and its picture: ``python docs/make_planner.py``.

The example runs a real pool. The decisions in the tables are texts of ``Pool.explain``. With
``--check``, the program writes nothing and only checks whether the page and the picture are up to
date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import (
    Device,
    GiB,
    Group,
    Owner,
    PoolSettings,
    Portion,
    Request,
)

HERE = Path(__file__).parent
PAGE, PICTURE = HERE / "how-it-works.md", HERE / "images" / "planner.svg"
BEGIN, END = "<!-- One pass: written by docs/make_planner.py. -->", "<!-- End of one pass. -->"

#: The users in the order in which they ask for a slice, and the GiB that each user asks for.
ASKS = {"dora": 10, "eve": 14, "fay": 4, "gus": 7}
RULES = {
    "planned": "step 3: an idle lease yields",
    "busy": "step 4: the head of the queue",
    "behind-head": "step 4: no backfilling at the head's cost",
}


def example() -> Pool:
    """Return a pool of three GPUs in which four kernels have asked for a slice at the same time."""
    rules = PoolSettings(host_memory=64 * GiB, resume_headroom=0, preempt=frozenset())
    pool = Pool(rules)
    for i in range(3):
        device = Device(f"GPU-{i}", i, "example", "example", 16 * GiB)
        pool.handle(ev.DeviceAppeared(now=0.0, device=device))
    for name, size in {"ann": 9, "bob": 12, "cyd": 12, **ASKS}.items():
        request = Request(size * GiB, size * GiB)
        pool.handle(
            ev.SessionOpened(
                now=0.0, session=name, owner=Owner(name), request=request, attach="cell"
            )
        )
    for name in ("ann", "bob", "cyd"):
        pool.handle(ev.HoldTaken(now=0.0, session=name, hold="cell", kind="cell"))
        pool.handle(ev.AttachDone(now=0.0, session=name, epoch=1))
    pool.handle(ev.HoldDropped(now=10.0, session="bob", hold="cell"))
    for name in ASKS:
        pool.handle(ev.HoldTaken(now=130.0, session=name, hold="cell", kind="cell"))
    return pool


SHARES_BEGIN = "<!-- Shares: written by docs/make_planner.py. -->"
SHARES_END = "<!-- End of shares. -->"
#: For each user who asks later: the group, the priority class and the GiB of the request.
LATER = {
    "ben": ("bio", "batch", 8),
    "bea": ("bio", "notebook", 8),
    "zoe": ("", "interactive", 4),
    "pat": ("phy", "notebook", 8),
}


def shares() -> Pool:
    """Return a pool of two GPUs in which one group has borrowed memory, and four kernels ask.

    The four kernels have asked for slices after the loan.
    """
    groups = {
        "bio": Group(guarantee=Portion(percent=50)),
        "phy": Group(guarantee=Portion(bytes=8 * GiB), weight=3.0),
    }
    pool = Pool(PoolSettings(host_memory=64 * GiB, resume_headroom=0, groups=groups))
    for i in range(2):
        device = Device(f"GPU-{i}", i, "example", "example", 16 * GiB)
        pool.handle(ev.DeviceAppeared(now=0.0, device=device))

    def opens(name: str, group: str, priority: str, size: int, now: float) -> None:
        request = Request(size * GiB, size * GiB, priority=priority)
        owner = Owner(name, group)
        event = ev.SessionOpened(now=now, session=name, owner=owner, request=request, attach="cell")
        pool.handle(event)
        pool.handle(ev.HoldTaken(now=now, session=name, hold="cell", kind="cell"))

    for name, group, size in (("pia", "phy", 8), ("pam", "phy", 16), ("ulf", "", 8)):
        opens(name, group, "notebook", size, 0.0)
        pool.handle(ev.AttachDone(now=0.0, session=name, epoch=1))
    for name, (group, priority, size) in LATER.items():
        opens(name, group, priority, size, 60.0)
    return pool


def shares_table(pool: Pool) -> str:
    """Return a table of the decisions about the kernels that asked later."""
    lines = [
        "| kernel | group | class | asks for | place | decision |",
        "|---|---|---|---|---|---|",
    ]
    for name, (group, priority, size) in LATER.items():
        told = pool.explain(name)
        text = told.text
        for x in told.promised:
            text += f"; promised {gib(x.bytes)} on GPU {x.device[-1]}"
        for x in told.reserved:
            text += f"; GPU {x.device[-1]} is reserved for it"
        row = (name, group or "-", priority, f"{size} GiB", told.position, text)
        lines.append("| " + " | ".join(str(cell) for cell in row) + " |")
    leaving = [
        f"{r.id} (*{pool.story(r.id)[-1].rpartition('): ')[2]}*)"
        for r in pool.records()
        if r.state == "detaching"
    ]
    return "\n".join([*lines, "", f"Suspended in the middle of a cell: {', '.join(leaving)}."])


def gib(size: int) -> str:
    return f"{size / GiB:g} GiB"


def table(pool: Pool) -> str:
    """Return a table of the decisions in the planning pass, and the step that made each."""
    lines = ["| kernel | asks for | decision | by which step |", "|---|---|---|---|"]
    for name, size in ASKS.items():
        told = pool.explain(name)
        if told.reason is None:
            (x,) = pool.record(name).slices
            text, rule = f"attached to GPU {x.device[-1]} at once", "step 3: backfilled"
        else:
            text, rule = told.text, RULES[told.reason.rule]
            for x in told.promised:
                text += f"; promised {gib(x.bytes)} on GPU {x.device[-1]}"
            for x in told.reserved:
                text += f"; GPU {x.device[-1]} is reserved for it"
        lines.append(f"| {name} | {size} GiB | {text} | {rule} |")
    return "\n".join(lines)


_BOX = {
    "busy": ("#e9f6ee", "#2a9d5c"),
    "leaves": ("#fdf4dd", "#c48a00"),
    "free": ("#fafafa", "#dadce0"),
    "kept": ("#eef3fc", "#4a6fa5"),
}


def picture(pool: Pool) -> str:
    """Return a picture of the GPUs after the pass: leases, promised memory and reserved memory."""
    title = "One pass: leases, a promise, the reservation of the head of the queue"
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 320" width="640" height="320" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="12">'
    )
    parts = [
        head,
        f"<title>{title}</title>",
        '<rect width="640" height="320" rx="10" fill="#ffffff"/>',
    ]
    scale = 480 / (16 * GiB)

    def box(x: float, y: float, size: int, text: str, kind: str) -> float:
        height = 28 if kind == "kept" else 34
        fill, stroke = _BOX[kind]
        width = size * scale
        parts.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}" fill="{fill}" '
            f'stroke="{stroke}"/><text x="{x + width / 2:.0f}" y="{y + height / 2 + 4:.0f}" '
            f'text-anchor="middle" fill="#202124">{text}</text>'
        )
        return x + width

    for at, view in enumerate(pool.view(130.0).devices):
        y, x, uuid = 24 + at * 98, 120.0, view.device.uuid
        parts.append(
            f'<text x="16" y="{y + 21}" font-weight="600" fill="#202124">GPU {at}, 16 GiB</text>'
        )
        for name, (slices, _) in pool.leases().items():
            size = sum(piece.bytes for piece in slices if piece.device == uuid)
            if not size:
                continue
            leaves = pool.record(name).state == "detaching"
            text = f"{name}: {gib(size)}" + (", is suspended" if leaves else "")
            x = box(x, y, size, text, "leaves" if leaves else "busy")
        if view.free:
            box(x, y, view.free, f"free {gib(view.free)}", "free")
        x = 120.0
        for name in ASKS:
            told = pool.explain(name)
            for what, slices in (("promised to", told.promised), ("reserved for", told.reserved)):
                for piece in slices:
                    if piece.device == uuid:
                        text = f"{what} {name}: {gib(piece.bytes)}"
                        x = box(x, y + 40, piece.bytes, text, "kept")
    return "\n".join([*parts, "</svg>"]) + "\n"


def page(pool: Pool, before: str) -> str:
    """Return the text ``before`` of the page with new tables between the markers."""
    for begin, stop, text in (
        (BEGIN, END, table(pool)),
        (SHARES_BEGIN, SHARES_END, shares_table(shares())),
    ):
        start, end = before.index(begin) + len(begin), before.index(stop)
        before = f"{before[:start]}\n\n{text}\n\n{before[end:]}"
    return before


def main() -> int:
    """Write the page and the picture, or with ``--check`` compare them; return the exit status."""
    pool, before = example(), PAGE.read_text(encoding="utf-8")
    texts = {PAGE: page(pool, before), PICTURE: picture(pool)}
    if "--check" not in sys.argv[1:]:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        return 0
    if all(p.exists() and p.read_text(encoding="utf-8") == t for p, t in texts.items()):
        return 0
    print("The example is out of date: run `python docs/make_planner.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
