# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Policy ``lazy``: from the first CUDA call to the grant, and what a CPU-only cell pays.

*Grant.* One kernel on an idle pool takes a context and one byte of device memory, frees both, and
gives the slice back; then again. Timed inside the kernel, around one CUDA call that reaches the
device: with its slice at hand, and with the gate closed, alternately. The difference is the attach:
the question to the broker, the decision, its journal, the page and the way back. A kernel that has
no device memory when it gives its slice back has nothing to copy, so no copy is in the figure.

*CPU-only cell.* As ``cell_latency``: plain ipykernel and the Pooled GPU kernel take turns, one
``pass`` cell each; the difference at p50 is the median of the differences within each round. The
messages that the second one has sent are counted by the broker.
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

#: Milliseconds that a CPU-only cell may take more than in plain ipykernel, p50.
CPU_P50_MS = 0.05

#: Milliseconds from the first CUDA call to the grant on an idle pool with nothing to copy. Nobody
#: notices less, and a grant happens once after each idle time.
GRANT_P50_MS, GRANT_P99_MS = 10.0, 30.0

SETUP = """
import time
from cuda.bindings import driver
def call(answer):
    assert answer[0] == 0, answer
    return answer[1] if len(answer) > 1 else None
call(driver.cuInit(0))
device = call(driver.cuDeviceGet(0))
def once():
    began = time.perf_counter()
    context = call(driver.cuDevicePrimaryCtxRetain(device))
    took = time.perf_counter() - began
    call(driver.cuDevicePrimaryCtxRelease(device))
    return took * 1000
once()
"""


#: Runs in the kernel: microseconds of everything the gate does around one cell without CUDA.
INSIDE = """
import time
from jupyter_gpupool.kernel import _agents
gate = next(iter(_agents.values())).gate
assert gate.lazy
def once():
    gate.plan("pass", False, {"cellId": "x"}, "")
    gate._before_cell(False)
    gate.calls.end(gate.calls.begin(False))
took = []
for number in range(2000):
    began = time.perf_counter()
    once()
    took.append(time.perf_counter() - began)
took.sort()
print(took[len(took) // 2] * 1e6, took[int(len(took) * 0.99)] * 1e6)
"""


def session_of(client: Client) -> dict[str, Any]:
    return next(s for s in client.call("status")["sessions"] if s["attach"] == "lazy")


def detach(client: Client) -> None:
    """Have the slice given back, and wait until it is."""
    session = session_of(client)
    client.call("release", session=session["id"])
    deadline = time.monotonic() + 30
    while session_of(client)["state"] != "detached":
        if time.monotonic() > deadline:
            raise RuntimeError(f"not detached: {session_of(client)}")
        time.sleep(0.005)


def grants(kernel: Kernel, client: Client, rounds: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of the first call: without a slice, and with one."""
    kernel.run(SETUP)
    waited, attached = [], []
    for _ in range(rounds):
        detach(client)
        first, second = kernel.run("print(once(), once())").split()
        waited.append(float(first))
        attached.append(float(second))
    return waited, attached


def cells(kernels: dict[str, Kernel], rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round trip, by kernel, round by round."""
    took: dict[str, list[float]] = {name: [] for name in kernels}
    for kernel in kernels.values():
        for _ in range(20):
            kernel.run("pass")
    order, dice = list(kernels), random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            began = time.perf_counter()
            kernels[name].run("pass")
            took[name].append((time.perf_counter() - began) * 1000)
    return took


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the figures in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(argv)
    with ExitStack() as stack:
        devices = stack.enter_context(private_pool())
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        kernels = {
            "plain": stack.enter_context(Kernel("python3")),
            "lazy": stack.enter_context(Kernel("gpupool-python3", attach="lazy")),
        }
        before = session_of(client)["messages"]
        took = cells(kernels, 200 if options.quick else 2000)
        inside = [float(n) for n in kernels["lazy"].run(INSIDE).split()]
        sent = session_of(client)["messages"] - before
        waited, attached = grants(kernels["lazy"], client, 10 if options.quick else 100)
    more = median(a - b for a, b in zip(took["lazy"], took["plain"], strict=True))
    grant = [max(0.0, a - b) for a, b in zip(waited, attached, strict=True)]
    return {
        "what": "milliseconds: first CUDA call to grant; a cell without CUDA",
        "device_names": devices,
        "first_call": {"without a slice": summary(waited), "with a slice": summary(attached)},
        "grant": summary(grant),
        "cells": {name: summary(values) for name, values in took.items()},
        "cell_difference_p50": more,
        "agent_microseconds": {"p50": inside[0], "p99": inside[1]},
        "messages_sent_by_cells": sent,
        "budgets": [
            *(
                budget(
                    f"first CUDA call to grant, idle pool, p{part}",
                    percentile(grant, part),
                    allowed,
                    "ms",
                )
                for part, allowed in ((50, GRANT_P50_MS), (99, GRANT_P99_MS))
            ),
            budget("cell without CUDA, lazy, p50", more, CPU_P50_MS, "ms"),
            budget("messages of cells without CUDA", float(sent), 0.0, "messages"),
        ],
    }
