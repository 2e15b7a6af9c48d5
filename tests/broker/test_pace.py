# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Long work on the broker's event loop is done in parts, and requests run between the parts."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from itertools import count
from types import SimpleNamespace

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.broker import ratelimit
from jupyter_gpupool.broker.pages.activity import Activity
from jupyter_gpupool.broker.pages.hints import Rooms
from jupyter_gpupool.pool.model import Slice

SESSIONS = 50


@pytest.fixture
def slow_clock(monkeypatch):
    """Replace the clock. At each reading of the new clock, the time for a part of work is over."""
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * ratelimit.PART)
    monkeypatch.setattr(ratelimit, "time", clock)
    monkeypatch.setattr("jupyter_gpupool.broker.pages.hints.time", clock)


def sessions():
    return {f"s{i}": SimpleNamespace(id=f"s{i}", page=None) for i in range(SESSIONS)}


async def turns_of_others(work):
    """Return how many turns another task of the loop gets until ``work`` is done."""
    turns, task = 0, asyncio.ensure_future(work)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


def test_requests_are_answered_between_the_pages_of_a_sample(slow_clock):
    async def run():
        activity = Activity(SimpleNamespace(), SimpleNamespace(read=lambda s: s.id), None)
        activity.attached = sessions()
        found = {}

        async def look():
            found.update(await activity.readings())

        return await turns_of_others(look()), found

    turns, found = asyncio.run(run())
    assert [*found] == [*sessions()]
    assert turns >= SESSIONS


def test_broker_updates_the_growth_room_of_pages_in_parts(slow_clock):
    told = []

    async def run():
        attached = sessions()
        rooms = Rooms(
            SimpleNamespace(pool=SimpleNamespace(growable=lambda _name: (5,))),
            SimpleNamespace(set_room=lambda session, room: told.append((session.id, room))),
            SimpleNamespace(attached=attached),
        )
        record = SimpleNamespace(
            state="active", slices=(Slice("G", 1),), request=SimpleNamespace(limit=2)
        )
        for session in attached.values():
            rooms.changed(session, record)
        rooms._told.clear()
        told.clear()
        turns = 0
        rooms.refresh_soon()
        while len(told) < SESSIONS:
            await asyncio.sleep(0)
            turns += 1
        rooms.close()
        return turns

    assert asyncio.run(run()) >= SESSIONS / 2
    assert sorted(told) == sorted((name, (5,)) for name in sessions())


def test_ancestry_lists_a_process_and_its_parents():
    code = "import os, sys; print(os.getppid()); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        child.stdout.readline()
        pids = [process.pid for process in procfs.ancestry(child.pid)]
    finally:
        child.communicate()
    assert pids[:2] == [child.pid, os.getpid()]
    assert len(pids) == len(set(pids))
    assert procfs.ancestry(child.pid) == []  # the process has ended
