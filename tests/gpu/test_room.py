# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Resumes after another process has taken the memory.

According to reports, a restore without enough free memory loses the process permanently. So the
service first checks for room. The last test makes the driver try a restore without room.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from jupyter_gpupool.devices.model import SuspendOutcome
from jupyter_gpupool.pool.model import PoolSettings

from .device import SETTLED, Bench, bench, bytes_of, share, speeds
from .machine import GiB, MiB
from .target import Target, target
from .workloads import expected_fingerprint

FIRST = 5


async def fill(found: Bench, process: Target, part: float, cap: int) -> tuple[int, int]:
    """Give a process this part of the device; return its size and the number of known bytes.

    On an emulated device, nothing touches most of this memory, so it costs nothing.
    """
    size = share(found.device, part, cap=cap)
    known = size if found.machine.real else min(size, 64 * MiB)
    await process.do("put", "x", known, FIRST)
    if size > known:
        await process.do("take", size - known)
    return size, known


@asynccontextmanager
async def suspended(
    found: Bench, part: float = 0.4, cap: int = 24 * GiB
) -> AsyncIterator[tuple[Target, SuspendOutcome, int]]:
    """Yield a suspended process, the outcome of its suspend, and its number of known bytes."""
    async with target("cuda-core", found.env) as process:
        _, known = await fill(found, process, part, cap)
        there = await found.suspend(process)
        assert there.status == "suspended", there
        await found.empty(process)
        yield process, there, known


async def still_right(process: Target, known: int, steps: int = 0) -> None:
    assert await process.do("fingerprint", "x") == expected_fingerprint(known, FIRST, steps)


async def test_resume_without_room_leaves_the_state_in_host_memory(machine, note):
    async with bench(machine) as found:
        async with suspended(found) as (process, there, known):
            need = there.freed[found.uuid]
            note(freed_mib=need >> 20, suspend=speeds(there))
            async with target("cuda-core", found.env) as other:
                await found.leave(other, need // 2)
                for _ in range(3):
                    back = await asyncio.wait_for(found.resume(process, there), SETTLED)
                    assert back.status == "no-room", back
                    assert "free, and the session needs" in back.message
                    assert await found.state(process) == "checkpointed"
                note(no_room=speeds(back))
            await found.empty(other)
            back = await found.resume(process, there)
            note(resume=speeds(back))
            assert back.status == "resumed", back
            await process.do("steps", "x", 1, 9)
            await still_right(process, known, 9)
        await found.empty(process)


@pytest.mark.parametrize("headroom", [PoolSettings().resume_headroom, 0])
async def test_resume_fits_in_the_memory_that_its_suspend_freed(machine, headroom, note):
    """For a resume, the bytes that the suspend freed are enough. Another process may have all other
    memory.

    The pool also reserves some headroom, unless a session fills its whole slice. If this test
    fails, the pool reserves too little headroom. This would be fatal for the process.
    """
    async with bench(machine) as found:
        async with suspended(found, 0.25, machine.bytes(4 * GiB)) as (process, there, known):
            need = there.freed[found.uuid]
            async with target("cuda-core", found.env) as other:
                free = await found.leave(other, need + headroom)
                back = await asyncio.wait_for(found.resume(process), 60.0)
                note(
                    freed_mib=need >> 20,
                    free_mib=free >> 20,
                    status=back.status,
                    message=back.message,
                    resume=speeds(back),
                    left_mib=(await found.sample()).free >> 20,
                    driver=await found.ask("state", process.root),
                )
                assert back.status == "resumed", (
                    f"Of {free / MiB:.1f} MiB free, where {need / MiB:.1f} MiB had been freed, "
                    f"a resume was {back.status}: {back.message}"
                )
            # This step comes last because loading a kernel takes memory, too.
            await process.do("steps", "x", 1, 9)
            await still_right(process, known, 9)
        await found.empty(process, other)


async def test_restore_without_room_fails_and_leaves_no_memory_in_use(machine, note):
    """The design assumes that the driver loses the process permanently.

    If this test shows that a later resume works, the service may try again. The service must never
    report a lost process as resumed. A process that has ended must leave no memory in use.
    """
    async with bench(machine) as found:
        async with suspended(found, 0.4, machine.bytes(8 * GiB)) as (process, there, known):
            async with target("cuda-core", found.env) as other:
                await found.leave(other, there.freed[found.uuid] // 2)
                # The request does not say how many bytes the resume needs, so the service tries
                # the resume.
                back = await asyncio.wait_for(found.resume(process), 60.0)
                note(
                    status=back.status,
                    message=back.message,
                    resume=speeds(back),
                    driver=await found.ask("state", process.root),
                    other=await other.do("info"),
                    host_mib=bytes_of(process.pid) >> 20,
                )
                assert back.status != "resumed", back
            held = await found.held(process)
            note(keeps_mib=None if held is None else held >> 20)
            # Now the device has room.
            again = await asyncio.wait_for(found.resume(process), 60.0)
            state = await asyncio.wait_for(found.state(process), SETTLED)
            note(again=again.status, again_message=again.message, state=state)
            note(permanent=again.status != "resumed")
            if again.status == "resumed":
                await still_right(process, known)
            else:
                assert back.status != "no-room", "it was said to be safe, and is not"
                assert again.status != "no-room", "it is reported safe for good, and is not"
                assert state != "running", "it is reported running, and has not got its memory"
        await found.empty(process, other)
        async with target("cuda-core", found.env) as new:
            await new.do("put", "x", 64 * MiB, FIRST)
            await found.there_and_back(new)
            await still_right(new, 64 * MiB)
