# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Changes the settings while the broker runs: at a SIGHUP, and when a schedule begins or ends.

If a user is no longer in the group of a session, the session moves to the user's first group, and
uses the share of that group.

This module checks whether the machine's GPUs suffice for the guarantees and caps of the groups in a
configuration. If they do not suffice at a SIGHUP, the broker refuses the new configuration, and the
old configuration stays in force. If they do not suffice at a start, the broker ends, with one
exception: if the machine could give the same guarantees earlier, the broker starts with a warning.
So a GPU that is missing today does not take the pool away from everybody.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Callable

from ..config import Fault, Timetable, WrongConfiguration
from ..config.accounts import unknown_names
from ..config.tree import check_machine
from ..errors import GPUPoolError
from ..pool import events as e
from ..pool.model import Owner, PoolSettings
from . import nss
from .configuration import Configuration
from .core import Core
from .membership import Memberships
from .metrics import Metrics
from .timekeeper import Timekeeper

#: The key in the journal's metadata for the last guarantees that this machine could give.
KEPT = "guarantees"


class Reload:
    """Applies changed settings.

    Parameters
    ----------
    limits:
        Returns the settings as the pool of this machine must see them. In them, the part of a
        shared limit that this machine may not use counts as used by other machines.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        *,
        metrics: Metrics,
        memberships: Memberships,
        log: logging.Logger,
        limits: Callable[[PoolSettings], PoolSettings],
    ) -> None:
        self._core = core
        self._configuration = configuration
        self._metrics = metrics
        self._memberships = memberships
        self._log = log
        self._limits = limits
        self._timekeeper = Timekeeper(core, configuration, self._apply, log)
        self._reading: asyncio.Task[None] | None = None
        self._naming: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._asked = False

    def check(self) -> None:
        """At a start, refuse groups that the machine's GPUs cannot satisfy.

        Raises
        ------
        WrongConfiguration
            If the GPUs do not suffice and the machine did not give these guarantees earlier. The
            error has all faults that were found.
        """
        timetable, journal = self._configuration.timetable, self._core.journal
        faults, kept = self._wrong_here(timetable), _guarantees(timetable)
        if not faults:
            journal.remember(KEPT, kept)
        elif journal.meta(KEPT) != kept:
            raise WrongConfiguration(faults)
        for fault in faults:
            self._log.warning(
                "The GPUs that are here now cannot satisfy the whole configuration: %s", fault
            )

    def start(self) -> None:
        """Follow the calendar from now on."""
        self._timekeeper.start()
        self._look_for_names()
        self._settling = asyncio.get_running_loop().create_task(self._settle())

    def close(self) -> None:
        """Stop: change no setting from now on."""
        self._timekeeper.close()
        for task in (self._reading, self._naming, self._settling):
            if task is not None:
                task.cancel()

    def ask(self) -> None:
        """Read the configuration again. A wrong configuration changes nothing."""
        self._asked = True
        if self._reading is None or self._reading.done():
            self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while self._asked:
            self._asked = False
            try:
                # This runs in a thread, because it reads files and checks every combination of
                # schedules.
                timetable = await asyncio.to_thread(self._configuration.read)
                faults = self._wrong_here(timetable)
                if faults:
                    raise WrongConfiguration(faults)
            except GPUPoolError as error:
                self._log.error("The configuration was not read again: %s", error)
                self._core.note("config", reason=f"refused: {error}")
                continue
            await self._learn(timetable)
            self._take(timetable)

    async def _learn(self, timetable: Timetable) -> None:
        """Find the groups of the users of all sessions, if the rules need them."""
        base = timetable.base
        if any(rule.asks for rule in base.members.values()):
            users = {session.uid for session in self._core.sessions}
            await asyncio.gather(*(self._memberships.learn(uid, base) for uid in users))

    async def _settle(self) -> None:
        """Change the groups of an earlier broker's sessions, if the rules have changed since."""
        await self._learn(self._configuration.timetable)
        if self._moved():
            self._apply()

    def _moved(self) -> dict[str, str]:
        """Map each session whose user is no longer in the session's group to the new group."""
        found = {}
        for session in self._core.sessions:
            record = self._core.record(session.id)
            if record is not None and self._memberships.is_sure(session.uid):
                groups = self._memberships.groups(session.uid)
                if record.owner.group not in (groups or ("",)):
                    found[session.id] = groups[0] if groups else ""
        return found

    def _take(self, timetable: Timetable) -> None:
        late = self._configuration.take(timetable)
        if late:
            names = ", ".join(f"c.GPUPool.{name}" for name in late)
            self._log.warning(
                "%s changed; this takes effect at the next start of the broker", names
            )
        self._core.journal.remember(KEPT, _guarantees(timetable))
        self._core.note("config", reason="read again")
        self._memberships.forget()
        self._apply()
        self._timekeeper.start()
        self._log.info("The configuration was read again")
        for note in self._configuration.settings.notes:
            self._log.warning("%s", note)
        self._look_for_names()

    def _apply(self) -> None:
        """Apply the settings in force to all parts of the broker."""
        core, settings = self._core, self._configuration.settings
        core.touched()
        self._metrics.configure()
        groups = self._moved()
        for name, group in groups.items():
            session = core.sessions.get(name)
            session.owner = Owner(session.owner.name, group)
            core.note("group", session, reason=f"The kernel now uses the share of {_named(group)}.")
            core.dirty(name)
        pool = self._limits(settings.pool)
        core.handle(e.SettingsChanged(now=core.now(), settings=pool, groups=groups))

    def _wrong_here(self, timetable: Timetable) -> list[Fault]:
        capacities = [view.capacity for view in self._core.view().devices]
        return timetable.faults(time.time(), lambda settings: check_machine(settings, capacities))

    def _look_for_names(self) -> None:
        if self._naming is not None:
            self._naming.cancel()
        self._naming = asyncio.get_running_loop().create_task(self._warn_of_names())

    async def _warn_of_names(self) -> None:
        """Log the users and Unix groups that the configuration names but that do not exist.

        The broker logs these names and goes on: an account that was removed must not stop the pool.
        """
        timetable = self._configuration.timetable
        for fault in await nss.ask(lambda: unknown_names(timetable.base)):
            self._log.warning("%s", timetable.place(fault))


def _named(group: str) -> str:
    return f"the group {group!r}" if group else "the pool itself"


def _guarantees(timetable: Timetable) -> str:
    """Return the guarantees of all groups under every combination of schedules, as text."""
    found = [
        [name, group.parent, str(group.guarantee), str(group.cap)]
        for rules in ((), *timetable.combinations(time.time()))
        for name, group in timetable.under(rules).pool.groups.items()
    ]
    return json.dumps(sorted(map(list, {tuple(one) for one in found}))) if found else ""
