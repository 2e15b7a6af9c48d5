# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The plan for a real GPU: basic items first, items that may leave a hung process last."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A file of tests, or a benchmark. It runs alone."""

    name: str
    #: If the item still runs after this many seconds, the runner kills it and records it as hung.
    bound: int
    #: The item begins no new repetition after this many seconds. 0 means the item's own default.
    enough: int = 0

    @property
    def tests(self) -> bool:
        """Whether the item is a file of tests."""
        return self.name.endswith(".py")


#: The most useful items come first, because a machine may be available only for minutes. A
#: complete run usually takes only a fraction of the sum of all bounds.
PLAN = (
    Item("tests/gpu/test_kit.py", 120),
    Item("tests/gpu/test_driver.py", 150),
    Item("tests/gpu/test_conformance.py", 180),
    Item("tests/gpu/test_records.py", 240),
    Item("tests/gpu/test_guard.py", 220),
    Item("tests/gpu/test_notebook.py", 180),
    Item("swap_speed", 200, 110),
    Item("guarded_swap", 150, 80),
    Item("guard_overhead", 150, 70),
    Item("tests/gpu/test_limits.py", 180),
    Item("tests/gpu/test_swaps.py", 120, 25),
    Item("tests/gpu/test_frameworks.py", 180),
    Item("idle_notebooks", 150),
    Item("two_jobs", 220, 140),
    Item("cell_to_kernel", 130, 60),
    Item("tests/gpu/test_guard_edges.py", 180),
    Item("tests/gpu/test_guard_torch.py", 150),
    Item("tests/gpu/test_room.py", 120),
    Item("tests/gpu/test_kills.py", 150),
    Item("tests/gpu/test_cycles.py", 260, 90),
    Item("tests/gpu/test_mps.py", 60),
)


def named(names: list[str]) -> tuple[Item, ...]:
    """Return the items with these ``names``; all items if ``names`` is empty.

    Raises
    ------
    ValueError
        If a name is unknown; the text lists the names.
    """
    known = {item.name: item for item in PLAN}
    for name in names:
        if name not in known:
            raise ValueError(f"There is no {name!r}; there are {', '.join(known)}.")
    return tuple(known[name] for name in names) if names else PLAN
