# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Learns from samples: each process's driver overhead, overuse, and the driver's own memory.

The rules are in ``pool/attribution.py``. This module applies them to the sessions, pages and
journal.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import replace
from typing import Collection, Mapping, Sequence

from ...devices import DeviceSample
from ...guard.page import Reading
from ...pool import attribution
from ...pool import events as e
from ...pool.attribution import Listed, Observed, Overhead
from ...pool.model import Device
from ...procfs import ProcessId
from ...states import ATTACHED
from ...units import format_bytes
from ..configuration import Configuration
from ..core import Core
from ..pages.activity import Activity
from ..pages.control import ControlPages
from ..ratelimit import Pace
from ..sessions import LiveSession
from .actions import DeviceActions
from .health import Health
from .samples import Samples

#: The broker ignores a change of the driver's overhead by fewer bytes than this.
STEP = 1 << 20


class Overheads:
    """Learns, for each process, how much of the driver's memory the guard has not charged.

    This overhead takes room in the session's slice, as an allocation does. For each attached
    session, this class keeps ``use.beyond`` and the session's page up to date.
    """

    def __init__(self, core: Core, pages: ControlPages, activity: Activity) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity
        self._known: dict[tuple[ProcessId, int], Overhead] = {}
        self._learning = False

    async def learn(
        self,
        samples: Sequence[DeviceSample],
        before: Mapping[str, Reading],
        old: Collection[str],
        owners: Mapping[ProcessId, str | None],
    ) -> None:
        """Compare samples with the page of each session.

        The caller has read each page before the samples (``before``), and this method reads it
        again. While this method compares one set of samples, it ignores further calls.

        ``old`` are the devices whose samples do not count. ``owners`` gives the session of each
        process on the devices, because a session's page may also name processes of other sessions.
        """
        if self._learning:
            return
        self._learning = True
        try:
            await self._learn(samples, before, old, owners)
        finally:
            self._learning = False

    async def _learn(
        self,
        samples: Sequence[DeviceSample],
        before: Mapping[str, Reading],
        old: Collection[str],
        owners: Mapping[ProcessId, str | None],
    ) -> None:
        shown = {s.uuid: {p.pid: p.bytes for p in s.processes} for s in samples}
        by_uuid = {s.uuid: s for s in samples if s.uuid not in old}
        living: set[tuple[ProcessId, int]] = set()
        #: Processes whose last known overhead stays valid, because this call cannot measure it.
        #: Their session is not attached, or its lease began between the two readings of the page.
        stays: set[ProcessId] = set()
        pace = Pace()
        for session in [*self._core.sessions]:
            first = before.get(session.id)
            reading = self._activity.reading(session) if first is not None else None
            if reading is None or first is None or reading.epoch != first.epoch:
                stays.update(session.use.processes)
                continue
            session.use.processes = {ProcessId(s.pid, s.start_time) for s in reading.slots}
            own = replace(
                reading,
                slots=tuple(
                    s
                    for s in reading.slots
                    if owners.get(ProcessId(s.pid, s.start_time)) == session.id
                ),
            )
            living |= self._session(session, first, own, by_uuid, shown)
            await pace.step()
        self._known = {
            key: known for key, known in self._known.items() if key in living or key[0] in stays
        }

    def _session(
        self,
        session: LiveSession,
        first: Reading,
        reading: Reading,
        samples: Mapping[str, DeviceSample],
        shown: Mapping[str, Mapping[int, int | None]],
    ) -> set[tuple[ProcessId, int]]:
        record = self._core.record(session.id)
        slices = record.slices if record is not None else ()
        earlier = {(s.pid, s.start_time): s for s in first.slots}
        totals = [0] * len(slices)
        explained: dict[str, int] = {}
        living = set()
        for slot in reading.slots:
            process = ProcessId(slot.pid, slot.start_time)
            old = earlier.get((slot.pid, slot.start_time))
            for at, piece in enumerate(slices[: reading.devices]):
                key = process, at
                known = self._known.get(key, Overhead())
                living.add(key)
                sample = samples.get(piece.device)
                size = shown[piece.device].get(slot.pid) if sample is not None else None
                if sample is not None and old is not None and size is not None and slot.used[at]:
                    counted = max(slot.used[at], old.used[at])
                    complete = self._complete(sample)
                    known, more = known.look(slot.context[at], counted, size, complete=complete)
                    mine = min(more, attribution.excused(sample.total))
                    explained[piece.device] = explained.get(piece.device, 0) + mine
                self._known[key] = known
                if slot.used[at]:
                    totals[at] += known.beyond(slot.context[at])
        session.use.explained = explained
        before = session.use.beyond
        if len(before) != len(totals) or any(
            abs(new - was) >= STEP for new, was in zip(totals, before, strict=True)
        ):
            session.use.beyond = tuple(totals)
            if any(totals) or any(before):
                self._tell(session)
        return living

    def _tell(self, session: LiveSession) -> None:
        """Write into the page how much of the slice is left for allocations."""
        record = self._core.record(session.id)
        if record is not None and record.state in ATTACHED:
            self._pages.follow(session, record)

    def _complete(self, sample: DeviceSample) -> bool:
        """Return whether NVML's list explains all memory that is in use.

        If it does, NVML's figure for each process is right, even a figure that is lower than
        expected.
        """
        device = self._core.pool.device(sample.uuid)
        driver = max(0, device.memory_reserved - sample.reserved) if device is not None else 0
        listed = [Listed(process.bytes) for process in sample.processes]
        return attribution.complete(Observed(sample.used, listed, driver))


class OveruseWatch:
    """Notices when a session uses more device memory than granted; acts once on each overuse.

    The guard keeps ordinary software within its slice. A process can bypass the guard: it clears
    ``LD_PRELOAD``, or opens the driver by its path. This class then notices the memory of the
    process a few samples later. The option ``overuse`` sets what the broker does next.
    """

    def __init__(
        self,
        core: Core,
        actions: DeviceActions,
        samples: Samples,
        configuration: Configuration,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._actions = actions
        self._samples = samples
        self._configuration = configuration
        self._log = log

    def seen(self, sizes: Mapping[str, Mapping[str, int]], old: Collection[str]) -> None:
        """Check a new sample for overuse.

        ``sizes`` has the bytes that NVML shows for each session on each device. ``old`` are the
        devices that the broker could not read, or whose sample is out of date.
        """
        for session in self._core.sessions:
            used = sizes.get(session.id)
            if used or (session.use.overuse and not old):
                self._judge(session, used or {})

    def _judge(self, session: LiveSession, used: Mapping[str, int]) -> None:
        record, use = self._core.record(session.id), session.use
        if record is None or session.id in self._actions.busy:
            return
        granted = {piece.device: piece.bytes for piece in record.slices}
        totals = {uuid: sample.total for uuid, sample in self._samples.last.items()}
        use.overuse = attribution.overuse(used, granted, use.explained, totals)
        use.overused, act = attribution.confirmed(use.overused, use.overuse)
        if act:
            self._act(session, used, granted, use.overuse)

    def _act(
        self, session: LiveSession, used: Mapping[str, int], granted: Mapping[str, int], over: int
    ) -> None:
        policy = self._configuration.settings.overuse
        sentence = (
            f"The kernel uses {format_bytes(sum(used.values()))} of GPU memory (granted: "
            f"{format_bytes(sum(granted.values()))}). It allocated some memory without the guard."
        )
        self._log.warning("Session %s: %s (%s)", session.id, sentence, policy)
        for device, size in used.items():
            self._core.note(
                "overuse", session, device=device, bytes=size, reason=sentence,
                detail={"granted": granted.get(device, 0), "over": over, "policy": policy},
            )  # fmt: skip
        if policy == "end":
            self._actions.end_session(
                e.EndSession(
                    session=session.id,
                    message=f"{sentence} This pool ends such kernels (c.GPUPool.overuse).",
                )
            )


class DriverShares:
    """Measures the driver's own memory again whenever a device is idle.

    The driver's own memory grows while kernels come and go for weeks. If the broker measured it
    only at its own start, the growth would count as memory of programs outside the pool. The pool
    could then grant less of the device.
    """

    def __init__(self, core: Core, health: Health, log: logging.Logger) -> None:
        self._core = core
        self._health = health
        self._log = log
        self._seen: dict[str, deque[int]] = {}
        #: Devices on which NVML has named a process. On other devices, the owner of memory is
        #: unknown.
        self._named: set[str] = set()

    def look(self, sample: DeviceSample, listed: Sequence[Listed], *, leased: bool) -> None:
        """Check a new sample.

        ``listed`` are the sample's processes with their sessions. ``leased`` says whether a session
        has a slice on the device.
        """
        uuid = sample.uuid
        if any(entry.known and entry.bytes for entry in listed):
            self._named.add(uuid)
        seen = self._seen.setdefault(uuid, deque(maxlen=attribution.REST_LOOKS))
        device = self._health.devices.get(uuid)
        if (
            device is None
            or not attribution.at_rest(listed, leased=leased)
            or uuid not in self._named
            or uuid in self._health.failed
        ):
            seen.clear()
            return
        seen.append(attribution.unlisted(sample.used, (entry.bytes for entry in listed)))
        was = device.memory_reserved
        found = attribution.measured_again([*seen], sample.reserved, sample.total, was)
        if found is not None:
            self._settle(device, found)

    def _settle(self, device: Device, found: int) -> None:
        was = device.memory_reserved
        self._log.info(
            "GPU %d is not in use: the driver now keeps %s of GPU memory for itself (before: %s)",
            device.index, format_bytes(found), format_bytes(was),
        )  # fmt: skip
        self._core.note("residue", device=device.uuid, bytes=found, detail={"before": was})
        measured = replace(device, memory_reserved=found)
        self._health.measured(measured)
        self._core.handle(e.DeviceAppeared(now=self._core.now(), device=measured))
