# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs an object in another process, and calls its methods with a time-out for each answer.

``python -m benchmarks.gpu.child MODULE:CLASS`` makes the object at its first request. A request is
a JSON line ``[method, arguments...]``. The answer is a JSON line with ``ok`` or ``error``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: Default time-out of an answer in seconds.
ANSWER = 60.0


class Trouble(RuntimeError):
    """The called method raised an error in the other process, or that process has ended."""


class Remote:
    """The object as its parent process sees it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid: int = process.pid

    async def do(self, method: str, *arguments: Any, timeout: float = ANSWER) -> Any:
        """Call the object's method; return its result.

        Raises
        ------
        Trouble
            If the method raised an error, or the process has ended.
        asyncio.TimeoutError
            If there is no answer within ``timeout`` seconds.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
        if not line:
            raise Trouble(f"The process has ended at {method!r}.")
        answer = json.loads(line)
        if "error" in answer:
            raise Trouble(f"{method}: {answer['error']}")
        return answer["ok"]


@contextlib.asynccontextmanager
async def remote(what: str, env: Mapping[str, str]) -> AsyncIterator[Remote]:
    """Start a process with an object of ``"module:class"``; kill it at the end of the block."""
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "benchmarks.gpu.child", what,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        env={**env, "PYTHONPATH": path}, limit=1 << 24,
    )  # fmt: skip
    try:
        yield Remote(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # SIGKILL does not end a process that hangs in the driver. So wait at most 20 s for its end.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), 20)


def main() -> None:
    """Answer the requests on stdin until its end."""
    # Libraries may print to stdout. So answers get a copy of it, and stdout itself becomes stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    served: Any = None
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer: dict[str, Any]
        try:
            if served is None:
                served = getattr(importlib.import_module(module), name)()
            answer = {"ok": getattr(served, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
