# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The two memory ledgers: device memory, per device, and host memory for suspended state.

Device memory is counted five ways, all in bytes:

=============  ====================================================================================
``granted``    sum of all leases, those on their way in and on their way out included
``foreign``    seen in use by processes that are no session's
``overuse``    seen in use by sessions beyond what they were granted
``incoming``   the part of ``granted`` whose suspend is under way
``reserved``   promised to sessions whose plan waits for such suspends
=============  ====================================================================================

``free = capacity - granted - foreign - overuse`` may be negative: then nobody is ended, but nothing
is granted. ``avail = free - reserved`` is what a newcomer may have now, ``expect`` what will be
there when all suspends under way are done, and ``pot`` what could be there if every idle lease
that may be taken were taken. Devices are kept sorted by ``avail`` and by ``pot``.

Bytes that a lease has grown by are granted like all others; :mod:`.growth` takes them back first.
"""

from __future__ import annotations

from typing import Iterable, Mapping

from .lease import Session
from .model import Device, DeviceView, PoolSettings, Slice

#: Less than any device can have, however much foreign processes use, with the sign turned.
NOTHING = 1 << 62


class DeviceLedger:
    """The account of one device; changed only through :class:`Inventory`."""

    __slots__ = (
        "avail_key",
        "capacity",
        "device",
        "excess",
        "expected",
        "fault",
        "foreign",
        "freed",
        "granted",
        "growers",
        "idle",
        "incoming",
        "leases",
        "overuse",
        "paused",
        "plans",
        "pot_key",
        "reserved",
        "yieldable",
    )

    def __init__(self, device: Device) -> None:
        self.device = device
        self.capacity = 0
        self.granted = 0
        self.foreign = 0
        self.overuse = 0
        self.incoming = 0
        self.reserved = 0
        self.yieldable = 0
        #: Bytes by session, of all leases here.
        self.leases: dict[str, int] = {}
        #: Idle sessions that may be taken now.
        self.idle: dict[str, Session] = {}
        #: Sessions whose plan reserves bytes here.
        self.plans: dict[str, Session] = {}
        #: Attached sessions that ask for more than they have here.
        self.growers: dict[str, Session] = {}
        #: Why nothing is granted here: a failure, or an admin's word; empty if there is none.
        self.fault = ""
        self.paused = ""
        #: Bytes granted beyond the capacity because the capacity fell afterwards.
        self.excess = 0
        #: ``free`` and ``avail``, ``expect``, and the places in the sorted lists when last settled.
        self.freed = (0, 0)
        self.expected = 0
        self.avail_key: tuple[int, int, str] | None = None
        self.pot_key: tuple[int, int, str] | None = None

    @property
    def drained(self) -> str:
        """Why nothing is granted here; empty if the device is in service."""
        return self.paused or self.fault

    @property
    def free(self) -> int:
        return self.capacity - self.granted - self.foreign - self.overuse

    @property
    def avail(self) -> int:
        return self.free - self.reserved

    @property
    def expect(self) -> int:
        return self.free - self.reserved + self.incoming

    @property
    def pot(self) -> int:
        return self.free - self.reserved + self.incoming + self.yieldable

    def view(self) -> DeviceView:
        """Return the public form; overuse is shown as foreign (bytes that no grant covers)."""
        return DeviceView(
            device=self.device,
            capacity=self.capacity,
            granted=self.granted,
            foreign=self.foreign + self.overuse,
            drained_reason=self.drained,
        )


class Inventory:
    """All devices of the pool."""

    def __init__(self) -> None:
        self.devices: dict[str, DeviceLedger] = {}
        self._total: int | None = None
        #: Devices that the head of the queue claims.
        self.watched: Mapping[str, int] = {}
        self._touched: dict[str, DeviceLedger] = {}
        self._gained: dict[str, DeviceLedger] = {}
        self._freed: dict[str, DeviceLedger] = {}
        self._shrunk: dict[str, DeviceLedger] = {}

    def __getitem__(self, uuid: str) -> DeviceLedger:
        return self.devices[uuid]

    # ------------------------------------------------------------------ changes

    def appeared(self, device: Device, settings: PoolSettings) -> None:
        """Add a device, or take note that it is healthy (again)."""
        ledger = self.devices.get(device.uuid)
        if ledger is None:
            ledger = self.devices[device.uuid] = DeviceLedger(device)
        ledger.device = device
        ledger.fault = ""
        self._resize(ledger, settings)

    def placeholder(self, uuid: str) -> DeviceLedger:
        """Return the ledger of ``uuid``; a device that is not there gets one that can do nothing.

        A recovered lease may name a device that this broker has not found.
        """
        if uuid not in self.devices:
            device = Device(
                uuid=uuid,
                index=len(self.devices),
                name="not found",
                model="",
                memory_total=0,
                can_suspend=False,
                can_migrate=False,
                tier="none",
            )
            ledger = self.devices[uuid] = DeviceLedger(device)
            ledger.fault = "the device was not found"
        return self.devices[uuid]

    def drain(self, uuid: str, reason: str) -> None:
        """Grant nothing more on this device."""
        self.devices[uuid].fault = reason or "drained"
        self._shut(uuid)

    def pause(self, uuid: str, reason: str) -> None:
        """Grant nothing more on this device until ``reason`` is "" again."""
        self.devices[uuid].paused = reason
        self._shut(uuid)

    def configure(self, settings: PoolSettings) -> None:
        """Apply ``settings.reserve`` to every device."""
        for ledger in self.devices.values():
            self._resize(ledger, settings)

    def take(self, session: str, slices: Iterable[Slice], *, force: bool = False) -> None:
        """Grant ``slices``.

        Raises
        ------
        ValueError
            If a device has not that much free memory, unless ``force`` (a recovered lease is a
            fact). Nothing is taken then.
        """
        wanted = tuple(slices)
        if not force:
            for s in wanted:
                if self.devices[s.device].free < s.bytes:
                    raise ValueError(f"{s.bytes} bytes are not free on {s.device}")
        for s in wanted:
            ledger = self.devices[s.device]
            ledger.granted += s.bytes
            ledger.leases[session] = s.bytes
            if force:
                ledger.excess = max(ledger.excess, ledger.granted - ledger.capacity)
            self._touch(ledger)

    def give_back(self, session: str, slices: Iterable[Slice]) -> None:
        """Return what :meth:`take` granted."""
        for s in slices:
            ledger = self.devices[s.device]
            ledger.granted -= s.bytes
            ledger.excess = max(0, min(ledger.excess, ledger.granted - ledger.capacity))
            del ledger.leases[session]
            self._touch(ledger)

    def going(self, slices: Iterable[Slice], sign: int) -> None:
        """Count ``slices`` as on their way out (``sign`` 1) or no longer so (-1)."""
        for s in slices:
            ledger = self.devices[s.device]
            ledger.incoming += sign * s.bytes
            self._touch(ledger)

    def reserve(self, session: Session, slices: Iterable[Slice], sign: int) -> None:
        """Promise ``slices`` to ``session`` (``sign`` 1) or take the promise back (-1)."""
        for s in slices:
            ledger = self.devices[s.device]
            ledger.reserved += sign * s.bytes
            if sign > 0:
                ledger.plans[session.id] = session
            else:
                del ledger.plans[session.id]
            self._touch(ledger)

    def offer(self, session: Session, sign: int) -> None:
        """Count the idle lease of ``session`` as one that may be taken (1), or not (-1)."""
        for s in session.slices:
            ledger = self.devices[s.device]
            ledger.yieldable += sign * s.bytes
            if sign > 0:
                ledger.idle[session.id] = session
                # Also where another was withdrawn in the same moment, and the sum is as before: for
                # the state of this one there may be room in host memory.
                self.nudge(s.device)
            else:
                del ledger.idle[session.id]
            self._touch(ledger)

    def seen(self, uuid: str, foreign: int, overuse: int) -> None:
        """Take note of a sample."""
        ledger = self.devices[uuid]
        ledger.foreign = foreign
        ledger.overuse = overuse
        self._touch(ledger)

    # ------------------------------------------------------------------ what changed

    def gained(self) -> dict[str, DeviceLedger]:
        """Return, once, the devices that have more to give (now or by suspending) than before."""
        self.settle()
        found, self._gained = self._gained, {}
        return found

    def freed(self) -> dict[str, DeviceLedger]:
        """Return, once, the devices that have more free bytes, or fewer promised, than before."""
        self.settle()
        found, self._freed = self._freed, {}
        return found

    def shrunk(self) -> dict[str, DeviceLedger]:
        """Return, once, the devices that have less to give, or were drained."""
        self.settle()
        found, self._shrunk = self._shrunk, {}
        return found

    def nudge(self, uuid: str) -> None:
        """Let ``uuid`` count as having gained (say, a claim on it is gone)."""
        if uuid in self.devices:
            self._gained[uuid] = self.devices[uuid]

    # ------------------------------------------------------------------ questions

    def by_avail(self, least: int) -> list[DeviceLedger]:
        """Return the devices with at least ``least`` bytes available now, the tightest first."""
        found = [d for d in self.devices.values() if not d.drained and d.avail >= least]
        return sorted(found, key=lambda d: (d.avail, d.device.index)) if len(found) > 1 else found

    def by_pot(self, least: int) -> list[DeviceLedger]:
        """Return the devices that could have ``least`` bytes, the one with the most first."""
        found = [d for d in self.devices.values() if not d.drained and d.pot >= least]
        if len(found) < 2:
            return found
        return sorted(found, key=lambda d: (d.pot, d.device.index), reverse=True)

    def most(self) -> int:
        """Return the most bytes that any one device could give."""
        return max((d.pot for d in self.devices.values() if not d.drained), default=0)

    def best(self) -> int:
        """Return the most bytes that are available now on any one device."""
        return max((d.avail for d in self.devices.values() if not d.drained), default=0)

    def smallest(self) -> int:
        """Return the capacity of the smallest device."""
        return min((d.capacity for d in self.devices.values()), default=0)

    def total(self) -> int:
        """Return the bytes of all devices in service."""
        if self._total is None:
            self._total = sum(d.capacity for d in self.devices.values() if not d.drained)
        return self._total

    def settle(self) -> None:
        """Put the devices that changed in their places again."""
        if not self._touched:
            return
        for uuid, ledger in self._touched.items():
            avail_key = pot_key = None
            if not ledger.drained:
                index = ledger.device.index
                avail_key, pot_key = (ledger.avail, index, uuid), (ledger.pot, index, uuid)
            # On a claimed device, less for the head can mean more that it is sure not to miss, and
            # so can a promise that is kept.
            before, ledger.freed = ledger.freed, (ledger.free, ledger.avail)
            watched = uuid in self.watched and (
                avail_key != ledger.avail_key or before != ledger.freed
            )
            more = watched or _rose(ledger.avail_key, avail_key) or _rose(ledger.pot_key, pot_key)
            ledger.avail_key, ledger.pot_key = avail_key, pot_key
            if before[0] < ledger.free or before[1] < ledger.avail:
                self._freed[uuid] = ledger
            expect, ledger.expected = ledger.expected, ledger.expect
            if more or (expect < ledger.expected and not ledger.drained):
                self._gained[uuid] = ledger
            if ledger.plans and (ledger.drained or ledger.expect < 0):
                self._shrunk[uuid] = ledger
        self._touched.clear()

    def _shut(self, uuid: str) -> None:
        self._total = None
        self._touch(self.devices[uuid])

    def _touch(self, ledger: DeviceLedger) -> None:
        self._touched[ledger.device.uuid] = ledger

    def _resize(self, ledger: DeviceLedger, settings: PoolSettings) -> None:
        device = ledger.device
        kept = device.memory_reserved + device.landing_bytes + settings.reserve
        ledger.capacity = max(0, device.memory_total - kept)
        ledger.excess = max(0, ledger.granted - ledger.capacity)
        self._total = None
        self._touch(ledger)


def _rose(old: tuple[int, int, str] | None, new: tuple[int, int, str] | None) -> bool:
    return new is not None and (old is None or new[0] > old[0])


class HostLedger:
    """Host memory for suspended state."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        #: Bytes of state that is suspended.
        self.used = 0
        #: Bytes set aside for suspends under way.
        self.going = 0
        #: Bytes the host could give when last seen (None: never seen), and taken since.
        self._available: int | None = None
        self._taken = 0

    @property
    def room(self) -> int:
        """Bytes that a new suspend may take; may be negative."""
        room = self.budget - self.used - self.going
        if self._available is not None:
            # The sample already lacks what was suspended before it, and may or may not lack
            # what was on its way: counted as lacking nothing of it.
            room = min(room, self._available - self._taken)
        return room

    def seen(self, available: int) -> None:
        self._available = available
        self._taken = self.going

    def begin(self, size: int) -> None:
        """Set ``size`` bytes aside for a suspend."""
        self.going += size
        self._taken += size

    def cancel(self, size: int) -> None:
        """Take back :meth:`begin`."""
        self.going -= size
        self._taken = max(0, self._taken - size)

    def finish(self, size: int, actual: int) -> None:
        """The suspend that :meth:`begin` announced took ``actual`` bytes."""
        self.going -= size
        self.used += actual
        self._taken = max(0, self._taken - size + actual)

    def add(self, actual: int) -> None:
        """Count state that was suspended before this broker started."""
        self.used += actual

    def free(self, actual: int) -> None:
        """The state is back on a device, or gone with its process."""
        self.used -= actual
