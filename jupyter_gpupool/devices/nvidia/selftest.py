# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Test whether a device can suspend.

The program ``selftest`` (see ``child_programs``) holds a few MiB of known bytes on one device.
:func:`judge` suspends the program, resumes it and lets it compare the bytes. It does this on the
same device and, if there is a peer of the same model, also on that peer. The pool later makes the
same calls for notebooks, so a pass here means that the calls work for notebooks. ``guard_frame``
runs the same program under the guard, in a :class:`Frame` with more checks. During the test
:class:`Stage` measures the memory of a CUDA context.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, AsyncIterator, Sequence

from ... import procfs
from ...errors import DriverError, GPUPoolError
from ..children import Child, ChildLost
from ..model import DeviceSample
from .child_programs import SIZE
from .operations import Operation
from .sampler import Sampler, others


class Stage:
    """Starts test programs and moves them to other devices, but never both at the same time.

    If NVML does not list processes (in a container), the size of a context is measured as the
    change of free memory at the start of a program. If another program moved to the device during
    the start, the result would be wrong.
    """

    def __init__(self, sampler: Sampler) -> None:
        #: Measured bytes of a context, by device.
        self.found: dict[str, int] = {}
        self._sampler = sampler
        self._changed = asyncio.Condition()
        self._starting = 0
        self._moving = 0

    async def start(self, target: Child, uuid: str, size: int, timeout: float) -> None:
        """Start ``target``, which takes a context and ``size`` bytes; measure the context.

        Raises
        ------
        ChildLost, DriverError
            As from :meth:`Child.start`.
        """
        async with self._alone("_starting", "_moving"):
            before = await self._look(uuid)
            await target.start(timeout)
            after = await self._look(uuid)
        if before is not None and after is not None:
            if target.pid is not None:
                self._sampler.numbers.learn(before, after, target.pid)
            cost = _taken(before, after, target.pid) - size
            if 0 < cost <= after.total // 2:  # otherwise another process changed the free memory
                self.found[uuid] = cost

    @contextlib.asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        """Let a program move to another device in the ``with`` block; every :meth:`start` waits."""
        async with self._alone("_moving", "_starting"):
            yield

    @contextlib.asynccontextmanager
    async def _alone(self, mine: str, others: str) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: getattr(self, others) == 0)
            setattr(self, mine, getattr(self, mine) + 1)
        try:
            yield
        finally:
            async with self._changed:
                setattr(self, mine, getattr(self, mine) - 1)
                self._changed.notify_all()

    async def _look(self, uuid: str) -> DeviceSample | None:
        with contextlib.suppress(DriverError):  # the test itself reports NVML's problem
            (sample,) = await self._sampler.sample([uuid])
            return sample
        return None


def _taken(before: DeviceSample, after: DeviceSample, pid: int | None) -> int:
    """Return how many bytes process ``pid`` has taken on the device between the two samples.

    NVML's list may show fewer bytes than the process has. If no other process on the device has
    changed, the change of free memory shows all bytes of the process.
    """
    taken = before.free - after.free
    for process in after.processes:
        if process.pid == pid and process.bytes:
            alone = others(before, {pid}) == others(after, {pid})
            return max(process.bytes, taken) if alone else process.bytes
    return taken


#: Time-out in seconds for one step of the test program, such as the copy of a few MiB.
STEP_TIMEOUT = 30.0

SESSION = "gpupool-selftest"


@dataclass(frozen=True, slots=True)
class Abilities:
    """The proven abilities of a device; ``reason`` names the failed step, in a sentence.

    If ``tested`` is False, the device had no room for the test, and nothing is proven. In this case
    the pool still suspends sessions if the driver has the calls, because a refused suspend can be
    undone. But the pool moves no process to another device, because a failed restore is fatal.
    """

    can_suspend: bool
    can_migrate: bool
    reason: str = ""
    tested: bool = True


class _NoRoom(Exception):
    """Another process has taken the memory that the test needs."""


def _no_memory(error: Exception) -> str:
    return f"There was too little free memory for the self-test: {error}"


class Frame:
    """Additional steps of a test, around each suspend and resume. This base class has none."""

    session = SESSION

    def failed(self, problem: str) -> str:
        """Return the sentence for a failure."""
        return f"The self-test failed: {problem}"

    async def begun(self, target: Child) -> str:  # noqa: ARG002 (for those that look)
        """Check the program after it has allocated its memory; return the problem, or ""."""
        return ""

    async def hold(self, target: Child) -> str:  # noqa: ARG002 (as above)
        """Prepare the program for its suspend; return why this failed, or ""."""
        return ""

    async def check(self, target: Child, device: str) -> bool:  # noqa: ARG002 (as above)
        """Return whether the program, resumed on ``device``, has the right bytes."""
        return bool((await target.call("check", STEP_TIMEOUT))["same"])


async def judge(
    target: Child,
    operation: Any,
    uuid: str,
    peer: str | None,
    everything: Sequence[str],
    *,
    frame: Frame,
    stage: Stage,
    retire: bool = False,
) -> Abilities:
    """Test device ``uuid`` with the program ``target``.

    ``operation(root)`` makes an :class:`Operation` on the process ``root``. If ``retire`` is True,
    the function suspends the program again before it ends the program, because some drivers hang
    when a restored process ends.
    """
    where = ""
    process = None
    try:
        await stage.start(target, uuid, SIZE, STEP_TIMEOUT)
        process = None if target.pid is None else procfs.identify(target.pid)
        if process is None:
            return Abilities(
                False, False, frame.failed("the test program ended while it was starting")
            )

        async def there_and_back(destination: str) -> str:
            problem = await frame.hold(target)
            if problem:
                return problem
            first: Operation = operation(process)
            suspended = await first.suspend([uuid])
            if suspended.status != "suspended":
                return f"suspending a test process failed: {suspended.message or suspended.status}"
            second: Operation = operation(process)
            need = {destination: suspended.freed.get(uuid, 0)}
            resumed = await second.resume([destination], [uuid], need, everything)
            if resumed.status == "no-room":
                raise _NoRoom(resumed.message)
            nonlocal where
            where = destination
            if resumed.status != "resumed":
                return f"resuming a test process failed: {resumed.message or resumed.status}"
            if not await frame.check(target, destination):
                return "a resumed test process had lost the contents of its memory"
            return ""

        problem = await frame.begun(target) or await there_and_back(uuid)
        if problem:
            return Abilities(False, False, frame.failed(problem))
        if peer is None:
            return Abilities(True, False)
        async with stage.moving():
            try:
                problem = await there_and_back(peer)
            except _NoRoom as error:
                # The test did not try to move the program: without room, the attempt would take at
                # least the driver's whole time-out.
                why = f"Another GPU had too little free memory for the self-test: {error}"
                return Abilities(True, False, why)
            if problem:
                return Abilities(True, False, f"The self-test on another device failed: {problem}")
            return Abilities(True, True)
    except _NoRoom as error:
        return Abilities(True, False, _no_memory(error), tested=False)
    except (ChildLost, GPUPoolError, OSError) as error:
        if "CUDA_ERROR_OUT_OF_MEMORY" in str(error):
            return Abilities(True, False, _no_memory(error), tested=False)
        return Abilities(False, False, frame.failed(f"the test did not finish: {error}"))
    finally:
        if retire and where and process is not None:
            with contextlib.suppress(ChildLost, GPUPoolError, OSError):
                await operation(process).suspend([where])
        await target.close()
