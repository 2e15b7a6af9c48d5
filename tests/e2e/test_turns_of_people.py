# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two users run short cells in turns on one GPU: no cell waits while the GPU is idle."""

from __future__ import annotations

import asyncio
import statistics
import time

from . import cells
from .kit import MiB, until
from .scenes import DATA, play, state

ONE = "1x640MiB,context=32MiB"
SLICE = 400 * MiB  # a GPU has no room for two of these


def swap(pool):
    """Return the median seconds of a suspend plus those of a resume, from the journal."""
    rows = pool.journal()
    out = [row["seconds"] for row in rows if row["kind"] == "suspend"]
    back = [row["detail"]["driver_seconds"] for row in rows if row["kind"] == "resume"]
    return statistics.median(out) + statistics.median(back)


def test_users_with_short_cells_wait_only_for_the_move(pool):
    """A kernel is idle as soon as its cell has ended and no CUDA call runs.

    So a long ``quiet_after`` does not delay the next user. The pool also does not protect the slice
    for the cost of a move divided by ``max_swap_overhead``, a hundred times this cost here.
    """
    pool = pool(ONE, default_memory=SLICE, quiet_after=600.0, max_swap_overhead=0.01)

    async def scenario():
        people = [await pool.kernel("ann"), await pool.kernel("bob")]
        for n, kernel in enumerate(people):
            (await kernel.run(cells.setup(n, DATA))).check()
        waits = []
        for _ in range(5):
            for kernel in people:
                waits.append((await kernel.run("block.verify()")).check().seconds)
        seconds = swap(pool)
        assert statistics.median(waits[4:]) <= 5 * seconds + 2.0, (waits, seconds)
        for kernel in people:
            assert kernel.session()["suspends"] >= 4
        await pool.stop_kernels()

    play(scenario())


def test_thread_that_outlives_its_cell_keeps_the_slice(pool):
    """No cell runs, but a thread makes CUDA calls, so the kernel keeps its slice.

    ``quiet`` is long: on a busy machine, the thread may get no processor for half a second.
    """
    quiet = 3.0
    pool = pool(ONE, default_memory=SLICE, quiet_after=quiet, max_swap_overhead=0.0)
    stop, count = pool.folder / "stop", pool.folder / "count"

    async def scenario():
        busy, late = await pool.kernel("busy"), await pool.kernel("late")
        (await busy.run(cells.setup(1, DATA))).check()
        (await busy.run(THREAD.format(stop=str(stop), count=str(count)))).check()
        told = busy.session()["messages"]
        cell = asyncio.create_task(late.run(cells.setup(2, DATA)))
        await state(late, "queued")
        await until(lambda: busy.session()["messages"] > told, "its agent to say that it rests")
        seen, since = int(count.read_text() or 0), time.monotonic()
        await until(
            lambda: (
                int(count.read_text() or 0) > seen + 200 and time.monotonic() > since + 1.3 * quiet
            ),
            "the thread to go on for longer than a quiet kernel keeps its slice",
        )
        assert late.session()["state"] == "queued"
        assert busy.session()["suspends"] == 0
        stop.touch()
        (await cell).check()
        (await busy.run("thread.join(); block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


THREAD = """
import threading, time
from pathlib import Path

def work():
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
    call(driver.cuCtxSetCurrent(context))
    done = 0
    while not Path({stop!r}).exists():
        call(driver.cuCtxSynchronize())
        done += 1
        Path({count!r}).write_text(str(done))
        time.sleep(0.002)

Path({count!r}).write_text("0")
thread = threading.Thread(target=work, daemon=True)
thread.start()
"""
