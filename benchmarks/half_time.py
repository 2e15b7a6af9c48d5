# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two jobs under ``jupyter gpupool run`` that ask for 90 % of a GPU and use it half of the time.

Each job alternates between two turns of the same length: it waits (as if for data), and it
computes. While one job waits, the other job computes. At each change, the pool moves both states.
*Serial* is the time of two jobs one after the other, without the pool. To save time, the benchmark
runs only a quarter of the rounds of one job, and multiplies the time by eight.

A state is a 32nd of its slice, and the device copies 32 times slower than 4 GB/s. So a move takes
as long as a move of the whole slice at 4 GB/s, in both directions. With NVIDIA's driver, others
have measured 4 GB/s for suspends and 7 GB/s for resumes. The pool uses its default options, except
that ``--quick`` changes ``quiet_after``.

With any pool, the ratio to the serial time is at least
0.5 + 1 / (4 x rounds) + swap / (2 x turn).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import budget, table
from benchmarks.kernels import driver_environment, private_pool
from benchmarks.programs import PATIENCE, ROOT, Program, swap_seconds
from jupyter_gpupool.client import Client

GiB = 1 << 30

#: The highest allowed ratio: the time of both jobs at once, divided by the serial time.
RATIO = 0.60

#: A slice is this many times as large as its state.
SCALE = 32

#: The rounds of a job, and the divisor for the baseline, which runs ``ROUNDS // PART`` rounds.
ROUNDS, PART = 8, 4

WORKLOAD = [sys.executable, "-m", "benchmarks.workload"]


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the times and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller device, shorter turns")
    parser.add_argument("--gib", type=float, default=0.0, help="of the device")
    parser.add_argument("--turn", type=float, default=0.0, help="seconds of computing in a row")
    options = parser.parse_args(argv)
    card = options.gib or (0.5 if options.quick else 2.0)
    turn = options.turn or (8.0 if options.quick else 20.0)
    size = int(0.9 * card * GiB)
    settings: dict[str, Any] = {
        "emulate": f"1x{int(card * 1024)}MiB,context=16MiB,bandwidth=125MB/s",
        "default_memory": size,
        "default_limit": size,
        "host_memory": "64GiB",  # enough for whole slices, although the states are small
        "linger": 3600.0,  # the broker outlives the job that runs without the pool
    }
    settings |= {"quiet_after": 0.2} if options.quick else {}
    state = str(size // SCALE // 4096 * 4096)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="gpb", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        names = stack.enter_context(private_pool(**settings))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        alone = json.loads(
            subprocess.run(
                [*WORKLOAD, "job", state, str(ROUNDS // PART), str(turn)],
                cwd=ROOT, env={**os.environ, **driver_environment()}, check=True,
                stdout=subprocess.PIPE, timeout=PATIENCE + ROUNDS * turn,
            ).stdout
        )  # fmt: skip
        role = ["job", state, str(ROUNDS), str(turn)]
        programs = [stack.enter_context(Program(folder, f"job{n}", [], role)) for n in range(2)]
        jobs = [one.result(seconds=PATIENCE + 8 * ROUNDS * turn) for one in programs]
        rows = client.journal(after=0)
    serial = 2 * PART * (alone["ended"] - alone["begun"])
    both = max(job["ended"] for job in jobs) - min(job["begun"] for job in jobs)
    moves = sum(row["kind"] == "suspend" for row in rows)
    swap = swap_seconds(rows)
    return {
        "what": "makespan of two jobs of 90 % of a GPU at half GPU time, against serial",
        "emulated": True,
        "device_names": names,
        "slice_bytes": size,
        "state_bytes": int(state),
        "rounds": ROUNDS,
        "turn_seconds": turn,
        "serial_seconds": serial,
        "both_seconds": both,
        "suspends": moves,
        "moves": [
            [row["time"], row["session"], row["kind"], row["seconds"]]
            for row in rows
            if row["kind"] in ("suspend", "resume")
        ],
        "longest_swap_seconds": swap,
        "least_possible_ratio": 0.5 + 1 / (4 * ROUNDS) + swap / (2 * turn),
        "budgets": [
            budget("wrong bytes", sum(job["wrong"] for job in (alone, *jobs)), 0, "bytes"),
            budget("two jobs of 90 % at half GPU time, against serial", both / serial, RATIO, "x"),
        ],
    }


if __name__ == "__main__":
    outcome = main(sys.argv[1:])
    print(table(outcome["budgets"]), file=sys.stderr)
    json.dump(outcome, sys.stdout, indent=2)
    print()
