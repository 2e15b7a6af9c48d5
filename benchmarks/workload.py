# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The GPU work of the benchmarks, for cells and for programs under ``jupyter gpupool run``.

``python -m benchmarks.workload ROLE`` runs one of three programs:

- ``serve SOCKET BYTES`` is an inference service. A request is a line of JSON with the seconds that
  the device computes for it. The answer is also a line of JSON.
- ``train LOG BYTES`` computes in steps until SIGTERM, and appends a line to LOG for each step.
- ``job BYTES ROUNDS SECONDS`` alternates between waiting and computing.

``train`` and ``job`` print a JSON object with the number of wrong bytes. To compute, a program
launches GPU kernels that occupy the device for the given seconds. On an emulated device, these
kernels use no processor time.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from typing import Any

from benchmarks.gpu.raw import Raw

#: The most seconds of one GPU kernel in ``compute``, and the seconds of a training step.
LAUNCH, STEP = 0.02, 0.05

#: The state of a training changes after this many steps.
CHANGE = 20


class Work(Raw):
    """A state of ``size`` bytes on the device. The constructor writes all bytes."""

    def __init__(self, size: int, first: int = 7) -> None:
        super().__init__()
        self.first = first
        self.put("state", size, first)

    def compute(self, seconds: float) -> None:
        """Occupy the device for ``seconds`` with successive short GPU kernels."""
        left = seconds
        while left > 1e-6:
            self.spin(min(LAUNCH, left))
            self.sync()
            left -= LAUNCH

    def change(self) -> None:
        """Add 1 to every word of the state."""
        self.add("state", 1)
        self.first += 1

    def whole(self) -> bool:
        """Return whether the state's sum and some single numbers of it are right."""
        return self.check("state", self.first)

    def lost(self) -> int:
        """Read the whole state; return the number of wrong bytes."""
        return self.wrong("state", self.first)


def serve(path: str, size: int) -> None:
    """Answer requests until another process ends this one."""
    work = Work(size)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            peer, _ = listener.accept()
            with peer, peer.makefile("rw") as lines:
                for line in lines:
                    print(json.dumps(answer(work, json.loads(line))), file=lines)
                    lines.flush()


def answer(work: Work, request: dict[str, Any]) -> dict[str, Any]:
    """Serve one request: compute, and then check the state if the request asks for it.

    ``check`` asks for a check of all bytes, and ``sum`` for a check of the sum and some samples.
    """
    work.compute(request.get("seconds", 0.0))
    if request.get("check"):
        return {"wrong": work.lost()}
    return {"right": work.whole() if request.get("sum") else True}


def train(log: str, size: int) -> dict[str, Any]:
    """Compute in steps until SIGTERM; return the number of steps and of wrong bytes."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    work, steps = Work(size), 0
    with open(log, "a", buffering=1, encoding="ascii") as file:
        while not ended:
            work.spin(STEP)
            work.sync()
            steps += 1
            if steps % CHANGE == 0:
                work.change()
            file.write(f"{time.time():.3f}\n")
    return {"steps": steps, "wrong": work.lost()}


def job(size: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Wait and compute in turn, ``seconds`` each; return begin, end and number of wrong bytes."""
    begun = time.monotonic()
    work = Work(size)
    for _ in range(rounds):
        time.sleep(seconds)
        work.compute(seconds)
        work.change()
    ended = time.monotonic()
    return {"begun": begun, "ended": ended, "wrong": work.lost()}


def play(argv: list[str]) -> None:
    """Run one role."""
    role, *rest = argv
    if role == "serve":
        serve(rest[0], int(rest[1]))
    elif role == "train":
        print(json.dumps(train(rest[0], int(rest[1]))))
    else:
        print(json.dumps(job(int(rest[0]), int(rest[1]), float(rest[2]))))


if __name__ == "__main__":
    play(sys.argv[1:])
