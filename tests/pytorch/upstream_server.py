# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs single tests of PyTorch itself, each in a fork of a process that has imported PyTorch.

``upstream.py`` starts this server, with or without the guard, and sends one order a line::

    {"list": "test_cuda", "classes": ["TestCuda"], "names": "stream"}
    {"run": "test_cuda", "test": "TestCuda.test_streams", "seconds": 60, "expandable": false}

The import of PyTorch takes five seconds, and a test much less. The server itself never calls CUDA,
because the forks of a process that has called CUDA cannot use CUDA.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import select
import signal
import sys
import tempfile
import traceback
import unittest
from typing import Any, BinaryIO, Callable

#: With this variable, PyTorch looks for devices only through NVML. So this process can import
#: PyTorch's test tools without a call of CUDA.
NVML_ONLY = "PYTORCH_NVML_BASED_CUDA_CHECK"

#: The reason in the answer begins with these words if a test has not ended in time.
LATE = "not within"

#: An answer has only the end of a test's output and traceback: at most this many characters each.
KEPT = 20_000


def _cases(suite: unittest.TestSuite) -> list[unittest.TestCase]:
    return [
        case
        for one in suite
        for case in (_cases(one) if isinstance(one, unittest.TestSuite) else [one])
    ]


def _listed(order: dict[str, Any]) -> list[str]:
    """Return ``Class.test`` of all tests that the order selects."""
    module = importlib.import_module(order["list"])
    found = []
    for name in vars(module):
        if name in order["classes"]:
            tests = unittest.defaultTestLoader.getTestCaseNames(getattr(module, name))
            found += [f"{name}.{test}" for test in tests if re.search(order["names"], test)]
    return found


def _performed(order: dict[str, Any]) -> dict[str, str]:
    """Run one test; return its outcome, and the reason if it did not pass."""
    module = importlib.import_module(order["run"])
    if order["expandable"]:  # test_cuda_expandable_segments.py does the same
        for name in ("TestCuda", "TestBlockStateAbsorption"):
            getattr(module, name).expandable_segments = lambda _: True
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName(order["test"], module).run(result)
    if result.skipped:
        return {"outcome": "skipped", "why": result.skipped[0][1]}
    wrong = [text for _, text in (*result.failures, *result.errors)]
    wrong += ["passed unexpectedly" for _ in result.unexpectedSuccesses]
    if not wrong and not result.testsRun:
        wrong = ["no such test"]
    return {"outcome": "failed" if wrong else "passed", "why": "\n".join(wrong)[-KEPT:]}


def _in_child(work: Callable[[dict[str, Any]], Any], order: dict[str, Any], pipe: int) -> None:
    """Do the work, write its result to ``pipe``, and end this forked process."""
    try:
        os.setsid()
        os.environ.pop(NVML_ONLY, None)
        if order.get("expandable"):
            os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            answer = work(order)
            with os.fdopen(pipe, "w") as stream:
                json.dump(answer, stream)
        code = 0
    except BaseException:  # a forked child must not return into its parent's code
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _ended(pid: int, seconds: float) -> int | None:
    """Return the wait status of a child, or None if it did not end within ``seconds``."""
    descriptor = os.pidfd_open(pid)
    try:
        late = not select.select([descriptor], [], [], seconds)[0]
    finally:
        os.close(descriptor)
    try:
        os.killpg(pid, signal.SIGKILL)  # this also kills the processes that the test left behind
    except ProcessLookupError:
        pass
    status = os.waitpid(pid, 0)[1]
    return None if late else status


def _answer(work: Callable[[dict[str, Any]], Any], order: dict[str, Any]) -> Any:
    """Do the work in a forked child; return its result, or why the child gave no result."""
    seconds = order.get("seconds", 200)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as found:
        pid = os.fork()
        if not pid:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            _in_child(work, order, os.dup(found.fileno()))
        status = _ended(pid, seconds)
        found.seek(0)
        answer = found.read()
        if answer and not status and status is not None:
            answer = json.loads(answer)
            if isinstance(answer, dict):
                answer["output"] = _end_of(said)
            return answer
        how = f"{LATE} {seconds:g} s" if status is None else f"ended with status {status}"
        return {"outcome": "failed", "why": how, "output": _end_of(said)}


def _end_of(stream: BinaryIO) -> str:
    stream.seek(0)
    return stream.read()[-KEPT:].decode(errors="replace")


def main() -> None:
    """Carry out the orders on standard input; the argument is the folder of PyTorch's tests."""
    sys.path.insert(0, sys.argv.pop(1))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ[NVML_ONLY] = "1"
    import torch
    import torch.testing._internal.common_utils

    assert not torch.cuda.is_initialized()
    for line in sys.stdin:
        order = json.loads(line)
        answers.write(json.dumps(_answer(_listed if "list" in order else _performed, order)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
