# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two longer runs: the demo of ``make run``, and a training loop that is suspended half-way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from .conftest import workloads
from .notebooks import NOTEBOOKS
from .session import Notebook, stage

#: Seconds for the demo, and for a notebook.
DEMO, NOTEBOOK = 100.0, 100.0


@pytest.mark.long  # other tests run the demo on two emulated devices
async def test_demo_attaches_suspends_and_restores_on_one_device(machine, kernelspec, note):
    arguments = ["demo", "--emulate", machine.emulate] if machine.emulate else ["demo"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "jupyter_gpupool.cli", *arguments),
        env={k: v for k, v in os.environ.items() if not k.startswith("GPUPOOL_")},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), DEMO)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = output.decode()
    note(said=said[-6000:])
    assert process.returncode == 0, said
    for words in ("attached to gpu", "suspended from gpu", "restored on gpu", "nothing lost"):
        assert words in said.lower(), f"nothing is {words!r}:\n{said}"
    assert "lazy" in said, said


@pytest.fixture(scope="module")
def pooled(machine, kernelspec, request):
    """A pool for this file."""
    with stage(machine, request) as made:
        yield made


class Running:
    """A notebook document that nbclient runs cell by cell on a kernel of the pool."""

    def __init__(self, notebook: Notebook, cells: list[str]) -> None:
        self.notebook = notebook
        self.document = nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(text) for text in cells]
        )
        self._client = NotebookClient(self.document, km=notebook.kernel.manager, timeout=NOTEBOOK)

    async def run(self, cells: range) -> None:
        """Run some of the cells."""
        async with self._client.async_setup_kernel():
            for index in cells:
                await self._client.async_execute_cell(self.document.cells[index], index)

    def outputs(self) -> list[str]:
        """Return the output of all cells, in order."""
        return [
            "".join(o["text"] for o in cell.outputs if o.get("name") == "stdout")
            for cell in self.document.cells
        ]

    def close(self) -> None:
        """Disconnect nbclient from the kernel without ending the kernel."""
        self._client.kc.stop_channels()


@workloads("cuda-core", "torch")
def test_loop_gives_the_same_results_if_suspended_half_way(pooled, workload, note):
    cells = NOTEBOOKS[workload]
    half = range(len(cells) // 2), range(len(cells) // 2, len(cells))

    async def scenario():
        notebook, undisturbed = await asyncio.gather(
            *(
                Notebook(pooled, label, workload).start(memory=pooled.most)
                for label in ("notebook", "undisturbed")
            )
        )
        plain = Running(undisturbed, cells)
        await plain.run(range(len(cells)))
        assert undisturbed.session["suspends"] == 0, undisturbed.session
        plain.close()
        await undisturbed.stop()

        neighbour = await pooled.neighbour(0)
        lent = Running(notebook, cells)
        await lent.run(half[0])
        await pooled.taken(neighbour)
        session = notebook.session
        assert (session["state"], session["suspends"]) == ("detached", 1), session
        await lent.run(half[1])
        session = notebook.session
        assert session["resumes"] == 1, session
        assert neighbour.session["state"] == "detached"

        printed = lent.outputs()
        note(printed=printed, undisturbed=plain.outputs())
        assert all(printed), printed
        assert printed == plain.outputs()

        # With both notebooks suspended, no memory of the tests may remain on the device.
        await notebook.release()
        note(left=await pooled.empty(notebook, neighbour))
        lent.close()
        await notebook.stop()

    pooled.play(scenario())
