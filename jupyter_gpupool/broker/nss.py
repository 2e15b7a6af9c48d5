# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Ask NSS in threads, because NSS may ask the network and hang there.

Orders of users run in such threads, too, because a user's files and processes may hang. The broker
does not wait for these threads when it ends.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
from typing import Callable, TypeVar

from ..deadlines import in_own_thread

_T = TypeVar("_T")


async def ask(question: Callable[[], _T]) -> _T:
    """Run ``question`` in a new thread; return its result."""
    return await in_own_thread(question, "nss")


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
