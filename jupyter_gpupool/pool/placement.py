# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Where slices fit: devices as a draft of the plan leaves them, and what is taken from them.

A :class:`Draft` is a copy of the accounts on which the plan is tried; nothing in it changes the
state. It begins with the facts, less what the last plan promised, and becomes smaller as one
session after the other takes its part. Growth and forecasts ask a draft, too: what it has left is
what nobody is promised and what the head of the queue does not wait for.

The devices of a session's last lease come first (no migration), then the tightest device with room
(best fit), which keeps the large holes for large requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Iterable, Mapping, Sequence

from .facts import Facts, Ledger, Session, Usage
from .limits import Charge, lacking
from .model import DeviceView, Slice

NOTHING: Charge = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Need:
    """One slice that a session needs: bytes on one device, which must be distinct from others."""

    #: Bytes without which it can not be.
    least: int
    #: Bytes to reserve: ``least`` and, to resume, the headroom.
    bytes: int
    #: The device whose state moves here; "" if nothing is suspended.
    origin: str = ""
    #: Bytes to reserve on ``origin``; 0: as anywhere.
    at_origin: int = 0
    #: The only device that will do; "" for any.
    fixed: str = ""
    #: The only model that will do; None for any.
    model: str | None = None

    def amount(self, device: Ledger | Room) -> int:
        """Return the bytes to reserve on this device.

        That is all of ``bytes``, except where the state fits the device but state and headroom
        exceed even an empty one: then it is the whole device. No device has more, and the state was
        on such a device before.
        """
        size = self.bytes
        if self.at_origin and device.device.uuid == self.origin:
            size = self.at_origin
        return size if size <= device.capacity else max(self.least, device.capacity)

    def allows(self, device: Ledger | Room) -> bool:
        """Return whether this device will do, room aside."""
        return not device.drained and self.suits(device)

    def suits(self, device: Ledger | Room) -> bool:
        """Return whether this device would do if it were in service, room aside."""
        found = device.device
        if self.fixed:
            return found.uuid == self.fixed
        if self.model is None:
            return True
        return found.model == self.model and (found.can_migrate or found.uuid == self.origin)


class Room:
    """One device in a draft of the plan: what is left there for those who come later."""

    __slots__ = (
        "avail",
        "candidates",
        "capacity",
        "device",
        "drained",
        "expect",
        "leases",
        "offered",
        "promised",
        "uuid",
    )

    def __init__(self, ledger: Ledger) -> None:
        self.device = ledger.device
        self.uuid = ledger.device.uuid
        self.capacity = ledger.capacity
        self.drained = ledger.drained
        #: Bytes that are free now, and those that are once all suspends under way are done; both
        #: without what is promised to others.
        self.avail = ledger.free
        self.expect = self.avail + ledger.incoming
        self.promised = 0
        self.leases: list[tuple[Session, int]] = []
        #: Those of the leases that may yield to somebody, and their bytes in all.
        self.candidates: list[tuple[Session, int]] = []
        self.offered = 0

    def promise(self, size: int) -> None:
        """Keep ``size`` bytes (may be negative) for somebody."""
        self.avail -= size
        self.expect -= size
        self.promised += size

    def spare(self, wanted: int) -> int:
        """Return the bytes that can go to others without harm to whom ``wanted`` are reserved for.

        The head of the queue waits until leases here end. Giving ``x`` bytes away is harmless if
        the head starts no later in any order in which the present leases may end (so no estimate of
        their ends is needed). That is so if all leases smaller than what is missing do not suffice
        together: then a larger one must end in any case, and what the smallest of the larger ones
        has beyond the missing bytes can go.
        """
        if self.promised:
            return 0
        missing = wanted - self.avail
        if missing <= 0:
            return -missing
        small, large = 0, 0
        for _, size in self.leases:
            if size < missing:
                small += size
            elif not large or size < large:
                large = size
        return large - missing if large and small < missing else 0


def preferred(s: Session) -> tuple[str, ...]:
    """Return the devices where it was last, or that it sees, in its order."""
    if s.suspended:
        return tuple(x.device for x in s.suspended)
    return s.bound or s.last_devices


def in_turn(needs: Sequence[Need]) -> Sequence[int]:
    """Return the order in which needs choose: those without a choice first, then the largest.

    Needs of one model differ only in size, so what suits a larger one suits a smaller one, and
    choosing in this order finds a place for all whenever there is one.
    """
    if len(needs) == 1:
        return (0,)
    return sorted(
        range(len(needs)),
        key=lambda i: (not needs[i].fixed, -needs[i].least, -needs[i].bytes, i),
    )


def choose(
    needs: Sequence[Need],
    devices: Mapping[str, Ledger] | Mapping[str, Room],
    room: Callable[..., int],
    last: Sequence[str] = (),
) -> tuple[Slice, ...] | None:
    """Return slices for all ``needs`` where ``room(device)`` has the bytes for them, or None.

    All on the devices of ``last`` if they will do, else each on the tightest that will.
    """
    if last and len(last) == len(needs):
        same = []
        for need, uuid in zip(needs, last, strict=True):
            device = devices.get(uuid)
            if device is None or not need.allows(device) or room(device) < need.amount(device):
                break
            same.append(Slice(uuid, need.amount(device)))
        else:
            return tuple(same)
    chosen: dict[int, Slice] = {}
    used: set[str] = set()
    for at in in_turn(needs):
        need = needs[at]
        best: tuple[int, int] | None = None
        options = (devices[need.fixed],) if need.fixed else devices.values()
        for device in options:
            left = room(device)
            # The cheap comparison first: most devices fail it.
            if left < need.least or device.device.uuid in used or not need.allows(device):
                continue
            size = need.amount(device)
            key = left, device.device.index
            if left >= size and (best is None or key < best):
                best, chosen[at] = key, Slice(device.device.uuid, size)
        if best is None:
            return None
        used.add(chosen[at].device)
    return (chosen[0],) if len(needs) == 1 else in_order(needs, chosen, devices)


def in_order(
    needs: Sequence[Need],
    chosen: Mapping[int, Slice],
    devices: Mapping[str, Ledger] | Mapping[str, Room],
) -> tuple[Slice, ...]:
    """Return the chosen slices in the order of ``needs``; if that is none, by device number."""
    slices = [chosen[at] for at in range(len(needs))]
    if len(slices) > 1 and all(need.model is None and not need.fixed for need in needs):
        slices.sort(key=lambda x: devices[x.device].device.index)
    return tuple(slices)


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the head of the queue accumulates memory on: bytes wanted, by device.

    Sessions behind the head get there only what :meth:`~.placement.Room.spare` proves harmless.
    """

    session: str
    wanted: Mapping[str, int]
    #: The slices that it needs; ``wanted`` may name more devices, as alternatives.
    count: int
    charge: Charge
    #: When it next takes one device more.
    next_at: float


@dataclass(slots=True)
class Draft:
    """What is left for those who are planned later."""

    facts: Facts
    rooms: dict[str, Room] = field(default_factory=dict)
    #: Host bytes that suspends may still take.
    host: int = 0
    reservation: Reservation | None = None
    #: Sessions that leave by this plan, and why.
    leaving: dict[str, str] = field(default_factory=dict)
    #: By session: what was promised to it, and the charge of that.
    promises: dict[str, tuple[tuple[Slice, ...], Charge]] = field(default_factory=dict)
    #: Sessions that this plan attaches or lets grow: no session has two parts in one plan.
    settled: set[str] = field(default_factory=set)
    _usage: dict[str, Usage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        facts, rooms = self.facts, self.rooms
        for uuid, ledger in facts.devices.items():
            rooms[uuid] = Room(ledger)
        for s in facts.leased.values():
            for x in s.lease.slices:
                rooms[x.device].leases.append((s, x.bytes))
        self.host = facts.host_room

    # ------------------------------------------------------------------ what is left

    def usage(self, owner: str) -> Usage:
        """Return what the owner has and is promised by this draft."""
        found = self._usage.get(owner)
        if found is None:
            known = self.facts.usage.get(owner)
            found = Usage()
            if known is not None:
                found.add(known.memory, known.devices, known.leases)
                found.suspended = known.suspended
            self._usage[owner] = found
        return found

    def lacking(self, owner: str, more: Charge, less: Charge = NOTHING) -> tuple[str, int] | None:
        """Return which limit of the owner ``more`` would exceed, as (name, limit), or None."""
        if not self.facts.settings.quotas:
            return None
        return lacking(self.facts.limit(owner), self.usage(owner), more, less)

    def coming_back(self, owner: str) -> Charge:
        """Return what the owner gets back when suspends under way, and of this plan, are done."""
        memory = devices = leases = 0
        for s in self.facts.leases_of(owner):
            if s.state == "detaching" or s.id in self.leaving:
                memory += s.lease.charge
                devices += len(s.lease.slices)
                leases += 1
        return memory, devices, leases

    def left(self, room: Room) -> int:
        """Return the bytes there that somebody behind the head may have at once."""
        wanted = self.reservation.wanted.get(room.uuid) if self.reservation else None
        return room.avail if wanted is None else min(room.avail, room.spare(wanted))

    def reserved(self, room: Room) -> bool:
        """Return whether the head of the queue accumulates memory there."""
        return self.reservation is not None and room.uuid in self.reservation.wanted

    def now(self, s: Session, needs: Sequence[Need]) -> tuple[Slice, ...] | None:
        """Return where ``s``, which needs ``needs``, could be attached at once, or None."""
        return choose(needs, self.rooms, self.left, preferred(s))

    def host_left(self, devices: Iterable[str] = ()) -> int:
        """Return the host bytes that a suspend may take without what the head is to need.

        All of them if everything that comes free, on ``devices``, is the head's.
        """
        held, room = self.reservation, self.host
        if held is None:
            return room
        freed = set(devices)
        if freed and freed <= held.wanted.keys():
            return room
        missing = (max(0, size - self.rooms[uuid].expect) for uuid, size in held.wanted.items())
        # It may have reserved more devices than it needs: the cheapest of them count.
        return room - sum(sorted(missing)[: held.count])

    def host_fits(self, victims: Iterable[Session], room: int) -> bool:
        """Return whether the state of all ``victims`` has room: ``room`` bytes, and by quota."""
        total = 0
        owners: dict[str, int] = {}
        for v in victims:
            bound = v.state_bound
            if bound:
                total += bound
                owners[v.owner.name] = owners.get(v.owner.name, 0) + bound
        if not total:
            return True
        if total > room:
            return False
        for owner, size in owners.items():
            most = self.facts.limit(owner).suspended
            if most is not None and self.usage(owner).suspended + size > most:
                return False
        return True

    # ------------------------------------------------------------------ what is taken

    def take(self, s: Session, takes: Iterable[Slice], charge: Charge) -> None:
        """Grant ``takes`` to ``s``: they are gone for all that come later."""
        self.settled.add(s.id)
        usage = self.usage(s.owner.name)
        usage.memory += charge[0]
        usage.devices += charge[1]
        usage.leases += charge[2]
        for x in takes:
            room = self.rooms[x.device]
            room.avail -= x.bytes
            room.expect -= x.bytes

    def promise(self, s: Session, takes: tuple[Slice, ...], charge: Charge) -> None:
        """Keep ``takes`` for ``s`` until suspends under way have freed them."""
        self.promises[s.id] = takes, charge
        for x in takes:
            self.rooms[x.device].promise(x.bytes)
        self.usage(s.owner.name).add(*charge)

    def unpromise(self, s: Session) -> tuple[tuple[Slice, ...], Charge]:
        """Take back what ``s`` was promised, and return it."""
        takes, charge = self.promises.pop(s.id)
        for x in takes:
            self.rooms[x.device].promise(-x.bytes)
        memory, devices, leases = charge
        self.usage(s.owner.name).add(-memory, -devices, -leases)
        return takes, charge

    def suspend(self, v: Session, reason: str) -> None:
        """Let ``v`` leave; its bytes are on their way, and its state takes host memory."""
        if v.id in self.promises:
            self.unpromise(v)  # of growth, which is over with the lease
        self.leaving[v.id] = reason
        self.host -= v.state_bound
        self.usage(v.owner.name).suspended += v.state_bound
        for x in v.lease.slices:
            self.rooms[x.device].expect += x.bytes

    def reserve(self, held: Reservation, owner: str) -> None:
        """Let the head of the queue accumulate memory, and its part of its owner's quota."""
        self.reservation = held
        self.usage(owner).add(*held.charge)


# --------------------------------------------------------------------------- without a slice


def home_devices(
    devices: Sequence[DeviceView],
    kernels: Mapping[str, int],
    *,
    memory: int,
    count: int,
    seen: Sequence[str] = (),
    planned: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the ``count`` devices that a kernel without a slice should see, by UUID.

    A process settles on the devices that it sees when it calls cuInit, and needs no slice for that;
    so these should be the devices where it will get one. ``kernels`` tells how many kernels see
    each device, ``seen`` are those that this one sees so far, in its order. The first rule that
    applies decides:

    1. The devices where the pool would attach it now (``planned``).
    2. What it sees, if that is ``count`` devices with room for ``memory`` bytes each.
    3. The best devices: in service; large enough; with room now; seen so far; seen by the fewest
       kernels, as all of them may come back; with the least memory granted; the first by number.
    4. What it sees, if rule 3 finds no room on ``count`` devices: nothing is gained by a change.

    The answer is empty only where there is no device: a process keeps the driver's answer "no
    device" until it ends. Drained devices are named only where no other is left.
    """
    if planned:
        return tuple(planned)
    views = {view.device.uuid: view for view in devices}

    def has_room(uuid: str) -> bool:
        view = views.get(uuid)
        return view is not None and not view.drained_reason and view.free >= memory

    settled = tuple(seen) if seen and len(seen) == count else ()
    if settled and all(has_room(uuid) for uuid in settled):
        return settled
    in_service = [view for view in devices if not view.drained_reason] or [*devices]
    best = sorted(
        in_service,
        key=lambda view: (
            view.capacity < memory,
            view.free < memory,
            view.device.uuid not in seen,
            kernels.get(view.device.uuid, 0),
            view.granted,
            view.device.index,
        ),
    )
    chosen = tuple(view.device.uuid for view in best[: max(1, count)])
    if settled and not (len(chosen) == count and all(has_room(uuid) for uuid in chosen)):
        return settled
    return chosen or tuple(seen)
