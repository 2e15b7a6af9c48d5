# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Slices have exactly the requested size, and change while a notebook runs."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import workloads
from .session import GiB, MiB, Notebook, items, stage
from .workloads import expected

#: These tests are for real drivers. Other tests check the same behaviour on emulated devices.
pytestmark = pytest.mark.long

#: The out-of-memory error of each framework: the name of the exception, and a part of its text.
TOLD = {
    "cuda-core": ("CUDAError", "CUDA_ERROR_OUT_OF_MEMORY"),
    "torch": ("OutOfMemoryError", "CUDA out of memory"),
    "torch-expandable": ("OutOfMemoryError", "CUDA out of memory"),
    # PyTorch writes the device's number 0 as the character NUL, which ends the text.
    "torch-async": ("OutOfMemoryError", "Allocation on device "),
    "cupy": ("OutOfMemoryError", "Out of memory allocating"),
    "jax": ("RuntimeError", "RESOURCE_EXHAUSTED"),
}


@pytest.fixture(scope="module")
def slice_(machine):
    """Bytes of each notebook's slice, including the context."""
    return machine.bytes(4 * GiB)


@pytest.fixture(scope="module")
def some(machine):
    """Bytes of an array that the tests check."""
    return machine.bytes(256 * MiB)


@pytest.fixture(scope="module")
def pooled(machine, kernelspec, request, slice_):
    """The pool, with a kernel for each test."""
    with stage(machine, request) as made:
        made.prepare(items(request), slice_)
        yield made


def text(size):
    """Return a size as users type it."""
    return f"{size >> 20}MiB"


@workloads("cuda-core", "torch", "torch-expandable", "torch-async", "cupy", "jax")
def test_exceeding_the_slice_raises_the_frameworks_own_error(
    pooled, notebook, workload, slice_, some, note
):
    name, words = TOLD[workload]

    async def scenario():
        await notebook.begin()
        await notebook.put("mine", some, 3)
        failed = await notebook.fails(f"work.put('more', {slice_}, 0); work.sync()")
        note(name=failed.ename, text=failed.evalue[:300], added=failed.traceback[-300:])
        assert failed.ename.endswith(name), failed
        assert words in failed.evalue, failed
        assert "GPU pool:" in failed.traceback + failed.text + " ".join(failed.displays), failed
        # The failed allocation has changed nothing: the bytes are right, and another array fits.
        await notebook.steps("mine", 2, 5)
        assert await notebook.digest("mine") == expected(some, 3, 10)
        await notebook.put("more", some, 4)
        assert await notebook.digest("more") == expected(some, 4)
        session = notebook.session
        assert session["granted_bytes"] == slice_, session
        assert session["used_bytes"] <= slice_, session

    pooled.play(scenario())


MEMORY = """
from cuda.bindings import driver
print(*driver.cuMemGetInfo())
"""

NVML = """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByUUID({uuid!r})
for found in (
    pynvml.nvmlDeviceGetMemoryInfo(handle),
    pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
):
    print(found.total, found.used, found.free)
"""


@workloads("cuda-core", "torch", "torch-async")
def test_nine_tenths_of_a_slice_can_be_allocated(pooled, notebook, note):
    size = pooled.machine.bytes(16 * GiB)
    most = size // 10 * 9 // (2 * MiB) * (2 * MiB)

    async def scenario():
        await notebook.cell(f"%gpu {text(size)}")
        await notebook.begin()
        result, free, total = (await notebook.cell(MEMORY)).split()[-3:]
        note(result=result, context=size - int(free), total=int(total))
        assert int(total) == size
        await notebook.cell(f"work.put('most', {most}, 1); work.work('most', 1); work.sync()")
        session = notebook.session
        assert most <= session["used_bytes"] <= session["granted_bytes"] == size, session
        _, left, total = (await notebook.cell(MEMORY)).split()[-3:]
        # Allow for one block of up to 32 MiB: a framework's memory pool may have allocated it
        # before the first reading of the free memory.
        assert int(free) - int(left) >= most - pooled.machine.bytes(32 * MiB)
        assert int(total) == size
        lines = await notebook.cell(NVML.format(uuid=pooled.device["uuid"]))
        for line in lines.splitlines():
            total, used, free_ = map(int, line.split())
            assert (total, used + free_) == (size, size), lines
            assert used >= most, lines
        seen = pooled.look()["processes"].get(str(notebook.kernel.pid))
        note(counted=session["used_bytes"], nvml=seen)
        await notebook.free("most")

    pooled.play(scenario())


@workloads("cuda-core", "torch", "torch-expandable", "cupy")
def test_slice_changes_its_size_while_the_notebook_runs(pooled, notebook, slice_, some, note):
    more = slice_ // 2 * 3

    async def scenario():
        await notebook.begin()
        await notebook.put("mine", some, 1)
        await notebook.fails(f"work.put('more', {more}, 2); work.sync()")
        note(larger=await notebook.cell(f"%gpu {text(2 * slice_)}"))
        await notebook.cell(f"work.put('more', {more}, 2); work.sync()")
        session = notebook.session
        assert session["granted_bytes"] == 2 * slice_, session
        assert session["suspends"] == 0, session
        assert await notebook.digest("mine") == expected(some, 1)

        # The pool refuses a slice that is smaller than the used memory. The slice stays as it is.
        await notebook.wait("to be measured", lambda s: (s["footprint_bytes"] or 0) >= more)
        refused = await notebook.run(f"%gpu {text(slice_)}")
        said = f"{refused.text} {refused.evalue}"
        note(smaller=said)
        assert "Free memory first" in said, refused
        assert notebook.session["granted_bytes"] == 2 * slice_

        # After the notebook has freed memory, the pool makes the slice smaller.
        await notebook.free("more")
        await notebook.wait("to be measured", lambda s: (s["footprint_bytes"] or 0) < slice_)
        note(smaller_then=await notebook.cell(f"%gpu {text(slice_)}"))
        await notebook.wait("to have less", lambda s: s["granted_bytes"] == slice_)
        await notebook.fails(f"work.put('more', {more}, 2); work.sync()")
        await notebook.steps("mine", 1, 1)
        assert await notebook.digest("mine") == expected(some, 1, 1)

    pooled.play(scenario())


@workloads("cuda-core", "torch")
def test_slice_grows_by_itself_up_to_its_limit(pooled, notebook, slice_, note):
    async def scenario():
        note(said=await notebook.cell(f"%gpu {text(slice_)} --limit {text(2 * slice_)}"))
        await notebook.begin()
        before = notebook.session["granted_bytes"]
        await notebook.put("mine", slice_ // 2 * 3, 1)
        session = notebook.session
        assert before == slice_ < session["granted_bytes"] <= 2 * slice_, (before, session)
        failed = await notebook.fails(f"work.put('more', {slice_}, 2); work.sync()")
        assert "GPU pool:" in failed.traceback + failed.text + " ".join(failed.displays), failed
        assert notebook.session["granted_bytes"] <= 2 * slice_

    pooled.play(scenario())


GREEDY = """
import time
refused, end = 0, time.monotonic() + 60
while refused < {number} and time.monotonic() < end:
    try:
        work.put("more", {size}, 0)
        work.sync()
    except Exception as error:
        refused += 1
print(refused)
"""

STEADY = """
import time
turns, end = 0, time.monotonic() + {seconds}
while time.monotonic() < end:
    work.work("mine", 3)
    work.sync()
    turns += 1
print(turns)
"""


@workloads("cuda-core", "torch")
def test_excessive_request_does_not_harm_a_neighbour(
    pooled, notebook, workload, slice_, some, note
):
    async def scenario():
        modest = await Notebook(pooled, "modest", workload).start(memory=slice_)
        for number, each in enumerate((notebook, modest)):
            await each.begin()
            await each.put("mine", some, number)
            await each.put("half", slice_ // 2, 0)
        refused, turns = await asyncio.gather(
            notebook.cell(GREEDY.format(number=20, size=slice_)),
            modest.cell(STEADY.format(seconds=1.5)),
        )
        note(turns=turns)
        assert refused == "20"
        assert await modest.digest("mine") == expected(some, 1, 3 * int(turns))
        assert await notebook.digest("mine") == expected(some, 0)
        # The neighbour's bytes are intact.
        await modest.put("rest", slice_ // 8, 5)
        for each in (notebook, modest):
            session = each.session
            assert (session["suspends"], session["granted_bytes"]) == (0, slice_), session
            assert not session["overuse_bytes"], session
        pooled.pool.check_ledger()
        await modest.stop()

    pooled.play(scenario())
