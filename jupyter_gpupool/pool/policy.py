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

The first blocked session in the queue is the *head*. It claims devices (:class:`Claim`), and
whoever comes behind it is served only from what the claim leaves: other devices, or bytes on a
claimed one that :func:`~.placement.spare` proves harmless; and a suspend for those behind leaves
the host memory and the owner's quota that the head is still going to need.

Seams: bursts above the guarantee yield before idle leases (a second kind of victim in
``WhatIf.victims``, whose remedy is ``Resize``); time slices add active holders whose quantum is
over, as the last kind; fair share changes only :mod:`.queue`; schedules are ``SettingsChanged``
events and change nothing here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Iterable, Sequence

from .inventory import DeviceLedger
from .lease import Session
from .model import Slice
from .placement import Need, in_turn, needs_of, place_now, preferred
from .quota import Usage

if TYPE_CHECKING:
    from .books import Books

#: Devices considered for one need when idle leases must yield: those with the most to give.
WIDTH = 16
#: With up to so many idle leases to choose from, every combination is tried when host memory is
#: too short for the usual choice; with more, only the one that frees the most per host byte.
EXACT = 6
#: Less than any device can have, however much foreign processes use.
NOTHING = 1 << 62


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


@dataclass(frozen=True, slots=True)
class Claim:
    """What the head of the queue accumulates memory on.

    The claim begins with the devices where the least is missing. Nobody behind the head gets bytes
    there that it could use, so they only ever become more while those who are there leave. After
    ``ageing`` seconds the head also *accumulates*: idle leases on claimed devices yield although
    that alone is not enough (else two sessions in turns would keep it out for ever), and for each
    further ``ageing`` seconds one more device is claimed, in case a lease on the first never ends.
    """

    session: str
    owner: str
    charge: int
    devices: int
    #: Bytes wanted by device.
    wanted: dict[str, int]
    #: When it became the head, and when the claim next grows.
    since: float
    next_at: float


# --------------------------------------------------------------------------- who may yield


def empty(s: Session) -> bool:
    """Return whether it is known to hold no device memory (measured since it became idle)."""
    return (
        s.sampled_at >= s.idle_since
        and len(s.footprints) >= len(s.slices)
        and not any(s.footprints.values())
    )


def suspendable(s: Session, books: Books) -> bool:
    """Return whether suspending an idle session can work at all.

    On a device that can not suspend, only a lease that is known to hold nothing can be taken
    back: there is nothing to move. Anything else stays until its kernel frees it or ends.
    """
    devices = books.inventory.devices
    return all(devices[x.device].device.can_suspend for x in s.slices) or empty(s)


def _not_before(s: Session, books: Books) -> float:
    if not suspendable(s, books):
        return math.inf
    at = s.retry_at
    if s.pinned_reason:
        at = max(at, s.pinned_at + books.settings.pinned_retry)
    return at


def yield_at(s: Session, books: Books) -> float:
    """Return from when on a waiting session may take the lease of idle ``s``."""
    return max(_not_before(s, books), s.idle_since + books.settings.reclaim_after, s.keep_until)


def timeout_at(s: Session, books: Books) -> float:
    """Return when idle ``s`` gives its lease back on its own."""
    if s.release_asked:
        return _not_before(s, books)
    return max(_not_before(s, books), s.idle_since + books.settings.idle_timeout, s.keep_until)


def host_bound(s: Session) -> int:
    """Return the host bytes that suspending ``s`` may take.

    What was measured since it became idle; without such a measurement, what it was granted (or
    the older measurement, if that is more).
    """
    if s.sampled_at >= s.idle_since and len(s.footprints) >= len(s.slices):
        return s.footprint
    return max(s.granted, s.footprint)


def score(s: Session, now: float) -> tuple[float, int, str]:
    """Return the order in which idle leases yield, smallest first: most bytes x idle time."""
    return -s.granted * (now - s.idle_since), -s.granted, s.id


def host_room(books: Books, claimed: Iterable[str] = (), *, guarded: bool) -> int:
    """Return the host bytes that a suspend may take now.

    ``guarded``: less what the head of the queue is still going to need, unless all devices in
    ``claimed`` (where bytes come free) are its own.
    """
    room = books.host.room
    claim = books.claim
    if guarded and claim is not None:
        freed = set(claimed)
        if not freed or not freed <= claim.wanted.keys():
            devices = books.inventory.devices
            # The claim may have grown beyond what is needed: count the cheapest devices only.
            missing = sorted(max(0, n - devices[u].expect) for u, n in claim.wanted.items())
            room -= sum(missing[: claim.devices])
    return room


# --------------------------------------------------------------------------- on paper


class WhatIf:
    """Which idle leases would have to yield; a copy of the few figures that this changes."""

    def __init__(self, books: Books, room: int) -> None:
        self._books = books
        self._now = books.now
        self.room = room
        self.chosen: dict[str, Session] = {}
        self._freed: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        #: A choice failed for want of host memory, not of idle leases.
        self.host_short = False

    def add(self, victims: Iterable[Session]) -> None:
        """Let ``victims`` yield."""
        for v in victims:
            self.chosen[v.id] = v
            bound = host_bound(v)
            self.room -= bound
            self._by_owner[v.owner.name] = self._by_owner.get(v.owner.name, 0) + bound
            for x in v.slices:
                self._freed[x.device] = self._freed.get(x.device, 0) + x.bytes

    def expect(self, ledger: DeviceLedger) -> int:
        """Return the bytes that come free there without more victims."""
        return ledger.expect + self._freed.get(ledger.device.uuid, 0)

    def victims(self, ledger: DeviceLedger, missing: int, spared: str) -> list[Session] | None:
        """Return the idle leases on a device that free ``missing`` bytes there, or None."""
        uuid = ledger.device.uuid
        options = sorted(
            (v for v in ledger.idle.values() if v.id not in self.chosen and v.id != spared),
            key=lambda v: score(v, self._now),
        )
        size = {v.id: ledger.leases[v.id] for v in options}
        if sum(size.values()) < missing:
            return None
        found = self._greedy(options, missing, size)
        if found is None:
            # Short of host memory: what frees the most for the least.
            self.host_short = True
            cheap = sorted(options, key=lambda v: (host_bound(v) / (size[v.id] or 1), v.id))
            found = self._greedy(cheap, missing, size)
        assert found is None or all(uuid in {x.device for x in v.slices} for v in found)
        return found

    def fits(self, victims: Sequence[Session]) -> bool:
        """Return whether the state of ``victims`` has room besides that of those chosen."""
        total = 0
        owners: dict[str, int] = {}
        for v in victims:
            bound = host_bound(v)
            total += bound
            owners[v.owner.name] = owners.get(v.owner.name, 0) + bound
        if total > max(0, self.room):
            return False
        for owner, size in owners.items():
            most = self._books.quotas.suspend_room(owner)
            if most is not None and size and self._by_owner.get(owner, 0) + size > most:
                return False
        return True

    def _greedy(
        self, options: Sequence[Session], missing: int, size: dict[str, int]
    ) -> list[Session] | None:
        found: list[Session] = []
        total = 0
        for v in options:
            if self.fits([*found, v]):
                found.append(v)
                total += size[v.id]
                if total >= missing:
                    break
        else:
            return None
        for v in reversed(found[:-1]):
            if total - size[v.id] >= missing:
                found.remove(v)
                total -= size[v.id]
        return found

    def place(
        self, s: Session, needs: Sequence[Need], claimed: Iterable[str], *, more: bool = True
    ) -> bool:
        """Choose a device for every need, with ``more`` victims if needed; fill :attr:`takes`."""
        closed = set(claimed)
        last = preferred(s)
        takes: dict[int, Slice] = {}
        used: set[str] = set()
        for at in in_turn(needs):
            need = needs[at]
            best: tuple[tuple[Any, ...], DeviceLedger, list[Session]] | None = None
            for ledger in self._options(need, used, closed):
                amount = need.amount(ledger)
                missing = amount - self.expect(ledger)
                found: list[Session] | None = []
                if missing > 0:
                    found = self.victims(ledger, missing, s.id) if more else None
                if found is None:
                    continue
                order = (
                    bool(found),
                    ledger.device.uuid not in last,
                    score(found[0], self._now)[0] if found else self.expect(ledger),
                    ledger.device.index,
                )
                if best is None or order < best[0]:
                    best = order, ledger, found
            if best is None:
                return False
            _, ledger, found = best
            self.add(found)
            used.add(ledger.device.uuid)
            takes[at] = Slice(ledger.device.uuid, need.amount(ledger))
        self.takes = tuple(takes[at] for at in range(len(needs)))
        return True

    def _options(self, need: Need, used: set[str], closed: set[str]) -> list[DeviceLedger]:
        inventory = self._books.inventory
        if need.fixed:
            ledgers: Iterable[DeviceLedger] = [inventory.placeholder(need.fixed)]
        else:
            ledgers = inventory.by_pot(need.least)
        found: list[DeviceLedger] = []
        for ledger in ledgers:
            uuid = ledger.device.uuid
            if uuid in used or uuid in closed or not need.allows(ledger):
                continue
            if self.expect(ledger) + ledger.yieldable >= need.amount(ledger):
                found.append(ledger)
                if len(found) == WIDTH:
                    break
        return found


def plan_attach(
    books: Books, s: Session, claimed: dict[str, int], *, guarded: bool
) -> Plan | Blocked:
    """Return how waiting ``s`` can be served.

    ``claimed`` are the devices that it must leave to the head of the queue; ``guarded`` that it is
    behind the head (which must then also keep its host memory).
    """
    inventory = books.inventory
    needs = needs_of(s, inventory, books.settings)
    stuck = _impossible(books, needs)
    if stuck is not None:
        return Blocked("nowhere", stuck)
    owner = s.owner.name
    charge = s.request.memory * len(needs)
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
        takes = place_now(s, needs, inventory, claimed)
        if takes is not None:
            return Plan(takes, (), True, charge, len(needs), 1)
    placed = own is not None and what.place(s, needs, claimed)
    if not placed and what.host_short:
        other = _any_combination(books, s, needs, claimed, guarded=guarded)
        placed, what = other is not None, other or what
    if placed:
        return Plan(what.takes, tuple(what.chosen), False, charge, len(needs), 1, reason)
    if own is None and lacking is not None:
        return Blocked("quota", ("quota", *lacking, len(books.leased.get(owner, ()))))
    if guarded and place_now(s, needs, inventory, {}) is not None:
        return Blocked("open", ("behind",))
    if what.host_short:
        return Blocked("open", ("host",))
    return Blocked("open", ("busy", s.request.memory, len(needs)))


def _any_combination(
    books: Books, s: Session, needs: Sequence[Need], claimed: dict[str, int], *, guarded: bool
) -> WhatIf | None:
    """Return the smallest set of idle leases that makes room, if there are few to choose from."""
    owner = s.owner.name
    charge = s.request.memory * len(needs)
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
            if what.fits(group):
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
    more = tuple(
        Need(d, d, fixed=x.device) for x in s.slices if (d := s.request.memory - x.bytes) > 0
    )
    charge = s.request.memory * len(s.slices) - s.charge
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
        if not what.fits([*found, v]):
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


def make_claim(books: Books, s: Session, old: Claim | None) -> Claim:
    """Return the claim of the head ``s``: its old one, grown if it is time to."""
    now, ageing = books.now, max(1.0, books.settings.ageing)
    needs = needs_of(s, books.inventory, books.settings)
    since = s.head_since if s.head_since is not None else now
    rounds = int((now - since) / ageing)
    while since + (rounds + 1) * ageing <= now:
        rounds += 1
    count = len(needs) + max(0, rounds - 1)
    devices = books.inventory.devices
    wanted: dict[str, int] = {}
    if old is not None:
        for uuid in old.wanted:
            amounts = [n.amount(devices[uuid]) for n in needs if n.allows(devices[uuid])]
            if amounts:
                wanted[uuid] = max(amounts)
    for need in (needs[at] for at in in_turn(needs) if needs[at].fixed):
        wanted.setdefault(need.fixed, need.amount(devices[need.fixed]))
    more = False
    for ledger in books.inventory.by_pot(-NOTHING):
        uuid = ledger.device.uuid
        if uuid in wanted:
            continue
        room = ledger.capacity - ledger.foreign - ledger.overuse
        amounts = [n.amount(ledger) for n in needs if n.allows(ledger) and n.amount(ledger) <= room]
        if not amounts:
            continue
        if len(wanted) >= count:
            more = True
            break
        wanted[uuid] = max(amounts)
    next_at = since + (rounds + 1) * ageing if more or rounds < 1 else math.inf
    charge = s.request.memory * len(needs)
    return Claim(s.id, s.owner.name, charge, len(needs), wanted, since, next_at)


def accumulates(books: Books, claim: Claim) -> list[Session]:
    """Return the idle leases that yield to an old claim although that is not enough yet."""
    if books.now < claim.since + max(1.0, books.settings.ageing):
        return []
    what = WhatIf(books, host_room(books, guarded=False))
    for uuid, wanted in claim.wanted.items():
        ledger = books.inventory[uuid]
        missing = wanted - what.expect(ledger)
        options = sorted(ledger.idle.values(), key=lambda v: score(v, books.now))
        for v in options:
            if missing <= 0:
                break
            if v.id not in what.chosen and what.fits([v]):
                what.add([v])
                missing -= ledger.leases[v.id]
    return list(what.chosen.values())
