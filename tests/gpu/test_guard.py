# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Notebooks of each framework under the guard get the GPU, lose it, and get it back.

A notebook has no GPU before its first CUDA call. The slice of a notebook is most of the device, and
so is the slice of its neighbour. So only one of the two can have the device at a time.
"""

from __future__ import annotations

import psutil

from .conftest import workloads
from .session import LEFT, measured
from .workloads import expected

#: Bytes of the two arrays on a real device.
LARGE, SMALL = 192 << 20, 16 << 20


def test_device_has_the_tier_guarded_and_allows_suspends(pooled, note):
    status = pooled.pool.status()
    device = pooled.device
    keys = ("name", "tier", "tier_reason", "context_bytes", "memory_total", "memory_capacity")
    note(**{key: device[key] for key in keys}, **status["settings"], base=pooled.base)
    assert device["tier"] == "guarded", device["tier_reason"]
    assert device["can_suspend"]
    assert (status["settings"]["attach"], status["settings"]["attach_reason"]) == ("lazy", "")


def test_import_of_a_framework_takes_no_gpu_memory(pooled, note):
    seen, sessions = pooled.look(), pooled.pool.sessions()
    note(left=seen["used"] - pooled.base, kernels=len(sessions))
    assert sessions
    assert all(s["guard"] and s["state"] == "detached" for s in sessions), sessions
    assert not any(s["granted_bytes"] for s in sessions), sessions
    assert not seen["processes"], seen
    assert seen["used"] <= pooled.base + LEFT, (seen, pooled.base)


@workloads(
    "cuda-core", "torch", "torch-expandable", "torch-async", "torch-graph", "triton", "cupy",
    "jax", "numba", "torch-compile",
)  # fmt: skip
def test_notebook_gets_its_bytes_back_after_a_neighbours_turn(pooled, notebook, neighbour, note):
    large, small = pooled.machine.bytes(LARGE), pooled.machine.bytes(SMALL)
    pid = str(notebook.kernel.pid)

    async def scenario():
        session = notebook.session
        assert (session["state"], session["granted_bytes"]) == ("detached", 0), session

        with measured(note, "begin_seconds"):
            note(version=await notebook.begin())
        await notebook.put("large", large, 7)
        await notebook.put("small", small, 8)
        await notebook.steps("large", 3, 1 << 31)
        await notebook.steps("small", 2, 5)
        assert await notebook.digest("large") == expected(large, 7, 3 << 31)
        session = notebook.session
        assert session["granted_bytes"] == pooled.most, session
        assert session["used_bytes"] >= large + small, session
        seen = pooled.look()["processes"].get(pid)
        note(counted=session["used_bytes"], nvml=seen)
        assert seen is None or seen >= large + small

        # Release the slice: the state moves to host memory, and the device is empty.
        process = psutil.Process(int(pid))
        resident = process.memory_info().rss
        with measured(note, "suspend_seconds"):
            session = await notebook.release()
        note(suspended=session["suspended_bytes"], rss=process.memory_info().rss - resident)
        assert session["suspended_bytes"] >= large + small, session
        note(left=await pooled.empty(notebook, neighbour))

        # Let the neighbour compute, with a slice of most of the device.
        with measured(note, "neighbour_seconds"):
            await pooled.taken(neighbour)
        assert notebook.session["state"] == "detached"

        # The next call waits until the notebook has its slice and all its bytes again.
        with measured(note, "resume_seconds"):
            await notebook.steps("small", 1, 5)
        session = notebook.session
        assert session["resumes"] == 1, session
        assert session["granted_bytes"] == pooled.most, session
        assert await notebook.digest("small") == expected(small, 8, 15)
        assert await notebook.digest("large") == expected(large, 7, 3 << 31)
        assert neighbour.session["state"] == "detached"

        # The framework continues: it computes, allocates and frees.
        await notebook.steps("large", 2, 3)
        assert await notebook.digest("large") == expected(large, 7, (3 << 31) + 6)
        await notebook.free("large")
        await notebook.put("next", large, 9)
        await notebook.steps("next", 1, 1)
        assert await notebook.digest("next") == expected(large, 9, 1)

    pooled.play(scenario())


NVML = """
import pynvml
pynvml.nvmlInit()
print(pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0)))
"""

#: PyTorch asks NVML for the number of devices. Clear the answer that PyTorch has kept, so that it
#: asks again.
TORCH_NVML = (
    NVML
    + """
if torch.version.cuda:
    torch.cuda._cached_device_count = None
    assert torch.cuda.device_count() == pynvml.nvmlDeviceGetCount()
"""
)

#: Starts a thread that calls NVML every 20 ms, like a collector of metrics.
POLL = """
import threading
import pynvml
pynvml.nvmlInit()
polled, handle = [0], pynvml.nvmlDeviceGetHandleByIndex(0)
def poll():
    while True:
        pynvml.nvmlDeviceGetUtilizationRates(handle)
        polled[0] += 1
        time.sleep(0.02)
threading.Thread(target=poll, daemon=True).start()
"""


@workloads("cuda-core", "torch")
def test_an_nvml_call_resumes_a_suspended_notebook(pooled, notebook, neighbour, note):
    """The guard asks for the slice before it passes an NVML call of a suspended process to NVML.

    Without the slice, the driver would block the call.
    """
    size = pooled.machine.bytes(SMALL)
    cell = TORCH_NVML if notebook.workload == "torch" else NVML

    async def scenario():
        without = await notebook.cell(cell)
        assert notebook.session["state"] == "detached"  # this NVML call needs no slice
        await notebook.begin()
        await notebook.put("small", size, 8)
        assert await notebook.cell(cell) == without
        await notebook.release()
        await pooled.taken(neighbour)
        with measured(note, "answer_seconds"):
            assert await notebook.cell(cell) == without
        session = notebook.session
        assert (session["resumes"], session["granted_bytes"]) == (1, pooled.most), session
        assert await notebook.digest("small") == expected(size, 8)

    pooled.play(scenario())


@workloads("cuda-core")
def test_thread_that_polls_nvml_lets_its_notebook_be_suspended(pooled, notebook, neighbour, note):
    size = pooled.machine.bytes(SMALL)

    async def scenario():
        await notebook.begin()
        await notebook.put("small", size, 8)
        await notebook.cell(POLL)
        with measured(note, "suspend_seconds"):
            await notebook.release()
        await pooled.taken(neighbour)
        before = int(await notebook.cell("print(polled[0])"))
        session = notebook.session
        note(polled=before)
        assert (session["state"], session["resumes"]) == ("detached", 0), session
        assert await notebook.digest("small") == expected(size, 8)
        assert notebook.session["resumes"] == 1
        await notebook.cell(f"while polled[0] < {before + 2}: time.sleep(0.02)")

    pooled.play(scenario())
