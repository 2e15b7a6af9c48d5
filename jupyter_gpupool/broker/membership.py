# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which group a user is in: the rules of the configuration, and the machine's Unix groups.

Unix groups come from NSS, which may ask the network and hang there. So a thread asks; a session is
opened when the answer is there, or without it after PATIENCE seconds.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Callable

from ..config.grouping import groups_of
from ..errors import Code, RefusedError
from ..pool.model import Owner
from ..text import one_of
from . import nss
from .configuration import Configuration
from .transport.auth import owner_of

#: Seconds for which an answer counts: a user who joins a Unix group need not wait longer.
LASTS = 300.0

#: Seconds that the opening of a session waits for NSS.
PATIENCE = 5.0

#: Threads that ask at once.
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Known:
    unix_groups: frozenset[str]
    #: Loop time.
    until: float
    #: NSS has answered; else nobody knows.
    sure: bool


class Memberships:
    """Establishes the owner of a session. A session may choose among its user's groups."""

    def __init__(
        self,
        configuration: Configuration,
        log: logging.Logger,
        *,
        unix_groups: Callable[[int], frozenset[str]] = nss.unix_groups,
    ) -> None:
        self._configuration = configuration
        self._log = log
        self._unix_groups = unix_groups
        self._known: dict[int, _Known] = {}
        self._under_way: dict[int, asyncio.Task[None]] = {}
        self._threads = asyncio.Semaphore(MOST_THREADS)

    def forget(self) -> None:
        """Ask NSS again from now on: the configuration was read again."""
        self._known = {uid: replace(known, until=0.0) for uid, known in self._known.items()}

    def is_known(self, uid: int) -> bool:
        """Return whether :meth:`owner` needs no :meth:`learn` first."""
        if not self._asks():
            return True
        known = self._known.get(uid)
        return known is not None and known.until > asyncio.get_running_loop().time()

    async def learn(self, uid: int) -> None:
        """Find the Unix groups of a user; after PATIENCE seconds, what was known stays."""
        task = self._under_way.get(uid) or self._begin(uid)
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if done:
            return
        before = self._known.get(uid)
        sure = before is not None and before.sure
        self._note(uid, before.unix_groups if before else frozenset(), PATIENCE, sure=sure)
        self._log.warning(
            "The Unix groups of user id %d were not found within %g s; %s", uid, PATIENCE,
            "those of before count" if before else "no rule about Unix groups applies to it",
        )  # fmt: skip

    async def _learn(self, uid: int) -> None:
        try:
            async with self._threads:
                found = await nss.ask(lambda: self._unix_groups(uid))
        except Exception:  # of a module of NSS; the session is opened all the same
            self._log.exception("The Unix groups of user id %d cannot be read", uid)
            self._note(uid, frozenset(), LASTS, sure=False)
        else:
            self._note(uid, found, LASTS, sure=True)

    def _note(self, uid: int, found: frozenset[str], lasts: float, *, sure: bool) -> None:
        self._known[uid] = _Known(found, asyncio.get_running_loop().time() + lasts, sure)

    def is_sure(self, uid: int) -> bool:
        """Return whether :meth:`groups` is all that there is to know."""
        known = self._known.get(uid)
        return (known is not None and known.sure) or not self._asks()

    def _asks(self) -> bool:
        members = self._configuration.settings.members.values()
        return any(rule.unix_groups for rule in members)

    def learn_soon(self, uid: int) -> None:
        """Begin :meth:`learn` if the groups of a user are not known; nothing waits for it."""
        if not self.is_known(uid) and uid not in self._under_way:
            self._begin(uid)

    def _begin(self, uid: int) -> asyncio.Task[None]:
        task = self._under_way[uid] = asyncio.get_running_loop().create_task(self._learn(uid))
        task.add_done_callback(lambda _: self._under_way.pop(uid, None))
        return task

    def groups(self, uid: int) -> tuple[str, ...]:
        """Return the groups of a user by what is known; the first counts without a choice."""
        known = self._known.get(uid)
        found = known.unix_groups if known else frozenset[str]()
        return groups_of(self._configuration.settings.members, owner_of(uid).name, found)

    def owner(self, uid: int, chosen: str = "") -> Owner:
        """Return the user with the group that counts: the ``chosen`` one, else the first.

        Raises
        ------
        RefusedError
            If the user is not in the chosen group.
        """
        groups = self.groups(uid)
        if chosen and chosen not in groups:
            if groups:
                choose = f"Choose {one_of(groups)}; without a choice it is {groups[0]!r}."
            else:
                choose = "You are in no group; leave the choice out, or ask your administrator."
            raise RefusedError(
                f"You are not in a group {chosen[:64]!r} of this pool.",
                code=Code.NOT_IN_GROUP,
                next_step=choose,
                details={"groups": [*groups]},
            )
        return Owner(owner_of(uid).name, chosen or (groups[0] if groups else ""))
