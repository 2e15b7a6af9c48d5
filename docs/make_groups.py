# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Draw the groups of ``groups.md``: ``python docs/make_groups.py``.

The picture shows a real pool. Its bytes are the bytes of the pool's leases, and the pool decides
which group gives bytes back. With ``--check``, the program writes nothing and only checks whether
the picture is up to date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Group, Owner, PoolSettings, Portion, Request

PICTURE = Path(__file__).parent / "images" / "groups.svg"

GROUPS = {
    "lab": Group(guarantee=Portion(bytes=32 * GiB)),
    "deadline": Group("lab", Portion(devices=1)),
    "students": Group(guarantee=Portion(bytes=16 * GiB), cap=Portion(bytes=40 * GiB)),
}
#: The user, the group and the GiB of each kernel, in the order of their requests.
KERNELS = (("ann", "lab", 12), ("sam", "students", 14), ("sue", "students", 14),
           ("dora", "deadline", 8), ("sid", "students", 8))  # fmt: skip
#: The user, the group and the GiB of the kernel that asks last.
LATE = "bea", "lab", 12


def example() -> tuple[Pool, str, str]:
    """Return a pool of four GPUs, and the user and the group that lose a slice to the last kernel.

    The pool has begun to suspend the victim's kernel, but the suspend has not ended. So all leases
    are as they were before the last kernel asked.
    """
    pool = Pool(PoolSettings(host_memory=64 * GiB, resume_headroom=0, groups=GROUPS))
    for n in range(4):
        device = Device(f"GPU-{n}", n, "example", "example", 16 * GiB)
        pool.handle(ev.DeviceAppeared(now=0.0, device=device))

    def ask(now: float, user: str, group: str, size: int) -> list[ev.Action]:
        owner, request = Owner(user, group), Request(size * GiB, size * GiB)
        pool.handle(
            ev.SessionOpened(now=now, session=user, owner=owner, request=request, attach="lazy")
        )
        return pool.handle(ev.HoldTaken(now=now, session=user, hold="cell", kind="cell"))

    for at, kernel in enumerate(KERNELS):
        ask(float(at), *kernel)
        pool.handle(ev.AttachDone(now=float(at), session=kernel[0], epoch=1))
    found = held(pool)
    actions = ask(600.0, *LATE)
    (victim,) = (action.session for action in actions if isinstance(action, ev.Suspend))
    assert found == held(pool), "its suspend has only begun"
    return pool, victim, pool.record(victim).owner.group


def held(pool: Pool) -> dict[str, int]:
    """Return the bytes on the GPUs for each group, with the bytes of the groups inside it."""
    found = dict.fromkeys(GROUPS, 0)
    for name, (slices, _) in pool.leases().items():
        group = pool.record(name).owner.group
        while group:
            found[group] += sum(x.bytes for x in slices)
            group = GROUPS[group].parent
    return found


LEFT, SCALE, HIGH = 150, 440 / (64 * GiB), 30
INK, QUIET = "#202124", "#5f6368"
WITHIN, BEYOND, OUTLINE = ("#e9f6ee", "#2a9d5c"), ("#fdf4dd", "#c48a00"), "#4a6fa5"


def gib(size: int) -> str:
    return f"{size / GiB:g} GiB"


def picture(pool: Pool, victim: str, loser: str) -> str:
    """Return a picture of the tree: the guarantee, the use, the loan and the cap of each group."""
    title = "A tree of groups: what each is guaranteed, uses, and has borrowed"
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 340" width="640" height="340" '
        f'role="img" aria-label="{title}" font-family="system-ui, sans-serif" font-size="12">'
    )
    found = [head, f"<title>{title}</title>"]
    found.append('<rect width="640" height="340" rx="10" fill="#ffffff"/>')

    def text(x: float, y: float, words: str, anchor: str = "start", ink: str = INK) -> None:
        found.append(
            f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{ink}">{words}</text>'
        )

    def box(x: float, y: float, size: int, words: str, colours: tuple[str, str]) -> float:
        width = size * SCALE
        found.append(
            f'<rect x="{x:.0f}" y="{y}" width="{width:.0f}" height="{HIGH}" fill="{colours[0]}" '
            f'stroke="{colours[1]}"/>'
        )
        text(x + width / 2, y + 20, words, "middle")
        return x + width

    has, devices = held(pool), [view.capacity for view in pool.view(600.0).devices]
    total, used = sum(devices), sum(has[name] for name, g in GROUPS.items() if not g.parent)
    text(16, 40, "the pool")
    end = box(LEFT, 20, used, f"in use: {gib(used)}", ("#eef3fc", "#4a6fa5"))
    end = box(end, 20, total - used, gib(total - used), ("#fafafa", "#dadce0"))
    text(end, 65, "free", "end", QUIET)
    for at, (name, group) in enumerate(GROUPS.items()):
        y, x = 84 + at * 62, 40 if group.parent else 24
        top = y - 40 if group.parent else 42
        found.append(
            f'<path d="M{x - 8} {top + 8}V{y + 15}H{x - 2}" stroke="{QUIET}" fill="none"/>'
        )
        text(x + 2, y + 20, name)
        guaranteed = group.guarantee.of(devices) if group.guarantee else 0
        within = min(has[name], guaranteed)
        end = box(LEFT, y, within, gib(within), WITHIN)
        if has[name] > within:
            end = box(end, y, has[name] - within, f"borrowed: {gib(has[name] - within)}", BEYOND)
        found.append(
            f'<rect x="{LEFT}" y="{y - 3}" width="{guaranteed * SCALE:.0f}" height="{HIGH + 6}" '
            f'fill="none" stroke="{OUTLINE}" stroke-width="1.5" stroke-dasharray="5 3"/>'
        )
        told = f"guaranteed: {gib(guaranteed)}"
        if group.cap:
            most = group.cap.of(devices)
            right = LEFT + most * SCALE
            found.append(f'<path d="M{right:.0f} {y - 6}V{y + HIGH + 6}" stroke="#c8553d"/>')
            text(right + 5, y + 20, f"cap: {gib(most)}", ink=QUIET)
        text(LEFT, y + HIGH + 17, told, ink=QUIET)
    user, asking, size = LATE
    why = f"{asking} is guaranteed that, and no GPU has {size} GiB free."
    what = f"The pool suspends {victim}'s kernel, even in the middle of a cell"
    story = f"{user} of {asking} now asks for {size} GiB: {why}", f"{what}: {loser} have borrowed."
    for at, words in enumerate(story):
        text(16, 294 + 20 * at, words)
    return "\n".join([*found, "</svg>"]) + "\n"


def main() -> int:
    """Write the picture, or with ``--check`` compare it with the file; return the exit status."""
    drawn = picture(*example())
    if "--check" not in sys.argv[1:]:
        PICTURE.write_text(drawn, encoding="utf-8")
        return 0
    if PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == drawn:
        return 0
    print("The picture is out of date: run `python docs/make_groups.py`.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
