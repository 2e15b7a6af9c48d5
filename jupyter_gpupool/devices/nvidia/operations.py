# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume of a whole session: all of its CUDA processes or none.

A suspend first locks all processes, then checkpoints all processes (children first). If a lock
times out, the suspend has not copied the memory of any process yet, so no process waits for a
suspended process. After any refusal, the suspend undoes all of its steps.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any, Collection, Mapping, Sequence

from ... import procfs
from ...errors import DriverError
from ...procfs import ProcessId
from ...units import format_bytes
from ..model import (
    DeviceSample,
    ResumeOutcome,
    ResumeStatus,
    SessionState,
    SuspendOutcome,
    SuspendStatus,
    assumed_context,
)
from . import checkpoint
from .calls import LOST, PATIENCE, Refused, SessionCalls
from .checkpoint import DriverAnswer, complete_mapping
from .sampler import Sampler, others

#: Maximum number of rounds in which a suspend searches for processes and locks them. A session may
#: start new processes during a round.
_LOOKS = 3

#: If a program outside the pool has taken memory that an undo needs, the undo waits at most this
#: many seconds for the memory.
ROOM_WAIT = 5.0

#: If the worker dies while it locks a process, the process is checked again and again. These are
#: the number of checks, the first and the longest pause between two checks, and the time-out of a
#: check (in seconds). All pauses together take most of an hour. The time-out is long, because the
#: driver may not answer before the GPU work of the process has ended.
_LATE_LOOKS, _LATE_POLL, _LATE_PAUSE, _LATE_PATIENCE = 60, 1.0, 60.0, 3600.0

#: An error code of this module, not of the driver: a restore has no room, but the state is intact.
_NO_ROOM = "NO_ROOM"

#: Error codes of a restore on another device that mean: the driver cannot move the process there.
#: The driver would refuse a retry on that other device, too.
_NOT_MOVED = {checkpoint.NOT_SUPPORTED, checkpoint.INVALID_VALUE}

_WORST: tuple[SessionState, ...] = ("hung", "failed", "checkpointed", "locked", "running")


class Operation:
    """One operation on the session of process ``root``."""

    def __init__(
        self,
        calls: SessionCalls,
        sampler: Sampler,
        root: ProcessId,
        first: Operation | None = None,
    ) -> None:
        self._calls = calls
        self._sampler = sampler
        self._root = root
        self._begin = time.perf_counter()
        #: Processes that this operation has locked or suspended, or may have locked, in the order
        #: of the calls.
        self.touched: list[ProcessId] = []
        #: For each process: how many bytes must be free on each device before the undo restores
        #: the process.
        self._need: dict[ProcessId, dict[str, int]] = {}
        #: Processes that do not run again after the operation, because they are stopped (SIGSTOP).
        self.unsettled: list[ProcessId] = [] if first is None else first.unsettled
        #: Processes that the driver may still lock, because the lock call has no answer yet.
        self.late: list[ProcessId] = [] if first is None else first.late
        #: Processes that are still suspended after a refused suspend, because the undo could not
        #: resume them. They are in the order of their suspend. ``kept_why`` is the reason, and
        #: ``kept_with_room`` says whether the driver refused although there was room.
        self.kept: list[ProcessId] = []
        self.kept_why = ""
        self.kept_with_room = False
        #: The outcome that a refused suspend has when all of its processes run again.
        self.refused: SuspendOutcome | None = None
        if first is not None:
            self.follow(first)

    @property
    def root(self) -> ProcessId:
        """The session's first process."""
        return self._root

    @property
    def driver_seconds(self) -> float:
        """Seconds spent inside driver calls so far."""
        return self._calls.driver_seconds

    def again(self) -> Operation:
        """Return a new operation on the same processes; both share ``unsettled`` and ``late``."""
        return Operation(self._calls, self._sampler, self._root, first=self)

    def follow(self, earlier: Operation) -> None:
        """Let an undo need as much free memory for each process as an undo of ``earlier``."""
        for process, need in earlier._need.items():
            self.require(process, need)

    def hurry(self) -> None:
        """From now on, wait only PATIENCE seconds for the driver's answer to a query."""
        self._calls.limit_patience(PATIENCE)

    def inherit(self, left: Operation) -> None:
        """Take over the processes that an earlier operation left stopped or perhaps locked."""
        self.unsettled.extend(p for p in left.unsettled if p not in self.unsettled)
        self.late.extend(p for p in left.late if p not in self.late)
        self.follow(left)

    def require(self, process: ProcessId, need: Mapping[str, int]) -> None:
        """From now on, let an undo restore ``process`` only if ``need`` bytes are free.

        ``need`` has a number for each device. Of several numbers, the largest counts.
        """
        known = self._need.setdefault(process, {})
        for uuid, size in need.items():
            known[uuid] = max(size, known.get(uuid, 0))

    # ------------------------------------------------------------------ suspend

    async def suspend(self, devices: Sequence[str]) -> SuspendOutcome:
        """Suspend the session. See :class:`SuspendOutcome`."""
        self.hurry()
        try:
            targets, adopted = await self._lock_all()
            # Take the sample after the locks, so that it contains the memory that a process takes
            # before its lock. A resume that reserves too little memory is fatal.
            before = await self._sampler.sample_soon(devices)
            for process in targets:
                had = {s.uuid: sum(p.bytes or 0 for p in s.processes if p.pid == process.pid)
                       for s in before}  # fmt: skip
                self.require(process, had)
            self._calls.allow_copy(sum(sample.used for sample in before))
            if not targets:
                self._nothing_held(before)
                return self._suspended("nothing", "")
            targets = [process for process in targets if await self._checkpoint(process)]
        except Refused as refused:
            return await self._give_up(refused)
        except DriverError as error:
            return await self._give_up(Refused("drain", f"The pool stopped this suspend. {error}"))
        if procfs.ending(self._root):
            return self._suspended("gone", checkpoint.absent(self._root, "gone"), targets)
        if not targets:  # the locked processes have ended, or have no context any more
            return self._suspended("nothing", "")
        return await self._verify(targets, adopted, before)

    async def _lock_all(self) -> tuple[list[ProcessId], bool]:
        """Lock all CUDA processes of the session; return them, children first.

        Also return whether one of them was already suspended. A session may start a process during
        the locks, so this method repeats its search until it finds no new process.
        """
        targets: list[ProcessId] = []
        adopted = False
        listing: list[ProcessId] = []
        seen: set[ProcessId] = set()
        for _ in range(_LOOKS):
            listing = await self._calls.members(again=bool(seen))
            found = [process for process in listing if process not in seen]
            if not found:
                break
            for process in found:
                seen.add(process)
                state = await self._calls.probe(process)
                if state == "running" and not await self._lock(process):
                    continue
                if state == "failed":
                    lost = f"The driver has lost the state of process {process.pid}."
                    raise Refused("failed", lost)
                if state:
                    targets.append(process)
                    # An earlier broker may have locked the process. An undo must also unlock such
                    # a process.
                    if process not in self.touched:
                        self.touched.append(process)
                    adopted |= state == "checkpointed"
        # Use the order of the last search: a process that only a later search has found may be a
        # child of a process that the first search has found.
        order = {process: place for place, process in enumerate(listing)}
        return sorted(targets, key=lambda process: order.get(process, -1)), adopted

    async def _lock(self, process: ProcessId) -> bool:
        """Lock a process; return False if the process has no context any more."""
        self.touched.append(process)
        answer = await self._calls.call("lock", process, drain=self._calls.lock_timeout)
        if answer.outcome == "ok":
            return True
        if _over(answer):
            self.touched.remove(process)
            return False
        if answer.code == LOST or answer.outcome == "hung":
            self.late.append(process)
            raise Refused("drain", f"Process {process.pid} was not suspended. {answer.message}")
        # If the driver refuses only at the end of the time-out, the work took too long, whatever
        # the error code is.
        late = answer.outcome == "refused" and answer.seconds >= self._calls.lock_timeout
        if answer.code == checkpoint.NOT_READY or late:
            raise Refused(
                "drain",
                f"The GPU work of process {process.pid} did not finish in "
                f"{self._calls.lock_timeout:g} s, so the process was not suspended.",
            )
        raise self._calls.refusal(process, answer)

    async def _checkpoint(self, process: ProcessId) -> bool:
        """Suspend a locked process, if it is not suspended yet; return False if it has ended."""
        answer = await self._calls.state(process)
        if answer.outcome == "ok" and answer.value != "checkpointed":
            answer = await self._copy("checkpoint", process)
        if _over(answer):
            return False
        if answer.outcome != "ok":
            raise self._calls.refusal(process, answer)
        return True

    async def _copy(self, op: str, process: ProcessId, **fields: Any) -> DriverAnswer:
        with self._sampler.copying(self._calls.copy_timeout):
            return await self._calls.call(op, process, **fields)

    async def late_locks(self, late: Collection[ProcessId]) -> list[ProcessId]:
        """Wait until lock calls whose worker was lost take effect.

        After ``_LATE_LOOKS`` checks of a process, this method stops waiting for the process. Return
        the processes in ``late`` that the driver has locked.
        """
        found = []
        for process in late:
            for look in range(_LATE_LOOKS):
                answer = await self._calls.state(process, _LATE_PATIENCE)
                if answer.value != "running":
                    break
                await asyncio.sleep(min(_LATE_POLL * 1.2**look, _LATE_PAUSE))
            if answer.value == "locked":
                found.append(process)
        return found

    async def _give_up(self, refused: Refused) -> SuspendOutcome:
        trouble = await self.undo(self.touched)
        if procfs.ending(self._root):
            # Processes that are still suspended must end, too.
            return self._suspended("gone", checkpoint.absent(self._root, "gone"), self.kept)
        if trouble:
            return self._suspended(trouble[0], f"{refused.message} {trouble[1]}")
        # "hung" means that the state of a process could not be read. The undo has now read the
        # states of all processes, so the session is not lost, and the suspend can be retried.
        status = "drain" if refused.status == "hung" else refused.status
        return self.keep(self._suspended(status, refused.message))

    async def bring_back(self, earlier: Operation) -> SuspendOutcome:
        """Try again to resume the processes that ``earlier`` left suspended, if there is room."""
        assert earlier.refused is not None
        self.follow(earlier)
        self.refused = earlier.refused
        trouble = await self.undo(earlier.kept, patience=0.0)
        if procfs.ending(self._root):
            return self._suspended("gone", checkpoint.absent(self._root, "gone"), self.kept)
        if trouble:
            return self._suspended(trouble[0], trouble[1])
        if self.kept:
            return replace(self.refused, status="kept", message=self.kept_why)
        return self.refused

    async def undo(
        self, touched: Collection[ProcessId], *, patience: float = ROOM_WAIT
    ) -> tuple[SuspendStatus, str] | None:
        """Make processes run again, parents first; return the problem, or None.

        If a process cannot be restored now, but its state is intact, this is not a problem: the
        process stays suspended, and this method adds it to :attr:`kept`.
        """
        trouble: tuple[SuspendStatus, str] | None = None
        for process in reversed([*touched]):
            if process in self.late:
                continue  # the process still runs, or ``Workers`` unlocks it later
            answer = await self._calls.state(process)
            if answer.value == "checkpointed":
                answer = await self._back(process, patience)
                if answer.value == "checkpointed" and answer.outcome == "refused":
                    self.kept.insert(0, process)
                    self.kept_with_room |= answer.code != _NO_ROOM
                    self.kept_why = (
                        f"Process {process.pid} is not back on its GPU yet ({answer.message}); "
                        "the driver still has the state of the process, and the pool tries again."
                    )
                    continue
            if answer.value == "locked":
                answer = await self._calls.call("unlock", process)
                if answer.outcome == "ok":
                    answer = await self._calls.state(process)
            if _over(answer) or answer.value == "running":
                continue
            if answer.outcome == "stopped":
                self.unsettled.append(process)
                continue
            status: SuspendStatus = "hung" if answer.outcome == "hung" else "failed"
            what = answer.message or f"the driver reports the state {answer.value!r}"
            trouble = status, f"Process {process.pid} could not be brought back: {what}"
        return trouble

    async def _back(self, process: ProcessId, patience: float) -> DriverAnswer:
        """Restore a process on its old devices; retry for ``patience`` seconds.

        The method retries only if the driver still has the process's state. Without room for the
        process's memory, a restore is fatal. So without room the method does not try a restore, and
        the process stays suspended.
        """
        deadline = time.monotonic() + patience
        while True:
            problem = await self._wait_for_room(process, deadline)
            if problem:
                return DriverAnswer("refused", _NO_ROOM, problem, "checkpointed")
            answer = await self._copy("restore", process, mapping=None)
            if answer.outcome == "ok":
                return replace(answer, value="locked")
            if answer.outcome == "refused" and answer.code != LOST:
                answer = replace(answer, value=(await self._calls.state(process)).value)
            if answer.value != "checkpointed" or time.monotonic() >= deadline:
                return answer
            await asyncio.sleep(0.1)

    async def _wait_for_room(self, process: ProcessId, deadline: float) -> str:
        """Wait until as much memory is free as the process needs, but at most until ``deadline``.

        Return "", or why the memory is not free. A program outside the pool must have taken it,
        because the session still has the lease.
        """
        need = self._need.get(process, {})
        while (problem := await self._no_room(need)) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        return problem

    def _nothing_held(self, before: Sequence[DeviceSample]) -> None:
        """Raise Refused if NVML shows memory of the session: "nothing" would then be wrong."""
        for sample in before:
            for process in sample.processes:
                if process.pid in self._calls.pids and process.bytes != 0:
                    raise Refused(
                        "pinned",
                        f"Process {process.pid} has memory on {sample.uuid}, but the driver "
                        "offers no way to suspend this process.",
                    )

    async def _verify(
        self, targets: Sequence[ProcessId], adopted: bool, before: Sequence[DeviceSample]
    ) -> SuspendOutcome:
        """Check that the memory of ``targets`` is free, and count it; return the outcome."""
        if adopted:
            return self._suspended("suspended", "", targets)
        pids = {process.pid for process in targets}
        try:
            after, free = await self._sampler.wait_freed(pids, before)
        except DriverError as error:
            message = f"The pool could not verify that the memory is free. {error}"
            return self._suspended("suspended", message, targets, freed_bytes(before, None, pids))
        message = ""
        if not free:
            message = f"NVML still shows the memory of {sorted(pids)} after the suspend."
        return self._suspended("suspended", message, targets, freed_bytes(before, after, pids))

    def keep(self, outcome: SuspendOutcome) -> SuspendOutcome:
        """After an undo: return ``outcome``, or ``kept`` if a process is still suspended."""
        if not self.kept:
            return outcome
        self.refused = outcome
        return replace(outcome, status="kept", message=f"{outcome.message} {self.kept_why}")

    def _suspended(
        self,
        status: SuspendStatus,
        message: str,
        targets: Sequence[ProcessId] = (),
        freed: Mapping[str, int] | None = None,
    ) -> SuspendOutcome:
        return SuspendOutcome(
            status=status,
            message=message,
            freed=dict(freed or {}),
            cuda=self._calls.cuda,
            seconds=time.perf_counter() - self._begin,
            driver_seconds=self._calls.driver_seconds,
            processes=tuple(targets),
        )

    # ------------------------------------------------------------------ resume

    async def resume(
        self,
        devices: Sequence[str],
        origin: Sequence[str],
        need: Mapping[str, int],
        everything: Sequence[str],
        known: Sequence[ProcessId] = (),
    ) -> ResumeOutcome:
        """Resume the session on ``devices``. See :class:`ResumeOutcome`.

        ``known`` are the session's suspended processes. It is empty if the broker does not know
        them.
        """
        mapping = complete_mapping((*origin,), (*devices,), (*everything,))
        self._calls.allow_copy(sum(need.values()))
        self.hurry()
        # Ask the worker and the monitor at the same time. The free memory does not change during
        # the questions, because the broker has reserved it for this session.
        found, problem = await asyncio.gather(self._look(known), self._no_room(need))
        if isinstance(found, Refused):
            if found.status == "gone":
                return self._resumed("gone", found.message)
            return self._resumed("no-room", found.message)
        states = dict(reversed(found.items()))  # parents first
        lost = [process.pid for process, state in states.items() if state == "failed"]
        if lost:
            return self._resumed("failed", f"The driver has lost the state of process {lost[0]}.")
        suspended = [process for process, state in states.items() if state == "checkpointed"]
        if suspended and problem:
            return self._resumed("no-room", problem)
        held = [p for p, state in states.items() if state in ("checkpointed", "locked")]
        if held:
            with self._sampler.copying(self._calls.copy_timeout):
                await self._calls.bring_back(suspended, held, mapping)
        for process in suspended:
            answer = await self._copy("restore", process, mapping=mapping)
            if _over(answer):
                continue
            if answer.outcome == "refused" and answer.code != LOST:
                # Ask the driver for the process's state: not every refusal is a loss.
                now = await self._calls.state(process)
                answer = replace(answer, value=now.value)
            if answer.outcome != "ok" and not (answer.code != LOST and answer.value == "locked"):
                return await self._not_restored(process, answer, moves=mapping is not None)
            self.touched.append(process)
        for process in held:
            answer = await self._calls.call("unlock", process)
            if answer.outcome == "stopped":
                # The process's memory is back, but the driver cannot unlock the process while it is
                # stopped.
                self.unsettled.append(process)
            elif answer.outcome != "ok" and not _over(answer):
                return self._resumed(
                    "hung" if answer.outcome == "hung" else "failed",
                    f"Process {process.pid} was restored but not unlocked: {answer.message}",
                )
        if procfs.ending(self._root):
            return self._resumed("gone", checkpoint.absent(self._root, "gone"))
        return self._resumed("resumed", "")

    async def _look(self, known: Sequence[ProcessId]) -> dict[ProcessId, str] | Refused:
        try:
            return await self._calls.look(known)
        except Refused as refused:
            return refused

    async def _no_room(self, need: Mapping[str, int]) -> str:
        """Return why a restore has no room now; "" if it has room.

        The caller must know this, because a restore without room is fatal.
        """
        try:
            samples = await self._sampler.sample([*need])
        except DriverError as error:
            return str(error)
        for sample in samples:
            if sample.lost:
                return f"Device {sample.uuid} is lost: {sample.lost}"
            if sample.free < need[sample.uuid]:
                return (
                    f"Device {sample.uuid} has {format_bytes(sample.free, rounding='down')} free, "
                    f"and the session needs {format_bytes(need[sample.uuid], rounding='up')}."
                )
        return ""

    async def _not_restored(
        self, process: ProcessId, answer: DriverAnswer, *, moves: bool
    ) -> ResumeOutcome:
        """Suspend the restored processes again, because ``process`` was not restored.

        Return the outcome for the whole session.
        """
        untouched = answer.outcome == "stopped" or answer.value == "checkpointed"
        if untouched:
            for restored in self.touched:
                again = await self._copy("checkpoint", restored)
                untouched &= again.outcome == "ok" or _over(again)
        if untouched and (answer.outcome == "stopped" or answer.code == LOST):
            return self._resumed("no-room", f"Nothing was resumed. {answer.message}")
        if untouched and moves and answer.code in _NOT_MOVED:
            text = (
                f"The driver did not move process {process.pid} to another GPU "
                f"({answer.code}); the pool resumes the process on its old GPU."
            )
            return replace(self._resumed("refused", text), stay=True)
        if untouched:
            return self._resumed(
                "refused",
                f"The driver did not resume process {process.pid}: {answer.message}",
            )
        return self._resumed(
            "hung" if answer.outcome == "hung" else "failed",
            f"The driver could not restore process {process.pid}: {answer.message}",
        )

    def _resumed(self, status: ResumeStatus, message: str) -> ResumeOutcome:
        seconds = time.perf_counter() - self._begin
        return ResumeOutcome(status, message, seconds, self._calls.driver_seconds)

    # ------------------------------------------------------------------ state

    async def state(self) -> SessionState:
        """Return the worst state of the session's processes."""
        try:
            states = [await self._calls.probe(process) for process in await self._calls.members()]
        except Refused as refused:
            if refused.status == "pinned":
                return "running"  # the driver cannot suspend this session, so the session runs
            return "gone" if refused.status == "gone" else "hung"
        return next((state for state in _WORST if state in states), "none")

    async def unlock(self) -> None:
        """Unlock every locked process of the session."""
        try:
            for process in await self._calls.members():
                if await self._calls.probe(process) == "locked":
                    answer = await self._calls.call("unlock", process)
                    if answer.outcome != "ok" and not _over(answer):
                        raise DriverError(
                            f"Process {process.pid} could not be unlocked: {answer.message}"
                        )
        except Refused as refused:
            if refused.status != "gone":
                raise DriverError(refused.message) from None


def _over(answer: DriverAnswer) -> bool:
    """Return whether the answer shows that a process has no context any more.

    The process has ended, or has executed another program.
    """
    return answer.outcome == "gone" or answer.code == checkpoint.NOT_INITIALIZED


def freed_bytes(
    before: Sequence[DeviceSample], after: Sequence[DeviceSample] | None, pids: Collection[int]
) -> dict[str, int]:
    """Return how many bytes ``pids`` have given back, by device; {} if this is unknown.

    - If NVML's lists do not show all of ``pids``, the result is the increase of free memory.
    - If the lists show all of ``pids``, the result is their memory in the lists. This number does
      not depend on other processes. But it may lack a part of a process, such as its context, and a
      resume that reserves too little memory is fatal. So the result is the increase of free memory
      if this is larger, and if the other processes on the device have not changed. But the result
      exceeds the number in the list by at most the size of one context per process.
    """
    known = {p.pid for s in before for p in s.processes if p.bytes is not None}
    if not set(pids) <= known:
        if after is None:
            return {}
        return {b.uuid: max(0, a.free - b.free) for b, a in zip(before, after, strict=True)}
    found = {s.uuid: sum(p.bytes or 0 for p in s.processes if p.pid in pids) for s in before}
    for old, new in zip(before, after or (), strict=False):
        if others(old, pids) == others(new, pids) and found[old.uuid]:
            most = found[old.uuid] + len(pids) * assumed_context(old.total)
            found[old.uuid] = max(found[old.uuid], min(new.free - old.free, most))
    return found
