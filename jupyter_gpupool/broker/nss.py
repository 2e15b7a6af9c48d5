# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ask NSS in threads that nothing waits for: NSS may ask the network, and hang there.

Orders of users run in such threads, too, because a user's files and processes may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import grp
import os
import pwd
import threading
from typing import Callable, TypeVar

_T = TypeVar("_T")


async def ask(question: Callable[[], _T]) -> _T:
    """Return what ``question`` returns in a thread.

    No executor has the thread: the broker would wait at its end for one that hangs.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_T] = loop.create_future()

    def settle(found: _T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        found, failed = None, None
        try:
            found = question()
        except Exception as error:  # it is raised where the answer is awaited
            failed = error
        with contextlib.suppress(RuntimeError):  # the broker has ended meanwhile
            loop.call_soon_threadsafe(settle, found, failed)

    threading.Thread(target=run, name="nss", daemon=True).start()
    return await answer


def unix_groups(uid: int) -> frozenset[str]:
    """Return the names of the Unix groups of a user."""
    try:
        account = pwd.getpwuid(uid)
    except KeyError:
        return frozenset()
    found = set()
    for gid in os.getgrouplist(account.pw_name, account.pw_gid):
        with contextlib.suppress(KeyError):  # a group id without a name
            found.add(grp.getgrgid(gid).gr_name)
    return frozenset(found)
