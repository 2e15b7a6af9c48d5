# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Computes which part of each wait the pool owes to a time slice of the crowd.

The figures come from the journal. The pool must have only one device. This module is not a
benchmark itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A wait for a slice: its group, its begin, and the seconds that the pool owes to the crowd."""

    group: str
    asked: float
    owed: float


def waits(rows: Sequence[dict[str, Any]], crowd: str, seconds: float) -> list[Wait]:
    """Return the waits of all groups except ``crowd``, whose time slices last ``seconds``.

    A kernel of the crowd keeps its slice for ``seconds``. Only after this time slice may the pool
    preempt the kernel in favour of another group. :attr:`Wait.owed` is the time from the request
    until the first time slice of the crowd ends. If the pool suspends an idle victim earlier,
    :attr:`Wait.owed` ends at the start of this suspend. In the rest of the wait, the pool moves
    states and serves earlier requests.
    """
    found: list[Wait] = []
    #: For each session of the crowd that has a slice: the time at which it got the slice.
    began: dict[str, float] = {}
    #: For each session that waits: the session's group, when it asked, and how many seconds later
    #: the first time slice of the crowd ends.
    asked: dict[str, tuple[str, float, float]] = {}
    #: For each session that is being suspended: when this began.
    leaving: dict[str, float] = {}
    freed = -math.inf
    for row in rows:
        if row["kind"] != "state":
            continue
        name, at, detail = row["session"], row["time"], row["detail"]
        old, new, group = detail["old"], detail["new"], detail.get("group", "")
        if new == "detaching":
            leaving[name] = at
        elif old == "detaching":
            freed = leaving.pop(name, at)
        if new not in ("active", "idle"):
            began.pop(name, None)
        elif old == "attaching" and group == crowd:
            began[name] = at
        if new == "queued" and group != crowd:
            rest = min((since + seconds - at for since in began.values()), default=0.0)
            asked[name] = group, at, max(0.0, rest)
        elif new == "attaching" and name in asked:
            group, since, rest = asked.pop(name)
            # If the kernel needed a victim, the victim is the session whose suspend ended last.
            found.append(Wait(group, since, min(rest, max(0.0, freed - since))))
    return found


def beyond(turns: Sequence[tuple[float, float]], waited: Sequence[Wait]) -> list[float]:
    """Return the seconds of each turn of a player, minus the owed seconds of its waits.

    ``turns`` has the begin and the seconds of each turn, as in ``Player.times``. ``waited`` has all
    waits of the same player. A wait belongs to the turn during which the player asked for the
    slice.
    """
    ends = [begun for begun, _ in turns[1:]] + [math.inf]
    return [
        took - sum(wait.owed for wait in waited if begun <= wait.asked < end)
        for (begun, took), end in zip(turns, ends, strict=True)
    ]
