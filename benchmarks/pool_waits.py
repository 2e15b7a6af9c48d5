# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Waits of kernels and moves of state, on workloads that do not depend on the pool.

Every session has its own random numbers for its thinking time, its computing time and its memory.
These numbers do not depend on the pool's decisions. So the same seed gives the same workload to two
versions of the pool. To compare two versions, run the module in the source tree of each. ``python
-m benchmarks.pool_waits --seeds 5`` prints one JSON line for each workload, with the seconds of
waiting per cell, the number of suspends and the number of cells.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from benchmarks.common import budget
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Owner, PoolSettings, Quota, Request, Slice

#: (sessions, devices, simulated seconds), from a light load to a large overload.
WORKLOADS = ((60, 4, 1800), (100, 4, 1800), (300, 16, 900), (300, 4, 900))
#: The highest allowed ratio: the seconds of waiting per cell, divided by the same figure under the
#: older rule of residence ("clock").
MOST_WAIT = 1.05
SIZES, WEIGHTS = (2, 4, 8, 16, 40), (20, 45, 20, 10, 5)


class Workload:
    """Kernels that think and compute, and a driver with realistic times."""

    def __init__(self, sessions: int, devices: int, seed: int, **rules: Any) -> None:
        quotas = {"user0": Quota(memory=64 * GiB)}
        self.pool = Pool(PoolSettings(host_memory=64 << 40, quotas=quotas, **rules))
        self.now, self.count = 0.0, 0
        self.heap: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self.asked: dict[str, float] = {}
        self.waited = 0.0
        self.cells = self.suspends = self.moves = 0
        #: ``running`` has, for each computing session, when its cell began or was resumed, and a
        #: number that marks this run of the cell. ``left`` has, for each unfinished cell, the
        #: seconds that it still had to compute when it last began, was resumed or was preempted.
        self.running: dict[str, tuple[float, int]] = {}
        self.left: dict[str, float] = {}
        for i in range(devices):
            model = "H100" if i % 5 < 3 else "A100"
            self.send(
                ev.DeviceAppeared(
                    now=0.0,
                    device=Device(f"GPU-{i:02}", i, model, model, memory_total=80 * GiB),
                )
            )
        self.chance: dict[str, random.Random] = {}
        for i in range(sessions):
            name = f"s{i}"
            chance = self.chance[name] = random.Random(f"{seed} {name}")
            memory = chance.choices(SIZES, WEIGHTS)[0] * GiB
            self.send(
                ev.SessionOpened(
                    now=0.0,
                    session=name,
                    owner=Owner(f"user{i % 50}"),
                    request=Request(memory, memory, 2 if chance.random() < 0.03 else 1),
                    attach="cell",
                )
            )
            self.at(chance.uniform(0, 120), "hold", name)

    def at(self, when: float, what: str, *args: Any) -> None:
        self.count += 1
        heappush(self.heap, (when, self.count, what, args))

    def send(self, event: ev.Event) -> None:
        for a in self.pool.handle(event):
            chance = self.chance.get(a.session)
            if isinstance(a, ev.Attach):
                seconds = 0.05 + (0.3 + sum(s.bytes for s in a.slices) / 14e9 if a.origin else 0)
                self.moves += bool(a.origin)
                self.at(self.now + seconds, "attached", a.session, a.epoch, seconds)
            elif isinstance(a, ev.Suspend):
                self.suspends += 1
                if a.session in self.running:  # preempted in the middle of its cell
                    began, _ = self.running.pop(a.session)
                    self.left[a.session] -= self.now - began
                    self.asked[a.session] = self.now
                size = sum(s.bytes for s in a.slices) // 2
                self.at(self.now + 0.3 + size / 4e9, "suspended", a.session, a.epoch, a.slices)
            elif isinstance(a, ev.HoldGranted):
                self.waited += self.now - self.asked.pop(a.session)
                if a.session not in self.left:
                    assert chance is not None
                    self.left[a.session] = chance.lognormvariate(3.0, 1.0)
                self.running[a.session] = self.now, self.count
                self.at(self.now + self.left[a.session], "drop", a.session, self.count)
            elif isinstance(a, ev.QueueMoved):
                self.told(a)

    def told(self, action: ev.QueueMoved) -> None:
        """Do nothing with a message about a wait. A subclass may override this method."""

    def run(self, until: float) -> None:
        while self.heap[0][0] < until:
            wake = self.pool.next_wakeup()
            if wake is not None and wake < self.heap[0][0]:
                self.now = max(self.now, wake)
                self.send(ev.Tick(now=self.now))
                continue
            self.now, _, what, args = heappop(self.heap)
            getattr(self, what)(*args)
        self.now = until

    def hold(self, name: str) -> None:
        self.asked[name] = self.now
        self.send(ev.HoldTaken(now=self.now, session=name, hold="c", kind="cell"))

    def drop(self, name: str, turn: int) -> None:
        if self.running.get(name, (0.0, -1))[1] != turn:
            return  # the cell was preempted before its planned end
        del self.running[name], self.left[name]
        self.cells += 1
        self.send(ev.HoldDropped(now=self.now, session=name, hold="c", cuda=True))
        self.at(self.now + self.chance[name].lognormvariate(4.1, 1.0), "hold", name)

    def attached(self, name: str, epoch: int, seconds: float) -> None:
        done = ev.AttachDone(now=self.now, session=name, epoch=epoch, seconds=seconds)
        self.send(done)

    def suspended(self, name: str, epoch: int, slices: tuple[Slice, ...]) -> None:
        state = tuple(Slice(s.device, s.bytes // 2) for s in slices)
        self.send(
            ev.SuspendDone(
                now=self.now,
                session=name,
                epoch=epoch,
                suspended=state,
                cuda=True,
                seconds=0.3 + sum(s.bytes for s in state) / 4e9,
            )
        )


def measure(sessions: int, devices: int, until: float, seeds: int, **rules: Any) -> dict[str, Any]:
    """Return the waits and the suspends of one workload, over all seeds."""
    cells = suspends = 0
    waited = 0.0
    for seed in range(seeds):
        work = Workload(sessions, devices, seed, **rules)
        work.run(until)
        cells += work.cells
        suspends += work.suspends
        waited += work.waited + sum(until - at for at in work.asked.values())
    return {
        "sessions": sessions,
        "devices": devices,
        "cells": cells,
        "wait_per_cell": round(waited / cells, 3),
        "suspends": suspends,
        "suspends_per_cell": round(suspends / cells, 4),
    }


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Return, for each workload, the seconds of waiting per cell and the number of suspends.

    The baseline, in the same run, is the older rule of residence ("clock").
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, the two lighter workloads")
    parser.add_argument("--seeds", type=int, default=0)
    options = parser.parse_args(argv)
    seeds = options.seeds or (1 if options.quick else 5)
    found = []
    for workload in WORKLOADS[:2] if options.quick else WORKLOADS:
        now, before = measure(*workload, seeds), measure(*workload, seeds, residence="clock")
        now["clock"] = {name: before[name] for name in ("cells", "wait_per_cell", "suspends")}
        now["ratio_wait"] = now["wait_per_cell"] / (before["wait_per_cell"] or 1)
        now["ratio_suspends"] = now["suspends"] / (before["suspends"] or 1)
        found.append(now)
    return {
        "what": "seconds of waiting per cell",
        "seeds": seeds,
        "workloads": found,
        "budgets": [
            budget(
                f"waiting per cell, {one['sessions']} sessions on {one['devices']} devices, "
                "against the older rule of residence",
                one["ratio_wait"],
                MOST_WAIT,
                "x",
            )
            for one in found
        ],
    }


if __name__ == "__main__":
    for one in main(sys.argv[1:])["workloads"]:
        print(json.dumps(one))
