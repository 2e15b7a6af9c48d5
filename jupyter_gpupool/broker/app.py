# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's process: configuration, start in the right order, signals, end.

Ending the broker does not end a session: what is attached stays attached, what is suspended stays
suspended in its process, and the journal tells the next broker about both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Mapping, Sequence

from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString

from .. import __version__
from ..cgroups import Host
from ..config import BrokerSettings, load_settings, needs_restart
from ..devices import Devices, OpenDevices, Options, vendor
from ..endpoint import find_socket
from ..errors import GPUPoolError
from ..guard.install import without_guard
from ..local_machine import boot_id, machine_id
from ..pool import events as e
from ..pool.machine import Pool
from ..pool.model import Device
from ..starting import broker_environment
from ..startrecord import (
    BadRecord,
    StartRecord,
    change_record,
    copy_path,
    read_record,
    remove_copy,
    remove_record,
    write_copy,
    write_record,
)
from ..units import format_bytes
from .environment import (
    LogLimit,
    device_files,
    emulated_folder,
    machine_environment,
    raise_descriptor_limit,
    report,
    version_file,
)
from .gpu.actions import DeviceEffects
from .gpu.health import Aftermath, Health
from .gpu.maintenance import Maintenance, untouchable
from .gpu.monitor import QUIET, Monitor
from .gpu.rest import Rest
from .guarding import Guarding
from .hostmemory import HostRoom
from .lives import GRACE
from .messages.router import Handlers
from .messages.snapshot import Snapshots
from .metrics import Metrics
from .pages.hints import Homes
from .pressure import Pressure
from .runner import Clock, Runner
from .sessions import Sessions
from .shutdown import Ending, Stopped
from .store.files import Keeper, sweep
from .store.journal import Journal
from .store.journal_file import JournalLock, check_home, check_record, place, take_over
from .store.records import (
    devices_from_text,
    devices_to_text,
    from_json,
)
from .store.recovery import (
    GRACE_UNDER_GUARD,
    RECOVERED_HOLD,
    Recovered,
    check_reach,
    frozen_in,
    recover,
)
from .transport.auth import Access
from .transport.connection import Connection
from .transport.listener import Claim, Door, is_machine_wide

#: Seconds that driver calls under way may still take when the broker is asked to end. One that
#: takes longer is left to the next broker, which finishes or undoes it: see ``recovery``.
FINISH = 1.5

#: Seconds for operations to end whose worker is about to be ended under them.
CLOSE = 0.5

#: A broker that does not linger still waits so long (seconds): for who had it started.
LEAST_LINGER = 2.0

#: Seconds between two tidyings of the journal.
TIDY = 15.0

#: Where memory and its limits are read.
HOST = Host()

_LOG = logging.getLogger("gpupool.broker")


class BrokerApp:
    """One broker, from its start to its end.

    Parameters
    ----------
    config_files, overrides:
        See :func:`jupyter_gpupool.config.load_settings`; read again on SIGHUP.
    socket:
        Overrules the configuration; "" leaves it to :func:`jupyter_gpupool.endpoint.find_socket`.
    ending:
        Takes the signals.
    command:
        What starts this broker again, the socket apart; empty if nobody but the caller can.
    take_over:
        Whether it takes sessions whose kernels look for their broker at another socket.
    open_devices:
        Opens the machine's GPUs.
    """

    def __init__(
        self,
        config_files: Sequence[Path],
        overrides: Config | None = None,
        socket: str = "",
        *,
        ending: Ending | None = None,
        command: Sequence[str] = (),
        take_over: bool = False,
        open_devices: OpenDevices = vendor.open_devices,
    ) -> None:
        self._open_devices = open_devices
        self._take_over = take_over
        self._config_files = [*config_files]
        self._overrides = overrides
        self.settings = self._load()
        self.path = Path(socket) if socket else find_socket(self.settings.socket)
        self._ending = ending or Ending()
        self._command = [*command]
        #: How this broker is started again; None if nobody does that.
        self._record: StartRecord | None = None
        self._built = False
        self._alone_since = time.monotonic()
        self._door: Door | None = None
        self.health = Health(_LOG)

    def _load(self) -> BrokerSettings:
        return load_settings(self._config_files, self._overrides)

    async def run(self, ready: int | None = None) -> None:
        """Serve until asked to end. ``ready`` is a descriptor to report to, see :func:`report`.

        Raises
        ------
        GPUPoolError
            If it cannot start.
        """
        loop = asyncio.get_running_loop()
        self._ending.attach()
        raise_descriptor_limit(_LOG)
        async with AsyncExitStack() as stack:
            claim = Claim(self.path)
            self._ending.last_act = partial(self._last_act, claim)
            stack.callback(claim.close)
            journal = self._open_journal(stack)
            self._alone_since = time.monotonic()  # whoever was here before is gone
            stack.callback(self._forget_emulated, journal)
            show = partial(machine_environment, self.settings, self.path, journal.path)
            kernel_env, own_env = show({}), {**os.environ, **show(os.environ)}
            service = self._open_devices(
                Options(
                    log=_LOG.getChild("devices"),
                    env=own_env,
                    # A broker may be started from within a kernel, whose variables are the pool's.
                    given=without_guard(os.environ),
                    wanted=self.settings.devices,
                    lock_timeout=self.settings.lock_timeout,
                    guard=self.settings.guard,
                    python=self.settings.device_python,
                    memo=journal.meta("memo"),
                    files=device_files(self.settings, self.path, journal.path),
                    version_file=version_file(self.settings, self.path, journal.path),
                    on_lost=self.health.lost,
                )
            )
            stack.push_async_callback(service.close, CLOSE)
            found = await self._ending.unless_asked(self._find(journal, service))
            if service.memo:
                journal.remember("memo", service.memo)
            if journal.meta("boot") in ("", boot_id()):
                uuids = [device.uuid for device in found]
                check_reach(journal.records(), uuids, service.problem, journal.meta("emulate"))
            devices = [*found]
            journal.remember("devices", devices_to_text(devices))
            journal.remember("emulate", self.settings.emulate or "")
            self._build(claim, journal, service, kernel_env, devices)
            stack.callback(self.guarding.close)
            stack.callback(self.health.close)
            stack.callback(self.maintenance.close)
            stack.callback(self.effects.room.close)
            stack.push_async_callback(self.monitor.close)
            await self._ending.unless_asked(self._restore(journal, service))
            # Modules live as long as the broker; without them a full collection takes a millisecond
            # of the event loop instead of twenty.
            gc.collect()
            gc.freeze()
            # Not before: to a look without them, the sessions' own processes are strangers.
            self.monitor.start()
            self.maintenance.go_on()
            await self._serve(claim.bind())
            stack.callback(self._stop_serving)
            stack.callback(self.metrics.close)
            self._measure()
            loop.add_signal_handler(signal.SIGHUP, self._reload)
            self._mention_predecessor()
            self._announce(service)
            self._write_record(claim)
            if ready is not None:
                report(ready, {"ok": True, "pid": os.getpid(), "socket": str(self.path)})
            keeper = Keeper(claim, self.journal_lock, self.runner, self._serve, _LOG)
            keeper.keep_pages = self.guarding.keep
            keeper.keep_record = self._keep_record
            chores = [
                loop.create_task(chore) for chore in (self._tidy(), self._linger(), keeper.run())
            ]
            chores.append(loop.create_task(asyncio.to_thread(sweep, self.path, _LOG)))
            await self._ending.wait()
            self.forget_record()
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            _LOG.info("Ending; %d sessions stay as they are", len(self.runner.sessions))
            self._stop_serving()
            await self._end()

    # ------------------------------------------------------------------ start

    def _open_journal(self, stack: AsyncExitStack) -> Journal:
        """Return this machine's journal, which no other broker has."""
        state_dir = self.settings.state_dir
        where = place(state_dir, self.path)
        self.journal_note = where.note
        if where.note:
            _LOG.warning("%s", where.note)
        self.journal_lock = JournalLock(where.path, self.path)
        stack.callback(self.journal_lock.close)
        check_record(self.path, where.path)
        take_over(where.path, state_dir, self.path, _LOG)
        journal = Journal(
            where.path, _LOG, machine=machine_id(), max_bytes=self.settings.journal_size
        )
        stack.callback(journal.close)
        if not self._take_over:
            check_home(journal, self.path)
        return journal

    async def _find(self, journal: Journal, service: Devices) -> list[Device]:
        """Return the machine's devices, tested; untouched where an admin has paused the pool."""
        paused = untouchable(journal)
        known = devices_from_text(journal.meta("devices")) if paused else {}
        if known:
            return await service.assume(known, paused)
        return await service.start(self._known(journal))

    def _known(self, journal: Journal) -> dict[str, Device]:
        """Return the devices that need no self-test: those an earlier broker tested.

        Only where its sessions may live on: a test takes a CUDA context's worth of memory, which
        may be granted to one of them, and a resume that loses its room is fatal.
        """
        if not journal.records() or journal.meta("boot") != boot_id():
            return {}
        known = devices_from_text(journal.meta("devices"))
        return {uuid: device for uuid, device in known.items() if device.can_suspend}

    def _build(
        self,
        claim: Claim,
        journal: Journal,
        service: Devices,
        kernel_env: Mapping[str, str],
        devices: Sequence[Device],
    ) -> None:
        """Connect the parts."""
        settings, loop = self.settings, asyncio.get_running_loop()
        clock = Clock(float(journal.meta("clock") or 0))
        runner = Runner(Pool(settings.pool), journal, Sessions(), clock, _LOG)
        effects = DeviceEffects(runner, service)
        runner.effects = effects
        runner.on_gone = lambda session: effects.end_frozen(session.id, session.frozen)
        effects.on_bad_device = self.health.bad
        access = Access(claim.machine_wide, os.geteuid(), settings.admins)
        versions = service.versions
        snapshots = Snapshots(
            runner, effects, access, socket=self.path, emulated=bool(settings.emulate),
            machine=f"EMULATED {settings.emulate}" if settings.emulate else versions,
            journal_note=self.journal_note,
        )  # fmt: skip
        snapshots.settings = settings
        homes = Homes(runner, snapshots.recent)
        self.handlers = Handlers(
            runner, access, snapshots, homes, attach=settings.attach,
            environment=lambda home: {**kernel_env, **service.environment(home)},
            max_sessions=settings.max_sessions_per_user, log=_LOG,
        )  # fmt: skip
        snapshots.limited = service.limit
        if not devices:
            self.handlers.no_device = snapshots.problem = service.problem or "none was found."
        effects.room = HostRoom(HOST, settings.host_reserve)
        self.monitor = Monitor(runner, effects, settings, _LOG)
        self.monitor.pressure = Pressure(runner, effects.room, _LOG)
        self.monitor.on_healthy = self.health.readable
        self.handlers.wishes.look = self.monitor.look
        runner.on_change = self.monitor.look_soon
        self.runner, self.effects, self.snapshots = runner, effects, snapshots
        self.guarding = Guarding(
            runner, effects, handlers=self.handlers, monitor=self.monitor, snapshots=snapshots,
            homes=homes, settings=settings, log=_LOG,
        )  # fmt: skip
        self.guarding.start(
            self.path, journal.path.with_suffix(".guard"), devices, service,
            machine_wide=claim.machine_wide,
        )  # fmt: skip
        self.metrics = Metrics(runner, effects, _LOG)
        self._empty_since = loop.time()
        self._built = True
        runner.on_row = self.handlers.show_row
        runner.on_population = self._population
        runner.note(
            "broker-start",
            detail={"pid": os.getpid(), "version": __version__, "emulate": settings.emulate},
        )
        if journal.set_aside:
            runner.note("journal-lost", reason=journal.set_aside)
        self.health.retest_after = settings.retest_after
        self.health.begin(runner, service, devices)
        self.monitor.rest = Rest(runner, self.health, _LOG)
        self.maintenance = Maintenance(
            runner, service, self.health, self.handlers, log=_LOG,
            renewed=lambda found: self._renewed(service, found),
        )  # fmt: skip
        self._look_at_driver(service)
        self.aftermath = Aftermath(runner, self.health, lambda: effects.hazard, _LOG)
        runner.on_ending = self.aftermath.ending
        self.handlers.retire = effects.retire_and_end
        self.handlers.hazard = lambda: effects.hazard
        self.handlers.on_served = self._served
        self.maintenance.aside = self.guarding.aside
        self.handlers.maintenance = snapshots.maintenance = self.maintenance
        self.maintenance.begin()

    def _look_at_driver(self, service: Devices) -> None:
        """Take note of what is known of the driver that is loaded."""
        hazard = service.hazard
        self.effects.hazard = self.snapshots.driver_warning = hazard
        if hazard:
            _LOG.warning("%s", hazard)

    def _renewed(self, service: Devices, found: Sequence[Device]) -> list[Device]:
        """Take note of the devices after a pause; return those of the pool."""
        devices = [*found]
        self._look_at_driver(service)
        self.snapshots.limited = service.limit
        self.runner.journal.remember("devices", devices_to_text(devices))
        if not self.settings.emulate:
            self.snapshots.machine = service.versions
        return devices

    async def _restore(self, journal: Journal, service: Devices) -> None:
        """Go on with the sessions of a broker that was here before."""
        stored = journal.records()
        if stored and journal.meta("boot") not in ("", boot_id()):
            stored = {}
            for name in journal.records():
                journal.put(name, None)
        journal.remember("boot", boot_id())
        journal.remember("socket", str(self.path))
        await self.guarding.settle(stored)
        found, dead = await recover(stored, service, self.runner.now(), _LOG)
        for name, owner, reason in dead:
            journal.put(name, None)
            self.runner.note("close", owner=owner, reason=reason, detail={"session": name})
            self.effects.end_frozen(name, frozen_in(stored[name]))
            with suppress(KeyError, TypeError, ValueError):  # one that cannot be read
                self.aftermath.ended(from_json(stored[name]["record"]))
        for one in found:
            self.guarding.adopt(one.session, one.record)
            self.guarding.settle_use(one, self.runner.now(), self._alone)
        for one in found:
            self.runner.sessions.add(one.session)
        records = tuple(one.record for one in found)
        self.runner.handle(e.Recovered(now=self.runner.now(), records=records))
        for one in found:
            self._go_on(one)
        self.guarding.all_recovered()
        self.runner.commit()
        self._population(len(self.runner.sessions))

    def _go_on(self, one: Recovered) -> None:
        session, runner = one.session, self.runner
        self.guarding.recovered(one, self._alone)
        if one.record.slices:
            runner.busy[session.id] = one.record.state
        if session.process is None:
            self.handlers.lives.expect_launch(session)
        else:
            self.handlers.lives.watch_process(session)
        runner.dirty(session.id)
        runner.note(
            "recovered",
            session,
            device=one.record.slices[0].device if one.record.slices else None,
            bytes=one.record.granted_bytes or None,
            detail={"label": one.record.label, "state": one.record.state},
        )
        if one.lost:
            self.effects.end_session(e.EndSession(session=session.id, message=one.lost))
        elif any(hold.id == RECOVERED_HOLD for hold in one.record.holds):
            grace = GRACE if session.page is None else GRACE_UNDER_GUARD
            self.handlers.lives.start_grace(session, grace)

    @property
    def _alone(self) -> float:
        """For how many seconds at least no other broker has looked at these sessions."""
        return time.monotonic() - self._alone_since

    def _last_act(self, claim: Claim) -> None:
        """Before an end by force: a broker that was told to end is not started again."""
        self.forget_record()
        claim.close()

    def _mention_predecessor(self) -> None:
        """Log that the broker before this one died: its own log ends without a word of that."""
        with suppress(BadRecord):
            before = read_record(self.path)
            if before is not None:
                _LOG.warning(
                    "The broker before this one (process %d) died: %s", before.pid,
                    before.crashed or "it was killed, perhaps because memory was short (dmesg)",
                )  # fmt: skip

    def _write_record(self, claim: Claim) -> None:
        """Let others start this broker again should it die. The machine's has a service manager."""
        if claim.machine_wide or not self._command:
            return
        try:
            command = [*self._command, "--socket", str(self.path)]
            self._record = write_record(
                self.path, command, broker_environment(os.environ), str(self.runner.journal.path)
            )
            if self.handlers.on_served is None:
                self._served()  # somebody was faster
        except OSError as error:
            _LOG.warning("Should this broker die, it will not be started again: %s", error)
            return
        try:
            write_copy(self._record)
        except OSError as error:
            _LOG.warning("The start record has no copy beside the journal: %s", error)

    def _keep_record(self) -> None:
        """Write the copy of the start record again, if it was deleted."""
        if self._record is not None and not copy_path(Path(self._record.journal)).exists():
            write_copy(self._record)

    def forget_record(self) -> None:
        """Let nobody start this broker again, or the one before it: it was told to end."""
        record = self._record
        with suppress(BadRecord):
            record = record or read_record(self.path)
        if record is not None:
            remove_copy(record.journal)
        remove_record(self.path)

    def _announce(self, service: Devices) -> None:
        _LOG.info(
            "Broker %s (process %d) listens at %s for %s; journal %s",
            __version__, os.getpid(), self.path,
            "every user" if self.handlers.access.machine_wide else f"user id {os.geteuid()}",
            self.runner.journal.path,
        )  # fmt: skip
        for note in self.settings.notes:
            _LOG.warning("%s", note)
        if self.settings.emulate and self.handlers.access.machine_wide:
            _LOG.warning(
                "The emulated GPUs are memory that every user's programs write and this broker's "
                "device processes read: only for users who trust each other"
            )
        if service.limit:
            _LOG.warning("%s", service.limit)
        if not self.health.devices:
            _LOG.error("No GPU: %s", service.problem or "none was found.")
        largest = max(self.snapshots.capacities(), default=0)
        if 0 < largest < self.settings.pool.default_memory:
            _LOG.warning(
                "c.GPUPool.default_memory is %s and the largest GPU can give %s: a kernel that "
                "does not ask gets that",
                format_bytes(self.settings.pool.default_memory), format_bytes(largest),
            )  # fmt: skip
        for device in self.health.devices.values():
            _LOG.info(
                "GPU %d %s (%s): tier %s%s", device.index, device.name, device.uuid, device.tier,
                f": {device.tier_reason}" if device.tier_reason else "",
            )  # fmt: skip

    def _served(self) -> None:
        """Note that this broker is of use: should it be killed, another start is worth it."""
        if self._record is not None:
            self._change_record(served=True)

    def crashed(self, error: Exception) -> None:
        """Note that this broker ended by an error of its own."""
        if self._record is not None:
            self._change_record(crashed=f"{type(error).__name__}: {error}"[:500])

    def _change_record(self, **changes: Any) -> None:
        assert self._record is not None
        self._record = change_record(self.path, self._record, **changes)
        if copy_path(Path(self._record.journal)).exists():  # or it ends in order
            with suppress(OSError):
                write_copy(self._record)

    # ------------------------------------------------------------------ while it runs

    async def _serve(self, listening: socket.socket) -> None:
        """Accept connections at ``listening``, and no more where it did before."""
        door = Door(listening, lambda: Connection(self.handlers), self.handlers.dispatcher, _LOG)
        self._stop_serving()
        self._door = door

    def _stop_serving(self) -> None:
        if self._door is not None:
            self._door.close()

    def _population(self, sessions: int) -> None:
        self.monitor.want(sessions or self.metrics.port)
        self._empty_since = asyncio.get_running_loop().time()

    def _measure(self) -> None:
        """Serve metrics as configured; for these the devices are read without a session, too."""
        # The monitor's slowest pace, twice missed.
        self.effects.sample_lasts = 3 * QUIET * self.settings.sample_interval
        self.metrics.configure(self.settings)
        self.monitor.want(len(self.runner.sessions) or self.metrics.port)

    def _reload(self) -> None:
        """Read the configuration again; a bad one changes nothing."""
        try:
            new = self._load()
        except GPUPoolError as error:
            _LOG.error("The configuration was not read again: %s", error)
            self.runner.note("config", reason=f"refused: {error}")
            return
        late = needs_restart(self.settings, new)
        if late:
            names = ", ".join(f"c.GPUPool.{name}" for name in late)
            _LOG.warning("%s changed and will count from the next start of the broker", names)
        self.settings = new
        self.runner.journal.max_bytes = new.journal_size
        self.health.retest_after = new.retest_after
        access = Access(self.handlers.access.machine_wide, os.geteuid(), new.admins)
        self.handlers.access = self.snapshots.access = access
        self.handlers.attach = new.attach
        self.snapshots.settings = new
        self.handlers.max_sessions = new.max_sessions_per_user
        self.guarding.configure(new)
        self.monitor.settings = new
        self.effects.room.reserve = new.host_reserve
        self._measure()
        self.runner.note("config", reason="read again")
        self.runner.handle(e.SettingsChanged(now=self.runner.now(), settings=new.pool))
        _LOG.info("The configuration was read again")
        for note in new.notes:
            _LOG.warning("%s", note)

    async def _tidy(self) -> None:
        loop, due, written = asyncio.get_running_loop(), asyncio.Event(), -1
        checked = loop.time()
        self.runner.journal.on_long = due.set
        while True:
            timer = loop.call_later(TIDY, due.set)
            await due.wait()
            timer.cancel()
            self.runner.note_missing()
            if self.runner.journal.seq != written:
                written = self.runner.journal.seq
                await asyncio.to_thread(self.runner.journal.tidy)
            due.clear()  # what was asked for meanwhile has been done
            if loop.time() - checked >= TIDY:
                checked = loop.time()
                for problem in self.runner.pool.self_check():
                    _LOG.error("The pool's accounts do not agree; please report this: %s", problem)

    async def _linger(self) -> None:
        """End a broker of one user when nobody has needed it for a while."""
        if self.handlers.access.machine_wide:
            return
        loop = asyncio.get_running_loop()
        while True:
            since = max(self._empty_since, self.handlers.last_connection)
            # Without a GPU there is nothing to wait for: the next try may be configured better.
            usual = self.settings.linger if self.health.devices else 0.0
            linger = max(LEAST_LINGER, usual)
            left = since + linger - loop.time()
            if self.runner.sessions:
                await asyncio.sleep(linger / 4)
            elif left > 0:
                await asyncio.sleep(left)
            else:
                _LOG.info("No session for %g s", linger)
                self._ending.ask()
                return

    # ------------------------------------------------------------------ end

    def _forget_emulated(self, journal: Journal) -> None:
        """Remove the emulated devices of a user's own broker, unless sessions live on in them."""
        if not self.settings.emulate or is_machine_wide(self.path) or not self._built:
            return
        if self.runner.sessions or journal.records() or journal.set_aside or journal.problem:
            return  # or may live on: what was lost is not known to have ended
        from ..emulation import remove_state

        remove_state(emulated_folder(self.path, journal.path))

    async def _end(self) -> None:
        await self.effects.finish(FINISH)
        self.runner.note("broker-stop", reason="ended in order")
        self.runner.stop()
        self.handlers.close_all()
        # Let what was answered last reach its reader.
        await asyncio.sleep(0)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config | None]:
    """Return the options, and what ``--GPUPool.name=value`` overrules."""
    parser = argparse.ArgumentParser(
        prog="jupyter gpupool broker",
        description="Serve a GPU pool. --GPUPool.NAME=VALUE overrules a configured option.",
    )
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--socket", default="", help="listen here")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over sessions whose kernels look for their broker at another socket, where "
        "nothing can listen any more",
    )
    parser.add_argument("--ready-fd", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help="log everything")
    options, rest = parser.parse_known_args(argv)
    overrides = Config()
    for word in rest:
        name, equals, value = word.removeprefix("--GPUPool.").partition("=")
        if not word.startswith("--GPUPool.") or not equals:
            parser.error(f"unknown argument: {word}")
        overrides.GPUPool[name] = DeferredConfigString(value)
    return options, overrides if rest else None


def main(
    argv: Sequence[str] | None = None, *, open_devices: OpenDevices = vendor.open_devices
) -> int:
    """Run a broker in the foreground; return the exit code."""
    ending = Ending()
    ending.listen()
    words = [*(sys.argv[1:] if argv is None else argv)]
    options, overrides = parse(words)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if options.debug else logging.INFO,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
    )
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    if not options.debug:
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogLimit())
    # What the thread that reads the journal may keep the event loop waiting.
    sys.setswitchinterval(0.001)

    async def run() -> None:
        app = BrokerApp(
            options.config, overrides, options.socket,
            ending=ending, command=command_of(options, words), take_over=options.take_over,
            open_devices=open_devices,
        )  # fmt: skip
        try:
            await app.run(options.ready_fd)
        except Stopped:
            app.forget_record()
            raise
        except GPUPoolError:
            raise
        except Exception as error:
            app.crashed(error)
            raise

    try:
        asyncio.run(run())
    except Stopped:
        _LOG.info("Ended while it was starting")
    except GPUPoolError as error:
        if options.ready_fd is not None:
            failure = {"ok": False, "code": error.code, "message": error.message}
            listens = str(error.details.get("socket", ""))  # of the broker to join
            report(options.ready_fd, {**failure, "next_step": error.next_step, "socket": listens})
        print(f"jupyter gpupool broker: {error}", file=sys.stderr)
        return 1
    finally:
        ending.over()
    return 0


def command_of(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return what starts a broker with these options, from any folder."""
    command = [sys.executable, "-m", __package__]
    for path in options.config:
        command += ["--config", os.path.abspath(path)]
    if options.debug:
        command.append("--debug")
    return [*command, *(word for word in words if word.startswith("--GPUPool."))]
