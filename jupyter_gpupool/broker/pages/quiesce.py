# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Between a shut gate and the driver's lock: is any thread still on its way from one to the other?

A launch or an asynchronous copy is not counted (counting both ends of each would cost more than
the test of the gate), so a thread may have found the gate open, lost its processor, and enter the
driver long after the gate was shut. Entering before the driver's lock it is drained like any other;
later it would block inside the driver, where nobody asks for a lease on its behalf.

So each thread is given the time to get there, by the reasoning of RCU's grace periods: the way is
a few instructions and never sleeps. A thread that was seen asleep after the gate was shut is not on
it, and one that has run for some milliseconds since is past it.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Iterable

from ... import procfs
from ...guard.page import Reading

#: Seconds that calls inside the driver have to return once the gate is shut, and between looks.
DRAIN, DRAIN_POLL = 1.0, 0.003

#: Nanoseconds of running after which a thread is past the way: it is nanoseconds long, and the time
#: that the kernel shows may be a tick old.
PASSED = 10_000_000

#: Seconds between two looks, and for which a thread is waited for: one that gets no processor for
#: so long says that the machine is overloaded, not that it may be suspended.
POLL, LONGEST = 0.002, 1.0


def on_the_way(pids: Iterable[int]) -> dict[tuple[int, int], int]:
    """Return the threads (process, thread) that may be on the way, with their run time so far (ns).

    Those that sleep are not; processes and threads that have ended are not.
    """
    found: dict[tuple[int, int], int] = {}
    for pid in set(pids):  # a page may say what it likes
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

    Of the session whose page ``read`` returns, or of its process ``pid`` alone.
    """
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience
    while True:
        reading = read()
        slots = [slot for slot in reading.slots if pid in (None, slot.pid)] if reading else []
        if not any(slot.inflight for slot in slots):
            pids = [slot.pid for slot in slots] if pid is None else [pid]
            if await quiesce(pids, max(patience, LONGEST)):
                return ""
            return "a thread that was about to call CUDA got no processor"
        if loop.time() >= give_up:
            return f"a CUDA call did not return within {patience:g} s"
        await asyncio.sleep(DRAIN_POLL)


async def quiesce(pids: Iterable[int], patience: float = LONGEST) -> bool:
    """Wait until no thread of ``pids`` can be on the way; False if one may be in the end."""
    # Not in the loop's thread: there may be thousands of threads, more so if a page lies.
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
