# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time from the first CUDA call to the grant, on an idle pool with nothing to copy.

The kernel makes the same CUDA call twice. The call makes a context, which the kernel then destroys.
At the first call the kernel has no slice, so the call waits for a grant. At the second call the
kernel has a slice. The difference between the two times is the cost of the grant: the request to
the broker, the broker's decision, the journal, the page and the answer. There are two cases:

- *new kernel*: each round starts a kernel and times its first two calls. Neither time contains the
  driver's start (``cuInit``).
- *again*: each round takes the slice away from one kernel, which has no state on the device, and
  then times two calls of this kernel.

``legs`` are the parts of a grant in the case *again*: the milliseconds from each change of the
session's state to the next change, from the broker's journal.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

from benchmarks.common import budget, percentile, summary
from benchmarks.kernels import Kernel, private_pool
from jupyter_gpupool.client import Client

#: The longest allowed grants in milliseconds. Users do not notice such a short wait. A kernel waits
#: for a grant only at its first CUDA call, and at its first CUDA call after it has lost its slice.
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
"""

BOTH = "print(once(), once())"


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return the figures in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args(argv)
    kernels, rounds = (5, 10) if options.quick else (30, 200)
    with ExitStack() as stack:
        devices = stack.enter_context(private_pool())
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        new = [first_of_a_kernel() for _ in range(kernels)]
        with Kernel("gpupool-python3", attach="lazy") as kernel:
            kernel.run(SETUP)
            kernel.run(BOTH)
            session = kernel.session()
            again, legs = [], []
            for _ in range(rounds):
                since = detach(client, session)
                again.append(timed(kernel))
                legs.append(between_rows(client, session, since))
    grants = {
        case: [max(0.0, first - second) for first, second in pairs]
        for case, pairs in (("new kernel", new), ("again", again))
    }
    return {
        "what": "milliseconds from the first CUDA call to the grant",
        "device_names": devices,
        "calls": {
            f"{case}, {which}": summary([pair[at] for pair in pairs])
            for case, pairs in (("new kernel", new), ("again", again))
            for at, which in enumerate(("without a slice", "with a slice"))
        },
        "grant": {case: summary(values) for case, values in grants.items()},
        "legs": {name: summary([leg[name] for leg in legs if name in leg]) for name in legs[0]},
        "budgets": [
            budget(
                f"first CUDA call to grant, {case}, p{part}",
                percentile(values, part),
                allowed,
                "ms",
            )
            for case, values in grants.items()
            for part, allowed in ((50, GRANT_P50_MS), (99, GRANT_P99_MS))
        ],
    }


def timed(kernel: Kernel) -> tuple[float, float]:
    first, second = kernel.run(BOTH).split()
    return float(first), float(second)


def first_of_a_kernel() -> tuple[float, float]:
    """Return the milliseconds of the first two calls of a new kernel."""
    with Kernel("gpupool-python3", attach="lazy") as kernel:
        kernel.run(SETUP)
        return timed(kernel)


def session_of(client: Client, session: str) -> dict[str, Any]:
    return next(s for s in client.call("status")["sessions"] if s["id"] == session)


def detach(client: Client, session: str) -> int:
    """Take the slice back and wait until the session is detached; return the last journal row."""
    client.call("release", session=session)
    deadline = time.monotonic() + 30
    while session_of(client, session)["state"] != "detached":
        if time.monotonic() > deadline:
            raise RuntimeError(f"not detached: {session_of(client, session)}")
        time.sleep(0.005)
    return int(client.call("journal", limit=0)["seq"])


def between_rows(client: Client, session: str, since: int) -> dict[str, float]:
    """Return the milliseconds between successive changes of state after journal row ``since``."""
    rows = client.journal(after=since)
    changes = [row for row in rows if row["kind"] == "state" and row["session"] == session]
    return {
        f"{before['detail']['new']} to {after['detail']['new']}": 1000
        * (after["time"] - before["time"])
        for before, after in pairwise(changes)
    }
