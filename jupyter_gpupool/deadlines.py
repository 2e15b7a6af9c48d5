# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Wait for something in asyncio, but not longer than so many seconds."""

from __future__ import annotations

import asyncio
from typing import Awaitable, TypeVar

_T = TypeVar("_T")


async def within(work: Awaitable[_T], seconds: float) -> _T:
    """Return the result of ``work``; cancel it if that takes more than ``seconds``.

    Like ``asyncio.wait_for`` of Python 3.12. That of 3.10 and 3.11 loses the cancellation of its
    caller if ``work`` ends in the same turn of the event loop (python/cpython#86296). The caller
    goes on, and a task that cancelled it and waits for its end may hang.

    Raises
    ------
    asyncio.TimeoutError
        If the time is over.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # nobody else asks for it
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise asyncio.TimeoutError
    return task.result()
