# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a session needs, and where it fits: what a draft of the plan leaves on each device.

What a session needs follows from the facts about it, the devices and the rules (:func:`asking`):

========================  ==========================================================================
attached, and short       more bytes on the devices of its lease
suspended state           for each device of the state, one of the same model that can take migrated
                          state, or that very device
has called cuInit         the devices that its processes see; any of the model where the guard can
                          move a process with its first context
everybody else            any devices
========================  ==========================================================================

A :class:`Draft` is a copy of the accounts on which the pass tries its plan; it never changes the
facts. It begins with the facts, less what the last plan promised, and shrinks as one session after
the other takes its part. Growth and forecasts also read a draft: what it leaves is neither promised
to a session nor reserved for the head of the queue.

A session returns to the devices of its last lease if they have room (no migration). Otherwise it
gets the tightest device with room (best fit), which keeps large gaps for large requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Callable, Iterable, Mapping, Sequence

from .facts import DeviceLedger, Facts, OwnerUsage, Session, charge_of
from .limits import lacking, never, never_there
from .model import (
    NO_LIMIT,
    Charge,
    DeviceView,
    PoolSettings,
    Reason,
    Refusal,
    Request,
    Slice,
)

NOTHING: Charge = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Need:
    """One slice that a session needs. Two needs of a session never share a device."""

    #: Bytes without which the session cannot run.
    least: int
    #: Bytes to reserve: ``least`` and, for a resume, the headroom.
    bytes: int
    #: The device that the suspended state comes from; "" without suspended state.
    origin: str = ""
    #: The only suitable device; "" for any.
    fixed: str = ""
    #: The only suitable model; None for any.
    model: str | None = None

    def amount(self, ledger: DeviceLedger) -> int:
        """Return the bytes to reserve on this device.

        That is ``bytes``, or the whole device if state and headroom together exceed it: the state
        fitted on such a device before.
        """
        return self.bytes if self.bytes <= ledger.capacity else max(self.least, ledger.capacity)

    def allows(self, ledger: DeviceLedger) -> bool:
        """Return whether this device is suitable if it has room."""
        return not (ledger.paused or ledger.fault) and self.suits(ledger)

    def suits(self, ledger: DeviceLedger) -> bool:
        """Return whether this device would be suitable if it were in service and had room."""
        device = ledger.device
        if self.fixed:
            return device.uuid == self.fixed
        if self.model is None:
            return True
        return device.model == self.model and (device.can_migrate or device.uuid == self.origin)


def preferred(s: Session) -> tuple[str, ...]:
    """Return the devices of the last lease, or those that its processes see, in their order."""
    if s.suspended:
        return tuple(x.device for x in s.suspended)
    return s.bound or s.last_devices


def in_turn(needs: Sequence[Need]) -> Sequence[int]:
    """Return the order in which needs choose a device: needs without a choice first, then by size.

    Needs of one model differ only in size: a device that suits a larger one suits a smaller one. So
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
    ledgers: Mapping[str, DeviceLedger],
    left: Callable[[DeviceLedger], int],
    last: Sequence[str] = (),
) -> tuple[Slice, ...] | None:
    """Return slices for all ``needs`` where ``left(ledger)`` has the bytes for them, or None.

    All on the devices of ``last`` if they are suitable, else each on the tightest suitable device.
    """
    if last and len(last) == len(needs):
        same = []
        for need, uuid in zip(needs, last, strict=True):
            ledger = ledgers.get(uuid)
            if ledger is None or not need.allows(ledger) or left(ledger) < need.amount(ledger):
                break
            same.append(Slice(uuid, need.amount(ledger)))
        else:
            return tuple(same)
    chosen: dict[int, Slice] = {}
    used: set[str] = set()
    for at in in_turn(needs):
        need = needs[at]
        best: tuple[int, int] | None = None
        for ledger in (ledgers[need.fixed],) if need.fixed else ledgers.values():
            room = left(ledger)
            # The cheap comparison first: most devices fail it.
            if room < need.least or ledger.device.uuid in used or not need.allows(ledger):
                continue
            size = need.amount(ledger)
            key = room, ledger.device.index
            if room >= size and (best is None or key < best):
                best, chosen[at] = key, Slice(ledger.device.uuid, size)
        if best is None:
            return None
        used.add(chosen[at].device)
    return (chosen[0],) if len(needs) == 1 else in_order(needs, chosen, ledgers)


def in_order(
    needs: Sequence[Need], chosen: Mapping[int, Slice], ledgers: Mapping[str, DeviceLedger]
) -> tuple[Slice, ...]:
    """Return the chosen slices in the order of ``needs``; by device number if none matters."""
    slices = [chosen[at] for at in range(len(needs))]
    if len(slices) > 1 and all(need.model is None and not need.fixed for need in needs):
        slices.sort(key=lambda x: ledgers[x.device].device.index)
    return tuple(slices)


# --------------------------------------------------------------------------- what a session needs

#: The headroom of a resume is at most this part of a device.
HEADROOM_PART = 16


@dataclass(slots=True)
class Asking:
    """What a session asks for."""

    needs: tuple[Need, ...]
    #: Its charge against the owner's quota.
    charge: Charge
    #: The suitable devices, for one slice without a quota: the pass compares requests by them.
    where: tuple[str, str | None] | None
    version: int
    #: The cached result of :func:`impossible`.
    verdict: tuple[Reason | None] | None = None


def headroom(ledger: DeviceLedger, settings: PoolSettings) -> int:
    """Return the bytes beyond its state that a resume reserves on such a device.

    At most a sixteenth of the device, because a driver takes less by itself on a small one.
    """
    return min(settings.resume_headroom, max(1, ledger.capacity // HEADROOM_PART))


def asking(s: Session, facts: Facts) -> Asking:
    """Return what a session that waits (or would) asks for.

    The session caches the answer, and a cached answer is valid: :meth:`Facts.change`, the only
    place where the session's facts change, drops it, and a change of devices or rules raises
    :attr:`Facts.version`. (A pass over 300 waiting sessions asks 300 times.)
    """
    found: Asking | None = s.asking
    if found is None or found.version != facts.version:
        needs = _needs(s, facts)
        if s.lease.slices:
            memory = s.request.memory
            goal = tuple(Slice(x.device, max(x.bytes, memory)) for x in s.lease.slices)
            charge: Charge = charge_of(s, goal) - s.lease.charge, 0, 0
        else:
            size = 0
            for need in needs:
                size += min(need.least, s.request.limit)
            charge = size, len(needs), 1
        rules = facts.settings
        free = not rules.quotas or rules.quota_of(s.owner.name) is NO_LIMIT
        alike = free and len(needs) == 1 and not s.lease.slices
        where = (needs[0].fixed, needs[0].model) if alike else None
        found = Asking(needs, charge, where, facts.version)
        s.asking = found
    return found


def _needs(s: Session, facts: Facts) -> tuple[Need, ...]:
    """Return what ``s`` needs, in the order in which its processes see their devices."""
    memory = s.request.memory
    if s.lease.slices:
        short = ((x.device, memory - x.bytes) for x in s.lease.slices if x.bytes < memory)
        return tuple(Need(more, more, fixed=uuid) for uuid, more in short)
    if s.suspended:
        return _state_needs(s, facts)
    if s.bound:
        return tuple(_bound_need(memory, facts.devices[uuid], s) for uuid in s.bound)
    return (Need(memory, memory),) * s.request.devices


def _bound_need(memory: int, ledger: DeviceLedger, s: Session) -> Need:
    """Return the need for one device that the session's processes see."""
    if s.lands and ledger.device.landing_bytes and not s.immovable:
        return Need(memory, memory, model=ledger.device.model)
    return Need(memory, memory, fixed=ledger.device.uuid)


def _state_needs(s: Session, facts: Facts) -> tuple[Need, ...]:
    """Return the needs of suspended state: at least the state, and as much headroom as possible.

    A display server, for example, always takes a little of its device. State that filled the rest
    of it must not wait for headroom that no device has. So the largest state gets at most the
    headroom of the roomiest device, the next state that of the next device.
    """
    devices, found = facts.devices, list[Need]()
    for x in s.suspended:
        ledger = devices[x.device]
        # Without enforcement, the session may have had more than the pool can give.
        held = min(x.bytes, ledger.capacity) if ledger.capacity else x.bytes
        least = max(s.request.memory, held)
        moves = ledger.device.can_migrate and (not s.immovable or bool(ledger.drained))
        fixed, model = ("", ledger.device.model) if moves else (x.device, None)
        wanted = max(least, x.bytes + headroom(ledger, facts.settings))
        found.append(Need(least, wanted, origin=x.device, fixed=fixed, model=model))

    def give(uuid: str) -> int:
        return devices[uuid].capacity - devices[uuid].foreign

    taken = {need.fixed for need in found}
    larger: dict[str | None, int] = {}

    def rank(need: Need) -> tuple[int, int, int]:
        return need.least, need.bytes, give(need.origin)

    for at in sorted(range(len(found)), key=lambda i: rank(found[i]), reverse=True):
        need = found[at]
        most = give(need.origin)
        if not need.fixed:
            nth = larger[need.model] = larger.get(need.model, -1) + 1
            free = [give(u) for u, d in devices.items() if u not in taken and need.allows(d)]
            if nth < len(free):
                most = sorted(free, reverse=True)[nth]
        found[at] = replace(need, bytes=max(need.least, min(need.bytes, most)))
    return tuple(found)


def impossible(found: Asking, facts: Facts) -> Reason | None:
    """Return why even an empty pool could not serve these needs at present; or None."""
    if found.verdict is None:
        found.verdict = (_impossible(found.needs, facts),)
    return found.verdict[0]


def _impossible(needs: tuple[Need, ...], facts: Facts) -> Reason | None:
    devices = facts.devices
    for need in needs:
        if need.fixed:
            ledger = devices[need.fixed]
            if ledger.paused:
                return Reason("paused", text=ledger.paused)
            if ledger.fault:
                return Reason("drained", devices=(need.fixed,), text=ledger.fault)
    if choose(needs, devices, lambda d: d.capacity - d.foreign - d.overuse) is not None:
        return None
    if choose(needs, devices, lambda d: d.capacity) is not None:
        return Reason("foreign", bytes=max(need.least for need in needs))
    suited = (d.paused for d in devices.values() if any(need.suits(d) for need in needs))
    paused = next((text for text in suited if text), "")
    return Reason("paused", text=paused) if paused else Reason("nowhere", count=len(needs))


def ever(request: Request, s: Session, facts: Facts) -> Refusal | None:
    """Return why ``request`` of ``s`` can never be met, by the rules or for lack of a device."""
    refusal = never(request, s.owner, facts.settings, facts.capacities, suspends=facts.suspends)
    if refusal is not None or not s.bound or s.lease.slices or s.suspended:
        return refusal
    # A session with a lease or suspended state stays with the device of its state. Any other
    # session needs a device that its processes see, and these may all be too small.
    needs = _needs(s, facts)
    for need in needs:
        fit = sorted(d.capacity for d in facts.devices.values() if need.suits(d))
        count = sum((n.fixed, n.model) == (need.fixed, need.model) for n in needs)
        if len(fit) >= count and 0 < fit[-count] < request.memory:
            model = facts.devices[need.fixed].device.model if need.fixed else need.model
            return never_there(request, str(model), fit[-count], count, fixed=bool(need.fixed))
    return None


# --------------------------------------------------------------------------- the draft


class Room:
    """One device in a draft: what it has left for later sessions of the pass."""

    __slots__ = ("avail", "candidates", "expect", "leases", "ledger", "offered", "promised", "uuid")

    def __init__(self, ledger: DeviceLedger) -> None:
        self.ledger = ledger
        self.uuid = ledger.device.uuid
        #: Bytes free now, and bytes free once all suspends under way are done; both without
        #: promised bytes.
        self.avail = ledger.free
        self.expect = self.avail + ledger.incoming
        self.promised = 0
        self.leases: list[tuple[Session, int]] = []
        #: The leases that some session may preempt, and their bytes in all; see
        #: :attr:`Draft.offers_known`.
        self.candidates: list[tuple[Session, int]] = []
        self.offered = 0

    def promise(self, size: int) -> None:
        """Set ``size`` bytes (may be negative) aside for a session."""
        self.avail -= size
        self.expect -= size
        self.promised += size

    def spare(self, wanted: int) -> int:
        """Return the bytes that can be backfilled while the head reserves ``wanted`` bytes here.

        The head of the queue waits until leases here end. Giving ``x`` bytes away is harmless if
        the head starts no later, in whatever order the present leases end (so no estimate of their
        ends is needed). This holds if all leases smaller than the missing bytes are not enough
        together. Then a larger lease must end in any case, and the bytes by which the smallest such
        lease exceeds the missing bytes can be given away.
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


@dataclass(frozen=True, slots=True)
class Reservation:
    """What the head of the queue reserves: bytes wanted, by device.

    Sessions behind the head get only the bytes there that :meth:`Room.spare` proves harmless.
    """

    session: str
    wanted: Mapping[str, int]
    #: The slices that the head needs; ``wanted`` may name more devices, as alternatives.
    count: int
    charge: Charge
    #: When it reserves one more device.
    next_at: float


@dataclass(frozen=True, slots=True)
class Promise:
    """Bytes that suspends under way free for one session."""

    takes: tuple[Slice, ...]
    charge: Charge
    #: The number of waits that had begun when the plan first made this promise.
    made: int


@dataclass(slots=True)
class Draft:
    """The devices and budgets as they are for later sessions of the pass."""

    facts: Facts
    rooms: dict[str, Room] = field(default_factory=dict)
    #: Host bytes that suspends may still take.
    host: int = 0
    reservation: Reservation | None = None
    #: Sessions that this plan suspends.
    leaving: set[str] = field(default_factory=set)
    promises: dict[str, Promise] = field(default_factory=dict)
    #: Sessions that this plan attaches or lets grow: no session has two parts in one plan.
    settled: set[str] = field(default_factory=set)
    #: Whether the rooms have their leases that some session may preempt.
    offers_known: bool = False
    _usage: dict[str, OwnerUsage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rooms = {uuid: Room(ledger) for uuid, ledger in self.facts.devices.items()}
        for s in self.facts.leased.values():
            for x in s.lease.slices:
                self.rooms[x.device].leases.append((s, x.bytes))
        self.host = self.facts.host_room

    # ------------------------------------------------------------------ free bytes

    def usage(self, owner: str) -> OwnerUsage:
        """Return the owner's leases and promises in this draft, in all."""
        found = self._usage.get(owner)
        if found is None:
            known = self.facts.usage.get(owner)
            found = self._usage[owner] = OwnerUsage() if known is None else known.copy()
        return found

    def lacking(self, owner: str, more: Charge, less: Charge = NOTHING) -> tuple[str, int] | None:
        """Return which limit of the owner ``more`` would exceed, as (name, limit), or None."""
        if not self.facts.settings.quotas:
            return None
        return lacking(self.facts.settings.quota_of(owner), self.usage(owner), more, less)

    def coming_back(self, owner: str) -> Charge:
        """Return what suspends under way, and those of this plan, give back to the owner."""
        memory = devices = leases = 0
        for s in self.facts.leases_of(owner):
            if s.state == "detaching" or s.id in self.leaving:
                memory += s.lease.charge
                devices += len(s.lease.slices)
                leases += 1
        return memory, devices, leases

    def left(self, ledger: DeviceLedger) -> int:
        """Return the bytes of the device that the next session may have at once."""
        uuid = ledger.device.uuid
        room, held = self.rooms[uuid], self.reservation
        wanted = held.wanted.get(uuid) if held is not None else None
        return room.avail if wanted is None else min(room.avail, room.spare(wanted))

    def reserved(self, room: Room) -> bool:
        """Return whether the head of the queue has a reservation there."""
        return self.reservation is not None and room.uuid in self.reservation.wanted

    def now(self, s: Session, needs: Sequence[Need]) -> tuple[Slice, ...] | None:
        """Return where ``s`` could have its ``needs`` at once, or None."""
        return choose(needs, self.facts.devices, self.left, preferred(s))

    def host_left(self, devices: Iterable[str] = ()) -> int:
        """Return the host bytes that a suspend may take; those that the head will need are kept.

        All of them if the suspend frees memory on ``devices`` that the head has reserved.
        """
        held = self.reservation
        if held is None:
            return self.host
        freed = set(devices)
        if freed and freed <= held.wanted.keys():
            return self.host
        missing = (max(0, size - self.rooms[uuid].expect) for uuid, size in held.wanted.items())
        # The head may have reserved more devices than it needs: the cheapest of them count.
        return self.host - sum(sorted(missing)[: held.count])

    def host_fits(self, victims: Iterable[Session], room: int) -> bool:
        """Return whether the state of all ``victims`` fits in ``room`` bytes and their quotas."""
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
            most = self.facts.settings.quota_of(owner).suspended
            if most is not None and self.usage(owner).suspended + size > most:
                return False
        return True

    # ------------------------------------------------------------------ changes

    def take(self, s: Session, takes: Iterable[Slice], charge: Charge) -> None:
        """Grant ``takes`` to ``s``: later sessions cannot have them."""
        self.settled.add(s.id)
        self.usage(s.owner.name).add(charge)
        for x in takes:
            room = self.rooms[x.device]
            room.avail -= x.bytes
            room.expect -= x.bytes
            # Like the present leases, it may now end before the head of the queue starts.
            held = sum(size for v, size in room.leases if v is s)
            room.leases = [(v, size) for v, size in room.leases if v is not s]
            room.leases.append((s, held + x.bytes))

    def promise(self, s: Session, promise: Promise) -> None:
        """Promise bytes to ``s`` that suspends under way will free."""
        self.promises[s.id] = promise
        for x in promise.takes:
            self.rooms[x.device].promise(x.bytes)
        self.usage(s.owner.name).add(promise.charge)

    def unpromise(self, s: Session) -> Promise:
        """Take the promise of ``s`` back, and return it."""
        promise = self.promises.pop(s.id)
        for x in promise.takes:
            self.rooms[x.device].promise(-x.bytes)
        self.usage(s.owner.name).add(promise.charge, -1)
        return promise

    def suspend(self, v: Session) -> None:
        """Suspend ``v`` in the draft: its bytes come free later, its state takes host memory."""
        if v.id in self.promises:
            self.unpromise(v)  # a promise of growth, which ends with the lease
        self.leaving.add(v.id)
        self.host -= v.state_bound
        self.usage(v.owner.name).suspended += v.state_bound
        for x in v.lease.slices:
            self.rooms[x.device].expect += x.bytes

    def reserve(self, held: Reservation, head: Session) -> None:
        """Reserve memory and its owner's quota for the head of the queue."""
        self.reservation = held
        self.usage(head.owner.name).add(held.charge)
        for uuid in held.wanted if head.lease.slices else ():
            # The head waits for other leases to end, not for its own.
            room = self.rooms[uuid]
            room.leases = [(s, size) for s, size in room.leases if s is not head]

    def unreserve(self, head: Session) -> None:
        """Undo :meth:`reserve`."""
        assert self.reservation is not None
        self.usage(head.owner.name).add(self.reservation.charge, -1)
        self.reservation = None


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

    A process is bound to the devices that it sees at cuInit, and needs no slice for that call. So
    these should be the devices where it will get its slice. ``kernels`` is the number of kernels
    that see each device, ``seen`` names the devices that this kernel sees so far, in its order. The
    first rule that applies decides:

    1. The devices where the pool would attach it now (``planned``).
    2. The devices that it sees, if they are ``count`` devices with room for ``memory`` bytes each.
    3. The best devices, compared in this order: in service; large enough; with room now; seen so
       far; seen by the fewest kernels (all may come back); least memory granted; lowest number.
    4. The devices that it sees, if rule 3 finds no room on ``count`` devices: a change gains
       nothing.

    The answer is empty only where the machine has no device: a process keeps the driver's answer
    "no device" until it ends. Drained devices are named only where all devices are drained.
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
