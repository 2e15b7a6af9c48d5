# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Notebooks under the guard that wait, get interrupts, take turns, or have child processes."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from .conftest import workloads
from .session import MiB, Notebook, measured
from .workloads import expected

#: These tests are for real drivers. Other tests check the same behaviour on emulated devices.
pytestmark = pytest.mark.long


#: A cell that computes until the file exists, for at most a minute.
BUSY = """
import time
from pathlib import Path
end = time.monotonic() + 60
while not Path({flag!r}).exists() and time.monotonic() < end:
    work.work("mine", 0)
    work.sync()
    time.sleep(0.01)
"""


@contextlib.asynccontextmanager
async def busy(neighbour, flag):
    """Let the neighbour keep the device busy inside this block."""
    flag.unlink(missing_ok=True)
    cell = asyncio.create_task(neighbour.cell(BUSY.format(flag=str(flag))))
    try:
        await neighbour.wait("to compute", lambda s: s["state"] == "active" and s["granted_bytes"])
        yield
    finally:
        flag.touch()
        await cell


async def interrupted(notebook, code):
    """Interrupt a cell that waits in a CUDA call; return how the cell ended."""
    cell = asyncio.create_task(notebook.run(code))
    await notebook.wait("to wait", lambda s: s["state"] == "queued" or cell.done())
    assert not cell.done(), f"the cell did not wait: {cell.result()}"
    await notebook.kernel.interrupt()
    return await cell


@workloads("cuda-core", "torch", "cupy", "numba", "jax")
def test_framework_works_after_its_first_call_was_interrupted(
    pooled, notebook, neighbour, workload, tmp_path, note
):
    """The user interrupts the framework's first CUDA call, before the process has a context.

    The next call must find the device, although a framework may keep the result of its first
    search for a device.
    """
    size, flag = pooled.machine.bytes(64 * MiB), tmp_path / "go"
    begin = f"work = workloads.WORKLOADS[{workload!r}][0]()\nwork.put('mine', {size}, 1)"

    async def scenario():
        async with busy(neighbour, flag):
            with measured(note, "seconds"):
                done = await interrupted(notebook, begin)
            note(error=f"{done.ename}: {done.evalue[:300]}")
            assert done.ename == "KeyboardInterrupt", done
        await notebook.cell(begin)
        assert await notebook.digest("mine") == expected(size, 1)

    pooled.play(scenario())


@workloads("cuda-core", "torch", "cupy", "numba")
def test_interrupted_wait_leaves_the_state_in_host_memory(
    pooled, notebook, neighbour, workload, tmp_path, note
):
    size, flag = pooled.machine.bytes(64 * MiB), tmp_path / "go"

    async def scenario():
        await notebook.begin()
        await notebook.put("mine", size, 1)
        await notebook.release()
        async with busy(neighbour, flag):
            with measured(note, "seconds"):
                done = await interrupted(notebook, "work.work('mine', 3); work.sync()")
            note(error=f"{done.ename}: {done.evalue[:300]}")
            assert done.ename == "KeyboardInterrupt", done
            assert notebook.session["suspended_bytes"] >= size
        assert await notebook.digest("mine") == expected(size, 1)
        await notebook.steps("mine", 2, 3)
        assert await notebook.digest("mine") == expected(size, 1, 6)

    pooled.play(scenario())


@workloads("jax")
def test_first_interrupt_does_not_end_a_call_with_donated_arrays(
    pooled, notebook, neighbour, workload, tmp_path
):
    """After the first interrupt, the call still waits, and the cell later ends without an error.

    If this interrupt ended the call, JAX would lose the donated arrays of the call.
    """
    size, flag = pooled.machine.bytes(64 * MiB), tmp_path / "go"

    async def scenario():
        await notebook.begin()
        await notebook.put("mine", size, 1)
        await notebook.release()
        async with busy(neighbour, flag):
            cell = asyncio.create_task(notebook.run("work.work('mine', 3); work.sync()"))
            await notebook.wait("to wait", lambda s: s["state"] == "queued" or cell.done())
            await notebook.kernel.interrupt()
        assert (await cell).ok, await cell
        assert await notebook.digest("mine") == expected(size, 1, 3)

    pooled.play(scenario())


CHILD = """
import json, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "tests.gpu.child", {workload!r}],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)

def ask(*request):
    print(json.dumps(request), file=child.stdin, flush=True)
    answer = json.loads(child.stdout.readline())
    assert "error" not in answer, answer
    return answer["ok"]

ask("start")
ask("put", "theirs", {size}, 5)
"""


@workloads("cuda-core", "torch")
def test_processes_of_a_notebook_share_and_follow_its_slice(
    pooled, notebook, neighbour, workload, note
):
    size = pooled.machine.bytes(128 * MiB)

    async def scenario():
        await notebook.begin()
        await notebook.put("mine", size, 1)
        one = notebook.session["used_bytes"]
        await notebook.cell(CHILD.format(workload=workload, size=size))
        both = notebook.session["used_bytes"]
        note(one=one, both=both)
        assert both >= one + size
        session = await notebook.release()
        note(suspended=session["suspended_bytes"])
        assert session["suspended_bytes"] >= 2 * size
        # Allow some foreign memory: a driver uses a little memory that it lists for no process.
        foreign = [device["memory_foreign"] for device in pooled.pool.devices()]
        note(foreign=foreign)
        assert max(foreign) < size // 2, "the other process's memory counted as nobody's"
        note(left=await pooled.empty(notebook, neighbour))
        await pooled.taken(neighbour)
        assert await notebook.cell("print(ask('digest', 'theirs'))") == expected(size, 5)
        await notebook.steps("mine", 1, 1)
        assert await notebook.digest("mine") == expected(size, 1, 1)
        await notebook.cell("ask('steps', 'theirs', 2, 3)")
        assert await notebook.cell("print(ask('digest', 'theirs'))") == expected(size, 5, 6)
        await notebook.cell("child.stdin.close(); assert child.wait(30) == 0")
        # Do not compare with ``one``: since then, the framework may have loaded code for its GPU
        # kernels.
        await notebook.wait("to count one process", lambda s: s["used_bytes"] <= both - size)

    pooled.play(scenario())


TURNS = """
for turn in range({turns}):
    for _ in range(20):
        work.work("mine", 3)
    work.sync()
    time.sleep({pause})
"""


@workloads("cuda-core", "torch")
def test_two_notebooks_take_turns_during_their_cells(pooled, notebook, workload, note):
    size, turns = pooled.machine.bytes(192 * MiB), 2

    async def scenario():
        other = await Notebook(pooled, "other", workload).start(memory=pooled.most)
        for number, each in enumerate((notebook, other)):
            await each.begin()
            await each.put("mine", size, number)
        code = TURNS.format(turns=turns, pause=0.5)
        with measured(note, "seconds"):
            await asyncio.gather(notebook.cell(code), other.cell(code))
        for number, each in enumerate((notebook, other)):
            assert await each.digest("mine") == expected(size, number, turns * 20 * 3)
            note(**{f"resumes_{number}": each.session["resumes"]})
            assert each.session["resumes"] >= 1, each.session
        pooled.pool.check_ledger()
        await other.stop()

    pooled.play(scenario())
