# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The worker children, one for each device, and their operations on sessions.

Operations on the same device wait for each other. An operation continues even if its caller is
cancelled. If an operation leaves processes stopped or locked, a task of this module makes these
processes run again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import replace
from typing import Any, AsyncIterator, Awaitable, Callable, Coroutine, Sequence, TypeVar

from ... import procfs
from ...errors import DriverError
from ...procfs import ProcessId
from ..children import Child, Children
from ..model import ResumeOutcome, SuspendOutcome
from .calls import SessionCalls
from .operations import Operation
from .sampler import Sampler

_T = TypeVar("_T")

#: If an undo leaves processes suspended, it is repeated. These are the first and the longest pause
#: between two attempts, in seconds. The pause doubles after each attempt.
KEPT_POLL, KEPT_PAUSE = 0.5, 30.0

#: The state of a process counts as lost after KEPT_MOST attempts in a row that the driver refused
#: although there was room. The last of them must come at least KEPT_PATIENCE seconds after the
#: first. The reason is the same as in ``broker/gpu/refusals.py``.
KEPT_MOST, KEPT_PATIENCE = 5, 120.0

#: Seconds between two checks whether a stopped process runs again (after SIGCONT).
_SETTLE_POLL = 0.25


class Workers:
    """The workers of a service; see ``Inventory`` for the parameters."""

    def __init__(
        self,
        *,
        children: Children,
        log: logging.Logger,
        sampler: Sampler,
        lock_timeout: float,
        call_timeout: float,
    ) -> None:
        self.call_timeout = call_timeout
        #: The workers, by the UUID of the device.
        self.children: dict[str, Child] = {}
        #: By session: the task that unlocks or restores the processes that an operation could not
        #: bring back, and this operation.
        self.settling: dict[str, asyncio.Task[None]] = {}
        self._left: dict[str, Operation] = {}
        #: How many suspends of each session have succeeded.
        self._suspends: Counter[str] = Counter()
        self._make = children.make
        self._log = log
        self._sampler = sampler
        self._lock_timeout = lock_timeout
        self._locks: dict[str, asyncio.Lock] = {}
        self._running: set[asyncio.Task[Any]] = set()

    def add(self, uuid: str) -> None:
        """Make a worker for a device, if the device has no worker."""
        if uuid not in self.children:
            self.children[uuid] = self._make("worker")
        self._locks.setdefault(uuid, asyncio.Lock())

    async def remove(self, uuid: str) -> None:
        """End the worker of a device that no longer exists."""
        self._locks.pop(uuid, None)
        await self.children.pop(uuid).close()

    def warm(self, uuid: str) -> None:
        """Start the worker of a device before the monitor has found the device.

        Sessions of an earlier broker use the device, and soon need its worker. The worker starts
        while the monitor searches for devices, so the broker starts faster.
        """
        self.add(uuid)
        task = asyncio.ensure_future(self.children[uuid].start())
        self._running.add(task)

        def over(ended: asyncio.Future[Any]) -> None:
            self._running.discard(task)
            if not ended.cancelled():
                ended.exception()  # the first call to the worker reports this error

        task.add_done_callback(over)

    def first_free(self, uuids: Sequence[str]) -> Sequence[str]:
        """Return a list of one device: the first whose worker is free, or else the first of all."""
        free = [uuid for uuid in uuids if not self._locks[uuid].locked()]
        return (free or uuids)[:1]

    async def drain(self, grace: float) -> None:
        """Wait until the running operations have ended, but at most ``grace`` seconds."""
        waiting = {*self._running, *self._stop_settling()}
        if waiting:
            await asyncio.wait(waiting, timeout=grace)

    async def close(self, grace: float) -> None:
        """After the workers have ended, wait until all operations have ended, too.

        The method waits for at most ``grace`` seconds.
        """
        if self._running:
            await asyncio.wait(self._running, timeout=grace)
        if self.settling:  # operations that ended during the wait have started these tasks
            await asyncio.wait(self._stop_settling(), timeout=grace)

    def _stop_settling(self) -> set[asyncio.Task[None]]:
        for task in self.settling.values():
            task.cancel()
        return {*self.settling.values()}

    def operation(
        self,
        worker: Child,
        root: ProcessId,
        session: str,
        call_timeout: float | None = None,
        *,
        alone: bool = False,
    ) -> Operation:
        calls = SessionCalls(
            worker,
            root,
            session,
            lock_timeout=self._lock_timeout,
            call_timeout=self.call_timeout if call_timeout is None else call_timeout,
            alone=alone,
        )
        return Operation(calls, self._sampler, root)

    async def perform(
        self,
        run: Callable[[Operation], Awaitable[_T]],
        root: ProcessId,
        session: str,
        devices: Sequence[str],
        *,
        alone: bool = False,
    ) -> _T:
        async def perform() -> _T:
            asked = time.monotonic()
            async with self.locked(devices):
                waited = time.monotonic() - asked
                left, suspends = await self._forget_settling(session), self._suspends[session]
                operation = self.operation(self.children[devices[0]], root, session, alone=alone)
                try:
                    result = await run(operation)
                    if isinstance(result, (SuspendOutcome, ResumeOutcome)):
                        result = replace(result, waited=waited)
                    if isinstance(result, SuspendOutcome) and result.status == "suspended":
                        self._suspends[session] += 1
                finally:
                    # If the session is suspended now, its processes must stay so.
                    if left is not None and self._suspends[session] == suspends:
                        operation.inherit(left)
                    self._settle(operation, root, session, devices)
            return result

        if not devices:
            raise DriverError("An operation needs at least one device.")
        return await self.shielded(perform())

    async def shielded(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of ``work``, which continues even if the caller is cancelled.

        The reason is that a driver call cannot be stopped before its end.
        """
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    @contextlib.asynccontextmanager
    async def locked(self, devices: Sequence[str]) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for uuid in sorted({*devices}):  # all callers use this order, which avoids a deadlock
                if uuid in self._locks:
                    await stack.enter_async_context(self._locks[uuid])
                if uuid not in self._locks:  # also if the device was removed during the wait
                    raise DriverError(f"The driver no longer lists device {uuid}.")
            yield

    def _settle(
        self, operation: Operation, root: ProcessId, session: str, devices: Sequence[str]
    ) -> None:
        """Start a task that unlocks or restores the processes that an operation left behind.

        - If a process was stopped (SIGSTOP), the task waits until the process continues. The
          driver's own thread in the process may then finish its call and leave the process locked.
        - If a lock call got no answer, the driver may lock the process later, when the GPU work
          ends. The task waits for this.
        """
        stopped, late = operation.unsettled, operation.late
        if not stopped and not late:
            return
        if session in self.settling:  # of an operation on other devices
            operation.inherit(self._left.pop(session))
            self.settling.pop(session).cancel()

        async def settle() -> None:
            while any(procfs.presence(process) == "stopped" for process in stopped):
                await asyncio.sleep(_SETTLE_POLL)
            locked = await self._late_locks(late, root, session) if late else []
            if not stopped and not locked:
                return
            left, pause = [*stopped, *locked], KEPT_POLL
            while left:
                try:
                    async with self.locked(devices):
                        again = self.operation(self.children[devices[0]], root, session)
                        again.follow(operation)
                        trouble = await again.undo(left)
                except DriverError as error:
                    self._log.error("Session %s stays suspended: %s", session, error)
                    left = [process for process in left if procfs.presence(process) != "gone"]
                else:
                    if trouble:
                        self._log.error("%s", trouble[1])
                    left = again.kept
                if left:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, KEPT_PAUSE)

        task = asyncio.create_task(settle())
        self.settling[session] = task
        self._left[session] = operation
        task.add_done_callback(lambda _: self._settled(session, task))

    async def _late_locks(
        self, late: Sequence[ProcessId], root: ProcessId, session: str
    ) -> list[ProcessId]:
        """Wait for the late locks of the processes ``late``; return the processes that are locked.

        An extra worker does this, because other sessions need the worker of the device.
        """
        worker = self._make("worker")
        try:
            return await self.operation(worker, root, session).late_locks(late)
        finally:
            await worker.close()

    def _settled(self, session: str, task: asyncio.Task[None]) -> None:
        if self.settling.get(session) is task:
            del self.settling[session]
            self._left.pop(session, None)

    async def _forget_settling(self, session: str) -> Operation | None:
        """Stop the task in ``settling`` of a session; return its operation in ``_left``."""
        task, left = self.settling.pop(session, None), self._left.pop(session, None)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        return left
