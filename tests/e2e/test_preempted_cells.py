# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A kernel of a higher class takes the GPU of a running cell. The cell waits, then continues."""

from __future__ import annotations

import asyncio

import pytest

from . import cells
from .kit import MiB, until
from .scenes import DATA, play, said, state, suspended

ONE = "1x640MiB,context=32MiB"
SLICE = 400 * MiB  # a GPU has no room for two of these

#: Options of the pool: a kernel of a higher class may take the GPU of a running cell at once.
RULES = {
    "default_memory": SLICE,
    "quiet_after": 2.0,
    "priority_classes": {"batch": 0, "urgent": 10},
    "default_priority": "batch",
    "preempt": ["class"],
}

#: A cell that writes, computes and reads all its bytes in rounds, until the file exists. After each
#: round, it pauses for as long as the round took, but for at most 0.1 s. The pauses leave processor
#: time for other tests. They are shorter than ``quiet_after``, so the kernel does not become idle.
TOIL = """
import time as _time
from pathlib import Path as _Path
rounds = 0
print("begun")
while not _Path({flag!r}).exists():
    _begun = _time.monotonic()
    block.write(rounds).compute().verify()
    rounds += 1
    _time.sleep(min(_time.monotonic() - _begun, 0.1))
print("rounds:", rounds)
"""


def toil(flag):
    return TOIL.format(flag=str(flag))


async def at_work(pool, flag, **options):
    """Start a kernel and a cell that works on the only device; return both."""
    worker = await pool.kernel("worker", **options)
    (await worker.run(cells.setup(1, DATA))).check()
    cell = asyncio.create_task(worker.run(toil(flag), timeout=200))
    await until(lambda: "begun" in worker.latest.text, "the cell to begin")
    await state(worker, "active")
    return worker, cell


async def displaced(pool, flag, release, **options):
    """Let an urgent kernel take the GPU of a running cell; return both kernels and their cells."""
    worker, cell = await at_work(pool, flag, **options)
    urgent = await pool.kernel("urgent", provisioner={"priority": "urgent"})
    code = cells.setup(2, DATA) + cells.computing(release)
    other = asyncio.create_task(urgent.run(code, timeout=200))
    await until(
        lambda: (s := worker.session()) and s["preempted"] and s["suspended_bytes"],
        "the worker to be preempted",
        show=worker.session,
    )
    return worker, cell, urgent, other


@pytest.mark.parametrize("attach", ["lazy", "cell"])
def test_preempted_cell_shows_the_reason_and_continues(pool, attach):
    pool = pool(ONE, attach=attach, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, urgent, other = await displaced(pool, flag, release)
        await until(lambda: worker.latest.displays, "the cell to say so")
        await until(
            lambda: "host memory" in worker.latest.displays[-1], "what happened",
            show=lambda: worker.latest.displays,
        )  # fmt: skip
        await state(worker, "queued")
        release.touch()
        (await other).check()
        await until(lambda: worker.session()["resumes"], "its return", show=worker.session)
        await until(
            lambda: "then continued" in worker.latest.displays[-1], "the last line",
            show=lambda: worker.latest.displays,
        )  # fmt: skip
        assert not worker.session()["preempted"]
        flag.touch()
        done = (await cell).check()
        assert int(done.text.split("rounds:")[1]) > 0
        assert "error" not in done.outputs
        (await worker.run("block.verify()")).check()
        (await urgent.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


@pytest.mark.parametrize("attach", ["lazy", "cell"])
def test_interrupted_cell_keeps_its_data(pool, attach):
    """An interrupt ends a preempted cell. A later CUDA call brings back the state."""
    pool = pool(ONE, attach=attach, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, _urgent, other = await displaced(pool, flag, release)
        await until(lambda: worker.session()["waiting"], "its call to wait", show=worker.session)
        await worker.interrupt()
        done = await cell
        assert done.ename == "KeyboardInterrupt", (done.ename, done.evalue)
        await suspended(worker)
        release.touch()
        (await other).check()
        (await worker.run("print(rounds, block.write(77).verify() is block)")).check()
        await pool.stop_kernels()

    play(scenario())


def test_work_without_the_gpu_continues_during_a_preemption(pool):
    """A preempted kernel runs cells that use no GPU.

    %gpu shows that the state is in host memory.
    """
    pool = pool(ONE, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, _, other = await displaced(pool, flag, release)
        await until(lambda: worker.session()["waiting"], "its call to wait", show=worker.session)
        await worker.interrupt()
        await cell
        for n in range(3):
            assert (await worker.run(f"print({n} + 1)")).check().text.strip() == str(n + 1)
        assert "host memory" in said((await worker.run("%gpu")).check())
        release.touch()
        (await other).check()
        await pool.stop_kernels()

    play(scenario())


@pytest.mark.parametrize("how", ["restart", "shutdown"])
def test_preempted_kernel_can_end_while_it_waits(pool, how):
    """The shutdown or restart of a preempted kernel frees its state in host memory.

    After a restart, the session is detached and not preempted, like that of a new kernel.
    """
    pool = pool(ONE, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, _, other = await displaced(pool, flag, release)
        await until(lambda: worker.session()["waiting"], "its call to wait", show=worker.session)
        cell.cancel()
        before = worker.session()["id"]
        if how == "restart":
            await worker.restart()
            session = await state(worker, "detached")
            assert (session["suspended_bytes"], session["preempted"]) == (0, "")
        else:
            await worker.stop()
        await until(
            lambda: before not in [s["id"] for s in pool.sessions() if s["suspended_bytes"]],
            "the end of its state", show=pool.sessions,
        )  # fmt: skip
        assert not pool.status()["host"]["used_bytes"]
        release.touch()
        (await other).check()
        if how == "restart":
            (await worker.run(cells.setup(3, DATA) + "block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_kernel_killed_while_it_waits_leaves_no_host_memory(pool):
    pool = pool(ONE, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, _, other = await displaced(pool, flag, release)
        cell.cancel()
        session = worker.session()["id"]
        worker.kill()
        await until(lambda: session not in [s["id"] for s in pool.sessions()], "the session's end")
        assert not pool.status()["host"]["used_bytes"]
        release.touch()
        (await other).check()
        await pool.stop_kernels()

    play(scenario())


def test_broker_is_killed_while_a_preempted_cell_waits(pool):
    """The next broker queues the kernel again and resumes it. Its cell continues."""
    pool = pool(ONE, **RULES)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker, cell, _, other = await displaced(pool, flag, release)
        await until(lambda: worker.session()["waiting"], "its call to wait", show=worker.session)
        pool.disturbed = True
        pool.kill_broker()
        pool.start_broker()
        await state(worker, "queued")
        release.touch()
        (await other).check()
        await until(lambda: worker.session()["resumes"], "its return", show=worker.session)
        flag.touch()
        (await cell).check()
        (await worker.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_lone_kernel_has_the_whole_gpu_until_another_asks(pool):
    """Without a limit, a kernel may use all free memory until another kernel asks for a slice."""
    pool = pool(ONE, default_memory=300 * MiB, default_limit=None, quiet_after=0.5)
    flag, release = pool.folder / "flag", pool.folder / "release"

    async def scenario():
        worker = await pool.kernel("worker")
        (await worker.run(cells.setup(1, 400))).check()
        assert worker.session()["granted_bytes"] > 400 * MiB
        cell = asyncio.create_task(worker.run(toil(flag), timeout=200))
        await until(lambda: "begun" in worker.latest.text, "the cell to begin")
        other = await pool.kernel("other")
        code = cells.setup(2, 100) + cells.computing(release)
        second = asyncio.create_task(other.run(code, timeout=200))
        await until(
            lambda: (s := worker.session()) and s["preempted"] and s["suspended_bytes"],
            "its grown memory to go", show=worker.session,
        )  # fmt: skip
        assert "more memory than its guarantee covers" in worker.session()["preempted"]
        release.touch()
        (await second).check()
        await until(lambda: worker.session()["resumes"], "its return", show=worker.session)
        flag.touch()
        assert "rounds:" in (await cell).check().text
        (await worker.run("block.verify()")).check()
        (await other.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())
