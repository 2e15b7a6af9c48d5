# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Eight notebooks take turns on two devices that have room for four slices.

Every notebook must make progress, and no byte may change. The long form has slices with 600 MiB of
data on devices of 1.6 GiB; the short form has smaller sizes. In each round, a kernel checks and
frees the data of the last round. It then allocates again, writes every byte, computes, and checks.
After each cell, the kernel is idle for a random time, and other kernels may take its slice.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from .cells import DEFINE
from .kit import MiB, Sampler

KERNELS = 8

#: The machine, the MiB of a slice, and the MiB of its data. A slice has room for the data, the
#: emulated context of 64 MiB, and the headroom of a resume. Two slices fit on a device.
LARGE = ("2x1638MiB,context=64MiB", 704, 600)
SMALL = ("2x384MiB,context=64MiB", 144, 16)

ROUND = """
if block is not None:
    block.verify().free()
block = Block({data}).allocate().write({key}).compute()
"""


async def person(kernel, data, rng, deadline, idle):
    """Use one notebook until the deadline, for at least four rounds; return the
    number of rounds.
    """
    rounds = 0
    while rounds < 4 or time.monotonic() < deadline:
        (await kernel.run(ROUND.format(data=data, key=rounds), timeout=240)).check()
        # The user thinks. The kernel is idle, so another kernel may take its slice.
        await asyncio.sleep(rng.uniform(*idle))
        (await kernel.run("block.verify()", timeout=240)).check()
        rounds += 1
        await asyncio.sleep(rng.uniform(*idle))
    return rounds


async def soak(pool, memory, data, seconds, seed, idle):
    kernels = await asyncio.gather(*(pool.kernel(f"n{i}", memory=memory) for i in range(KERNELS)))
    for number, kernel in enumerate(kernels):
        (await kernel.run(f"SEED = {seed * 100 + number}\nblock = None\n{DEFINE}")).check()
    pids = [kernel.pid for kernel in kernels]
    deadline = time.monotonic() + seconds
    people = [
        person(kernel, data, random.Random(f"{seed}-{number}"), deadline, idle)
        for number, kernel in enumerate(kernels)
    ]
    rounds = await asyncio.wait_for(asyncio.gather(*people), seconds + 600)
    status = pool.check_ledger()
    assert [kernel.pid for kernel in kernels] == pids
    assert all([await kernel.manager.is_alive() for kernel in kernels])
    assert len(status["sessions"]) == KERNELS
    await pool.stop_kernels()
    return rounds, status["sessions"]


def run_soak(pool, size, seconds, seed, idle, attach="lazy"):
    machine, memory, data = size[0], size[1] * MiB, size[2]
    # With these options, slices move as often as possible. The pool does not protect a slice after
    # a move, and 0.1 s without a call are enough for a kernel to count as idle.
    pool = pool(
        machine,
        default_memory=memory,
        attach=attach,
        quiet_after=0.1,
        max_swap_overhead=0.0,
    )
    sampler = Sampler(pool)
    sampler.first()
    rounds, sessions = asyncio.run(soak(pool, memory, data, seconds, seed, idle))
    seen = sampler.check(at_least=int(seconds))
    suspends = sum(s["suspends"] for s in sessions)
    moves = sum(s["migrations"] for s in sessions)
    print(f"seed {seed}: rounds {rounds}, {suspends} suspends, {moves} migrations, {seen}")
    assert seen["compared"] > 0, "no NVML sample could be compared with what was granted"
    # Only four of the eight kernels fit: without suspends, this test would have checked nothing.
    assert suspends >= KERNELS, f"only {suspends} suspends"
    rows = pool.journal()
    assert not [row for row in rows if row["kind"] in ("lost", "failed")], rows
    assert {s["resumes"] > 0 for s in sessions} == {True}, "a kernel was never resumed"


@pytest.mark.parametrize("attach", ["lazy", pytest.param("cell", marks=pytest.mark.long)])
def test_eight_notebooks_share_two_devices(pool, attach):
    run_soak(pool, SMALL, seconds=3, seed=1, idle=(0.0, 0.8), attach=attach)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("attach", ["lazy", "cell"])
def test_eight_notebooks_share_two_devices_for_two_minutes(pool, attach):
    run_soak(pool, LARGE, seconds=120, seed=2, idle=(0.0, 3.0), attach=attach)
