# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Wait until no thread that found the gate open is still on its way into the driver.

A launch is not counted (counting both of its ends would cost more than the test of the gate), nor
is any other call that only passes the gate. So a thread may have found the gate open, lost its
processor, and enter the driver long after the gate was shut. If it enters before the driver's lock,
the lock drains it like any other; later it would block inside the driver, where nothing asks for a
lease for it.

So the broker gives each thread the time to get there, by the reasoning of RCU's grace periods: the
way is a few instructions and never sleeps. A thread that was asleep after the gate was shut is not
on it, and a thread that has run for some milliseconds since is past it.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Iterable

from ... import procfs
from ...guard.page import Reading

#: Seconds for calls inside the driver to return once the gate is shut, and between checks.
DRAIN, DRAIN_POLL = 1.0, 0.003

#: Nanoseconds of run time after which a thread must have left the way, which takes a few. The
#: kernel updates its figure only once per tick.
PASSED = 10_000_000

#: Seconds between two checks, and the longest wait for a thread: if it gets no processor for
#: so long, the machine is overloaded, and the process may not be suspended.
POLL, LONGEST = 0.002, 1.0


def on_the_way(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Return the threads (process, thread) that may be on the way, with their run time so far (ns).

    Sleeping and ended threads are left out.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in set(pids):  # a page may contain anything
        for thread in procfs.threads(pid):
            state, ran = procfs.thread_time(pid, thread)
            # Runnable, or asleep where no signal wakes it: a page of code being read, perhaps.
            if state in ("R", "D"):
                found[pid, thread] = ran
    return found


async def drain(
    read: Callable[[], Reading | None], pid: int | None = None, *, patience: float = DRAIN
) -> str:
    """Wait until no call can be on its way into the driver; return why one may be, or "".

    This covers the session whose page ``read`` returns, or only its process ``pid``.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    while True:
        reading = read()
        slots = [slot for slot in reading.slots if pid in (None, slot.pid)] if reading else []
        if not any(slot.inflight or slot.nvml for slot in slots):
            pids = [slot.pid for slot in slots] if pid is None else [pid]
            if await quiesce(pids, max(patience, LONGEST)):
                return ""
            return "a thread that was about to call CUDA got no processor"
        if loop.time() >= give_up:
            return f"a CUDA or NVML call did not return within {patience:g} s"
        await asyncio.sleep(DRAIN_POLL)


async def quiesce(pids: Iterable[int], patience: float = LONGEST) -> bool:
    """Wait until no thread of ``pids`` can be on its way into the driver; False if not."""
    # Not in the loop's thread: there may be thousands of threads, more if a page is forged.
    waiting = await asyncio.to_thread(on_the_way, tuple(pids))
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    while waiting:
        if loop.time() >= give_up:
            return False
        await asyncio.sleep(POLL)
        waiting = {
            (pid, thread): before
            for (pid, thread), before in waiting.items()
            if _may_be(pid, thread, before)
        }
    return True


def _may_be(pid: int, thread: int, before: int) -> bool:
    state, ran = procfs.thread_time(pid, thread)
    return state in ("R", "D") and ran - before < PASSED
