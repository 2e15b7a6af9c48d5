# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What is run on a real GPU: first what all else rests on, last what may strand a process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A file of tests, or a benchmark: run alone, and again in a later run if it was not ended."""

    name: str
    #: Seconds after which it is killed and counts as hung.
    bound: int

    @property
    def tests(self) -> bool:
        """Whether it is a file of tests."""
        return self.name.endswith(".py")


#: In order of worth: a machine may be lent for minutes.
PLAN = (
    Item("tests/gpu/test_kit.py", 240),
    Item("tests/gpu/test_driver.py", 240),
    Item("tests/gpu/test_guard.py", 400),
    Item("tests/gpu/test_notebook.py", 240),
    Item("swap_speed", 300),
    Item("tests/gpu/test_cycles.py", 240),
    Item("guard_overhead", 180),
    Item("cell_to_kernel", 180),
    Item("idle_notebooks", 180),
    Item("two_jobs", 240),
    Item("tests/gpu/test_limits.py", 240),
    Item("swap_prototype", 180),
    Item("tests/gpu/test_room.py", 180),
    Item("tests/gpu/test_kills.py", 240),
    Item("tests/gpu/test_mps.py", 120),
)


def named(names: list[str]) -> tuple[Item, ...]:
    """Return the items of these names, all without one.

    Raises
    ------
    ValueError
        If there is none of that name; the text says which there are.
    """
    known = {item.name: item for item in PLAN}
    for name in names:
        if name not in known:
            raise ValueError(f"There is no {name!r}; there are {', '.join(known)}.")
    return tuple(known[name] for name in names) if names else PLAN
