# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Takes samples of the devices and the host for the pool, and finds foreign processes.

The monitor samples while a session is open or metrics are served. After the end of the last
session, it goes on until the processes of that session are gone. While all sessions are detached,
it samples less often. A foreign process is a process on a device that belongs to no session and not
to the broker.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from typing import Awaitable, Callable, Mapping, Sequence

from ... import procfs
from ...deadlines import within
from ...devices import Devices, DeviceSample, assumed_context
from ...errors import GPUPoolError
from ...pool import events as e
from ...pool.attribution import REST_LOOKS, Attribution, LeaseHolder, Listed, Observed, attribute
from ...procfs import ProcessId, identify, session_of
from ..configuration import Configuration
from ..core import Core
from ..hostmemory import HostRoom
from ..pages.activity import Activity
from ..pages.hints import Homes, Rooms
from ..pressure import Pressure
from ..ratelimit import Pace
from .accounting import DriverShares, Overheads, OveruseWatch
from .health import Health
from .samples import QUIET, Samples

#: After a change, the monitor waits before it takes a sample, because more changes often follow. It
#: waits for BREATH times the duration of the last sample, but at most for the usual interval, and
#: at least for SETTLE seconds. Without BREATH, samples would take a tenth of the event loop's time
#: on a machine on which hundreds of kernels come and go.
SETTLE, BREATH = 0.05, 3

#: The least number of seconds between two searches for better home devices, because each search
#: reads all sessions.
HOMES = 2.0

#: Seconds for which an ending broker waits for the sample under way.
CLOSE = 1.0

#: While no session waits, a change of host memory by fewer bytes than this causes no event.
HOST_STEP = 64 << 20

#: A thread reads the environment of a foreign process. The broker waits for the thread for at most
#: this many seconds, because the read blocks while another program suspends the process.
ENVIRON_TIMEOUT = 1.0


class Monitor:
    """Samples devices and host while there are sessions, and until their processes are gone."""

    def __init__(
        self,
        core: Core,
        service: Devices,
        configuration: Configuration,
        *,
        samples: Samples,
        room: HostRoom,
        pressure: Pressure,
        health: Health,
        driver_shares: DriverShares,
        activity: Activity,
        overheads: Overheads,
        overuse: OveruseWatch,
        homes: Homes,
        rooms: Rooms,
        looked: Callable[[], None],
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._service = service
        self._configuration = configuration
        self._samples = samples
        self._room = room
        self._pressure = pressure
        self._health = health
        self._driver_shares = driver_shares
        self._activity = activity
        self._overheads = overheads
        self._overuse = overuse
        self._homes = homes
        self._rooms = rooms
        self._looked = looked
        self._log = log
        #: Whether metrics are served. If they are, the monitor also samples without a session.
        self._for_metrics = False
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        #: By device: the last report to the pool. It has the owners of the device's memory, and the
        #: sessions that were idle before the sample began, each with the time at which it became
        #: idle. When a session becomes idle, the pool needs a sample that begins later. Until it
        #: gets one, the whole slice counts as the session's state.
        self._told: dict[str, tuple[Attribution, frozenset[tuple[str, float]]]] = {}
        self._told_host = -1
        self._told_changes: dict[str, int] = {}
        #: The session of each process on a device, or None if the process belongs to no session.
        self._known: dict[ProcessId, str | None] = {}
        self._reported: set[ProcessId] = set()
        #: Processes on a device that belong to a session, or belonged to one at an earlier sample.
        self._ours: set[ProcessId] = set()
        #: Processes whose session has ended since the last sample. These processes are about to
        #: end, too.
        self._leaving: set[ProcessId] = set()
        self._failing = ""
        #: The broker's own process. Its children (workers, self-tests) are no foreign processes.
        self.own = identify(os.getpid())
        self._homes_at = float("-inf")

    def start(self) -> None:
        """Begin to sample in a new task."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def wake(self) -> None:
        """Check whether to sample now, because a session has begun or ended."""
        self._woken.set()

    def sample_for_metrics(self, on: bool) -> None:
        """Switch sampling without a session on or off."""
        self._for_metrics = on
        self.wake()

    def _wanted(self) -> bool:
        return self._for_metrics or len(self._core.sessions) > 0

    async def close(self) -> None:
        """End the monitor.

        The cancellation alone is not enough: up to Python 3.11, ``wait_for`` may ignore it. So a
        flag ends the monitor, too.
        """
        self._closed = True
        self.wake()
        self._core.changed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        after = 0  # the number of samples since the last session ended
        changed = self._core.changed
        while not self._closed:
            self._woken.clear()
            if after >= REST_LOOKS and not self._ours and not self._wanted():
                await self._woken.wait()
                continue
            after = 0 if self._wanted() else after + 1
            began = loop.time()
            await self._try(self.look)
            self._looked()
            interval = self._configuration.settings.sample_interval
            settle = max(SETTLE, min(BREATH * (loop.time() - began), interval))
            quiet = QUIET if not self._core.busy else 1
            for left in reversed(range(quiet)):
                with suppress(asyncio.TimeoutError):
                    await within(changed.wait(), interval)
                    await asyncio.sleep(settle)  # a change is often followed by others
                    break
                if left:
                    # Idle devices change little, so take no sample of them yet. But any process may
                    # take host memory.
                    await self._try(self._pressure.look)
            changed.clear()

    async def _try(self, look: Callable[[], Awaitable[None]]) -> None:
        """Call ``look``. If it fails again with the same error, do not log the error again."""
        try:
            await look()
        except (GPUPoolError, OSError) as error:
            if self._failing != str(error):
                self._log.error("Devices and host memory were not read: %s", error)
            self._failing = str(error)
        except Exception:
            self._log.exception("A sample failed")
        else:
            self._failing = ""

    async def look(self) -> None:
        """Take one sample and tell the pool."""
        waited_for = "queued" in self._core.busy.values()
        available = await self._room.read(self._room.machine)
        # The pool subtracts the bytes of each suspend from its last figure of free host memory. It
        # does not add the bytes when the session resumes. So the pool needs a new figure after a
        # change. Otherwise its figure would fall to zero.
        moved = self._core.changes != self._told_changes
        if waited_for or moved or abs(available - self._told_host) >= HOST_STEP:
            self._told_host = available
            self._told_changes = dict(self._core.changes)
            self._core.handle(e.HostMemorySeen(now=self._core.now(), available=available))
        await self._pressure.look()
        if self._service.down:
            return
        before, began = dict(self._core.changes), self._core.now()
        failed = dict(self._health.failed)
        pages = await self._activity.readings()
        samples = await self._samples.take()
        await self._identify(samples)
        pace = Pace()
        # If a session attaches or releases its slice during these reads, the counter of its device
        # in ``changes`` grows. The sample of this device then does not count.
        granted, idle = self._leases(began)
        counted = await self._counted(pace)
        shown: dict[str, dict[str, int]] = {}
        old = {sample.uuid for sample in samples}
        for sample in samples:
            await pace.step()
            if sample.lost:
                continue  # the device service has reported the loss
            self._health.readable(sample.uuid, failed)
            if self._core.changes.get(sample.uuid) != before.get(sample.uuid):
                # The sample is out of date, because a process has come to the device or left it
                # since.
                continue
            old.discard(sample.uuid)
            leased = bool(granted.get(sample.uuid))
            self._driver_shares.look(sample, self._listed(sample), leased=leased)
            use = self._attribute(sample, granted.get(sample.uuid, {}), counted)
            news = use, frozenset(idle.get(sample.uuid, ()))
            for name, size in use.shown.items():
                shown.setdefault(name, {})[sample.uuid] = size
            if waited_for or self._told.get(sample.uuid) != news:
                self._told[sample.uuid] = news
                self._core.handle(
                    e.DeviceMemorySeen(
                        now=self._core.now(), device=sample.uuid, foreign=use.foreign,
                        footprints=use.footprints,
                    )
                )  # fmt: skip
        await self._overheads.learn(samples, pages, old, self._known)
        if self._configuration.settings.foreign_processes != "count":
            self._treat_foreign(samples)
        self._overuse.seen(shown, old)
        await self._update_pages()

    async def _update_pages(self) -> None:
        """Write the room for growth into the pages. Every HOMES seconds, write the home devices."""
        now = asyncio.get_running_loop().time()
        if now - self._homes_at >= HOMES:
            self._homes_at = now
            await self._homes.refresh()
        self._rooms.refresh_soon()

    # ------------------------------------------------------------------ whose memory

    async def _identify(self, samples: Sequence[DeviceSample]) -> None:
        """Find the session of each process on a device, and store it in ``_known``."""
        present: dict[ProcessId, str | None] = {}
        pace = Pace()
        for sample in samples:
            for entry in sample.processes:
                await pace.step()
                process = identify(entry.pid)
                if process is None:
                    continue
                owner = self._known.get(process)
                if owner is None or owner not in self._core.sessions:
                    owner = await self._owner(process)
                present[process] = owner
        owned = {process for process, owner in present.items() if owner is not None}
        self._leaving = {
            process for process in present.keys() - owned if self._known.get(process) is not None
        }
        self._known = present
        self._reported &= present.keys()
        self._ours = owned | (self._ours & present.keys())

    async def _owner(self, process: ProcessId) -> str | None:
        # Search the few ancestors of the process for the process of a session. A search of the
        # descendants of each session would take longer, because there may be a thousand sessions.
        above = procfs.ancestry(process.pid)
        roots = {session.process: session.id for session in self._core.sessions}
        nearest = next((roots[one] for one in (process, *above) if one in roots), None)
        if nearest is not None:
            return nearest
        if process in self._known:
            return None  # the environment of a process does not change
        try:
            named = await within(asyncio.to_thread(session_of, process.pid), ENVIRON_TIMEOUT)
        except asyncio.TimeoutError:
            return None
        found = self._core.sessions.find(named) if named else None
        return found.id if found is not None and found.may_have(process.pid) else None

    def _listed(self, sample: DeviceSample) -> tuple[Listed, ...]:
        """Return the processes of a sample with their sessions, as :meth:`_identify` found them."""
        owners = {process.pid: owner for process, owner in self._known.items()}
        return tuple(Listed(p.bytes, owners.get(p.pid), p.pid > 0) for p in sample.processes)

    def _attribute(
        self,
        sample: DeviceSample,
        granted: Mapping[str, int],
        counted: Mapping[str, Mapping[str, int]],
    ) -> Attribution:
        """Return the owners of a device's memory (:mod:`jupyter_gpupool.pool.attribution`).

        ``granted`` maps each session with a slice on the device to the bytes of its slice.
        ``counted`` has the bytes that the guard counts, by session and device.
        """
        uuid, device = sample.uuid, self._core.pool.device(sample.uuid)
        observed = Observed(
            used=sample.used,
            listed=self._listed(sample),
            driver=max(0, device.memory_reserved - sample.reserved) if device else 0,
            context=(device and device.context_bytes) or assumed_context(sample.total),
        )
        holders = {}
        for name, size in granted.items():
            session = self._core.sessions.find(name)
            cuda = session.cuda if session is not None else None
            holders[name] = LeaseHolder(size, counted.get(name, {}).get(uuid, 0), cuda)
        found = (self._core.sessions.find(entry.session or "") for entry in observed.listed)
        landing = {session.id for session in found if session and uuid in session.leaves}
        return attribute(observed, holders, landing)

    async def _counted(self, pace: Pace) -> dict[str, Mapping[str, int]]:
        """Return the bytes that the guard counts now, by session and device."""
        found = {}
        for session in [*self._activity.attached.values()]:
            found[session.id] = self._activity.counted(session)
            await pace.step()
        return found

    def _leases(
        self, before: float
    ) -> tuple[dict[str, dict[str, int]], dict[str, list[tuple[str, float]]]]:
        """Return the granted bytes of each session, and the idle sessions, both by device.

        The idle sessions are those that became idle at ``before`` or earlier, each with the time at
        which it became idle.
        """
        granted: dict[str, dict[str, int]] = {}
        idle: dict[str, list[tuple[str, float]]] = {}
        for name, (slices, since) in self._core.pool.leases().items():
            for piece in slices:
                granted.setdefault(piece.device, {})[name] = piece.bytes
                if since is not None and since <= before:
                    idle.setdefault(piece.device, []).append((name, since))
        return granted, idle

    # ------------------------------------------------------------------ foreign processes

    def _treat_foreign(self, samples: Sequence[DeviceSample]) -> None:
        users = {session.uid for session in self._core.sessions}
        for sample in samples:
            for entry in sample.processes:
                process = identify(entry.pid)
                if process is None or self._known.get(process):
                    continue
                if process in self._reported or process in self._leaving:
                    continue
                if self.own is not None and procfs.descends(process.pid, self.own):
                    continue
                self._reported.add(process)
                uid = procfs.real_uid(process.pid)
                # Root's processes belong to the machine (a display server, say), not to a user.
                end = (
                    self._configuration.settings.foreign_processes == "end"
                    and uid in users
                    and uid != 0
                )
                what = "ended" if end else "seen"
                self._log.warning(
                    "Foreign process %d of user id %s on %s was %s", process.pid, uid, sample.uuid,
                    what,
                )  # fmt: skip
                self._core.note(
                    "foreign", device=sample.uuid, bytes=entry.bytes, reason=what,
                    detail={"pid": process.pid, "uid": uid},
                )  # fmt: skip
                if end:
                    for problem in procfs.kill([process]):
                        self._log.error("%s", problem)
