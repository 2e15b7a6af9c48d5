# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's process: configuration, start in the right order, signals, end.

No session ends when the broker ends. Attached sessions stay attached, and suspended sessions stay
suspended in their processes. The journal tells the next broker about all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString

from .. import __version__
from ..devices import Devices, OpenDevices, vendor
from ..errors import GPUPoolError
from ..local_machine import boot_id, machine_id
from ..pool.model import Device
from ..units import format_bytes
from .assembly import Broker, assemble
from .configuration import Configuration
from .core import Core
from .environment import emulated_folder, raise_descriptor_limit, remove_emulated, report
from .gpu.maintenance import untouchable
from .ratelimit import LogLimit
from .reload import Reload
from .shutdown import Ending, Stopped
from .store.files import FileKeeper, StartRecordFile, sweep
from .store.journal import Journal
from .store.journal_file import JournalLock, check_home, check_record, place, take_over
from .store.records import devices_from_text, devices_to_text
from .store.recovery import check_reach
from .supervisor import Supervisor
from .transport.listener import Claim, Server
from .wakeups import wake_soon

if TYPE_CHECKING:
    # This module is loaded only if the broker serves containers.
    from .transport.usersockets import UserSockets

#: When the broker ends, it waits this many seconds for driver calls under way. The next broker
#: finishes or undoes a call that takes longer: see ``recovery``.
FINISH = 1.5

#: Seconds that the broker waits for operations to end, before it ends their workers.
CLOSE = 0.5

#: Even if the option ``linger`` is 0, a broker without sessions waits this many seconds before it
#: ends, so that the client that started it can connect.
LEAST_LINGER = 2.0

#: A user's own broker checks whether the machine's service has replaced it. There are at most this
#: many seconds between two checks.
LOOK_ASIDE = 5.0

#: If the event loop wants to run, a computing thread must give way after this many seconds.
SWITCH = 0.0005

#: Seconds between two clean-ups of the journal.
TIDY = 15.0

_LOG = logging.getLogger("gpupool.broker")


class BrokerApp:
    """One broker, from its start to its end.

    Parameters
    ----------
    config_files, overrides:
        See :func:`jupyter_gpupool.config.load_timetable`. SIGHUP makes the broker read them again.
    socket:
        Overrules the configuration. If it is "", :func:`jupyter_gpupool.endpoint.find_socket` finds
        the socket.
    ending:
        Receives the signals.
    command:
        The command that starts this broker again, without its socket. It is empty if only the
        caller can start the broker.
    take_over:
        Whether to take over sessions whose kernels look for their broker at another socket.
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
        self.configuration = Configuration(config_files, overrides, socket)
        self.path = self.configuration.socket
        self.start_record = StartRecordFile(self.path, command, _LOG)
        self._take_over = take_over
        self._open_devices = open_devices
        self._ending = ending or Ending()

    async def run(self, ready: int | None = None) -> None:
        """Serve until a signal asks the broker to end.

        The broker reports the result of its start to the descriptor ``ready``: see :func:`report`.

        Raises
        ------
        GPUPoolError
            If the broker cannot start.
        """
        self._ending.attach()
        raise_descriptor_limit(_LOG)
        async with AsyncExitStack() as stack:
            supervisor = Supervisor()
            claim = Claim(self.path, supervisor.listening(self.path))
            stack.callback(claim.close)
            # A forced end skips the usual end of the broker, and calls only these two functions.
            # The first function deletes the start record. Without a start record, no client starts
            # this broker again.
            self._ending.before_force(self.start_record.forget)
            self._ending.before_force(claim.close)
            tidy_due = asyncio.Event()
            lock, journal, note = self._open_journal(stack, tidy_due.set)
            stack.callback(self._forget_emulated, journal)
            alone_since = time.monotonic()  # the previous broker has ended
            broker = await assemble(
                self.configuration, journal, self.start_record, self._open_devices,
                partial(self._find, stack, journal),
                alone_since=alone_since, journal_note=note, log=_LOG,
            )  # fmt: skip
            stack.callback(self._close, broker)
            stack.push_async_callback(broker.monitor.close)
            self._begin(broker)
            reload = Reload(
                broker.core, self.configuration, metrics=broker.metrics,
                memberships=broker.memberships, log=_LOG, limits=broker.limits,
            )  # fmt: skip
            reload.check()
            stack.callback(reload.close)
            await self._ending.unless_asked(broker.recovery.run(str(self.path)))
            # Modules live as long as the broker, so the garbage collector need not look at them. A
            # full collection without them stops the event loop for one millisecond instead of
            # twenty.
            gc.collect()
            gc.freeze()
            # A thread that computes (the text of metrics, a page of history) delays the event loop.
            # With Python's default switch interval, each delay may take 5 ms. In a measurement, the
            # median delay was 7 ms with the default and 0.7 ms with this interval.
            sys.setswitchinterval(SWITCH)
            # The monitor starts only now. Before the recovery, it would treat the sessions'
            # processes as foreign processes.
            broker.monitor.start()
            broker.maintenance.go_on()
            server = Server(broker.router, _LOG)
            stack.callback(server.close)
            server.serve(claim.bind())
            users = self._user_sockets(broker, journal.path)
            if users is not None:
                stack.callback(users.close)
            stack.callback(broker.metrics.close)
            broker.metrics.configure()
            reload.start()
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload.ask)
            self.start_record.mention_predecessor()
            self._announce(broker)
            self.start_record.write(journal.path)
            if ready is not None:
                report(ready, {"ok": True, "pid": os.getpid(), "socket": str(self.path)})
            supervisor.ready(f"Serving at {self.path}")
            keeper = FileKeeper(
                claim, lock, broker.core, setup=broker.setup, start_record=self.start_record,
                serve=server.serve, log=_LOG,
            )  # fmt: skip
            works = [
                self._tidy(broker.core, tidy_due), self._linger(broker), keeper.run(),
                asyncio.to_thread(sweep, self.path, _LOG), supervisor.keep_alive(),
            ]  # fmt: skip
            if users is not None:
                works.append(users.run())
            chores = [asyncio.ensure_future(work) for work in works]
            await self._ending.wait()
            supervisor.ending()
            self.start_record.forget()
            for chore in chores:
                chore.cancel()
            await asyncio.gather(*chores, return_exceptions=True)
            _LOG.info(
                "The broker ends; its %d sessions stay open for the next broker",
                len(broker.core.sessions),
            )
            server.close()
            if users is not None:
                users.close()
            await self._end(broker)

    # ------------------------------------------------------------------ start

    def _open_journal(
        self, stack: AsyncExitStack, on_long: Callable[[], None]
    ) -> tuple[JournalLock, Journal, str]:
        """Return the journal's lock, the journal, and a note about the journal's folder or "".

        The lock keeps other brokers away from the journal.
        """
        state_dir = self.configuration.settings.state_dir
        where = place(state_dir, self.path)
        if where.note:
            _LOG.warning("%s", where.note)
        lock = JournalLock(where.path, self.path)
        stack.callback(lock.close)
        check_record(self.path, where.path)
        take_over(where.path, state_dir, self.path, _LOG)
        journal = Journal(
            where.path, _LOG, machine=machine_id(), on_long=on_long,
            max_bytes=lambda: self.configuration.settings.journal_size,
        )  # fmt: skip
        stack.callback(journal.close)
        if not self._take_over:
            check_home(journal, self.path)
        return lock, journal, where.note

    async def _find(
        self, stack: AsyncExitStack, journal: Journal, service: Devices
    ) -> list[Device]:
        """Return the machine's devices.

        Usually the broker tests the devices first. If an admin has paused the whole pool and the
        pause is complete, the broker does not touch the devices. In this case the devices come from
        the journal.
        """
        stack.push_async_callback(service.close, CLOSE)
        paused = untouchable(journal)
        known = devices_from_text(journal.meta("devices")) if paused else {}
        start = service.assume(known, paused) if known else service.start(self._known(journal))
        found = await self._ending.unless_asked(start)
        if service.memo:
            journal.remember("memo", service.memo)
        if journal.meta("boot") in ("", boot_id()):
            uuids = [device.uuid for device in found]
            check_reach(journal.records(), uuids, service.problem, journal.meta("emulate"))
        journal.remember("devices", devices_to_text(found))
        journal.remember("emulate", self.configuration.settings.emulate or "")
        return found

    def _known(self, journal: Journal) -> dict[str, Device]:
        """Return the devices that need no self-test, because an earlier broker tested them.

        If no session of the earlier broker can still be alive, the result is empty, and the broker
        tests all devices. If a session may be alive, a self-test is a risk: it takes the memory of
        a CUDA context, which the session's slice may need. The session's resume could then fail,
        and the session would end.
        """
        if not journal.records() or journal.meta("boot") != boot_id():
            return {}
        known = devices_from_text(journal.meta("devices"))
        return {uuid: device for uuid, device in known.items() if device.can_suspend}

    def _begin(self, broker: Broker) -> None:
        """Tell the pool the devices, and which of them an admin has taken out of service."""
        core, emulate = broker.core, self.configuration.settings.emulate
        core.note(
            "broker-start",
            detail={"pid": os.getpid(), "version": __version__, "emulate": emulate},
        )
        if core.journal.set_aside:
            core.note("journal-lost", reason=core.journal.set_aside)
        broker.health.begin(broker.devices)
        broker.maintenance.begin()

    def _user_sockets(self, broker: Broker, journal: Path) -> UserSockets | None:
        """Return the sockets of users in containers, if this broker serves containers."""
        if broker.content is None:
            return None
        from .transport.usersockets import UserSockets

        emulated = emulated_folder(self.path, journal)
        users = UserSockets(
            self.path.with_name("users"), self.path.name, broker.router, broker.content, _LOG,
            # A container needs the device files of its GPUs. The container's runtime adds the files
            # of real GPUs. For emulated GPUs, the broker mounts this folder instead.
            mounts=(emulated.name,) if self.configuration.settings.emulate else (),
        )  # fmt: skip
        users.prepare()
        return users

    def _announce(self, broker: Broker) -> None:
        settings, machine_wide = self.configuration.settings, self.configuration.machine_wide
        _LOG.info(
            "Broker %s (process %d) listens at %s for %s; its journal is %s",
            __version__, os.getpid(), self.path,
            "every user" if machine_wide else f"user id {os.geteuid()}",
            broker.core.journal.path,
        )  # fmt: skip
        vain = self.configuration.timetable.overruled(time.time())
        for note in (*settings.notes, *vain, *filter(None, [broker.service.hazard])):
            _LOG.warning("%s", note)
        if settings.emulate and machine_wide:
            _LOG.warning(
                "Every user's programs can write to the memory of the emulated GPUs, which the "
                "device processes of this broker read. Use emulated GPUs only if all users trust "
                "each other"
            )
        if broker.service.limit:
            _LOG.warning("%s", broker.service.limit)
        if not broker.health.devices:
            _LOG.error("No GPU: %s", broker.service.problem or "none was found.")
        views = broker.core.pool.device_views()
        largest = max((view.capacity for view in views), default=0)
        if 0 < largest < settings.pool.default_memory:
            _LOG.warning(
                "c.GPUPool.default_memory is %s, but the largest GPU can give only %s. So a kernel "
                "that asks for no size gets a whole GPU",
                format_bytes(settings.pool.default_memory), format_bytes(largest),
            )  # fmt: skip
        for device in broker.health.devices.values():
            _LOG.info(
                "GPU %d %s (%s): tier %s%s", device.index, device.name, device.uuid, device.tier,
                f": {device.tier_reason}" if device.tier_reason else "",
            )  # fmt: skip

    # ------------------------------------------------------------------ while it runs

    async def _tidy(self, core: Core, due: asyncio.Event) -> None:
        loop, written = asyncio.get_running_loop(), -1
        checked = loop.time()
        while True:
            timer = loop.call_later(TIDY, due.set)
            await due.wait()
            timer.cancel()
            core.note_missing()
            if core.journal.seq != written:
                written = core.journal.seq
                await asyncio.to_thread(core.journal.tidy)
            # If a part has set ``due`` during this clean-up, no second clean-up is necessary.
            due.clear()
            if loop.time() - checked >= TIDY:
                checked = loop.time()
                for problem in core.pool.self_check():
                    _LOG.error("The pool has a wrong figure; please report this: %s", problem)

    async def _linger(self, broker: Broker) -> None:
        """End a user's own broker when it has had no session and no new connection for a while."""
        if self.configuration.machine_wide:
            return
        sessions = broker.core.sessions
        while True:
            since = max(sessions.changed_at, broker.router.last_connection)
            # A broker without a GPU ends soon, because the next broker may have a better
            # configuration. A broker that stands aside ends soon, because new kernels go to the
            # machine's service.
            needed = broker.health.devices and not self.configuration.stands_aside()
            usual = self.configuration.settings.linger if needed else 0.0
            linger = max(LEAST_LINGER, usual)
            left = since + linger - asyncio.get_running_loop().time()
            if sessions:
                await asyncio.sleep(min(linger / 4, LOOK_ASIDE))
            elif left > 0:
                await asyncio.sleep(min(left, LOOK_ASIDE))
            else:
                _LOG.info("The broker ends, because it had no session for %g s", linger)
                self._ending.ask()
                return

    # ------------------------------------------------------------------ end

    def _close(self, broker: Broker) -> None:
        broker.room.close()
        broker.maintenance.close()
        broker.health.close()
        broker.time_share.close()
        broker.landings.close()
        broker.rooms.close()
        broker.setup.close()

    def _forget_emulated(self, journal: Journal) -> None:
        """Remove the emulated devices of a user's own broker if no session uses them."""
        if not self.configuration.settings.emulate or self.configuration.machine_wide:
            return
        if journal.records() or journal.set_aside or journal.problem:
            return  # without its journal, the broker cannot know whether sessions use the devices
        remove_emulated(self.path, journal.path)

    async def _end(self, broker: Broker) -> None:
        await broker.actions.finish(FINISH)
        broker.core.note("broker-stop", reason="ended in order")
        broker.usage.close()
        broker.runner.stop()
        broker.router.close()
        # Give the event loop one turn to send the last answers.
        await asyncio.sleep(0)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Config | None]:
    """Return the options, and the configuration that ``--GPUPool.name=value`` sets."""
    parser = argparse.ArgumentParser(
        prog="jupyter gpupool broker",
        description="Serve a GPU pool. --GPUPool.NAME=VALUE overrules a configured option.",
    )
    parser.add_argument("--config", type=Path, action="append", default=[], metavar="FILE")
    parser.add_argument("--socket", default="", help="listen here")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="take over the sessions of kernels that look for their broker at another socket; for "
        "the case that nothing can listen there any more",
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
    # With this switch interval, the thread that reads the journal delays the event loop only
    # briefly.
    sys.setswitchinterval(0.001)
    wake_soon()

    async def run() -> None:
        app = BrokerApp(
            options.config, overrides, options.socket,
            ending=ending, command=command_of(options, words), take_over=options.take_over,
            open_devices=open_devices,
        )  # fmt: skip
        try:
            await app.run(options.ready_fd)
        except Stopped:
            app.start_record.forget()
            raise
        except GPUPoolError:
            raise
        except Exception as error:
            app.start_record.crashed(error)
            raise

    try:
        asyncio.run(run())
    except Stopped:
        _LOG.info("The broker was asked to end while it was starting")
    except GPUPoolError as error:
        if options.ready_fd is not None:
            failure = {"ok": False, "code": error.code, "message": error.message}
            # The start fails if another broker already serves the caller's pool. ``socket`` is then
            # the socket of that broker.
            listens = str(error.details.get("socket", ""))
            report(options.ready_fd, {**failure, "next_step": error.next_step, "socket": listens})
        print(f"jupyter gpupool broker: {error}", file=sys.stderr)
        return 1
    finally:
        ending.over()
    return 0


def command_of(options: argparse.Namespace, words: Sequence[str]) -> list[str]:
    """Return the command that starts a broker with these options.

    The command works in any folder. It does not name a socket.
    """
    command = [sys.executable, "-m", __package__]
    for path in options.config:
        command += ["--config", os.path.abspath(path)]
    if options.debug:
        command.append("--debug")
    return [*command, *(word for word in words if word.startswith("--GPUPool."))]
