# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks whether what a crowded pool tells its users comes true, in three scenes.

The pool is real and runs on a simulated clock. The benchmark checks the texts that the cell and the
chip show to a user. A text is wrong in two cases: the range for a wait does not contain the end of
the wait, or a kernel does not lose its slice at the end of its countdown. ``python -m
benchmarks.contended`` prints a row for each text.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.common import budget
from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, GiB, Owner, PoolSettings, Request, Slice
from jupyter_gpupool.pool.session_view import SessionView
from jupyter_gpupool.units import format_wait, range_ends

#: Seconds of a suspend and of a resume.
MOVE = 0.5
#: With this ``max_swap_overhead``, a time slice lasts 100 s. So the pool preempts no cell in these
#: scenes.
OVERHEAD = 0.01
#: Seconds between two looks.
LOOK = 10.0


@dataclass
class Look:
    """One look at one kernel."""

    scene: str
    at: float
    reads: str
    #: The earliest and the latest time for the event that the text announces: the kernel gets or
    #: loses its slice. None if the text announces no time.
    since: float | None = None
    until: float | None = None
    happened: str = ""
    right: bool = True


@dataclass
class Stage:
    """Kernels on two devices of 8 GiB, and the clock."""

    scene: str
    now: float = 0.0
    looks: list[Look] = field(default_factory=list)
    due: list[tuple[float, str, ev.Action]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = Pool(
            PoolSettings(host_memory=64 * GiB, idle_timeout=3600.0, max_swap_overhead=OVERHEAD)
        )
        for i in range(2):
            device = Device(f"GPU-{i}", i, "simulated", "simulated", memory_total=8 * GiB)
            self.send(ev.DeviceAppeared(now=0.0, device=device))

    def send(self, event: ev.Event) -> None:
        for a in self.pool.handle(event):
            if isinstance(a, ev.Attach):
                self.due.append((self.now + (MOVE if a.origin else 0.0), "attach", a))
            elif isinstance(a, ev.Suspend):
                self.due.append((self.now + MOVE, "suspend", a))

    def open(self, name: str, gib: int, owner: str = "") -> None:
        request = Request(gib * GiB, gib * GiB)
        self.send(
            ev.SessionOpened(
                now=self.now, session=name, owner=Owner(owner or name), request=request,
                attach="cell",
            )
        )  # fmt: skip

    def hold(self, name: str) -> None:
        self.send(ev.HoldTaken(now=self.now, session=name, hold="c", kind="cell"))
        self.wait(0.0)

    def drop(self, name: str) -> None:
        self.send(ev.HoldDropped(now=self.now, session=name, hold="c", cuda=True))

    def wait(self, seconds: float) -> None:
        """Advance the simulated clock by ``seconds``, and report each move's end to the pool."""
        end = self.now + seconds
        while True:
            wake = self.pool.next_wakeup()
            at = min(
                [t for t, _, _ in self.due] + ([wake] if wake is not None else []), default=end
            )
            if at > end:
                break
            self.now = max(self.now, at)
            if not any(t <= self.now for t, _, _ in self.due):
                if wake is None or wake > self.now:
                    break
                self.send(ev.Tick(now=self.now))
                if self.pool.next_wakeup() == wake:
                    break
                continue
            done = min(self.due, key=lambda one: one[0])
            self.due.remove(done)
            self.end(done[2])
        self.now = end

    def end(self, a: ev.Action) -> None:
        """Report the end of a suspend or an attach."""
        if isinstance(a, ev.Attach):
            common = {"now": self.now, "session": a.session, "epoch": a.epoch}
            self.send(ev.AttachDone(**common, seconds=MOVE if a.origin else 0.0))  # type: ignore[arg-type]
        elif isinstance(a, ev.Suspend):
            state = tuple(Slice(x.device, x.bytes) for x in a.slices)
            self.send(
                ev.SuspendDone(
                    now=self.now, session=a.session, epoch=a.epoch, suspended=state, cuda=True,
                    seconds=MOVE,
                )
            )  # fmt: skip

    def view(self, name: str) -> SessionView:
        """Return a session as the broker's status shows it."""
        return next(s for s in self.pool.view(self.now).sessions if s.record.id == name)

    def look(self, name: str) -> None:
        """Record what the user of a kernel reads now."""
        seen = self.view(name)
        look = Look(self.scene, self.now, "")
        if seen.queued_at is not None:
            left = None if seen.expected is None else seen.expected.left(self.now)
            look.reads = format_wait(self.now - seen.queued_at, left) or "waiting"
            if left is not None:
                low, high = range_ends(*left)
                look.since, look.until = self.now + low, self.now + high
        elif seen.record.state == "idle":
            look.reads = "Idle: may move to host memory at any moment"
            if not seen.wanted:
                assert seen.leaves_at is not None
                look.reads = f"Idle, back to the pool in {seen.leaves_at - self.now:.0f} s"
                look.since = look.until = seen.leaves_at
        else:
            look.reads = seen.record.state
        self.looks.append(look)

    def happens(self, what: str) -> None:
        """Record ``what`` as the outcome of all looks without an outcome; check these looks."""
        for look in self.looks:
            if not look.happened:
                look.happened = f"{what} after {self.now - look.at:.1f} s"
                if look.since is not None and look.until is not None:
                    look.right = look.since - 1.0 <= self.now <= look.until + 1.0


def crowd(earlier: int) -> list[Look]:
    """Two kernels have 6 GiB each. A third one of the same user waits 60 s until a cell ends."""
    stage = Stage(f"a third kernel waits, after {earlier} earlier waits")
    names = ["alpha", "beta", "gamma"]
    for name in names:
        stage.open(name, 6, "ada")
    stage.hold("alpha")
    stage.hold("beta")
    for number in range(earlier + 1):
        # The two running kernels begin a new cell, and the third kernel asks for a slice.
        running, waits = names[:2], names[2]
        for name in running:
            if stage.view(name).record.state == "idle":
                stage.hold(name)
        seconds = 60.0 if number == earlier else 40.0 + 7 * (number % 6)
        stage.hold(waits)
        begun = stage.now
        while stage.view(waits).record.state != "active":
            if number == earlier and stage.now - begun >= LOOK * len(stage.looks):
                stage.look(waits)
            stage.wait(MOVE)
            if stage.now - begun >= seconds and stage.view(running[0]).record.state == "active":
                stage.drop(running[0])
        if number == earlier:
            stage.happens("it has its slice")
        stage.drop(running[0])
        names = [running[1], waits, running[0]]
    return stage.looks


def countdown() -> list[Look]:
    """An idle kernel keeps its slice until another kernel waits."""
    stage = Stage("idle: nobody waits, then somebody who can use the slice")
    for name, gib in (("mine", 6), ("bob", 6), ("cat", 6)):
        stage.open(name, gib)
    stage.hold("bob")
    stage.hold("mine")
    stage.wait(5.0)
    stage.drop("mine")
    stage.look("mine")
    alone = stage.looks.pop()
    alone.happened = "nobody came; then cat asked"
    stage.wait(LOOK)
    stage.hold("cat")
    if stage.view("mine").record.state == "idle":
        stage.look("mine")
    while stage.view("mine").record.state != "detached":
        stage.wait(MOVE / 5)
    stage.happens("it is in host memory")
    return [alone, *stage.looks]


def neighbours() -> list[Look]:
    """An idle kernel keeps its 2 GiB, because each of the two waiting kernels needs 6 GiB."""
    stage = Stage("idle with 2 GiB, two wait for 6 GiB each")
    for name, gib in (("cat", 5), ("mine", 2), ("bob", 6), ("dan", 6), ("eve", 6)):
        stage.open(name, gib)
    for name in ("cat", "mine", "bob"):
        stage.hold(name)
    stage.wait(5.0)
    stage.hold("dan")
    stage.hold("eve")
    stage.drop("mine")
    for _ in range(8):
        stage.look("mine")
        stage.wait(LOOK)
    moved = stage.view("mine").record.suspends
    stage.happens("it was moved" if moved else "it still has its slice")
    for look in stage.looks:
        look.right = not moved
    return stage.looks


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run the scenes; return each look with its outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the same")
    parser.parse_args(argv)
    looks = [*crowd(0), *crowd(20), *countdown(), *neighbours()]
    return {
        "what": "looks of users in a crowded pool, and whether what they read was true",
        "looks": [vars(look) for look in looks],
        "budgets": [
            budget("looks that said something untrue", sum(not x.right for x in looks), 0, "looks")
        ],
    }


def page() -> str:
    """Return the looks as a table in Markdown."""
    rows = [[x["scene"], f"{x['at']:.0f} s", x["reads"], x["happened"]] for x in main()["looks"]]
    lines = [["Scene", "At", "The user reads", "What happened"], ["---"] * 4, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(page())
