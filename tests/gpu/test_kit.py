# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests the process that the other tests use: it computes, has known bytes, and ends on request."""

from __future__ import annotations

import pytest

from .conftest import workloads
from .machine import MiB
from .target import Failed, target
from .workloads import expected, expected_fingerprint


@workloads("cuda-core", "torch")  # test_frameworks.py has the others
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


async def test_request_to_an_ended_process_raises_an_error(machine):
    async with target("cuda-core", machine.env) as process:
        await process.kill()
        with pytest.raises(EOFError, match="-9"):
            await process.do("pid")


async def test_fingerprint_is_known_without_a_gpu(machine):
    """The fingerprint of an array is as expected, also if the values overflow uint32.

    Other tests use the fingerprint for arrays that are too large to hash.
    """
    first, size = (1 << 32) - 1000, 4 * MiB
    async with target("cuda-core", machine.env) as process:
        await process.do("put", "a", size, first)
        assert await process.do("fingerprint", "a") == expected_fingerprint(size, first)
        await process.do("steps", "a", 1, 5)
        assert await process.do("fingerprint", "a") == expected_fingerprint(size, first, 5)
        assert expected_fingerprint(size, first, 5) != expected_fingerprint(size, first)
        free, _ = await process.do("info")
        await process.do("take", 64 * MiB)
        await process.do("spin", 1_000_000)
        assert (await process.do("info"))[0] <= free - 64 * MiB
        await process.do("give")
        assert (await process.do("info"))[0] > free - 64 * MiB  # the driver may keep some memory
