# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Cases from the field, each with its own broker, real kernels and commands, and a baseline.

``services``   four services of 20 % each on one card
``resident``   a resident service of 12 GiB and a second task on a card of 16 GiB
``production`` a protected production job, and batch jobs that use the rest of the time
``people``     two people who run cells in turn; each needs the whole card
``flood``      one person with 50 notebooks, and ten people with one notebook each

``python -m benchmarks.field_cases --case flood`` runs only the case ``flood``. The cards are
emulated and have 16 GiB. Others report that NVIDIA's driver copies 4 GB/s. Here, a program uses a
128th of the memory that it asks for, and copies are 128 times slower than 4 GB/s. So a move takes
as long as the move of a full slice at 4 GB/s. To compute, a program launches GPU kernels that take
a given time. On an emulated card, two programs that compute at the same time do not slow each other
down. A program becomes slower only when it waits for its turn.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import budget, percentile, summary, table
from benchmarks.kernels import private_pool
from benchmarks.owed import beyond, waits
from benchmarks.programs import (
    PATIENCE,
    Notebook,
    Player,
    Program,
    Service,
    end,
    start,
    swap_seconds,
)
from benchmarks.programs import Client as Caller
from jupyter_gpupool.client import Client
from jupyter_gpupool.pool.model import PoolSettings
from jupyter_gpupool.pool.residence import slice_length

GiB, MiB = 1 << 30, 1 << 20

#: A slice is this many times as large as its state.
SCALE = 128

CARD = "1x16GiB,context=256MiB,bandwidth=31MB/s"
#: The card for ``--quick``. Its copies are four times as fast as those of CARD.
QUICK = "1x16GiB,context=256MiB,bandwidth=125MB/s"

#: Three times in seconds: how long a service computes for a request, how long the turn of one of
#: several programs on a card lasts (option ``turn``), and the pool's shortest time slice.
REQUEST, TURN, SLICE = 0.02, 0.1, 10.0

Case = dict[str, Any]


def state(memory: float) -> int:
    """Return the bytes of state in a slice of ``memory`` GiB."""
    return int(memory * GiB) // SCALE


@dataclass
class Place:
    """The folder and the broker of one case, and the programs that the case starts."""

    folder: Path
    client: Client
    stack: ExitStack
    quick: bool

    def seconds(self, long: float) -> float:
        return long / 4 if self.quick else long

    def service(self, name: str, memory: float, *options: str) -> Service:
        """Start a service with ``memory`` GiB."""
        words = ["--memory", f"{memory}GiB", "--limit", f"{memory}GiB", *options]
        found = Service(self.folder, name, words, state(memory))
        self.stack.enter_context(found)
        return found

    def program(self, name: str, memory: float, options: Sequence[str], *role: str) -> Program:
        """Start another program with ``memory`` GiB."""
        words = ["--memory", f"{memory}GiB", "--limit", f"{memory}GiB", *options]
        return self.stack.enter_context(Program(self.folder, name, words, list(role)))

    def suspends(self) -> int:
        return sum(row["kind"] == "suspend" for row in self.client.journal(after=0))


@contextmanager
def place(quick: bool, **options: Any) -> Iterator[Place]:
    """Run a broker for one case."""
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(
                tempfile.TemporaryDirectory(prefix="gpb", ignore_cleanup_errors=True)
            )
        )
        settings: dict[str, Any] = {
            "emulate": QUICK if quick else CARD,
            "quiet_after": 0.3,
            "sample_interval": 0.25,
            "host_memory": "64GiB",  # enough for whole slices, although the states are small
        }
        settings |= options
        stack.enter_context(private_pool(**settings))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        yield Place(folder, client, stack, quick)


def observe(players: Sequence[Player], seconds: float) -> list[list[float]]:
    """Sleep for ``seconds``; return, for each player, the seconds of the turns in this time."""
    begun = time.time()
    time.sleep(seconds)
    return [one.taken(begun) for one in players]


def begin(logs: Sequence[Path]) -> None:
    """Wait until each training has made a step."""
    deadline = time.monotonic() + PATIENCE
    while not all(log.exists() and log.stat().st_size for log in logs):
        if time.monotonic() > deadline:
            raise RuntimeError("a training does not begin")
        time.sleep(0.1)


def finish(players: Sequence[Player], what: str = "") -> dict[str, Any]:
    """Stop the players; return the line of the budget table for wrong bytes and failures."""
    problems = end(list(players))
    for problem in problems:
        print(problem, file=sys.stderr)
    return budget(f"{what}wrong bytes, failed cells and requests", len(problems), 0, "")


# --------------------------------------------------------------------------- the cases


def services(quick: bool) -> Case:
    """Four services that each ask for 20 % of a card's memory and time."""
    with place(quick) as here:
        fifth = ["--compute", "20", "--attach", "hold"]
        callers = [
            Caller(here.service(f"svc{n}", 3.1, *fifth), 0.0, n, seconds=REQUEST) for n in range(4)
        ]
        start(callers[:1])
        alone = observe(callers[:1], here.seconds(20))[0]
        callers[0].pause = 0.2
        apart = observe(callers[:1], here.seconds(20))[0]
        for one in callers:
            one.pause = 0.0
        start(callers[1:])
        full = observe(callers, here.seconds(40))
        for one in callers:
            one.pause = 0.2
        time.sleep(1)
        light = observe(callers, here.seconds(40))
        moved = here.suspends()
        lines = [finish(callers, "services: ")]
    rate = len(alone) / here.seconds(20)
    parts = [len(times) / here.seconds(40) / rate for times in full]
    waits = [percentile(times, 99) for times in light]
    return {
        "alone": {"busy": summary(alone), "light": summary(apart), "requests_per_second": rate},
        "part_of_alone_when_all_are_busy": parts,
        "answers_when_all_are_busy": [summary(times) for times in full],
        "answers_at_light_load": [summary(times) for times in light],
        "budgets": [
            *lines,
            budget("services: suspends", moved, 0, ""),
            budget(
                "services: the least part of its throughput alone, all four busy",
                min(parts), 0.20, "", at_least=True,
            ),
            budget(
                "services: p99 of answers at a tenth of the load each, beyond alone, in turns",
                (max(waits) - percentile(apart, 99)) / TURN, 3, "turns",
            ),
        ],
    }  # fmt: skip


def resident(quick: bool) -> Case:
    """A service of 12 GiB with rare requests, beside a training that fits and one that does not."""
    found: Case = {"budgets": []}
    for memory, fits in ((3.0, True), (8.0, False)):
        with place(quick) as here:
            what = "resident, a task that fits: " if fits else "resident, a task that does not: "
            options = ["--class", "interactive", "--attach", "hold" if fits else "lazy"]
            caller = Caller(here.service("service", 12.0, *options), 0.5, 1, seconds=REQUEST)
            start([caller])
            alone = observe([caller], here.seconds(20))[0]
            caller.pause = 0.5 if fits else 12.0 if quick else 25.0
            log = here.folder / "log"
            size = state(memory)
            task = here.program("task", memory, ["--class", "batch"], "train", str(log), str(size))
            begin([log])
            begun = time.time()
            beside = observe([caller], here.seconds(40 if fits else 240))[0]
            length = time.time() - begun
            steps = sum(begun < float(at) < begun + length for at in log.read_text().split())
            moves, swap = here.suspends(), swap_seconds(here.client.journal(after=0))
            lines = [finish([caller], what)]
            wrong = task.result(stop=True)["wrong"]
        lines.append(budget(f"{what}wrong bytes of the training", wrong, 0, "bytes"))
        used = 0.05 * steps / length
        if fits:
            lines.append(budget(f"{what}suspends", moves, 0, ""))
            extra = percentile(beside, 50) - percentile(alone, 50)
            lines.append(budget(f"{what}answer p50 beyond alone", extra, 0.02, "s"))
        else:
            name = f"{what}answer p50, bound: a swap and 0.5 s"
            lines.append(budget(name, percentile(beside, 50), swap + 0.5, "s"))
            # After a resume, a training keeps its slice at least as long as the swap has taken.
            name = f"{what}longest answer, bound: that and the training's least stay"
            lines.append(budget(name, max(beside), 2 * swap + 0.5, "s"))
        least = 0.8 if fits else 0.4
        lines.append(budget(f"{what}training's part of the time", used, least, "", at_least=True))
        found["fits" if fits else "takes turns"] = {
            "alone": summary(alone), "beside": summary(beside), "suspends": moves,
            "swap_seconds": swap, "training_part": used,
        }  # fmt: skip
        found["budgets"] += lines
    return found


def production(quick: bool) -> Case:
    """A production job that computes half of the time, and three jobs that use the other half."""
    rounds, phase = (3, 2.0) if quick else (8, 4.0)
    size = str(state(6))
    job = ["--class", "interactive"], "job", size, str(rounds), str(phase)
    with place(quick) as here:
        alone = here.program("alone", 6.0, *job).result()
        logs = [here.folder / f"log{n}" for n in range(3)]
        fillers = [
            here.program(
                f"filler{n}", 3.0, ["--class", "batch", "--compute", "1"],
                "train", str(log), str(state(3)),
            )
            for n, log in enumerate(logs)
        ]  # fmt: skip
        begin(logs)
        begun = time.time()
        beside = here.program("beside", 6.0, *job).result()
        steps = [float(at) for log in logs for at in log.read_text().split()]
        ended = time.time()
        moves = here.suspends()
        wrong = [filler.result(stop=True)["wrong"] for filler in fillers]
    seconds = [found["ended"] - found["begun"] for found in (alone, beside)]
    wrong += [alone["wrong"], beside["wrong"]]
    filled = 0.05 * sum(begun < at < ended for at in steps) / (ended - begun)
    return {
        "alone_seconds": seconds[0],
        "beside_seconds": seconds[1],
        "fillers_part_of_the_time": filled,
        "suspends": moves,
        "budgets": [
            budget("production: wrong bytes", sum(wrong), 0, "bytes"),
            budget("production: its time beside three others, against alone",
                   seconds[1] / seconds[0], 1.05, "x"),
            budget("production: what the others computed, of the time",
                   filled, 0.4, "", at_least=True),
        ],
    }  # fmt: skip


def people(quick: bool) -> Case:
    """Two people who each need 90 % of the card; one begins a cell when the other's cell ends."""
    turns = 5 if quick else 20
    with place(quick, idle_timeout=3600.0) as here:
        slice_ = int(14.4 * GiB)
        both = [
            Notebook(0.0, n, size=state(14.4), seconds=0.3, memory=slice_, limit=slice_)
            for n in range(2)
        ]
        for one in both:
            one.prepare()
        both[1].turn()
        own = statistics.median(both[1].turn() for _ in range(3))
        waits = [one.turn() - own for _ in range(turns) for one in both]
        rows = here.client.journal(after=0)
        lost = []
        for one in both:
            try:
                one.finish()
            except RuntimeError as error:
                lost.append(str(error))
    out = [row["seconds"] for row in rows if row["kind"] == "suspend"]
    back = [row["detail"]["driver_seconds"] for row in rows if row["kind"] == "resume"]
    move = statistics.median(out) + statistics.median(back)
    # In the first turns, the pool learns how long these two people think.
    known = waits[4:]
    return {
        "move_seconds": move,
        "cell_without_a_wait_seconds": own,
        "waits_seconds": waits,
        "budgets": [
            budget("people: wrong bytes", len(lost), 0, ""),
            budget("people: p50 of a cell's wait, in moves",
                   percentile(known, 50) / move, 2.5, "moves"),
            budget("people: longest wait, in moves", max(known) / move, 4, "moves"),
        ],
    }  # fmt: skip


def flood(quick: bool) -> Case:
    """One person whose many notebooks compute without a pause, and others who think.

    The one person's notebooks are the crowd. Two budgets limit the waits of the others while the
    crowd computes. A swap is the longest suspend plus the longest resume of the same run.

    *p50: at most two swaps more than without the crowd, after the rest of a time slice is
    subtracted.* While a person thinks, the pool may suspend the person's kernel. Then the next cell
    needs one swap: the pool moves a victim's state out, and the person's state in. If the device is
    already copying another state, the cell waits up to one more swap, because a device copies one
    state at a time. The pool must also find a victim. The crowd computes without a pause, so
    each of its kernels keeps its slice for one time slice: at least 10 s, even if its move is
    short. The pool owes the rest of this time slice to the crowd. So the benchmark subtracts this
    rest from the wait. :func:`benchmarks.owed.waits` computes the rest from the journal: the
    seconds until the first time slice of the crowd ends, or until a victim leaves earlier. If a
    kernel of the crowd stays longer, or gets a slice before the person does, this time is not
    subtracted.

    *p99: at most two swaps and a whole time slice more than the longest wait without the crowd.*
    For this budget, nothing is subtracted from the wait.
    """
    many, others = (12, 4) if quick else (50, 10)
    me = [getpass.getuser()]
    # Each person has their own group here, because all kernels belong to one user.
    names = ["flooder", *(f"person{n}" for n in range(others))]
    groups = {name: {"users": me, "order": n} for n, name in enumerate(names)}

    def notebook(name: str, pause: float, number: int) -> Notebook:
        memory = 2 * GiB  # the card has room for seven
        return Notebook(
            pause, number, size=state(2), seconds=0.3,
            memory=memory, limit=memory, group=name,
        )  # fmt: skip

    with place(quick, groups=groups, fair_share_half_life=300.0) as here:
        calm = [notebook(name, 2.0, n) for n, name in enumerate(names[1:])]
        start(calm)
        before = [t for times in observe(calm, here.seconds(60)) for t in times]
        crowd = [notebook("flooder", 0.0, 100 + n) for n in range(many)]
        # Do not wait until all notebooks of the crowd are ready. The crowd gets only an eleventh of
        # the card, so most of its notebooks wait long for their first turn.
        start(crowd, ready=False)
        begun = time.time()
        during = [t for times in observe(calm, here.seconds(160)) for t in times]
        rows = here.client.journal(after=0)
        swap = swap_seconds(rows)
        share = PoolSettings().max_swap_overhead
        waited = waits(rows, "flooder", slice_length(swap, share))
        moves = [
            seconds
            for name, one in zip(names[1:], calm, strict=True)
            for seconds in beyond(
                [turn for turn in list(one.times) if turn[0] >= begun],
                [wait for wait in waited if wait.group == name],
            )
        ]
        cells = sum(len(one.times) for one in crowd)
        lines = [finish([*calm, *crowd], "flood: ")]
    bound = max(before) + SLICE + 2 * swap
    return {
        "notebooks": {"flooder": many, "others": others},
        "waits_before": summary(before),
        "waits_during": summary(during),
        "waits_during_without_the_rest_of_a_time_slice": summary(moves),
        "cells_of_the_flooder": cells,
        "cells_of_the_others": len(during),
        "swap_seconds": swap,
        "budgets": [
            *lines,
            budget("flood: p50 of the others' waits, beyond before and the rest of a slice",
                   percentile(moves, 50) - percentile(before, 50), 2 * swap, "s"),
            budget("flood: p99 of the others' waits, bound: before, a time slice and two swaps",
                   percentile(during, 99), bound, "s"),
        ],
    }  # fmt: skip


CASES: dict[str, Callable[[bool], Case]] = {
    one.__name__: one for one in (services, resident, production, people, flood)
}


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run the cases, and return the figures of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter, with fewer notebooks")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {"emulated": True, "budgets": []}
    for name in options.case or CASES:
        print(f"-- {name}", file=sys.stderr, flush=True)
        result = CASES[name](options.quick)
        lines = result.pop("budgets")
        print(table(lines), file=sys.stderr, flush=True)
        found["budgets"] += lines
        found[name] = {"asked": CASES[name].__doc__, **result}
    return found


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
