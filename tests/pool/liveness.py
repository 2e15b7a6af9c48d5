# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""No session waits while a feasible plan exists that harms nobody: found by brute force.

A plan for a waiting session is a set of idle leases that may be taken (possibly none) and a place
for each of its slices. It is feasible if the places have the bytes once the suspends under way and
those of the set are done, host memory has room for the set, and no quota is exceeded. It harms
nobody if it takes nothing that was promised to another plan under way, nothing on the devices that
the head of the queue claims except what ``spare`` allows (which has its own brute-force test), no
host memory and no quota that the head is going to need.
"""

from __future__ import annotations

from itertools import chain, combinations, permutations
from typing import Sequence

from jupyter_gpupool.pool.growth import SETTLE
from jupyter_gpupool.pool.lease import Session
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Slice
from jupyter_gpupool.pool.placement import spare
from jupyter_gpupool.pool.policy import Plan
from jupyter_gpupool.pool.yielding import stays_until

from .naive import Naive

#: Larger pools have too many subsets.
MOST_IDLE = 6


def check_liveness(pool: Pool, naive: Naive) -> None:
    books = pool._books
    if not len(books.order):
        return
    settings, now = naive.settings, books.now
    idle = [
        s
        for s in books.sessions.values()
        if s.state == "idle"
        and now >= s.idle_since + settings.reclaim_after
        and now >= s.keep_until
        and now >= s.retry_at
        and now >= naive.stays_until(naive.sessions[s.id])
        and now >= stays_until(s, books)
        and not (s.pinned_reason and now < s.pinned_at + settings.pinned_retry)
        and _can_suspend(naive, s)
        and not (s.id in naive.pressed and _bound(naive, s))
    ]
    if len(idle) > MOST_IDLE:
        return
    _check_growth(pool, naive)
    head = books.open.first()
    first_of: set[str] = set()
    for entry in books.order:
        s = books.sessions[entry[4]]
        owner = s.owner.name
        blocked_before = owner in first_of
        if s.lane == "quota":
            first_of.add(owner)
        if s.lane in ("later", "planned") or blocked_before:
            if s.lane == "planned":
                _check_plan(pool, s)
            continue
        behind = head is not None and entry > head
        for group in chain.from_iterable(combinations(idle, n) for n in range(len(idle) + 1)):
            places = _feasible(pool, naive, s, group, behind=behind)
            assert not places, (
                f"{s.id} ({s.lane}, {s.why}) waits, but could go to {places} "
                f"after {[v.id for v in group]} yield"
            )


def _check_growth(pool: Pool, naive: Naive) -> None:
    """While somebody waits, nobody keeps grown bytes that a sample has shown to be unused."""
    if all(pool._books.sessions[entry[4]].lane == "later" for entry in pool._books.order):
        return
    for name, n in naive.sessions.items():
        for uuid, size in n.lease.items():
            known = n.sampled.get(uuid, float("-inf")) >= n.grown_at + SETTLE
            if known and n.state in ("active", "idle") and n.grown_at > float("-inf"):
                used = max(n.request.memory, n.footprints[uuid])
                assert size <= used, f"{name} keeps {size} on {uuid} and uses {used}"


def _check_plan(pool: Pool, s: Session) -> None:
    """A plan under way waits for something that is under way."""
    books = pool._books
    assert s.plan is not None
    assert any(v.state == "detaching" for v in books.sessions.values()), f"{s.id}: {s.plan}"


def _can_suspend(naive: Naive, s: Session) -> bool:
    known = s.sampled_at >= s.idle_since and all(x.device in s.footprints for x in s.slices)
    if known and not any(s.footprints.values()):
        return True
    return all(naive.devices[x.device].can_suspend for x in s.slices)


def _bound(naive: Naive, s: Session) -> int:
    n = naive.sessions[s.id]
    known = n.sampled_at >= n.idle_since and set(n.lease) <= set(n.footprints)
    used = sum(n.footprints.values())
    return used if known else max(used, sum(n.lease.values()))


def _feasible(
    pool: Pool, naive: Naive, s: Session, group: tuple[Session, ...], *, behind: bool
) -> tuple[str, ...] | None:
    books, settings = pool._books, naive.settings
    claim = books.claim if behind else None
    n = naive.sessions[s.id]
    freed: dict[str, int] = {}
    for v in group:
        for x in v.slices:
            freed[x.device] = freed.get(x.device, 0) + x.bytes
    # host memory
    if group:
        need = sum(_bound(naive, v) for v in group)
        room = settings.host_memory - naive.host_used()
        available, taken = books.host._available, books.host._taken
        if available is not None:
            room = min(room, available - taken)
        if claim is not None:
            short = sorted(
                max(0, wanted - books.inventory[u].expect) for u, wanted in claim.wanted.items()
            )
            room -= sum(short[: claim.devices])
        if need > max(0, room):
            return None
        for owner in {v.owner.name for v in group}:
            limit = naive.quota(owner).suspended
            have = sum(sum(o.suspended.values()) + o.host for o in naive.of(owner))
            more = sum(_bound(naive, v) for v in group if v.owner.name == owner)
            if limit is not None and more and have + more > limit:
                return None
    # quota
    if n.suspended:
        count = len(n.suspended)
    else:
        count = len(n.bound) or n.request.devices
    if not _quota(pool, naive, s, group, count, claim is not None):
        return None
    # places
    needs = []
    if n.suspended:
        for origin, size in n.suspended.items():
            needs.append((max(size, n.request.memory), size, origin))
    else:
        needs = [(n.request.memory, 0, "")] * count
    for places in permutations(sorted(naive.devices), count):
        if n.bound and not n.suspended and places != n.bound:
            continue
        if all(_place(pool, naive, u, *need, freed, claim) for u, need in zip(places, needs)):  # noqa: B905
            return places
    return None


def _place(pool, naive, uuid, least, size, origin, freed, claim) -> bool:
    if uuid in naive.drained:
        return False
    device = naive.devices[uuid]
    if origin and uuid != origin:
        old = naive.devices[origin]
        if old.model != device.model or not (old.can_migrate and device.can_migrate):
            return False
    ledger = pool._books.inventory[uuid]
    want = least
    if size or origin:
        want = max(least, size + naive.settings.resume_headroom)
        if want > ledger.capacity:
            want = max(least, ledger.capacity)
    if claim is not None and uuid in claim.wanted:
        return min(ledger.avail, spare(ledger, claim.wanted[uuid])) >= want
    leaving = sum(s.lease.get(uuid, 0) for s in naive.sessions.values() if s.state == "detaching")
    room = naive.free(uuid) - ledger.overuse - ledger.reserved + leaving + freed.get(uuid, 0)
    return room >= want


def _quota(pool, naive, s, group, count, behind) -> bool:
    owner = s.owner.name
    limit = naive.quota(owner)
    books = pool._books
    own = naive.of(owner)
    leaving = {v.id for v in group if v.owner.name == owner}
    memory = devices = leases = 0
    for name, o in naive.sessions.items():
        if o.owner.name == owner and name not in leaving and o.state != "detaching":
            memory += naive.charge(o)
            devices += len(o.lease)
            leases += bool(o.lease)
    for other in books.sessions.values():
        if other.owner.name == owner and other.plan is not None:
            memory += other.plan.charge
            devices += other.plan.devices
            leases += other.plan.leases
    claim = books.claim
    if claim is not None and claim.owner == owner and claim.session != s.id:
        memory += claim.charge
        devices += claim.devices
        leases += 1
    del own, behind
    n = naive.sessions[s.id]
    sizes = [max(size, n.request.memory) for size in n.suspended.values()]
    charge = sum(min(size, n.request.limit) for size in sizes or [n.request.memory] * count)
    return (
        (limit.memory is None or memory + charge <= limit.memory)
        and (limit.devices is None or devices + count <= limit.devices)
        and (limit.leases is None or leases + 1 <= limit.leases)
    )


def watch_order(pool: Pool) -> None:
    """Let every grant of ``pool`` prove that it does not delay the head of the queue.

    Whoever is behind the head and gets (or is promised) bytes on a device that the head claims must
    leave the head as well off in every order in which the leases there may end. To keep a promise
    needs no proof: it was given before.
    """
    books = pool._books
    grant, resize = books.grant, books.resize
    begin_plan, drop_plan = books.begin_plan, books.drop_plan
    kept: tuple[str, int] = ("", 0)

    def prove(s: Session, takes: dict[str, int]) -> None:
        claim = books.claim
        head = books.open.first()
        if claim is None or head is None or claim.session != head[4] or s.id == claim.session:
            return
        if s.entry is not None and s.entry < head:
            return
        for uuid, more in takes.items():
            wanted = claim.wanted.get(uuid)
            if wanted is None or more <= 0:
                continue
            ledger = books.inventory[uuid]
            # Its own promise, if it had one, is not counted twice.
            avail = ledger.avail + sum(
                x.bytes for x in (s.plan.takes if s.plan else ()) if x.device == uuid
            )
            others = [size for name, size in ledger.leases.items() if name != s.id]
            for group in chain.from_iterable(
                combinations(others, n) for n in range(len(others) + 1)
            ):
                if avail + sum(group) >= wanted:
                    assert avail - more + sum(group) >= wanted, (
                        f"{s.id} gets {more} on {uuid}: {head[4]} claims {wanted} of {avail} "
                        f"free, leases {others}"
                    )

    def proven_grant(s: Session, takes: Sequence[Slice], reason: str) -> None:
        if kept != (s.id, len(books.actions)):
            prove(s, {x.device: x.bytes for x in takes})
        grant(s, takes, reason)

    def proven_resize(s: Session, slices: Sequence[Slice]) -> None:
        held = {x.device: x.bytes for x in s.slices}
        if kept != (s.id, len(books.actions)):
            prove(s, {x.device: x.bytes - held[x.device] for x in slices})
        resize(s, slices)

    def proven_plan(s: Session, plan: Plan) -> None:
        prove(s, {x.device: x.bytes for x in plan.takes})
        begin_plan(s, plan)

    def noted_drop(s: Session) -> None:
        nonlocal kept
        if s.plan is not None:
            kept = (s.id, len(books.actions))
        drop_plan(s)

    books.grant, books.resize = proven_grant, proven_resize  # type: ignore[method-assign]
    books.begin_plan, books.drop_plan = proven_plan, noted_drop  # type: ignore[method-assign]
