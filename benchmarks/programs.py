# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Programs under ``jupyter gpupool run``, their clients, and notebooks. Not a benchmark itself."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.kernels import Kernel

ROOT = Path(__file__).parents[1]

#: The most seconds to wait for a program, a cell or an answer. A longer wait is a failure.
PATIENCE = 600.0

#: Makes kernels start one at a time: a kernel chooses TCP ports some time before it binds them, so
#: two starting kernels could choose the same ports.
_starting = threading.Lock()


class Program:
    """A process of ``jupyter gpupool run OPTIONS -- python -m benchmarks.workload ROLE``."""

    def __init__(self, folder: Path, name: str, options: list[str], role: list[str]) -> None:
        self.name = name
        self.out = folder / f"{name}.out"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "jupyter_gpupool.cli", "run", "--name", name, *options,
                    "--", sys.executable, "-m", "benchmarks.workload", *role,
                ],
                cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )  # fmt: skip

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)

    def result(self, *, stop: bool = False, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for the program's end, and return the JSON object that the program has printed.

        With ``stop``, send SIGTERM first.
        """
        if stop:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(seconds)
        text = self.out.read_text()
        if code:
            raise RuntimeError(f"{self.name} ended with {code}: {text[-2000:]}")
        found = json.loads(text.strip().splitlines()[-1])
        assert isinstance(found, dict)
        return found


class Service(Program):
    """An inference service, and a connection to it."""

    def __init__(self, folder: Path, name: str, options: list[str], size: int) -> None:
        self.path = folder / f"{name}.sock"
        super().__init__(folder, name, options, ["serve", str(self.path), str(size)])
        self._lines: Any = None

    def connect(self) -> None:
        """Wait until the service listens, and connect to it."""
        deadline = time.monotonic() + PATIENCE
        while not self.path.exists():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} does not serve: {self.out.read_text()[-2000:]}")
            time.sleep(0.05)
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(PATIENCE)
        peer.connect(str(self.path))
        self._lines = peer.makefile("rw")
        peer.close()  # the file object keeps the connection open

    def ask(self, **request: Any) -> float:
        """Send a request; return the seconds until its answer.

        Raises
        ------
        RuntimeError
            If the service has lost bytes, or has ended.
        """
        begun = time.monotonic()
        print(json.dumps(request), file=self._lines)
        self._lines.flush()
        line = self._lines.readline()
        took = time.monotonic() - begun
        if not line:
            raise RuntimeError(f"{self.name} has ended: {self.out.read_text()[-2000:]}")
        if json.loads(line) not in ({"right": True}, {"wrong": 0}):
            raise RuntimeError(f"{self.name} has lost bytes: {line}")
        return took

    def __exit__(self, *exc: object) -> None:
        if self._lines is not None:
            self._lines.close()
        super().__exit__(*exc)


class Player(threading.Thread):
    """Takes one turn after another, with pauses in between, until :meth:`stop` is called.

    ``pause`` is the mean length of a pause. Each pause is a random length from 0.5 to 1.5 times the
    mean. :attr:`times` has a pair for each turn: the time at which the turn began, and its seconds.
    :attr:`error` describes the first failure; it is "" if there was no failure.
    """

    def __init__(self, pause: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.pause = pause
        self.times: list[tuple[float, float]] = []
        self.error = ""
        #: ``open`` is set when the player's process runs. ``ready`` is set when the player can take
        #: its first turn, for example because a notebook has had its first slice.
        self.open, self.ready = threading.Event(), threading.Event()
        self._stopped = threading.Event()
        self._random = random.Random(seed)

    def prepare(self) -> None:
        """Do what comes before the first turn."""

    def turn(self) -> float:
        """Take one turn; return the seconds that :attr:`times` records for it."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what comes after the last turn or an error, for example check the state."""

    def run(self) -> None:
        for part in (self._play, self.finish):
            try:
                part()
            except Exception as error:
                self.error = self.error or f"{type(error).__name__}: {error}"[:2000]
        self.open.set()
        self.ready.set()

    def _play(self) -> None:
        self.prepare()
        self.open.set()
        self.ready.set()
        while not self._stopped.wait(self.pause * self._random.uniform(0.5, 1.5)):
            begun = time.time()
            self.times.append((begun, self.turn()))

    def stop(self) -> None:
        self._stopped.set()

    def taken(self, since: float = 0.0, until: float = float("inf")) -> list[float]:
        """Return the seconds of each turn that began in the time from ``since`` to ``until``."""
        return [took for at, took in list(self.times) if since <= at < until]


class Client(Player):
    """A client that calls a service."""

    def __init__(self, service: Service, pause: float, seed: int, **request: Any) -> None:
        super().__init__(pause, seed)
        self.service, self.request = service, request

    def prepare(self) -> None:
        self.service.connect()

    def turn(self) -> float:
        return self.service.ask(**self.request)

    def finish(self) -> None:
        if not self.error:
            self.service.ask(check=True)


class Notebook(Player):
    """A user who runs cells in a notebook. Each cell computes, changes the state and checks it."""

    def __init__(
        self, pause: float, seed: int, *, size: int, seconds: float, **slice_: Any
    ) -> None:
        super().__init__(pause, seed)
        self.size, self.seconds, self.slice = size, seconds, slice_
        self.kernel: Kernel | None = None

    def prepare(self) -> None:
        with _starting:
            self.kernel = Kernel("gpupool-python3", attach="lazy", **self.slice)
        self.kernel.run("from benchmarks.workload import Work")
        self.open.set()
        self.kernel.run(f"work = Work({self.size}, {self._random.randrange(1 << 30)})", PATIENCE)

    def turn(self) -> float:
        assert self.kernel is not None
        seconds = self.seconds * self._random.uniform(0.5, 1.5)
        begun = time.monotonic()
        self.kernel.run(f"work.compute({seconds}); work.change(); assert work.whole()", PATIENCE)
        return time.monotonic() - begun - seconds

    def finish(self) -> None:
        if self.kernel is None:
            return
        try:
            if int(self.kernel.run("print(work.lost())", PATIENCE)):
                raise RuntimeError("bytes of the notebook are wrong")
        finally:
            self.kernel.__exit__()


def start(players: list[Any], *, ready: bool = True) -> None:
    """Start the players, and wait until all players are ready.

    If ``ready`` is False, wait only until the processes of the players run.
    """
    for one in players:
        one.start()
    signs = [one.ready if ready else one.open for one in players]
    for sign in signs:
        sign.wait(PATIENCE)
    both = zip(players, signs, strict=True)
    problems = [one.error or "not ready" for one, sign in both if one.error or not sign.is_set()]
    if problems:
        raise RuntimeError("; ".join(problems))


def end(players: list[Any]) -> list[str]:
    """Stop the players and wait for their last checks; return the failures."""
    for one in players:
        one.stop()
    for one in players:
        one.join(PATIENCE)
    return [one.error or "it hangs" for one in players if one.error or one.is_alive()]


def swap_seconds(rows: list[dict[str, Any]]) -> float:
    """Return the sum of the longest suspend and the longest resume in the journal, in seconds."""
    out = [row["seconds"] for row in rows if row["kind"] == "suspend"]
    back = [row["detail"]["driver_seconds"] for row in rows if row["kind"] == "resume"]
    return max(out, default=0.0) + max(back, default=0.0)
