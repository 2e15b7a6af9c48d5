# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The tests' own means: a process that computes, is known bit by bit, and ends when told."""

from __future__ import annotations

import pytest

from .conftest import workloads
from .machine import MiB
from .target import Failed, target
from .workloads import expected


@workloads(
    "cuda-core", "torch", "torch-expandable", "torch-async", "torch-graph", "torch-compile",
    "triton", "cupy", "jax", "numba",
)  # fmt: skip
async def test_each_framework_computes_what_is_expected(machine, workload, note):
    async with target(workload, machine.env, start=False) as process:
        note(version=await process.do("start"))
        await process.do("put", "a", 4 * MiB, 7)
        assert await process.do("digest", "a") == expected(4 * MiB, 7)
        await process.do("steps", "a", 3, 1 << 31)
        await process.do("steps", "a", 1, 5)
        assert await process.do("digest", "a") == expected(4 * MiB, 7, 3 * (1 << 31) + 5)
        with pytest.raises(Failed, match="KeyError"):
            await process.do("digest", "b")
        await process.do("free", "a")
        free, total = await process.do("info")
        assert 0 < free <= total


async def test_the_end_of_a_process_is_seen(machine):
    async with target("cuda-core", machine.env) as process:
        await process.kill()
        with pytest.raises(EOFError, match="-9"):
            await process.do("pid")
