# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions are suspended and migrate on two devices while the test kills the service's children."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest

MiB = 1 << 20


async def swap(machine, service, uuids, number, rounds, rng):
    """Many times, suspend a session, resume it on a random device, and compare every byte."""
    name, at = f"s{number}", number % 2
    async with machine.target(str(at), GPUPOOL_SESSION=name) as target:
        await target.do("context")
        digest = await target.do("fill", rng.choice([2, 8, 24]) * MiB, 1)
        await target.do("spawn")
        await target.child("context")
        child_digest = await target.child("fill", 4 * MiB, 2)
        for _ in range(rounds):
            outcome = await service.suspend(target.root, [uuids[at]], session=name)
            assert outcome.status == "suspended", outcome
            assert len(outcome.processes) == 2
            there = rng.randrange(2)
            resumed = await service.resume(
                target.root,
                [uuids[there]],
                [uuids[at]],
                session=name,
                need={uuids[there]: outcome.freed[uuids[at]]},
            )
            assert resumed.status == "resumed", resumed
            at = there
            assert await target.do("digest", 1) == digest
            assert await target.child("digest", 2) == child_digest


async def kill(service, rng):
    """Kill children of the service during calls, until the task is cancelled.

    This function kills no child during its start. Otherwise, on a busy machine, no child would ever
    become ready.
    """
    children = [service._sampler.child, *service._workers.children.values()]
    while True:
        await asyncio.sleep(rng.random() * 0.6)
        victim = rng.choice(children)
        while not (victim.current and victim.pid):
            await asyncio.sleep(0.001)
        os.kill(victim.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    "rounds", [4, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
async def test_no_byte_is_lost_while_children_are_killed(emulated, rounds):
    machine = emulated("2x1GiB,context=16MiB")
    async with machine.started() as (service, devices):
        uuids = [device.uuid for device in devices]
        killer = asyncio.create_task(kill(service, random.Random(0)))
        try:
            await asyncio.gather(
                *(swap(machine, service, uuids, n, rounds, random.Random(n)) for n in range(3))
            )
        finally:
            killer.cancel()
            await asyncio.wait({killer})
        # The target processes do not reap their killed children, so NVML may list these children
        # for a while.
        while sum(sample.used for sample in await service.sample()):
            await asyncio.sleep(0.05)
