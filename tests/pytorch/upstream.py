# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m tests.pytorch.upstream FOLDER``: PyTorch's own tests without and with the guard.

``FOLDER`` is the folder ``test`` in the source of the installed PyTorch, for example in Debian's
source package ``pytorch``. The tests need ``expecttest`` and ``hypothesis``. Each test runs twice,
in its own process and with a time limit: on the emulated devices without the pool, and under
``jupyter gpupool run`` with a real broker, in a slice of each device. ``--results`` keeps the
outcomes in a file. A later run with ``--only`` replaces the outcomes of the tests that it repeats.
The program prints the table and every difference.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from tests.broker import kit
from tests.emulated import build, environment

from .upstream_server import LATE

MACHINE = "2x8GiB,context=64MiB"

#: PyTorch skips some tests on devices with less than 6 GB, and other tests on devices with 12 GB or
#: more. On a device of this size, it skips neither.
SLICE = "7GiB"

#: Seconds for a test on a busy machine.
SECONDS = 120

ALL = ""
TOPICS = "stream|event|pin|alloc|mem|oom|record|ipc"

#: Row of the table -> a test file, the classes in it, a pattern for the names of tests, and whether
#: PyTorch's allocator uses expandable segments.
ROWS: dict[str, tuple[str, tuple[str, ...], str, bool]] = {
    "caching allocator": (
        "test_cuda",
        ("TestCudaMallocAsync", "TestBlockStateAbsorption", "TestMemPool"),
        ALL,
        False,
    ),
    "the same, expandable segments": (
        "test_cuda",
        ("TestCudaMallocAsync", "TestBlockStateAbsorption"),
        ALL,
        True,
    ),
    "streams, events, pinned memory": ("test_cuda", ("TestCuda",), TOPICS, False),
    "graphs and other": ("test_cuda", ("TestCuda",), f"^(?!.*({TOPICS}))", False),
    "several devices": ("test_cuda_multigpu", ("TestCudaMultiGPU", "TestCudaComm"), ALL, False),
    "primary contexts": ("test_cuda_primary_ctx", ("TestCudaPrimaryCtx",), ALL, False),
    "traces of calls": ("test_cuda_trace", ("TestCudaTrace",), ALL, False),
    "serialisation": (
        "test_serialization",
        (
            "TestBothSerialization",
            "TestBothSerializationCUDA",
            "TestOldSerialization",
            "TestSerialization",
            "TestSubclassSerialization",
        ),
        ALL,
        False,
    ),
    "pinned memory of loaders": (
        "test_dataloader",
        (
            "TestDataLoader",
            "TestStringDataLoader",
            "TestDictDataLoader",
            "TestNamedTupleDataLoader",
            "TestCustomPinFn",
            "TestTensorDataset",
            "TestDataLoaderDeviceTypeCUDA",
        ),
        "cuda|pin",
        False,
    ),
    "tensors of other processes": (
        "test_multiprocessing",
        ("TestMultiprocessing",),
        "cuda|event|stream|pin",
        False,
    ),
}

#: Reason in the table -> pattern. If a test fails with a text that matches the pattern, its outcome
#: is "not applicable".
MISSING = {
    "an operator without a CPU kernel": "is not computed on an emulated device",
    "a library of NVIDIA's": "is of a library that is not emulated|fatal error: cublas_v2.h",
    "a function that the emulation lacks": "is not part of the emulated CUDA runtime",
    "a network": "urlopen error",
}

#: Test -> what it needs and this machine lacks. The error messages of these tests do not name it.
KNOWN = {"test_cublas_workspace_explicit_allocation": "a library of NVIDIA's"}

MODES = ("alone", "guarded")

#: The outcomes of a test. The emulation computes on the host, which is too slow for some tests.
WORDS = ("passed", "failed", "too slow", "not applicable")


class Server:
    """A process that runs tests on request (``upstream_server.py``)."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        self._log = log

    def ask(self, **order: Any) -> Any:
        """Return the answer to an order."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the process that runs tests has ended: {self._log.read_text()[-2000:]}"
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        with self._process:  # this closes the pipes, and the process ends with its input
            pass


@contextmanager
def servers(folder: str) -> Iterator[dict[str, Server]]:
    """Yield two servers that run tests: one without the guard, and one with the guard."""
    build.compile()
    command = [sys.executable, "-m", "tests.pytorch.upstream_server", folder]
    home = kit.short_folder()
    broker = kit.Broker(
        home, emulate=MACHINE, state_dir=str(home / "state"), default_memory=SLICE,
        host_memory="20GiB",
    )  # fmt: skip
    try:
        assert broker.start(env=kit.environment(home))["ok"]
        options = ["--memory", SLICE, "--limit", SLICE, "--devices", "2"]
        pool = [sys.executable, "-m", "jupyter_gpupool.cli", "run", *options, "--", *command]
        found = kit.environment(home)
        alone = {**found, **environment(MACHINE, home / "machine")}
        guarded = {**found, "GPUPOOL_SOCKET": str(broker.socket)}
        started = {
            "alone": Server(command, alone, home / "alone.log"),
            "guarded": Server(pool, guarded, home / "guarded.log"),
        }
        try:
            yield started
        finally:
            for server in started.values():
                server.close()
        broker.stop()
    finally:
        broker.close()
        kit.remove(home)


def run(
    started: dict[str, Server],
    row: str,
    only: str,
    seconds: float,
    results: dict[str, Any],
) -> Iterator[str]:
    """Run a row's tests with and without the guard.

    Store the outcomes of each test in ``results``, and then yield the test.
    """
    file, classes, names, expandable = ROWS[row]
    listed = [server.ask(list=file, classes=classes, names=names) for server in started.values()]
    assert isinstance(listed[0], list), listed[0]
    assert all(one == listed[0] for one in listed), listed
    for test in listed[0]:
        if not re.search(only, test):
            continue
        order = {"run": file, "test": test, "seconds": seconds, "expandable": expandable}
        with ThreadPoolExecutor(len(started)) as all_at_once:
            asked = {
                mode: all_at_once.submit(server.ask, **order) for mode, server in started.items()
            }
        results.setdefault(row, {})[test] = {mode: one.result() for mode, one in asked.items()}
        yield test


def missing(test: str, outcome: dict[str, str]) -> str | None:
    """Return what a failed test needs and this machine lacks, or None if the test lacks nothing."""
    if test.partition(".")[2] in KNOWN:
        return KNOWN[test.partition(".")[2]]
    text = outcome["why"] + outcome.get("output", "")
    return next((what for what, said in MISSING.items() if re.search(said, text)), None)


def judged(test: str, outcome: dict[str, str]) -> str:
    """Return the outcome of a test as one of :data:`WORDS`."""
    word = outcome["outcome"]
    if outcome["why"].startswith(LATE):
        return "too slow"
    return (
        "not applicable"
        if word == "skipped" or (word == "failed" and missing(test, outcome))
        else word
    )


def table(results: dict[str, Any]) -> str:
    """Return the number of tests by row and outcome, as a Markdown table."""
    lines = [f"| PyTorch's tests | | {' | '.join(WORDS)} |", "|---|---|---|---|---|---|"]
    for row, tests in results.items():
        file = ROWS[row][0]
        for mode in MODES:
            count = Counter(judged(test, outcomes[mode]) for test, outcomes in tests.items())
            figures = (count[word] for word in WORDS)
            name = f"{row} (`{file}.py`)" if mode == "alone" else ""
            lines.append(f"| {name} | {mode} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


def differences(results: dict[str, Any]) -> list[str]:
    """Return the tests whose outcome with the guard is not the same as without the guard."""
    return [
        f"{row}: {test}: {', '.join(f'{mode} {judged(test, outcomes[mode])}' for mode in MODES)}"
        for row, tests in results.items()
        for test, outcomes in tests.items()
        if len({judged(test, outcomes[mode]) for mode in MODES}) > 1
    ]


def main() -> int:
    """Run the tests and print the table; return 1 if a test's outcome depends on the guard."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--only", default="", help="a pattern for Class.test")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each test")
    parser.add_argument("--results", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        keep = asked.results or Path(folder) / "results.json"
        results = json.loads(keep.read_text()) if keep.exists() else {}
        with servers(os.path.abspath(asked.folder)) as started:
            for row in asked.rows:
                for test in run(started, row, asked.only, asked.seconds, results):
                    keep.write_text(json.dumps(results, indent=1))
                    words = (judged(test, outcome) for outcome in results[row][test].values())
                    print(row, test, *words, flush=True)
    print(table(results))
    found = differences(results)
    print(*(found or ["no outcome depends on the guard"]), sep="\n")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
