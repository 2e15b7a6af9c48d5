# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Resumes of a process after another process has taken the device's memory.

According to reports, a driver loses a process permanently if it restores the process without enough
free memory. So the service first checks the free memory. The last test makes the driver try a
restore without room.
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
    """Let a process allocate ``part`` of the device; return the size and the bytes with known data.

    On an emulated device, at most 64 MiB have data. The rest costs no host memory.
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
    """Yield a suspended process, the outcome of its suspend, and its bytes with known data."""
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
    """A resume works if another process leaves free what the pool reserves for the resume.

    The pool reserves the bytes that the suspend has freed, and in most cases ``resume_headroom``.
    It reserves no headroom for a session that fills its slice. If this test fails, the pool
    reserves too little, and a resume in the pool would be fatal for the process.
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
            # Only now has the other process ended. The load of a kernel needs memory, too.
            await process.do("steps", "x", 1, 9)
            await still_right(process, known, 9)
        await found.empty(process, other)


async def test_restore_without_room_fails_and_leaves_no_memory_in_use(machine, note):
    """After a restore without room, the service must not report the process as resumed.

    The service assumes that the driver has lost the process permanently. The test notes whether a
    later resume with room works. If it works on real drivers, the service could try again. After
    the end of the process, no device memory may remain in use.
    """
    async with bench(machine) as found:
        async with suspended(found, 0.4, machine.bytes(8 * GiB)) as (process, there, known):
            async with target("cuda-core", found.env) as other:
                await found.leave(other, there.freed[found.uuid] // 2)
                # Without ``need``, the service does not check the free memory, and the driver tries
                # the restore.
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
