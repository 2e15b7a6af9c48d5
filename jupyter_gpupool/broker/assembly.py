# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Constructs all parts of one broker, each part after the parts that it uses.

The parts need the runner, because they give the pool events (``core.handle``). The runner needs the
parts, because it calls them to perform what the pool decides. This module connects the two.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Awaitable, Callable, Sequence, cast

from ..cgroups import Host
from ..containers.content import Content
from ..devices import DeviceOptions, Devices, GuardedDevices, OpenDevices
from ..guard.install import without_guard
from ..pool.machine import Pool
from ..pool.model import Device, PoolSettings
from .configuration import Configuration
from .core import Clock, Core
from .environment import content_inside, device_files, machine_environment, version_file
from .gpu.accounting import DriverShares, Overheads, OveruseWatch
from .gpu.actions import DeviceActions
from .gpu.health import Health, SuddenEnds
from .gpu.landing import Landings
from .gpu.landing_recovery import LandingRecovery
from .gpu.maintenance import Maintenance
from .gpu.monitor import Monitor
from .gpu.samples import Samples
from .gpu.setaside import UnleasedSuspends
from .hostmemory import HostRoom
from .hour import HourBook
from .lifecycle import Lifecycle
from .membership import Memberships
from .messages.admin import AdminMessages
from .messages.agent import AgentMessages
from .messages.guard import GuardMessages
from .messages.people import PeopleMessages
from .messages.provisioner import ProvisionerMessages
from .messages.relay import Relay
from .messages.router import Router
from .messages.snapshot import Snapshots
from .metrics import Metrics
from .pages.activity import Activity, TimeShare
from .pages.control import ControlPages, page_folder
from .pages.hints import Homes, Rooms
from .pages.setup import GuardSetup
from .pressure import Pressure
from .runner import Runner
from .sessions import LiveSessions
from .store.files import StartRecordFile
from .store.journal import Journal
from .store.recovery import Recovery
from .store.usage import UsageBook

if TYPE_CHECKING:
    # Loaded only on a machine of a cluster.
    from .messages.elsewhere import ElsewhereMessages
    from .messages.remote import RemoteMessages
    from .shared import LentLimits, SharedLimits

#: Reads host memory and its limits.
HOST = Host()


@dataclass(frozen=True)
class Broker:
    """The parts that the application starts, reloads and ends."""

    core: Core
    runner: Runner
    devices: Sequence[Device]
    service: Devices
    health: Health
    room: HostRoom
    rooms: Rooms
    landings: Landings
    time_share: TimeShare
    setup: GuardSetup
    actions: DeviceActions
    maintenance: Maintenance
    monitor: Monitor
    metrics: Metrics
    memberships: Memberships
    recovery: Recovery
    usage: UsageBook
    router: Router
    content: Content | None
    #: Changes the rules for the pool of this machine. The part of a shared limit that this machine
    #: may not use then counts as used by other machines.
    limits: Callable[[PoolSettings], PoolSettings]


async def assemble(
    configuration: Configuration,
    journal: Journal,
    start_record: StartRecordFile,
    open_devices: OpenDevices,
    find: Callable[[Devices], Awaitable[list[Device]]],
    *,
    alone_since: float,
    journal_note: str,
    log: logging.Logger,
) -> Broker:
    """Return a broker for the devices that ``find`` returns.

    ``alone_since`` is the monotonic time at which the previous broker had ended. Since this time,
    no other broker uses the sessions in the journal.
    """
    settings, socket = configuration.settings, configuration.socket
    sessions = LiveSessions()
    clock = Clock(float(journal.meta("clock") or 0))
    lent: LentLimits | None = None
    if settings.cluster_nodes:
        from .shared import LentLimits

        lent = LentLimits(configuration, journal, sessions, clock)
    limits = _own if lent is None else lent.limits
    core = Core(
        Pool(limits(settings.pool)), journal, sessions, clock, log,
        handle=lambda event: runner.handle(event),  # noqa: PLW0108 (it is made last)
    )  # fmt: skip
    health = Health(
        core, configuration,
        lambda uuid: service.retest(uuid),  # noqa: PLW0108 (it is made next)
        log,
    )  # fmt: skip
    files = device_files(settings, socket, journal.path)
    service = open_devices(
        DeviceOptions(
            log=log.getChild("devices"),
            env={**os.environ, **machine_environment(settings, socket, journal.path, os.environ)},
            # If a user has started this broker inside a kernel, the environment has variables that
            # the pool has set for that kernel. This call leaves these variables out.
            given=without_guard(os.environ),
            wanted=settings.devices,
            lock_timeout=settings.lock_timeout,
            guard=settings.guard,
            python=settings.device_python,
            memo=journal.meta("memo"),
            files=files,
            version_file=version_file(settings, socket, journal.path),
            on_lost=health.lost,
        )
    )
    devices = await find(service)
    no_device = "" if devices else service.problem or "none was found."

    samples = Samples(service, configuration)
    room = HostRoom(HOST, lambda: configuration.settings.host_reserve)
    pressure = Pressure(core, room, log)

    content = content_inside(settings, socket) if configuration.machine_wide else None
    guarded = [device.uuid for device in devices if device.tier == "guarded"]
    folder, problem = _page_folder(configuration)
    # If the service has no guard, no session is guarded, and the broker never uses ``guardable``.
    guardable = service.guard or cast(GuardedDevices, service)
    context_bytes = max((service.context_bytes(uuid) for uuid in guarded), default=0)
    pages = ControlPages(folder, core.sessions, configuration, log, context_bytes=context_bytes)
    activity = Activity(core, pages, configuration)
    time_share = TimeShare(core, pages, activity, configuration, log)
    rooms = Rooms(core, pages, activity)
    homes = Homes(core, pages, activity)
    setup = GuardSetup(
        pages, configuration, _links(configuration, folder, journal.path),
        guarded=bool(guarded), problem=problem or ("" if guarded else _guard_problem(service)),
        log=log, content=content,
    )  # fmt: skip

    actions = DeviceActions(
        core, service, samples=samples, room=room, pages=pages, activity=activity,
        health=health, drain_timeout=settings.lock_timeout,
    )  # fmt: skip
    landings_left = LandingRecovery(core, actions, guardable, pages, log)
    landings = Landings(
        core, actions, guardable, samples=samples, pages=pages, left=landings_left, log=log
    )
    aside = UnleasedSuspends(core, actions, guardable, pages=pages, activity=activity, log=log)
    sudden_ends = SuddenEnds(core, service, health, log)
    maintenance = Maintenance(
        core, service, configuration, health=health, aside=aside,
        log=log,
    )  # fmt: skip
    shared: SharedLimits | None = None
    if lent is not None:
        from .shared import SharedLimits

        shared = SharedLimits(core, lent, maintenance, configuration, log)
    hour = HourBook(core, samples)
    monitor = Monitor(
        core, service, configuration, samples=samples, room=room, pressure=pressure,
        health=health, driver_shares=DriverShares(core, health, log), activity=activity,
        overheads=Overheads(core, pages, activity),
        overuse=OveruseWatch(core, actions, samples, configuration, log),
        homes=homes, rooms=rooms, looked=hour.look, log=log,
    )  # fmt: skip

    lifecycle = Lifecycle(core, log)
    memberships = Memberships(configuration, log)
    snapshots = Snapshots(
        core, service, configuration, samples=samples, activity=activity, setup=setup,
        maintenance=maintenance, memberships=memberships, no_device=no_device,
        journal_note=journal_note,
    )  # fmt: skip
    remote: RemoteMessages | None = None
    elsewhere: ElsewhereMessages | None = None
    if lent is not None and shared is not None:
        from ..cluster.authenticators import authenticator
        from .hosting import Hosting
        from .messages.elsewhere import ElsewhereMessages
        from .messages.remote import RemoteMessages

        node = lent.budgets.node
        checks = authenticator(settings.cluster_identity, reader=os.geteuid())
        remote = RemoteMessages(
            core, configuration, Hosting(core, configuration, node, checks, snapshots.status),
            node, look=shared.look, check_agent=shared.check_agent,
        )  # fmt: skip
        elsewhere = ElsewhereMessages(core, configuration, node, look=shared.look)
    guard = GuardMessages(
        core, pages, activity, time_share, rooms=rooms, homes=homes, landings=landings
    )
    agent = AgentMessages(core, lifecycle, activity, snapshots, log)
    provisioner = ProvisionerMessages(
        core, configuration, lifecycle=lifecycle, memberships=memberships, actions=actions,
        service=service, pages=pages, setup=setup, homes=homes, agent=agent, guard=guard,
        environment=machine_environment(settings, socket, journal.path, {}),
        no_device=no_device, content=content,
    )  # fmt: skip
    relay = Relay(core, guard)
    people = PeopleMessages(
        core, configuration, lifecycle=lifecycle, monitor=monitor, relay=relay,
        snapshots=snapshots, hour=hour,
    )  # fmt: skip
    router = Router(
        core, configuration, lifecycle=lifecycle, provisioner=provisioner, agent=agent,
        guard=guard, people=people,
        admin=AdminMessages(core, configuration, lifecycle=lifecycle, relay=relay, log=log),
        maintenance=maintenance, start_record=start_record, shared=shared, remote=remote,
        elsewhere=elsewhere, log=log,
    )  # fmt: skip

    usage = UsageBook(core)
    runner = Runner(
        core, actions=actions, guard=guard, monitor=monitor, sudden_ends=sudden_ends, usage=usage,
        hour=hour, changed=None if shared is None else shared.changed,
    )  # fmt: skip
    recovery = Recovery(
        core, service, pages=pages, activity=activity, guard=guard, landings=landings_left,
        lifecycle=lifecycle, actions=actions, sudden_ends=sudden_ends, usage=usage,
        alone_since=alone_since, log=log,
    )  # fmt: skip
    return Broker(
        core=core, runner=runner, devices=devices, service=service, health=health, room=room,
        rooms=rooms, landings=landings, time_share=time_share, setup=setup, actions=actions,
        maintenance=maintenance, monitor=monitor,
        metrics=Metrics(core, samples, monitor, configuration, log),
        memberships=memberships, recovery=recovery, usage=usage, router=router, content=content,
        limits=limits,
    )  # fmt: skip


def _own(settings: PoolSettings) -> PoolSettings:
    """Return the rules unchanged: this machine shares no limit with other machines."""
    return settings


def _guard_problem(service: Devices) -> str:
    if service.guard is None:
        return "The pool has no guard for GPUs of this vendor."
    return service.guard.guard_problem


def _page_folder(configuration: Configuration) -> tuple[Path, str]:
    """Return the folder for pages, and "" or the reason why the broker cannot make the folder."""
    socket = configuration.socket
    try:
        return page_folder(socket, machine_wide=configuration.machine_wide), ""
    except OSError as error:
        folder = socket.with_name(f"{socket.name}.pages")
        return folder, f"The folder for the kernels' pages cannot be made: {error}."


def _links(configuration: Configuration, pages: Path, journal: Path) -> Path:
    """Return the folder for the links to the guard's library.

    Without the links, a new process would run without the guard. A user's own broker keeps the
    links in a folder beside its journal, because a logout does not delete this folder. But
    LD_PRELOAD allows no space and no colon in a path. If the path of this folder has a space or a
    colon, the broker keeps the links in the folder of pages. The machine's broker always keeps them
    in the folder of pages, because all users may enter it.
    """
    lasting = journal.with_suffix(".guard")
    plain = not set(str(lasting)) & set(": \t\n")
    return lasting if plain and not configuration.machine_wide else pages
