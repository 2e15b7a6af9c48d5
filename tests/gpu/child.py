# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A process that uses a GPU: ``python -m tests.gpu.child WORKLOAD``.

The process reads JSON requests from stdin, one per line, and answers each request with one line of
JSON. A request ``[name, arguments...]`` calls a function of this file or a method of the workload.
The process uses no CUDA before the first request ``start``.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from typing import Any

from . import workloads

_workload: Any = None


def start() -> str:
    """Import the framework and let it make its context; return its version."""
    global _workload
    name = sys.argv[1]
    _workload = workloads.WORKLOADS[name][0]()
    return workloads.version(name)


def digest(name: str) -> str:
    """Return the SHA-256 of the array ``name``, read from the device."""
    return hashlib.sha256(_workload.get(name)).hexdigest()


def steps(name: str, number: int, step: int) -> None:
    """Do ``number`` steps of work, and wait for them."""
    for _ in range(number):
        _workload.work(name, step)
    _workload.sync()


_ends = threading.Event()
_thread: threading.Thread | None = None
_done = 0


def work_on(name: str, step: int) -> None:
    """Do steps of work in a thread until :func:`rest`."""
    global _thread

    def run() -> None:
        global _done
        while not _ends.is_set():
            _workload.work(name, step)
            _workload.sync()
            _done += 1

    _ends.clear()
    _thread = threading.Thread(target=run)
    _thread.start()


def done() -> int:
    """Return the number of steps that the threads of :func:`work_on` have done so far."""
    return _done


def rest() -> int:
    """End the thread of :func:`work_on`; return the same number as :func:`done`."""
    assert _thread is not None
    _ends.set()
    _thread.join()
    return _done


def info() -> tuple[int, int]:
    """Return free and total bytes of the device as the driver reports them to this process."""
    from cuda.bindings import driver

    # cuMemGetInfo needs a context. JAX sets one only in its own threads. So set the same context
    # here: the primary context of the device.
    if not int(driver.cuCtxGetCurrent()[1]):
        driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    result, free, total = driver.cuMemGetInfo()
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuMemGetInfo: {result.name}")
    return int(free), int(total)


_taken: list[Any] = []


def take(size: int) -> None:
    """Allocate device memory without touching it."""
    from cuda.bindings import driver

    result, pointer = driver.cuMemAlloc(size)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuMemAlloc: {result.name}")
    _taken.append(pointer)


def give() -> None:
    """Free what :func:`take` allocated."""
    from cuda.bindings import driver

    while _taken:
        (result,) = driver.cuMemFree(_taken.pop())
        if result != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuMemFree: {result.name}")


def init() -> str:
    """Call only cuInit of the driver; return its result."""
    from cuda.bindings import driver

    return str(driver.cuInit(0)[0].name)


def nvml() -> int:
    """Use only NVML; return the number of devices that it lists."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetCount())


def asks(pid: int) -> dict[str, list[Any]]:
    """Call cuInit, and ask the driver for the state and the restore thread of another process.

    Return for each question the result, followed by the value if the call has one.
    """
    from cuda.bindings import driver

    answers = {
        "init": driver.cuInit(0),
        "state": driver.cuCheckpointProcessGetState(pid),
        "thread": driver.cuCheckpointProcessGetRestoreThreadId(pid),
    }
    return {
        question: [result.name, *(None if value is None else int(value) for value in values)]
        for question, (result, *values) in answers.items()
    }


def pid() -> int:
    return os.getpid()


def main() -> None:
    # Frameworks print to stdout. So answers use a copy of it, and stdout itself becomes stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            call = globals().get(name) or getattr(_workload, name)
            answer = {"ok": call(*arguments)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)[:2000]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
