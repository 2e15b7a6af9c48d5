# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which victims make room for a session with the least disruption, and on which devices the session
then runs.

:mod:`.preemption` says which leases may be preempted. Of these leases, the pool first preempts the
leases of the lowest tier. Within a tier, it first preempts the leases with the largest product of
bytes and idle time. It preempts no more leases than needed, and only leases whose state fits in
host memory and in the owners' quotas for suspended state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, Collection, Iterable, Mapping, Sequence

from .draft import Candidate, Draft, Lack, Reservation, Room
from .model import Charge, HostLack, Reason, Rule, Slice
from .placement import (
    Asking,
    Need,
    Where,
    choose,
    impossible,
    in_order,
    in_turn,
    preferred,
)
from .preemption import asker_kind, candidate, score, unprotected, victim_tier
from .running import Asker, covered, open_above, terms
from .session import Session

#: The usual choice of victims may fail, because host memory is short, or because a guarantee
#: protects a victim when the earlier victims are preempted. The pool then tries every combination
#: of the leases that may be preempted, if these are at most this many. Before that, if host memory
#: is short, the pool tries one other choice: it begins with the leases that free the most device
#: memory for each byte of host memory.
EXACT = 6
#: The pool compares only this many devices: those that can give the most bytes. The reason: the
#: best victim of all may be on a device with few other leases that can be preempted. If the pool
#: always took the best victim, the next session would find too few bytes on this device, and the
#: pool would preempt more leases in total.
WIDTH = 4

#: The reasons for which host memory may be too small, in the order in which they probably end.
LACKS: tuple[HostLack, ...] = ("room", "quota", "size")

WAITS = "another kernel waits for memory"
OWN = "another kernel of the same owner waits, and the owner's quota is in use"


class Trial:
    """The choice of victims and places for one session, on a draft that does not change."""

    def __init__(self, draft: Draft, asker: Session, host: int) -> None:
        self.draft = draft
        self.asker = asker
        self._as_asker: Asker | None = None
        self._opened: Mapping[str, tuple[list[Candidate], int]] | None = None
        self.facts = draft.facts
        if not draft.offers_known:
            _find_offers(draft)
        #: Host bytes available for the victims' state.
        self.host = host
        self.chosen: list[Session] = []
        self.freed: dict[str, int] = {}
        self.takes: tuple[Slice, ...] = ()
        #: The reasons for which host memory was too small for a choice of victims.
        self.host_lacks: set[HostLack] = set()
        self._failed: HostLack = ""
        #: The owner and the :func:`.preemption.asker_kind` of the asker; None until they are
        #: needed.
        self._kind: Any = None
        #: Whether a choice failed because a guarantee protects one of its victims. Another choice
        #: may still work.
        self.shielded = False

    def add(self, victims: Iterable[Session]) -> None:
        """Add ``victims`` to the choice."""
        for v in victims:
            self.chosen.append(v)
            for x in v.lease.slices:
                self.freed[x.device] = self.freed.get(x.device, 0) + x.bytes

    def expect(self, room: Room) -> int:
        """Return the bytes that become free on a device with the victims chosen so far."""
        return room.expect + self.freed.get(room.uuid, 0)

    def tier(self, v: Session) -> int | None:
        """Return the tier of a candidate; None if it is protected or already in this plan."""
        draft = self.draft
        if v.id in draft.leaving or v.id in draft.settled:
            return None
        # Cache the tier for the whole pass, because the facts, the time and the shares do not
        # change during a pass. The tier is valid for this asker, or for all askers of its owner and
        # kind: see _asker_of().
        key = self._asker_of(v), v.id
        if key not in draft.tiers:
            draft.tiers[key] = victim_tier(self._rules(), v, self.facts)
        return draft.tiers[key]

    def _rules(self) -> Asker:
        if self._as_asker is None:
            self._as_asker = Asker(self.asker, self.draft.shares)
        return self._as_asker

    def _candidates(self, room: Room) -> tuple[list[Candidate], int]:
        """Return the candidates on a device, and their total bytes.

        The list has every lease that the asker may preempt. It leaves out most leases that the
        asker may not preempt, but perhaps not all; :meth:`tier` is None for these.
        """
        if self._opened is None:
            asker = self._rules()
            self._opened = self.draft.opened(None if asker.guaranteed else asker.level)
        return self._opened[room.uuid]

    def _asker_of(self, v: Session) -> Any:
        """Return a key for the asker: the tier of ``v`` is the same for all askers with this key.

        The key is the asker's owner and kind. If the asker has a lease, or if the time of its wait
        counts, the key is the asker's id, because the tier is then valid for this asker alone.
        """
        shares, asker = self.draft.shares, self.asker
        if not shares.fair or asker.state != "queued" or v.owner == asker.owner:
            return asker.id
        if self._kind is None:
            self._kind = asker.owner, asker_kind(asker, shares, in_use=True)
        return self._kind

    def options(self, room: Room) -> list[tuple[int, Session, int]]:
        """Return the leases on a device that may still be preempted, as (tier, session, bytes)."""
        return [
            (tier, v, size)
            for v, size, _ in self._candidates(room)[0]
            if (tier := self.tier(v)) is not None and v not in self.chosen
        ]

    def reach(self, room: Room) -> int:
        """Return how many bytes become free on a device if the pool preempts all its options.

        An option is a lease that may still be preempted: see :meth:`options`.
        """
        return self.expect(room) + sum(size for _, _, size in self.options(room))

    def most(self, where: Where) -> dict[str, int]:
        """Return, for each suitable device, the most bytes that the asker can get there.

        On the devices that the head of the queue has reserved, the asker may preempt no lease.
        """
        draft, found = self.draft, {}
        held = draft.reservation.wanted if draft.reservation is not None else ()
        for room in draft.suitable(where):
            if room.uuid in held:
                found[room.uuid] = draft.left(room.ledger)
            else:
                # On most devices, there is no lease that a session of this class may preempt.
                some = room.candidates and self._candidates(room)[0]
                found[room.uuid] = self.reach(room) if some else self.expect(room)
        return found

    def out_of_reach(self, found: Asking) -> bool:
        """Return whether :meth:`place` must fail for a request of several slices.

        If the answer is True, the request does not fit even if the pool preempts all possible
        victims and host memory has room for them. If the answer is False, :meth:`place` may still
        fail.
        """
        if len(found.needs) > 1:
            for where, (count, least) in found.kinds:
                if on_each(count, sorted(self.most(where).values(), reverse=True)) < least:
                    return True
        return False

    def victims(self, room: Room, missing: int) -> list[Session] | None:
        """Return the leases on a device that free ``missing`` bytes there, or None."""
        if room.offered < missing or self._candidates(room)[1] < missing:
            return None
        options = self.options(room)
        if sum(size for _, _, size in options) < missing:
            return None
        now = self.facts.now
        options.sort(key=lambda o: (o[0], score(o[1], now)))
        found = self._greedy(options, missing)
        if found is None and self._failed:
            # Host memory is short: prefer the leases that free the most device memory for each byte
            # of host memory that their state needs.
            self.host_lacks.add(self._failed)
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
        """Return whether ``victims`` may be preempted together with those chosen so far.

        There are two conditions. Host memory (and the quotas for suspended state) must have room
        for the state of all victims. No guarantee may protect a victim in use after the earlier
        victims are preempted. The method notes which of the two conditions failed.
        """
        everybody = [*self.chosen, *victims]
        lack = self.draft.host_lack(everybody, self.host)
        if lack:
            self._failed = lack
            return False
        if self._covered(everybody):
            self.shielded = True
            return False
        return True

    def _covered(self, victims: Sequence[Session]) -> bool:
        if not self.facts.tree.guarantees:
            return False
        tiers = [(v, self.tier(v) or 0) for v in victims]
        return covered(self.asker, tiers, self.draft.going, self.draft.shares)

    def place(self, needs: Sequence[Need], *, more: bool = True) -> bool:
        """Choose a device for each need, and set :attr:`takes`; return whether there is a choice.

        If ``more`` is true, the method may add victims. It compares the ``WIDTH`` suitable devices
        that can give the most bytes. The best device is the one whose victims have the lowest tier;
        a device that needs no victims is better than any device with victims. Of equal devices, a
        device of the session's last lease is better. Of devices that are still equal, the best is
        the one whose first victim has the largest product of bytes and idle time. On a device that
        the head of the queue has reserved, the method preempts no lease: the session gets only the
        bytes that the head can spare.
        """
        last, now = preferred(self.asker), self.facts.now
        draft, rooms = self.draft, self.draft.rooms
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
                if room.uuid in used or not need.allows(room.ledger):
                    continue
                amount = need.amount(room.ledger)
                missing = amount - self.expect(room)
                found: list[Session] = []
                if draft.reserved(room):
                    if draft.left(room.ledger) < amount:
                        continue
                elif missing > 0:
                    victims = self.victims(room, missing) if more else None
                    if victims is None:
                        continue
                    found = victims
                good += 1
                key = (
                    max((self.tier(v) or 0) + 1 for v in found) if found else 0,
                    room.uuid not in last,
                    score(found[0], now)[0] if found else self.expect(room),
                    room.ledger.device.index,
                )
                if best is None or key < best[0]:
                    best = key, room, found
            if best is None:
                return False
            _, room, found = best
            self.add(found)
            used.add(room.uuid)
            takes[at] = Slice(room.uuid, need.amount(room.ledger))
        self.takes = in_order(needs, takes, self.facts.devices)
        return True

    # ------------------------------------------------------------------ the owner's own leases

    def own(self, charge: Charge) -> bool:
        """Preempt leases that count in the owner's limits; return whether the limits then allow
        ``charge``.

        The method counts the leases whose suspend is under way as ended. It preempts no more leases
        than needed.
        """
        draft, owner = self.draft, self.asker.owner
        back = draft.coming_back(owner)
        if draft.lacking(owner, charge, back) is None:
            return True
        found: list[Session] = []
        now = self.facts.now
        for _, v in sorted(self.own_options(), key=lambda o: (o[0], score(o[1], now))):
            if not self.fits([*found, v]):
                if self._failed:
                    self.host_lacks.add(self._failed)
                continue
            found.append(v)
            if draft.lacking(owner, charge, [*back, *found]) is None:
                break
        else:
            return False
        for v in found[-2::-1]:
            fewer = [w for w in found if w is not v]
            if draft.lacking(owner, charge, [*back, *fewer]) is None:
                found = fewer
        self.add(found)
        return True

    def own_options(self) -> list[tuple[int, Session]]:
        """Return the leases that count in the owner's limits and may be preempted, with tiers."""
        return [
            (tier, v)
            for v in self.draft.sharing(self.asker.owner)
            if candidate(v, self.facts) is not None and (tier := self.tier(v)) is not None
        ]


def leases_in_use(draft: Draft) -> bool:
    """Return whether a lease in use may be preempted for some session."""
    if not draft.offers_known:
        _find_offers(draft)
    return draft.offers_in_use


def out_of_reach(draft: Draft, s: Session, found: Asking) -> bool:
    """Return whether :meth:`Trial.place` must fail for ``s``, and for an equal request of any
    owner.

    The test counts every lease that a session of this class might preempt as free. The answer is
    True if even then too few suitable devices have room for a slice. If the answer is False,
    :meth:`Trial.place` may still fail.
    """
    if not draft.offers_known:
        _find_offers(draft)
    level = None if s.id in draft.shares.entitled else draft.shares.level(s)
    for where, (count, least) in found.kinds:
        ranked = draft.reach(where, level)
        if on_each(count, ranked) < least:
            return True
    return False


def on_each(count: int, ranked: Sequence[int]) -> int:
    """Return the largest size that each of ``count`` devices can give; -1 if there are too few.

    ``ranked`` are the sizes that the devices can give, the largest first.
    """
    return ranked[count - 1] if len(ranked) >= count else -1


def _find_offers(draft: Draft) -> None:
    """Note for each device the leases that some session may preempt now.

    To save time, the pass calls this only when a session finds no free memory. The result does not
    depend on the moment of the call, because it depends on the facts alone, and the facts do not
    change during a pass.
    """
    draft.offers_known = True
    facts, rooms, now = draft.facts, draft.rooms, draft.facts.now
    preempts, shares = bool(facts.settings.preempt), draft.shares
    for v in facts.leased.values():
        # This is the same test as in candidate(). The loop does not call candidate(), because it
        # also needs the other values of terms().
        if v.state == "idle" and unprotected(v, facts):
            opens, over = -math.inf, False
        elif preempts:
            _, at, ends, level = terms(v, facts)
            if at > now:
                continue
            draft.offers_in_use = True
            over = ends <= now
            opens = open_above(v, level, shares, over=over)
        else:
            continue
        for x in v.lease.slices:
            room = rooms[x.device]
            room.candidates.append((v, x.bytes, opens))
            room.offered += x.bytes
        if over:
            own = draft.turns_over.setdefault(v.owner, {})
            for x in v.lease.slices:
                own[x.device] = own.get(x.device, 0) + x.bytes


def _offer(room: Room) -> tuple[int, int]:
    """Return the sort key of devices: the device with the most bytes to give comes first."""
    return -room.expect - room.offered, -room.ledger.device.index


def any_combination(draft: Draft, s: Session, asking: Asking, host: int) -> Trial | None:
    """Return a trial with the smallest set of victims that makes room, or None.

    The answer is also None if there are more than ``EXACT`` candidates.
    """
    owner, needs = s.owner, asking.needs
    quota = draft.lacking(owner, asking.charge) is not None
    first = Trial(draft, s, host)
    # If the owner exceeds a limit, each lease that counts in the limit is an option, on any device.
    # If not, the options depend only on the devices, so equal requests for the same devices have
    # the same options. Reach._failed_before() relies on this.
    options = {v.id: (tier, v) for tier, v in first.own_options()} if quota else {}
    for room in draft.rooms.values():
        if not draft.reserved(room) and any(need.allows(room.ledger) for need in needs):
            options.update((v.id, (tier, v)) for tier, v, _ in first.options(room))
        if len(options) > EXACT:
            return None
    back = draft.coming_back(owner) if quota else []
    now = draft.facts.now
    ordered = [v for _, v in sorted(options.values(), key=lambda o: (o[0], score(o[1], now)))]
    for count in range(1, len(ordered) + 1):
        for group in combinations(ordered, count):
            if not first.fits(group):
                continue
            if draft.lacking(owner, asking.charge, [*back, *group]) is None:
                trial = Trial(draft, s, host)
                trial.add(group)
                if trial.place(needs, more=False):
                    return trial
    return None


# --------------------------------------------------------------------------- one session


@dataclass(frozen=True, slots=True)
class Offer:
    """A place for a session, and the victims that make room there."""

    takes: tuple[Slice, ...]
    victims: Sequence[Session] = ()
    #: Whether the bytes are free now.
    ready: bool = False
    reason: str = WAITS
    #: The tiers of victims in use, by session.
    tiers: Mapping[str, int] = field(default_factory=dict)


def attempt(draft: Draft, s: Session, found: Asking, *, behind_head: bool) -> Offer | Reason:
    """Return a place for ``s`` in free memory, or else the result of :func:`make_room`.

    With ``behind_head``, the victims' state takes no host memory that the head of the queue will
    need.
    """
    lacks = draft.lacking(s.owner, found.charge)
    takes = draft.now(s, found.needs) if lacks is None else None
    if takes is not None:
        return Offer(takes, ready=True)
    return make_room(draft, s, found, lacks, behind_head=behind_head)


def make_room(
    draft: Draft, s: Session, found: Asking, lacks: Lack | None, *, behind_head: bool
) -> Offer | Reason:
    """Return a place for ``s`` that victims or suspends under way free, or why there is none.

    ``lacks`` is the limit that ``s`` exceeds, or None if ``s`` lacks only free memory.
    """
    owner, needs = s.owner, found.needs
    why = impossible(found, draft.facts)
    if why is not None:
        return why
    host = draft.host_left() if behind_head else draft.host
    trial = Trial(draft, s, host)
    if lacks is None and (out_of_reach(draft, s, found) or trial.out_of_reach(found)):
        own, placed = True, False
    else:
        own = lacks is None or trial.own(found.charge)
        placed = own and trial.place(needs)
    lacking = trial.host_lacks
    if not placed and (lacking or trial.shielded):
        other = any_combination(draft, s, found, host)
        placed, trial = other is not None, other or trial
    if placed:
        tiers = {v.id: tier for v in trial.chosen if (tier := trial.tier(v))}
        return Offer(trial.takes, trial.chosen, reason=WAITS if lacks is None else OWN, tiers=tiers)
    # ``own`` says whether the pool could free enough of the limit by preempting leases that count
    # in it. If so, the session waits for memory and for the limit, and the reason names both.
    limit, group = (lacks.name, lacks.group) if lacks is not None else ("", "")
    if lacks is not None and not own:
        if lacking:
            return Reason("quota-host", limit=limit, group=group, most=host, lacks=_lack(lacking))
        others = sum(1 for v in draft.sharing(owner, group) if v is not s)
        rule: Rule = "cap" if group else "quota"
        text = draft.facts.elsewhere_text(owner.name, lacks.name, group)
        return Reason(rule, limit=limit, most=lacks.most, count=others, group=group, text=text)
    rule = "host" if lacking else "busy"
    if behind_head and fits_now(draft, needs):
        rule = "behind-head"
    why = Reason(rule, bytes=found.size, count=len(needs), limit=limit, group=group)
    return replace(why, most=host, lacks=_lack(lacking)) if rule == "host" else why


def _lack(found: Collection[HostLack]) -> HostLack:
    """Return the reason in ``found`` that probably ends first.

    There may be several reasons, because the search tries several choices of victims, and host
    memory may be too small for each choice for a different reason.
    """
    return next(lack for lack in LACKS if lack in found)


def fits_now(draft: Draft, needs: Sequence[Need]) -> bool:
    """Return whether ``needs`` would fit in free memory without the head's reservation."""
    left = {uuid: room.avail for uuid, room in draft.rooms.items()}
    return choose(needs, draft.facts.devices, left) is not None


def kept_for_head(draft: Draft, found: Asking) -> bool:
    """Return :func:`fits_now` for a request that does not fit beside the head's reservation.

    To save time, the function first looks at the devices that the head has reserved. The request
    needs at least one of them, because it does not fit on the other devices alone.
    """
    held = draft.reservation.wanted if draft.reservation is not None else ()
    for uuid in held:
        room = draft.rooms[uuid]
        if room.avail >= found.least:
            if len(found.needs) > 1:
                return fits_now(draft, found.needs)
            need, ledger = found.needs[0], room.ledger
            if need.allows(ledger) and room.avail >= need.amount(ledger):
                return True
    return False


def blocked_as(draft: Draft, s: Session, need: Need, rule: Rule) -> Rule | None:
    """Return the rule that blocks ``need``, if ``rule`` blocks an equal need for fewer bytes.

    The two rules may differ. For example, the free memory on the devices that the head has reserved
    may be enough for the smaller need, but not for ``need``. The answer is None if only a search
    can find the rule.
    """
    if rule == "behind-head":
        return rule if fits_now(draft, (need,)) else None
    if rule == "host":
        trial = Trial(draft, s, 0)
        rooms = (r for r in draft.rooms.values() if need.allows(r.ledger) and not draft.reserved(r))
        return rule if any(trial.reach(r) >= need.amount(r.ledger) for r in rooms) else "busy"
    return rule


def reservation(
    draft: Draft, s: Session, found: Asking, keep: Collection[str]
) -> tuple[Reservation, bool]:
    """Return the reservation for ``s``, the head of the queue, and whether ``s`` has been the head
    for at least ``ageing`` seconds.

    The reservation keeps the devices of the last reservation (``keep``). If it needs more devices,
    it takes those on which the head can get the most bytes. After two times ``ageing`` seconds, and
    again after each further ``ageing`` seconds, it takes one more device, because a lease on the
    earlier devices may never end. It leaves out devices on which programs outside the pool leave
    too little memory.
    """
    facts, needs, now = draft.facts, found.needs, draft.facts.now
    since = now if s.wait.head_since is None else s.wait.head_since
    ageing = max(1.0, facts.settings.ageing)
    rounds = int((now - since) / ageing)
    while since + (rounds + 1) * ageing <= now:  # the division may have rounded down slightly
        rounds += 1
    count = len(needs) + max(0, rounds - 1)
    trial, rooms = Trial(draft, s, 0), draft.rooms
    mine = [rooms[uuid] for uuid in (*keep, *(need.fixed for need in needs if need.fixed))]
    in_service = [r for r in rooms.values() if not r.ledger.drained]
    in_service.sort(key=lambda r: (trial.reach(r), r.ledger.device.index), reverse=True)
    wanted: dict[str, int] = {}
    more = False
    for room in dict.fromkeys((*mine, *in_service)):
        d = room.ledger
        most = d.capacity - d.foreign - d.overuse
        amounts = [size for n in needs if n.allows(d) and (size := n.amount(d)) <= most]
        if not amounts:
            continue
        if len(wanted) >= count and room not in mine:
            more = True
            break
        wanted[room.uuid] = max(amounts)
    next_at = since + (rounds + 1) * ageing if more or rounds < 1 else math.inf
    return Reservation(s.id, wanted, len(needs), found.charge, next_at), rounds >= 1
