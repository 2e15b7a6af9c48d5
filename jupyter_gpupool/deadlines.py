# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Two ways to wait in asyncio for work that may hang: with a time-out, or in its own thread."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, Awaitable, Callable, TypeVar

_T = TypeVar("_T")


async def within(work: Awaitable[_T], seconds: float) -> _T:
    """Return the result of ``work``; cancel ``work`` if it takes more than ``seconds``.

    This function behaves like ``asyncio.wait_for`` of Python 3.12. In Python 3.10 and 3.11,
    ``wait_for`` has an error (python/cpython#86296): if ``work`` ends in the same turn of the event
    loop in which the caller is cancelled, the cancellation is lost, and the caller continues. A
    task that waits for the end of the cancelled caller may then hang.

    Raises
    ------
    asyncio.TimeoutError
        If ``work`` takes too long.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # otherwise asyncio logs that nobody retrieved the exception
        raise
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
        if task.cancelled():
            raise asyncio.TimeoutError
    return task.result()


async def in_own_thread(work: Callable[[], _T], name: str) -> _T:
    """Run ``work``, which may hang, in a thread with this name; return its result.

    This function does not use an executor: when Python exits, it waits for all threads of
    executors, even for a thread that hangs.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()

    def settle(give: Callable[[Any], None], what: Any) -> None:
        if not answer.done():
            give(what)

    def run() -> None:
        give: Callable[[Any], None] = answer.set_result
        what: Any
        try:
            what = work()
        except Exception as error:  # the coroutine that awaits the answer raises this error
            give, what = answer.set_exception, error
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, give, what)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer
