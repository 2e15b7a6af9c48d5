# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Many cycles of suspend and resume change no byte of a process and leak no memory.

On a real driver, a test lasts for about GPUPOOL_GPU_SECONDS (an environment variable) and notes the
number of its cycles.
"""

from __future__ import annotations

import time

from .conftest import workloads
from .device import SECONDS, bench, bytes_of, spread
from .machine import MiB
from .target import target
from .workloads import expected

#: The most cycles of a test, the fewest cycles of a test, and the number of cycles between two
#: checks of the bytes.
CYCLES, LEAST, LOOK = 200, 20, 10
EMULATED_CYCLES = 20

#: The most bytes by which a process of the service may grow after the fifth cycle. A leak of half a
#: MiB per cycle exceeds this limit.
GROWTH = 32 * MiB


@workloads("cuda-core", "torch")
async def test_many_suspends_lose_no_byte_and_leak_no_memory(machine, workload, note):
    size, first, step = machine.bytes(256 * MiB), 3, (1 << 31) + 1
    wanted = CYCLES if machine.real else EMULATED_CYCLES
    async with bench(machine) as found:
        async with target(workload, found.env) as process:
            await process.do("put", "a", size, first)
            suspends: list[float] = []
            resumes: list[float] = []
            driver: list[float] = []
            left: list[int] = []
            # For each cycle, the resident bytes of the suspended process, of the same process after
            # its resume, of the worker, and of the monitor.
            hosts: list[tuple[int, int, int, int]] = []
            deadline, done, warnings = time.monotonic() + SECONDS, 0, 0
            while done < wanted and (done < LEAST or time.monotonic() < deadline):
                there = await found.suspend(process)
                assert there.status == "suspended", (done, there)
                warnings += bool(there.message)
                left.append(await found.used() - found.base)
                suspended = bytes_of(process.pid)
                back = await found.resume(process, there)
                assert back.status == "resumed", (done, back)
                done += 1
                suspends.append(there.seconds)
                resumes.append(back.seconds)
                driver.append(there.driver_seconds + back.driver_seconds)
                children = (found.worker.pid, found.service._sampler.child.pid)
                hosts.append(
                    (suspended, bytes_of(process.pid), *(bytes_of(pid) for pid in children))
                )
                await process.do("steps", "a", 1, step)
                if done % LOOK == 0:
                    assert await process.do("digest", "a") == expected(size, first, done * step)
            early, late = hosts[min(4, done - 1)], hosts[-1]
            note(
                cycles=done,
                warnings=warnings,
                suspend=spread(suspends),
                resume=spread(resumes),
                driver=spread(driver),
                left_mib=[min(left) >> 20, max(left) >> 20],
                host_mib_suspended_resumed_worker_monitor=[
                    [n >> 20 for n in early],
                    [n >> 20 for n in late],
                ],
                workers=found.worker.generation,
            )
            assert await process.do("digest", "a") == expected(size, first, done * step)
            assert max(left) <= found.slack, "a suspended process held more and more"
            assert found.worker.generation == 1, "a worker was lost"
            assert late[2] - early[2] < GROWTH, "the suspend worker grew"
            assert late[3] - early[3] < GROWTH, "the monitor grew"
        await found.empty(process)
