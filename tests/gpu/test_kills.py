# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""SIGKILL of a process, worker or monitor in the middle of a suspend or resume.

After a kill, the device data must be right or reported as lost, and no device memory may remain in
use. The tests recognise the middle of an operation by a sign: bytes have moved between host memory
and the device, or half of the usual time has passed. Each test notes the sign, or that the driver
was too fast. The assertions are the same with each sign.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from jupyter_gpupool import procfs

from .device import CALL, SETTLED, Bench, bench, bytes_of, speeds, until
from .machine import GiB, MiB
from .target import Target, target
from .workloads import expected, expected_fingerprint

#: These tests are for real drivers. Other tests check the same behaviour on emulated devices.
pytestmark = pytest.mark.long

FIRST = 9

#: The time-out, in seconds, of an operation whose process or worker was killed. It is long because
#: the operation may end only after the time-out of its driver call.
SETTLING = 75.0

#: The seconds of an undisturbed suspend ("checkpoint") and an undisturbed resume ("restore") in the
#: driver of this machine.
_usual: dict[str, float] = {}


def size_of(found: Bench) -> int:
    return found.machine.bytes(4 * GiB)


async def prepare(found: Bench, process: Target) -> None:
    """Write the data of a process to the device. The first call also measures the usual times."""
    await process.do("put", "x", size_of(found), FIRST)
    if not _usual:
        there, back = await found.there_and_back(process)
        _usual.update(checkpoint=there.driver_seconds, restore=back.driver_seconds)


async def right(found: Bench, process: Target) -> None:
    """Check that a process still has its bytes and can compute with them."""
    await process.do("steps", "x", 1, 3)
    found_now = await process.do("fingerprint", "x")
    assert found_now == expected_fingerprint(size_of(found), FIRST, 3)


async def middle(found: Bench, process: Target, op: str, task: asyncio.Task[Any]) -> str:
    """Wait for the middle of ``op``; return its sign, or "over" if ``op`` has ended before."""
    host, used = bytes_of(process.pid), await found.used()
    part = size_of(found) // 4
    while found.worker.current != op:
        if task.done():
            return "over"
        await asyncio.sleep(0.001)
    begin = time.monotonic()
    look = asyncio.create_task(found.used())  # may not answer before the end of the copy
    try:
        while found.worker.current == op:
            if abs(bytes_of(process.pid) - host) >= part:
                return "host memory"
            if time.monotonic() - begin >= _usual[op] / 2:
                return "seconds"
            if look.done():
                if abs(look.result() - used) >= part:
                    return "device memory"
                look = asyncio.create_task(found.used())
            await asyncio.sleep(0.001)
        return "over"
    finally:
        look.cancel()
        await asyncio.wait({look})


async def as_new(found: Bench, *gone: Target) -> float:
    """Wait until the device is empty, and check that a new process can use it.

    Return the seconds of the wait.
    """
    seconds = await found.empty(*gone)
    async with target("cuda-core", found.env) as new:
        await new.do("put", "y", 16 * MiB, 1)
        await found.there_and_back(new)
        await new.do("steps", "y", 1, 2)
        assert await new.do("digest", "y") == expected(16 * MiB, 1, 2)
    await found.empty(new)
    return round(seconds, 3)


# ------------------------------------------------------------------ the service's own processes


async def test_monitor_killed_during_a_suspend_is_started_again(machine, note):
    async with bench(machine) as found:
        async with target("cuda-core", found.env) as process:
            await prepare(found, process)
            child = found.service._sampler.child
            first = child.pid
            task = asyncio.create_task(found.suspend(process))
            note(seen_by=await middle(found, process, "checkpoint", task))
            os.kill(first, signal.SIGKILL)
            there = await asyncio.wait_for(task, SETTLING)
            note(status=there.status, message=there.message, suspend=speeds(there))
            assert there.status == "suspended", there
            assert await until(lambda: procfs.identify(first) is None)
            assert await found.used() <= found.base + found.slack
            assert child.pid not in (None, first)
            back = await found.resume(process, there)
            assert back.status == "resumed", back
            await right(found, process)
        note(freed_s=await as_new(found, process))


@pytest.mark.parametrize("op", ["checkpoint", "restore"])
async def test_state_lost_by_a_killed_worker_is_reported(machine, op, note):
    """A killed worker loses no state, or the outcome reports the loss ("failed" or "hung").

    According to reports, a suspend completes even if its caller dies. But a resume whose caller
    dies leaves the process locked.
    """
    async with bench(machine) as found:
        async with target("cuda-core", found.env) as process:
            await prepare(found, process)
            there = None
            if op == "restore":
                there = await found.suspend(process)
                assert there.status == "suspended", there
            first = found.worker.pid
            work = found.suspend(process) if there is None else found.resume(process, there)
            task: asyncio.Task[Any] = asyncio.create_task(work)
            note(seen_by=await middle(found, process, op, task))
            os.kill(first, signal.SIGKILL)
            outcome = await asyncio.wait_for(task, SETTLING)
            state = await asyncio.wait_for(found.state(process), SETTLED)
            lost = outcome.status in ("failed", "hung")
            note(
                status=outcome.status,
                message=outcome.message,
                seconds=speeds(outcome),
                state=state,
                lost=lost,
                worker_new=found.worker.pid != first,
            )
            assert await until(lambda: procfs.identify(first) is None)
            if not lost:
                expected_state = {
                    "suspended": "checkpointed",
                    "resumed": "running",
                    "no-room": "checkpointed",
                    "drain": "running",
                    "pinned": "running",
                }
                assert state == expected_state[outcome.status], outcome
                if state == "checkpointed":
                    back = await found.resume(process, there or outcome)
                    assert back.status == "resumed", back
                await right(found, process)
        note(freed_s=await as_new(found, process))


# ------------------------------------------------------------------ the process


@pytest.mark.parametrize("moment", ["checkpointed", "locked", "checkpoint", "restore"])
async def test_process_killed_at_any_moment_frees_everything(machine, moment, note):
    async with bench(machine) as found:
        async with target("cuda-core", found.env) as process:
            await prepare(found, process)
            if moment == "locked":
                fields = {"pid": process.root.pid, "start_time": process.root.start_time}
                answer = await found.worker.call("lock", CALL, process=fields, drain=5.0)
                assert answer["outcome"] == "ok", answer
                assert await found.state(process) == "locked"
            elif moment != "checkpoint":
                there = await found.suspend(process)
                assert there.status == "suspended", there
            if moment in ("checkpoint", "restore"):
                work = found.suspend(process) if moment == "checkpoint" else found.resume(
                    process, there
                )  # fmt: skip
                task: asyncio.Task[Any] = asyncio.create_task(work)
                note(seen_by=await middle(found, process, moment, task))
            begin = time.monotonic()
            os.killpg(process.pid, signal.SIGKILL)
            await asyncio.wait_for(process.process.wait(), SETTLED)
            note(killed_s=round(time.monotonic() - begin, 3))
            if moment in ("checkpoint", "restore"):
                outcome = await asyncio.wait_for(task, SETTLING)
                note(status=outcome.status, message=outcome.message, seconds=speeds(outcome))
                done = "suspended" if moment == "checkpoint" else "resumed"
                assert outcome.status in ("gone", done), outcome
            assert await asyncio.wait_for(found.state(process), SETTLED) == "gone"
        note(freed_s=await as_new(found, process), worker_new=found.worker.generation - 1)
