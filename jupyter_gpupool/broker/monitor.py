# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the driver and the host show, told to the pool; and processes that are not of the pool.

Runs only while there is a session, and slower while nothing is attached and nobody waits.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Awaitable, Callable, Mapping, Sequence

from ..config import BrokerSettings
from ..devices.contexts import assumed
from ..devices.model import DeviceSample, ProcessId
from ..devices.processes import identify, session_of
from ..errors import GPUPoolError
from ..pool import events as e
from . import processes
from .activity import Activity
from .beyond import Beyond
from .effects import DeviceEffects
from .pace import Pace
from .pressure import Pressure
from .rest import LOOKS, Rest
from .runner import Runner
from .watchdog import Watchdog

#: Seconds between a change and the look at it.
SETTLE = 0.05

#: Intervals between samples while nothing is attached and nobody waits.
QUIET = 5

#: Seconds for a look under way to be given up when the broker ends.
CLOSE = 1.0

#: A change of host memory that is worth an event while nobody waits, in bytes.
HOST_STEP = 64 << 20

#: Seconds to read the environment of a foreign process: it blocks while the process is being
#: suspended by somebody else, so it is read in a thread and given up.
ENVIRON_TIMEOUT = 1.0


@dataclass
class _Use:
    """The memory of one device, by whom."""

    foreign: int
    footprints: dict[str, int]
    #: The sessions' bytes by NVML alone.
    shown: dict[str, int]
    #: Who was idle before the look began, and since when: what the pool knows of an idle session
    #: must have been seen since, or its whole slice counts as its state.
    idle: frozenset[tuple[str, float]] = frozenset()


class Monitor:
    """Samples devices and host while there are sessions, and until these are seen to be gone."""

    def __init__(
        self, runner: Runner, effects: DeviceEffects, settings: BrokerSettings, log: logging.Logger
    ) -> None:
        self.settings = settings
        self._runner = runner
        self._effects = effects
        self._log = log
        self._wanted = asyncio.Event()
        self._soon = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._told: dict[str, _Use] = {}
        self._told_host = -1
        self._told_changes: dict[str, int] = {}
        #: Whose session each process on a device is; None: nobody's.
        self._known: dict[ProcessId, str | None] = {}
        self._reported: set[ProcessId] = set()
        #: Processes that were a session's when they were first seen, and are on a device still.
        self._ours: set[ProcessId] = set()
        #: Those of them whose session has ended since the last look: they are about to end, too.
        self._leaving: set[ProcessId] = set()
        self._failing = ""
        #: This process: what it starts (workers, self-tests) is the pool's.
        self.own = identify(os.getpid())
        #: What the guard tells, and who compares; None where nobody runs under it.
        self.activity: Activity | None = None
        self.watchdog: Watchdog | None = None
        #: Measures what the driver takes by itself on devices at rest.
        self.rest: Rest | None = None
        #: Learns what the driver takes beyond what the guard counts.
        self.beyond: Beyond | None = None
        #: Who looks whether host memory is short; None in tests that have no use for it.
        self.pressure: Pressure | None = None
        #: Called after each sample, when what is free where is known again.
        self.on_sample: Callable[[], Awaitable[None]] = _nothing
        #: Called with each device that could be read.
        self.on_healthy: Callable[[str], None] = lambda _uuid: None

    def start(self) -> None:
        """Begin, in a task of its own."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def want(self, sessions: int) -> None:
        """Sample while there are sessions."""
        if sessions:
            self._wanted.set()
        else:
            self._wanted.clear()

    def look_soon(self) -> None:
        """Something was attached, suspended or ended: what was seen before is old."""
        self._soon.set()

    async def close(self) -> None:
        """End. A flag besides the cancellation: up to Python 3.11 ``wait_for`` may swallow that."""
        self._closed = True
        self._soon.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE)

    async def _run(self) -> None:
        after = 0  # looks that have begun since the last session went
        while not self._closed:
            if after >= LOOKS and not self._ours:
                await self._wanted.wait()
            after = 0 if self._wanted.is_set() else after + 1
            await self._try(self.look)
            quiet = QUIET if not self._runner.busy else 1
            for left in reversed(range(quiet)):
                with suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._soon.wait(), self.settings.sample_interval)
                    await asyncio.sleep(SETTLE)  # changes come in groups
                    break
                if left and self.pressure is not None:
                    # Devices at rest change little; host memory is everybody's.
                    await self._try(self.pressure.look)
            self._soon.clear()

    async def _try(self, look: Callable[[], Awaitable[None]]) -> None:
        """Look; one that fails is logged once, and the next one may do."""
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
        waited_for = "queued" in self._runner.busy.values()
        room = self._effects.room
        available = await room.read(room.machine)
        # What was suspended since the last word is counted against it until there is a new one,
        # also when it has come back meanwhile: without news there would be no room in the end.
        moved = self._runner.changes != self._told_changes
        if waited_for or moved or abs(available - self._told_host) >= HOST_STEP:
            self._told_host = available
            self._told_changes = dict(self._runner.changes)
            self._runner.handle(e.HostMemorySeen(now=self._runner.now(), available=available))
        if self.pressure is not None:
            await self.pressure.look()
        if self._effects.down:
            return
        before, began = dict(self._runner.changes), self._runner.now()
        pages = await self.activity.readings() if self.activity is not None else {}
        samples = await self._effects.sample()
        await self._identify(samples)
        pace = Pace()
        # What is attached or given back while these are gathered shows in ``changes``.
        granted = await self._granted(pace)
        idle = await self._idle(began, pace)
        counted = await self._counted(pace)
        shown: dict[str, dict[str, int]] = {}
        old = {sample.uuid for sample in samples}
        for sample in samples:
            await pace.step()
            if sample.lost:
                continue  # the device service tells of a loss itself, once
            self.on_healthy(sample.uuid)
            if self._runner.changes.get(sample.uuid) != before.get(sample.uuid):
                continue  # something was attached or suspended there meanwhile: old news
            old.discard(sample.uuid)
            if self.rest is not None:
                owned = {p.pid for p, owner in self._known.items() if owner is not None}
                self.rest.look(sample, owned, leased=bool(granted.get(sample.uuid)))
            use = self._attribute(sample, granted.get(sample.uuid, {}), counted)
            use.idle = frozenset(idle.get(sample.uuid, ()))
            for name, size in use.shown.items():
                shown.setdefault(name, {})[sample.uuid] = size
            if waited_for or self._told.get(sample.uuid) != use:
                self._told[sample.uuid] = use
                self._runner.handle(
                    e.DeviceMemorySeen(
                        now=self._runner.now(), device=sample.uuid, foreign=use.foreign,
                        footprints=use.footprints,
                    )
                )  # fmt: skip
        if self.beyond is not None and self.activity is not None:
            await self.beyond.learn(samples, pages, self.activity.reading, old, self._known)
        if self.settings.foreign_processes != "count":
            self._treat_foreign(samples)
        if self.watchdog is not None:
            self.watchdog.seen(shown, old)
        await self.on_sample()

    # ------------------------------------------------------------------ whose memory

    async def _identify(self, samples: Sequence[DeviceSample]) -> None:
        """Find out whose session each process on a device is, once per process."""
        present: dict[ProcessId, str | None] = {}
        pace = Pace()
        for sample in samples:
            for entry in sample.processes:
                await pace.step()
                process = identify(entry.pid)
                if process is None:
                    continue
                owner = self._known.get(process)
                if owner is None or owner not in self._runner.sessions:
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
        # Its own ancestors are few, and the sessions may be a thousand.
        above = processes.ancestry(process.pid)
        roots = {session.process: session.id for session in self._runner.sessions}
        nearest = next((roots[one] for one in (process, *above) if one in roots), None)
        if nearest is not None:
            return nearest
        if process in self._known:
            return None  # its environment does not change
        try:
            named = await asyncio.wait_for(
                asyncio.to_thread(session_of, process.pid), ENVIRON_TIMEOUT
            )
        except asyncio.TimeoutError:
            return None
        found = self._runner.sessions.find(named) if named else None
        same_user = found is not None and processes.real_uid(process.pid) == found.uid
        return found.id if found is not None and same_user else None

    def _attribute(
        self,
        sample: DeviceSample,
        granted: Mapping[str, int],
        counted: Mapping[str, Mapping[str, int]],
    ) -> _Use:
        """Split a device's used bytes into the sessions', the driver's and everybody else's.

        What is used and not listed counts first as the use of the sessions attached there, up to
        their grants: all of it where NVML names no processes (in containers), else a context for
        each. What is listed under a number of another PID namespace counts as not listed: it may
        be theirs, which their slices cover already. The rest counts as the driver's own, up to
        what the capacity lacks for that; with it goes what suspended sessions still show. Only
        then is it foreign. A list may be older than the figures: nobody has more than is in use.

        Of what NVML shows of a session and what its guard has counted the larger is true: NVML
        sees what the driver takes by itself, and not processes of other pid namespaces; the guard
        counts before the driver is asked, and so is never behind. But its word is the session's,
        who may write what it likes: it is good for the slice, and for no byte beyond: that would be
        taken from everybody else.
        """
        footprints: dict[str, int] = {}
        known = 0
        for entry in sample.processes:
            process = identify(entry.pid)
            owner = self._known.get(process) if process else None
            if entry.bytes is None or entry.pid < 0:
                continue  # nobody knows whose it is: as if it was not listed
            known += entry.bytes
            if owner is not None:
                footprints[owner] = footprints.get(owner, 0) + entry.bytes
        foreign = known - sum(footprints.values())
        shown = dict(footprints)
        # They have no slice here, so nobody's slice covers this. (What is more than a slice, the
        # pool itself counts.)
        left = {name: footprints.pop(name) for name in footprints.keys() - granted.keys()}
        for name in [name for name in left if self._lands_on(name, sample.uuid)]:
            # The capacity lacks this room already.
            del left[name], shown[name]
        device = self._runner.pool.device(sample.uuid)
        context = (device and device.context_bytes) or assumed(sample.total)
        unseen = sum(
            min(context, max(0, size - footprints[name])) if name in footprints else size
            for name, size in granted.items()
        )
        driver = max(0, device.memory_reserved - sample.reserved) if device else 0
        beside = max(0, sample.used - sum(footprints.values()))
        loose = min(sum(left.values()) + max(0, sample.used - known - unseen),
                    max(0, beside - foreign))  # fmt: skip
        for name, size in left.items():
            shown[name] = min(size, max(0, beside - foreign - driver))
        foreign = min(foreign, beside) + max(0, loose - driver)
        for name in granted.keys() - footprints.keys():
            idler = self._runner.sessions.find(name)
            if idler is not None and idler.cuda is False:
                # It never called cuInit, so it holds nothing: its slice can go without host memory.
                footprints[name] = 0
        for name in granted.keys() & counted.keys():
            size = min(counted[name].get(sample.uuid, 0), granted[name])
            if size or name in footprints:
                footprints[name] = max(size, footprints.get(name, 0))
        return _Use(foreign, footprints, shown)

    def _lands_on(self, name: str, uuid: str) -> bool:
        session = self._runner.sessions.find(name)
        return session is not None and uuid in session.landing

    async def _counted(self, pace: Pace) -> dict[str, Mapping[str, int]]:
        """Return the bytes that the guard counts now, by session and device."""
        if self.activity is None:
            return {}
        found = {}
        for session in [*self.activity.attached.values()]:
            found[session.id] = self.activity.counted(session)
            await pace.step()
        return found

    async def _idle(self, before: float, pace: Pace) -> dict[str, list[tuple[str, float]]]:
        """Return by device who has been idle since ``before`` or longer, and since when."""
        found: dict[str, list[tuple[str, float]]] = {}
        for name, state in [*self._runner.busy.items()]:
            await pace.step()
            record = self._runner.record(name) if state == "idle" else None
            if record is not None and record.idle_since <= before:
                for piece in record.slices:
                    found.setdefault(piece.device, []).append((name, record.idle_since))
        return found

    async def _granted(self, pace: Pace) -> dict[str, dict[str, int]]:
        """Return the granted bytes by device and session."""
        granted: dict[str, dict[str, int]] = {}
        for name in [*self._runner.busy]:
            await pace.step()
            record = self._runner.record(name)
            for piece in record.slices if record else ():
                granted.setdefault(piece.device, {})[name] = piece.bytes
        return granted

    # ------------------------------------------------------------------ foreign processes

    def _treat_foreign(self, samples: Sequence[DeviceSample]) -> None:
        users = {session.uid for session in self._runner.sessions}
        for sample in samples:
            for entry in sample.processes:
                process = identify(entry.pid)
                if process is None or self._known.get(process):
                    continue
                if process in self._reported or process in self._leaving:
                    continue
                if self.own is not None and processes.descends(process.pid, self.own):
                    continue
                self._reported.add(process)
                uid = processes.real_uid(process.pid)
                # Root's processes are the machine's (a display server, say), whoever has a kernel.
                end = self.settings.foreign_processes == "end" and uid in users and uid != 0
                what = "ended" if end else "seen"
                self._log.warning(
                    "Foreign process %d of user id %s on %s %s", process.pid, uid, sample.uuid, what
                )
                self._runner.note(
                    "foreign", device=sample.uuid, bytes=entry.bytes, reason=what,
                    detail={"pid": process.pid, "uid": uid},
                )  # fmt: skip
                if end:
                    for problem in processes.kill([process]):
                        self._log.error("%s", problem)


async def _nothing() -> None:
    pass
