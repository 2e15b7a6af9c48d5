# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Round trip of a cell: on an attached session, and CPU-only, against plain ipykernel.

Three kernels run at the same time and take turns in random order, one ``pass`` cell each: plain
ipykernel, the Pooled GPU kernel attached (policy ``cell``), and the Pooled GPU kernel in policy
``manual``, whose cells send no message to the broker. A round trip ends when the client has the
reply and the kernel is idle again. The difference at p50 is the median of the differences within
each round; at p99 it is that of the two p99. What the agent itself does for a cell is measured
too, inside the attached kernel, where no other process disturbs the figure.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.kernels import Kernel, private_pool

#: Milliseconds that a cell may take more than in plain ipykernel.
ATTACHED_P50_MS, ATTACHED_P99_MS, CPU_P50_MS = 0.05, 0.5, 0.05

#: Runs in the kernel: seconds of everything the gate does around one attached cell.
INSIDE = """
import time
from jupyter_gpupool.kernel import _agents
gate = next(iter(_agents.values())).gate
def once(number):
    gate.plan("pass", False, {"cellId": "x"}, "")
    hold = f"benchmark-{number}"
    assert gate.link.take(hold, "cell")
    gate.settle()
    gate.caps.apply(gate.link.slices)
    gate.link.drop(hold)
took = []
for number in range(%d):
    began = time.perf_counter()
    once(number)
    took.append(time.perf_counter() - began)
took.sort()
print(took[len(took) // 2] * 1e6, took[int(len(took) * 0.99)] * 1e6)
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the round trips in milliseconds, differences and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (200 if options.quick else 2000)
    with ExitStack() as stack:
        devices = stack.enter_context(private_pool())
        kernels = {
            "plain": stack.enter_context(Kernel("python3")),
            "attached": stack.enter_context(Kernel("gpupool-python3", attach="cell")),
            "cpu-only": stack.enter_context(Kernel("gpupool-python3", attach="manual")),
        }
        took: dict[str, list[float]] = {name: [] for name in kernels}
        for kernel in kernels.values():
            for _ in range(20):
                kernel.run("pass")  # attaches, and warms everything up
        order, dice = list(kernels), random.Random(0)
        for _ in range(rounds):
            dice.shuffle(order)
            for name in order:
                began = time.perf_counter()
                kernels[name].run("pass")
                took[name].append((time.perf_counter() - began) * 1000)
        inside = [float(n) for n in kernels["attached"].run(INSIDE % 2000).split()]
    plain = took["plain"]
    more = {
        name: {
            # Of the same round: what else the machine did then has disturbed both.
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
        "agent_microseconds": {"p50": inside[0], "p99": inside[1]},
        "budgets": [
            budget("cell, attached, p50", more["attached"]["p50_ms"], ATTACHED_P50_MS, "ms"),
            budget("cell, attached, p99", more["attached"]["p99_ms"], ATTACHED_P99_MS, "ms"),
            budget("cell, CPU-only, p50", more["cpu-only"]["p50_ms"], CPU_P50_MS, "ms"),
        ],
    }
