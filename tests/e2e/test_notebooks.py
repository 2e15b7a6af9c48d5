# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs many example notebooks together, and compares each cell with the committed output.

``notebooks.py`` makes the committed outputs: it runs one notebook at a time on an empty pool.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from contextlib import suppress

import pytest

from jupyter_gpupool.errors import BrokerUnavailable
from tests.broker import forks

from . import notebooks
from .kit import LOOK

#: The notebooks of the short form. For each of them, a kill of the broker is dangerous for a
#: different reason. The long form runs all notebooks.
SHORT = (
    *("background_thread", "first_steps", "give_back_and_go_on", "memory_pools"),
    *("restart_and_run_all", "subprocesses", "threads_and_garbage", "workers_by_fork"),
)


async def one(pool, name, label, room):
    """Wait for ``room``, run a notebook; return label, outputs and committed outputs."""
    async with room:
        run = notebooks.CLIENTS.get(name, notebooks.by_nbclient)
        rng = random.Random(label)
        ran = await run(
            name, pool.folder / f"{label}.json", label, lambda: rng.choice([0.0, 0.2, 1.6])
        )
    return label, notebooks.shown(ran), notebooks.shown(notebooks.read(name))


def answers(pool):
    """Return the broker's process id; None if no broker answers."""
    with suppress(BrokerUnavailable):
        return pool.status()["pid"]


def killer(pool, every, stop):
    """Kill each broker after ``every`` seconds until ``stop`` is set; return the number of kills.

    The kernels start the new brokers. ``every`` must be long enough for a broker to serve a kernel:
    after ten brokers in a row that served no kernel, the kernels would start no further broker.
    """
    killed = 0
    while not stop.wait(LOOK):
        if answers(pool) and not stop.wait(every):
            with suppress(BrokerUnavailable):
                pool.kill_broker()
                killed += 1
    return killed


async def crowd(pool, names, at_once, kill_every):
    room, stop = asyncio.Semaphore(at_once), threading.Event()
    runs = [asyncio.create_task(one(pool, name, label, room)) for label, name in names]
    # The killer blocks, so it needs its own thread. The event loop runs the notebooks.
    enemy = asyncio.create_task(asyncio.to_thread(killer, pool, kill_every, stop))
    try:
        done = await asyncio.gather(*runs)
    finally:
        stop.set()
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)
        killed = await enemy
    # The last broker may be dead, and no kernel is left to start a new one. So the test does it.
    with forks.instead_of_launches():
        await asyncio.to_thread(pool.start_broker)
    return done, killed


def differences(done):
    return [
        f"{label} {here[0]}: {here[1]} instead of {there[1]}"
        for label, cells, alone in done
        for here, there in itertools.zip_longest(cells, alone)
        if here != there
    ]


def test_cells_print_the_same_while_the_broker_is_killed(pool):
    pool = pool(notebooks.MACHINE, **notebooks.CONFIG)
    names = [(name, name) for name in SHORT]
    done, killed = asyncio.run(crowd(pool, names, at_once=8, kill_every=4))
    assert differences(done) == []
    assert killed, "no broker was killed: nothing was tested"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_twelve_notebooks_at_a_time_show_the_same_as_alone(pool):
    pool = pool(notebooks.MACHINE, **notebooks.CONFIG)
    names = [(f"{name}-{turn}", name) for turn in range(2) for name in notebooks.names()]
    done, killed = asyncio.run(crowd(pool, names, at_once=12, kill_every=8))
    assert differences(done) == []
    assert len(done) == 2 * len(notebooks.names())
    assert killed >= 2, "the broker was hardly killed: nothing was tested"
