# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Driver calls on the processes of one session, through a worker that may die at any time.

The service replaces a worker that dies or hangs in a call, and reads the driver's state to learn
the result of the call. If the caller of a checkpoint dies, the driver completes the checkpoint. If
the caller of a restore dies, the driver leaves the process locked.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Mapping, Sequence

from ... import procfs
from ...errors import DriverError
from ...procfs import ProcessId
from ..children import RETRY_PAUSE, Child, ChildLost
from ..model import SuspendStatus
from . import checkpoint
from .checkpoint import DriverAnswer

#: The driver ends a lock call after the call's own time-out. If the worker has not answered this
#: many seconds later, the worker counts as hung.
LOCK_GRACE = 5.0

#: Time-out in seconds for a query of a process's state before an operation changes anything. The
#: driver usually answers at once. If it copies memory of the process, it answers after the copy. If
#: the process is frozen, it never answers. Other sessions wait for the device during the query, so
#: the time-out is short.
PATIENCE = 10.0

#: The lowest expected speed of a copy, in bytes per second. It sets the time-out of a copy. The
#: slowest copy seen in practice was twice as fast.
SLOWEST_COPY = 0.5e9

#: A copy that exceeds its time-out gets the same time again, as long as the host memory of the
#: process changes. Otherwise the copy counts as hung. During each time-out, the total memory or its
#: shared part must rise by PROGRESS bytes above its highest value so far, or fall by PROGRESS bytes
#: below its lowest value so far.
PROGRESS = 16 << 20

#: The states before and after a successful call.
_STATES = {
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}

#: States in which a transfer is under way.
_COPYING = ("checkpointing", "restoring")

#: An error code of this module, not of the driver: the worker was lost during a call, and the
#: driver's state does not show that the call succeeded.
LOST = "WORKER_LOST"

#: The error codes that mean "this process has no CUDA context". If this set had a code with another
#: meaning, the pool would give away memory that is still in use.
_NO_CONTEXT = {
    "CUDA_ERROR_INVALID_VALUE",
    "CUDA_ERROR_NOT_INITIALIZED",
    "CUDA_ERROR_DEINITIALIZED",
    "CUDA_ERROR_INVALID_CONTEXT",
    "CUDA_ERROR_ILLEGAL_STATE",
    checkpoint.NOT_SUPPORTED,  # cuda.core also uses this code for "not found"
}


class Refused(Exception):
    """An operation cannot continue, and the steps that it has done must be undone."""

    def __init__(self, status: SuspendStatus, message: str) -> None:
        super().__init__(message)
        self.status: SuspendStatus = status
        self.message = message


class SessionCalls:
    """Calls on the session of process ``root``.

    Parameters
    ----------
    lock_timeout:
        Seconds that a lock waits for the end of submitted GPU work.
    call_timeout:
        Seconds for any other driver call. A call that copies memory gets more time.
    alone:
        Whether to call the driver for ``root`` only, not for the session's other processes.
    """

    def __init__(
        self,
        worker: Child,
        root: ProcessId,
        session: str,
        *,
        lock_timeout: float,
        call_timeout: float,
        alone: bool = False,
    ) -> None:
        self._alone = alone
        self._worker = worker
        self._root = root
        self._session = session
        self.lock_timeout = lock_timeout
        self._call_timeout = call_timeout
        self._copy_timeout = call_timeout
        #: Seconds that :meth:`probe` waits for an answer. If an earlier broker died during a copy,
        #: the driver answers only after the copy.
        self._patience = call_timeout
        #: Sum of the measured times of the driver calls so far.
        self.driver_seconds = 0.0
        #: Whether a process of the session has called cuInit; None: unknown.
        self.cuda: bool | None = False
        #: The pids of all processes of the session that were found so far.
        self.pids: set[int] = set()
        #: The answers that :meth:`bring_back` got from the worker. :meth:`call` returns each of
        #: them once, and removes it.
        self._made: dict[tuple[str, ProcessId], DriverAnswer] = {}
        #: If the worker was lost during :meth:`bring_back`: the error that says so.
        self._lost: ChildLost | DriverError | None = None

    @property
    def copy_timeout(self) -> float:
        """Seconds for a call that copies memory."""
        return self._copy_timeout

    def allow_copy(self, size: int) -> None:
        """Set the time-out of a copy: give later calls enough time to copy ``size`` bytes."""
        self._copy_timeout = self._call_timeout + size / SLOWEST_COPY

    def limit_patience(self, seconds: float) -> None:
        """From now on, let :meth:`probe` wait at most ``seconds`` seconds for each answer."""
        self._patience = seconds

    def refusal(self, process: ProcessId, answer: DriverAnswer) -> Refused:
        """Return the error to raise for an answer that is not ``ok``."""
        if answer.outcome == "stopped":
            return Refused("drain", answer.message)
        if answer.outcome == "hung":
            return Refused("hung", answer.message)
        if answer.code == checkpoint.NOT_SUPPORTED:
            return Refused(
                "pinned",
                f"Process {process.pid} uses a CUDA feature that the driver cannot suspend, such "
                f"as managed memory, memory shared with another process, or MPS "
                f"({checkpoint.NOT_SUPPORTED}).",
            )
        return Refused(
            "pinned", f"The driver did not suspend process {process.pid}: {answer.message}"
        )

    async def members(self, *, again: bool = False) -> list[ProcessId]:
        """Return the processes that may have a CUDA context, children first.

        ``again`` says whether this operation has called this method before.
        """
        if self._alone:
            self.pids.add(self._root.pid)
            presence = procfs.presence(self._root)
            if presence != "alive":
                status: SuspendStatus = "gone" if presence == "gone" else "drain"
                raise Refused(status, checkpoint.absent(self._root, presence))
            return [self._root]
        try:
            answer = await self._worker.ask(
                "find",
                self._call_timeout,
                root=_wire(self._root),
                session=self._session,
                again=again,
            )
        except (ChildLost, DriverError) as error:
            text = f"The processes of the session cannot be listed: {error}"
            raise Refused("drain", text) from None
        return [process for process, _ in self._found(answer)]

    def _found(self, answer: Mapping[str, Any]) -> list[tuple[ProcessId, Mapping[str, Any]]]:
        if answer["root"] == "gone":
            raise Refused("gone", checkpoint.absent(self._root, "gone"))
        found = []
        for member in answer["members"]:
            self.pids.add(member["process"]["pid"])
            if member["libcuda"] is False:
                continue
            process = ProcessId(**member["process"])
            if member["presence"] == "stopped":
                raise Refused("drain", checkpoint.absent(process, "stopped"))
            found.append((process, member))
        return found

    async def look(self, known: Sequence[ProcessId] = ()) -> dict[ProcessId, str]:
        """Return the result of :meth:`probe` for each process of :meth:`members`, in that order.

        If all processes in ``known`` are suspended, the result has only these processes. At first
        this method sends the worker one message for all processes. If the worker dies or hangs on
        this message, the method sends one message for each process, to find the process that does
        not answer.
        """
        patience = min(self._patience, self._call_timeout)
        try:
            if not self._alone:
                answer = await self._worker.ask(
                    "look",
                    patience,
                    root=_wire(self._root),
                    session=self._session,
                    known=[_wire(process) for process in known],
                )
                found = self._found(answer)
                return {process: await self._probed(process, member) for process, member in found}
        except (ChildLost, DriverError):
            pass
        return {process: await self.probe(process) for process in await self.members()}

    async def _probed(self, process: ProcessId, member: Mapping[str, Any]) -> str:
        if "state" not in member:  # the process has ended: the worker did not ask the driver
            return await self.probe(process)
        return await self.probe(
            process, thread=self._count(member["thread"]), state=self._count(member["state"])
        )

    async def probe(
        self,
        process: ProcessId,
        *,
        thread: DriverAnswer | None = None,
        state: DriverAnswer | None = None,
    ) -> str:
        """Return the driver's state of a process; "" if the process has no CUDA context.

        ``thread`` and ``state`` are answers that the driver has already given. For an answer that
        is None, this method asks the driver.
        """
        patience = min(self._patience, self._call_timeout)
        answer = thread or await self._query("thread", process, patience)
        if answer.outcome == "gone":
            return ""
        if answer.outcome in ("stopped", "hung"):
            raise Refused("drain", answer.message)
        context = answer.outcome == "ok" and int(answer.value or 0) > 0
        if answer.outcome == "refused" and answer.code not in _NO_CONTEXT:
            raise self.refusal(process, answer)
        answer = state or await self.state(process, patience)
        if answer.value in _COPYING:
            answer = await self.state(process, patience)
        if answer.outcome in ("stopped", "hung"):
            raise Refused("drain", answer.message)
        if answer.outcome == "refused" and context:
            raise self.refusal(process, answer)
        # The driver may report "running" for a process without a context, even if the process has
        # not called cuInit. Assume that the process has called cuInit. This is safe: the session
        # then stays on the devices that the process sees.
        if answer.outcome == "ok":
            self.cuda = True
        elif answer.code != checkpoint.NOT_INITIALIZED:
            self.cuda = self.cuda or None
        if not context and answer.value not in ("locked", "checkpointed", "failed"):
            return ""
        return answer.value

    async def state(self, process: ProcessId, patience: float | None = None) -> DriverAnswer:
        """Wait until the driver copies no memory of the process; return the driver's state.

        During a copy, the driver does not answer, or reports the copy as the state. This method
        waits for at most ``patience`` seconds. None means the time-out of a copy.
        """
        patience = self._copy_timeout if patience is None else patience
        deadline = time.monotonic() + patience
        while True:
            answer = await self._query("state", process, patience)
            if answer.value not in _COPYING:
                return answer
            if time.monotonic() >= deadline:
                return DriverAnswer("hung", message=f"Process {process.pid} stays {answer.value}.")
            await asyncio.sleep(0.05)

    async def _query(self, op: str, process: ProcessId, patience: float) -> DriverAnswer:
        try:
            return self._count(await self._worker.ask(op, patience, process=_wire(process)))
        except (ChildLost, DriverError) as error:
            message = str(error)
        there = procfs.presence(process)
        if there != "alive":  # the process has ended or was stopped meanwhile
            return DriverAnswer(there, message=checkpoint.absent(process, there))
        return DriverAnswer("hung", message=f"Process {process.pid} does not answer: {message}")

    async def bring_back(
        self,
        suspended: Sequence[ProcessId],
        locked: Sequence[ProcessId],
        mapping: Mapping[str, str] | None,
    ) -> None:
        """Restore ``suspended`` and then unlock ``locked``, with one message to the worker.

        The worker stops at the first call that fails. After this method, the caller uses
        :meth:`call` for each step: :meth:`call` returns the worker's answer, or makes the call if
        the worker has given no answer for the step.
        """
        calls = len(suspended) + len(locked)
        timeout = self._copy_timeout + self._call_timeout * (calls - 1)
        try:
            answer = await self._worker.call(
                "bring_back",
                timeout,
                suspended=[_wire(process) for process in suspended],
                locked=[_wire(process) for process in locked],
                mapping=mapping,
            )
        except (ChildLost, DriverError) as error:
            self._lost = error
            return
        for made in answer["answers"]:
            key = made["op"], ProcessId(**made["process"])
            self._made[key] = self._count(made["answer"])

    async def call(self, op: str, process: ProcessId, **fields: Any) -> DriverAnswer:
        """Make a call that changes the process, and return its result.

        If the worker is lost during the call, this method reads the result from the driver's state.
        """
        if (op, process) in self._made:
            return self._made.pop((op, process))
        timeout = self._copy_timeout
        if op == "lock":
            timeout = self.lock_timeout + min(LOCK_GRACE, self._call_timeout)
        before, after = _STATES[op]
        deadline = time.monotonic() + self._call_timeout
        lost = self._lost
        while True:
            if lost is None:
                try:
                    answer = await self._worker.call(op, timeout, process=_wire(process), **fields)
                    return self._count(answer)
                except (ChildLost, DriverError) as error:
                    lost = error
            now = await self._outcome(op, process)
            if now.outcome != "ok":
                return now
            if now.value == after or (op == "restore" and now.value == "running"):
                return DriverAnswer("ok", value=after)
            died = isinstance(lost, ChildLost) and not lost.hung
            again = now.value == before and (died or op == "unlock")
            if not again or time.monotonic() >= deadline:
                return DriverAnswer(
                    "refused", LOST, f"The driver did not answer: {lost}", now.value
                )
            # Repeat the call, because the state shows that the call had no effect. A call of a dead
            # worker cannot take effect later. A call of a hung worker may take effect later, so
            # after a hang only an unlock is safe to repeat.
            lost = None
            await asyncio.sleep(RETRY_PAUSE)

    async def _outcome(self, op: str, process: ProcessId) -> DriverAnswer:
        """Return the state after a call whose worker is lost, as soon as the driver answers.

        The driver may not answer during a copy. This method waits for the end of the copy as long
        as the copy makes progress (``PROGRESS``). The wait may be long, but nothing is lost.
        """
        if op == "lock":
            # The time-out is short: a lock copies nothing, but may wait for GPU work without end.
            return await self.state(process, min(self._patience, LOCK_GRACE))
        least = most = procfs.resident(process)
        while True:
            now = await self.state(process)
            seen = procfs.resident(process)
            # Compare with the highest and lowest values so far, not with the last value. Otherwise
            # a thread that allocates and frees memory again and again would look like a copy, and
            # the operation would wait without end.
            moved = max(*(a - b for a, b in zip(seen, most, strict=True)),
                        *(b - a for a, b in zip(seen, least, strict=True)))  # fmt: skip
            if now.outcome != "hung" or moved < PROGRESS:
                return now
            most = max(most[0], seen[0]), max(most[1], seen[1])
            least = min(least[0], seen[0]), min(least[1], seen[1])

    def _count(self, answer: dict[str, Any]) -> DriverAnswer:
        result = DriverAnswer(**{key: answer[key] for key in DriverAnswer.__slots__})
        self.driver_seconds += result.seconds
        return result


def _wire(process: ProcessId) -> dict[str, int]:
    return {"pid": process.pid, "start_time": process.start_time}
