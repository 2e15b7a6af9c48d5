# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Waits of cells when two kernels use one GPU in turn, and the share of the time that moves take.

``python -m benchmarks residence [--quick]`` measures each rule of minimum residence
(``jupyter_gpupool/pool/residence.py``) and writes the figures. ``docs/make_residence.py`` makes a
page of the documentation from these figures. The benchmark uses no GPU and no kernel: it drives the
real pool with a simulated clock. ``python -m benchmarks.residence --kernels`` measures two real
kernels on an emulated GPU instead. With this option, the module also runs with an older version of
the package.

Each of two sessions needs the whole device. A session runs a cell of 0.5 s, thinks for the think
time of the row, and wants the device again. Both times are multiplied by a random factor from 0.5
to 1.5. A suspend takes 0.3 s plus 1 s for each 4 GB. A resume takes 0.3 s plus 1 s for each 7 GB.
Others report these figures for NVIDIA's driver on single GPUs. The benchmark uses them until this
project has measured its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from benchmarks.common import budget, percentile
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Owner, PoolSettings, Request, Slice

THINK = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
STATES = (0.1, 1.0, 8.0, 40.0)
CELL = 0.5
DEVICE = "GPU-0"
SHARE = 0.1


def suspend_seconds(size: float) -> float:
    """Return the seconds of a copy of ``size`` bytes to host memory."""
    return 0.3 + size / 4e9


def resume_seconds(size: float) -> float:
    """Return the seconds of a copy of ``size`` bytes to a device."""
    return 0.3 + size / 7e9


class Pair:
    """Two sessions on one device, and a clock. Everything but the pool is simulated."""

    def __init__(self, rule: str, think: float, gib: float, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.think, self.size = think, int(gib * GiB)
        self.pool = Pool(
            PoolSettings(
                host_memory=1 << 42,
                idle_timeout=1e9,
                max_swap_overhead=SHARE,
                residence=rule,
            )
        )
        self.now, self.count = 0.0, 0
        self.heap: list[tuple[float, int, str, str, float]] = []
        self.waits: list[float] = []
        self.asked: dict[str, float] = {}
        #: Seconds in which a state moves, seconds in which a session computes and no state moves,
        #: and seconds in which a session only waits.
        self.moving = self.computing = self.idle = 0.0
        self.moves = 0
        self.busy: set[str] = set()
        memory = 2 * self.size
        device = Device(DEVICE, 0, "simulated", "simulated", memory_total=memory)
        self.send(ev.DeviceAppeared(now=0.0, device=device))
        for name in ("a", "b"):
            request = Request(memory, memory)
            self.send(
                ev.SessionOpened(
                    now=0.0, session=name, owner=Owner(name), request=request, attach="lazy"
                )
            )
            self.later(self.rng.uniform(0, think), "want", name)

    def later(self, seconds: float, what: str, name: str, took: float = 0.0) -> None:
        self.count += 1
        heappush(self.heap, (self.now + seconds, self.count, what, name, took))

    def some(self, seconds: float) -> float:
        return seconds * self.rng.uniform(0.5, 1.5)

    def send(self, event: ev.Event) -> None:
        for a in self.pool.handle(event):
            if isinstance(a, ev.Attach):
                seconds = resume_seconds(self.size) if a.origin else 0.0
                self.busy.add(f"{a.session} moves" if a.origin else "")
                self.later(seconds, "attached", a.session, seconds)
            elif isinstance(a, ev.Suspend):
                seconds = suspend_seconds(self.size)
                self.moves += 1
                self.busy.add(f"{a.session} moves")
                self.later(seconds, "suspended", a.session, seconds)
            elif isinstance(a, ev.HoldGranted):
                self.waits.append(self.now - self.asked.pop(a.session))
                self.busy.add(f"{a.session} computes")
                self.later(self.some(CELL), "done", a.session)

    def run(self, until: float) -> None:
        while self.now < until:
            wake = self.pool.next_wakeup()
            at = self.heap[0][0]
            if wake is not None and wake < at:
                self.pass_time(max(self.now, wake))
                self.send(ev.Tick(now=self.now))
                continue
            at, _, what, name, took = heappop(self.heap)
            self.pass_time(at)
            self.happen(what, name, took)

    def pass_time(self, to: float) -> None:
        seconds, self.now = to - self.now, to
        if any(one.endswith("moves") for one in self.busy):
            self.moving += seconds
        elif any(one.endswith("computes") for one in self.busy):
            self.computing += seconds
        elif self.asked:
            self.idle += seconds

    def happen(self, what: str, name: str, took: float) -> None:
        if what == "want":
            self.asked[name] = self.now
            self.send(ev.HoldTaken(now=self.now, session=name, hold="device", kind="device"))
        elif what == "done":
            self.busy.discard(f"{name} computes")
            self.send(ev.HoldDropped(now=self.now, session=name, hold="device"))
            self.later(self.some(self.think), "want", name)
        else:
            self.busy -= {f"{name} moves", ""}
            epoch = self.pool.record(name).epoch
            common: dict[str, Any] = {"now": self.now, "session": name, "epoch": epoch}
            if what == "attached":
                self.send(ev.AttachDone(**common, seconds=took))
            else:
                state = (Slice(DEVICE, self.size),)
                self.send(ev.SuspendDone(**common, suspended=state, seconds=took))


def simulate(rule: str, think: float, gib: float, *, quick: bool = False) -> dict[str, float]:
    """Return the figures of a pair of sessions under ``rule``."""
    pair = Pair(rule, think, gib)
    swap = suspend_seconds(pair.size) + resume_seconds(pair.size)
    pair.run(max(1000.0, 20 * swap / SHARE, 200 * think) / (10 if quick else 1))
    return {
        "swap_s": swap,
        "cells": len(pair.waits),
        "wait_p50_s": percentile(pair.waits, 50),
        "wait_mean_s": statistics.fmean(pair.waits),
        "wait_p90_s": percentile(pair.waits, 90),
        "wait_max_s": max(pair.waits),
        "moves": pair.moves,
        "moving_share": pair.moving / pair.now,
        "idle_share": pair.idle / pair.now,
        "computing_share": pair.computing / pair.now,
    }


def kernels(gib: float, turns: int) -> dict[str, Any]:
    """Run short cells in two real kernels in turn, on an emulated GPU; return their waits."""
    from benchmarks.kernels import Kernel, private_pool
    from jupyter_gpupool.client import Client

    size = int(gib * GiB)
    setup = SETUP.format(size=size)
    options = {
        "emulate": f"1x{int(1.7 * gib * 1024)}MiB,context=32MiB",
        "default_memory": size + (64 << 20),
        "default_limit": size + (64 << 20),
    }
    waits: list[float] = []
    with (
        private_pool(**options),
        Client(os.environ["GPUPOOL_SOCKET"]) as client,
        Kernel("gpupool-python3") as one,
        Kernel("gpupool-python3") as two,
    ):
        for kernel in (one, two):
            kernel.run(setup)
        for _ in range(turns):
            for kernel in (one, two):
                began = time.monotonic()
                kernel.run("use()")
                waits.append(time.monotonic() - began)
        rows = client.call("journal", after=0, limit=1000)["rows"]
    took = [
        statistics.median(r["seconds"] for r in rows if r["kind"] == "suspend"),
        # In the row of a resume, ``seconds`` is the whole wait. So take the driver's seconds.
        statistics.median(r["detail"]["driver_seconds"] for r in rows if r["kind"] == "resume"),
    ]
    return {
        "emulated": True,
        "gib": gib,
        "swap_s": sum(took),
        "cell_p50_s": percentile(waits, 50),
        "cell_max_s": max(waits),
        "cells_s": [round(wait, 2) for wait in waits],
    }


SETUP = """
from cuda.bindings import driver
def call(answer):
    assert answer[0] == 0, answer
    return answer[1] if len(answer) > 1 else None
call(driver.cuInit(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))))
address = int(call(driver.cuMemAlloc({size})))
call(driver.cuMemsetD8(address, 7, {size}))
def use():
    call(driver.cuMemsetD8(address, 1, 1 << 20))
    call(driver.cuCtxSynchronize())
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the waits and the shares of the time by rule, state and think time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the simulated time")
    parser.add_argument("--kernels", action="store_true", help="two real kernels instead")
    parser.add_argument("--gib", type=float, default=1.1, help="with --kernels: state of each")
    parser.add_argument("--turns", type=int, default=10, help="with --kernels: cells of each")
    options = parser.parse_args(argv)
    if options.kernels:
        return kernels(options.gib, options.turns)
    rows = []
    for gib in STATES:
        for think in THINK:
            found = {
                rule: simulate(rule, think, gib, quick=options.quick) for rule in ("work", "clock")
            }
            rows.append({"gib": gib, "think_s": think, **found})
    swaps = {row["gib"]: row["work"]["swap_s"] for row in rows}
    people = [row for row in rows if row["think_s"] > 1.5 * swaps[row["gib"]]]
    loops = [row for row in rows if row["think_s"] * 1.5 <= swaps[row["gib"]]]
    return {
        "cell_s": CELL,
        "share": SHARE,
        "rows": rows,
        "budgets": [
            budget(
                "cell p50, thinking for longer than the move, in moves",
                max((r["work"]["wait_p50_s"] - 0.2) / r["work"]["swap_s"] for r in people),
                2.5,
                "moves",
            ),
            budget(
                "time that moving takes where pauses are shorter than the move",
                max(row["work"]["moving_share"] for row in loops),
                SHARE,
                "of the time",
            ),
        ],
    }


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
