# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a session needs: follows from the facts about it, the devices and the rules.

========================  ==========================================================================
attached, and short       more bytes on the devices of its lease
suspended state           for each device of the state, one of the same model that can take migrated
                          state, or that very device
has called cuInit         the devices that its processes see; any of the model where the guard can
                          move a process with its first context
everybody else            any devices
========================  ==========================================================================
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .facts import DeviceLedger, Facts, Session, charge_of
from .limits import never, never_there
from .model import NO_LIMIT, Charge, PoolSettings, Reason, Refusal, Request, Slice
from .placement import Need, choose

#: The headroom of a resume is at most this part of a device.
HEADROOM_PART = 16


@dataclass(frozen=True, slots=True)
class Asking:
    """What a session asks for."""

    needs: tuple[Need, ...]
    #: What the owner's quota is charged for it.
    charge: Charge
    #: The devices that will do, for one slice without a quota: what requests are compared by.
    where: tuple[str, str | None] | None
    version: int


def headroom(ledger: DeviceLedger, settings: PoolSettings) -> int:
    """Return the bytes beyond its state that a resume reserves on such a device.

    At most a sixteenth of the device: what a driver takes by itself is less on a small one.
    """
    return min(settings.resume_headroom, max(1, ledger.capacity // HEADROOM_PART))


def asking(s: Session, facts: Facts) -> Asking:
    """Return what a session that waits (or would) asks for.

    The session keeps the answer, and a kept answer is true: :meth:`Facts.change`, the only way to
    change what the answer depends on in the session, drops it; and whatever it depends on in the
    devices and rules raises :attr:`Facts.version`. (A pass over 300 sessions asks 300 times.)
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
    """Return the need in the place of one device that the session's processes see."""
    if s.lands and ledger.device.landing_bytes and not s.immovable:
        return Need(memory, memory, model=ledger.device.model)
    return Need(memory, memory, fixed=ledger.device.uuid)


def _state_needs(s: Session, facts: Facts) -> tuple[Need, ...]:
    """Return the needs of suspended state: at least the state, and as much headroom as there is.

    A display server, say, takes a little of a device all the time. State that fills the rest came
    from there, and must not wait for headroom that no device has. So the largest state gets
    headroom as far as the roomiest device has it, the next one by the next device.
    """
    devices, found = facts.devices, list[Need]()
    for x in s.suspended:
        ledger = devices[x.device]
        # Where nothing enforces its slice, the session may have had more than the pool can give.
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
    for at in sorted(range(len(found)), key=lambda i: (-found[i].least, -give(found[i].origin))):
        need = found[at]
        most = give(need.origin)
        if not need.fixed:
            rank = larger[need.model] = larger.get(need.model, -1) + 1
            free = [give(u) for u, d in devices.items() if u not in taken and need.allows(d)]
            if rank < len(free):
                most = sorted(free, reverse=True)[rank]
        found[at] = replace(need, bytes=max(need.least, min(need.bytes, most)))
    return tuple(found)


def impossible(needs: tuple[Need, ...], facts: Facts) -> Reason | None:
    """Return why not even an empty pool could serve ``needs`` at present, or None."""
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
    """Return why ``request`` of ``s`` can never be met, by the rules or for want of a device."""
    refusal = never(request, s.owner, facts.settings, facts.capacities, suspends=facts.suspends)
    if refusal is not None or not s.bound or s.lease.slices or s.suspended:
        return refusal
    # A session with a lease or suspended state stays with the device of its state; another one
    # needs a device that its processes see, and these may all be too small.
    needs = _needs(s, facts)
    for need in needs:
        fit = sorted(d.capacity for d in facts.devices.values() if need.suits(d))
        count = sum((n.fixed, n.model) == (need.fixed, need.model) for n in needs)
        if len(fit) >= count and 0 < fit[-count] < request.memory:
            model = facts.devices[need.fixed].device.model if need.fixed else need.model
            return never_there(request, str(model), fit[-count], count, fixed=bool(need.fixed))
    return None
