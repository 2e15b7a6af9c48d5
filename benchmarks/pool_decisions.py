# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The time of a pool decision, by the number of sessions, on 16 devices.

``python -m benchmarks.pool_decisions [--seconds 2] [--sizes 10,100,300,1000]`` prints JSON.

A decision is the handling of one event by the pool. In this time, the pool chooses its actions:
grants, suspends, and messages about the queue. The simulation does not run the actions. It reports
the end of each action to the pool after a realistic simulated time. A sample of a device is not a
decision, so the samples have their own figure.

The workload is a day in a busy lab, replayed as fast as the pool can. Every session runs cells
(log normal, median 20 s) with pauses (median 60 s). So the sessions want far more slices than
exist. There are five request sizes, three priority classes and 50 owners. One owner has a quota.
Suspends run at 4 GB/s and resumes at 7 GB/s. The pool gets ticks when it asks for them, and a
sample of each device every 5 s. Sometimes a kernel ends and another kernel starts. Two of five
devices are of a different model.

``--rules`` turns every rule on. The owners are then in a tree of six groups with guarantees,
weights, caps and a daily budget, and each of the four preemption rules may preempt sessions in use.

``exponent`` describes how the time of a decision grows with the number of sessions. It is the slope
of log(time) over log(sessions), by least squares. 0 means that the time does not grow.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

from benchmarks.common import budget
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import (
    PREEMPT_ALL,
    Daily,
    Device,
    GiB,
    Group,
    Owner,
    PoolSettings,
    Portion,
    Quota,
    Request,
    Slice,
)

DEVICES = 16
SIZES = (2, 4, 8, 16, 40)
WEIGHTS = (20, 45, 20, 10, 5)
SAMPLE = 5.0

#: For each number of sessions: the most milliseconds of a decision at p50 and at p99. A machine has
#: at most 16 devices and 1,000 sessions.
BUDGETS_MS = {300: (0.3, 2.0), 1000: (3.0, 15.0)}
#: The same budgets with ``--rules``.
RULES_MS = {300: (0.6, 4.0)}


#: The settings of the pool with ``--rules``.
RULES: dict[str, Any] = {
    "groups": {
        "bio": Group(guarantee=Portion(percent=40), weight=2.0),
        "bio-a": Group(parent="bio", guarantee=Portion(percent=20)),
        "bio-b": Group(parent="bio", weight=3.0),
        "phy": Group(guarantee=Portion(devices=4), cap=Portion(percent=75)),
        "it": Group(weight=0.5, daily=Daily(20 * 3600.0, rule="refill")),
        "guests": Group(weight=0.1, cap=Portion(devices=2)),
    },
    "preempt": PREEMPT_ALL,
}


class Lab:
    """Simulates kernels, people, the driver and the broker; measures only the pool."""

    def __init__(
        self, sessions: int, seed: int, host: int = 64 << 40, *, rules: bool = False
    ) -> None:
        self.rng = random.Random(seed)
        settings = PoolSettings(
            host_memory=host,
            quotas={"user0": Quota(memory=64 * GiB)},
            max_wait=3600.0,
            max_memory_per_kernel=80 * GiB,
        )
        self.pool = Pool(replace(settings, **RULES) if rules else settings)
        self.now = 0.0
        self.heap: list[tuple[float, int, Any]] = []
        self.count = 0
        self.spent: list[float] = []
        #: Seconds of each sample of a device. A sample is not a decision.
        self.sampled: list[float] = []
        #: By device and session: bytes granted by the pool's actions.
        self.leases: dict[str, dict[str, int]] = {}
        self.kinds: Counter[str] = Counter()
        names = sorted(RULES["groups"]) if rules else [""]
        self.owners = [Owner(f"user{i}", names[i % len(names)]) for i in range(50)]
        #: For each session with a preempted cell: the seconds that the cell must still compute.
        self.left: dict[str, float] = {}
        self.ends: dict[str, tuple[int, float]] = {}
        self.used: dict[str, int] = {}
        self.lost: set[str] = set()
        self.waiting_peak = 0
        self.waiting: set[str] = set()
        for i in range(DEVICES):
            model = "H100" if i % 5 < 3 else "A100"
            device = Device(
                uuid=f"GPU-{i:02}", index=i, name=model, model=model, memory_total=80 * GiB
            )
            self.send(ev.DeviceAppeared(now=0.0, device=device))
            self.at(self.rng.uniform(0, SAMPLE), "sample", device.uuid)
        for _ in range(sessions):
            self.open()

    def at(self, when: float, what: str, *args: Any) -> None:
        self.count += 1
        heappush(self.heap, (when, self.count, (what, args)))

    def send(self, event: ev.Event) -> None:
        begin = time.perf_counter()
        actions = self.pool.handle(event)
        took = time.perf_counter() - begin
        (self.sampled if isinstance(event, ev.DeviceMemorySeen) else self.spent).append(took)
        self.kinds[type(event).__name__] += 1
        for a in actions:
            self.kinds[type(a).__name__] += 1
            if isinstance(a, (ev.Attach, ev.Resize)):
                for piece in a.slices:
                    self.leases.setdefault(piece.device, {})[a.session] = piece.bytes
            if isinstance(a, ev.Attach):
                size = self.used.get(a.session, 0) if a.origin else 0
                seconds = 0.05 + (0.3 + size / 7e9 if size else 0.0)
                self.at(self.now + seconds, "attached", a.session, a.epoch, seconds)
                self.waiting.discard(a.session)
            elif isinstance(a, ev.Suspend):
                size = sum(s.bytes for s in a.slices) * self.rng.randint(3, 10) // 10
                self.used[a.session] = size
                if a.busy:
                    _, ends = self.ends.pop(a.session)
                    self.left[a.session] = max(0.0, ends - self.now)
                seconds = 0.3 + size / 4e9
                self.at(self.now + seconds, "suspended", a.session, a.epoch, a.slices, size)
            elif isinstance(a, ev.HoldGranted):
                self.granted(a.session, a.hold)
            elif isinstance(a, ev.HoldRefused):
                self.waiting.discard(a.session)
                self.at(self.now + self.rng.lognormvariate(4.1, 1.0), "hold", a.session)

    def granted(self, name: str, hold: str) -> None:
        seconds = self.left.pop(name, None)
        if seconds is None and name in self.ends:
            return  # granted again: the cell continues
        seconds = self.rng.lognormvariate(3.0, 1.0) if seconds is None else seconds
        self.count += 1
        self.ends[name] = self.count, self.now + seconds
        self.at(self.now + seconds, "drop", name, hold, self.count)

    def open(self) -> None:
        self.count += 1
        name = f"s{self.count}"
        memory = self.rng.choices(SIZES, WEIGHTS)[0] * GiB
        self.send(
            ev.SessionOpened(
                now=self.now,
                session=name,
                owner=self.rng.choice(self.owners),
                request=Request(
                    memory=memory,
                    limit=memory,
                    devices=2 if self.rng.random() < 0.03 else 1,
                    priority=self.rng.choices(["interactive", "notebook", "batch"], [1, 8, 1])[0],
                ),
                attach="cell",
            )
        )
        self.at(self.now + self.rng.uniform(0, 120), "hold", name)

    def step(self) -> None:
        wake = self.pool.next_wakeup()
        when, _, (what, args) = self.heap[0]
        if wake is not None and wake < when:
            self.now = max(self.now, wake)
            self.send(ev.Tick(now=self.now))
            return
        heappop(self.heap)
        self.now = max(self.now, when)
        getattr(self, what)(*args)

    # ------------------------------------------------------------------ the simulated world

    def hold(self, name: str) -> None:
        if name not in self.pool:
            return
        self.waiting.add(name)
        self.waiting_peak = max(self.waiting_peak, len(self.waiting))
        self.count += 1
        self.send(ev.HoldTaken(now=self.now, session=name, hold=f"c{self.count}", kind="cell"))

    def drop(self, name: str, hold: str, number: int) -> None:
        if name not in self.pool or self.ends.get(name, (0, 0.0))[0] != number:
            return
        del self.ends[name]
        self.send(ev.HoldDropped(now=self.now, session=name, hold=hold, cuda=True))
        if self.rng.random() < 0.01:
            self.given_back(name)
            self.send(ev.SessionEnded(now=self.now, session=name, reason="exit"))
            self.open()
        else:
            self.at(self.now + self.rng.lognormvariate(4.1, 1.0), "hold", name)

    def attached(self, name: str, epoch: int, seconds: float) -> None:
        self.send(ev.AttachDone(now=self.now, session=name, epoch=epoch, seconds=seconds))

    def suspended(self, name: str, epoch: int, slices: tuple[Slice, ...], size: int) -> None:
        if self.rng.random() < 0.02:
            self.send(
                ev.SuspendRefused(
                    now=self.now, session=name, epoch=epoch, kind="busy", message="a cell began"
                )
            )
            return
        self.given_back(name)
        state = tuple(Slice(s.device, size // len(slices)) for s in slices)
        self.send(
            ev.SuspendDone(
                now=self.now, session=name, epoch=epoch, suspended=state, cuda=True, seconds=1.0
            )
        )

    def given_back(self, name: str) -> None:
        for leases in self.leases.values():
            leases.pop(name, None)

    def sample(self, uuid: str) -> None:
        # Report each session's memory on the device to the pool, as a broker reads it from NVML.
        prints = {name: size * 8 // 10 for name, size in self.leases.get(uuid, {}).items()}
        self.send(ev.DeviceMemorySeen(now=self.now, device=uuid, foreign=0, footprints=prints))
        self.at(self.now + SAMPLE, "sample", uuid)


def measure(sessions: int, seconds: float, seed: int, *, rules: bool = False) -> dict[str, Any]:
    lab = Lab(sessions, seed, rules=rules)
    # Do not measure the first 300 s. In this time, the machine fills up, and every session runs its
    # first cells.
    while lab.now < 300.0:
        lab.step()
    lab.spent.clear()
    lab.sampled.clear()
    lab.kinds.clear()
    gc.collect()
    gc.disable()
    end = time.perf_counter() + seconds
    begin_now = lab.now
    while time.perf_counter() < end or len(lab.spent) < 2000:
        for _ in range(100):
            lab.step()
    gc.enable()
    assert lab.pool.self_check() == []
    spent = sorted(lab.spent)
    mean = sum(spent) / len(spent)
    return {
        "sessions": sessions,
        "decisions": len(spent),
        "decisions_per_second": round(1 / mean),
        "mean_us": round(mean * 1e6, 1),
        "p50_us": round(spent[len(spent) // 2] * 1e6, 1),
        "p99_us": round(spent[len(spent) * 99 // 100] * 1e6, 1),
        "max_us": round(spent[-1] * 1e6, 1),
        "sample_p50_us": round(sorted(lab.sampled)[len(lab.sampled) // 2] * 1e6, 1),
        "waiting_peak": lab.waiting_peak,
        "pretended_seconds": round(lab.now - begin_now, 1),
        "kinds": dict(sorted(lab.kinds.items())),
    }


def calibration() -> float:
    """Return the nanoseconds of a dict look-up and an addition: the present speed of this core."""
    numbers = {i: i for i in range(1000)}
    best = math.inf
    for _ in range(20):
        begin = time.perf_counter()
        total = 0
        for i in range(1000):
            total += numbers[i]
        best = min(best, time.perf_counter() - begin)
    return round(best * 1e6, 1)


def exponent(points: list[tuple[float, float]]) -> float:
    """Return the slope of log(y) over log(x)."""
    xs = [math.log(x) for x, _ in points]
    ys = [math.log(y) for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    top = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return top / sum((x - mean_x) ** 2 for x in xs)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return a result for each number of sessions, and the exponent of the growth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes, half a second each")
    parser.add_argument("--seconds", type=float, default=0.0, help="per size (default 2)")
    parser.add_argument("--sizes", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rules", action="store_true", help="with groups and preemption")
    options = parser.parse_args(argv)
    seconds = options.seconds or (0.5 if options.quick else 2.0)
    usual = "10,300,1000" if options.quick else "10,30,100,300,1000"
    sizes = [int(text) for text in (options.sizes or usual).split(",")]
    results = [measure(n, seconds, options.seed, rules=options.rules) for n in sizes]
    times = [(r["sessions"], r["mean_us"]) for r in results]
    budgets = [
        budget(
            f"pool decision, {r['sessions']} sessions on {DEVICES} devices, {which}"
            + ", all rules" * options.rules,
            r[f"{which}_us"] / 1000,
            allowed,
            "ms",
        )
        for r in results
        for which, allowed in zip(
            ("p50", "p99"),
            (RULES_MS if options.rules else BUDGETS_MS).get(r["sessions"], ()),
            strict=False,
        )
    ]
    report: dict[str, Any] = {
        "gpus_in_the_model": DEVICES,
        "calibration_ns": calibration(),
        "results": results,
        "budgets": budgets,
    }
    if len(times) > 1:
        report["exponent"] = round(exponent([(float(x), y) for x, y in times]), 3)
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
