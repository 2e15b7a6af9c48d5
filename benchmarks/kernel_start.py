# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Start of a kernel, from the request to its first answer, against plain ipykernel.

Starts of both kinds take turns, with a running broker.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.kernels import Kernel, private_pool

#: A start may take at most this many milliseconds longer than a start of plain ipykernel.
BUDGET_MS = 20.0


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return starts in milliseconds, their difference and ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    options = parser.parse_args(argv)
    rounds = options.rounds or (10 if options.quick else 60)
    took: dict[str, list[float]] = {"python3": [], "gpupool-python3": []}
    with private_pool() as devices:
        order, dice = list(took), random.Random(0)
        for number in range(rounds + 1):
            dice.shuffle(order)
            for name in order:
                began = time.perf_counter()
                with Kernel(name):
                    seconds = time.perf_counter() - began
                if number:  # omit the first start of each kind: it warms the file cache
                    took[name].append(seconds * 1000)
    plain, pooled = took["python3"], took["gpupool-python3"]
    more = percentile(pooled, 50) - percentile(plain, 50)
    return {
        "what": "milliseconds from the request to the kernel's first answer",
        "rounds": rounds,
        "device_names": devices,
        "kernels": {"plain": summary(plain), "pooled": summary(pooled)},
        "difference_p50_ms": more,
        "ratio_p50": percentile(pooled, 50) / percentile(plain, 50),
        "budgets": [budget("kernel start, p50", more, BUDGET_MS, "ms")],
    }
