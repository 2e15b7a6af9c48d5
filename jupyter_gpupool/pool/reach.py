# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Bounds on the memory that sessions behind the head of the queue can get.

With these bounds, a pass of the planner need not search victims for most sessions. A *bound* says
how many bytes a session would get on each device if the pool preempted every lease that the session
might preempt. It includes free bytes, the bytes of suspends under way, and the bytes of every
possible victim. A request for ``n`` slices must fail if fewer than ``n`` devices have a bound that
is large enough for a slice.

There are two kinds of bounds. The pass computes the bound of a class once for each class
(:meth:`.draft.Draft.reach`). The bound of a session depends on the tier of each lease; it is also
valid for another session that may preempt no more leases (:meth:`Bound.adds`). So in a queue of
hundreds of sessions, the pass searches victims for only a few.

A bound stays true as long as the draft only loses bytes. When the draft gains bytes (by a suspend,
or when a promise moves or becomes void), the pass drops all bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Mapping, NamedTuple

from .draft import ANY, Draft
from .model import Owner, Reason, Rule
from .placement import Asking, Where, impossible
from .preemption import asker_kind
from .session import Session
from .victims import Trial, blocked_as, kept_for_head, leases_in_use, on_each, out_of_reach


class OwnerTerms(NamedTuple):
    """The facts about an owner that bounds depend on."""

    #: Its group, and whether its daily budget is used up.
    kind: tuple[str, bool]
    #: Its decayed usage.
    used: float
    #: For each device, the pool adds up the owner's leases whose turn is over. This is the largest
    #: of these sums, in bytes.
    over: int


#: The class of a session, the groups whose guarantee covers its request, and
#: :attr:`OwnerTerms.kind` of its owner. :func:`~.running.kind_of` has the same values, and also
#: :attr:`.placement.Asking.modest`.
Kind = tuple[int, "frozenset[str] | None", tuple[str, bool]]

#: Two answers of :meth:`Reach._out_of_reach`. ``ANYBODY``: an equal request of any owner must also
#: fail. ``NOBODY``: an equal request of another owner may succeed.
ANYBODY, NOBODY = (-1.0, math.inf), (math.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Bound:
    """The most bytes on each device that a session of one kind can get.

    The pass computed the bound for one session. ``owner``, ``used`` and ``since`` (the start of its
    wait) belong to this session; :meth:`adds` compares other sessions with it.
    """

    owner: Owner
    #: The decayed usage of its owner.
    used: float
    since: float
    #: The bound by device in service.
    bytes: Mapping[str, int]
    #: The bounds of the devices that suit each :data:`~.placement.Where`, the largest first.
    ranked: dict[Where, list[int]]

    def lacks(self, found: Asking, draft: Draft) -> int:
        """Return by how many bytes a request exceeds the bound; 0 if it does not."""
        most = 0
        for where, (count, least) in found.kinds:
            ranked = self.ranked.get(where)
            if ranked is None:
                sizes = [self.bytes[room.uuid] for room in draft.suitable(where)]
                ranked = self.ranked[where] = sorted(sizes, reverse=True)
            most = max(most, least - on_each(count, ranked))
        return most

    def adds(self, s: Session, owner: OwnerTerms, draft: Draft) -> float:
        """Return how many bytes more than this bound ``s`` may get; infinity if unknown.

        If all candidates are idle, any session may preempt them, so the bound is the same for all
        sessions. Otherwise, two sessions of one kind can differ in two ways.

        First, their owners may have different usage. Both owners are in one group, so
        :meth:`.shares.Shares.behind` either compares their group with another group, or compares
        each of them with the same account. If the owner with more usage is behind a holder, then
        the owner with less usage is also behind this holder. So ``s`` gains nothing from its usage
        if its owner has used at least as much as the owner of the bound.

        Second, between sessions of one owner, the time of the wait decides which session takes a
        turn. So ``s`` may be able to preempt leases of its own owner whose turn is over, although
        the bound does not include these leases. They add at most ``owner.over`` bytes on a device.
        The leases of the bound's owner add nothing: for ``s``, they count like the leases of any
        other owner.
        """
        fair = draft.shares.fair
        if draft.offers_in_use and (s.wait.since < self.since or (fair and s.owner != self.owner)):
            return owner.over if fair and owner.used >= self.used else math.inf
        return 0


class Reach:
    """Finds the requests behind the head that must fail, and remembers the answers for one pass."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._shares = draft.shares
        #: The bounds found so far, by kind of asker.
        self._bounds: dict[object, list[Bound]] = {}
        #: Failed requests, by kind of asker: (least, bytes, since, reason).
        self._failed: dict[object, list[tuple[int, int, float, Reason]]] = {}
        #: The reasons of this pass. Sessions that wait for the same reason share one object.
        self._reasons: dict[tuple[Rule, int, int], Reason] = {}
        self._owners: dict[Owner, OwnerTerms] = {}

    def gained(self) -> None:
        """Forget the answers that may be wrong now, because the draft has gained bytes."""
        self._failed.clear()
        self._bounds.clear()

    def hopeless(self, s: Session, found: Asking) -> Reason | None:
        """Return why the request of ``s`` must fail; None if only a search can tell.

        No quota or cap stops ``s``. The request must fail if it exceeds the bound, or if the
        failure of an earlier request proves it (:meth:`_failed_before`).

        Most sessions get the cached answer of an earlier session of the same kind and
        :attr:`~.placement.Asking.shape`. A cached answer is valid until the draft changes. The two
        sessions can differ only in the owner and in the time of the wait, which matter only in
        :meth:`Bound.adds`. If the owner of ``s`` has used at least as much as the owner of the
        bound, ``s`` can get at most ``over`` bytes more than the bound, whatever its time.
        """
        draft, shares = self._draft, self._shares
        whose, used, over = self._owners.get(s.owner) or self._terms(s.owner)
        level = shares.levels.get(s.id)  # this equals level(), without a call
        if level is None:
            level = shares.level(s)
        kind: Kind = level, shares.entitled.get(s.id), whose
        known = draft.known.hopeless.get((found.shape, kind))
        if known is not None and used >= known[0] and over < known[1]:
            return known[2]
        if impossible(found, draft.facts) is not None:
            return None
        limits = self._out_of_reach(s, kind, found)
        if limits is None:
            return self._failed_before(s, found)
        # make_room() would give the same reason.
        why = self._reason("behind-head" if kept_for_head(draft, found) else "busy", found)
        draft.known.hopeless[found.shape, kind] = *limits, why
        return why

    def _terms(self, owner: Owner) -> OwnerTerms:
        draft, shares = self._draft, self._shares
        own = draft.turns_over.get(owner) if leases_in_use(draft) else None
        account = draft.facts.meters.users.get(owner.name)
        found = self._owners[owner] = OwnerTerms(
            (owner.group, shares.budgeted and shares.spent(owner) is not None),
            0.0 if account is None else shares.used(account),
            0 if own is None else max(own.values()),
        )
        return found

    def _out_of_reach(self, s: Session, kind: Kind, found: Asking) -> tuple[float, float] | None:
        """Return for which owners an equal request must also fail; None if ``s`` may succeed.

        If ``s`` must fail, the answer is (usage, bytes). It stands for all owners that have at
        least this usage and whose leases can add less than these bytes to the bound.
        """
        draft, owner = self._draft, self._owners[s.owner]
        if out_of_reach(draft, s, found):
            return ANYBODY
        if s.lease.slices:
            return None  # no bound of other sessions is valid: it cannot preempt its own lease
        in_use = draft.offers_in_use
        bounds = self._bounds.setdefault((kind, found.modest) if in_use else None, [])
        for bound in bounds:
            lacks = bound.lacks(found, draft)
            if lacks > bound.adds(s, owner, draft):
                break
        else:
            if bounds and not in_use:
                return None  # all candidates are idle, so one bound is valid for all sessions
            most = Trial(draft, s, draft.host).most(ANY)
            bound = Bound(s.owner, owner.used, s.wait.since, most, {})
            bounds.append(bound)
            lacks = bound.lacks(found, draft)
            if lacks <= 0:
                return None
        if not in_use:
            return ANYBODY
        return (bound.used, lacks) if self._shares.fair else NOBODY

    def _failed_before(self, s: Session, found: Asking) -> Reason | None:
        """Return why ``s`` must fail; None if no earlier failed request proves this.

        An earlier request proves it if it failed, was not larger, and did not begin to wait later.
        The reasons are these. Since the failure, the draft has only lost bytes, because every gain
        clears the failures. Both requests are for one slice on the same devices, without a quota,
        and both sessions may preempt the same victims. If a step of :func:`~.victims.attempt` finds
        room for an amount, it also finds room for a smaller amount. (This is true for free bytes,
        for greedy victims in a fixed order, and for the combinations, which have the same options
        for both requests.) Every promise that ``s`` can take over, the failed request could also
        take over.
        """
        draft = self._draft
        if not self._failed or found.where is None:
            return None
        need = found.needs[0]
        for least, size, since, why in self._failed.get((found.where, self._asker(s)), ()):
            if need.least >= least and need.bytes >= size and s.wait.since >= since:
                rule = blocked_as(draft, s, need, why.rule)
                if rule == "host":
                    return replace(why, bytes=found.size, most=draft.host_left())
                if rule is not None:
                    return self._reason(rule, found)
        return None

    def failed(self, s: Session, found: Asking, why: Reason) -> None:
        """Note that the search for ``s`` failed."""
        if found.where is not None:
            need = found.needs[0]
            failure = need.least, need.bytes, s.wait.since, why
            # Put the smallest request first: it rules out the most other requests.
            self._failed.setdefault((found.where, self._asker(s)), []).insert(0, failure)

    def _asker(self, s: Session) -> object:
        in_use = leases_in_use(self._draft)  # if not, any session may preempt all candidates
        return (s.owner, asker_kind(s, self._shares, in_use=True)) if in_use else None

    def _reason(self, rule: Rule, found: Asking) -> Reason:
        key = rule, found.size, len(found.needs)
        known = self._reasons.get(key)
        if known is None:
            known = self._reasons[key] = Reason(rule, bytes=found.size, count=len(found.needs))
        return known
