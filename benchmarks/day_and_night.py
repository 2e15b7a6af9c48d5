# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A day and a night of a small department, on two emulated devices of 4 GiB.

There are twelve notebooks: nine of the group ``research`` (weight 3) and three of the group
``students`` (weight 1). Their users think between two cells. Each group also has a training, which
always computes. The group ``services`` has two inference services and a guarantee. The notebooks
are real kernels. The services and the trainings are real commands under ``jupyter gpupool run``.

A schedule lets the class of the trainings run only by night. The notebooks together ask for more
memory than the machine has. At night, both trainings want the same device. One service always keeps
its slice. The other service gets a slice when it has a request.

The day begins when all kernels and programs are ready. It ends at a full minute, because a schedule
can only change at a full minute. The night takes three quarters of ``--minutes``. The copies of the
emulated devices are 16 times slower than 4 GB/s, the rate that others report for NVIDIA's driver.
A slice of a notebook or a service is about 17 times as large as its state. So the copy of such a
state takes about as long here as the copy of the whole slice at 4 GB/s.
"""

from __future__ import annotations

import argparse
import getpass
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import budget, percentile, summary, table
from benchmarks.kernels import private_pool
from benchmarks.programs import Client as Caller
from benchmarks.programs import Notebook, Player, Program, Service, end, start, swap_seconds
from benchmarks.watch import Watch
from jupyter_gpupool.client import Client
from jupyter_gpupool.pool.running import STAY_LEAST

MiB = 1 << 20

#: The slices of a notebook or service, and of a training, in MiB. A device has 4096 MiB. So a
#: training does not fit beside the service that keeps its slice.
SLICE, TRAINING = 820, 3260

#: MiB of state, all of it written and checked.
STATE, TRAINED = 48, 96

WEIGHTS = {"research": 3, "students": 1}

#: Seconds for the start of all kernels and programs, before the day.
STARTING = 60.0

#: Mean seconds of thinking by day, of a cell's computing, and of the pause between two requests.
THINK, CELL, PAUSE = 5.0, 0.4, 0.7

#: Seconds that a service computes for a request, and the longest allowed seconds until a service
#: that has a slice answers. In this time, other programs also have turns on the device.
REQUEST, LATENCY = 0.02, 0.5

#: By which fraction of its fair share a group may use more or less than its fair share.
SHARE = 0.05

#: The pool's shortest turn in seconds, and the largest fraction of a turn that suspends and resumes
#: may take. With the weights 3 and 1, the turns of the two groups last about 40 s and 13 s. So in a
#: short night, a single turn clearly changes a group's share of the usage.
TURN, MOVING = 10.0, 0.1


@dataclass
class Record:
    """The observations of one run."""

    begun: float
    night: float
    ended: float
    rows: list[dict[str, Any]]
    used: dict[str, float]
    players: list[Player]
    #: For each training: the result that it printed (``trained``), and the times at which its steps
    #: ended (``steps``).
    trained: dict[str, dict[str, Any]]
    steps: dict[str, list[float]]
    problems: list[str]

    def waits(self, kind: type[Player], since: float, until: float) -> list[float]:
        return [t for p in self.players if isinstance(p, kind) for t in p.taken(since, until)]

    def pause(self, steps: Iterable[float]) -> float:
        """Return the longest time of the night in which none of these steps ended."""
        at = [self.night, *sorted(s for s in steps if self.night < s < self.ended), self.ended]
        return max(b - a for a, b in pairwise(at))


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a night of 160 seconds")
    parser.add_argument("--minutes", type=float, default=6.0, help="of day and night; 30 for all")
    options = parser.parse_args(argv)
    day, night = (5.0, 160.0) if options.quick else (15.0 * options.minutes, 45.0 * options.minutes)
    with tempfile.TemporaryDirectory(prefix="gpb", ignore_cleanup_errors=True) as folder:
        names, seen = live(Path(folder), day, night)
    total = sum(seen.used[name] for name in WEIGHTS)
    return {
        "what": "12 notebooks, 2 services and 2 trainings through a day and a night",
        "emulated": True,
        "device_names": names,
        "day_seconds": seen.night - seen.begun,
        "night_seconds": seen.ended - seen.night,
        "schedule": [row["reason"] for row in seen.rows if row["kind"] == "schedule"],
        "swap_seconds": swap_seconds(seen.rows),
        "suspends": sum(row["kind"] == "suspend" for row in seen.rows),
        "cell_wait_by_day": summary(seen.waits(Notebook, seen.begun, seen.night)),
        "cell_wait_by_night": summary(seen.waits(Notebook, seen.night, seen.ended)),
        "answers": {
            one.service.name: summary(one.taken(seen.begun))
            for one in seen.players
            if isinstance(one, Caller)
        },
        "trainings": {
            name: {
                **seen.trained[name],
                "steps_by_day": sum(at < seen.night for at in steps),
                "longest_pause": seen.pause(steps),
            }
            for name, steps in seen.steps.items()
        },
        "gpu_seconds_by_night": seen.used,
        "part_by_night": {name: seen.used[name] / total for name in WEIGHTS},
        "problems": seen.problems,
        "budgets": budgets(seen),
    }


def configuration(night_at: float, night: float) -> dict[str, Any]:
    """Return the department's configuration."""
    clock = [
        datetime.fromtimestamp(at, timezone.utc).strftime("%H:%M")
        for at in (night_at, night_at + 12 * 3600)
    ]
    # All kernels here belong to one user, who is in all groups and names a group for each kernel.
    me = [getpass.getuser()]
    groups: dict[str, Any] = {"services": {"guarantee": "2GiB", "users": me, "order": 9}}
    for order, (name, weight) in enumerate(WEIGHTS.items()):
        groups[name] = {"weight": weight, "users": me, "order": order}
    return {
        "emulate": "2x4GiB,context=32MiB,bandwidth=250MB/s",
        "groups": groups,
        "fair_share_half_life": max(60.0, night / 4),
        "classes_allowed": ["interactive", "notebook"],
        "quiet_after": 0.3,
        "sample_interval": 0.25,
        "schedules": [
            {
                "name": "night",
                "hours": "-".join(clock),
                "time_zone": "UTC",
                # By night, a notebook that nobody uses gives its slice back sooner.
                "set": {"classes_allowed": None, "idle_timeout": "1s"},
            }
        ],
    }


def live(folder: Path, day: float, night: float) -> tuple[list[str], Record]:
    """Run the day and the night; return the names of the devices and the observations."""
    night_at = 60.0 * math.ceil((time.time() + STARTING + day) / 60)
    with ExitStack() as stack:
        names = stack.enter_context(private_pool(**configuration(night_at, night)))
        socket = os.environ["GPUPOOL_SOCKET"]
        client = stack.enter_context(Client(socket))
        size = ["--memory", f"{SLICE}MiB", "--limit", f"{SLICE}MiB", "--compute", "20"]
        size += ["--group", "services", "--class", "interactive"]
        players: list[Player] = []
        for name, attach in (("resident", "hold"), ("occasional", "lazy")):
            service = Service(folder, name, [*size, "--attach", attach], STATE * MiB)
            stack.enter_context(service)
            players.append(Caller(service, PAUSE, len(players), seconds=REQUEST))
            start(players[-1:])
        notebooks: list[Player] = [
            Notebook(
                THINK, 100 + n, size=STATE * MiB, seconds=CELL, memory=SLICE * MiB,
                limit=SLICE * MiB, group="students" if n % 4 == 0 else "research",
            )
            for n in range(12)
        ]  # fmt: skip
        players += notebooks
        options = ["--memory", f"{TRAINING}MiB", "--limit", f"{TRAINING}MiB", "--class", "batch"]
        trainings = {
            name: stack.enter_context(
                Program(
                    folder, f"train-{name}", [*options, "--group", name],
                    ["train", str(folder / f"{name}.log"), str(TRAINED * MiB)],
                )
            )
            for name in WEIGHTS
        }  # fmt: skip
        start(notebooks)
        watch = Watch(socket)
        watch.start()
        begun = time.time()
        text = f"all are ready; {night_at - begun:.0f} s of day, then {night:.0f} s of night"
        print(text, file=sys.stderr, flush=True)
        time.sleep(max(0.0, night_at - time.time()))
        for one in notebooks:
            one.pause *= 6
        time.sleep(max(0.0, night_at + night - time.time()))
        ended = time.time()
        watch.stop()
        rows = client.journal(after=0)
        problems = [*watch.problems, *end(players)]
        trained = {name: one.result(stop=True) for name, one in trainings.items()}
        steps = {
            name: [float(x) for x in (folder / f"{name}.log").read_text().split()]
            for name in WEIGHTS
        }
        used = watch.used(night_at, ended)
    return names, Record(
        begun, night_at, ended, rows, used, players, trained, steps, problems
    )  # fmt: skip


def budgets(seen: Record) -> list[dict[str, Any]]:
    """Return the budgets, each with the measured figure."""
    swap, length = swap_seconds(seen.rows), seen.ended - seen.night
    total = sum(seen.used[name] for name in WEIGHTS)
    wrong = sum(found["wrong"] for found in seen.trained.values()) + len(seen.problems)
    changes = [row["reason"] for row in seen.rows if row["kind"] == "schedule"]
    lines = [
        budget("wrong bytes, failed cells and requests, grants beyond a device", wrong, 0, ""),
        budget("changes of the schedule, beyond the one", len(changes) - 1, 0, ""),
        budget(
            "training steps by day, whose class is closed",
            sum(at < seen.night - 1 for steps in seen.steps.values() for at in steps),
            0,
            "steps",
        ),
    ]
    for one in seen.players:
        if isinstance(one, Caller):
            took, name = one.taken(seen.begun), f"of the {one.service.name} service"
            if one.service.name == "resident":
                lines.append(budget(f"longest answer {name}", max(took), LATENCY, "s"))
                continue
            text = f"({LATENCY:g} s and the longest swap"
            bound = LATENCY + swap
            lines.append(
                budget(f"p99 of the answers {name} {text})", percentile(took, 99), bound, "s")
            )
            # After a resume, a kernel keeps its slice at least as long as the swap has taken.
            stay = max(STAY_LEAST, swap)
            text = f"longest answer {name} {text}, and the least stay)"
            lines.append(budget(text, max(took), bound + stay, "s"))
    # Both trainings may pause at once: at first until the notebooks have given back their slices,
    # and later while one training's state makes room for the other's.
    every = [at for steps in seen.steps.values() for at in steps]
    lines.append(
        budget("longest pause of all training by night", seen.pause(every), TURN + 2 * swap, "s")
    )
    for name, steps in seen.steps.items():
        # A training may pause during the other training's turns, plus one turn of each training.
        turn = max(TURN, swap / MOVING) + 2 * swap
        most = (sum(WEIGHTS.values()) / WEIGHTS[name] + 2) * turn
        lines.append(
            budget(f"longest pause of {name}' training by night", seen.pause(steps), most, "s")
        )
    for name, weight in WEIGHTS.items():
        due = weight / sum(WEIGHTS.values())
        off = abs(seen.used[name] / total / due - 1)
        allowed = SHARE + (TURN / length / due if length < 20 * 60 else 0.0)
        lines.append(budget(f"use of {name} by night, off its share", off, allowed, ""))
    return lines


if __name__ == "__main__":
    outcome = main(sys.argv[1:])
    print(table(outcome["budgets"]), file=sys.stderr)
    json.dump(outcome, sys.stdout, indent=2)
    print()
