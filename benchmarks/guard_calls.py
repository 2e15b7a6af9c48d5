# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The time that the guard adds to each kind of call, and to the start of a program without CUDA.

A C program in a session alternates between calls through the guard and direct calls of the driver
that the guard has opened. The benchmark also starts ``ls`` many times, alternately with the guard
preloaded and without it. This benchmark does not measure HAMi-core, which works differently: it
replaces ``dlsym``, so it handles every symbol look-up of every library of the process, and each
driver call that it knows passes through a C function.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.guard_allocations import session

SOURCE = Path(__file__).with_suffix(".c")

#: For each kind of call (see ``guard/entries.txt``), the most nanoseconds that the guard may add to
#: a call. The bound is higher for calls that the guard counts (``wait``), and for calls that always
#: pass through a C function of the guard (``wrap``).
BUDGETS_NS = {"free": 2.0, "gate": 2.0, "launch": 2.0, "peek": 2.0, "wait": 10.0, "wrap": 10.0}
#: The most milliseconds that the guard may add to the start of a program without CUDA.
START_BUDGET_MS = 0.5


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the times of calls and of starts of ``ls``, with the guard and without it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (50 if options.quick else 500)
    with tempfile.TemporaryDirectory(prefix="gpb") as name:
        folder = Path(name)
        env, driver = session(folder)
        program = folder / "program"
        subprocess.run(["cc", "-O2", "-o", str(program), str(SOURCE), "-ldl"], check=True)
        done = subprocess.run(
            [program, driver, str(rounds)], env=env, check=True, capture_output=True, text=True
        )
        calls = summarise(done.stdout)
        starts = start(env, 4 * rounds)
    budgets = [
        budget(
            f"guard, {row['call']} (kind {row['kind']})",
            row["added_ns"],
            BUDGETS_NS[row["kind"]],
            "ns",
        )
        for row in calls
    ]
    budgets.append(budget("guard, start of ls", starts["added_ms"], START_BUDGET_MS, "ms"))
    return {
        "emulated": True,
        "rounds": rounds,
        "calls": calls,
        "start_of_ls": starts,
        "budgets": budgets,
    }


def summarise(text: str) -> list[dict[str, Any]]:
    """Return one row for each call, from the program's lines."""
    rounds: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for line in text.splitlines():
        kind, call, guard, bare = line.split()
        rounds[kind, call].append((float(guard), float(bare)))
    rows = []
    for (kind, call), values in rounds.items():
        added = [guard - bare for guard, bare in values]
        with_guard, bare_ns = (median(v[i] for v in values) for i in (0, 1))
        rows.append(
            {
                "kind": kind,
                "call": call,
                "guard_ns": round(with_guard, 2),
                "bare_ns": round(bare_ns, 2),
                "added_ns": round(median(added), 2),
                "added_p90_ns": round(percentile(added, 90), 2),
                "ratio": round(with_guard / bare_ns, 3),
            }
        )
    return rows


def start(env: Mapping[str, str], rounds: int) -> dict[str, Any]:
    """Start ``ls`` alternately with and without the guard; return milliseconds and page faults."""
    bare = {name: text for name, text in env.items() if name != "LD_PRELOAD"}
    seconds: dict[str, list[float]] = {"guard": [], "bare": []}
    faults: dict[str, list[int]] = {"guard": [], "bare": []}
    for turn in range(rounds + 1):
        order = [("guard", env), ("bare", bare)]
        for name, variables in order if turn % 2 else reversed(order):
            begin = time.perf_counter()
            pid = os.posix_spawn("/bin/ls", ["ls", "/nowhere/at/all"], variables, file_actions=[
                (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)
            ])  # fmt: skip
            _, _, usage = os.wait4(pid, 0)
            if turn:  # the first turn is not counted
                seconds[name].append(1000 * (time.perf_counter() - begin))
                faults[name].append(usage.ru_minflt)
    added = [g - b for g, b in zip(seconds["guard"], seconds["bare"], strict=True)]
    return {
        "guard_ms": summary(seconds["guard"]),
        "bare_ms": summary(seconds["bare"]),
        "added_ms": median(added),
        #: The fastest start with the guard minus the fastest start without it. Other work on the
        #: machine disturbs the fastest starts least.
        "added_least_ms": min(seconds["guard"]) - min(seconds["bare"]),
        "ratio": median(seconds["guard"]) / median(seconds["bare"]),
        "page_faults": {name: median(values) for name, values in faults.items()},
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:]), indent=2))
