# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two jobs that each want nearly all of a GPU's memory and compute half of their time.

A job fills its state on the device. Then it alternates between two phases of the same length: it
waits (as if for data), and it computes on the whole state. At its end it checks the state.
*Serial*: two jobs run one after the other in a plain ipykernel. *Shared*: two jobs run at the same
time in Pooled GPU kernels, and each asks for a share of the device. One job can compute while the
other job waits. This saves time if both states fit on the device, or if the moves are short enough.

A slice of 90 % keeps the other job off the device, even if the slice is almost empty. But a move
copies only the job's state. The size of the state is limited by host memory, which holds both
states during an exchange, and by the time for the benchmark. The result has this size.

Let a phase take ``phase`` seconds, and let an exchange of two states take ``swap`` seconds. The
ratio of the shared time to the serial time is then at least 0.5 + swap / (2 * phase) for jobs of
many rounds, and at least 0.625 + swap / (2 * phase) for jobs of two rounds. So large states need
long phases.

For comparison, nvshare (grgalex/nvshare at 1a8f211, thesis, figure 12.2) ran two jobs of 15 GB on a
GPU of 16 GB. Each job computed half of its time. With turns of 1000 s, the two jobs took 2,043 s at
the same time, and 2,766 s one after the other: a ratio of 0.74. With turns of 5 s, the ratio was
1.26.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import budget
from benchmarks.kernels import Kernel, driver_environment, private_pool
from jupyter_gpupool import cgroups
from jupyter_gpupool.client import Client
from jupyter_gpupool.devices import vendor

GiB, MiB = 1 << 30, 1 << 20

#: The ratio that nvshare reports for its two jobs: the shared time divided by the serial time.
NVSHARE = 0.74

#: Device bytes of a context.
CONTEXT = GiB

#: Bytes of a job's state in the first case. Two such states can be exchanged within one phase.
STATE = 8 * GiB

#: Host memory that stays free.
ROOM = 8 * GiB

SETUP = """
import json, time
from benchmarks.gpu.raw import Raw
def job(size, rounds, passes, batch, waits):
    begun = time.monotonic()
    raw = Raw()
    raw.put("state", size, 7)
    computing, phases = 0.0, []
    for _ in range(rounds):
        time.sleep(waits)
        start = time.monotonic()
        for number in range(passes):
            raw.increase(*raw.arrays["state"], 1)
            if number % batch == batch - 1:
                raw.sync()
        raw.sync()
        phases.append(time.monotonic() - start)
    right = raw.check("state", 7 + rounds * passes)
    raw.free("state")
    print(json.dumps({"begun": begun, "ended": time.monotonic(), "phases": phases,
                      "right": right}))
def calibrate(size):
    raw = Raw()
    raw.put("state", size, 7)
    raw.add("state", 1)
    number, begun = 0, time.monotonic()
    while time.monotonic() - begun < 1:
        for _ in range(4):
            raw.increase(*raw.arrays["state"], 1)
        raw.sync()
        number += 4
    took = time.monotonic() - begun
    raw.free("state")
    print(took / number)
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the seconds of each case and their ratios to the serial time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter phases")
    parser.add_argument(
        "--seconds", type=float, default=195.0, help="begin nothing that ends later"
    )
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    real = vendor.driver_present()
    phase = 5.0 if real and not options.quick else 2.0 if real else 0.5
    rounds = 2
    with ExitStack() as stack:
        pool: dict[str, Any] = {
            # Nobody sits at these jobs. So the pool may take a job's slice as soon as the job waits
            # for data, and give it to the other job.
            "quiet_after": 0.2,
            "reclaim_after": 0.0,
            "max_swap_overhead": 0.0,
            "host_memory": "95%",
            # Sample often: until its first sample of a job, the pool assumes that the job's state
            # is as large as its request.
            "sample_interval": 0.25,
        }
        if not real:
            pool["emulate"] = "1x4GiB,context=64MiB"
        names = stack.enter_context(private_pool(**pool))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        device = client.call("status")["devices"][0]
        card = int(device["memory_capacity"])
        room = max(0, cgroups.available() // 2 - (ROOM if real else GiB))
        largest = min(int(0.9 * card) - (CONTEXT if real else 128 * MiB), room)
        size = min(STATE if real else STATE // 32, largest)
        size -= size % (2 * MiB)
        plain = stack.enter_context(Kernel("python3", driver_environment()))
        plain.run(SETUP)
        each = float(plain.run(f"calibrate({size})"))
        passes = max(1, round(phase / each))
        batch = max(1, round(0.05 / each))
        call = f"job({size}, {rounds}, {passes}, {batch}, {phase})"
        limit = 60 + 8 * rounds * phase
        alone = [json.loads(plain.run(call, limit)) for _ in range(2)]
        serial = alone[1]["ended"] - alone[0]["begun"]
        print(f"serial {serial:.1f} s for 2 x {size / GiB:.2f} GiB", flush=True)
        problems: list[str] = []
        cases: list[dict[str, Any]] = []

        def case(part: float, code: str, held: int, base: float, bound: float) -> None:
            """Run two jobs at the same time; each asks for the fraction ``part`` of the device."""
            try:
                found = both(client, int(part * card), code, bound)
            except Exception as error:
                problems.append(f"{part:.0%}, {held / GiB:.1f} GiB: {error!r}")
                print(problems[-1], flush=True)
                return
            row = {
                "asked_of_the_device": part,
                "asked_bytes": int(part * card),
                "state_bytes": held,
                "state_of_the_device": held / card,
                "serial_seconds": base,
                "ratio_to_serial": found["makespan_seconds"] / base,
                **found,
            }
            cases.append(row)
            print(
                f"each {part:.0%} of the device, holding {held / GiB:.2f} GiB: "
                f"{row['makespan_seconds']:.1f} s, {row['ratio_to_serial']:.2f} of serial",
                flush=True,
            )

        case(0.9, call, size, serial, max(30.0, end - time.monotonic() - 30))
        case(0.4, call, size, serial, max(30.0, end - time.monotonic()))
        large = larger(cases, size, largest, rounds, phase, end) if not options.quick else 0
        if large:
            # A phase must take as long as in the first case. So the job makes fewer passes over the
            # larger state: it processes the same number of bytes in a phase.
            few = max(1, passes * size // large)
            slow = f"job({large}, {rounds}, {few}, {max(1, batch * size // large)}, {phase})"
            # The phases are as long as in the first case. So this case has the same baseline.
            case(0.9, slow, large, serial, max(30.0, end + 25 - time.monotonic()))
    if not cases:
        raise RuntimeError(f"No two jobs have run: {problems}")
    return {
        "what": "makespan of two jobs that share a device by turns, against one after the other",
        "emulated": not real,
        "device_names": names,
        "tier": device["tier"],
        "device_capacity_bytes": card,
        "phase_seconds": phase,
        "rounds": rounds,
        "serial": {"seconds": serial, "state_bytes": size, "jobs": alone},
        "cases": cases,
        "largest_state_bytes": largest,
        "largest_state_was_run": large,
        "options": pool,
        "nvshare_reports": NVSHARE,
        "problems": problems,
        "budgets": [
            budget(
                f"two jobs of {c['asked_of_the_device']:.0%} holding {c['state_bytes'] / GiB:.1f} "
                "GiB, makespan against serial",
                c["ratio_to_serial"],
                NVSHARE,
                "x",
            )
            for c in cases
            if c["asked_of_the_device"] > 0.5
        ],
    }


def larger(
    cases: Sequence[dict[str, Any]], size: int, largest: int, rounds: int, phase: float, end: float
) -> int:
    """Return the bytes of the largest state that two jobs can exchange in the time left.

    Return 0 if this state is not clearly larger than ``size``.
    """
    if not cases or not cases[0]["moves"]:
        return 0
    seconds = cases[0]["moving_seconds"] / cases[0]["moves"]
    # ``left`` is the time for moves: the rest of the benchmark's time, minus the time that the jobs
    # compute and wait. The number of moves is as in the first case.
    left = end - time.monotonic() - 10 - 2 * rounds * 2 * phase
    most = int(size * left / max(seconds * cases[0]["moves"], 0.1))
    found = min(largest, most)
    found -= found % (2 * MiB)
    return found if found > 1.5 * size else 0


def both(client: Client, memory: int, code: str, bound: float) -> dict[str, Any]:
    """Run a job in each of two Pooled GPU kernels with ``memory`` bytes each; return the times."""
    after = journal(client, 0)[1]
    with ExitStack() as stack:
        kernels = [
            stack.enter_context(Kernel("gpupool-python3", attach="lazy", memory=memory))
            for _ in range(2)
        ]
        for kernel in kernels:
            kernel.run(SETUP)
        begun = [kernel.begin(code) for kernel in kernels]
        until = time.monotonic() + bound
        jobs = [
            json.loads(kernel.finish(began, max(1.0, until - time.monotonic())))
            for kernel, began in zip(kernels, begun, strict=True)
        ]
        ids = [kernel.session() for kernel in kernels]
        sessions = [s for s in client.call("status")["sessions"] if s["id"] in ids]
    if not all(job["right"] for job in jobs):
        raise RuntimeError("the state of a job is not what it was: DATA WAS LOST")
    seconds = moving(journal(client, after)[0])
    return {
        "makespan_seconds": max(j["ended"] for j in jobs) - min(j["begun"] for j in jobs),
        "jobs": jobs,
        "suspends": sum(s["suspends"] for s in sessions),
        "resumes": sum(s["resumes"] for s in sessions),
        "moves": len(seconds),
        "moving_seconds": sum(seconds),
        "waited_seconds": [s["wait_seconds_total"] for s in sessions],
    }


def moving(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds of each suspend and resume that moved state."""
    begun: dict[str, float] = {}
    found = []
    for row in rows:
        if row["kind"] != "state":
            continue
        detail, session = row["detail"], row["session"]
        if detail["new"] == "detaching" or (
            detail["new"] == "attaching" and detail["suspended_bytes"]
        ):
            begun[session] = row["time"]
        elif detail["old"] in ("attaching", "detaching") and session in begun:
            found.append(row["time"] - begun.pop(session))
    return found


def journal(client: Client, after: int) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of the broker's journal after row ``after``, and the last row's number."""
    rows: list[dict[str, Any]] = []
    while batch := client.call("journal", after=after, limit=1000)["rows"]:
        rows += batch
        after = batch[-1]["seq"]
    return rows, after


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
