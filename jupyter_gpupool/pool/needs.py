# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a session needs to be attached: follows from the facts about it, the devices and the rules.

A session with suspended state needs, for each device that the state came from, a device of the
same model that can take migrated state (or the very device), each on a distinct one. A session
that has called cuInit but holds nothing knows only the device that it saw: it can go to others of
the model where its processes can be moved with their first context, else nowhere. Everybody else
goes anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, Mapping, Sequence

from .facts import Facts, Ledger, Session
from .limits import Charge, never, never_there
from .model import NO_LIMIT, PoolSettings, Reason, Refusal, Request
from .placement import Need, choose, in_turn

#: The headroom of a resume is at most this part of a device.
HEADROOM_PART = 16


@dataclass(frozen=True, slots=True)
class Asking:
    """What a session asks for, as follows from the facts about it, the devices and the rules."""

    needs: tuple[Need, ...]
    #: What the owner's quota is charged for a lease: bytes, devices, leases.
    charge: Charge
    #: Why not even an empty pool could serve it at present.
    impossible: Reason | None
    #: The devices that will do, for one slice without a quota: what requests are compared by.
    where: tuple[str, str | None] | None
    version: int


def headroom(ledger: Ledger, settings: PoolSettings) -> int:
    """Return the bytes beyond its state that a session is resumed with on such a device.

    At most a sixteenth of the device: what a driver takes by itself is less on a small one.
    """
    return min(settings.resume_headroom, max(1, ledger.capacity // HEADROOM_PART))


def asking(s: Session, facts: Facts) -> Asking:
    """Return what a session that waits (or would) asks for.

    Kept with the session. What is kept is true: whoever changes what :func:`_needs` reads of the
    session calls :meth:`Facts.touch` (:meth:`Facts.change` does), which drops it, and whatever
    :func:`_needs` and :func:`_impossible` read of devices and rules raises :attr:`Facts.version`.
    """
    found: Asking | None = s.asking
    if found is None or found.version != facts.version:
        needs = _needs(s, facts)
        size = 0
        for need in needs:
            size += min(need.least, s.request.limit)
        charge = size, len(needs), 1
        free = not facts.settings.quotas or facts.limit(s.owner.name) is NO_LIMIT
        where = (needs[0].fixed, needs[0].model) if free and len(needs) == 1 else None
        found = Asking(needs, charge, _impossible(needs, facts), where, facts.version)
        s.asking = found
    return found


def _needs(s: Session, facts: Facts) -> tuple[Need, ...]:
    """Return what ``s`` needs to be attached, in the order in which it sees its devices."""
    memory, devices = s.request.memory, facts.devices
    if not s.suspended:
        if s.bound:
            return tuple(_bound(memory, devices[uuid], s) for uuid in s.bound)
        return (Need(memory, memory),) * s.request.devices
    found = []
    for x in s.suspended:
        ledger = devices[x.device]
        # Where nothing enforces its slice, it may have had more than the pool has to give: of what
        # the driver may take, or the admin keeps.
        held = min(x.bytes, ledger.capacity) if ledger.capacity else x.bytes
        least = max(memory, held)
        moves = ledger.device.can_migrate and (not s.immovable or bool(ledger.drained))
        wanted = x.bytes + headroom(ledger, facts.settings)
        most = _most(ledger, devices.values(), wanted, moves=moves)
        found.append(
            Need(
                least=least,
                bytes=max(least, min(wanted, most)),
                origin=x.device,
                fixed="" if moves else x.device,
                model=ledger.device.model if moves else None,
            )
        )
    if len(found) > 1 and not _fit(found, devices):
        return _in_place(found, devices) or tuple(found)
    return tuple(found)


def _bound(memory: int, ledger: Ledger, s: Session) -> Need:
    """Return what a session needs in the place of a device that its processes have looked at.

    Any of the model where they can be moved to it with their first context, else that device.
    """
    if s.lands and ledger.device.landing_bytes and not s.immovable:
        return Need(memory, memory, model=ledger.device.model)
    return Need(memory, memory, fixed=ledger.device.uuid)


def _most(origin: Ledger, devices: Iterable[Ledger], enough: int, *, moves: bool) -> int:
    """Return the most that the pool has on a device which state from ``origin`` can go to.

    Or what it has on ``origin``, if that is ``enough``. A display server, say, takes a little of a
    device all the time. State that fills the rest came from there, and must not wait for headroom
    that no device has.
    """
    own = origin.capacity - origin.foreign
    if not moves or (not origin.drained and own >= enough):
        return own
    others = [
        d.capacity - d.foreign
        for d in devices
        if d.device.model == origin.device.model and d.device.can_migrate and not d.drained
    ]
    return max(others or [own])


def _fit(needs: Sequence[Need], devices: Mapping[str, Ledger]) -> bool:
    """Return whether devices that only others outside the pool use have room for all of these."""

    def room(d: Ledger) -> int:
        return d.capacity - d.foreign

    return choose(needs, devices, room) is not None


def _in_place(needs: Sequence[Need], devices: Mapping[str, Ledger]) -> tuple[Need, ...] | None:
    """Return needs that ask for no more on the devices they come from than there is; None if
    these lack room for the state itself.

    The roomiest device is there for one slice only: several that all ask for the headroom that
    only it has, beside the memory that others use on the GPUs, would wait without end.
    """
    found = []
    for need in needs:
        ledger = devices[need.origin]
        own = ledger.capacity - ledger.foreign
        if ledger.drained or own < need.least:
            return None
        found.append(replace(need, at_origin=min(need.bytes, own)))
    return tuple(found)


def _impossible(needs: Sequence[Need], facts: Facts) -> Reason | None:
    """Return why not even an empty pool could serve ``needs`` at present, or None."""
    ledgers = facts.devices.values()
    for need in needs:
        if need.fixed:
            ledger = facts.devices[need.fixed]
            if ledger.paused:
                return Reason("paused", text=ledger.paused)
            if ledger.fault:
                return Reason("drained", devices=(need.fixed,), text=ledger.fault)
    used: set[str] = set()
    for at in in_turn(needs):
        need, outside = needs[at], False
        for ledger in ledgers:
            if ledger.device.uuid in used or not need.allows(ledger):
                continue
            if ledger.capacity - ledger.foreign - ledger.overuse >= need.amount(ledger):
                used.add(ledger.device.uuid)
                break
            outside = True
        else:
            if outside:
                return Reason("foreign", bytes=need.least)
            paused = next((d.paused for d in ledgers if d.paused and need.suits(d)), "")
            return Reason("paused", text=paused) if paused else Reason("nowhere", count=len(needs))
    return None


def ever(request: Request, s: Session, facts: Facts) -> Refusal | None:
    """Return why ``request`` of ``s`` can never be met, by the rules or for want of a device."""
    refusal = never(request, s.owner, facts.settings, facts.capacities, suspends=facts.suspends)
    if refusal is None and s.bound and not (s.lease.slices or s.suspended):
        refusal = _never_there(request, s, facts)
    return refusal


def _never_there(request: Request, s: Session, facts: Facts) -> Refusal | None:
    """Return why no device that the processes of ``s`` can use will ever do, or None.

    Without a lease: what is attached or suspended stays with the device of its state.
    """
    needs = _needs(s, facts)
    for need in needs:
        fit = sorted(
            d.capacity
            for d in facts.devices.values()
            if need.fixed == d.device.uuid or need.model == d.device.model
        )
        count = sum((n.fixed, n.model) == (need.fixed, need.model) for n in needs)
        if len(fit) >= count and 0 < fit[-count] < request.memory:
            model = facts.devices[need.fixed].device.model if need.fixed else need.model
            return never_there(request, str(model), fit[-count], count, fixed=bool(need.fixed))
    return None
