# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Wait in asyncio for what may hang: not longer than so many seconds, or in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, Awaitable, Callable, TypeVar

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


async def in_own_thread(work: Callable[[], _T], name: str) -> _T:
    """Return what ``work``, which may hang, returns in a thread of this name.

    No executor has the thread: this process would wait at its end for one that hangs.
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
        except Exception as error:  # it is raised where the answer is awaited
            give, what = answer.set_exception, error
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(settle, give, what)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer
