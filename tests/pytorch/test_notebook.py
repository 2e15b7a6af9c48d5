# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs the PyTorch example notebook alone, and then again with suspends and moves.

Both runs must print the same.
"""

from __future__ import annotations

import json

from tests.e2e.scenes import play, release

from .conftest import EXAMPLE

MEMORY = 1 << 30


def _cells():
    document = json.loads(EXAMPLE.read_text())
    return ["".join(c["source"]) for c in document["cells"] if c["cell_type"] == "code"]


def test_training_continues_exactly_after_suspends_and_moves(pool):
    pool = pool("2x2GiB,context=64MiB")
    printed: dict[str, list[str]] = {"alone": [], "disturbed": []}
    devices = []

    async def train(label):
        kernel = await pool.kernel(label, memory=MEMORY)
        for code in _cells():
            printed[label].append((await kernel.run(code, timeout=200)).check().text)
            if label == "disturbed" and kernel.session()["granted_bytes"]:
                await move(kernel)
        session = kernel.session()
        await kernel.stop()
        return session

    async def move(kernel):
        """Suspend the kernel and drain its GPU, so that the kernel resumes on the other GPU."""
        here = kernel.session()["device"]
        await release(pool, kernel)
        if devices:
            pool.call("maintain", action="resume", device=devices[-1], timeout=90)
        pool.call("maintain", action="drain", device=here, reason="a move")
        devices.append(here)

    async def scenario():
        alone = await train("alone")
        assert alone["suspends"] == 0, alone
        disturbed = await train("disturbed")
        assert disturbed["suspends"] >= 4, disturbed
        assert disturbed["resumes"] >= 3, disturbed
        pool.call("maintain", action="resume", device=devices[-1], timeout=90)

    play(scenario())
    assert len(set(devices)) == 2
    assert printed["alone"][-1] == "it learns\n"
    assert printed["disturbed"] == printed["alone"]
