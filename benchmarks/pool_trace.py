# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Counts the code of the pool that one event runs: Python calls, functions, and files.

``python -m benchmarks.pool_trace`` handles the events of a short story on two GPUs with two
sessions, and prints figures for each event as JSON. ``calls`` and ``functions`` count the Python
calls and the different functions. A reader who follows the event through the code must open
``files`` files, and must go from one file to another ``changes_of_file`` times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, Owner, PoolSettings, Request, Slice

PART = "/jupyter_gpupool/pool/"


class Trace:
    """Counts of the calls into the pool's modules."""

    def __init__(self) -> None:
        self.calls = 0
        self.functions: set[CodeType] = set()
        self.path: list[str] = []

    def __call__(self, frame: FrameType, what: str, _arg: Any) -> None:
        name = frame.f_code.co_filename
        if what != "call" or PART not in name:
            return
        self.calls += 1
        self.functions.add(frame.f_code)
        if not self.path or self.path[-1] != name:
            self.path.append(name)

    def figures(self) -> dict[str, int]:
        return {
            "calls": self.calls,
            "functions": len(self.functions),
            "files": len(set(self.path)),
            "changes_of_file": max(0, len(self.path) - 1),
        }


@contextmanager
def traced() -> Iterator[Trace]:
    trace = Trace()
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)


def story() -> dict[str, dict[str, int]]:
    """Return the figures of each event in the story, from the first cell to the suspend."""
    pool = Pool(PoolSettings(host_memory=1000, resume_headroom=1))
    for i in range(2):
        pool.handle(ev.DeviceAppeared(now=0.0, device=Device(f"G{i}", i, "test", "A", 16)))
    for name in ("a", "b"):
        request = Request(10, 10)
        pool.handle(
            ev.SessionOpened(
                now=0.0, session=name, owner=Owner(name), request=request, attach="cell"
            )
        )
    found: dict[str, dict[str, int]] = {}

    def send(what: str, event: ev.Event) -> None:
        with traced() as trace:
            pool.handle(event)
        found[what] = trace.figures()

    def take(hold: str) -> ev.Event:
        return ev.HoldTaken(now=1.0, session="a", hold=hold, kind="cell")

    def done(now: float, epoch: int) -> ev.Event:
        return ev.AttachDone(now=now, session="a", epoch=epoch)

    send("HoldTaken", take("c1"))
    send("AttachDone", done(1.0, 1))
    send("HoldTaken on a slice", take("c2"))
    pool.handle(ev.HoldDropped(now=2.0, session="a", hold="c1"))
    send("last HoldDropped", ev.HoldDropped(now=2.0, session="a", hold="c2"))
    send("Tick that suspends", ev.Tick(now=400.0))
    state = (Slice("G0", 5),)
    send("SuspendDone", ev.SuspendDone(now=401.0, session="a", epoch=1, suspended=state))
    return found


if __name__ == "__main__":
    print(json.dumps(story(), indent=2))
