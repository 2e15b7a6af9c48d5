# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A session may change without a journal row: its readers get a notice once it is quiet."""

from __future__ import annotations

import asyncio

import pytest

from jupyter_gpupool.broker.stirs import LONGEST_PAUSE, SETTLED, Stirs
from jupyter_gpupool.kernel.holds import BRIEF


def told(*, forget=""):
    """Return the notices of a reader, if session ``a`` changes three times and ``b`` once."""
    heard = []

    async def main():
        done = asyncio.Event()
        stirs = Stirs()
        stirs.read(heard.append)
        stirs.read(lambda name: done.set() if name == "last" else None)
        for name in ("a", "a", "b", "a"):
            stirs.note(name)
        stirs.forget(forget)
        stirs.note("last")
        await asyncio.wait_for(done.wait(), 30)
        stirs.note("a")
        stirs.stop()
        await asyncio.sleep(0)

    asyncio.run(main())
    return heard


def queue_told(readers):
    """Return the times of the first two notices of a queue that changes all the time.

    The notices go to ``readers`` readers.
    """
    heard = []

    async def main():
        loop, stirs, done = asyncio.get_running_loop(), Stirs(), asyncio.Event()

        def reader():
            heard.append(loop.time())
            if len(heard) == 2:
                done.set()
            else:
                loop.call_soon(stirs.note_queue)
            return readers

        stirs.read_queue(reader)
        for _ in range(5):
            stirs.note_queue()
        await asyncio.wait_for(done.wait(), 30)
        stirs.note_queue()
        stirs.stop()
        await asyncio.sleep(0)

    asyncio.run(main())
    return heard


@pytest.mark.parametrize(("readers", "pause"), [(1, SETTLED), (32, 0.5), (1000, LONGEST_PAUSE)])
def test_pause_between_queue_notices_grows_with_the_readers(readers, pause):
    """Each reader requests a status after a notice, so the broker waits before the next notice.

    If the queue changes during this pause, the readers get a notice when the pause ends.
    """
    first, second = queue_told(readers)
    assert second - first > pause - 0.01


def test_readers_get_one_notice_for_many_changes_of_a_session():
    assert told() == ["b", "a", "last"]


def test_readers_do_not_hear_of_a_forgotten_session():
    assert told(forget="b") == ["a", "last"]


def test_pause_between_two_agent_reports_does_not_count_as_quiet():
    assert SETTLED > BRIEF
