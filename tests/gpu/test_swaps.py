# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two processes take turns on a device that has no room for both at the same time."""

from __future__ import annotations

import time

from .device import SECONDS, bench, share, speeds, spread, threads
from .machine import GiB, MiB
from .target import Target, target
from .workloads import expected_fingerprint

#: SWAPS: the number of swaps that the test does if the time is enough. LEAST: the number of swaps
#: that the test does even if the time is over.
SWAPS, LEAST = 20, 4
EMULATED_SWAPS = 5

#: The first element of each process's array.
FIRST = {"a": 11, "b": 22}


async def test_two_processes_that_do_not_fit_together_take_turns(machine, note):
    """Each process takes 60 % of the device, at most 12 GiB, and at most what fits in host memory.

    A third process leaves 5/3 of this size free. So the two processes never fit on the device
    together. On the emulated device, the test writes to only 32 MiB of each process. The rest of
    the memory costs no host memory.
    """
    wanted = SWAPS if machine.real else EMULATED_SWAPS
    async with bench(machine) as found:
        size = share(found.device, 0.6, processes=2, cap=12 * GiB)
        data = size if machine.real else 32 * MiB
        done: dict[str, int] = {"a": 0, "b": 0}

        async def fill(process: Target, name: str) -> None:
            await process.do("put", "x", data, FIRST[name])
            if size > data:
                await process.do("take", size - data)

        async with (
            target("cuda-core", found.env) as a,
            target("cuda-core", found.env) as b,
            target("cuda-core", found.env) as other,
        ):
            note(free_mib=await found.leave(other, size * 5 // 3) >> 20)
            await fill(a, "a")
            out = {"a": await found.suspend(a)}
            assert out["a"].status == "suspended", out
            await fill(b, "b")
            on, off = ("b", b), ("a", a)
            suspends: list[float] = []
            resumes: list[float] = []
            begin, swaps = time.monotonic(), 0
            while swaps < wanted and (swaps < LEAST or time.monotonic() < begin + SECONDS):
                out[on[0]] = await found.suspend(on[1])
                assert out[on[0]].status == "suspended", (swaps, out[on[0]])
                back = await found.resume(off[1], out[off[0]])
                assert back.status == "resumed", (swaps, back)
                suspends.append(out[on[0]].seconds)
                resumes.append(back.seconds)
                on, off = off, on
                swaps += 1
                name, process = on
                await process.do("steps", "x", 1, 1)
                done[name] += 1
                assert await process.do("fingerprint", "x") == expected_fingerprint(
                    data, FIRST[name], done[name]
                )
            note(
                swaps=swaps,
                size_mib=size >> 20,
                seconds=round(time.monotonic() - begin, 2),
                suspend=spread(suspends),
                resume=spread(resumes),
                last=speeds(out[off[0]]),
                threads="".join(sorted(threads(off[1].pid))),
            )
            # The other two processes end. The suspended process must still resume with its data.
            await on[1].kill()
            await other.kill()
            await found.empty(on[1], other)
            back = await found.resume(off[1], out[off[0]])
            assert back.status == "resumed", back
            assert await off[1].do("fingerprint", "x") == expected_fingerprint(
                data, FIRST[off[0]], done[off[0]]
            )
        await found.empty(a, b)
