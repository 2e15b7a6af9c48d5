# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time from an interrupt to the end of a cell that waits for a slice.

Another kernel holds the only GPU. In each round, a user interrupts one cell of each kind:

- *asleep*: a cell in ``time.sleep``, in a kernel with policy ``lazy``. It waits for no slice. This
  is the baseline: the time that Jupyter itself needs for an interrupt.
- *in a call*: a cell of the same kernel that waits in a CUDA call, at the guard's gate.
- *before a cell*: a cell of a kernel with policy ``cell`` that waits for its slice before it runs.

The time is from the interrupt to the end of the cell, as a client sees it. ``ratio`` is the median
of each kind, divided by the median of *asleep*.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.first_call import SETUP, session_of
from benchmarks.kernels import Kernel, private_pool
from jupyter_gpupool.client import Client

#: An interrupt of a wait may take at most this many milliseconds longer than an interrupt of a
#: sleeping cell. People perceive an answer within 0.2 s as immediate.
ADDED_MS = 200.0

MEMORY = 10 << 30

ASLEEP = "import time; print('asleep', flush=True); time.sleep(600)"


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the figures in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 5 if parser.parse_args(argv).quick else 30
    took: dict[str, list[float]] = {"asleep": [], "in a call": [], "before a cell": []}
    with ExitStack() as stack:
        devices = stack.enter_context(private_pool(default_memory=MEMORY, default_limit=MEMORY))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        holder, per_cell, lazy = (
            stack.enter_context(Kernel("gpupool-python3", attach=attach))
            for attach in ("cell", "cell", "lazy")
        )
        lazy.run(SETUP)
        held, first, call = holder.session(), per_cell.session(), lazy.session()
        # session() has run a cell, and a kernel with policy "cell" keeps its slice after a cell.
        client.call("release", session=first)
        wait_until(lambda: session_of(client, first)["state"] == "detached", "it has no slice")
        holding = holder.begin(ASLEEP)
        wait_until(lambda: session_of(client, held)["state"] == "active", "the slice is held")
        for _ in range(rounds):
            cell = lazy.begin(ASLEEP)
            lazy.wait_for_output()
            took["asleep"].append(ended(lazy, cell))
            for kind, kernel, session, code in (
                ("in a call", lazy, call, "once()"),
                ("before a cell", per_cell, first, "pass"),
            ):
                cell = kernel.begin(code)
                wait_until(lambda s=session: session_of(client, s)["state"] == "queued", "it waits")
                took[kind].append(ended(kernel, cell))
                wait_until(
                    lambda s=session: session_of(client, s)["state"] == "detached", "it is over"
                )
        ended(holder, holding)
    plain = percentile(took["asleep"], 50)
    return {
        "what": "milliseconds from an interrupt to the end of the cell",
        "device_names": devices,
        "interrupt": {kind: summary(values) for kind, values in took.items()},
        "ratio": {kind: percentile(values, 50) / plain for kind, values in took.items()},
        "budgets": [
            budget(
                f"interrupt of a wait {kind}, beyond a sleeping cell's, p50",
                percentile(took[kind], 50) - plain,
                ADDED_MS,
                "ms",
            )
            for kind in ("in a call", "before a cell")
        ],
    }


def ended(kernel: Kernel, cell: str) -> float:
    """Interrupt a cell, and return the milliseconds until it has ended with an error."""
    began = time.monotonic()
    kernel.interrupt()
    try:
        kernel.finish(cell)
    except RuntimeError:
        return 1000 * (time.monotonic() - began)
    raise RuntimeError("The interrupted cell ended without an error.")


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 60
    while not true():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Not within 60 s: {what}.")
        time.sleep(0.005)
