# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Wait until no thread that passed the open gate is still on its way into the driver.

The guard does not count how many launches are inside the driver, because a count at the beginning
and the end of each launch would cost more than the test of the gate. The same is true for all other
calls that only pass the gate. So a thread may find the gate open, lose its processor, and enter the
driver long after the gate was closed. If the thread enters before the broker locks the driver for
the suspend, the lock waits for the thread's call. If the thread enters after the lock, the driver
blocks the thread. The thread has already passed the gate, so its guard does not ask for a lease.

So the broker gives each thread the time to enter the driver, as RCU does with its grace periods.
The way from the gate into the driver is a few instructions long, and no thread sleeps on this way.
If a thread has slept at any time since the gate was closed, it is not on the way. If a thread has
run for some milliseconds since then, it has left the way.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Iterable

from ... import procfs
from ...guard.page import Reading

#: DRAIN: after the gate is closed, all calls inside the driver must return within this many
#: seconds. A caller of :func:`drain` may give another time. DRAIN_POLL: seconds between two checks.
DRAIN, DRAIN_POLL = 1.0, 0.003

#: Nanoseconds of run time after which a thread must have left the code between the gate and the
#: driver. This code takes only a few nanoseconds, but Linux updates the run time once per tick.
PASSED = 10_000_000

#: POLL: seconds between two checks. LONGEST: seconds to wait for a thread; :func:`drain` may wait
#: longer. If a thread gets no processor for this time, the machine is overloaded, and the broker
#: does not suspend the process.
POLL, LONGEST = 0.002, 1.0


def on_the_way(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Return the run time (ns) of each thread that may be on the way, by process and thread id.

    The result leaves out sleeping and ended threads.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in set(pids):  # a page may name the same process several times
        for thread in procfs.threads(pid):
            state, ran = procfs.thread_time(pid, thread)
            # The thread is runnable, or in a sleep that no signal ends. Such a thread may be
            # reading a page of code from the disk.
            if state in ("R", "D"):
                found[pid, thread] = ran
    return found


async def drain(
    read: Callable[[], Reading | None], pid: int | None = None, *, patience: float = DRAIN
) -> str:
    """Wait until no call can be on its way into the driver.

    Return "", or after a time-out the reason why a call may still be on its way.

    The wait covers all processes of the page that ``read`` returns, or only process ``pid``.
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
            return "a thread that was about to call CUDA got no processor time"
        if loop.time() >= give_up:
            return f"a CUDA or NVML call did not return within {patience:g} s"
        await asyncio.sleep(DRAIN_POLL)


async def quiesce(pids: Iterable[int], patience: float = LONGEST) -> bool:
    """Return True when no thread of ``pids`` may be on its way into the driver.

    Return False if a thread may still be on its way after ``patience`` seconds.
    """
    # Search outside of the event loop, because the search takes long if the processes have
    # thousands of threads. If somebody has forged a page, there may be even more.
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
