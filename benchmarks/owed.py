# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Computes from the journal how much of each wait is due to a time slice. Not a benchmark itself.

The pool must have one device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Wait:
    """A wait for a slice: its group, its begin, and the seconds that are due to a time slice."""

    group: str
    asked: float
    owed: float


def waits(rows: Sequence[dict[str, Any]], crowd: str, seconds: float) -> list[Wait]:
    """Return the waits of all groups except ``crowd``, whose time slices last ``seconds``.

    A kernel of the crowd keeps its slice for ``seconds`` before the pool may preempt it in favour
    of another group. :attr:`Wait.owed` is the time from the request until the first of these time
    slices ends. If the victim is idle, the pool suspends it earlier. In this case,
    :attr:`Wait.owed` ends at the start of the suspend. During the rest of the wait, the pool moves
    states and serves earlier requests.
    """
    found: list[Wait] = []
    #: By session of the crowd: when it got its present slice.
    began: dict[str, float] = {}
    #: By waiting session: its group, the time of its request, and the seconds from the request
    #: until the first time slice of the crowd ends.
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
    """Return the seconds of each turn of a player, without the part that is due to time slices.

    ``turns`` has the begin and the seconds of each turn, as in ``Player.times``. ``waited`` has the
    waits of the same player.
    """
    ends = [begun for begun, _ in turns[1:]] + [math.inf]
    return [
        took - sum(wait.owed for wait in waited if begun <= wait.asked < end)
        for (begun, took), end in zip(turns, ends, strict=True)
    ]
