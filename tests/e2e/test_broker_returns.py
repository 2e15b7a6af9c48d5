# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A user's own broker that is killed comes back by itself, and no cell notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from jupyter_gpupool import startrecord
from jupyter_gpupool.errors import BrokerUnavailable

from . import cells
from .kit import MiB, reap, until
from .scenes import DATA, occupied, play, release, said, state, with_blocks

ONE = "1x640MiB,context=32MiB"
SLICE = 512 * MiB


def pid_of_broker(pool):
    """Return the broker's process if one answers, else None."""
    try:
        return pool.status()["pid"]
    except BrokerUnavailable:
        return None


async def killed_and_back(pool):
    """Kill the broker; return once another one, started by nobody here, answers."""
    old = pool.status()["pid"]
    os.kill(old, signal.SIGKILL)
    await until(lambda: (reap(old), pid_of_broker(pool) not in (None, old))[1], "the next broker")


async def storm(pool, kills):
    """Three kernels that compute, wait and are suspended; the broker is killed under them."""
    flag = pool.folder / "go"
    away = await with_blocks(pool, "away")
    (await away.run("block = Block(128).allocate().write(7)")).check()
    await release(pool, away)
    busy, work = await occupied(pool, flag)
    waiting = await with_blocks(pool, "waiting")
    wait = asyncio.create_task(waiting.run("block = Block(64).allocate().write(1).verify()"))
    await state(waiting, "queued")
    for _ in range(kills):
        await killed_and_back(pool)
        assert not work.done()
        assert not wait.done()
    await state(busy, "active")
    await state(waiting, "queued")
    assert {s["label"] for s in pool.sessions()} == {"away", "busy", "waiting"}
    # The suspended one goes on by itself, in the middle of a cell, whoever has the slice.
    back = asyncio.create_task(away.run("block.verify().write(8).compute().verify()"))
    await state(away, "queued")
    await killed_and_back(pool)
    flag.touch()
    for cell in (work, wait, back):
        (await cell).check()
    for kernel in (away, busy, waiting):
        done = (await kernel.run("block.verify()")).check()
        assert "802" not in said(done)
    await pool.stop_kernels()


def test_the_broker_is_killed_under_kernels_that_compute_wait_and_are_suspended(pool):
    play(storm(pool(ONE, default_memory=SLICE), 2))


@pytest.mark.long
def test_the_broker_is_killed_ten_times_in_a_row(pool):
    play(storm(pool(ONE, default_memory=SLICE), 10))


@pytest.mark.parametrize("attach", ["lazy", "cell"])
def test_a_suspended_kernel_goes_on_after_its_broker_was_killed(pool, attach):
    """Nobody else is there to notice: no other kernel, no server, no command."""
    pool = pool(ONE, default_memory=SLICE, attach=attach)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        await release(pool, kernel)
        os.kill(pool.status()["pid"], signal.SIGKILL)
        begun = time.monotonic()
        (await kernel.run("block.verify()")).check()
        print(f"the cell took {time.monotonic() - begun:.1f} s with the start of a broker")
        assert kernel.session()["resumes"] == 1
        await pool.stop_kernels()

    play(scenario())


def test_the_guard_alone_has_the_broker_started(pool):
    """As in a kernel that is not IPython: the agent has no part in it."""
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        # What is left is a Python that does not know of the pool.
        (await kernel.run("%unload_ext jupyter_gpupool.kernel")).check()
        await release(pool, kernel)
        os.kill(pool.status()["pid"], signal.SIGKILL)
        (await kernel.run("block.verify()")).check()
        broker = pool.status()["pid"]
        assert os.getsid(broker) == broker
        environ = Path(f"/proc/{broker}/environ").read_bytes()
        assert b"GPUPOOL_SESSION" not in environ
        assert b"gpupool-guard" not in environ
        # Of the kernel's end it hears as any broker, and is not ended with it.
        await kernel.stop(now=True)
        assert pool.status()["pid"] == broker

    play(scenario())


def test_a_cell_shows_that_the_broker_is_being_started(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        await release(pool, kernel)
        # The start is held up by somebody who has its lock, until the cell has said so.
        from jupyter_gpupool.starting import only_one

        with only_one(pool.socket, time.monotonic() + 10):
            os.kill(pool.status()["pid"], signal.SIGKILL)
            cell = asyncio.create_task(kernel.run("block.verify()"))
            await until(
                lambda: "it is being started again" in " ".join(kernel.latest.displays),
                "the line in the cell", show=lambda: kernel.latest,
            )  # fmt: skip
        (await cell).check()
        await pool.stop_kernels()

    play(scenario())


def test_a_broker_that_cannot_be_started_again_ends_the_call_with_the_reason(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        await release(pool, kernel)
        config = pool.socket.with_suffix(".config.json")
        right = config.read_text()
        config.write_text('{"GPUPool": {"emulate": "nonsense"}}')
        os.kill(pool.status()["pid"], signal.SIGKILL)
        done = await kernel.run("block.verify()")
        assert not done.ok
        assert "CUDA_ERROR_SYSTEM_NOT_READY" in done.evalue
        assert "cannot be started again" in said(done), done
        assert "nonsense" in said(done), done
        assert str(pool.socket.with_suffix(".log")) in said(done), done
        config.write_text(right)
        startrecord.failures_path(pool.socket).unlink()
        (await kernel.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_an_interrupt_ends_the_wait_for_a_broker(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        from jupyter_gpupool.starting import only_one

        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        await release(pool, kernel)
        with only_one(pool.socket, time.monotonic() + 10):
            os.kill(pool.status()["pid"], signal.SIGKILL)
            cell = asyncio.create_task(kernel.run("block.verify()"))
            await until(lambda: kernel.latest.displays, "the wait to be shown")
            await kernel.interrupt()
            assert not (await asyncio.wait_for(cell, 20)).ok
        (await kernel.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())
