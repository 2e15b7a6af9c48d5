# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Can this device suspend? Ask it: ``child.py MODULE <parent> <UUID>``.

The program holds a few MiB of known bytes on one device. :func:`judge` suspends it, resumes it
and has the bytes compared, in place and, where there is a peer of the same model, on that peer.
The calls are those that notebooks get later, so that what passes here works there. The same
program runs under the guard in ``guarded``, in a :class:`Frame` that asks more of it.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any, Sequence

from ... import procfs
from ...errors import GPUPoolError
from ..children import Child, ChildLost
from .contexts import Stage
from .operations import Operation
from .programs import SIZE

#: Seconds for one step of the test program: it makes a context and copies a few MiB.
STEP_TIMEOUT = 30.0

SESSION = "gpupool-selftest"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a device proved able to do; ``reason`` says what it failed at, in a sentence.

    Not ``tested``: the device had no room for the test, which proves nothing. A driver that has
    the calls is then trusted to suspend, because a suspend that it refuses is undone; it is not
    trusted to move a process to another device, because a restore that fails is fatal.
    """

    can_suspend: bool
    can_migrate: bool
    reason: str = ""
    tested: bool = True


class _NoRoom(Exception):
    """Somebody else took the memory."""


class Frame:
    """What is done around each suspend and resume of the test program; here: nothing."""

    session = SESSION

    def failed(self, problem: str) -> str:
        """Return the sentence for a failure."""
        return f"The self-test failed: {problem}"

    async def begun(self, target: Child) -> str:  # noqa: ARG002 (for those that look)
        """Look at the program that has its memory now; return what is wrong."""
        return ""

    async def hold(self, target: Child) -> str:  # noqa: ARG002 (as above)
        """Prepare the program to be suspended; return why it is not."""
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
) -> Verdict:
    """Put ``target`` (this program, on device ``uuid``) through it.

    ``operation(root)`` makes an :class:`Operation` on the process ``root``. With ``retire`` the
    program is suspended again before it is ended: some drivers hang when a restored process ends.
    """
    where = ""
    process = None
    try:
        await stage.start(target, uuid, SIZE, STEP_TIMEOUT)
        process = None if target.pid is None else procfs.identify(target.pid)
        if process is None:
            return Verdict(False, False, frame.failed("the test program ended as it started"))

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
            return Verdict(False, False, frame.failed(problem))
        if peer is None:
            return Verdict(True, False)
        async with stage.moving():
            try:
                problem = await there_and_back(peer)
            except _NoRoom as error:
                # It was not tried: without room it would cost the driver's patience, at the least.
                return Verdict(True, False, f"The self-test had no room on another GPU: {error}")
            if problem:
                return Verdict(True, False, f"The self-test on another device failed: {problem}")
            return Verdict(True, True)
    except _NoRoom as error:
        return Verdict(True, False, f"The self-test had no room: {error}", tested=False)
    except (ChildLost, GPUPoolError, OSError) as error:
        if "CUDA_ERROR_OUT_OF_MEMORY" in str(error):
            return Verdict(True, False, f"The self-test had no room: {error}", tested=False)
        return Verdict(False, False, frame.failed(f"it did not run: {error}"))
    finally:
        if retire and where and process is not None:
            with contextlib.suppress(ChildLost, GPUPoolError, OSError):
                await operation(process).suspend([where])
        await target.close()
