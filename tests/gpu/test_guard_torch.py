# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""PyTorch features beyond arithmetic. In the middle of each test, a neighbour takes the device."""

from __future__ import annotations

import pytest

from .conftest import workloads
from .session import measured
from .torch_cells import CELLS


@workloads("torch")
@pytest.mark.parametrize("about", CELLS)
def test_torch_continues_after_a_neighbour_had_the_gpu(pooled, notebook, neighbour, about, note):
    before, after = CELLS[about]

    async def scenario():
        with measured(note, "before_seconds"):
            note(before=await notebook.cell(before))
        with measured(note, "suspend_seconds"):
            await notebook.release()
        note(left=await pooled.empty(notebook, neighbour))
        await pooled.taken(neighbour)
        with measured(note, "after_seconds"):
            note(after=await notebook.cell(after))
        assert notebook.session["resumes"] >= 1

    pooled.play(scenario())


FREE = """
assert torch.cuda.is_available()
assert torch.cuda.device_count() == 1
"""

SEEN = """
free, total = torch.cuda.mem_get_info()
properties = torch.cuda.get_device_properties(0)
print(free, total, properties.total_memory)
"""


@workloads("torch")
def test_torch_sees_a_device_of_the_size_of_the_slice(pooled, notebook, neighbour, note):
    async def scenario():
        # PyTorch finds one device. The notebook needs no slice for this answer.
        await notebook.cell(FREE)
        session = notebook.session
        assert (session["state"], session["granted_bytes"]) == ("detached", 0), session
        note(name=await notebook.cell("print(torch.cuda.get_device_name(0))"))
        await notebook.cell("x = torch.ones(1 << 20, device='cuda'); torch.cuda.synchronize()")
        free, total, properties = map(int, (await notebook.cell(SEEN)).split())
        note(free=free, total=total, properties=properties, granted=pooled.most)
        assert total == pooled.most
        used = notebook.session["used_bytes"]
        assert abs(total - free - used) <= pooled.machine.bytes(64 << 20), (free, used)
        summary = await notebook.cell("print(torch.cuda.memory_summary())")
        assert "CUDA OOMs: 0" in summary, summary
        # The same calls also need no slice after the slice has been released.
        session = await notebook.release()
        await pooled.taken(neighbour)
        await notebook.cell(FREE + "torch.cuda.get_device_name(0)")
        assert notebook.session["state"] == "detached"
        assert notebook.session["resumes"] == session["resumes"]
        # The guard itself could answer mem_get_info without the slice. But CUDA's runtime may also
        # make other calls here that need the slice. So only note whether the notebook resumes.
        assert int(await notebook.cell("print(torch.cuda.mem_get_info()[1])")) == total
        note(size_asked_for_the_slice=notebook.session["resumes"] > session["resumes"])
        await notebook.cell("assert int(x.sum()) == 1 << 20")
        assert properties == pooled.most

    pooled.play(scenario())
