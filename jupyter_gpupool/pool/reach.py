# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What sessions behind the head of the queue can get at most: most of a long queue needs no search.

A *bound* is what a session would have on each device if every lease that it might preempt there
were preempted. A request that needs more on all devices (with ``n`` slices: on all but ``n - 1``)
is hopeless: free bytes, suspends under way and every choice of victims give it no more than that.
There are two bounds. That of a class is found once for each (:meth:`.draft.Draft.reach`). That of a
session needs the tier of each lease, and holds for others that may preempt no more
(:meth:`Bound.rules_out`). So a pass searches victims for a few sessions of a queue of hundreds.

Bounds found earlier in a pass stay true as long as the draft only loses bytes. The pass drops them
with every gain (a suspend, a promise that moves or is void).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from .draft import ANY, Draft
from .model import Owner
from .placement import Asking, Where
from .running import kind_of
from .session import Session
from .victims import Trial, on_each, out_of_reach


@dataclass(frozen=True, slots=True)
class Bound:
    """What one session can get at most, and others of its :func:`~.running.kind_of`."""

    owner: Owner
    #: The decayed usage of its owner.
    used: float
    since: float
    #: By device in service.
    bytes: Mapping[str, int]
    #: By suitable devices: the same, the most first.
    ranked: dict[Where, list[int]]

    def rules_out(self, s: Session, used: float, found: Asking, draft: Draft) -> bool:
        """Return True only if ``s`` needs more than it can get at most.

        Where all candidates are idle, any session may preempt them. Else two things can make a
        difference between two sessions of a kind. The usage of the owner: of a group, an owner that
        has used more is behind no holder that the other is not behind
        (:meth:`.shares.Shares.behind` compares two groups, or each of them with the same account).
        And a lease of the asker's own owner, where the time of the wait decides who takes a turn. A
        lease of this bound's owner counts for ``s`` like that of any other. The leases of its own
        owner whose turn is over may add to the bound: on no device more than the largest sum.
        """
        more, fair = 0, draft.shares.fair
        if draft.offers_in_use and (s.wait.since < self.since or (fair and s.owner != self.owner)):
            if used < self.used or not fair:
                return False
            own = draft.turns_over.get(s.owner)
            more = 0 if own is None else max(own.values())
        for where, (count, least) in found.kinds:
            ranked = self.ranked.get(where)
            if ranked is None:
                ranked = sorted((self.bytes[r.uuid] for r in draft.suitable(where)), reverse=True)
                self.ranked[where] = ranked
            if on_each(count, ranked) + more < least:
                return True
        return False


#: By kind of asker: the bounds that a pass knows.
Bounds = dict[object, list[Bound]]


def hopeless(s: Session, found: Asking, draft: Draft, bounds: Bounds) -> bool:
    """Return whether ``s``, which no quota or cap keeps, must fail behind the head.

    ``bounds`` are those that the pass knows; a new one is added.
    """
    shares = draft.shares
    if out_of_reach(draft, s, found):
        return True
    if s.lease.slices:
        return False  # it cannot preempt itself, and others can
    kind = kind_of(s, shares) if draft.offers_in_use else None
    known = bounds.get(kind)
    if known is None:
        known = bounds[kind] = []
    account = draft.facts.meters.users.get(s.owner.name)
    used = 0.0 if account is None else shares.used(account)
    for bound in known:
        if bound.rules_out(s, used, found, draft):
            return True
    if kind is None and known:
        return False  # one bound holds for all
    mine = Bound(s.owner, used, s.wait.since, Trial(draft, s, draft.host).most(ANY), {})
    known.append(mine)
    return mine.rules_out(s, used, found, draft)
