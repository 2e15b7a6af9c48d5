# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The part of each wait on one device that a time slice explains, by the journal. No benchmark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A wait for a slice: its group, when it began, and how much a time slice explains."""

    group: str
    asked: float
    owed: float


def waits(rows: Sequence[dict[str, Any]], crowd: str, seconds: float) -> list[Wait]:
    """Return the waits of all groups except ``crowd``, whose time slices last ``seconds``.

    A kernel of the crowd keeps its slice for that long before the pool may preempt it in favour of
    another group. :attr:`Wait.owed` is the time from the request to the end of the first of these
    time slices, or to the start of the suspend that freed the place, whichever is shorter (the pool
    suspends an idle victim earlier). The rest of the wait is for moves, and for requests that the
    pool served first.
    """
    found: list[Wait] = []
    #: By session of the crowd: when it got the slice that it has.
    began: dict[str, float] = {}
    #: By session: its group, the time of its request, and the seconds from the request to the end
    #: of the first time slice.
    asked: dict[str, tuple[str, float, float]] = {}
    #: By session: when its suspend began.
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
    """Return the seconds of each turn of a player, without the part that time slices explain.

    ``turns``: (when it began, seconds), as ``Player.times``; ``waited``: the waits of the player.
    """
    ends = [begun for begun, _ in turns[1:]] + [math.inf]
    return [
        took - sum(wait.owed for wait in waited if begun <= wait.asked < end)
        for (begun, took), end in zip(turns, ends, strict=True)
    ]
