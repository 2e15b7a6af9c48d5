# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads how much the driver takes for each process beyond what its guard has charged.

``pool/attribution.py`` learns from it (:class:`~jupyter_gpupool.pool.attribution.Overhead`); what
it has learnt of a process is a part of the session's slice like any allocation.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Collection, Mapping, Sequence

from ...devices import DeviceSample
from ...guard.page import Reading
from ...pool import attribution
from ...pool.attribution import Listed, Observed, Overhead
from ...procfs import ProcessId
from ..pace import Pace
from ..runner import Runner
from ..sessions import Session

#: A change by less than this is not worth telling.
STEP = 1 << 20


class Beyond:
    """Learns, for every guarded session that is attached, and keeps ``use.beyond`` true.

    ``changed`` is called with a session whose figure is another one now.
    """

    def __init__(self, runner: Runner, changed: Callable[[Session], None]) -> None:
        self._runner = runner
        self._changed = changed
        self._known: dict[tuple[ProcessId, int], Overhead] = {}
        self._learning = False

    async def learn(
        self,
        samples: Sequence[DeviceSample],
        before: Mapping[str, Reading],
        read: Callable[[Session], Reading | None],
        old: Collection[str],
        owners: Mapping[ProcessId, str | None],
    ) -> None:
        """Compare samples with the pages as they were before them, by session, and as they are.

        Only one look is compared at a time; another one that ends meanwhile teaches nothing.

        ``read`` returns the page of a session that is attached, else None.

        ``old`` are devices of which the sample says nothing; ``owners`` are the sessions of the
        processes on the devices: a page may name processes that are not its session's.
        """
        if self._learning:
            return
        self._learning = True
        try:
            await self._learn(samples, before, read, old, owners)
        finally:
            self._learning = False

    async def _learn(
        self,
        samples: Sequence[DeviceSample],
        before: Mapping[str, Reading],
        read: Callable[[Session], Reading | None],
        old: Collection[str],
        owners: Mapping[ProcessId, str | None],
    ) -> None:
        shown = {s.uuid: {p.pid: p.bytes for p in s.processes} for s in samples}
        by_uuid = {s.uuid: s for s in samples if s.uuid not in old}
        living: set[tuple[ProcessId, int]] = set()
        #: Of sessions that were attached or resumed meanwhile, or are not attached.
        stays: set[ProcessId] = set()
        pace = Pace()
        for session in [*self._runner.sessions]:
            first = before.get(session.id)
            reading = read(session) if first is not None else None
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
        session: Session,
        first: Reading,
        reading: Reading,
        samples: Mapping[str, DeviceSample],
        shown: Mapping[str, Mapping[int, int | None]],
    ) -> set[tuple[ProcessId, int]]:
        record = self._runner.record(session.id)
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
                self._changed(session)
        return living

    def _complete(self, sample: DeviceSample) -> bool:
        """Return whether NVML's list accounts for all that is in use: then a low figure is true."""
        device = self._runner.pool.device(sample.uuid)
        driver = max(0, device.memory_reserved - sample.reserved) if device is not None else 0
        listed = [Listed(process.bytes) for process in sample.processes]
        return attribution.complete(Observed(sample.used, listed, driver))
