# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds a user's groups in the pool: from the configuration, Unix groups and Hub groups.

The rules of the configuration say who is in a group. They may name users, Unix groups and Hub
groups. The broker gets the Unix groups of a user from NSS, and the Hub groups from a function that
the admin wrote. NSS and this function may use the network and hang, so the broker calls them in
threads. The broker opens a session when it has the answers. After PATIENCE seconds, it opens the
session without the answers.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from typing import Callable, Iterable

from ..config import BrokerSettings
from ..config.grouping import groups_of
from ..errors import Code, RefusedError
from ..pool.model import Owner
from ..text import one_of
from . import nss
from .configuration import Configuration
from .transport.auth import User, owner_of

#: Seconds for which an answer is valid. If a user joins a Unix group, the broker learns this within
#: this time.
LASTS = 300.0

#: The most seconds that the opening of a session waits for the groups of its user.
PATIENCE = 5.0

#: The most threads that ask at the same time.
MOST_THREADS = 4


@dataclass(frozen=True, slots=True)
class _KnownGroups:
    unix_groups: frozenset[str] = frozenset()
    hub_groups: frozenset[str] = frozenset()
    #: The loop time until which these groups are valid.
    until: float = 0.0
    #: Whether all sources have answered; if not, groups may be missing.
    sure: bool = False


_NOTHING = _KnownGroups()


def _names(found: Iterable[str]) -> frozenset[str]:
    """Return the names that the admin's function returned; raise TypeError for other values."""
    names = [found] if isinstance(found, str) else [*found]
    if isinstance(found, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"c.GPUPool.hub_groups returned {found!r}, which is no list of names")
    return frozenset(names)


class Memberships:
    """Finds the owner of a session: a user and a group.

    A session may choose one of its user's groups.
    """

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
        self._known: dict[User, _KnownGroups] = {}
        self._under_way: dict[User, asyncio.Task[None]] = {}
        self._threads = asyncio.Semaphore(MOST_THREADS)

    def forget(self) -> None:
        """Mark the known groups as out of date, so that the broker asks for them again."""
        self._known = {uid: replace(known, until=0.0) for uid, known in self._known.items()}

    def is_known(self, uid: User) -> bool:
        """Return whether the user's groups are known, so that :meth:`learn` is not necessary."""
        if not self._asks():
            return True
        known = self._known.get(uid)
        return known is not None and known.until > asyncio.get_running_loop().time()

    async def learn(self, uid: User, settings: BrokerSettings | None = None) -> None:
        """Find the groups of a user. If no answer comes in PATIENCE seconds, keep the known groups.

        ``settings`` are new settings, before they come into force. With them, the Hub groups come
        from the function in the new settings.
        """
        task = self._under_way.get(uid) or self._begin(uid, settings)
        done, _ = await asyncio.wait([task], timeout=PATIENCE)
        if done:
            return
        before = self._known.get(uid)
        self._note(uid, before or _NOTHING, PATIENCE)
        self._log.warning(
            "The groups of %s were not found within %g s; %s", owner_of(uid).name, PATIENCE,
            "the broker uses the groups that it found earlier" if before
            else "no rule about Unix groups applies to the user",
        )  # fmt: skip

    async def _learn(self, uid: User, settings: BrokerSettings) -> None:
        before, hub = self._known.get(uid, _NOTHING), settings.hub_groups
        found = _KnownGroups(hub_groups=before.hub_groups if hub else frozenset(), sure=True)
        async with self._threads:
            try:
                # A Hub user needs no account on this machine, and an account of the same name may
                # belong to another person. So a Hub user has no Unix groups.
                unix = (
                    await nss.ask(lambda: self._unix_groups(uid))
                    if isinstance(uid, int)
                    else frozenset[str]()
                )
                found = replace(found, unix_groups=unix)
            except Exception:  # an error in a module of NSS; the session opens anyway
                self._log.exception("The Unix groups of user id %s cannot be read", uid)
                found = replace(found, sure=False)
            if hub is not None:
                name = owner_of(uid).name
                try:
                    names = await nss.ask(lambda: _names(hub(name)))
                    found = replace(found, hub_groups=names)
                except Exception:  # an error in the admin's function
                    self._log.exception("The Hub groups of %s cannot be read", name)
                    found = replace(found, sure=False)
        self._note(uid, found, LASTS)

    def _note(self, uid: User, found: _KnownGroups, lasts: float) -> None:
        self._known[uid] = replace(found, until=asyncio.get_running_loop().time() + lasts)

    def is_sure(self, uid: User) -> bool:
        """Return whether the answer of :meth:`groups` is complete."""
        known = self._known.get(uid)
        return (known is not None and known.sure) or not self._asks()

    def _asks(self) -> bool:
        members = self._configuration.settings.members.values()
        return any(rule.asks for rule in members)

    def learn_soon(self, uid: User) -> None:
        """Start :meth:`learn` if the groups of a user are not known; do not wait for it."""
        if not self.is_known(uid) and uid not in self._under_way:
            self._begin(uid)

    def _begin(self, uid: User, settings: BrokerSettings | None = None) -> asyncio.Task[None]:
        learn = self._learn(uid, settings or self._configuration.settings)
        task = self._under_way[uid] = asyncio.get_running_loop().create_task(learn)
        task.add_done_callback(lambda _: self._under_way.pop(uid, None))
        return task

    def groups(self, uid: User) -> tuple[str, ...]:
        """Return the known groups of a user. A session that chooses no group uses the first."""
        known, members = self._known.get(uid, _NOTHING), self._configuration.settings.members
        return groups_of(members, owner_of(uid).name, known.unix_groups, known.hub_groups)

    def owner(self, uid: User, chosen: str = "") -> Owner:
        """Return the owner of a session: the user, with the ``chosen`` group or the first group.

        Raises
        ------
        RefusedError
            If the user is not in the chosen group.
        """
        groups = self.groups(uid)
        if chosen and chosen not in groups:
            if groups:
                choose = f"Choose {one_of(groups)}; the default is {groups[0]!r}."
            else:
                choose = "You are in no group. Leave the group out, or ask your administrator."
            raise RefusedError(
                f"You are not in a group {chosen[:64]!r} of this pool.",
                code=Code.NOT_IN_GROUP,
                next_step=choose,
                details={"groups": [*groups]},
            )
        return Owner(owner_of(uid).name, chosen or (groups[0] if groups else ""))
