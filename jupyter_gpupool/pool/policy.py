# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whom to serve, and who yields: plans, tried on paper first. Nothing here changes the books.

A waiting session is served by the first of these that works:

1. its owner's quota allows one more lease, if need be after idle leases *of that owner* yield;
2. it fits in what is free: attach now;
3. it fits once suspends under way are done: wait for them, with the bytes reserved;
4. it fits if idle leases yield, the largest (bytes x idle time) first and no more than needed, as
   far as host memory and their owners' quotas of suspended state have room: suspend them;
5. otherwise it is blocked and stays in the queue.

The first blocked session in the queue is the *head*. It claims devices (:mod:`.claims`), and
whoever comes behind it is served only from what the claim leaves: other devices, or bytes on a
claimed one that :func:`~.placement.spare` proves harmless; and a suspend for those behind leaves
the host memory and the owner's quota that the head is still going to need.

What others have grown and do not use has been taken back before any of these but the first two
(:mod:`.growth`). Seams: time slices add active holders whose quantum is over, as the last kind of
victims; fair share changes only :mod:`.queue`; schedules are ``SettingsChanged``
events and change nothing here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from .inventory import NOTHING, DeviceLedger
from .lease import Session
from .model import Slice
from .placement import Need, charge_of, in_turn, place_now
from .quota import Usage
from .yielding import WhatIf, host_room, score

if TYPE_CHECKING:
    from .books import Books

#: With up to so many idle leases to choose from, every combination is tried when host memory is
#: too short for the usual choice; with more, only the one that frees the most per host byte.
EXACT = 6


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes to take for a session once ``victims`` (and suspends under way) have yielded."""

    takes: tuple[Slice, ...]
    victims: tuple[str, ...]
    #: Nothing has to happen first.
    ready: bool
    #: What the owner's quota is charged: bytes, devices, leases.
    charge: int
    devices: int
    leases: int
    #: Why the victims are suspended.
    reason: str = "another kernel waits for memory"


@dataclass(frozen=True, slots=True)
class Blocked:
    """No plan: the lane to wait in, and why as (code, figures...)."""

    lane: str
    why: tuple[Any, ...]
    #: More host memory might have helped.
    host: bool = False


def plan_attach(
    books: Books,
    s: Session,
    claimed: Mapping[str, int],
    *,
    guarded: bool,
    only: Mapping[str, DeviceLedger] | None = None,
) -> Plan | Blocked:
    """Return how waiting ``s`` can be served.

    ``claimed`` are the devices that it must leave to the head of the queue; ``guarded`` that it is
    behind the head (which must then also keep its host memory); ``only`` these devices are worth
    a look, since on all others nothing has come free since the last one.
    """
    inventory = books.inventory
    needs = s.needs
    if len(needs) > 1:
        # The other devices may have had room all the time.
        only = None
    stuck = _impossible(books, needs) if only is None else None
    if stuck is not None:
        return Blocked("nowhere", stuck)
    owner = s.owner.name
    charge = charge_of(s.request, needs)
    what = WhatIf(books, host_room(books, guarded=guarded))
    reason = "another kernel waits for memory"
    less = promised(books, s)
    lacking = books.quotas.lacking(owner, charge, len(needs), 1, less)
    own: list[Session] | None = []
    if lacking is not None:
        own = _own_victims(books, what, s, charge, len(needs), less=less)
        what.add(own or ())
        reason = "another kernel of the same owner waits and the owner's quota is in use"
    else:
        takes = place_now(s, needs, inventory, claimed, only)
        if takes is not None:
            return Plan(takes, (), True, charge, len(needs), 1)
    placed = own is not None and what.place(s, needs, claimed, only=only)
    if not placed and what.host_short:
        other = _any_combination(books, s, needs, claimed, guarded=guarded)
        placed, what = other is not None, other or what
    if placed:
        return Plan(what.takes, tuple(what.chosen), False, charge, len(needs), 1, reason)
    if own is None and lacking is not None:
        if what.host_short:
            return Blocked("quota", ("host",), True)
        return Blocked("quota", ("quota", *lacking, len(books.leased.get(owner, ()))))
    if guarded and place_now(s, needs, inventory, {}) is not None:
        return Blocked("open", ("behind",), what.host_short)
    if what.host_short:
        return Blocked("open", ("host",), True)
    return Blocked("open", ("busy", s.request.memory, len(needs)))


def _any_combination(
    books: Books, s: Session, needs: Sequence[Need], claimed: Mapping[str, int], *, guarded: bool
) -> WhatIf | None:
    """Return the smallest set of idle leases that makes room, if there are few to choose from."""
    owner = s.owner.name
    charge = charge_of(s.request, needs)
    options = {v.id: v for v in books.leased.get(owner, {}).values() if v.yieldable}
    for ledger in books.inventory.by_pot(-NOTHING):
        if ledger.device.uuid not in claimed and any(n.allows(ledger) for n in needs):
            options.update(ledger.idle)
        if len(options) > EXACT:
            return None
    room = host_room(books, guarded=guarded)
    for count in range(1, len(options) + 1):
        for group in combinations(options.values(), count):
            what = WhatIf(books, room)
            if what.fit_together(group):
                less = promised(books, s)
                count_leaving(books, owner, less)
                for v in group:
                    if v.owner.name == owner:
                        _count(less, v, 1)
                if books.quotas.lacking(owner, charge, len(needs), 1, less) is None:
                    what.add(group)
                    if what.place(s, needs, claimed, more=False):
                        return what
    return None


def plan_growth(books: Books, s: Session) -> Plan | Blocked:
    """Return how an attached session can get what it asks for beyond what it has."""
    claimed = books.claim.wanted if books.claim is not None else {}
    memory = s.request.memory
    more = tuple(Need(d, d, fixed=x.device) for x in s.slices if (d := memory - x.bytes) > 0)
    grown = tuple(Slice(x.device, max(x.bytes, memory)) for x in s.slices)
    charge = s.charge_of(grown) - s.charge
    lacking = books.quotas.lacking(s.owner.name, charge, 0, 0)
    if lacking is not None:
        return Blocked("", ("quota", *lacking, len(books.leased[s.owner.name])))
    takes = place_now(s, more, books.inventory, claimed)
    if takes is not None:
        return Plan(takes, (), True, charge, 0, 0)
    what = WhatIf(books, host_room(books, guarded=True))
    if what.place(s, more, claimed):
        return Plan(what.takes, tuple(what.chosen), False, charge, 0, 0)
    return Blocked("", ("busy", s.request.memory, len(s.slices)))


def _impossible(books: Books, needs: Sequence[Need]) -> tuple[Any, ...] | None:
    """Return why not even an empty pool could serve ``needs`` at present, or None."""
    ledgers = books.inventory.devices.values()
    distinct: set[str] = set()
    for need in needs:
        if need.fixed:
            ledger = books.inventory.placeholder(need.fixed)
            if ledger.paused:
                return "paused", ledger.paused
            if ledger.drained:
                return "drained", ledger.device.name, ledger.drained
    for at in in_turn(needs):
        need = needs[at]
        outside = False
        for ledger in ledgers:
            if ledger.device.uuid in distinct or not need.allows(ledger):
                continue
            if ledger.capacity - ledger.foreign - ledger.overuse >= need.amount(ledger):
                distinct.add(ledger.device.uuid)
                break
            outside = True
        else:
            paused = next((d.paused for d in ledgers if d.paused and need.suits(d)), "")
            if paused and not outside:
                return "paused", paused
            return ("foreign", need.least) if outside else ("nowhere", len(needs))
    return None


def _own_victims(
    books: Books, what: WhatIf, s: Session, charge: int, devices: int, *, less: Usage
) -> list[Session] | None:
    """Return which of the owner's own idle leases must yield so that its quota suffices.

    ``less`` is changed: it ends as what comes back when those, and suspends under way, are done.
    """
    owner = s.owner.name
    count_leaving(books, owner, less)
    if books.quotas.lacking(owner, charge, devices, 1, less) is None:
        return []
    found: list[Session] = []
    options = sorted(
        (v for v in books.leased.get(owner, {}).values() if v.yieldable),
        key=lambda v: score(v, books.now),
    )
    for v in options:
        if not what.fit_together([*found, v]):
            what.host_short = True
            continue
        found.append(v)
        _count(less, v, 1)
        if books.quotas.lacking(owner, charge, devices, 1, less) is None:
            break
    else:
        return None
    for v in reversed(found[:-1]):
        _count(less, v, -1)
        if books.quotas.lacking(owner, charge, devices, 1, less) is None:
            found.remove(v)
        else:
            _count(less, v, 1)
    return found


def promised(books: Books, s: Session) -> Usage:
    """Return what the owner is already charged for ``s`` itself, as the head or by its plan."""
    usage = Usage()
    claim, plan = books.claim, s.plan
    if claim is not None and claim.session == s.id:
        usage.memory, usage.devices, usage.leases = claim.charge, claim.devices, 1
    elif plan is not None:
        usage.memory, usage.devices, usage.leases = plan.charge, plan.devices, plan.leases
    return usage


def count_leaving(books: Books, owner: str, usage: Usage) -> None:
    """Add to ``usage`` what the owner gets back when suspends under way are done."""
    for v in books.leased.get(owner, {}).values():
        if v.state == "detaching":
            _count(usage, v, 1)


def _count(usage: Usage, v: Session, sign: int) -> None:
    usage.memory += sign * v.charge
    usage.devices += sign * len(v.slices)
    usage.leases += sign
