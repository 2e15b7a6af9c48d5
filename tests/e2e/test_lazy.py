# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Policy ``lazy``, the default: a kernel gets a slice at a CUDA call, and may
lose it between calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from jupyter_gpupool.guard.page import Page

from . import cells
from .kit import MiB, Sampler, until
from .scenes import DATA, occupied, play, release, said, state, suspended, with_blocks

ONE = "1x640MiB,context=32MiB"
SLICE = 400 * MiB  # a GPU has no room for two of these

#: In these tests, a kernel without a CUDA call for this many seconds counts as idle.
QUIET = 0.3


def messages(kernel):
    return kernel.session()["messages"]


# ---------------------------------------------------------------------- no messages

PANDAS = """
import numpy as np
rng = np.random.default_rng({n})
frame = {{name: rng.normal(size=200_000) for name in "abcd"}}
keys = rng.integers(0, 50, size=200_000)
order = np.argsort(keys, kind="stable")
edges = np.searchsorted(keys[order], np.arange(50))
means = {{name: np.add.reduceat(column[order], edges) for name, column in frame.items()}}
print(sum(float(v.sum()) for v in means.values()))
"""


@pytest.mark.parametrize("mib", [64, pytest.param(1024, marks=pytest.mark.long)])
def test_cpu_work_resumes_no_state_and_sends_no_message(pool, mib):
    pool = pool("1x1638MiB,context=64MiB", default_memory=(mib + 128) * MiB)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(5, mib))).check()
        session = await release(pool, kernel)
        assert session["suspended_bytes"] >= mib * MiB
        before, moved = messages(kernel), session["resumes"]
        for n in range(10):
            assert (await kernel.run(PANDAS.format(n=n))).check().text
            (await kernel.run("x = 1", silent=True)).check()
        session = kernel.session()
        assert session["messages"] == before
        assert (session["state"], session["resumes"]) == ("detached", moved)
        assert session["suspended_bytes"] >= mib * MiB
        (await kernel.run("block.verify()")).check()
        assert kernel.session()["resumes"] == moved + 1
        await kernel.stop()

    play(scenario())


def test_kernel_without_cuda_sends_only_its_first_messages(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        for n in range(5):
            (await kernel.run(PANDAS.format(n=n))).check()
        # The guard answers these calls without a lease, because they use no device.
        (
            await kernel.run(
                "from cuda.bindings import driver\n"
                "assert driver.cuInit(0)[0] == 0\n"
                "assert driver.cuDeviceGetCount() == (0, 1)"
            )
        ).check()
        session = kernel.session()
        assert (session["messages"], session["state"]) == (1, "detached")
        await kernel.stop()
        assert not [r for r in pool.journal() if r["kind"] in ("attach", "queue")]

    play(scenario())


def test_tooltips_and_completions_do_not_resume_a_kernel(pool):
    pool = pool(ONE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(5, DATA))).check()
        (
            await kernel.run(
                "class Tensor:\n"
                "    def __repr__(self): block.verify(); return 'all there'\n"
                "    @property\n"
                "    def shape(self): block.verify(); return (1,)\n"
                "tensor = Tensor()"
            )
        ).check()
        await release(pool, kernel)
        before = messages(kernel)
        reply = await kernel.client.inspect("tensor", reply=True, timeout=60)
        assert "host memory" in reply["content"]["data"]["text/plain"]
        for text in ("tensor.", "tensor.sh", "tensor.shape.", "tensor"):
            await kernel.client.complete(text, reply=True, timeout=60)
        assert messages(kernel) == before
        assert kernel.session()["state"] == "detached"
        (await kernel.run("tensor")).check()
        reply = await kernel.client.inspect("tensor", reply=True, timeout=60)
        assert "all there" in reply["content"]["data"]["text/plain"]
        await kernel.stop()

    play(scenario())


GARBAGE = """
import gc, weakref
class Tensor:
    def __init__(self):
        self.address = int(call(driver.cuMemAlloc(1 << 20)))
        self.event = call(driver.cuEventCreate(0))
        self.itself = self  # only the garbage collector finds it
    def __del__(self):
        call(driver.cuEventQuery(self.event))
        call(driver.cuMemFree(self.address))
        call(driver.cuEventDestroy(self.event))
tensors = [Tensor() for _ in range(20)]
"""


def test_garbage_is_collected_while_another_kernel_has_the_gpu(pool):
    """A suspended kernel collects garbage: the calls that free device memory do not wait.

    They ask for no lease. The memory is freed at the next resume.
    """
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    flag = pool.folder / "go"

    async def scenario():
        first, other = await pool.kernel("first"), await pool.kernel("other")
        (await first.run(cells.setup(1, DATA) + GARBAGE)).check()
        code = cells.setup(2, DATA) + cells.computing(flag)
        cell = asyncio.create_task(other.run(code, timeout=120))
        await suspended(first)
        before = messages(first)
        (await first.run("del tensors; print(gc.collect() >= 20)")).check()
        session = first.session()
        assert (session["state"], session["messages"]) == ("detached", before)
        assert "host memory" in said((await first.run("%gpu")).check())
        assert not cell.done(), "the other kernel is still computing"
        flag.touch()
        (await cell).check()
        (await first.run("block.verify()")).check()
        await first.stop()
        await other.stop()

    play(scenario())


# ---------------------------------------------------------------------- recording a graph

RECORD = """
stream = call(driver.cuStreamCreate(1))
address = int(call(driver.cuMemAlloc(4096)))
call(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode(0)))
call(driver.cuMemsetD8Async(address, 7, 4096, stream))
{busy}
call(driver.cuMemsetD8Async(address, 9, 2048, stream))
graph = call(driver.cuStreamEndCapture(stream))
run = call(driver.cuGraphInstantiate(graph, 0))
"""
REPLAY = """
call(driver.cuMemsetD8(address, 1, 4096))
call(driver.cuGraphLaunch(run, stream))
call(driver.cuStreamSynchronize(stream))
back = np.empty(4096, dtype=np.uint8)
call(driver.cuMemcpyDtoH(back.ctypes.data, address, 4096))
assert (back[:2048] == 9).all() and (back[2048:] == 7).all()
block.verify()
"""


def test_graph_capture_is_not_preempted(pool):
    """A kernel keeps its slice while it records a graph, even without a CUDA call.

    It makes no call for longer than ``quiet_after``, so without the capture it would be idle.
    """
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    flag = pool.folder / "go"

    async def scenario():
        first, other = await pool.kernel("first"), await pool.kernel("other")
        (await first.run(cells.setup(1, DATA))).check()
        recording = asyncio.create_task(first.run(RECORD.format(busy=cells.busy(flag))))
        page = Page.open(Path(psutil.Process(first.pid).environ()["GPUPOOL_PAGE"]))
        await until(lambda: page.read().captures, "the recording", show=first.session)
        cell = asyncio.create_task(other.run(cells.setup(2, DATA), timeout=90))
        await state(other, "queued")
        with pytest.raises(AssertionError):
            await until(
                lambda: first.session()["state"] not in ("active", "idle", "detaching"),
                "a suspend",
                timeout=8 * QUIET,
            )
        assert first.session()["suspends"] == 0
        assert not cell.done()
        assert not recording.done()
        flag.touch()
        (await recording).check()
        (await cell).check()
        (await first.run(REPLAY)).check()
        page.close()
        await first.stop()
        await other.stop()

    play(scenario())


# ------------------------------------------------------------------ losing and regaining a slice


def test_running_cell_loses_its_slice_and_continues(pool):
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    flag = pool.folder / "go"

    async def scenario():
        first, other = await pool.kernel("first"), await pool.kernel("other")
        code = cells.setup(1, DATA) + "block.compute()\n" + cells.busy(flag) + "block.verify()"
        cell = asyncio.create_task(first.run(code, timeout=90))
        await until(lambda: first.session()["granted_bytes"], "the burst", show=first.session)
        (await other.run(cells.setup(2, DATA))).check()
        assert not cell.done(), "the first cell still computes on the CPU"
        session = await suspended(first)
        assert session["suspended_bytes"] >= DATA * MiB
        flag.touch()
        (await cell).check()
        assert first.session()["resumes"] >= 1
        (await other.run("block.verify()")).check()
        (await first.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_quiet_cell_keeps_a_slice_that_no_kernel_needs(pool):
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    flag = pool.folder / "go"

    async def scenario():
        kernel = await pool.kernel()
        code = cells.setup(1, DATA) + cells.busy(flag) + "block.verify()"
        cell = asyncio.create_task(kernel.run(code))
        await state(kernel, "idle")
        assert not cell.done()
        flag.touch()
        (await cell).check()
        assert kernel.session()["suspends"] == 0
        await kernel.stop()

    play(scenario())


def test_two_large_kernels_take_turns_call_by_call(pool):
    pool = pool(ONE, default_memory=448 * MiB, quiet_after=QUIET)
    work = """
import time
for turn in range(3):
    block.write(turn).compute().verify()
    time.sleep(1.0)
    block.verify()
"""

    async def scenario():
        with Sampler(pool) as sampler:
            kernels = [await pool.kernel(f"k{n}") for n in range(2)]
            setups = [k.run(cells.setup(n, 96), timeout=90) for n, k in enumerate(kernels)]
            for cell in await asyncio.gather(*setups):
                cell.check()
            for cell in await asyncio.gather(*(k.run(work, timeout=90) for k in kernels)):
                cell.check()
            for kernel in kernels:
                (await kernel.run("block.verify()")).check()
                assert kernel.session()["resumes"] >= 1, kernel.session()
            pool.check_ledger()
            await pool.stop_kernels()
        sampler.check(at_least=10)

    play(scenario())


def test_threads_widgets_and_tasks_get_a_slice_without_a_cell(pool):
    pool = pool(ONE, default_memory=SLICE, quiet_after=QUIET)
    flag, thread, task = (pool.folder / name for name in ("go", "thread", "task"))
    background = f"""
import asyncio, threading, time
from pathlib import Path
context = call(driver.cuCtxGetCurrent())
flag = Path({str(flag)!r})

def check(path):
    try:
        call(driver.cuCtxSetCurrent(context))
        block.verify()
        Path(path).write_text("fine")
    except BaseException as error:
        Path(path).write_text(repr(error))

def work():
    while not flag.exists():
        time.sleep(0.01)
    check({str(thread)!r})

async def later():
    while not flag.exists():
        await asyncio.sleep(0.01)
    check({str(task)!r})

threading.Thread(target=work).start()
kept = asyncio.get_running_loop().create_task(later())
"""
    comm = """
seen = []
def opened(channel, message):
    channel.on_msg(lambda m: (block.verify(), seen.append(m["content"]["data"])))
get_ipython().kernel.comm_manager.register_target("test", opened)
"""

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA) + background + comm)).check()
        await release(pool, kernel)
        flag.touch()
        for path in (thread, task):
            text = await until(
                lambda path=path: path.exists() and path.read_text(), f"the {path.name}'s word"
            )
            assert text == "fine"
        await release(pool, kernel)
        resumes = kernel.session()["resumes"]
        for kind, content in (("comm_open", {"target_name": "test"}), ("comm_msg", {})):
            body = {"comm_id": "c1", "data": {"n": 1}, **content}
            kernel.client.shell_channel.send(kernel.client.session.msg(kind, body))
        await until(lambda: kernel.session()["resumes"] > resumes, "the widget's resume")
        assert (await kernel.run("print(seen)")).check().text == "[{'n': 1}]\n"
        await kernel.stop()

    play(scenario())


# ---------------------------------------------------------------------- the wait in a call


def test_waiting_call_shows_its_wait_and_can_be_interrupted(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        busy, work = await occupied(pool, flag)
        waiting = await with_blocks(pool, "waiting")
        # The test interrupts two waits, because the first one must not change the second one.
        for _ in range(2):
            cell = asyncio.create_task(waiting.run("block = Block(64).allocate()"))
            session = await state(waiting, "queued")
            assert session["queue_position"] == 1
            assert session["wait_reason"]
            await until(lambda: waiting.latest.displays, "the cell to show it")
            await waiting.interrupt()
            done = await cell
            assert done.ename == "KeyboardInterrupt", done
            assert "position 1 of 1" in done.displays[0], done
            gone = "clear_output" in done.outputs or done.displays[-1] == ""
            assert gone, f"the wait is over, but still shown: {done}"
            assert "you stopped the wait for a GPU slice" in done.text
            await state(waiting, "detached")
            assert waiting.session()["queue_position"] is None
        cell = asyncio.create_task(waiting.run("block = Block(64).allocate().write(1)"))
        await state(waiting, "queued")
        flag.touch()
        (await work).check()
        (await cell).check()
        (await waiting.run("block.verify()")).check()
        (await busy.run("block.verify()")).check()
        await pool.stop_kernels()

    play(scenario())


def test_finished_wait_leaves_no_trace_in_the_cell(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        _, work = await occupied(pool, flag)
        waiting = await with_blocks(pool, "waiting")
        cell = asyncio.create_task(
            waiting.run("block = Block(64).allocate().write(1)\nprint('ran')")
        )
        await state(waiting, "queued")
        await until(lambda: waiting.latest.displays, "the cell to show it")
        flag.touch()
        (await work).check()
        done = (await cell).check()
        assert "position 1 of 1" in done.displays[0]
        assert done.outputs[-2:] == ["clear_output", "stream"], done.outputs
        assert done.text == "ran\n"
        await pool.stop_kernels()

    play(scenario())


WORKER = """
import threading, time
context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0)))) if {context} else None
ended = []
def work():
    try:
        Block(64).allocate()
        ended.append("allocated")
    except BaseException as error:
        ended.append(str(error))
worker = threading.Thread(target=work)
worker.start()
"""


def test_an_interrupt_also_ends_the_wait_of_a_worker_thread(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        _, work = await occupied(pool, flag)
        waiting = await with_blocks(pool, "waiting")
        code = WORKER.format(context=False) + "while worker.is_alive(): time.sleep(0.01)"
        cell = asyncio.create_task(waiting.run(code))
        await state(waiting, "queued")
        await waiting.interrupt()
        assert (await cell).ename == "KeyboardInterrupt"
        done = (await waiting.run("worker.join(60); print(worker.is_alive(), *ended)")).check()
        assert done.text.startswith("False"), done.text
        assert "CUDA_ERROR_SYSTEM_NOT_READY" in done.text, done.text
        await state(waiting, "detached")
        flag.touch()
        (await work).check()
        await pool.stop_kernels()

    play(scenario())


def test_cell_can_be_interrupted_while_an_older_thread_waits(pool):
    pool = pool(ONE, default_memory=SLICE)
    flag = pool.folder / "go"

    async def scenario():
        _, work = await occupied(pool, flag)
        waiting = await with_blocks(pool, "waiting")
        (await waiting.run(WORKER.format(context=False))).check()
        await state(waiting, "queued")
        cell = asyncio.create_task(waiting.run("block = Block(64).allocate()"))
        page = Page.open(Path(psutil.Process(waiting.pid).environ()["GPUPOOL_PAGE"]))
        await until(lambda: page.read().waiting == 2, "two threads to wait")
        page.close()
        await waiting.interrupt()
        assert (await cell).ename == "KeyboardInterrupt"
        flag.touch()
        (await work).check()
        (await waiting.run("worker.join(20); assert not worker.is_alive()")).check()
        await pool.stop_kernels()

    play(scenario())
