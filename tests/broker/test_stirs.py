# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Changes without a journal row are told once a session is quiet."""

from __future__ import annotations

import asyncio

from jupyter_gpupool.broker.stirs import SETTLED, Stirs
from jupyter_gpupool.kernel.holds import BRIEF


def told(*, forget=""):
    """Return what a reader hears of three changes of ``a`` in a row and one of ``b``."""
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


def test_changes_in_a_row_are_told_once():
    assert told() == ["b", "a", "last"]


def test_forgotten_session_is_not_told():
    assert told(forget="b") == ["a", "last"]


def test_pause_between_two_reports_of_an_agent_is_no_end():
    assert SETTLED > BRIEF
