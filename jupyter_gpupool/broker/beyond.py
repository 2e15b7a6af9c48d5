# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the driver takes for a process beyond what its guard has charged, learnt from NVML.

The guard charges a constant for a context (one self-test measured it) and the bytes that the
program allocates. The driver takes more: contexts differ, and code is loaded lazily, 200 to 800 MiB
for cuBLAS, cuDNN or Triton. NVML shows it, so that a look at both tells how much: per process, as
soon as ``AGREE`` looks say so. It is then a part of the session's slice like any allocation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Callable, Collection, Mapping, Sequence

from ..devices.model import DeviceSample, ProcessId
from ..devices.residue import unattributed
from ..guard.page import Reading, Slot
from .pace import Pace
from .runner import Runner
from .sessions import Session

#: Looks in a row that must agree: between NVML's word and the guard's, the program goes on.
AGREE = 3

#: Bytes of one process that are taken for the driver's own and are not held against it: at most
#: ``MOST`` and this part of the device, but not less than ``LEAST``.
LEAST, MOST, PART = 64 << 20, 1 << 30, 8

#: A change by less than this is not worth telling.
STEP = 1 << 20


@dataclass(slots=True)
class _Known:
    """What is known of one process on one device."""

    #: What its context takes: seen while the process had nothing else. None: never seen alone.
    context: int | None = None
    alone: deque[int] = field(default_factory=lambda: deque(maxlen=2))
    seen: deque[int] = field(default_factory=lambda: deque(maxlen=AGREE))
    learnt: int = 0

    def look(self, slot: Slot, ordinal: int, counted: int, shown: int, *, complete: bool) -> int:
        """Take note of a look; return the bytes beyond the charge as it shows them."""
        constant = slot.context[ordinal]
        if constant and counted == constant and (complete or shown >= constant):
            self.alone.append(shown)
            if len(self.alone) == 2 and self.alone[0] == self.alone[1]:
                self.context = shown
        else:
            self.alone.clear()
        more = max(0, shown - counted - self.correction(constant))
        self.seen.append(more)
        if len(self.seen) == AGREE:
            self.learnt = min(self.seen)
        return more

    def correction(self, constant: int) -> int:
        """Return by how much its context takes more than was charged for it (less: negative)."""
        return self.context - constant if self.context is not None and constant else 0


class Beyond:
    """Learns, for every guarded session that is attached, and keeps ``use.beyond`` true.

    ``changed`` is called with a session whose figure is another one now.
    """

    def __init__(self, runner: Runner, changed: Callable[[Session], None]) -> None:
        self._runner = runner
        self._changed = changed
        self._known: dict[tuple[ProcessId, int], _Known] = {}
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
                known = self._known.setdefault(key, _Known())
                living.add(key)
                sample = samples.get(piece.device)
                size = shown[piece.device].get(slot.pid) if sample is not None else None
                if sample is not None and old is not None and size is not None and slot.used[at]:
                    counted = max(slot.used[at], old.used[at])
                    complete = self._complete(sample)
                    more = known.look(slot, at, counted, size, complete=complete)
                    more += max(0, known.correction(slot.context[at]))
                    mine = min(more, allowance(sample.total))
                    explained[piece.device] = explained.get(piece.device, 0) + mine
                if slot.used[at]:
                    totals[at] += known.learnt + known.correction(slot.context[at])
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
        return bool(sample.processes) and unattributed(sample) <= driver


def allowance(total: int) -> int:
    """Return what the driver may take for one process on a device of ``total`` bytes."""
    return max(LEAST, min(MOST, total // PART))
