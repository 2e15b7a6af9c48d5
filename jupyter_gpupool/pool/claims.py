# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the head of the queue, the first blocked session, keeps from those behind it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .inventory import NOTHING
from .lease import Session
from .placement import charge_of, in_turn
from .yielding import WhatIf, host_room, score

if TYPE_CHECKING:
    from .books import Books


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


def make_claim(books: Books, s: Session, old: Claim | None) -> Claim:
    """Return the claim of the head ``s``: its old one, grown if it is time to."""
    now, ageing = books.now, max(1.0, books.settings.ageing)
    needs = s.needs
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
    charge = charge_of(s.request, needs)
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
            if v.id not in what.chosen and what.fits(v):
                what.add([v])
                missing -= ledger.leases[v.id]
    return list(what.chosen.values())
