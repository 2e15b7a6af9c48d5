# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Brute-force checks: a session waits only if it cannot start, and no backfill delays the head.

A plan for a waiting session names a device for each slice of the session, and the leases to preempt
for them. It may name no lease. A plan is feasible under three conditions:

* after the suspends under way and the plan's preemptions, each device has enough free bytes;
* host memory has room for the state of the preempted leases;
* the plan exceeds no quota.

A plan is harmless if it takes nothing that belongs to another session: no promised bytes, no
reserved bytes that the head of the queue needs, and no host memory or quota that the head will
need.

The checks use only query methods of the pool, for example ``Pool.explain`` and ``Pool.record``.
Everything else comes from the naive model.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations, permutations
from typing import Iterable, Sequence

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.explain import Explanation
from jupyter_gpupool.pool.groups import path
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Quota
from jupyter_gpupool.pool.requests import SETTLE

from .naive import Naive, NaiveSession

#: The age in seconds at which any lease is past its minimum residence.
LONG = 60.0
#: Rules by which a session waits for something other than memory.
HELD_UP = ("quota", "cap", "paused", "drained", "foreign", "nowhere", "retry", "class-closed")
#: The check tries all subsets of the idle leases. If there are more idle leases than this, it is
#: skipped.
MOST_IDLE = 6


@dataclass
class Look:
    """What the pool shows after an event."""

    pool: Pool
    naive: Naive
    told: dict[str, Explanation]
    #: Bytes of each device that neither a lease nor a process outside the pool uses.
    free: dict[str, int]
    promised: dict[str, int]
    head: str = ""

    @classmethod
    def at(cls, pool: Pool, naive: Naive, told: dict[str, Explanation]) -> Look:
        devices = pool.device_views()
        free = {d.device.uuid: d.capacity - d.granted - d.foreign for d in devices}
        promised: dict[str, int] = {}
        for e in told.values():
            for x in e.promised:
                promised[x.device] = promised.get(x.device, 0) + x.bytes
        head = next((n for n, e in told.items() if e.reserved), "")
        return cls(pool, naive, told, free, promised, head)

    def reserved(self) -> dict[str, int]:
        return {x.device: x.bytes for x in self.told[self.head].reserved} if self.head else {}

    def leaving(self, uuid: str) -> int:
        sessions = self.naive.sessions.values()
        return sum(s.lease.get(uuid, 0) for s in sessions if s.state == "detaching")

    def leases(self, uuid: str) -> list[int]:
        """Return the sizes of the leases on a device, except for the lease of the queue's head."""
        sessions = self.naive.sessions
        return [s.lease[uuid] for n, s in sessions.items() if uuid in s.lease and n != self.head]


# --------------------------------------------------------------------------- no needless wait


def check_liveness(look: Look) -> None:
    """Check that no waiting session has a feasible plan that is harmless."""
    naive = look.naive
    order = sorted((e.position, n) for n, e in look.told.items() if e.position is not None)
    if not order:
        return
    idle = [n for n, s in naive.sessions.items() if _may_be_preempted(look, n, s)]
    if len(idle) > MOST_IDLE:
        return
    held_groups: set[str] = set()
    _check_growth(look)
    held: set[str] = set()
    for _, name in order:
        e, s = look.told[name], naive.sessions[name]
        assert e.reason is not None
        rule, owner = e.reason.rule, s.owner.name
        if rule == "planned":
            busy = any(v.state == "detaching" for v in naive.sessions.values())
            assert busy, f"{name} waits for suspends, and none is under way"
            continue
        if (
            rule in ("retry", "budget", "class-closed", "behind-own", "behind-group")
            or owner in held
        ):
            continue
        if held_groups & set(path(naive.settings.groups, s.owner.group)):
            continue
        if rule in ("quota", "quota-host", "cap"):
            held_groups.update({e.reason.group} - {""})
            held.update({owner} if not e.reason.group else ())
        behind = look.head in e.ahead
        # Leases in use that this session may preempt now. A rule allows it, and no guarantee covers
        # the lease.
        used = [h for h in e.holders if h.rule_at is not None and h.rule_at <= naive.now]
        in_use = list(dict.fromkeys(h.session for h in used if not h.covered))
        may = [*idle, *(n for n in in_use if n not in idle)]
        if len(may) > MOST_IDLE:
            may = idle
        for group in chain.from_iterable(combinations(may, n) for n in range(len(may) + 1)):
            if not _uncovered(look, name, [n for n in group if n not in idle], group):
                continue
            places = _feasible(look, name, group, behind=behind)
            assert not places, f"{name} waits ({e.text}), but could go to {places} after {group}"


def check_guarantees(look: Look) -> None:
    """Check that a session does not wait for memory that its group's guarantee covers.

    The check uses the naive model's own sums, not the pool's reports. It fails if these three
    statements are all true:

    * a session waits for memory;
    * its group stays within the group's guarantee, even with the requests of all waiting members;
    * the pool may preempt a lease of another group, because the lease is old enough and no
      guarantee covers it. The preemption of this one lease frees enough bytes.
    """
    naive = look.naive
    groups = naive.settings.groups
    if "guarantee" not in naive.settings.preempt or any(g.daily for g in groups.values()):
        return
    if any(q.daily for q in naive.settings.quotas.values()):
        return
    sizes = sorted((c for u in naive.devices if (c := naive.capacity(u))), reverse=True)
    waiting = [n for n, s in naive.sessions.items() if s.state == "queued"]

    def held(group: str) -> int:
        return sum(
            naive.charge(s)
            for s in naive.sessions.values()
            if s.state != "detaching" and group in path(groups, s.owner.group)
        )

    for name in waiting:
        s, e = naive.sessions[name], look.told[name]
        names = path(groups, s.owner.group)
        if e.reason is None or e.reason.rule != "busy" or _count(s) != 1:
            continue
        if naive.quota(s.owner.name) != Quota() or naive.caps(s.owner):
            continue
        for group in names:
            sure = groups[group].guarantee
            # All members of the group that wait for memory, at any place in the queue.
            members = [
                n
                for n in waiting
                if group in path(groups, naive.sessions[n].owner.group)
                and (why := look.told[n].reason) is not None
                and why.rule not in HELD_UP
            ]
            more = sum(_charge(naive.sessions[n], _count(naive.sessions[n])) for n in members)
            if sure is None or held(group) + more > sure.of(sizes):
                continue
            for victim, v in naive.sessions.items():
                its = path(groups, v.owner.group)
                covered = any(
                    (other := groups[g].guarantee) is not None and held(g) <= other.of(sizes)
                    for g in its
                    if g not in names
                )
                if v.state != "active" or group in its or covered or v.refused or not v.gated:
                    continue
                if naive.now < v.began + LONG or not all(
                    naive.devices[u].can_suspend for u in v.lease
                ):
                    continue
                if victim in naive.pressed or not _host(look, [v], {}):
                    continue
                places = _feasible(look, name, (victim,), behind=look.head in e.ahead)
                assert not places, f"{name} is refused what {group} is guaranteed; {victim} has it"


def check_recalls(look: Look) -> None:
    """Check that the pool is not late with a recall, and where a recalled cell waits in the queue.

    Before the due time of a recall, the pool must ask for a ``Tick`` at this time or earlier. After
    the due time, the lease may continue only if something prevents its suspend. The naive model
    checks the rest: an admin has ordered the recall, and the pool recalls the lease once and not
    too early.
    """
    naive, now = look.naive, look.naive.now
    wakeup = look.pool.next_wakeup()
    for name, s in naive.sessions.items():
        record = look.pool.record(name)
        assert record.recall_at == (s.recall_at or 0.0), f"{name}: not the recall of its lease"
        assert not record.recall_at or record.slices, f"{name}: no lease to recall"
        if s.recall_at is None or s.state not in ("active", "idle"):
            continue
        if s.recall_at > now:
            assert wakeup is not None, f"{name}: no Tick at the time of its recall"
            assert wakeup <= s.recall_at, f"{name}: recalled too late"
            continue
        fixed = not all(naive.devices[u].can_suspend for u in s.lease)
        busy = s.state == "active" and (not s.gated or now < s.began + LONG)
        held = s.refused or busy or name in naive.pressed or fixed
        assert held or not _host(look, [s], {}), f"{name} was recalled at {s.recall_at}"
    if not naive.settings.groups:
        for name in naive.requeued:
            _check_turn(look, name)


def _check_turn(look: Look, name: str) -> None:
    """Check that a recalled cell is behind all waiting cells of the same owner and class."""
    s = look.naive.sessions.get(name)
    if s is None or not s.recalled or s.state != "queued":
        return
    own = look.told[name].position
    for other, o in look.naive.sessions.items():
        if other != name and o.state == "queued" and o.owner == s.owner:
            at = look.told[other].position
            later = at is not None and own is not None and at > own
            same = o.request.priority == s.request.priority
            assert not (same and later), f"{name} was recalled, and is ahead of {other}"


def _uncovered(look: Look, name: str, in_use: Sequence[str], everybody: Sequence[str]) -> bool:
    """Return whether the guarantees allow all suspends of ``in_use``, in any order of these."""
    naive, groups = look.naive, look.naive.settings.groups
    own = path(groups, naive.sessions[name].owner.group)
    for victim in in_use:
        v = naive.sessions[victim]
        for group, held, guaranteed, _ in look.told[victim].standing.guarantees:
            others = (naive.sessions[n] for n in everybody if n != victim)
            gone = sum(naive.charge(o) for o in others if group in path(groups, o.owner.group))
            spent = any(budget.spent for budget in look.told[victim].standing.budgets)
            if group not in own and not spent and held - gone <= guaranteed:
                return False
        assert v.lease
    return True


def _may_be_preempted(look: Look, name: str, s: NaiveSession) -> bool:
    """Return whether the pool may preempt a lease.

    This function asks the pool only about minimum residence and retries. It gets all other facts
    from the naive model.
    """
    naive, now = look.naive, look.naive.now
    if s.state != "idle" or now < s.idle_since + naive.settings.reclaim_after:
        return False
    if now < s.keep_until or now < naive.stays_until(s):
        return False
    known = s.sampled_at >= s.idle_since and set(s.lease) <= set(s.footprints)
    empty = known and not any(s.footprints.values())
    if not empty and not all(naive.devices[u].can_suspend for u in s.lease):
        return False
    if name in naive.pressed and _bound(s):
        return False
    if not s.refused and (s.resumed_at == float("-inf") or naive.settings.residence == "clock"):
        return True
    at = look.told[name].taken_from
    return at is not None and at <= now


def _check_growth(look: Look) -> None:
    """Check that a lease gives unused bytes of its growth back while a session waits.

    The last sample of a device shows how many bytes of the lease are in use.
    """
    reasons = [e.reason for e in look.told.values() if e.position is not None]
    if all(why is not None and why.rule == "retry" for why in reasons):
        return
    for name, n in look.naive.sessions.items():
        for uuid, size in n.lease.items():
            known = n.sampled.get(uuid, float("-inf")) >= n.grown_at + SETTLE
            if known and n.state in ("active", "idle") and n.grown_at > float("-inf"):
                used = max(n.request.memory, n.footprints[uuid])
                assert size <= used, f"{name} keeps {size} on {uuid} and uses {used}"


def _bound(s: NaiveSession) -> int:
    known = s.sampled_at >= s.idle_since and set(s.lease) <= set(s.footprints)
    known = known and s.state != "active"
    used = sum(s.footprints.values())
    return used if known else max(used, sum(s.lease.values()))


def _feasible(
    look: Look, name: str, group: tuple[str, ...], *, behind: bool
) -> tuple[str, ...] | None:
    naive, s = look.naive, look.naive.sessions[name]
    victims = [naive.sessions[n] for n in group]
    reserved = look.reserved() if behind else {}
    if group and not _host(look, victims, reserved):
        return None
    count = _count(s)
    if not _quota(look, name, group, count, behind=behind):
        return None
    needs: Sequence[tuple[int, int, str]] = [
        (max(size, s.request.memory), size, origin) for origin, size in s.suspended.items()
    ] or [(s.request.memory, 0, "")] * count
    freed: dict[str, int] = {}
    for v in victims:
        for uuid, size in v.lease.items():
            freed[uuid] = freed.get(uuid, 0) + size
    for places in permutations(sorted(naive.devices), count):
        if not naive.may_go(s, places):
            continue
        pairs = zip(places, needs, strict=True)
        if all(_place(look, uuid, need, freed, reserved) for uuid, need in pairs):
            return places
    return None


def _host(look: Look, victims: list[NaiveSession], reserved: dict[str, int]) -> bool:
    naive = look.naive
    room = naive.host_room()
    if reserved:
        head = naive.sessions[look.head]
        short = sorted(
            max(0, size - look.free[u] + look.promised.get(u, 0) - look.leaving(u))
            for u, size in reserved.items()
        )
        room -= sum(short[: len(reserved) if head.lease else _count(head)])
    if sum(map(_bound, victims)) > max(0, room):
        return False
    for owner in {v.owner.name for v in victims}:
        limit = naive.quota(owner).suspended
        have = sum(sum(o.suspended.values()) + o.host for o in naive.of(owner))
        more = sum(_bound(v) for v in victims if v.owner.name == owner)
        if limit is not None and more and have + more > limit:
            return False
    return True


def _place(
    look: Look,
    uuid: str,
    need: tuple[int, int, str],
    freed: dict[str, int],
    reserved: dict[str, int],
) -> bool:
    naive, (least, size, origin) = look.naive, need
    if uuid in naive.drained:
        return False
    capacity = naive.capacity(uuid)
    want = max(least, size + naive.settings.resume_headroom) if size or origin else least
    if want > capacity:
        want = max(least, capacity)
    promised = look.promised.get(uuid, 0)
    room = look.free[uuid] - promised
    if uuid in reserved:
        return min(room, spare(room, promised, look.leases(uuid), reserved[uuid])) >= want
    return room + look.leaving(uuid) + freed.get(uuid, 0) >= want


def spare(free: int, promised: int, leases: list[int], wanted: int) -> int:
    """Return how many free bytes the queue's head can spare (``test_parts`` proves this rule)."""
    missing = wanted - free
    if promised or missing <= 0:
        return 0 if promised else -missing
    small = sum(size for size in leases if size < missing)
    large = min((size for size in leases if size >= missing), default=0)
    return large - missing if large and small < missing else 0


def _quota(look: Look, name: str, group: tuple[str, ...], count: int, *, behind: bool) -> bool:
    naive, s = look.naive, look.naive.sessions[name]
    owner = s.owner.name
    limit = naive.quota(owner)
    memory = devices = leases = 0
    for other, o in naive.sessions.items():
        if o.owner.name != owner:
            continue
        if other not in group and o.state != "detaching":
            memory += naive.charge(o)
            devices += len(o.lease)
            leases += bool(o.lease)
        promised = look.told[other].promised
        if promised and o.lease:
            memory += sum(x.bytes for x in promised)
        elif behind and other == look.head and o.lease:
            memory += sum(x.bytes for x in look.told[other].reserved)
        elif promised or (behind and other == look.head):
            memory += _charge(o, len(promised) or _count(o))
            devices += len(promised) or _count(o)
            leases += 1
    for cap, most in naive.caps(s.owner).items():
        have = 0
        for other, o in naive.sessions.items():
            if cap not in path(naive.settings.groups, o.owner.group):
                continue
            if other not in group and o.state != "detaching":
                have += naive.charge(o)
            promised = look.told[other].promised
            if promised and o.lease:
                have += sum(x.bytes for x in promised)
            elif behind and other == look.head and o.lease:
                have += sum(x.bytes for x in look.told[other].reserved)
            elif promised or (behind and other == look.head):
                have += _charge(o, len(promised) or _count(o))
        if have + _charge(s, count) > most:
            return False
    return (
        (limit.memory is None or memory + _charge(s, count) <= limit.memory)
        and (limit.devices is None or devices + count <= limit.devices)
        and (limit.leases is None or leases + 1 <= limit.leases)
    )


def _count(s: NaiveSession) -> int:
    return len(s.suspended) or len(s.bound) or s.request.devices


def _charge(s: NaiveSession, count: int) -> int:
    sizes = [max(size, s.request.memory) for size in s.suspended.values()]
    return sum(min(size, s.request.limit) for size in sizes or [s.request.memory] * count)


# --------------------------------------------------------------------------- no delay of the head


def harmless(free: int, more: int, wanted: int, leases: Iterable[int]) -> bool:
    """Return whether another session may take ``more`` bytes without a delay for a waiting session.

    The waiting session needs ``wanted`` bytes. The leases may end in any order, and no order may
    lead to a delay. If all free bytes and all leases together are too few, the session waits for
    some other change. This function does not know this change, so it returns False.
    """
    sizes = list(leases)
    if free + sum(sizes) < wanted:
        return False
    for group in chain.from_iterable(combinations(sizes, n) for n in range(len(sizes) + 1)):
        if free + sum(group) >= wanted > free - more + sum(group):
            return False
    return True


def check_backfill(look: Look, before: dict[str, Explanation], actions: list[ev.Action]) -> None:
    """Check that ``actions`` attach no sessions that together delay the head of the queue.

    The check looks at sessions behind the head. In any order in which the leases on the head's
    reserved devices may end, these sessions must not delay the head. This function does not check:

    * a session that gets slices which the pool promised ``before``. The pool has checked the
      promise, and may keep it even if the queue has another head now;
    * a preempted session. Its age depends on how long it has computed, and this module does not
      know that time;
    * settings under which usage changes the order. This module knows only class and age.
    """
    rules = look.naive.settings
    if rules.half_life or rules.groups or any(q.daily for q in rules.quotas.values()):
        return
    if not look.head or look.pool.record(look.head).preempted:
        return
    if look.naive.sessions[look.head].state != "queued":
        return
    attached = {a.session: a.slices for a in actions if isinstance(a, ev.Attach)}
    first = _rank(look, look.head)
    given = {
        name: slices
        for name, slices in attached.items()
        if not look.pool.record(name).preempted
        and _rank(look, name) > first
        and not (name in before and before[name].promised == slices)
    }
    for uuid, wanted in look.reserved().items():
        size = sum(x.bytes for slices in given.values() for x in slices if x.device == uuid)
        sessions = look.naive.sessions.items()
        leases = [s.lease[uuid] for n, s in sessions if uuid in s.lease and n not in given]
        free = look.free[uuid] + size - look.promised.get(uuid, 0)
        assert not size or harmless(free, size, wanted, leases), (
            f"{sorted(given)} get {size} on {uuid}: {look.head} reserves {wanted} of {free} free, "
            f"leases {leases}"
        )


def _rank(look: Look, name: str) -> float:
    """Return the key that orders sessions by class and age; the smallest is first."""
    settings, record = look.naive.settings, look.pool.record(name)
    return record.queued_at / settings.ageing - settings.priority_classes[record.request.priority]
