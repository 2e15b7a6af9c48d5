# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard's cost in a kernel that computes: the same loops with the guard and without it.

Three kernels run the same loops, one kernel at a time, in a random order for each round. Two are
plain ipykernels, and one is a Pooled GPU kernel under the guard. In each round, the benchmark
compares the guarded kernel with the mean of the two plain kernels. The overhead is the median of
these differences in per cent. The noise is the median difference between the two plain kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

from benchmarks.common import budget, summary
from benchmarks.kernels import Kernel, driver_environment, private_pool
from jupyter_gpupool.client import Client
from jupyter_gpupool.devices import vendor

GiB = 1 << 30

#: The most per cent that the guard may add to a loop of launches, multiplications or graphs.
BUDGET = 1.0
BUDGETED = ("launch", "torch_launch", "torch_matmul", "graph", "torch_graph")

#: For each loop: the number of its turns in a round, and what one turn does.
LOOPS = {
    "launch": (30000, "a launch by cuda-core of a kernel that does nearly nothing"),
    "graph": (3000, "a launch of a graph of 20 such kernels (driver API)"),
    "allocation": (300, "cuMemAlloc and cuMemFree of 2 MiB"),
    "torch_launch": (30000, "an addition to a tensor of one element"),
    "torch_matmul": (600, "a multiplication of 4096 x 4096 matrices in bfloat16"),
    "torch_graph": (3000, "a replay of a CUDA graph of 20 additions"),
    "torch_allocation": (30000, "torch.empty of 1 MiB from its caching allocator, and the release"),
}

SETUP = """
import json, time
import numpy as np
from cuda.core import Device, LaunchConfig, ObjectCode, launch
from cuda.bindings import driver
from emucuda.kernels import PTX
def call(answer):
    assert answer[0] == 0, answer[0]
    return answer[1] if len(answer) == 2 else answer[1:]
device = Device(); device.set_current()
stream = device.create_stream()
kernel = ObjectCode.from_ptx(PTX.encode()).get_kernel("emucuda_add_u32")
one = LaunchConfig(grid=1, block=32)
word = device.allocate(4096, stream=stream)
arguments = (word, np.uint64(1), np.uint32(1))
handle = driver.CUstream(int(stream.handle))
mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
launch(stream, one, kernel, *arguments)  # loads the kernel, which must not be in a capture
stream.sync()
call(driver.cuStreamBeginCapture(handle, mode))
for _ in range(20):
    launch(stream, one, kernel, *arguments)
graph = call(driver.cuGraphInstantiate(call(driver.cuStreamEndCapture(handle)), 0))
def loop_launch(number):
    for _ in range(number):
        launch(stream, one, kernel, *arguments)
    stream.sync()
def loop_graph(number):
    for _ in range(number):
        driver.cuGraphLaunch(graph, handle)
    stream.sync()
def loop_allocation(number):
    for _ in range(number):
        driver.cuMemFree(driver.cuMemAlloc(2 << 20)[1])
def took(name, number):
    loop = globals()["loop_" + name]
    loop(max(1, number // 100))
    begun = time.perf_counter()
    loop(number)
    return (time.perf_counter() - begun) / number * 1e9
def all_of(loops):
    print(json.dumps({name: took(name, number) for name, number in loops.items()}))
print(json.dumps(["launch", "graph", "allocation"]))
"""

#: The cell with the loops that use PyTorch. It runs only with a real driver, because the emulated
#: driver does not compute PyTorch's own GPU kernels.
TORCH = """
import torch
cell = torch.zeros(1, device="cuda")
left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
right, product = left.clone(), torch.empty_like(left)
side = torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        cell.add_(1)
torch.cuda.synchronize()
replay = torch.cuda.CUDAGraph()
with torch.cuda.graph(replay):
    for _ in range(20):
        cell.add_(1)
def loop_torch_launch(number):
    for _ in range(number):
        cell.add_(1)
    torch.cuda.synchronize()
def loop_torch_matmul(number):
    for _ in range(number):
        torch.matmul(left, right, out=product)
    torch.cuda.synchronize()
def loop_torch_graph(number):
    for _ in range(number):
        replay.replay()
    torch.cuda.synchronize()
def loop_torch_allocation(number):
    for _ in range(number):
        torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
print(json.dumps(["torch_launch", "torch_matmul", "torch_graph", "torch_allocation"]))
"""

#: A cell for the guarded kernel. It prints whether the guard is loaded and has a page.
GUARDED = """
import os
print("gpupool" in open("/proc/self/maps").read() and "GPUPOOL_PAGE" in os.environ)
"""


def main(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run, and return nanoseconds per turn of each loop, with the guard and without."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=130.0, help="begin no round later")
    options = parser.parse_args(argv)
    rounds = options.rounds or (4 if options.quick else 25)
    end = time.monotonic() + options.seconds
    real = vendor.driver_present()
    with ExitStack() as stack:
        names = stack.enter_context(private_pool(default_memory=8 * GiB, default_limit=8 * GiB))
        outside = driver_environment()
        kernels = {
            "plain": stack.enter_context(Kernel("python3", outside)),
            "plain again": stack.enter_context(Kernel("python3", outside)),
            "guarded": stack.enter_context(Kernel("gpupool-python3", attach="lazy")),
        }
        problems: list[str] = []
        ready = prepare(kernels, SETUP)
        if real:
            try:
                ready += prepare(kernels, TORCH)
            except (RuntimeError, queue.Empty) as error:
                # Continue with the loops that do not need PyTorch.
                problems.append(f"PyTorch: {type(error).__name__}: {error}")
        if kernels["guarded"].run(GUARDED).strip() != "True":
            raise RuntimeError("The kernel of the pool is not under the guard.")
        loops = {n: LOOPS[n][0] if real else LOOPS[n][0] // 10 for n in LOOPS if n in ready}
        print(f"loops: {', '.join(loops)}", flush=True)
        took = compare(kernels, loops, rounds, end, problems)
        suspends = session_of(kernels["guarded"])["suspends"]
    rows = {name: judged(values) | {"what": LOOPS[name][1]} for name, values in took.items()}
    for name, row in rows.items():
        print(f"{name}: {row['overhead_percent']:+.2f} % (A/A {row['noise_percent']:+.2f} %)")
    return {
        "what": "nanoseconds per turn of a loop, in a kernel under the guard and in plain ones",
        "emulated": not real,
        "device_names": names,
        "rounds": len(next(iter(took.values()))["plain"]),
        "loops": rows,
        "left_out": sorted(set(LOOPS) - set(loops)),
        "problems": problems,
        # If the pool has suspended the kernel, some of its times may contain a suspend.
        "suspends_meanwhile": suspends,
        "budgets": [
            budget(f"guard, loop {name}", rows[name]["overhead_percent"], BUDGET, "%")
            for name in BUDGETED
            if name in rows
        ],
    }


def prepare(kernels: Mapping[str, Kernel], code: str) -> list[str]:
    """Run a cell that defines loops in all kernels; return the names of the loops.

    The kernels run the cell at the same time, because the import of PyTorch is slow.
    """
    begun = {name: kernel.begin(code) for name, kernel in kernels.items()}
    texts = {name: kernels[name].finish(begin) for name, begin in begun.items()}
    return list(json.loads(texts["guarded"].splitlines()[-1]))


def compare(
    kernels: Mapping[str, Kernel],
    loops: Mapping[str, int],
    rounds: int,
    end: float,
    problems: list[str],
) -> dict[str, dict[str, list[float]]]:
    """Return, for each loop and kernel, the nanoseconds in each round but the first."""
    took: dict[str, dict[str, list[float]]] = {n: {k: [] for k in kernels} for n in loops}
    order, dice = list(kernels), random.Random(0)
    for number in range(rounds + 1):
        if time.monotonic() > end and number > 3:
            break
        dice.shuffle(order)
        # If a kernel fails, its round does not count: the kernels are compared within each round.
        code = f"all_of({dict(loops)!r})"
        try:
            values = {name: json.loads(kernels[name].run(code, 30)) for name in order}
        except (RuntimeError, queue.Empty) as error:
            if number < 3:
                raise
            problems.append(f"round {number}: {type(error).__name__}: {error}")
            break
        for name, found in values.items():
            for loop, nanoseconds in found.items():
                if number:
                    took[loop][name].append(nanoseconds)
    return took


def judged(values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the time that the guard adds, and the difference between the two plain kernels."""
    plain, again, guarded = (values[name] for name in ("plain", "plain again", "guarded"))
    # The baseline is the mean of both plain kernels, because one process may be slower by chance.
    base = [(a + b) / 2 for a, b in zip(plain, again, strict=True)]
    more = [100 * (g / b - 1) for g, b in zip(guarded, base, strict=True)]
    noise = [100 * (b / a - 1) for a, b in zip(plain, again, strict=True)]
    return {
        "plain_ns": summary(plain),
        "plain_again_ns": summary(again),
        "guarded_ns": summary(guarded),
        "ratio_p50": median(g / b for g, b in zip(guarded, base, strict=True)),
        "added_ns_p50": median(g - b for g, b in zip(guarded, base, strict=True)),
        "overhead_percent": median(more),
        "overhead_percent_of_fastest": 100 * (min(guarded) / min(*plain, *again) - 1),
        "noise_percent": median(noise),
        "noise_percent_spread": summary([abs(n) for n in noise]),
    }


def session_of(kernel: Kernel) -> dict[str, Any]:
    """Return a kernel's session as the broker shows it."""
    name = kernel.session()
    with Client(os.environ["GPUPOOL_SOCKET"]) as client:
        return next(s for s in client.call("status")["sessions"] if s["id"] == name)


if __name__ == "__main__":
    try:
        json.dump(main(sys.argv[1:]), sys.stdout, indent=2)
    except queue.Empty:
        sys.exit("A kernel did not answer in time.")
    print()
