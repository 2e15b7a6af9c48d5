# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""If a user's own broker is killed, its kernels start another broker, and no cell fails."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from jupyter_gpupool import startfailures, startrecord
from jupyter_gpupool.errors import BrokerUnavailable

from . import cells
from .kit import MiB, command_of, reap, until
from .scenes import DATA, occupied, play, release, said, state, with_blocks

ONE = "1x640MiB,context=32MiB"
SLICE = 512 * MiB


def pid_of_broker(pool):
    """Return the broker's process id; None if no broker answers."""
    try:
        return pool.status()["pid"]
    except BrokerUnavailable:
        return None


async def killed_and_back(pool):
    """Kill the broker; return when a kernel has started a new broker and the new broker answers."""
    old = pool.status()["pid"]
    os.kill(old, signal.SIGKILL)
    await until(lambda: (reap(old), pid_of_broker(pool) not in (None, old))[1], "the next broker")


async def storm(pool, kills):
    """Kill the broker while one kernel is busy, one waits, and one is suspended."""
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
    # The suspended kernel also asks for a slice, and the broker is killed while it waits. After
    # that, all three cells end without an error.
    back = asyncio.create_task(away.run("block.verify().write(8).compute().verify()"))
    await state(away, "queued")
    await killed_and_back(pool)
    flag.touch()
    for cell in (work, wait, back):
        (await cell).check()
    for kernel in (away, busy, waiting):
        done = (await kernel.run("block.verify()")).check()
        assert not re.search(r"\b802\b", said(done))
    await pool.stop_kernels()


def test_kernels_in_three_states_survive_a_killed_broker(pool):
    play(storm(pool(ONE, default_memory=SLICE), 2))


@pytest.mark.long
def test_kernels_survive_ten_kills_of_the_broker_in_a_row(pool):
    play(storm(pool(ONE, default_memory=SLICE), 10))


@pytest.mark.parametrize("attach", ["lazy", "cell"])
def test_suspended_kernel_continues_after_its_broker_was_killed(pool, attach):
    """The kernel itself notices that the broker is dead, and starts a new one.

    No other kernel, no server and no command runs that could start it.
    """
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


def test_lost_broker_is_started_again_without_an_agent(pool):
    """The kernel has no agent, like one without IPython. So its guard starts the new broker."""
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        # This removes the agent. Only the guard then connects the kernel's Python with the pool.
        (await kernel.run("%unload_ext jupyter_gpupool.kernel")).check()
        await release(pool, kernel)
        os.kill(pool.status()["pid"], signal.SIGKILL)
        (await kernel.run("block.verify()")).check()
        broker = pool.status()["pid"]
        assert os.getsid(broker) == broker
        environ = Path(f"/proc/{broker}/environ").read_bytes()
        assert b"GPUPOOL_SESSION" not in environ
        assert b"gpupool-guard" not in environ
        # The new broker notices the kernel's end, and continues to run.
        await kernel.stop(now=True)
        assert pool.status()["pid"] == broker

    play(scenario())


@pytest.mark.parametrize("agent", [True, False], ids=["agent", "guard"])
def test_broker_returns_even_if_its_files_are_deleted(pool, agent):
    """The kernel starts a new broker, although the files beside the socket are deleted.

    While a broker runs, it writes deleted files again. Here the broker is dead.
    """
    pool = pool(ONE, default_memory=SLICE, idle_timeout=3601)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        if not agent:
            (await kernel.run("%unload_ext jupyter_gpupool.kernel")).check()
        await release(pool, kernel)
        old = pool.status()["pid"]
        os.kill(old, signal.SIGKILL)
        for path in pool.folder.glob("b.*"):
            if not path.name.endswith(".emulated"):
                path.unlink()
        (await kernel.run("block.verify()")).check()
        assert pool.status()["pid"] != old
        assert pool.status()["settings"]["idle_timeout"] == 3601
        assert startrecord.record_path(pool.socket).exists()
        # A broker that ends on request removes its start record. So a kernel cannot start it again.
        await release(pool, kernel)
        broker = psutil.Process(pool.status()["pid"])
        broker.terminate()
        await until(lambda: (reap(broker.pid), not broker.is_running())[1], "the broker's end")
        for path in pool.folder.glob("b.*"):
            if not path.name.endswith(".emulated"):
                path.unlink()
        assert not (await kernel.run("block.verify()")).ok
        pool.start_broker()
        (await kernel.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_a_cell_shows_that_the_broker_is_being_started(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        await release(pool, kernel)
        # A broker can start only under this lock. The test keeps the lock until the cell has shown
        # the message.
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


def test_call_fails_with_the_reason_when_no_broker_can_start(pool):
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
        startfailures.failures_path(pool.socket).unlink()
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
            assert not (await asyncio.wait_for(cell, 60)).ok
        (await kernel.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


# ---------------------------------------------------------------------- served soon


def begun(pool):
    """Return when the running broker began to serve, according to its own clock."""
    return [r["time"] for r in pool.journal() if r["kind"] == "broker-start"][-1]


@pytest.mark.parametrize("victim", ["broker", "worker", "monitor"])
def test_waiting_call_is_served_within_5_s_of_a_restart(pool, victim):
    """In an earlier version, a new broker granted no slice for ten seconds, so kernels starved."""
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        holder, waiting = await pool.kernel("holder"), await with_blocks(pool, "waiting")
        (await holder.run(cells.setup(1, DATA))).check()
        await state(holder, "idle")
        cell = asyncio.create_task(waiting.run("block = Block(64).allocate().write(1).verify()"))
        await state(waiting, "queued")
        killed = time.time()
        if victim == "broker":
            await killed_and_back(pool)
            killed = begun(pool)
        else:
            broker = psutil.Process(pool.status()["pid"])
            found = [p for p in broker.children() if f"child_programs {victim}" in command_of(p)]
            found[0].kill()
        (await cell).check()
        session = waiting.session()["id"]
        (granted,) = [r["time"] for r in pool.journal(session=session) if r["kind"] == "attach"]
        print(f"served {granted - killed:.2f} s after the {victim} was there again")
        # The limit of 5 s is for a machine with a free core. On a busy machine, the test allows
        # 4 s more. In the earlier version, the wait took over 10 s.
        assert granted - killed < 5.0 + 4.0
        (await holder.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def journaled(pool, kernel):
    """Return the start of the idle time in the journal; None if the kernel is not idle there."""
    (path,) = pool.folder.glob("state/journal-*.sqlite")
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        (row,) = db.execute("SELECT record FROM sessions WHERE id = ?", [kernel.session()["id"]])
    record = json.loads(row[0])["record"]
    return record["idle_since"] if record["state"] == "idle" else None


def test_idle_time_of_a_kernel_survives_kills_of_the_broker(pool):
    """A new broker reads the start of the idle time from the journal.

    In an earlier version, the idle time began again with each new broker. So a kernel never
    became idle for long enough to lose its slice, and a waiting kernel got none.
    """
    pool = pool(ONE, default_memory=SLICE, reclaim_after=3600)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        since = (await state(kernel, "idle"))["idle_since"]
        for _ in range(2):
            await until(lambda: journaled(pool, kernel) == since, "the journal to have it")
            await killed_and_back(pool)
            assert (await state(kernel, "idle"))["idle_since"] == since
        # The kernel uses its GPU while the broker is stopped (SIGSTOP). The next broker notices
        # this: the idle time begins later than ``since``.
        os.kill(pool.status()["pid"], signal.SIGSTOP)
        broker = psutil.Process(int((pool.folder / "b.sock.lock").read_text().split()[0]))
        (await kernel.run("block.verify()")).check()
        broker.kill()
        await until(lambda: (reap(broker.pid), pid_of_broker(pool))[1], "the next broker")
        assert (await state(kernel, "idle"))["idle_since"] > since
        await pool.stop_kernels()

    play(scenario())
