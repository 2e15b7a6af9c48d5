# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume of a Pooled GPU kernel, whose guard prepares host memory for the copy.

The seconds are the time of the driver's calls, from the broker's journal. The baseline, in the same
run, is a plain process: it has a state of the same size and no guard, and the same driver calls
suspend and resume it. The kernel and the plain process keep their states during the whole
measurement. They are suspended and resumed in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.kernels import Kernel, driver_environment, private_pool
from jupyter_gpupool import cgroups
from jupyter_gpupool.client import Client
from tests.gpu.machine import GiB, Machine, machine

from . import swap_speed
from .cell_to_kernel import Session
from .child import remote

#: Bytes of state, and how often each process is suspended.
PLAN = tuple((gib * GiB, 3) for gib in (1, 4, 8, 16))
QUICK = ((GiB, 2), (4 * GiB, 2))

#: Host memory that stays free beside both copies.
ROOM = 8 * GiB


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the driver's seconds by size, with the guard and without, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    parser.add_argument("--seconds", type=float, default=90.0, help="begin no size later")
    options = parser.parse_args(argv)
    end = time.monotonic() + options.seconds
    with ExitStack() as stack:
        names = stack.enter_context(
            private_pool(quiet_after=0.3, default_memory=2 * GiB, default_limit=2 * GiB,
                         max_swap_overhead=0.0, host_memory="80%")
        )  # fmt: skip
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        # If the devices are emulated, the broker has made an emulated machine of its own. The plain
        # process must use that machine.
        here = stack.enter_context(machine())
        if not here.real:
            here = Machine({**os.environ, **driver_environment()}, here.emulate)
        tier = client.call("status")["devices"][0]["tier"]
        if tier != "guarded":
            raise RuntimeError(f"The tier is {tier}: there is no guard to measure.")
        rows, left_out = asyncio.run(measure(here, client, QUICK if options.quick else PLAN, end))
    return {
        "what": "the driver's seconds of suspend and resume, with the guard and without",
        "emulated": not here.real,
        "device_names": names,
        "tier": tier,
        "sizes": rows,
        "left_out": left_out,
        "problems": [
            f"{row['bytes']} bytes: DATA WAS LOST" for row in rows if not row["state_right"]
        ],
        "budgets": [],
    }


async def measure(
    here: Machine, client: Client, plan: Sequence[tuple[int, int]], end: float
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure each size; return a row for each, and the sizes that were left out."""
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    async with swap_speed.service_of(here) as (service, device):
        for nominal, repetitions in plan:
            size = swap_speed.scaled(here, nominal)
            need = 2 * size * swap_speed.FACTOR + (ROOM if here.real else GiB)
            # On an H200, a suspend and a resume together took one second for each 1.8 GB.
            probably = 8 + repetitions * 2 * size / 1.5e9
            if cgroups.available() < need or time.monotonic() + probably > end:
                left_out.append({"bytes": size, "reason": "too little host memory or time"})
                continue
            rows.append(await one_size(here, service, device.uuid, client, size, repetitions))
            print(told(rows[-1]), flush=True)
    return rows, left_out


async def one_size(
    here: Machine, service: Any, uuid: str, client: Client, size: int, repetitions: int
) -> dict[str, Any]:
    """Return the seconds for one size."""
    env = {**here.env, "CUDA_VISIBLE_DEVICES": uuid}
    plain: list[dict[str, Any]] = []
    async with remote("benchmarks.gpu.raw:Raw", env) as process:
        await process.do("put", "state", size, 7)
        with Kernel("gpupool-python3", attach="lazy", memory=size + 2 * GiB) as kernel:
            session = Session(kernel, client, new=False, size=size)
            seq = client.call("journal", limit=0)["seq"]
            whole: list[float] = []
            for _ in range(repetitions):
                plain.append(await swap_speed.swap(service, uuid, process))
                begun = time.monotonic()
                session.release()
                whole.append(time.monotonic() - begun)
                session.cell()
            right = session.right() and await process.do("check", "state", 7)
            events = client.journal(after=seq, session=kernel.session())
    guarded = {
        "suspend": [row["seconds"] for row in events if row["kind"] == "suspend"],
        "resume": [row["detail"]["driver_seconds"] for row in events if row["kind"] == "resume"],
    }
    row: dict[str, Any] = {
        "bytes": size,
        "repetitions": repetitions,
        "state_right": bool(right),
        "guarded_release_to_detached_seconds": whole,
    }
    for way, seconds in guarded.items():
        without = [r[f"{way}_driver_seconds"] for r in plain]
        if len(seconds) < repetitions:
            raise RuntimeError(f"{way}: the journal has {len(seconds)} rows: {events}"[:2000])
        row |= {
            f"{way}_guarded_seconds": seconds,
            f"{way}_plain_seconds": without,
            f"{way}_ratio_p50": median(seconds) / median(without) if median(without) else None,
        }
    return row


def told(row: dict[str, Any]) -> str:
    """Return a row as a line of text."""
    return f"{row['bytes'] / GiB:g} GiB: " + ", ".join(
        f"{way} {median(row[f'{way}_guarded_seconds']):.3f} s with the guard, "
        f"{median(row[f'{way}_plain_seconds']):.3f} s without"
        for way in ("suspend", "resume")
    )


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
