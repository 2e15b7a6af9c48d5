# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time from sending a cell to the end of the first GPU kernel that the cell launches.

Each kernel is in one of these states when it gets the cell:

====================  ============================================================================
``plain``             plain ipykernel with a context
``attached``          Pooled GPU kernel that used CUDA a moment ago
``idle``              Pooled GPU kernel that counts as idle and still has its slice
``new_context_plain`` plain ipykernel without a context, so the cell makes one
``released``          Pooled GPU kernel without a slice and without state; the cell makes a context
``suspended_1GiB``    Pooled GPU kernel with 1 GiB of state in host memory; the cell waits until the
                      state is back on the device
``suspended_8GiB``    like ``suspended_1GiB``, with 8 GiB of state
====================  ============================================================================

The baseline of ``released`` is ``new_context_plain``. The baseline of all other pooled states is
``plain``. The cell reads the clock as soon as the GPU kernel has ended. All
processes of the machine share this clock. Each round measures the states in a random order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from benchmarks.common import summary
from benchmarks.kernels import Kernel, driver_environment, private_pool
from jupyter_gpupool.client import Client
from jupyter_gpupool.devices import vendor

GiB = 1 << 30

#: On an emulated device, one byte stands for this many bytes on a real device.
SCALE = 16

#: In this benchmark, a kernel counts as idle after this many seconds without CUDA. No reported time
#: contains these seconds.
QUIET = 0.3

#: The longest wait in seconds for a session's state, for example for a suspend of 8 GiB.
PATIENCE = 40.0

#: For each state: the state that is the baseline, and the percentage of rounds that measure it.
STATES = {
    "plain": ("plain", 100),
    "attached": ("plain", 100),
    "idle": ("plain", 100),
    "new_context_plain": ("new_context_plain", 100),
    "released": ("new_context_plain", 100),
    "suspended_1GiB": ("plain", 100),
    "suspended_8GiB": ("plain", 25),
}

#: By kernel with state: its bytes on the device.
SIZES = {"suspended_1GiB": GiB, "suspended_8GiB": 8 * GiB}

SETUP = """
import time
from benchmarks.gpu.raw import Raw
raw = Raw()
size = %d
raw.put("state", size, 7)
at, done = raw.arrays["state"][0], 0
def first():
    global done
    raw.increase(at, size, 1)
    raw.sync()
    done += 1
    return time.monotonic()
first()
print("ready")
"""

#: The first cell of a kernel that destroys its context at the end of each cell.
SETUP_NEW = """
import time
from benchmarks.gpu.raw import Raw
raw = Raw()
raw.close()
def first():
    raw.open()
    raw.put("state", 4096, 7)
    raw.add("state", 1)
    return time.monotonic()
print("ready")
"""

CELL = "print(first())"
CELL_NEW = "ended = first(); raw.close(); print(ended)"


class Session:
    """A kernel and, if it belongs to the pool, its session."""

    def __init__(self, kernel: Kernel, client: Client | None, *, new: bool, size: int) -> None:
        self.kernel, self._client = kernel, client
        self._cell = CELL_NEW if new else CELL
        kernel.run(SETUP_NEW if new else SETUP % size)
        self._id = kernel.session() if client is not None else ""

    def state(self) -> dict[str, Any]:
        assert self._client is not None
        sessions = self._client.call("status")["sessions"]
        return next(dict(s) for s in sessions if s["id"] == self._id)

    def until(self, *states: str) -> dict[str, Any]:
        """Wait until the session is in one of these states; return it."""
        deadline = time.monotonic() + PATIENCE
        while (found := self.state())["state"] not in states:
            if time.monotonic() > deadline:
                raise RuntimeError(f"not {' or '.join(states)}: {found}")
            time.sleep(0.01)
        return found

    def release(self) -> dict[str, Any]:
        """Release the slice and wait until it is free; return the session."""
        assert self._client is not None
        self._client.call("release", session=self._id)
        return self.until("detached")

    def cell(self) -> float:
        """Run the cell; return the milliseconds to the end of its first GPU kernel."""
        begun = time.monotonic()
        return (float(self.kernel.run(self._cell, PATIENCE)) - begun) * 1000

    def right(self) -> bool:
        """Return whether the array on the device is right after all cells so far."""
        return self.kernel.run("print(raw.check('state', 7 + done))").strip() == "True"


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return milliseconds by state, and their ratios to plain ipykernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=110.0, help="begin no round later")
    options = parser.parse_args(argv)
    rounds = options.rounds or (5 if options.quick else 20)
    end = time.monotonic() + options.seconds
    real = vendor.driver_present()
    sizes = {name: size if real else size // SCALE for name, size in SIZES.items()}
    with ExitStack() as stack:
        names = stack.enter_context(
            private_pool(quiet_after=QUIET, default_memory=2 * GiB, default_limit=2 * GiB,
                         max_swap_overhead=0.0, host_memory="80%")
        )  # fmt: skip
        client = stack.enter_context(Client(os.environ["GPUPOOL_SOCKET"]))
        outside = driver_environment()

        def session(state: str) -> Session:
            new = state in ("new_context_plain", "released")
            size = sizes.get(state, 4096)
            if state.endswith("plain"):
                kernel = stack.enter_context(Kernel("python3", outside))
                return Session(kernel, None, new=new, size=size)
            # The slice also needs room for the context.
            memory = max(2 * GiB, size + 2 * GiB)
            kernel = stack.enter_context(Kernel("gpupool-python3", attach="lazy", memory=memory))
            return Session(kernel, client, new=new, size=size)

        tier = client.call("status")["devices"][0]["tier"]
        problems: list[str] = []
        sessions: dict[str, Session] = {}
        for name in STATES:
            with noted(problems, name):
                sessions[name] = session(name)
        took, swaps = turns(sessions, rounds, end, problems)
        right = {}
        for name in SIZES:
            with noted(problems, f"the state of {name}"):
                right[name] = sessions[name].right()
                if not right[name]:
                    raise RuntimeError("it is not what it was: DATA WAS LOST")
    if not all(took.get(name) for name in ("plain", "attached")):
        raise RuntimeError(f"Not even the baseline could be measured: {problems}")
    base = {name: took.get(STATES[name][0], []) for name in took}
    return {
        "what": "milliseconds from sending a cell to the end of its first kernel, by state",
        "emulated": not real,
        "device_names": names,
        "tier": tier,
        "rounds": len(took["plain"]),
        "state_bytes": sizes,
        "first_kernel_ms": {name: summary(values) for name, values in took.items() if values},
        "baseline": {name: STATES[name][0] for name in took},
        "ratio_p50": {n: median(v) / median(base[n]) for n, v in took.items() if v and base[n]},
        "difference_p50_ms": {
            n: median(v) - median(base[n]) for n, v in took.items() if v and base[n]
        },
        "suspended_bytes": swaps,
        "state_right": right,
        "problems": problems,
        "budgets": [],
    }


def turns(
    sessions: dict[str, Session], rounds: int, end: float, problems: list[str]
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Return by state: the milliseconds of each cell, and the suspended bytes before a cell."""
    took: dict[str, list[float]] = {name: [] for name in sessions}
    swaps: dict[str, int] = {}
    dice = random.Random(0)
    for number in range(rounds):
        if time.monotonic() > end:
            break
        order = [n for n in sessions if number * STATES[n][1] % 100 < STATES[n][1]]
        dice.shuffle(order)
        for name in order:
            ended = False
            with noted(problems, f"round {number}, {name}"):
                prepare(name, sessions[name], swaps)
                took[name].append(sessions[name].cell())
                ended = True
            if not ended:
                # The session's state is now unknown, so measure only the other sessions.
                del sessions[name]
        told = ", ".join(f"{name} {took[name][-1]:.1f} ms" for name in order if took[name])
        print(f"round {number}: {told}", flush=True)
    return took, swaps


def prepare(name: str, session: Session, swaps: dict[str, int]) -> None:
    """Bring a session into the named state."""
    if name == "released" or name.startswith("suspended"):
        swaps[name] = session.release()["suspended_bytes"]
    elif name != "new_context_plain":
        session.cell()
        if name == "idle":
            session.until("idle")


@contextmanager
def noted(problems: list[str], what: str) -> Iterator[None]:
    """Catch an error of the block and add it to ``problems``, so that the benchmark continues."""
    try:
        yield
    except Exception as error:
        problems.append(f"{what}: {type(error).__name__}: {error}"[:600])
        print(problems[-1], flush=True)


if __name__ == "__main__":
    json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    print()
