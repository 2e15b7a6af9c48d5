# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The parent's side of a child process: calls with a wall-clock time-out.

If a call exceeds its time-out, the parent kills the child: a driver call cannot be cancelled, but
its process can be killed. The next call starts a new child. :class:`Children` creates all children
of a service, and ends all of them when the service ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Any, Callable, Coroutine, Mapping

from ..deadlines import within
from ..errors import Code, DriverError
from .child import SCRIPT

#: Seconds for a new child to load its libraries and initialise the driver. On a machine with many
#: GPUs and no persistence mode, cuInit takes seconds.
START_TIMEOUT = 60.0

#: The parent waits at most this many seconds for the end of a killed child. A child that is stuck
#: in the kernel driver may never end.
_REAP_TIMEOUT = 5.0

#: If a child dies during a call, the parent waits this many seconds before it repeats the call.
RETRY_PAUSE = 0.05

#: Maximum bytes of one line from a child: enough for a sample of 64 devices with a thousand
#: processes.
_MAX_LINE = 1 << 24


class ChildLost(Exception):
    """The child died. If ``hung``, the parent killed it because it did not answer in time."""

    def __init__(self, message: str, *, hung: bool) -> None:
        super().__init__(message)
        self.hung = hung


@dataclass(frozen=True)
class _PendingCall:
    """A call that waits for its answer, and the process that must answer the call."""

    process: asyncio.subprocess.Process
    answer: asyncio.Future[dict[str, Any]]


class Child:
    """One child program. It starts when it is first needed, and again after each death.

    Parameters
    ----------
    program:
        Name of the program. The module gets it as an argument, and messages contain it.
    arguments:
        Further arguments of the program. They come after the pid of the parent.
    module:
        Dotted name of the module that has the program.
    env:
        The child's whole environment.
    on_event:
        A function that gets each event: a line of the child that is no answer to a request.
    restart:
        Whether the next call starts a new process if the process has ended.
    python:
        The interpreter that has the vendor's packages; "": this process's own interpreter.
    closed:
        Whether the child must not start, because its service has ended.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        module: str,
        env: Mapping[str, str],
        log: logging.Logger,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        restart: bool = True,
        python: str = "",
        closed: bool = False,
    ) -> None:
        self.program = program
        self._module = module
        self.hello: dict[str, Any] = {}
        #: The call that waits for its answer; empty if no call waits.
        self.current = ""
        self._arguments = arguments
        self._env = env
        self._log = log
        self._on_event = on_event
        self._restart = restart
        self._python = python or sys.executable
        self._started = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        #: All running tasks of this object. Each process that has not ended, even if it was
        #: replaced, has one task that reads its answers. Each cancelled start of a process has one
        #: task that ends the process.
        self._readers: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, _PendingCall] = {}
        self._ready: asyncio.Future[dict[str, Any]] | None = None
        self._next_id = 0
        self._lock = asyncio.Lock()
        self._closed = closed
        self._held = ""

    @property
    def pid(self) -> int | None:
        """The pid of the child's process; None if no process runs."""
        return None if self._process is None else self._process.pid

    @property
    def generation(self) -> int:
        """Number of processes that this child has had."""
        return self._started

    async def start(self, timeout: float = START_TIMEOUT) -> dict[str, Any]:
        """Start the program if it is not running; return the first line of its output.

        Raises
        ------
        ChildLost
            If the program does not start within the time-out.
        DriverError
            If the program reports a problem and ends. The error has the program's message.
        """
        async with self._lock:
            if self._held:
                raise DriverError(self._held, code=Code.PAUSED)
            if self._process is None:
                await self._spawn(timeout)
        if self.hello.get("problem"):
            problem = str(self.hello["problem"])
            await self.kill()
            raise DriverError(problem, code=Code.NO_DRIVER)
        return self.hello

    async def call(
        self,
        op: str,
        timeout: float,
        *,
        latest: Callable[[], Mapping[str, Any]] = dict,
        more: Callable[[], float] = float,
        **fields: Any,
    ) -> dict[str, Any]:
        """Return the child's answer to ``op``.

        ``latest`` returns the fields of the request that may change while a process starts. So this
        method calls ``latest`` after the start, just before it sends the request. If the child has
        not answered in ``timeout`` seconds, this method calls ``more``, and waits as many seconds
        longer as ``more`` returns. The method repeats this until ``more`` returns 0.

        Raises
        ------
        ChildLost
            If the child dies, or if this method has killed it because it did not answer in time.
        DriverError
            If the child answered with an error.
        """
        await self.start()
        process = self._process
        if process is None or process.stdin is None:
            raise ChildLost(f"The {self.program} process ended while it was starting.", hung=False)
        self._next_id += 1
        request_id = self._next_id
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = _PendingCall(process, future)
        try:
            line = json.dumps({"id": request_id, "op": op, **fields, **latest()}) + "\n"
            process.stdin.write(line.encode())
            self.current = op
            left = timeout
            while not future.done() and left > 0:
                await asyncio.wait({future}, timeout=left)
                left = more()
            if not future.done():
                raise asyncio.TimeoutError
            answer = future.result()
        except (asyncio.TimeoutError, TimeoutError):
            self._log.warning(
                "The %s process %d did not answer %r in %g s and is killed.",
                self.program, process.pid, op, timeout,
            )  # fmt: skip
            await self._end(process)
            raise ChildLost(f"No answer to {op!r} in {timeout:g} s.", hung=True) from None
        finally:
            self.current = ""
            self._waiting.pop(request_id, None)
            if future.done():
                future.exception()  # prevents a log entry of asyncio if this call was cancelled
        if "error" in answer:
            raise DriverError(str(answer["error"]), code=Code.of(answer.get("code"), Code.DRIVER))
        return answer

    async def ask(
        self,
        op: str,
        timeout: float,
        *,
        latest: Callable[[], Mapping[str, Any]] = dict,
        more: Callable[[], float] = float,
        **fields: Any,
    ) -> dict[str, Any]:
        """Make a :meth:`call` that changes nothing, and repeat it if the child dies during it.

        A new child makes the repeated call. The repetition matters because the broker may end a
        kernel if it gets no answer. This method repeats the call for at most ``timeout`` seconds.
        If the child hung, this method does not repeat the call: ``timeout`` seconds have passed.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                return await self.call(op, timeout, latest=latest, more=more, **fields)
            except ChildLost as lost:
                if lost.hung or self._closed or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(RETRY_PAUSE)

    async def kill(self) -> None:
        """End the process now, if it runs. The next call starts a new process."""
        if self._process is not None:
            await self._end(self._process)

    async def replace(self) -> None:
        """End the process, even while it starts. The next call starts a new process."""
        async with self._lock:
            await self.kill()

    async def hold(self, reason: str) -> None:
        """End the process, and refuse new starts with ``reason``; "" allows starts again."""
        self._held = reason
        if reason:
            await self.replace()

    async def close(self) -> None:
        """End the process, and never start a new one."""
        self._closed = True
        await self.kill()
        with contextlib.suppress(asyncio.TimeoutError, TimeoutError):
            await within(self._end_late(), _REAP_TIMEOUT)

    async def _end_late(self) -> None:
        """End the process, even while it starts, and wait until all earlier processes have ended.

        A process that was killed or replaced may still run. Its pipes stay open until it ends.
        """
        await self.replace()
        if others := self._readers - {asyncio.current_task()}:
            await asyncio.wait(others)

    # ------------------------------------------------------------------ internals

    async def _spawn(self, timeout: float) -> None:
        if self._closed or (self._started and not self._restart):
            raise ChildLost(f"The {self.program} process has ended.", hung=False)
        self._started += 1
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        try:
            process = await self._execute()
        except OSError as error:  # no memory or no pid is left
            raise ChildLost(
                f"The {self.program} process cannot be started: {error}.", hung=False
            ) from None
        self._process = process
        self._reader = self._to_await(self._read(process, self._ready))
        try:
            self.hello = await within(asyncio.shield(self._ready), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            await self._end(process)
            raise ChildLost(
                f"The {self.program} process did not start in {timeout:g} s.", hung=True
            ) from None

    async def _execute(self) -> asyncio.subprocess.Process:
        making = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                self._python,
                str(SCRIPT),
                self._module,
                self.program,
                str(os.getpid()),
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._env,
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal must reach only the broker
                limit=_MAX_LINE,
            )
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # If a start is cancelled, asyncio leaves the pipes open. So let the start finish, and
            # then end the process.
            await asyncio.shield(self._to_await(self._discard(making)))
            raise

    def _to_await(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task for ``work``; :meth:`close` waits for this task."""
        task = asyncio.create_task(work)
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return task

    async def _discard(self, making: asyncio.Future[asyncio.subprocess.Process]) -> None:
        with contextlib.suppress(OSError):  # the process could not be started
            process = await making
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await self._reap(process)

    async def _read(
        self, process: asyncio.subprocess.Process, ready: asyncio.Future[dict[str, Any]]
    ) -> None:
        assert process.stdout is not None
        if self._closed:  # closed while the process started
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        try:
            while line := await process.stdout.readline():
                self._take(json.loads(line), ready)
        except Exception:  # not JSON, an endless line, or the callback failed
            self._log.exception("A line from the %s process could not be handled", self.program)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        # The process has closed its stdout, or was killed. From now on it counts as ended, even if
        # it still exists.
        if self._process is process:
            self._process = None
        lost = ChildLost(f"The {self.program} process {process.pid} ended.", hung=False)
        if not ready.done():
            ready.set_exception(lost)
            ready.exception()  # prevents a log entry of asyncio if no call waits
        for call in self._waiting.values():
            # Only calls to this process fail. Calls to a newer process continue to wait.
            if call.process is process and not call.answer.done():
                call.answer.set_exception(lost)
        await self._reap(process)

    def _take(self, message: dict[str, Any], ready: asyncio.Future[dict[str, Any]]) -> None:
        if message.get("event") == "ready":
            if not ready.done():
                ready.set_result(message)
        elif "event" in message:
            if self._on_event is not None:
                self._on_event(message)
        else:
            call = self._waiting.get(message.get("id", 0))
            if call is not None and not call.answer.done():
                call.answer.set_result(message)

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if self._process is process:
            self._process = None
        reader = self._reader
        if reader is not None and reader is not asyncio.current_task():
            await asyncio.wait({reader}, timeout=_REAP_TIMEOUT)

    async def _reap(self, process: asyncio.subprocess.Process) -> None:
        if process.stdin is not None:
            process.stdin.close()
        try:
            await within(process.wait(), _REAP_TIMEOUT)
        except (asyncio.TimeoutError, TimeoutError):
            self._log.error(
                "The %s process %d cannot be ended: it is stuck in the driver.",
                self.program, process.pid,
            )  # fmt: skip


class Children:
    """Creates all children of one service, and ends them all.

    Each self-test makes its own child, and so does an operation that waits for the answer of a lock
    call. An operation continues after its caller is cancelled, so it may make a child while the
    service ends. :meth:`close` ends these children, too. It also waits for the end of their
    processes: if the event loop closed before a process ends, the pipes would stay open.

    Parameters
    ----------
    module, env, python:
        See :class:`Child`.
    """

    def __init__(
        self, module: str, *, env: Mapping[str, str], log: logging.Logger, python: str = ""
    ) -> None:
        self._module = module
        self._env = env
        self._log = log
        self._python = python
        self._made: weakref.WeakSet[Child] = weakref.WeakSet()
        self._closed = False

    def make(
        self,
        program: str,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        on_event: Callable[[dict[str, Any]], None] | None = None,
        restart: bool = True,
    ) -> Child:
        """Return a new child; ``env`` is its whole environment (None: that of the service)."""
        child = Child(
            program, *arguments, module=self._module, env=self._env if env is None else env,
            log=self._log, on_event=on_event, restart=restart, python=self._python,
            closed=self._closed,
        )  # fmt: skip
        self._made.add(child)
        return child

    async def close(self) -> None:
        """End all processes, even processes that are starting, and refuse new starts."""
        self._closed = True
        await asyncio.gather(*(child.close() for child in self._made))
