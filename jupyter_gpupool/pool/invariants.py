# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What must always be true; ``everything`` recomputes it all, ``cheap`` looks at the totals.

The plan must be at rest, too: to plan again at the same instant changes nothing.
"""

from __future__ import annotations

from ..states import ATTACHED, HAS_LEASE
from .facts import Facts, Session, Usage
from .schedule import Plan, plan


def _story(s: Session) -> str:
    return "; ".join(s.story_lines()[-6:])


def cheap(facts: Facts) -> list[str]:
    """Return what is wrong in the accounts of devices and host; cost: the number of leases."""
    problems = []
    granted: dict[str, int] = {}
    who: dict[str, list[Session]] = {}
    for s in facts.leased.values():
        if s.id not in facts.sessions:
            problems.append(f"an unknown session {s.id} has a lease")
        for x in s.lease.slices:
            granted[x.device] = granted.get(x.device, 0) + x.bytes
            who.setdefault(x.device, []).append(s)
    for uuid, d in facts.devices.items():
        total = granted.get(uuid, 0)
        if total != d.granted:
            problems.append(f"{uuid}: {d.granted} bytes granted, but the leases sum to {total}")
        if d.granted > max(d.capacity, d.allowed):
            stories = "; ".join(_story(s) for s in who.get(uuid, ()))
            problems.append(
                f"{uuid}: {d.granted} bytes granted of {d.capacity}. History: {stories}"
            )
        for name in ("granted", "incoming", "foreign", "overuse"):
            if getattr(d, name) < 0:
                problems.append(f"{uuid}: {name} is {getattr(d, name)}")
    for name, value in (("used", facts.host_used), ("going", facts.host_going)):
        if value < 0:
            problems.append(f"host memory: {name} is {value}")
    return problems


def everything(facts: Facts, now: Plan) -> list[str]:
    """Return everything that is wrong."""
    problems = cheap(facts)
    for s in facts.sessions.values():
        problems.extend(f"{s.id}: {text} ({_story(s)})" for text in _session(facts, now, s))
    return [*problems, *_accounts(facts), *_plan(facts, now)]


def _session(facts: Facts, now: Plan, s: Session) -> list[str]:
    bad = []
    waits, slices = s.state == "queued", s.lease.slices
    for where, belongs in (
        ("waiting", waits),
        ("leased", bool(slices)),
        (
            "short",
            s.state in ATTACHED
            and len(slices) == s.request.devices
            and any(x.bytes < s.request.memory for x in slices),
        ),
        ("grown", s.state in ATTACHED and any(x.bytes > s.request.memory for x in slices)),
    ):
        if (s.id in getattr(facts, where)) != belongs:
            bad.append(f"{where}: {not belongs}, should be {belongs}")
    if waits and s.id not in now.reasons:
        bad.append("waits without a reason")
    if waits and not s.holds:
        bad.append("waits without a hold")
    if s.state == "active" and not s.holds:
        bad.append("active without a hold")
    if s.state in ("idle", "detached") and s.holds:
        bad.append(f"{s.state} with holds {list(s.holds)}")
    if s.state in HAS_LEASE and not slices:
        bad.append(f"{s.state} without slices")
    if s.state not in HAS_LEASE and slices and s.state != "ended":
        bad.append(f"{s.state} with slices")
    if s.suspended and s.state not in ("detached", "queued", "attaching", "ended"):
        bad.append(f"{s.state} with suspended state")
    if len({x.device for x in slices}) != len(slices):
        bad.append("two slices on one device")
    if s.state == "attaching" and s.suspended:
        for x, old in zip(slices, s.suspended, strict=True):
            if x.bytes < min(old.bytes, facts.devices[old.device].capacity):
                bad.append(f"resumes {old.bytes} bytes into {x.bytes} on {x.device}")
    if s.lease.host_bound and s.state not in ("detaching", "ended"):
        bad.append("host memory set aside")
    return bad


def _accounts(facts: Facts) -> list[str]:
    bad = []
    incoming: dict[str, int] = {}
    usage: dict[str, Usage] = {}
    used = going = 0
    for s in facts.sessions.values():
        own = usage.setdefault(s.owner.name, Usage())
        own.suspended += s.suspended_bytes + s.lease.host_bound
        used += s.suspended_bytes
        going += s.lease.host_bound
        if s.lease.slices:
            own.add(s.lease.charge, len(s.lease.slices), 1)
        for x in s.lease.slices if s.state == "detaching" else ():
            incoming[x.device] = incoming.get(x.device, 0) + x.bytes
    for uuid, d in facts.devices.items():
        if d.incoming != incoming.get(uuid, 0):
            bad.append(f"{uuid}: incoming is {d.incoming}, should be {incoming.get(uuid, 0)}")
    for owner in usage.keys() | facts.usage.keys():
        found, right = facts.usage.get(owner, Usage()), usage.get(owner, Usage())
        if found != right:
            bad.append(f"owner {owner}: {found}, should be {right}")
    if (facts.host_used, facts.host_going) != (used, going):
        bad.append(f"host {facts.host_used}+{facts.host_going}, should be {used}+{going}")
    return bad


def _plan(facts: Facts, now: Plan) -> list[str]:
    bad = []
    again = plan(facts, now)
    if again.changes:
        todo = again.grants, again.grows, again.suspends
        bad.append(f"to plan again would change something: {todo}")
    if again.promises != now.promises:
        bad.append(f"promised {now.promises}, and again {again.promises}")
    if again.reasons != now.reasons:
        bad.append(f"reasons {now.reasons}, and again {again.reasons}")
    if [s.id for s in again.order] != list(dict.fromkeys(s.id for s in now.order)):
        bad.append(f"the order was {[s.id for s in now.order]}")
    promised: dict[str, int] = {}
    for takes in now.promises.values():
        for x in takes:
            promised[x.device] = promised.get(x.device, 0) + x.bytes
    for uuid, size in promised.items():
        d = facts.devices[uuid]
        if size > d.free + d.incoming:
            bad.append(f"{uuid}: {size} bytes promised of {d.free + d.incoming}")
    return bad
