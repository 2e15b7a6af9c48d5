# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How often a wait ends within the range that the pool gave for it, in a day of random load.

The pool is real. The clock is simulated, and the kernels are those of :mod:`.pool_waits`: the
median cell takes 20 s, some cells take many minutes, and the median pause takes a minute. Sizes are
from 2 to 40 GiB, and some kernels need two devices.

The benchmark compares each range with the real end of the wait. It uses the rounded range, because
the user reads the rounded range. There are two results. *First told* has one range for each wait:
the first range that the pool gives. *At any look* has one range for each ``LOOK`` seconds of a
wait, so a long wait counts more often. The looks at which the pool gives no range are counted
separately.

Most waits are only for a suspend, and their range is "up to 5 s". So the longer ranges also have a
result of their own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import budget
from benchmarks.pool_waits import Workload
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.evidence import Expected
from jupyter_gpupool.units import range_ends

#: Pairs of sessions and devices. In the first load, some sessions wait. In the second load, most
#: sessions wait. In the third load, few sessions wait.
LOADS = ((30, 2), (50, 2), (60, 4))
DAY = 86400.0

#: Seconds between two looks at a wait.
LOOK = 10.0

#: The shortest range that the pool gives is "up to 5 s". This is its upper end in seconds.
SHORT = 5.0

#: At least this fraction of the ranges must contain the end of the wait.
LEAST = 0.8


class Told(Workload):
    """A workload that remembers the ranges of each wait, and checks them when the wait ends."""

    def __init__(self, sessions: int, devices: int, seed: int, **rules: Any) -> None:
        #: For each waiting session: when the user read a range, and the range. ``first`` has the
        #: first range of the wait. ``seen`` has the range at each look, or None without a range.
        self.first: dict[str, tuple[float, Expected]] = {}
        self.seen: dict[str, list[tuple[float, Expected | None]]] = {}
        self.right: dict[str, list[bool]] = {"first": [], "look": [], "long": []}
        self.widths: list[float] = []
        self.silent = self.looks = self.waits = 0
        super().__init__(sessions, devices, seed, **rules)
        self.at(LOOK, "look")

    def look(self) -> None:
        """Look at every wait as a user does."""
        for view in self.pool.view(self.now).sessions:
            if view.queue_position is not None:
                self.seen.setdefault(view.record.id, []).append((self.now, view.expected))
        self.at(self.now + LOOK, "look")

    def send(self, event: ev.Event) -> None:
        super().send(event)
        if isinstance(event, (ev.AttachDone)):
            self.ended(event.session)

    def told(self, action: ev.QueueMoved) -> None:
        """Remember the first range of a wait."""
        if action.expected is not None and action.session not in self.first:
            least, most = action.expected
            self.first[action.session] = self.now, Expected(self.now + least, self.now + most, 0, 0)

    def ended(self, name: str) -> None:
        """Compare the ranges of a wait with its real end."""
        seen, first = self.seen.pop(name, []), self.first.pop(name, None)
        self.waits += bool(seen or first)
        if first is not None:
            self.right["first"].append(self.holds(*first))
        for at, expected in seen:
            self.looks += 1
            if expected is None or expected.left(at) is None:
                self.silent += 1
            else:
                self.right["look"].append(self.holds(at, expected))

    def holds(self, at: float, expected: Expected) -> bool:
        """Return whether the range that a user read at ``at`` contains the present time."""
        left = expected.left(at)
        assert left is not None
        low, high = range_ends(*left)
        held = low <= self.now - at <= high
        if high > SHORT:
            self.right["long"].append(held)
            self.widths.append(high / max(low, SHORT))
        return held


def measure(sessions: int, devices: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run one load; return its figures, such as the fraction of ranges that contained the end."""
    work = Told(sessions, devices, seed)
    work.run(seconds)
    share = {name: sum(found) / len(found) if found else None for name, found in work.right.items()}
    return {
        "sessions": sessions,
        "devices": devices,
        "hours": seconds / 3600,
        "waits": work.waits,
        "told": len(work.right["first"]),
        "held_first": share["first"],
        "looks": work.looks,
        "held_look": share["look"],
        "longer": len(work.right["long"]),
        "held_longer": share["long"],
        "looks_without_estimate": work.silent / work.looks if work.looks else None,
        "longer_most_by_least_p50": median(work.widths) if work.widths else None,
    }


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return for each load the fraction of ranges that contained the end of the wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two hours instead of a day")
    options = parser.parse_args(argv)
    seconds = DAY / 12 if options.quick else DAY
    found = [measure(*load, seconds, seed=1) for load in LOADS]
    return {
        "what": "part of the told ranges that held the real wait",
        "loads": found,
        "budgets": [
            budget(
                f"ranges that held, {one['sessions']} sessions, {one['devices']} devices, {when}",
                one[f"held_{name}"],
                LEAST,
                "of them",
                at_least=True,
            )
            for one in found
            for name, when in (
                ("first", "when first told"),
                ("look", "at any look"),
                ("longer", "beyond 5 s"),
            )
            if one[f"held_{name}"] is not None
        ],
    }


if __name__ == "__main__":
    for one in main(sys.argv[1:])["loads"]:
        print(json.dumps(one))
