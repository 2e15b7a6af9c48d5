# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Each framework is suspended and resumed without the guard, and then continues to compute."""

from __future__ import annotations

import time

from jupyter_gpupool.pool.model import PoolSettings

from .conftest import workloads
from .device import bench, bytes_of, held, speeds, threads
from .machine import MiB
from .target import target
from .workloads import expected

FIRST = 7
STEP = 1 << 30


@workloads(
    "cuda-core", "torch", "torch-expandable", "torch-async", "torch-graph", "cupy", "numba",
    "jax", "triton", "torch-compile",
)  # fmt: skip
async def test_framework_is_suspended_and_resumed(machine, workload, note):
    size = machine.bytes(256 * MiB)
    async with bench(machine) as found:
        async with target(workload, found.env, start=False) as process:
            begin = time.monotonic()
            note(version=await process.do("start"), start_s=round(time.monotonic() - begin, 2))
            idle = await found.used()
            begin = time.monotonic()
            await process.do("put", "a", size, FIRST)
            await process.do("steps", "a", 3, STEP)
            note(first_work_s=round(time.monotonic() - begin, 2))
            before, host = await found.sample(), bytes_of(process.pid)

            there = await found.suspend(process)
            note(
                context_mib=(idle - found.base) >> 20,
                used_mib=(before.used - found.base) >> 20,
                listed_mib=None if (own := held(before, process.pid)) is None else own >> 20,
                suspend=speeds(there),
                status=there.status,
                message=there.message,
                freed_mib=there.freed.get(found.uuid, 0) >> 20,
                processes=len(there.processes),
            )
            assert there.status == "suspended", there
            # The suspend has already waited until NVML shows the freed memory. Note how much longer
            # it takes until the device is empty.
            note(still_listed_s=round(await found.empty(process), 3))
            left = await found.used()
            note(
                left_mib=(left - found.base) >> 20,
                host_mib=[host >> 20, bytes_of(process.pid) >> 20],
                threads="".join(sorted(threads(process.pid))),
            )
            assert not {*threads(process.pid)} & set("TtXxZ")
            assert await found.state(process) == "checkpointed"

            back = await found.resume(process, there)
            note(resume=speeds(back), resume_status=back.status, resume_message=back.message)
            assert back.status == "resumed", back
            # The pool reserves these bytes for the resume. They must be enough, because a resume
            # without enough room is fatal for the process.
            reserved = there.freed[found.uuid] + PoolSettings().resume_headroom
            took = await found.used() - left
            note(took_mib=took >> 20, host_after_mib=bytes_of(process.pid) >> 20)
            assert await process.do("digest", "a") == expected(size, FIRST, 3 * STEP)
            await process.do("steps", "a", 2, 5)
            assert await process.do("digest", "a") == expected(size, FIRST, 3 * STEP + 10)
            await process.do("put", "b", 4 * MiB, 3)
            assert await process.do("digest", "b") == expected(4 * MiB, 3)
            assert before.used - left <= reserved, "more was given back than the service counted"
            assert took <= reserved, "a resume took more than what the pool would have reserved"
        await found.empty(process)
