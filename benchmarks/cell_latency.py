# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Round trip of a cell in the Pooled GPU kernel, against plain ipykernel.

Five kernels run at the same time and take turns in random order, one ``pass`` cell each:

- *plain* and *plain again*: two plain ipykernels. The difference between them is noise. It shows
  how exact the other differences are.
- *attached*: a kernel with policy ``lazy`` (the default), a slice, a context and device memory.
- *without CUDA*: a kernel with policy ``lazy`` that makes no CUDA call. The result has the number
  of messages that this kernel sends to the broker.
- *per cell*: a kernel with a slice and policy ``cell``. It takes a hold for each cell.

A round trip ends when the client has the reply and the kernel is idle again. For p50, the benchmark
subtracts the time of *plain* from the kernel's time in each round, and takes the median of these
differences. For p99, it subtracts the p99 of *plain* from the p99 of the kernel. The agent's own
work for a cell is measured inside the kernel, where no other process disturbs it.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.kernels import Kernel, private_pool
from jupyter_gpupool.client import Client

#: The most milliseconds that a cell may take longer than a cell of *plain*: for *attached* at p50
#: and at p99, and for *without CUDA* at p50.
ATTACHED_P50_MS, ATTACHED_P99_MS, CPU_P50_MS = 0.05, 0.5, 0.05

#: The code of a cell: it makes a context and allocates 1 MiB of device memory, and keeps both.
ATTACH = """
from cuda.bindings import driver
def call(answer):
    assert answer[0] == 0, answer
    return answer[1] if len(answer) > 1 else None
call(driver.cuInit(0))
call(driver.cuCtxSetCurrent(call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))))
kept = call(driver.cuMemAlloc(1 << 20))
"""

#: The code of a cell: it prints the microseconds (p50 and p99) that the agent adds to one cell.
INSIDE = """
import time
from jupyter_gpupool.kernel import _agents
gate = next(iter(_agents.values())).gate
def once():
{body}
took = []
for number in range(2000):
    began = time.perf_counter()
    once()
    took.append(time.perf_counter() - began)
took.sort()
print(took[len(took) // 2] * 1e6, took[int(len(took) * 0.99)] * 1e6)
"""
LAZY = INSIDE.format(
    body="""
    gate.plan("pass", False, {"cellId": "x"}, "")
    gate._before_cell(False)
    gate.calls.end(gate.calls.begin(False))
"""
)
PER_CELL = INSIDE.format(
    body="""
    gate.plan("pass", False, {"cellId": "x"}, "")
    assert gate.link.take("benchmark", "cell")
    gate.settle()
    gate.caps.apply(gate.link.slices)
    gate.link.drop("benchmark")
"""
)


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the round trips in milliseconds, differences and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (200 if options.quick else 2000)
    with ExitStack() as stack:
        devices = stack.enter_context(private_pool(default_memory=1 << 30))
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))

        def kernel(name: str = "python3", **provisioner: Any) -> Kernel:
            return stack.enter_context(Kernel(name, **provisioner))

        pooled = "gpupool-python3"
        kernels = {
            "plain": kernel(),
            "plain again": kernel(),
            "attached": kernel(pooled, attach="lazy"),
            "without CUDA": kernel(pooled, attach="lazy"),
            "per cell": kernel(pooled, attach="cell"),
        }
        kernels["attached"].run(ATTACH)
        for one in kernels.values():
            for _ in range(20):
                one.run("pass")  # not measured: the first cells are slower
        names = {name: kernels[name].session() for name in ("attached", "without CUDA")}
        before = sessions(client)
        took = round_trips(kernels, rounds)
        after = sessions(client)
        sent = {name: after[s]["messages"] - before[s]["messages"] for name, s in names.items()}
        state = after[names["attached"]]["state"]
        if state not in ("active", "idle"):
            raise RuntimeError(f"The attached kernel has lost its slice: it is {state}.")
        inside = {
            name: [float(n) for n in kernels[name].run(code).split()]
            for name, code in (("without CUDA", LAZY), ("per cell", PER_CELL))
        }
    plain = took["plain"]
    more = {
        name: {
            # Subtract within each round: other work on the machine slows all cells of a round.
            "p50_ms": median(mine - base for mine, base in zip(values, plain, strict=True)),
            "p99_ms": percentile(values, 99) - percentile(plain, 99),
        }
        for name, values in took.items()
        if name != "plain"
    }
    return {
        "what": "milliseconds from sending a cell to its reply and idle",
        "rounds": rounds,
        "device_names": devices,
        "kernels": {name: summary(values) for name, values in took.items()},
        "difference": more,
        "ratio_p50": {name: percentile(took[name], 50) / percentile(plain, 50) for name in more},
        "agent_microseconds": {name: {"p50": n[0], "p99": n[1]} for name, n in inside.items()},
        "messages_sent_by_cells": sent,
        "budgets": [
            budget("cell, attached, p50", more["attached"]["p50_ms"], ATTACHED_P50_MS, "ms"),
            budget("cell, attached, p99", more["attached"]["p99_ms"], ATTACHED_P99_MS, "ms"),
            budget("cell, without CUDA, p50", more["without CUDA"]["p50_ms"], CPU_P50_MS, "ms"),
            budget("messages of cells without CUDA", sent["without CUDA"], 0.0, "messages"),
        ],
    }


def sessions(client: Client) -> dict[str, dict[str, Any]]:
    return {s["id"]: s for s in client.call("status")["sessions"]}


def round_trips(kernels: dict[str, Kernel], rounds: int) -> dict[str, list[float]]:
    """Return, for each kernel, the milliseconds of its round trip in each round."""
    took: dict[str, list[float]] = {name: [] for name in kernels}
    order, dice = list(kernels), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            began = time.perf_counter()
            kernels[name].run("pass")
            took[name].append((time.perf_counter() - began) * 1000)
    return took
