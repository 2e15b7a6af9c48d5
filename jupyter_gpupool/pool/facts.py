# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The facts: sessions, and the accounts that follow from them (devices, host memory, owners).

A session changes only inside :meth:`Facts.change`. This method subtracts the session from all
accounts before the change, and adds it again after the change. So the accounts always agree with
the sessions. An account of a device has these numbers of bytes:

=============  ====================================================================================
``granted``    sum of all leases, including those whose attach or suspend is under way
``foreign``    bytes that processes outside all sessions use, as last measured
``overuse``    bytes that sessions use beyond their leases, as last measured
``incoming``   the part of ``granted`` whose suspend is under way
=============  ====================================================================================

``free = capacity - granted - foreign - overuse`` may be negative. If it is negative, the pool
grants nothing on this device, but it ends no lease because of this. Memory that the pool plans to
grant later is not a fact; it is a part of the plan (:mod:`.schedule`). Only an event that names a
device adds this device. A query changes nothing.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Iterable, Iterator, Mapping, Sequence

from ..states import ATTACHED
from .evidence import Evidence
from .groups import Tree
from .ledgers import GroupUsage, Leaving, OwnerUsage
from .metering import LeaseInUse, Meters
from .model import Device, DeviceView, Owner, PoolSettings, Slice
from .session import Lease, Session, Wait

_NO_GROUPS: Mapping[str, str] = {}


@dataclass(slots=True, eq=False)
class DeviceLedger:
    """The account of one device."""

    device: Device
    capacity: int = 0
    foreign: int = 0
    overuse: int = 0
    granted: int = 0
    incoming: int = 0
    #: The upper bound of ``granted``. It can be more than ``capacity``, because leases stay when
    #: the capacity falls.
    allowed: int = 0
    #: Why the pool grants nothing on this device. ``fault`` describes a failure; ``paused`` is the
    #: reason that an admin gave. A text is "" if it does not apply.
    fault: str = ""
    paused: str = ""
    #: The leases on this device, and the bytes of each. ``granted`` is the sum of these bytes.
    leases: dict[Session, int] = field(default_factory=dict)

    @property
    def drained(self) -> str:
        """Why the device is out of service, for people; "" if it is in service."""
        return self.paused or self.fault

    @property
    def free(self) -> int:
        """Bytes that neither a lease nor a process outside the pool has; may be negative."""
        return self.capacity - self.granted - self.foreign - self.overuse

    def view(self) -> DeviceView:
        """Return the public form of this account.

        Its ``foreign`` is all used bytes that no grant covers, so it includes ``overuse``.
        """
        return DeviceView(
            device=self.device,
            capacity=self.capacity,
            granted=self.granted,
            foreign=self.foreign + self.overuse,
            drained_reason=self.drained,
        )


def charge_of(s: Session, slices: Sequence[Slice]) -> int:
    """Return the bytes of ``slices`` that count against the owner's quota.

    The bytes of a slice count only up to the limit of the request. The headroom that a resume
    reserves does not count.
    """
    limit, memory, state = s.request.limit, s.request.memory, s.suspended
    charge = 0
    for at, x in enumerate(slices):
        most = max(memory, state[at].bytes) if state else x.bytes
        charge += min(x.bytes, limit, most)
    return charge


#: The driver allocates device memory in blocks of this many bytes.
BLOCK = 2 << 20


class Facts:
    """All facts of the pool."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.now = -math.inf
        self.sessions: dict[str, Session] = {}
        self.devices: dict[str, DeviceLedger] = {}
        #: How often devices or rules have changed. A value that was computed at an older version is
        #: no longer valid.
        self.version = 0
        #: ``capacities`` has the most bytes that each device can give, the largest number first.
        #: ``suspends`` says whether at least one device allows a suspend.
        self.capacities: list[int] = []
        self.suspends = False
        #: The smallest useful slice: a CUDA context and one block; 0 if not known.
        self.least = 0
        #: The groups, with their guarantees and caps in bytes on this machine.
        self._grow_tree()
        #: Subsets of ``sessions``, maintained by :meth:`change`.
        self.waiting: dict[str, Session] = {}
        self.leased: dict[str, Session] = {}
        #: ``short`` has the attached sessions with less than their guaranteed bytes on a device.
        #: ``grown`` has the attached sessions with more than their guaranteed bytes on a device.
        self.short: dict[str, Session] = {}
        self.grown: dict[str, Session] = {}
        #: Sessions that cannot be suspended, each with a session that waits for its slice; see
        #: :mod:`.unsuspendable`.
        self.stuck: dict[str, tuple[Session, Session]] = {}
        #: ``leaving`` has the time at which the pool suspends each idle session, even if no session
        #: waits. ``untimed`` has the sessions whose time must be computed again.
        self.leaving = Leaving()
        self.untimed: dict[str, Session] = {}
        #: Sessions whose slice an admin has recalled; see :mod:`.recall`.
        self.recalled: dict[str, Session] = {}
        self.usage: dict[str, OwnerUsage] = {}
        #: The account of each group. It includes the leases of the members of nested groups.
        self.group_usage: dict[str, GroupUsage] = {}
        #: What owners and groups have used over time.
        self.meters = Meters()
        #: ``host_used`` is the host bytes of suspended state. ``host_going`` is the host bytes that
        #: the pool has reserved for suspends under way.
        self.host_used = 0
        self.host_going = 0
        #: ``host_available`` is how many bytes the host could give at the last sample; None before
        #: the first sample. ``host_taken`` is how many bytes the pool has taken since that sample.
        self.host_available: int | None = None
        self.host_taken = 0
        #: The weighted mean of the seconds that one suspend or resume takes, over all sessions.
        self.swap: float | None = None
        #: The data from which the pool estimates waits.
        self.evidence = Evidence()
        #: How many waits have begun so far.
        self.arrivals = 0

    # ------------------------------------------------------------------ sessions

    @contextmanager
    def change(self, s: Session) -> Iterator[None]:
        """Subtract ``s`` from all accounts; at the end of the block, add the changed ``s``."""
        self._count(s, -1)
        try:
            yield
        finally:
            s.asking = None
            self._count(s, 1)
            if self._index(s):
                self.begin_wait(s, self.now)

    def forget_times(self, s: Session) -> None:
        """Drop the cached times at which the pool may take the slice of ``s``, or will take it."""
        s.times = s.using = None
        self.untimed[s.id] = s

    @property
    def stops(self) -> bool:
        """Whether a rule or an admin may stop sessions that have a lease."""
        closes = self.settings.classes_allowed is not None
        return self.tree.stops or closes or bool(self.recalled)

    def set_recall(self, s: Session, at: float, reason: str = "") -> None:
        """Note when an admin takes the slice of ``s`` back, and why.

        If ``at`` is 0, cancel the recall.
        """
        s.recall_at, s.recall_reason = at, reason if at else ""
        if at:
            self.recalled[s.id] = s
        else:
            self.recalled.pop(s.id, None)

    def begin_wait(self, s: Session, since: float) -> None:
        """Start a wait of ``s`` for a lease or for growth. Call this inside :meth:`change`."""
        self.arrivals += 1
        s.wait = Wait(number=self.arrivals, since=since)

    def add(self, s: Session) -> None:
        """Add a session."""
        self.sessions[s.id] = s
        self.set_slices(s, s.lease.slices)
        self._count(s, 1)
        if self._index(s):
            self.begin_wait(s, self.now)
        if s.recall_at:
            self.recalled[s.id] = s
        for x in s.lease.slices:
            ledger = self.devices[x.device]
            ledger.allowed = max(ledger.allowed, ledger.granted)

    def remove(self, s: Session) -> None:
        """Remove a session."""
        self._count(s, -1)
        del self.sessions[s.id]
        held = (self.waiting, self.leased, self.short, self.grown, self.untimed, self.recalled)
        for index in held:
            index.pop(s.id, None)
        self.stuck.pop(s.id, None)
        self.leaving.times.pop(s.id, None)

    def _count(self, s: Session, sign: int) -> None:
        lease, parked = s.lease, s.suspended_bytes if s.suspended else 0
        if lease.slices:
            self.meters.changed[s.id] = True
            for name in self.tree.path(s.owner.group) if self.tree.groups else ():
                group = self.group_usage.setdefault(name, GroupUsage())
                group.memory += sign * lease.charge
                if s.state == "detaching":
                    group.leaving += sign * lease.charge
        for x in lease.slices:
            ledger = self.devices[x.device]
            ledger.granted += sign * x.bytes
            if sign > 0:
                ledger.leases[s] = x.bytes
            else:
                ledger.leases.pop(s, None)
            if s.state == "detaching":
                ledger.incoming += sign * x.bytes
        if lease.slices or parked:
            usage = self.usage.setdefault(s.owner.name, OwnerUsage())
            usage.suspended += sign * (parked + lease.host_bound)
            if lease.slices:
                usage.memory += sign * lease.charge
                usage.devices += sign * len(lease.slices)
                usage.leases += sign
        self.host_used += sign * parked
        self.host_going += sign * lease.host_bound

    def _index(self, s: Session) -> bool:
        """Put ``s`` into its subsets of the sessions, and remove it from all other subsets.

        Return whether ``s`` has just become ``short`` (it has less than its guaranteed bytes).
        """
        self.forget_times(s)
        slices, memory = s.lease.slices, s.request.memory
        attached = s.state in ATTACHED
        short = attached and len(slices) == s.request.devices
        short = short and any(x.bytes < memory for x in slices)
        new = short and s.id not in self.short
        for where, belongs in (
            (self.waiting, s.state == "queued"),
            (self.leased, bool(slices)),
            (self.short, short),
            (self.grown, attached and any(x.bytes > memory for x in slices)),
        ):
            if belongs:
                where[s.id] = s
            else:
                where.pop(s.id, None)
        return new

    def set_slices(self, s: Session, slices: tuple[Slice, ...], most: float = math.inf) -> None:
        """Give ``s`` these slices, and charge the owner at most ``most``.

        Call this inside :meth:`change`. The charge follows from the request at the time of this
        call. If the request changes later, the charge stays until the next call.

        Raises
        ------
        ValueError
            If a device has too little free memory for a slice that is new or grows. The plan then
            has a bug.
        """
        had = {x.device: x.bytes for x in s.lease.slices}
        for x in slices:
            if x.bytes > had.get(x.device, 0) and self.devices[x.device].free < x.bytes:
                raise ValueError(f"{x.bytes} bytes are not free on {x.device}")
        s.lease.slices = slices
        s.lease.granted = 0
        for x in slices:
            s.lease.granted += x.bytes
        s.lease.charge = int(min(most, charge_of(s, slices))) if slices else 0

    def end_lease(self, s: Session) -> None:
        """Take the lease from ``s``. Call this inside :meth:`change`."""
        s.last_devices = tuple(x.device for x in s.lease.slices)
        s.attached_seconds_total += self.now - s.lease.attached_at
        s.lease = Lease()
        self.set_recall(s, 0.0)
        for ledger in self.devices.values():
            ledger.allowed = max(ledger.capacity, min(ledger.allowed, ledger.granted))

    def usage_of(self, owner: str) -> OwnerUsage:
        """Return a copy of the usage that counts against the owner's quota, including the usage on
        other machines.
        """
        known = self.usage.get(owner)
        found = OwnerUsage() if known is None else known.copy()
        if elsewhere := self.settings.elsewhere.get(owner):
            found.add(elsewhere)
        return found

    def usage_in(self, group: str) -> int:
        """Return the bytes that count against the cap of ``group``, including the bytes on other
        machines.
        """
        known = self.group_usage.get(group)
        elsewhere = self.settings.elsewhere_groups.get(group, 0)
        return elsewhere if known is None else known.memory + elsewhere

    def elsewhere_text(self, owner: str, limit: str, group: str = "") -> str:
        """Return why other machines keep a part of a limit; "" if they keep no part.

        With ``group``, the limit is the cap of this group. Without ``group``, it is the ``limit``
        in the owner's quota.
        """
        rules = self.settings
        if group:
            return rules.elsewhere_reason if rules.elsewhere_groups.get(group) else ""
        found = OwnerUsage()
        found.add(rules.elsewhere.get(owner) or (0, 0, 0))
        return rules.elsewhere_reason if getattr(found, limit) else ""

    def leases_of(self, owner: str) -> Iterable[Session]:
        """Return the owner's sessions that have a lease."""
        return [s for s in self.leased.values() if s.owner.name == owner]

    def _grow_tree(self) -> None:
        users = (quota.daily for quota in self.settings.quotas.values())
        self.tree = Tree(self.settings.groups, self.capacities, users=users)

    def settle(self) -> None:
        """From now on, count usage according to the present leases."""
        changed, self.meters.changed = self.meters.changed, {}
        for name in changed:
            s = self.leased.get(name)
            if s is None:
                self.meters.drop(name)
            else:
                parts = {x.device: self._part(x) for x in s.lease.slices}
                lease = LeaseInUse(s.owner, s.state == "active", s.request.compute, parts)
                self.meters.put(name, lease)
        if changed:
            self.meters.settle(self.now, self.settings)

    def _part(self, x: Slice) -> float:
        capacity = self.devices[x.device].capacity
        return min(1.0, x.bytes / capacity) if capacity else 0.0

    # ------------------------------------------------------------------ devices

    def device(self, uuid: str) -> DeviceLedger:
        """Return the ledger of ``uuid`` for an event that names it.

        An unknown device gets a ledger without capacity: a recovered lease, for example, may name a
        device that this broker has not found.
        """
        if uuid not in self.devices:
            device = Device(
                uuid, len(self.devices), "not found", "", 0,
                can_suspend=False, can_migrate=False, tier="none",
            )  # fmt: skip
            self.devices[uuid] = DeviceLedger(device, fault="the device was not found")
            self.version += 1
        return self.devices[uuid]

    def appeared(self, device: Device) -> None:
        """Add a device, or note that it is healthy again."""
        ledger = self.devices.setdefault(device.uuid, DeviceLedger(device))
        ledger.device, ledger.fault = device, ""
        self._resize(ledger)

    def configure(self, settings: PoolSettings, groups: Mapping[str, str] = _NO_GROUPS) -> None:
        """Apply new rules, and charge the sessions in ``groups`` to the share of their new
        group.
        """
        self.meters.close(self.now, self.settings)
        self.settings = settings
        for name in groups:
            if name in self.sessions:
                s = self.sessions[name]
                s.owner = Owner(s.owner.name, groups[name])
                s.asking = None
                self.forget_times(s)
        self._grow_tree()
        self.meters.changed.update(dict.fromkeys(self.leased, True))
        self.group_usage.clear()
        for s in self.leased.values():
            for name in self.tree.path(s.owner.group):
                group = self.group_usage.setdefault(name, GroupUsage())
                group.memory += s.lease.charge
                group.leaving += s.lease.charge if s.state == "detaching" else 0
        self.version += 1
        for ledger in self.devices.values():
            self._resize(ledger)

    def shut(self, uuid: str, *, fault: str | None = None, paused: str | None = None) -> None:
        """Note why the pool grants nothing on a device; "" removes a reason, and None keeps it."""
        ledger = self.devices[uuid]
        ledger.fault = ledger.fault if fault is None else fault
        ledger.paused = ledger.paused if paused is None else paused
        self.version += 1

    def seen(self, uuid: str, foreign: int, overuse: int) -> None:
        """Record used bytes that no grant covers."""
        ledger = self.devices[uuid]
        if (foreign, overuse) != (ledger.foreign, ledger.overuse):
            ledger.foreign, ledger.overuse = foreign, overuse
            self.version += 1

    def _resize(self, ledger: DeviceLedger) -> None:
        device = ledger.device
        kept = device.memory_reserved + device.landing_bytes + self.settings.reserve
        ledger.capacity = max(0, device.memory_total - kept)
        ledger.allowed = max(ledger.capacity, ledger.granted)
        sizes = (d.capacity for d in self.devices.values() if d.capacity)
        self.capacities = sorted(sizes, reverse=True)
        self.suspends = any(d.device.can_suspend for d in self.devices.values())
        contexts = [d.device.context_bytes for d in self.devices.values() if d.capacity]
        self.least = min(contexts) + BLOCK if contexts and all(contexts) else 0
        self._grow_tree()
        self.meters.changed.update(dict.fromkeys(self.leased, True))
        self.version += 1

    # ------------------------------------------------------------------ host memory

    @property
    def host_room(self) -> int:
        """Bytes that a new suspend may take; may be negative."""
        room = self.settings.host_memory - self.host_used - self.host_going
        if self.host_available is not None:
            # ``host_available`` already excludes the states that were suspended before the sample.
            # A suspend that was under way may have copied a part of its state before the sample.
            # This code assumes that the suspend had copied nothing.
            room = min(room, self.host_available - self.host_taken)
        return room

    def host_seen(self, available: int) -> None:
        """Record a sample of the bytes that the host could give."""
        self.host_available, self.host_taken = available, self.host_going

    def host_takes(self, size: int) -> None:
        """Count ``size`` bytes (may be negative) as taken from the host since the last sample."""
        self.host_taken = max(0, self.host_taken + size)
