# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Starts a process that uses a GPU (``child.py``), sends it requests, and kills it at the end.

The wait for an answer always has a time-out.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jupyter_gpupool import procfs
from jupyter_gpupool.procfs import ProcessId

ROOT = Path(__file__).parents[2]

#: The time-out of an answer, in seconds. It is long enough for torch.compile, which takes longest.
ANSWER = 120.0

#: The time-out, in seconds, for the end of a killed process. The process ends only when the kernel
#: driver has freed its memory.
END = 30.0


class Failed(Exception):
    """A request raised an exception in the process; ``kind`` is the exception's name."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Target:
    """A child process that runs ``child.py``, in its own process group."""

    def __init__(self, workload: str, env: dict[str, str]) -> None:
        self.workload = workload
        self._env = env

    async def start(self) -> Target:
        """Start the process. It does not use the GPU before ``do("start")``."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.gpu.child", self.workload),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            env=self._env,
            start_new_session=True,
        )
        self.pid: int = self.process.pid
        await self.do("pid")
        root = procfs.identify(self.pid)
        assert root is not None
        self.root: ProcessId = root
        return self

    def ask(self, name: str, *arguments: Any) -> None:
        """Send a request without a wait: a suspended process may not answer before its resume."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")

    async def answer(self, timeout: float = ANSWER) -> Any:
        """Return the answer to the oldest open request.

        Raises
        ------
        Failed
            If the request raised an exception in the process.
        EOFError
            If the process has ended.
        asyncio.TimeoutError
            If there is no answer within ``timeout`` seconds.
        """
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), timeout)
        if not line:
            code = await asyncio.wait_for(self.process.wait(), timeout)
            raise EOFError(f"The process has ended with {code}")
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"], answer["message"])
        return answer["ok"]

    async def do(self, name: str, *arguments: Any, timeout: float = ANSWER) -> Any:
        """Call function ``name`` of the process; return its result."""
        self.ask(name, *arguments)
        return await self.answer(timeout)

    async def kill(self) -> None:
        """Kill the process and its process group; return when the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        if self.process.stdin is not None:
            self.process.stdin.close()
        await asyncio.wait_for(self.process.wait(), END)


@contextlib.asynccontextmanager
async def target(
    workload: str, env: dict[str, str], *, start: bool = True
) -> AsyncIterator[Target]:
    """Yield a started process. With ``start``, its framework has a context. Kill it at the end."""
    found = await Target(workload, env).start()
    try:
        if start:
            await found.do("start")
        yield found
    finally:
        await found.kill()
