# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Do the accounts agree? ``everything`` recomputes them all; ``cheap`` looks at the totals."""

from __future__ import annotations

from .books import Books
from .lease import ATTACHED, HAS_LEASE, Session
from .yielding import stays_until, yield_at


def _story(s: Session) -> str:
    return "; ".join(s.story_lines()[-6:])


def cheap(books: Books) -> list[str]:
    """Return what is wrong in the accounts of devices and host; cost: the number of devices."""
    problems = []
    for uuid, d in books.inventory.devices.items():
        total = sum(d.leases.values())
        if total != d.granted:
            problems.append(f"{uuid}: {d.granted} bytes granted, but the leases sum to {total}")
        if d.granted > d.capacity + d.excess:
            who = "; ".join(_story(books.sessions[n]) for n in d.leases if n in books.sessions)
            problems.append(f"{uuid}: {d.granted} bytes granted of {d.capacity}. History: {who}")
        for name in ("granted", "incoming", "reserved", "yieldable", "foreign", "overuse"):
            if getattr(d, name) < 0:
                problems.append(f"{uuid}: {name} is {getattr(d, name)}")
        unknown = [name for name in d.leases if name not in books.sessions]
        if unknown:
            problems.append(f"{uuid}: leases of unknown sessions {unknown}")
    for name, value in (("used", books.host.used), ("going", books.host.going)):
        if value < 0:
            problems.append(f"host memory: {name} is {value}")
    lanes = len(books.open) + len(books.planned) + len(books.nowhere) + len(books.fresh)
    if lanes > len(books.order):
        problems.append(f"{lanes} sessions wait in lanes, {len(books.order)} in the queue")
    return problems


def everything(books: Books) -> list[str]:
    """Return everything that is wrong."""
    problems = cheap(books)
    for s in books.sessions.values():
        problems.extend(f"{s.id}: {text} ({_story(s)})" for text in _session(books, s))
    problems.extend(_devices(books))
    problems.extend(_totals(books))
    return problems


def _session(books: Books, s: Session) -> list[str]:
    bad = []
    waits = s.state == "queued"
    if waits != (s.entry is not None):
        bad.append(f"state {s.state} and queue entry {s.entry}")
    if waits != bool(s.lane):
        bad.append(f"state {s.state} and lane {s.lane!r}")
    if waits and s.lane == "fresh":
        bad.append("was not looked at")
    if waits and not s.holds:
        bad.append("waits without a hold")
    if waits and not s.why:
        bad.append("waits without a reason")
    if s.state == "active" and not s.holds:
        bad.append("active without a hold")
    if s.state in ("idle", "detached") and s.holds:
        bad.append(f"{s.state} with holds {list(s.holds)}")
    if s.state in HAS_LEASE and not s.slices:
        bad.append(f"{s.state} without slices")
    if s.state not in HAS_LEASE and s.slices and s.state != "ended":
        bad.append(f"{s.state} with slices")
    if s.suspended and s.state not in ("detached", "queued", "attaching", "ended"):
        bad.append(f"{s.state} with suspended state")
    if len({x.device for x in s.slices}) != len(s.slices):
        bad.append("two slices on one device")
    if s.state == "attaching" and s.suspended:
        for x, old in zip(s.slices, s.suspended, strict=True):
            if x.bytes < min(old.bytes, books.inventory[old.device].capacity):
                bad.append(f"resumes {old.bytes} bytes into {x.bytes} on {x.device}")
    if s.yieldable and (s.state != "idle" or yield_at(s, books) > books.now):
        bad.append("offered although it may not be taken")
    if s.state == "idle" and not s.yieldable and yield_at(s, books) <= books.now:
        bad.append("not offered although it may be taken")
    if s.host_bound and s.state not in ("detaching", "ended"):
        bad.append("host memory set aside")
    if s.plan is not None and s.state not in ("queued", *ATTACHED):
        bad.append(f"a plan while {s.state}")
    if (s.lane == "planned") != (s.plan is not None and waits):
        bad.append(f"lane {s.lane!r} and plan {s.plan}")
    grown = any(x.bytes > s.request.memory for x in s.slices)
    if (s.id in books.grown) != grown:
        bad.append(f"granted {s.slices} of {s.request}; noted as grown: {not grown}")
    stays = s.state == "idle" and books.now < stays_until(s, books) == yield_at(s, books)
    if stays != (s.id in books.staying):
        bad.append(f"stays as it was just moved: {stays}; noted so: {not stays}")
    if s.growing and (s.state not in HAS_LEASE):
        bad.append(f"growing while {s.state}")
    return bad


def _devices(books: Books) -> list[str]:
    bad = []
    books.inventory.settle()
    for uuid, d in books.inventory.devices.items():
        sums = {"granted": 0, "incoming": 0, "reserved": 0, "yieldable": 0}
        for s in books.sessions.values():
            for x in s.slices:
                if x.device == uuid:
                    sums["granted"] += x.bytes
                    sums["incoming"] += x.bytes if s.state == "detaching" else 0
                    sums["yieldable"] += x.bytes if s.yieldable else 0
            for x in s.plan.takes if s.plan is not None else ():
                sums["reserved"] += x.bytes if x.device == uuid else 0
        for name, value in sums.items():
            if getattr(d, name) != value:
                bad.append(f"{uuid}: {name} is {getattr(d, name)}, should be {value}")
        key = None if d.drained else (d.avail, d.device.index, uuid)
        if d.avail_key != key:
            bad.append(f"{uuid}: sorted as {d.avail_key}, should be {key}")
        if d.plans and d.expect < 0:
            bad.append(f"{uuid}: {d.reserved} bytes promised, {d.expect} short")
    return bad


def _totals(books: Books) -> list[str]:
    bad = []
    used = sum(s.suspended_bytes for s in books.sessions.values())
    going = sum(s.host_bound for s in books.sessions.values())
    if (books.host.used, books.host.going) != (used, going):
        bad.append(f"host ledger {books.host.used}+{books.host.going}, should be {used}+{going}")
    order = list(books.order)
    if order != sorted(order):
        bad.append("the queue is out of order")
    queued = {s.id for s in books.sessions.values() if s.state == "queued"}
    if queued != {e[4] for e in order} or len(order) != len(queued):
        bad.append(f"the queue holds {[e[4] for e in order]}, waiting are {sorted(queued)}")
    if {e[4] for e in books.open} != {n for n in queued if books.sessions[n].lane == "open"}:
        bad.append("the open lane does not agree with the sessions")
    if books.active != sum(s.state == "active" for s in books.sessions.values()):
        bad.append(f"{books.active} active sessions counted")
    head = books.open.first()
    if (books.claim.session if books.claim else None) != (head[4] if head else None):
        bad.append(f"claim of {books.claim}, head is {head}")
    owners = {s.owner.name for s in books.sessions.values()}
    for owner in owners:
        own = [s for s in books.sessions.values() if s.owner.name == owner]
        usage = books.quotas.usage(owner)
        memory = sum(s.charge for s in own)
        devices = sum(len(s.slices) for s in own)
        leases = sum(bool(s.slices) for s in own)
        suspended = sum(s.suspended_bytes + s.host_bound for s in own)
        for s in own:
            plan = s.plan
            if plan is not None:
                memory += plan.charge
                devices += plan.devices
                leases += plan.leases
        if books.claim is not None and books.claim.owner == owner:
            memory += books.claim.charge
            devices += books.claim.devices
            leases += 1
        found = (usage.memory, usage.devices, usage.leases, usage.suspended)
        if found != (memory, devices, leases, suspended):
            bad.append(f"owner {owner}: {found}, should be {(memory, devices, leases, suspended)}")
    return bad
