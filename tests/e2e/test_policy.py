# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The effect of an admin's configuration, as users of notebooks see it."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from functools import partial
from pathlib import Path

import psutil
import pytest

from . import cells
from .kit import MiB, until
from .scenes import DATA, play, release, state, suspended
from .test_lifecycle import MACHINE, SLICE

ONE = "1x640MiB,context=32MiB"


@pytest.fixture
def pool(pool):
    """Use the policy ``cell``: a running cell keeps its slice, also without CUDA calls."""
    return partial(pool, attach="cell")


def test_a_cell_waits_at_most_max_wait_and_says_why(pool):
    pool = pool(ONE, default_memory=400 * MiB, max_wait=1.0, max_swap_overhead=0.0, quiet_after=0.2)
    flag = pool.folder / "go"

    async def scenario():
        busy, late = await pool.kernel("busy"), await pool.kernel("late")
        work = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        cell = await late.run("ran = True")
        assert not cell.ok
        assert "1 s" in cell.evalue, cell.evalue
        assert late.session()["state"] == "detached"
        flag.touch()
        (await work).check()
        assert (await late.run("ran")).ename == "NameError", "a refused cell must not have run"
        await pool.stop_kernels()

    play(scenario())


def test_the_kernel_of_the_higher_class_is_served_first(pool):
    pool = pool(ONE, default_memory=400 * MiB)
    flag, order = pool.folder / "go", pool.folder / "order"

    def note(name):
        return f"with open({str(order)!r}, 'a') as f: print({name!r}, file=f)"

    async def scenario():
        busy = await pool.kernel("busy")
        low = await pool.kernel("low", provisioner={"priority": "batch"})
        high = await pool.kernel("high", provisioner={"priority": "interactive"})
        work = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        first = asyncio.create_task(low.run(note("low")))
        assert (await state(low, "queued"))["queue_position"] == 1
        second = asyncio.create_task(high.run(note("high")))
        assert (await state(high, "queued"))["queue_position"] == 1
        assert low.session()["queue_position"] == 2
        flag.touch()
        for cell in (work, first, second):
            (await cell).check()
        assert order.read_text().split() == ["high", "low"]
        (await busy.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_no_kernel_is_suspended_without_host_memory(pool):
    """Host memory has room for only one suspended kernel."""
    pool = pool(ONE, default_memory=400 * MiB, host_memory="440MiB")

    async def scenario():
        away, idle, late = [await pool.kernel(name) for name in ("away", "idle", "late")]
        (await away.run(cells.setup(1, 300))).check()
        (await idle.run(cells.setup(2, 300))).check()
        assert (await suspended(away))["suspended_bytes"] == 332 * MiB
        cell = asyncio.create_task(late.run("pass"))
        await state(late, "queued")
        await until(
            lambda: "for suspended state" in (late.session() or {}).get("wait_reason", ""),
            "the reason",
            show=late.session,
        )
        pool.check_ledger()
        assert idle.session()["suspends"] == 0
        (await idle.run("block.verify(); block.free()")).check()
        await idle.stop()
        (await cell).check()
        (await away.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_idle_slice_is_kept_until_reclaim_after_has_passed(pool):
    pool = pool(ONE, default_memory=400 * MiB, reclaim_after=2.0)

    async def scenario():
        idle, late = await pool.kernel("idle"), await pool.kernel("late")
        (await idle.run(cells.setup(1, DATA))).check()
        since = (await state(idle, "idle"))["idle_since"]
        (await late.run("pass")).check()
        taken = [r for r in pool.journal() if r["kind"] == "suspend"]
        assert taken
        assert taken[0]["time"] - since >= 2.0
        (await idle.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_only_the_devices_of_the_pool_are_used(pool):
    pool = pool(MACHINE, default_memory=SLICE, devices=[1])

    async def scenario():
        (device,) = pool.devices()
        assert device["index"] == 1
        kernels = [await pool.kernel(f"k{i}") for i in range(2)]
        for number, kernel in enumerate(kernels):
            cell = await kernel.run(cells.setup(number, DATA) + "print(device())")
            assert cell.check().text.strip() == device["uuid"]
            await release(pool, kernel)
        for kernel in kernels:
            assert (await kernel.run("block.verify(); print(device())")).check().text.strip() == (
                device["uuid"]
            )
        await pool.stop_kernels()

    play(scenario())


def test_kernel_in_manual_mode_attaches_only_at_a_command(pool):
    pool = pool(MACHINE, attach="manual", default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run("%gpu attach")).check()
        session = await until(
            lambda: (s := kernel.session()) and s["granted_bytes"] and s, "the slice"
        )
        assert session["granted_bytes"] == SLICE
        (await kernel.run(cells.setup(1, DATA) + "block.verify()")).check()
        (await kernel.run("%gpu release")).check()
        await suspended(kernel)
        # In manual mode, a cell does not ask for a slice. So after this cell, which needs none, the
        # kernel still has no slice.
        (await kernel.run("1 + 1")).check()
        assert kernel.session()["granted_bytes"] == 0
        (await kernel.run("%gpu attach")).check()
        (await kernel.run("block.verify()")).check()
        await kernel.stop()

    play(scenario())


def test_one_cell_gets_a_larger_slice(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        cell = await kernel.run(
            "%%gpu 512MiB\nmore = Block(256); more.allocate().write(1).verify(); more.free()\n"
            "block.verify()"
        )
        cell.check()
        await until(
            lambda: kernel.session()["request"]["memory"] == SLICE,
            "the request as it was before the cell",
            show=kernel.session,
        )
        (await kernel.run("block.verify()")).check()
        cell = await kernel.run("%%gpu 5TiB\nraise SystemError('this must not run')")
        assert not cell.ok
        assert cell.ename != "SystemError"
        assert "5 TiB" in cell.evalue + cell.text, cell
        (await kernel.run("block.verify()")).check()
        await kernel.stop()

    play(scenario())


def test_an_interrupt_ends_the_wait_before_a_cell(pool):
    pool = pool(ONE, default_memory=400 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        busy, waiting = await pool.kernel("busy"), await pool.kernel("waiting")
        work = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        for _ in range(2):
            cell = asyncio.create_task(waiting.run("print('ran')"))
            await state(waiting, "queued")
            await waiting.interrupt()
            done = await cell
            assert done.ename == "GPUWaitInterrupted", done
            assert "ran" not in done.text
            await state(waiting, "detached")
        flag.touch()
        (await work).check()
        await pool.stop_kernels()

    play(scenario())


def _kind(descriptor):
    """Return the target of a descriptor, without the number of a socket or pipe.

    So all sockets of a process count as one kind.
    """
    try:
        return re.sub(r"\[\d+\]$", "", str(descriptor.readlink()))
    except OSError:
        return "closed meanwhile"


@pytest.mark.long
def test_hundred_moves_leak_no_descriptor_and_no_memory(pool):
    pool = pool("2x640MiB,context=8MiB", default_memory=64 * MiB, quiet_after=0.1)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, 4))).check()
        broker = psutil.Process(pool.status()["pid"])
        everybody = [broker, *broker.children(recursive=True), psutil.Process(kernel.pid)]

        def descriptors():
            """Return, for each process, the number of open descriptors of each target."""
            found = [Counter(map(_kind, Path(f"/proc/{p.pid}/fd").iterdir())) for p in everybody]
            # Leave out the file of the history: a thread of IPython opens it from time to time.
            return [
                Counter({k: n for k, n in one.items() if "profile_default" not in k})
                for one in found
            ]

        def threads():
            return [p.num_threads() for p in everybody]

        for _ in range(5):
            await release(pool, kernel)
            (await kernel.run("block.verify()")).check()
        before, workers, memory = descriptors(), threads(), broker.memory_info().rss
        for _ in range(50):
            await release(pool, kernel)
            (await kernel.run("block.verify()")).check()
        more = [now - was for now, was in zip(descriptors(), before, strict=True)]
        # The broker may have one more descriptor of the journal: SQLite keeps the descriptor of a
        # closed connection while another connection is open.
        more[0] -= Counter([str(path) for path in pool.folder.glob("state/journal-*.sqlite")])
        assert not any(more), more
        # New threads are no leak up to this number: it is asyncio's limit for the thread pool of an
        # event loop, and this pool grows with use.
        most = min(32, (os.cpu_count() or 1) + 4)
        assert all(now <= was + most for now, was in zip(threads(), workers, strict=True))
        assert broker.children(recursive=True) == everybody[1:-1]
        grown = broker.memory_info().rss - memory
        assert grown < 4 * MiB, f"the broker has grown by {grown} bytes"
        await kernel.stop()

    play(scenario())
