# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Simulates users whose kernels share one pool, and measures the GPU time of each user.

The length of a cell is in seconds of computing. A preempted cell later continues where it stopped.
A suspend and a resume are moves of the state. Each move takes ``move`` seconds. During a move, the
session occupies its devices and computes nothing. With ``crowded``, all devices share one path to
host memory. Then a move takes ``move`` seconds, multiplied by the number of moves under way.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field
from typing import Any, Callable

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, Owner, PoolSettings, Request, Slice


@dataclass
class Kernel:
    """A session that runs one cell after another, with pauses between the cells."""

    name: str
    owner: Owner
    cell: Callable[[], float]
    pause: Callable[[], float]
    size: float
    left: float = 0.0
    running_since: float = 0.0
    running: bool = False
    asked_at: float = 0.0
    number: int = 0
    waits: list[float] = field(default_factory=list)
    done: int = 0
    computed: float = 0.0
    moves: int = 0


class Crowd:
    """A pool of ``devices`` devices of 16 bytes, and its users."""

    def __init__(
        self,
        devices: int = 1,
        *,
        move: float = 0.0,
        crowded: bool = False,
        seed: int = 0,
        **rules: Any,
    ) -> None:
        self.rng = random.Random(seed)
        self.crowded, self.moving = crowded, 0
        #: The duration of each move in seconds, in the order in which the moves start.
        self.took: list[float] = []
        self.now, self.move, self.count = 0.0, move, 0
        self.pool = Pool(PoolSettings(**{"host_memory": 10_000, "resume_headroom": 0, **rules}))
        self.kernels: dict[str, Kernel] = {}
        self.heap: list[tuple[float, int, str, tuple[Any, ...]]] = []
        for i in range(devices):
            device = Device(uuid=f"G{i}", index=i, name="t", model="A", memory_total=16)
            self.send(ev.DeviceAppeared(now=0.0, device=device))

    def at(self, when: float, what: str, *args: Any) -> None:
        self.count += 1
        heapq.heappush(self.heap, (when, self.count, what, args))

    def add(
        self,
        name: str,
        owner: str | Owner,
        memory: int = 16,
        cell: float | Callable[[], float] = 10.0,
        pause: float | Callable[[], float] = 0.0,
        **request: Any,
    ) -> Kernel:
        who = owner if isinstance(owner, Owner) else Owner(owner)
        asked = Request(memory=memory, limit=request.pop("limit", memory), **request)
        kernel = Kernel(
            name,
            who,
            cell if callable(cell) else lambda: cell,
            pause if callable(pause) else lambda: pause,
            memory * asked.devices / 16,
        )
        self.kernels[name] = kernel
        self.send(
            ev.SessionOpened(
                now=self.now, session=name, owner=who, request=asked, attach="cell", rid=""
            )
        )
        self.at(self.now + self.rng.random() * 0.01, "ask", kernel)
        return kernel

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            wake = self.pool.next_wakeup()
            nearest = self.heap[0][0] if self.heap else end
            if min(end, nearest) >= (end if wake is None else min(wake, end)) and (
                wake is not None and wake <= min(nearest, end)
            ):
                self.now = max(self.now, wake)
                self.send(ev.Tick(now=self.now))
                continue
            if nearest > end:
                self.now = end
                return
            when, _, what, args = heapq.heappop(self.heap)
            self.now = max(self.now, when)
            getattr(self, what)(*args)

    def computed(self) -> list[float]:
        """Return the seconds of computing of each kernel, in the order of :meth:`add`."""
        return [
            k.computed + (self.now - k.running_since if k.running else 0.0)
            for k in self.kernels.values()
        ]

    def got(self) -> dict[str, float]:
        """Return the GPU time of each owner in device-seconds.

        A second with a slice of half a device counts as 0.5.
        """
        found: dict[str, float] = {}
        for k, seconds in zip(self.kernels.values(), self.computed(), strict=True):
            found[k.owner.name] = found.get(k.owner.name, 0.0) + seconds * k.size
        return found

    # ------------------------------------------------------------------ the simulated world

    def ask(self, k: Kernel) -> None:
        k.number += 1
        k.left, k.asked_at = k.cell(), self.now
        self.send(ev.HoldTaken(now=self.now, session=k.name, hold=f"c{k.number}", kind="cell"))

    def ends(self, k: Kernel, number: int, epoch: int) -> None:
        if not k.running or (number, epoch) != (k.number, self.pool.record(k.name).epoch):
            return
        self.stop(k)
        k.done += 1
        self.send(ev.HoldDropped(now=self.now, session=k.name, hold=f"c{k.number}", cuda=True))
        self.at(self.now + k.pause(), "ask", k)

    def stop(self, k: Kernel) -> None:
        if k.running:
            k.computed += self.now - k.running_since
            k.left -= self.now - k.running_since
            k.running = False

    def moves(self) -> float:
        """Start a move; return how many seconds the move takes."""
        self.moving += 1
        self.took.append(self.move * (self.moving if self.crowded else 1))
        return self.took[-1]

    def attached(self, name: str, epoch: int, seconds: float) -> None:
        self.moving -= seconds > 0
        self.send(ev.AttachDone(now=self.now, session=name, epoch=epoch, seconds=seconds))

    def suspended(self, name: str, epoch: int, slices: tuple[Slice, ...], seconds: float) -> None:
        self.kernels[name].moves += 1
        self.moving -= 1
        self.send(
            ev.SuspendDone(
                now=self.now, session=name, epoch=epoch, suspended=slices, seconds=seconds
            )
        )

    def send(self, event: ev.Event) -> None:
        for a in self.pool.handle(event):
            if isinstance(a, ev.Attach):
                seconds = self.moves() if a.origin and self.move else 0.0
                self.at(self.now + seconds, "attached", a.session, a.epoch, seconds)
            elif isinstance(a, ev.Suspend):
                self.stop(self.kernels[a.session])
                seconds = self.moves()
                self.at(self.now + seconds, "suspended", a.session, a.epoch, a.slices, seconds)
            elif isinstance(a, ev.HoldGranted):
                k = self.kernels[a.session]
                if not k.running:
                    if k.asked_at >= 0:
                        k.waits.append(self.now - k.asked_at)
                        k.asked_at = -1.0
                    k.running, k.running_since = True, self.now
                    self.at(self.now + k.left, "ends", k, k.number, a.epoch)
