# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Notebooks that use child processes, threads and streams, or run on a driver with faults."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from functools import partial

import psutil
import pytest

from . import cells
from .kit import MiB, runs, until
from .scenes import DATA, play, release, state, suspended
from .test_lifecycle import MACHINE, SLICE


@pytest.fixture
def pool(pool):
    """Use the policy ``cell``: a running cell keeps its slice, also without CUDA calls."""
    return partial(pool, attach="cell")


# ---------------------------------------------------------------------- shapes of work


TWO_DEVICES = """
blocks = []
for ordinal in range(2):
    context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(ordinal))))
    call(driver.cuCtxSetCurrent(context))
    blocks.append((context, Block(64).allocate().write(10 + ordinal)))

def each():
    found = []
    for context, block in blocks:
        call(driver.cuCtxSetCurrent(context))
        block.verify()
        found.append(device())
    return found
"""


def test_kernel_on_two_devices_is_suspended_and_resumed(pool):
    pool = pool(MACHINE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel("wide", provisioner={"devices": 2})
        setup = f"SEED = 3\n{cells.DEFINE}\ncall(driver.cuInit(0))\n{TWO_DEVICES}\neach()"
        (await kernel.run(setup)).check()
        session = await state(kernel, "idle")
        assert sorted(session["devices"]) == sorted(d["uuid"] for d in pool.devices())
        assert session["granted_bytes"] == 2 * SLICE
        session = await release(pool, kernel)
        assert session["suspended_bytes"] >= 2 * 64 * MiB
        (await kernel.run("assert len(set(each())) == 2")).check()
        await kernel.stop()

    play(scenario())


def test_kernel_for_two_devices_waits_for_both(pool):
    pool = pool(MACHINE, default_memory=512 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        narrow = await pool.kernel("narrow")
        wide = await pool.kernel("wide", provisioner={"devices": 2})
        busy = asyncio.create_task(narrow.run(cells.setup(1, DATA) + cells.busy(flag)))
        await state(narrow, "active")
        setup = f"SEED = 3\n{cells.DEFINE}\ncall(driver.cuInit(0))\n{TWO_DEVICES}\neach()"
        waiting = asyncio.create_task(wide.run(setup))
        session = await state(wide, "queued")
        assert session["granted_bytes"] == 0, "all or nothing"
        assert session["wait_reason"]
        flag.touch()
        (await busy).check()
        (await waiting).check()
        (await narrow.run("block.verify()")).check()
        (await wide.run("each()")).check()
        await pool.stop_kernels()

    play(scenario())


CHILD = """
import subprocess, sys, textwrap
program = {define!r} + textwrap.dedent('''
    SEED = 77
    block = Block({mib}).allocate().write(1)
    print("ready", flush=True)
    for line in sys.stdin:
        block.verify()
        print("fine", flush=True)
''')
child = subprocess.Popen(
    [sys.executable, "-c", "import sys\\n" + program],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
)
assert child.stdout.readline() == "ready\\n"

def ask_child():
    child.stdin.write("?\\n")
    child.stdin.flush()
    assert child.stdout.readline() == "fine\\n"
"""


def test_children_of_a_kernel_move_with_it(pool):
    pool = pool(MACHINE, default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, 48))).check()
        (await kernel.run(CHILD.format(define=cells.DEFINE, mib=48))).check()
        session = await release(pool, kernel)
        # These are two contexts of 32 MiB and two blocks.
        assert session["suspended_bytes"] >= 160 * MiB, session
        assert all(d["memory_foreign"] == 0 for d in pool.devices())
        (await kernel.run("block.verify(); ask_child()")).check()
        await release(pool, kernel)
        (await kernel.run("ask_child(); block.verify(); child.stdin.close(); child.wait()")).check()
        await kernel.stop()

    play(scenario())


def test_memory_of_a_child_that_outlives_its_kernel_is_counted(pool):
    pool = pool("1x640MiB,context=32MiB", default_memory=SLICE)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, 48))).check()
        code = CHILD.format(define=cells.DEFINE, mib=48).replace(
            "text=True,", "text=True, start_new_session=True,"
        )
        (await kernel.run(code)).check()
        child = int((await kernel.run("print(child.pid)")).check().text)
        other = await pool.kernel("other")
        # When the kernel dies, the child's stdin closes and the child would end. So the test first
        # stops the child (SIGSTOP): a stopped child does not end, and keeps its memory.
        os.kill(child, 19)
        kernel.kill()
        await until(lambda: kernel.session() is None, "the killed kernel's session to end")
        await kernel.stop(now=True)
        if psutil.pid_exists(child):
            await until(
                lambda: pool.devices()[0]["memory_foreign"] >= 48 * MiB,
                "the child's bytes to be counted",
                show=pool.devices,
            )
            (await other.run(cells.setup(2, DATA) + "block.verify()")).check()
            os.kill(child, 9)
        await until(
            lambda: pool.devices()[0]["memory_foreign"] == 0,
            "the child's bytes to be back",
            show=pool.devices,
        )
        await pool.stop_kernels()

    play(scenario())


WAIT_FOR_TURNS = """
end = time.monotonic() + 20
while turns[0] <= before + 2 and not problems:
    assert time.monotonic() < end
    time.sleep(0.01)
assert not problems, problems
"""


def test_thread_continues_when_a_later_cell_has_the_slice(pool):
    """A thread uses the GPU between two cells.

    Its calls may wait, but they must not fail, and the thread must not see wrong bytes.

    Without the guard, as here, the broker does not see the thread's calls, so it can suspend the
    kernel. Under the guard, the calls count as use of the slice (``test_lazy``).
    """
    pool = pool(MACHINE, default_memory=SLICE, guard=False)
    thread = """
import threading, time
context = call(driver.cuCtxGetCurrent())
turns, problems, stop = [0], [], threading.Event()
mine = Block(48).allocate().write(99)
def work():
    try:
        call(driver.cuCtxSetCurrent(context))
        while not stop.is_set():
            mine.verify()
            turns[0] += 1
            time.sleep(0.01)
    except BaseException as error:
        problems.append(repr(error))
worker = threading.Thread(target=work)
worker.start()
"""

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, 64) + thread)).check()
        for _ in range(3):
            await release(pool, kernel)
            (await kernel.run("before = turns[0]; block.verify()")).check()
            (await kernel.run(WAIT_FOR_TURNS)).check()
        (await kernel.run("stop.set(); worker.join(); assert not problems, problems")).check()
        await kernel.stop()

    play(scenario())


def test_suspend_waits_for_work_that_outlives_its_cell(pool):
    pool = pool(f"{MACHINE},bandwidth=2GB/s", default_memory=SLICE)
    code = """
stream = call(driver.cuStreamCreate(0))
host = np.arange(64 << 17, dtype=np.uint64) + np.uint64(SEED)
target = int(call(driver.cuMemAlloc(host.nbytes)))
for _ in range(4):
    call(driver.cuMemcpyHtoDAsync(target, host.ctypes.data, host.nbytes, stream))
"""
    check = """
back = np.empty_like(host)
call(driver.cuStreamSynchronize(stream))
call(driver.cuMemcpyDtoH(back.ctypes.data, target, back.nbytes))
assert (back == host).all()
block.verify()
"""

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, 64))).check()
        (await kernel.run(code)).check()
        await release(pool, kernel)
        (await kernel.run(check)).check()
        await kernel.stop()

    play(scenario())


def test_kernel_that_cannot_be_suspended_is_pinned_and_continues(pool):
    pool = pool("1x640MiB,context=32MiB", default_memory=400 * MiB, managed_memory="allow")

    async def scenario():
        pinned, waiting = await pool.kernel("pinned"), await pool.kernel("waiting")
        code = cells.setup(1, DATA) + "managed = call(driver.cuMemAllocManaged(1 << 20, 1))\n"
        (await pinned.run(code)).check()
        cell = asyncio.create_task(waiting.run(cells.setup(2, DATA)))
        await until(
            lambda: (pinned.session() or {}).get("pinned_reason"),
            "the reason why it is pinned",
            show=pinned.session,
        )
        session = await state(waiting, "queued")
        assert session["wait_reason"]
        (await pinned.run("block.verify()")).check()
        assert pinned.session()["granted_bytes"] == 400 * MiB
        # When the pinned kernel ends, the waiting kernel gets the slice.
        await pinned.stop()
        (await cell).check()
        await pool.stop_kernels()

    play(scenario())


def test_kernels_restarted_by_their_user_leave_nothing_behind(pool):
    """The user restarts the kernel while it is attached, waiting, suspended, or moving."""
    pool = pool("1x640MiB,context=32MiB", default_memory=400 * MiB)
    flag = pool.folder / "go"

    async def scenario():
        kernel, other = await pool.kernel("restarted"), await pool.kernel("other")
        (await kernel.run(cells.setup(1, DATA))).check()
        await kernel.restart()  # while the kernel is attached
        (await kernel.run(cells.setup(2, DATA))).check()
        await release(pool, kernel)
        await kernel.restart()  # while it is suspended
        busy = asyncio.create_task(other.run(cells.setup(3, DATA) + cells.busy(flag)))
        await state(other, "active")
        cell = asyncio.create_task(kernel.run("1"))
        await state(kernel, "queued")
        cell.cancel()
        await asyncio.gather(cell, return_exceptions=True)
        await kernel.restart(now=True)  # while it waits
        flag.touch()
        (await busy).check()
        (await kernel.run(cells.setup(4, DATA))).check()
        pool.call("release", session=kernel.session()["id"])
        await kernel.restart(now=True)  # while it moves, or just after
        (await kernel.run(cells.setup(5, DATA) + "block.verify()")).check()
        (await other.run("block.verify()")).check()
        pool.check_ledger()
        assert len(pool.sessions()) == 2
        await pool.stop_kernels()

    play(scenario())


# ---------------------------------------------------------------------- full devices and slices


def test_a_kernel_that_fills_a_whole_device_comes_back(pool):
    """The kernel fills the device. So a resume has no headroom, and no larger device exists."""
    pool = pool("1x192MiB,context=32MiB", default_memory=192 * MiB)

    async def scenario():
        kernel, other = await pool.kernel("all of it"), await pool.kernel("other")
        (await kernel.run(cells.setup(1, 160))).check()
        (await other.run(cells.setup(2, DATA))).check()
        assert kernel.session()["suspended_bytes"] == 192 * MiB
        (await kernel.run("block.verify().write(2).verify()", timeout=30)).check()
        (await other.run("block.verify()", timeout=30)).check()
        await pool.stop_kernels()

    play(scenario())


def test_two_full_slices_share_a_device_again_after_a_suspend(pool):
    pool = pool("1x192MiB,context=32MiB", default_memory=96 * MiB)

    async def scenario():
        kernels = [await pool.kernel(f"half {number}") for number in range(2)]
        for number, kernel in enumerate(kernels):
            (await kernel.run(cells.setup(number, 64))).check()
        assert pool.devices()[0]["memory_free"] == 0
        for kernel in kernels:
            await release(pool, kernel)
        for _ in range(2):
            for kernel in kernels:
                (await kernel.run("block.verify()", timeout=30)).check()
        await pool.stop_kernels()

    play(scenario())


def test_kernel_over_its_slice_keeps_its_state_and_harms_nobody(pool):
    """Without the guard, a kernel can allocate more bytes than its slice has.

    The ledger must not grant these additional bytes to other kernels.
    """
    pool = pool("1x160MiB,context=32MiB", default_memory=64 * MiB, guard=False)

    async def scenario():
        greedy, modest = await pool.kernel("greedy"), await pool.kernel("modest")
        (await greedy.run(cells.setup(1, 100))).check()
        # The pool learns of the additional bytes with its next sample of device memory.
        await until(lambda: pool.devices()[0]["memory_free"] < 64 * MiB, "the overuse is counted")
        (await modest.run(cells.setup(2, 24) + "block.verify()", timeout=40)).check()
        for kernel in (greedy, modest, greedy):
            (await kernel.run("block.verify()", timeout=40)).check()
        await release(pool, greedy)
        (await greedy.run("block.verify(); block.free()", timeout=40)).check()
        (await modest.run("block.verify()", timeout=40)).check()
        await pool.stop_kernels()

    play(scenario())


def test_resume_beyond_the_quota_works_or_names_the_quota(pool):
    quotas = {"*": {"memory": 300 * MiB}}
    pool = pool("1x640MiB,context=32MiB", default_memory=SLICE, quotas=quotas, guard=False)

    async def scenario():
        greedy = await pool.kernel("greedy")
        (await greedy.run(cells.setup(1, 400))).check()
        await release(pool, greedy)
        done = await greedy.run("block.verify()", timeout=40)
        assert done.ok or "300 MiB" in done.evalue, done
        await greedy.stop()

    play(scenario())


# ---------------------------------------------------------------------- when the driver fails


def test_failed_resume_loses_only_its_own_session(pool):
    pool = pool(MACHINE, default_memory=SLICE)

    async def scenario():
        doomed, other = await pool.kernel("doomed"), await pool.kernel("other")
        for number, kernel in enumerate((doomed, other)):
            (await kernel.run(cells.setup(number, DATA))).check()
        await release(pool, doomed)
        process = psutil.Process(doomed.pid)
        pool.faults.set("restore-failed", pid=doomed.pid, count=1)
        said = []
        cell = asyncio.create_task(doomed.run("block.verify()", timeout=100))
        await until(lambda: doomed.session() is None, "the lost session to end", timeout=30)
        await until(lambda: not runs(process), "the lost kernel to end")
        cell.cancel()
        await asyncio.gather(cell, return_exceptions=True)
        said = [row["reason"] for row in pool.journal() if row["kind"] == "lost"]
        assert said, "no cell showed the failure"
        (await other.run("block.verify().write(3).verify()")).check()
        assert other.session()["suspends"] == 0
        assert all(not d["drained_reason"] for d in pool.devices()), pool.devices()
        await pool.stop_kernels()

    play(scenario())


# The time-out is long: the broker waits two minutes for a worker's copy before it ends the worker.
@pytest.mark.timeout(400)
@pytest.mark.parametrize("op", ["lock", pytest.param("checkpoint", marks=pytest.mark.long)])
def test_hung_worker_is_replaced_and_the_notebook_goes_on(pool, op):
    pool = pool(MACHINE, default_memory=SLICE, lock_timeout=1.0)

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        before = {worker.pid for worker in pool.workers()}
        pool.faults.set("hang", pid=kernel.pid, op=op, count=1)
        pool.call("release", session=kernel.session()["id"])
        await until(
            lambda: {w.pid for w in pool.workers()} - before and len(pool.workers()) == len(before),
            "a new worker in the place of the one that hangs",
            timeout=180,
        )
        (await kernel.run("block.verify().write(4).verify()", timeout=90)).check()
        assert len(pool.sessions()) == 1
        await kernel.stop()

    asyncio.run(asyncio.wait_for(scenario(), 380))


def test_notebooks_of_a_lost_device_resume_elsewhere(pool):
    pool = pool(MACHINE, default_memory=SLICE)

    async def scenario():
        away, other = await pool.kernel("away"), await pool.kernel("other")
        (await away.run(cells.setup(1, DATA))).check()
        home = (await state(away, "idle"))["device"]
        await release(pool, away)
        index = next(d["index"] for d in pool.devices() if d["uuid"] == home)
        pool.faults.set("device-lost", device=index)
        await until(
            lambda: next(d for d in pool.devices() if d["uuid"] == home)["drained_reason"],
            "the lost device to be drained",
            show=pool.devices,
        )
        (await away.run("block.verify()")).check()
        assert away.session()["device"] != home
        (await other.run(cells.setup(2, DATA) + "block.verify()")).check()
        assert other.session()["device"] != home
        await pool.stop_kernels()
        pool.faults.clear()

    play(scenario())


# ---------------------------------------------------------------------- the command line


def test_the_command_line_shows_and_releases_a_real_kernel(pool):
    pool = pool(MACHINE, default_memory=SLICE)

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "jupyter_gpupool.cli", *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    async def scenario():
        kernel = await pool.kernel()
        (await kernel.run(cells.setup(1, DATA))).check()
        done = await asyncio.to_thread(command, "status", "--json")
        assert done.returncode == 0, done.stderr
        status = json.loads(done.stdout)
        (session,) = status["sessions"]
        assert session["pid"] == kernel.pid
        assert session["granted_bytes"] == SLICE
        assert all(d["emulated"] for d in status["devices"])
        done = await asyncio.to_thread(command, "status")
        assert "EMULATED" in done.stdout
        done = await asyncio.to_thread(command, "release", session["id"])
        assert done.returncode == 0, done.stderr
        await suspended(kernel)
        done = await asyncio.to_thread(command, "release", "nonsense")
        assert done.returncode == 1
        assert "nonsense" in done.stderr
        assert "Traceback" not in done.stderr
        (await kernel.run("block.verify()")).check()
        await kernel.stop()

    play(scenario())
