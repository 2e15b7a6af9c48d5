# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a session needs, and where it fits.

What a session needs depends on the facts about it, on the devices and on the rules
(:func:`asking`):

========================  ==========================================================================
attached, lacks bytes     more bytes on the devices of its lease
suspended state           for each device of the state, this device itself, or a device of the same
                          model that can take migrated state
has called cuInit         the devices that its processes see; or any devices of the same model, if
                          the guard can move a process when it creates its first context
any other session         any devices
========================  ==========================================================================

A session returns to the devices of its last lease if they have room (no migration). Otherwise, of
the devices with enough room, it gets the one with the least room (best fit). Devices with much room
then stay free for large requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Mapping, Sequence

from .facts import DeviceLedger, Facts, charge_of
from .limits import never, never_there
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
from .session import Session

#: The two fields of a need that say which devices suit it: :attr:`Need.fixed`, :attr:`Need.model`.
Where = tuple[str, str | None]


@dataclass(frozen=True, slots=True)
class Need:
    """The requirements of one slice of a session. Two slices of a session never share a device."""

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

        The answer is ``bytes``, or the device's capacity if ``bytes`` is larger, but never less
        than ``least``. In the second case, the device has no room for the whole headroom. It has
        room for ``least``, because the state comes from a device of this size.
        """
        return self.bytes if self.bytes <= ledger.capacity else max(self.least, ledger.capacity)

    def allows(self, ledger: DeviceLedger) -> bool:
        """Return whether this device suits the need and is in service. It need not have room."""
        return not (ledger.paused or ledger.fault) and self.suits(ledger)

    def suits(self, ledger: DeviceLedger) -> bool:
        """Return whether this device suits the need, even if it is out of service or full."""
        device = ledger.device
        if self.fixed:
            return device.uuid == self.fixed
        if self.model is None:
            return True
        return device.model == self.model and (device.can_migrate or device.uuid == self.origin)


def preferred(s: Session) -> tuple[str, ...]:
    """Return the devices that the session should get if possible, in the order of its slices.

    These are the devices of its suspended state, else the devices that its processes see, else the
    devices of its last lease.
    """
    if s.suspended:
        return tuple(x.device for x in s.suspended)
    return s.bound or s.last_devices


def in_turn(needs: Sequence[Need]) -> Sequence[int]:
    """Return the indices of ``needs`` in the order in which they choose a device.

    Needs for a fixed device come first, then the other needs, the largest first. Needs for the same
    model differ only in size, so a device with room for a large need also has room for a smaller
    need. With this order, :func:`choose` therefore finds room for all needs whenever this is
    possible.
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
    left: Mapping[str, int],
    last: Sequence[str] = (),
) -> tuple[Slice, ...] | None:
    """Return slices for all ``needs`` within the free bytes ``left``; None if they do not all fit.

    If all slices fit on the devices of ``last``, they go there. Otherwise, of the suitable devices
    with enough room, each slice goes to the device with the least room.
    """
    if last and len(last) == len(needs):
        same = []
        for need, uuid in zip(needs, last, strict=True):
            ledger = ledgers.get(uuid)
            if ledger is None or not need.allows(ledger) or left[uuid] < need.amount(ledger):
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
            room = left[ledger.device.uuid]
            # Do the cheap comparison first: most devices fail it.
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
    """Return the chosen slices in the order of ``needs``, or by device number if no need names a
    device or a model.

    If the device that a suspended state comes from is among the chosen devices, the state returns
    to this device, because the pool migrates no state without need.
    """
    slices = [chosen[at] for at in range(len(needs))]
    if len(slices) > 1 and all(need.model is None and not need.fixed for need in needs):
        slices.sort(key=lambda x: ledgers[x.device].device.index)
    for at, need in enumerate(needs) if len(slices) > 1 else ():
        for other, x in enumerate(slices):
            alike = needs[other].model == need.model and x.bytes == slices[at].bytes
            if x.device == need.origin and alike:
                slices[at], slices[other] = x, slices[at]
    return tuple(slices)


# --------------------------------------------------------------------------- what a session needs

#: The headroom of a resume is at most the size of the device divided by this number.
HEADROOM_PART = 16


#: The place of a session in the order of age: a number for class and age together (the session with
#: the lowest number goes first), then the start of the wait, then the number of the wait.
Age = tuple[float, float, int]


@dataclass(slots=True)
class Asking:
    """The request of a session, in the form that the pass of the planner reads."""

    needs: tuple[Need, ...]
    #: The charge of the request against the owner's quota.
    charge: Charge
    #: Which devices suit the request. This is set only if a session without a lease asks for one
    #: slice, and its owner has no limits; otherwise it is None. The pass compares requests by it.
    where: Where | None
    version: int
    #: The :attr:`Need.least` of the smallest need.
    least: int
    #: The needs, grouped by their :data:`Where`. For each group: how many needs it has, and the
    #: fewest bytes that one of them takes.
    kinds: tuple[tuple[Where, tuple[int, int]], ...]
    #: The bytes that the session waits for on each device. This may be more than the request asks
    #: for, because suspended state may be larger.
    size: int
    #: The session's priority class as a number, and its place in the order of age. Both are
    #: explained in :meth:`.shares.Shares.order`.
    level: int
    age: Age
    #: Whether each need is at most the memory that the request guarantees.
    modest: bool
    #: The requested memory, whether the session has a lease, and the needs without their origins.
    #: As long as devices and rules do not change, sessions with the same shape fit on the same
    #: devices. The origins do not matter, because a need names a model only if the state can move
    #: to any device of this model.
    shape: tuple[object, ...]
    #: The cached result of :func:`impossible`.
    verdict: tuple[Reason | None] | None = None


def headroom(ledger: DeviceLedger, settings: PoolSettings) -> int:
    """Return the bytes that a resume on the device reserves in addition to the state.

    The headroom is at most a sixteenth of the device. A resume on a small device needs less
    headroom, because the driver itself takes less memory on a small device.
    """
    return min(settings.resume_headroom, max(1, ledger.capacity // HEADROOM_PART))


def asking(s: Session, facts: Facts) -> Asking:
    """Return the :class:`Asking` of a session, as if it waited now.

    The session caches the answer. A cached answer is always valid: the session's facts change only
    inside :meth:`Facts.change`, which drops the answer, and a change of devices or rules raises
    :attr:`Facts.version`. (A pass over 300 waiting sessions calls this 300 times.)
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
        free = free and not (facts.tree.caps and facts.tree.capped(s.owner.group))
        memory = s.request.memory
        least = most = size = memory if not needs else needs[0].least
        kinds: dict[Where, tuple[int, int]] = {}
        parts: list[object] = []
        for need in needs:
            least, most, size = min(least, need.least), max(most, need.least), max(size, need.bytes)
            amount = need.least if need.bytes == need.least else _least_amount(need, facts)
            where = need.fixed, need.model
            count, smallest = kinds.get(where, (0, amount))
            kinds[where] = count + 1, min(smallest, amount)
            parts.append((*where, need.least, need.bytes))
        alone = free and len(needs) == 1 and not s.lease.slices
        level, ageing = rules.priority_classes.get(s.request.priority, 0), rules.ageing
        place = s.wait.since / ageing - level if ageing > 0 else float(-level)
        found = Asking(
            needs,
            charge,
            where if alone else None,
            facts.version,
            least=least,
            kinds=tuple(kinds.items()),
            size=max(memory, size),
            level=level,
            age=(place, s.wait.since, s.wait.number),
            modest=most <= memory,
            shape=(memory, bool(s.lease.slices), *parts),
        )
        s.asking = found
    return found


def _least_amount(need: Need, facts: Facts) -> int:
    """Return the fewest bytes that the need takes on any suitable device."""
    amounts = [need.amount(ledger) for ledger in facts.devices.values() if need.suits(ledger)]
    return min(amounts, default=need.least)


def _needs(s: Session, facts: Facts) -> tuple[Need, ...]:
    """Return the needs of ``s``, in the order in which its processes see their devices."""
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

    A process outside the pool, for example a display server, may use a little of a device all the
    time. If a state nearly fills the rest of the device, perhaps no device ever has room for both
    the state and the whole headroom, and the session would wait without end. So the function
    reduces the headroom. It gives the largest state the room of the device with the most room, the
    next state the room of the next device, and so on. A state and its headroom together are never
    larger than this room, except if the state alone is larger.
    """
    devices, found = facts.devices, list[Need]()
    for x in s.suspended:
        ledger = devices[x.device]
        # Without a guard, the session may have used more bytes than a slice can have.
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
    """Return why these needs could not be met now even if no session had a lease, or None."""
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
    left = {uuid: d.capacity - d.foreign - d.overuse for uuid, d in devices.items()}
    if choose(needs, devices, left) is not None:
        return None
    if choose(needs, devices, {uuid: d.capacity for uuid, d in devices.items()}) is not None:
        return Reason("foreign", bytes=max(need.least for need in needs))
    suited = (d.paused for d in devices.values() if any(need.suits(d) for need in needs))
    paused = next((text for text in suited if text), "")
    return Reason("paused", text=paused) if paused else Reason("nowhere", count=len(needs))


def ever(request: Request, s: Session, facts: Facts) -> Refusal | None:
    """Return why the rules or the devices can never meet ``request`` of ``s``, or None."""
    refusal = never(
        *(request, s.owner, facts.settings, facts.capacities),
        suspends=facts.suspends,
        least=facts.least,
    )
    if refusal is not None or not s.bound or s.lease.slices or s.suspended:
        return refusal
    # A session with a lease or suspended state stays on its devices. But a session without these
    # may be bound to devices that are all too small for the request.
    needs = _needs(s, facts)
    for need in needs:
        fit = sorted(d.capacity for d in facts.devices.values() if need.suits(d))
        count = sum((n.fixed, n.model) == (need.fixed, need.model) for n in needs)
        if len(fit) >= count and 0 < fit[-count] < request.memory:
            model = facts.devices[need.fixed].device.model if need.fixed else need.model
            return never_there(request, str(model), fit[-count], count, fixed=bool(need.fixed))
    return None


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
    it should see the devices on which it will get its slice. ``kernels`` is the number of kernels
    that see each device. ``seen`` names the devices that this kernel sees so far, in its own order.
    The first rule that applies decides:

    1. The devices where the pool would attach the kernel now (``planned``).
    2. The devices that the kernel sees so far, if they are ``count`` devices with room for
       ``memory`` bytes each.
    3. The best devices. The rule prefers, in this order: devices in service, devices that are large
       enough, devices that have room now, devices that the kernel sees so far, devices that fewer
       kernels see (each of these kernels may need a slice on the device again), devices of which
       less memory is granted, devices with lower numbers.
    4. The devices that the kernel sees so far, if rule 3 finds no room on ``count`` devices: a
       change would gain nothing.

    The answer is empty only if the machine has no device, because a process that sees no device at
    cuInit can never use one. The answer names drained devices only if all devices are drained.
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
