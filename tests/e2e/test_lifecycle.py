# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a user of one notebook sees of the pool, in the order of a working day."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

import pytest

from . import cells
from .kit import MiB, Sampler, until
from .scenes import DATA, play, state, suspended

MACHINE = "2x640MiB,context=32MiB"
ONE = "1x640MiB,context=32MiB"
SLICE = 256 * MiB


@pytest.fixture
def pool(pool):
    """Use the policy ``cell``: a running cell keeps its slice, also without CUDA calls."""
    return partial(pool, attach="cell")


class Watch:
    """Collects samples of a session's status while a test runs."""

    def __init__(self, pool, kernel):
        self.pool, self.kernel = pool, kernel
        self.seen = []
        self._task = asyncio.create_task(self._look())

    async def _look(self):
        while True:
            self.seen.append(self.kernel.session())
            await asyncio.sleep(0.02)

    async def end(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert self.seen
        return self.seen


# ---------------------------------------------------------------------- no CUDA, no GPU


def test_kernel_without_cuda_gets_no_slice_in_manual_mode(pool):
    pool = pool(ONE, attach="manual", default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        watch = Watch(pool, kernel)
        for number in range(20):
            cell = (await kernel.run(f"sum(range(100_000)) + {number}")).check()
            assert cell.text
        for session in await watch.end():
            assert session["state"] == "detached"
            assert session["granted_bytes"] == session["footprint_bytes"] == 0
            assert not session["holds"]
        await kernel.stop()

    play(scenario())
    assert not [row for row in pool.journal() if row["kind"] in ("attach", "queue")]


def test_cells_do_not_wait_for_the_broker_in_manual_mode(pool):
    """The broker is stopped (SIGSTOP). So a cell would hang if it sent a request to the broker."""
    pool = pool(ONE, attach="manual", default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run("pass")).check()
        broker = pool.status()["pid"]
        os.kill(broker, signal.SIGSTOP)
        try:
            for number in range(10):
                cell = await kernel.run(f"{number} * 2", timeout=60)
                assert cell.check().text.strip() == str(number * 2)
        finally:
            os.kill(broker, signal.SIGCONT)
        await kernel.stop()

    play(scenario())


def test_kernel_without_cuda_returns_its_lease_in_cell_mode(pool):
    """Under ``cell``, every cell begins with a lease.

    The agent does not know whether the cell's code uses CUDA.
    """
    pool = pool(ONE, default_memory=SLICE, idle_timeout=0.5)

    async def scenario():
        kernel = await pool.kernel()
        session = kernel.session()
        assert session["state"] == "detached"
        assert session["granted_bytes"] == 0
        watch = Watch(pool, kernel)
        (await kernel.run("2 + 2")).check()
        session = await state(kernel, "detached")
        assert session["granted_bytes"] == session["suspended_bytes"] == 0
        assert all(s["footprint_bytes"] == 0 for s in await watch.end())
        await kernel.stop()

    play(scenario())


# ---------------------------------------------------------------------- idle, keep, release


def test_idle_timeout_suspends_and_the_next_cell_resumes(pool):
    pool = pool(ONE, default_memory=SLICE, idle_timeout=0.5)

    async def scenario():
        with Sampler(pool) as sampler:
            kernel = await pool.kernel()
            (await kernel.run(cells.setup(5, DATA))).check()
            session = await suspended(kernel)
            assert session["granted_bytes"] == 0
            assert session["suspended_bytes"] >= DATA * MiB
            assert pool.status()["host"]["used_bytes"] >= DATA * MiB
            assert all(d["memory_granted"] == 0 for d in pool.devices())
            (await kernel.run("block.verify().write(1).compute().verify()")).check()
            session = kernel.session()
            assert session["suspends"] >= 1
            assert session["resumes"] >= 1
            await suspended(kernel)
            await kernel.stop()
        sampler.check(at_least=5)

    play(scenario())


def test_keep_postpones_the_idle_timeout(pool):
    pool = pool(ONE, default_memory=SLICE, idle_timeout=0.5)

    async def scenario():
        kernel = await pool.kernel()
        # Allocate and keep in one cell: between two cells, the kernel could already be suspended.
        code = cells.setup(6, DATA) + "import time; print(time.time())\n%gpu keep 2s\n"
        cell = (await kernel.run(code)).check()
        assert "stays for 2 s" in cell.text, cell
        kept = float(cell.text.split()[0])
        session = await suspended(kernel)
        rows = pool.journal(session=session["id"])
        gone = [r for r in rows if r["kind"] == "state" and r["detail"]["new"] == "detaching"]
        assert gone[-1]["time"] - kept >= 2.0, rows
        (await kernel.run("block.verify()")).check()
        await kernel.stop()

    play(scenario())


def test_release_gives_the_slice_back_at_once(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(7, DATA))).check()
        await state(kernel, "idle")
        cell = (await kernel.run("%gpu release")).check()
        assert cell.text or cell.displays
        await suspended(kernel)
        (await kernel.run("block.verify()")).check()
        await kernel.stop()

    play(scenario())


def test_release_during_a_cell_waits_for_its_end(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(8, DATA))).check()
        cell = asyncio.create_task(kernel.run(f"{cells.busy(flag)}\nblock.verify()"))
        session = await state(kernel, "active")
        note = pool.call("release", session=session["id"])["note"]
        assert note
        assert kernel.session()["state"] == "active"
        flag.touch()
        (await cell).check()
        await suspended(kernel)
        await kernel.stop()

    play(scenario())


# ---------------------------------------------------------------------- sizes


def test_attached_kernel_grows_and_an_excess_is_refused(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(9, DATA))).check()
        assert (await state(kernel, "idle"))["granted_bytes"] == SLICE
        (await kernel.run("%gpu 384MiB")).check()
        await until(
            lambda: kernel.session()["granted_bytes"] == 384 * MiB,
            "the slice to have grown",
            show=kernel.session,
        )
        assert kernel.session()["suspends"] == 0, "with free room no kernel needs a suspend"
        (await kernel.run("more = Block(192); more.allocate().write(3).verify()")).check()
        cell = await kernel.run("%gpu 40GiB")
        said = cell.text + cell.evalue + " ".join(cell.displays)
        assert not cell.ok or "40 GiB" in said
        assert "640 MiB" in said or "GPU" in said, said
        assert kernel.session()["granted_bytes"] == 384 * MiB, "a refusal changes nothing"
        (await kernel.run("block.verify(); more.verify()")).check()
        await kernel.stop()

    play(scenario())


def test_growth_without_room_moves_the_kernel_and_its_bytes(pool):
    """A kernel asks for a larger slice. Only the other device has enough free memory."""
    pool = pool(MACHINE, default_memory=SLICE)

    async def scenario():
        first = await pool.kernel("first")
        (await first.run(cells.setup(1, DATA))).check()
        second = await pool.kernel("second")
        (await second.run(cells.setup(2, DATA))).check()
        cell = (await first.run("%gpu 512MiB")).check()
        assert "The slice stays at 256 MiB" in cell.text
        (await first.run("%gpu release")).check()
        await suspended(first)
        (await first.run("block.verify(); more = Block(256); more.allocate().write(5)")).check()
        (await second.run("block.verify()")).check()
        (await first.run("block.verify(); more.verify()")).check()
        await first.stop()
        await second.stop()

    play(scenario())


# ---------------------------------------------------------------------- neighbours


def test_notebook_is_restored_on_the_other_device(pool):
    pool = pool(MACHINE, default_memory=576 * MiB)

    async def scenario():
        mine, other = await pool.kernel("mine"), await pool.kernel("other")
        (await mine.run(cells.setup(3, DATA))).check()
        home = (await mine.run("device()")).check().text.strip().strip("'")
        session = await state(mine, "idle")
        assert session["device"] == home
        # Run busy cells of two other kernels on the two devices, so that ``mine`` loses its slice.
        flag, flag2 = pool.folder / "go", pool.folder / "go2"
        (await other.run(cells.setup(4, DATA))).check()
        third = await pool.kernel("third")
        long_cells = [
            asyncio.create_task(k.run(f"{cells.setup(5, DATA)}\n{cells.busy(f)}"))
            for k, f in ((other, flag), (third, flag2))
        ]
        await suspended(mine)
        # End the cell on the other device, so that ``mine`` must resume on a new device.
        where = {k: (await state(k, "active"))["device"] for k in (other, third)}
        assert sorted(where.values()) == sorted(d["uuid"] for d in pool.devices())
        free = next(k for k, uuid in where.items() if uuid != home)
        waiting = asyncio.create_task(mine.run("block.verify()"))
        await state(mine, "queued")
        (flag if free is other else flag2).touch()
        (await waiting).check()
        session = mine.session()
        assert session["device"] != home
        assert session["migrations"] == 1
        (await mine.run("block.write(8).compute().verify()")).check()
        for path in (flag, flag2):
            path.touch()
        for task in long_cells:
            (await task).check()
        await pool.stop_kernels()

    play(scenario())


def test_waiting_cell_says_why_and_leaves_no_trace(pool):
    pool = pool(ONE, default_memory=512 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        busy, waiting = await pool.kernel("busy"), await pool.kernel("waiting")
        holder = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        cell = asyncio.create_task(waiting.run("print('ran')"))
        session = await state(waiting, "queued")
        assert session["queue_position"] == 1
        assert session["wait_reason"]
        await asyncio.sleep(0)
        flag.touch()
        (await holder).check()
        done = (await cell).check()
        assert done.text.strip() == "ran"
        said = " ".join(done.displays)
        assert not done.displays or "position" in said, said
        assert done.outputs[-1] == "stream"
        if done.displays:
            assert "clear_output" in done.outputs, done.outputs
        await pool.stop_kernels()

    play(scenario())


def test_interrupted_waiting_cell_does_not_run(pool):
    pool = pool(ONE, default_memory=512 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        busy, waiting = await pool.kernel("busy"), await pool.kernel("waiting")
        holder = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        cell = asyncio.create_task(waiting.run("open('ran', 'w')"))
        await state(waiting, "queued")
        await waiting.interrupt()
        done = await asyncio.wait_for(cell, 60)
        assert done.status == "error"
        await state(waiting, "detached")
        assert waiting.session()["queue_position"] is None
        flag.touch()
        (await holder).check()
        (await waiting.run("import os; assert not os.path.exists('ran')")).check()
        await pool.stop_kernels()

    play(scenario())


def test_kernel_over_its_quota_waits_and_shows_the_reason(pool):
    pool = pool(ONE, default_memory=SLICE, quotas={"*": {"memory": 300 * MiB}})
    flag = pool.folder / "go"

    async def scenario():
        first, second = await pool.kernel("first"), await pool.kernel("second")
        holder = asyncio.create_task(first.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(first, "active")
        cell = asyncio.create_task(second.run(cells.setup(2, DATA)))
        session = await state(second, "queued")
        assert "quota" in session["wait_reason"].lower() or "300 MiB" in session["wait_reason"]
        flag.touch()
        (await holder).check()
        (await cell).check()
        (await first.run("block.verify()")).check()
        (await second.run("block.verify()")).check()
        refused = await second.run("%gpu 400MiB")
        said = refused.text + refused.evalue + " ".join(refused.displays)
        assert "300 MiB" in said, said
        await pool.stop_kernels()

    play(scenario())


# ---------------------------------------------------------------------- the kernel's own life


def test_restart_gives_the_slice_back_and_starts_clean(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        before = kernel.session()["id"]
        await kernel.restart()
        session = kernel.session()
        assert session["granted_bytes"] == session["suspended_bytes"] == 0
        assert len(pool.sessions()) == 1
        assert (await kernel.run("block")).ename == "NameError"
        (await kernel.run(cells.setup(2, DATA) + "block.verify()")).check()
        assert before
        await kernel.stop()

    play(scenario())


@pytest.mark.parametrize("suspend", [False, True], ids=["attached", "suspended"])
def test_shutdown_of_a_kernel_ends_its_session(pool, suspend):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        if suspend:
            pool.call("release", session=kernel.session()["id"])
            await suspended(kernel)
        await kernel.stop()
        assert not pool.sessions()

    play(scenario())


def test_restarted_broker_recovers_kernels_in_every_state(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        kernels = [await pool.kernel(f"k{i}") for i in range(4)]
        away, idle, busy, waiting = kernels
        for number, kernel in enumerate((away, idle)):
            (await kernel.run(cells.setup(number, DATA))).check()
        # This command makes sure that the broker suspends ``away``. Without it, the broker first
        # asks the agent of ``away``, which has been idle for longer. But on a busy machine, the
        # agent may not answer within a second. Then the broker would suspend ``idle``.
        (await idle.run("%gpu keep 10m")).check()
        (await busy.run(cells.setup(2, DATA))).check()
        await suspended(away)
        work = asyncio.create_task(busy.run(cells.busy(flag) + "block.verify()", timeout=90))
        await state(busy, "active")
        wait = asyncio.create_task(waiting.run("1 + 1", timeout=90))
        await state(waiting, "queued")
        before = {k.label: k.session() for k in kernels}
        pool.kill_broker()
        pool.start_broker()
        await until(
            lambda: (
                all(k.session() for k in kernels)
                and all(
                    k.session()["state"] == before[k.label]["state"] for k in (away, busy, waiting)
                )
            ),
            "the sessions as they were",
            show=lambda: (before, pool.sessions()),
        )
        for kernel in kernels:
            now, then = kernel.session(), before[kernel.label]
            for name in ("id", "pid", "granted_bytes", "suspended_bytes", "device", "owner"):
                assert now[name] == then[name], (name, then, now)
        flag.touch()
        (await work).check()
        (await wait).check()
        for kernel in (away, idle, busy):
            (await kernel.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_provisioner_starts_a_broker_if_none_runs(pool):
    """The start of the next kernel starts a broker. This broker also serves the older kernel."""
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        old = await pool.kernel("old")
        (await old.run(cells.setup(1, DATA))).check()
        pool.kill_broker()
        new = await pool.kernel("new")
        assert new.session()
        await until(lambda: old.session(), "the old kernel to be known again")
        (await new.run(cells.setup(2, DATA) + "block.verify()")).check()
        (await old.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_gpu_cell_without_a_broker_fails_with_a_clear_error(pool):
    pool = pool(ONE, attach="manual", default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run("x = 41")).check()
        pool.kill_broker(for_good=True)
        (await kernel.run("x += 1")).check()
        cell = await kernel.run("%gpu attach")
        said = cell.text + cell.evalue + " ".join(cell.displays)
        assert str(pool.socket) in said, said
        assert (await kernel.run("print(x)")).check().text.strip() == "42"
        pool.start_broker()
        await until(lambda: (kernel.session() or {}).get("agent"), "the kernel to be back")
        (await kernel.run("%gpu attach")).check()
        (await kernel.run(cells.setup(1, DATA) + "block.verify()")).check()
        await kernel.stop()

    play(scenario())


# ---------------------------------------------------------------------- notebooks


def test_nbclient_saves_no_trace_of_a_wait(pool):
    import nbformat
    from nbclient import NotebookClient
    from traitlets.config import Config

    pool = pool(ONE, default_memory=512 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        busy = await pool.kernel("busy")
        holder = asyncio.create_task(busy.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(busy, "active")
        new = nbformat.v4.new_code_cell
        notebook = nbformat.v4.new_notebook(
            cells=[
                new(cells.setup(2, DATA)),
                new("block.verify(); print('all there')"),
            ],
            metadata={"kernelspec": {"name": "gpupool-python3", "display_name": "Pooled GPU"}},
        )
        # With TCP, another process could bind the kernel's port before the kernel does.
        manager = {"transport": "ipc", "connection_file": str(pool.folder / "k.json")}
        client = NotebookClient(notebook, timeout=90, config=Config({"KernelManager": manager}))
        run = asyncio.create_task(client.async_execute())
        await until(
            lambda: any(s["state"] == "queued" for s in pool.sessions()), "the notebook to wait"
        )
        flag.touch()
        (await holder).check()
        await run
        assert notebook.cells[0].outputs == []
        assert [o["text"] for o in notebook.cells[1].outputs] == ["all there\n"]
        await pool.stop_kernels()

    play(scenario())
