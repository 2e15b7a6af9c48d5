# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Who yields to whom, from when on, and which victims make room with the least disruption.

An idle lease yields to a waiting session when nothing holds it, it has been idle for
``reclaim_after``, its user does not keep it, the last refusal is long enough ago, its devices can
suspend, and its state has not just been moved (:func:`stays_until`). The largest bytes x idle time
go first, no more of them than needed, as far as host memory and their owners' quotas of suspended
state have room.

:func:`victim_tier` is the seam for rules that take more than idle leases: it knows who asks, and
a lower tier is taken before a higher one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Callable, Collection, Iterable, Sequence

from .facts import Facts, Session
from .limits import Charge
from .model import Reason, Rule, Slice
from .needs import Asking
from .placement import NOTHING, Draft, Need, Reservation, Room, choose, in_order, in_turn, preferred
from .residence import STAY_MOST, Gap, protected_until

#: With up to so many idle leases to choose from, every combination is tried when host memory is
#: too short for the usual choice; with more, only the one that frees the most per host byte.
EXACT = 6
#: Places compared. The best victim of all may be where little else yields: to take it leaves
#: that device with nothing for the next one, and in the end more yield.
WIDTH = 4

WAITS = "another kernel waits for memory"
OWN = "another kernel of the same owner waits and the owner's quota is in use"


# --------------------------------------------------------------------------- from when on


def suspendable(s: Session, facts: Facts) -> bool:
    """Return whether suspending an idle session can work at all.

    On a device that can not suspend, only a lease that is known to hold nothing can be taken
    back: there is nothing to move. Anything else stays until its kernel frees it or ends.
    """
    devices = facts.devices
    return all(devices[x.device].device.can_suspend for x in s.lease.slices) or s.empty


def not_before(s: Session, facts: Facts) -> float:
    """Return from when on idle ``s`` can be suspended, whoever wants it."""
    if (s.pressed and s.state_bound) or not suspendable(s, facts):
        return math.inf
    if s.pinned_reason:
        return max(s.retry_at, s.pinned_at + facts.settings.pinned_retry)
    return s.retry_at


def stays_until(s: Session, facts: Facts) -> float:
    """Return until when idle ``s`` keeps its slice from those who wait because it was moved there.

    Infinity while nobody waits for it: see :mod:`.residence`.
    """
    share, lease, known = facts.settings.max_swap_overhead, s.lease, s.measured
    if share <= 0 or lease.resumed_at == -math.inf:
        return -math.inf
    if facts.settings.residence == "clock":
        return lease.resumed_at + min(STAY_MOST, known.moving / share)
    gap = known.gap or Gap(s.idle_since)
    return protected_until(gap, lease.stay, known.habits, cost=known.moving, share=share)


def times(s: Session, facts: Facts) -> tuple[float, float]:
    """Return from when on a waiting session may take idle ``s``, and when it leaves on its own.

    Kept with the session, and true as :func:`~.needs.asking` is: what is read of the session
    changes with :meth:`Facts.touch`, and the rest raises :attr:`Facts.version`.
    """
    if s.times is None or s.times[0] != facts.version:
        settings, possible = facts.settings, not_before(s, facts)
        idle, keep = s.idle_since, s.keep_until
        yields = max(possible, idle + settings.reclaim_after, keep, stays_until(s, facts))
        asked = s.release_asked or paused(s, facts)
        leaves = possible if asked else max(possible, idle + settings.idle_timeout, keep)
        s.times = facts.version, yields, leaves
    return s.times[1], s.times[2]


def yields_at(s: Session, facts: Facts) -> float:
    """Return from when on a waiting session may take the lease of idle ``s``."""
    return times(s, facts)[0]


def leaves_at(s: Session, facts: Facts) -> float:
    """Return when idle ``s`` gives its lease back on its own."""
    return times(s, facts)[1]


def paused(s: Session, facts: Facts) -> str:
    """Return why an admin wants the lease of ``s`` back; "" if none does."""
    devices = facts.devices
    return next((p for x in s.lease.slices if (p := devices[x.device].paused)), "")


def candidate(holder: Session, facts: Facts) -> bool:
    """Return whether ``holder`` may yield to anybody now: where not, it has no tier at all."""
    return holder.state == "idle" and yields_at(holder, facts) <= facts.now


def victim_tier(asker: Session, holder: Session, facts: Facts) -> int | None:
    """Return in which tier ``holder`` may be suspended for ``asker`` now; None if it may not.

    Tier 0 is an idle lease that nobody protects. Rules to come (preemption of running work, time
    slices) return higher tiers for busy holders; nothing else has to change for them but
    :func:`candidate` and :func:`asker_kind`.
    """
    return 0 if holder is not asker and candidate(holder, facts) else None


def asker_kind(asker: Session) -> Any:  # noqa: ARG001
    """Return everything that :func:`victim_tier` reads of a *waiting* asker.

    The pass skips who asks for no less than somebody of the same kind that found nothing. A
    waiting session has no lease, so it is no holder, and today nothing else of it counts.
    """
    return None


def score(v: Session, now: float) -> tuple[float, int, str]:
    """Return the order in which leases yield, smallest first: most bytes x idle time."""
    granted = v.lease.granted
    return -granted * (now - v.idle_since), -granted, v.id


# --------------------------------------------------------------------------- how many


class Trial:
    """The choice of victims and places for one session, on top of a draft that stays as it is."""

    def __init__(self, draft: Draft, asker: Session, host: int) -> None:
        self.draft = draft
        self.asker = asker
        self.facts = draft.facts
        #: Host bytes that the victims' state may take.
        self.host = host
        self.chosen: list[Session] = []
        self.freed: dict[str, int] = {}
        self.takes: tuple[Slice, ...] = ()
        #: A choice failed for want of host memory, not of leases that may be taken.
        self.host_short = False
        self._tiers: dict[str, int | None] = {}

    def add(self, victims: Iterable[Session]) -> None:
        """Let ``victims`` yield."""
        for v in victims:
            self.chosen.append(v)
            for x in v.lease.slices:
                self.freed[x.device] = self.freed.get(x.device, 0) + x.bytes

    def expect(self, room: Room) -> int:
        """Return the bytes that come free there without more victims."""
        return room.expect + self.freed.get(room.uuid, 0)

    def tier(self, v: Session) -> int | None:
        """Return the tier of ``v``, None if it may not be taken or has a part in this plan."""
        if v.id not in self._tiers:
            busy = v.id in self.draft.leaving or v.id in self.draft.settled
            self._tiers[v.id] = None if busy else victim_tier(self.asker, v, self.facts)
        return self._tiers[v.id]

    def options(self, room: Room) -> list[tuple[int, Session, int]]:
        """Return the leases there that may still be taken, as (tier, session, bytes)."""
        return [
            (tier, v, size)
            for v, size in room.candidates
            if (tier := self.tier(v)) is not None and v not in self.chosen
        ]

    def reach(self, room: Room) -> int:
        """Return the bytes that could come free there if all that may be taken were."""
        return self.expect(room) + sum(size for _, _, size in self.options(room))

    def victims(self, room: Room, missing: int) -> list[Session] | None:
        """Return the leases on a device that free ``missing`` bytes there, or None."""
        if room.offered < missing:
            return None
        options = self.options(room)
        if sum(size for _, _, size in options) < missing:
            return None
        now = self.facts.now
        options.sort(key=lambda o: (o[0], score(o[1], now)))
        found = self._greedy(options, missing)
        if found is None:
            # Short of host memory: what frees the most for the least.
            self.host_short = True
            options.sort(key=lambda o: (o[0], o[1].state_bound / (o[2] or 1), o[1].id))
            found = self._greedy(options, missing)
        return found

    def _greedy(
        self, options: Sequence[tuple[int, Session, int]], missing: int
    ) -> list[Session] | None:
        found: list[tuple[Session, int]] = []
        total = 0
        for _, v, size in options:
            if self.fits([*(w for w, _ in found), v]):
                found.append((v, size))
                total += size
                if total >= missing:
                    break
        else:
            return None
        for item in found[-2::-1]:
            if total - item[1] >= missing:
                found.remove(item)
                total -= item[1]
        return [v for v, _ in found]

    def fits(self, victims: Sequence[Session]) -> bool:
        """Return whether the state of ``victims`` has room besides that of those chosen."""
        return self.draft.host_fits([*self.chosen, *victims], self.host)

    def place(self, needs: Sequence[Need], *, more: bool = True) -> bool:
        """Choose a device for every need, with ``more`` victims if needed; fill :attr:`takes`.

        Of the devices where it would work, the ``WIDTH`` with the most to give are compared.

        Nobody yields on devices that are reserved for the head of the queue; only what the head can
        spare is taken there. No victim is better than some, the devices where the session was are
        better than others, and then the victim with the most bytes x idle time decides.
        """
        last, now = preferred(self.asker), self.facts.now
        rooms = self.draft.rooms
        by_offer = sorted(rooms.values(), key=_offer)
        takes: dict[int, Slice] = {}
        used: set[str] = set()
        for at in in_turn(needs):
            need = needs[at]
            best: tuple[tuple[Any, ...], Room, list[Session]] | None = None
            good = 0
            for room in (rooms[need.fixed],) if need.fixed else by_offer:
                if good == WIDTH:
                    break
                if room.uuid in used or not need.allows(room):
                    continue
                amount = need.amount(room)
                missing = amount - self.expect(room)
                found: list[Session] = []
                if self.draft.reserved(room):
                    if self.draft.left(room) < amount:
                        continue
                elif missing > 0:
                    victims = self.victims(room, missing) if more else None
                    if victims is None:
                        continue
                    found = victims
                good += 1
                key = (
                    bool(found),
                    room.uuid not in last,
                    score(found[0], now)[0] if found else self.expect(room),
                    room.device.index,
                )
                if best is None or key < best[0]:
                    best = key, room, found
            if best is None:
                return False
            _, room, found = best
            self.add(found)
            used.add(room.uuid)
            takes[at] = Slice(room.uuid, need.amount(room))
        self.takes = in_order(needs, takes, rooms)
        return True

    # ------------------------------------------------------------------ the owner's own

    def own(self, charge: Charge) -> bool:
        """Let the owner's own leases yield so that its quota suffices; return whether it does.

        Suspends under way count, and no more yield than needed.
        """
        draft, owner = self.draft, self.asker.owner.name
        less = draft.coming_back(owner)
        if draft.lacking(owner, charge, less) is None:
            return True
        found: list[Session] = []
        now = self.facts.now
        options = [v for v in self.facts.leases_of(owner) if self.tier(v) is not None]
        for v in sorted(options, key=lambda v: (self.tier(v), score(v, now))):
            if not self.fits([*found, v]):
                self.host_short = True
                continue
            found.append(v)
            less = _plus(less, v, 1)
            if draft.lacking(owner, charge, less) is None:
                break
        else:
            return False
        for v in found[-2::-1]:
            fewer = _plus(less, v, -1)
            if draft.lacking(owner, charge, fewer) is None:
                found.remove(v)
                less = fewer
        self.add(found)
        return True


def _offer(room: Room) -> tuple[int, int]:
    """Return the order of devices, the one with the most to give first."""
    return -room.expect - room.offered, -room.device.index


def any_combination(draft: Draft, s: Session, asking: Asking, host: int) -> Trial | None:
    """Return the smallest set of victims that makes room, if there are few to choose from."""
    owner, needs = s.owner.name, asking.needs
    quota = draft.lacking(owner, asking.charge) is not None
    first = Trial(draft, s, host)
    options: dict[str, Session] = {}
    if quota:
        # They count for the quota wherever they are. Without one, who else asks for as much of the
        # same devices has the same options: the pass relies on that.
        own = draft.facts.leases_of(owner)
        options = {v.id: v for v in own if first.tier(v) is not None}
    for room in draft.rooms.values():
        if not draft.reserved(room) and any(need.allows(room) for need in needs):
            options.update((v.id, v) for _, v, _ in first.options(room))
        if len(options) > EXACT:
            return None
    back = draft.coming_back(owner) if quota else NOTHING
    for count in range(1, len(options) + 1):
        for group in combinations(options.values(), count):
            if not draft.host_fits(group, host):
                continue
            less = back
            for v in group:
                less = _plus(less, v, 1) if v.owner.name == owner else less
            if draft.lacking(owner, asking.charge, less) is None:
                trial = Trial(draft, s, host)
                trial.add(group)
                if trial.place(needs, more=False):
                    return trial
    return None


def _plus(less: Charge, v: Session, sign: int) -> Charge:
    memory, devices, leases = less
    return memory + sign * v.lease.charge, devices + sign * len(v.lease.slices), leases + sign


def by_reach(draft: Draft, s: Session) -> list[Room]:
    """Return the devices in service, the one that could give ``s`` the most first."""
    trial = Trial(draft, s, 0)
    key: Callable[[Room], tuple[int, int]] = lambda r: (trial.reach(r), r.device.index)  # noqa: E731
    return sorted((r for r in draft.rooms.values() if not r.drained), key=key, reverse=True)


# --------------------------------------------------------------------------- one session


@dataclass(frozen=True, slots=True)
class Offer:
    """A place for a session, and who must yield for it."""

    takes: tuple[Slice, ...]
    victims: Sequence[Session] = ()
    #: Nothing has to happen first.
    ready: bool = False
    reason: str = WAITS


@dataclass(frozen=True, slots=True)
class Blocked:
    reason: Reason
    #: It waits for its owner's quota, not for memory.
    quota: bool = False


def attempt(draft: Draft, s: Session, found: Asking, *, guarded: bool) -> Offer | Blocked:
    """Return a place for ``s`` in what the draft has left, or why there is none.

    ``guarded``: it is behind the head, which must keep the host memory that it is going to need.
    """
    owner, needs = s.owner.name, found.needs
    if found.impossible is not None:
        return Blocked(found.impossible)
    name = draft.lacking(owner, found.charge)
    if name is None:
        takes = draft.now(s, needs)
        if takes is not None:
            return Offer(takes, ready=True)
    host = draft.host_left() if guarded else draft.host
    trial = Trial(draft, s, host)
    own = name is None or trial.own(found.charge)
    placed = own and trial.place(needs)
    short = trial.host_short
    if not placed and short:
        other = any_combination(draft, s, found, host)
        placed, trial = other is not None, other or trial
    if placed:
        return Offer(trial.takes, trial.chosen, reason=WAITS if name is None else OWN)
    # What the owner has idle would be needed for its quota, too: who waits for memory waits for it.
    limit = name[0] if name is not None else ""
    if name is not None and not own:
        why = Reason("quota-host", limit=limit) if short else quota_reason(draft, s, name)
        return Blocked(why, quota=True)
    rule: Rule = "host" if short else "busy"
    if guarded and fits_now(draft, needs):
        rule = "behind-head"
    return Blocked(Reason(rule, bytes=s.request.memory, count=len(needs), limit=limit))


def fits_now(draft: Draft, needs: Sequence[Need]) -> bool:
    """Return whether ``needs`` fit in what is free, if nothing were reserved for the head."""
    return choose(needs, draft.rooms, lambda room: room.avail) is not None


def blocked_as(draft: Draft, s: Session, need: Need, rule: Rule) -> Rule:
    """Return the rule that blocks ``need`` if it is ``rule`` for a smaller amount of the same.

    It is another where less is free than the larger amount, or all that may yield have less.
    """
    if rule == "behind-head" and not fits_now(draft, (need,)):
        return "busy"
    trial = Trial(draft, s, 0)
    rooms = (r for r in draft.rooms.values() if need.allows(r) and not draft.reserved(r))
    if rule == "host" and not any(trial.reach(room) >= need.amount(room) for room in rooms):
        return "busy"
    return rule


def quota_reason(draft: Draft, s: Session, name: tuple[str, int], besides: int = 0) -> Reason:
    others = sum(1 for _ in draft.facts.leases_of(s.owner.name)) - besides
    return Reason("quota", limit=name[0], most=name[1], count=others)


def reservation(
    draft: Draft, s: Session, found: Asking, keep: Collection[str]
) -> tuple[Reservation, bool]:
    """Return what the head of the queue reserves, and whether it has waited for ``ageing``.

    It begins with the devices where the least is missing, and keeps those that it had (``keep``).
    For each further ``ageing`` seconds it reserves one more, in case a lease on the first never
    ends. Devices of which processes outside the pool leave too little are of no use.
    """
    facts, needs, now = draft.facts, found.needs, draft.facts.now
    since = now if s.wait.head_since is None else s.wait.head_since
    ageing = max(1.0, facts.settings.ageing)
    rounds = int((now - since) / ageing)
    while since + (rounds + 1) * ageing <= now:  # by a hair, after the rounding
        rounds += 1
    count = len(needs) + max(0, rounds - 1)
    wanted: dict[str, int] = {}
    more = False
    mine = [draft.rooms[uuid] for uuid in keep]
    mine += [draft.rooms[need.fixed] for need in needs if need.fixed]
    for room in dict.fromkeys((*mine, *by_reach(draft, s))):
        ledger = facts.devices[room.uuid]
        most = ledger.capacity - ledger.foreign - ledger.overuse
        amounts = [a for n in needs if n.allows(room) and (a := n.amount(room)) <= most]
        if not amounts:
            continue
        if len(wanted) >= count and room not in mine:
            more = True
            break
        wanted[room.uuid] = max(amounts)
    next_at = since + (rounds + 1) * ageing if more or rounds < 1 else math.inf
    return Reservation(s.id, wanted, len(needs), found.charge, next_at), rounds >= 1
