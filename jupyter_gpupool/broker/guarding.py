# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Everything that there is only because kernels run under the guard, put together."""

from __future__ import annotations

import asyncio
import logging
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, Mapping, Sequence

from ..config import BrokerSettings
from ..config.settings import usable_attach
from ..devices import Devices
from ..errors import GPUPoolError
from ..guard.install import guard_directory
from ..pool.model import Device, SessionRecord
from ..states import ATTACHED
from .gpu.actions import DeviceEffects
from .gpu.beyond import Beyond
from .gpu.landing import Landings
from .gpu.monitor import Monitor
from .gpu.setaside import SetAside
from .gpu.watchdog import Watchdog
from .messages.guard import Guards
from .messages.router import Handlers
from .messages.snapshot import Snapshots
from .pages.activity import DEVICE_HOLD, Activity
from .pages.control import Pages, page_folder
from .pages.hints import Homes, Rooms
from .pages.timeshare import TurnKeeper
from .runner import Runner
from .sessions import Session
from .store.recovery import Recovered

#: Least seconds between two looks for better homes: each reads all sessions.
HOMES = 2.0


class Guarding:
    """Pages, activity, watchdog and turns of one broker.

    Also where no device is guarded any more: kernels of a broker that was here before may run
    under the guard, and would wait at their gates for ever.
    """

    def __init__(
        self,
        runner: Runner,
        effects: DeviceEffects,
        *,
        handlers: Handlers,
        monitor: Monitor,
        snapshots: Snapshots,
        homes: Homes,
        settings: BrokerSettings,
        log: logging.Logger,
    ) -> None:
        self._runner = runner
        self._effects = effects
        self._handlers = handlers
        self._monitor = monitor
        self._snapshots = snapshots
        self._homes = homes
        self._log = log
        self._problem = ""
        self.settings = settings
        self.pages: Pages | None = None
        #: None where nobody runs under the guard.
        self.aside: SetAside | None = None
        #: Where the folder of links to the guard is.
        self._links: Path | None = None
        self._homes_at = float("-inf")

    def start(
        self,
        socket: Path,
        lasting: Path,
        devices: Sequence[Device],
        service: Devices,
        *,
        machine_wide: bool,
    ) -> None:
        """Begin: new kernels run under the guard if a device's self-test says that it works.

        ``lasting`` is a folder (made if need be) that a logout leaves alone.
        """
        settings, runner = self.settings, self._runner
        guarded = [device.uuid for device in devices if device.tier == "guarded"]
        guard = service.guard
        if guard is None:
            self._decide(False, "The pool has no guard for GPUs of this vendor.")
            return
        try:
            folder = page_folder(socket, machine_wide=machine_wide)
        except OSError as error:
            self._decide(bool(guarded), f"There is no folder for its pages: {error}.")
            return
        # Links that are gone leave a new process without the guard, so not in shared memory. But
        # nobody else may enter a user's own folders, and LD_PRELOAD ends at a space or colon.
        plain = not set(str(lasting)) & set(": \t\n")
        self._links = folder if machine_wide or not plain else lasting
        context_bytes = max((service.context_bytes(uuid) for uuid in guarded), default=0)
        pages = Pages(
            folder, runner.sessions, self._log,
            managed=settings.managed_memory == "allow", context_bytes=context_bytes,
            machine_wide=machine_wide, socket=socket,
        )  # fmt: skip
        with suppress(OSError):  # tried again for each page
            pages.make_folder()
        activity = Activity(runner, pages, self._log, quiet_after=settings.quiet_after)
        pages.on_lease = activity.lease
        self.rooms = Rooms(runner, pages, activity)
        guards = Guards(
            runner, pages, activity,
            rooms=self.rooms, homes=self._homes, log=self._log,
        )  # fmt: skip
        self.aside = SetAside(runner, guard, pages, activity, self._log)
        guards.landings = self.landings = Landings(runner, self._effects, guard, pages, self._log)
        watchdog = Watchdog(runner, self._effects, self._log, policy=settings.overuse)
        self.turns = TurnKeeper(runner, pages, activity, self._log, turn=settings.turn)
        runner.guard = guards
        self._effects.pages, self._effects.activity = pages, activity
        self._monitor.activity, self._monitor.watchdog = activity, watchdog
        self._monitor.beyond = Beyond(runner, self._adjust)
        self._monitor.on_sample = self._sampled
        self._snapshots.activity = activity
        self._handlers.use_guard(pages, guards)
        self._handlers.agents.activity = activity
        self.pages, self.activity, self.guards, self.watchdog = pages, activity, guards, watchdog
        self._decide(bool(guarded), guard.guard_problem)

    def _adjust(self, session: Session) -> None:
        """The driver takes another part of a session's slice than was known."""
        record = self._runner.record(session.id)
        if record is not None and self.pages is not None and record.state in ATTACHED:
            self.pages.follow(session, record)

    def _decide(self, guarded: bool, problem: str) -> None:
        if guarded and self.pages is not None:
            try:
                self._link()
            except (OSError, GPUPoolError) as error:
                problem = str(error)
            else:
                problem = ""
        if guarded and problem:
            # The devices are fit for the guard, and only a folder is missing.
            self._handlers.unguardable, guarded = problem, False
        self._handlers.guarded, self._handlers.guard_problem = guarded, problem
        self.configure(self.settings)
        if self._snapshots.attach_reason:
            self._log.warning("%s", self._snapshots.attach_reason)

    def _link(self) -> None:
        """Make the folder of links to the guard, or put back what is missing in it."""
        if self._links is not None:
            self._links.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._handlers.guard_directory = guard_directory(self._links)

    async def keep(self) -> None:
        """Put back what was deleted under living sessions.

        Raises
        ------
        OSError, GPUPoolError
            If that is not possible now.
        """
        if self.pages is not None:
            await self.pages.keep()
            if self._handlers.guarded:
                self._link()

    def configure(self, settings: BrokerSettings) -> None:
        """Take note of a configuration that was read again."""
        self.settings = settings
        self._handlers.allow_unguarded = settings.allow_unguarded
        attach, reason = usable_attach(
            settings.attach, self._handlers.guarded, self._handlers.guard_problem
        )
        self._snapshots.attach, self._snapshots.attach_reason = attach, reason
        if self.pages is not None:
            self.activity.quiet_after = settings.quiet_after
            self.turns.turn = settings.turn
            self.watchdog.policy = settings.overuse
            self.pages.managed = settings.managed_memory == "allow"

    def close(self) -> None:
        """The broker ends; the sessions go on."""
        if self.pages is not None:
            self.turns.close()
            self.landings.close()
            self.rooms.close()
            self.activity.close()
            if self.pages.close() and self._links is not None:
                shutil.rmtree(self._links, ignore_errors=True)

    # ------------------------------------------------------------------ recovery

    async def settle(self, stored: Mapping[str, Mapping[str, Any]]) -> None:
        """See to processes that an earlier broker was moving, before anybody asks the driver.

        ``stored`` is what the journal says of each session.
        """
        if self.pages is not None:
            guarded = [name for name, entry in stored.items() if _was_guarded(entry)]
            await asyncio.gather(*(self.landings.recover(name) for name in guarded))

    def adopt(self, session: Session, record: SessionRecord) -> None:
        """Go on with the page of a session that an earlier broker had."""
        if self.pages is not None:
            used = bool(record.bound or record.slices or record.suspended)
            self.pages.adopt(session, used=used)
            self.activity.read(session)

    def settle_use(self, one: Recovered, now: float, alone: float) -> None:
        """Let the page say whether a session, which an earlier broker had, uses its device.

        ``alone`` is for how many seconds at least there has been no broker, so that who was seen to
        be quiet has been quiet for as long.
        """
        if self.pages is None or not (one.idle_since or one.computed):
            return
        quiet = self.activity.untouched(one.session)
        if quiet and one.idle_since:
            one.at_rest()
        elif quiet and alone >= self.activity.quiet_after:
            one.at_rest(now - alone)
        elif one.computed and one.session.page is not None:
            one.in_use(now)

    def recovered(self, one: Recovered, alone: float) -> None:
        """Make the page true: a broker that was killed in a suspend left the gate closed."""
        if self.pages is not None:
            record = self._runner.record(one.session.id)
            if record is not None and not record.suspended:
                self.pages.no_longer_aside(one.session)  # it ended before the driver was asked
            quiet = self.activity.untouched(one.session)
            self.guards.changed(one.session)
            if any(hold.id == DEVICE_HOLD for hold in one.record.holds):
                self.activity.go_on(one.session, alone if quiet else 0.0)

    def all_recovered(self) -> None:
        """Remove the pages of sessions that ended while there was no broker."""
        if self.pages is not None:
            self.pages.sweep()

    # ------------------------------------------------------------------ after a sample

    async def _sampled(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.pages is None:
            return
        if now - self._homes_at >= HOMES:
            self._homes_at = now
            await self._homes.refresh(self.pages, self.activity)
        self.rooms.refresh_soon()


def _was_guarded(entry: Any) -> bool:
    """Return whether a session of the journal, which may be damaged, had a page."""
    record = entry.get("record") if isinstance(entry, dict) else None
    return isinstance(record, dict) and bool(record.get("lands"))
