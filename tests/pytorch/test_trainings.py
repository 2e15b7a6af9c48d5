# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Trainings on a pool that is far too small for them have the numbers of an undisturbed run."""

from __future__ import annotations

import asyncio
import json

from tests.e2e.scenes import play

from .trainings import OTHER, SETUPS, cells

#: One notebook fits on a GPU, so each round moves another one's bytes.
MACHINE = "2x512MiB,context=32MiB"
MEMORY = 400 << 20

#: Runs trainings in turn, and prints what they printed as JSON.
ALONE = """
import contextlib, io, json, sys
found = {}
for name, cells in json.loads(sys.stdin.read()).items():
    out, names = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(out):
        for cell in cells:
            exec(cell, names)
    found[name] = out.getvalue()
print(json.dumps(found))
"""


def test_eight_trainings_share_two_gpus_and_compute_the_same(run, pool):
    wanted = {name: cells(name, "cuda" if name in OTHER else "cpu") for name in SETUPS}
    alone = json.loads(run(ALONE, stdin=json.dumps(wanted)).stdout)
    pool = pool(MACHINE, quiet_after=0.1, max_swap_overhead=0)
    printed, sessions = {}, {}

    async def one(name):
        kernel = await pool.kernel(name, memory=MEMORY, timeout=200)
        printed[name] = ""
        for cell in cells(name, "cuda"):
            printed[name] += (await kernel.run(cell, timeout=250)).check().text
        sessions[name] = kernel.session()
        await kernel.stop()

    async def scenario():
        await asyncio.gather(*map(one, SETUPS))

    play(scenario())
    assert printed == alone
    assert sum(session["resumes"] for session in sessions.values()) >= len(SETUPS)
