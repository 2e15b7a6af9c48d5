# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The time at which the plan next changes because time passes.

At this time, the broker sends a ``Tick`` (``_schedule`` in ``broker/runner``).
"""

from __future__ import annotations

import math
from typing import Sequence

from ..states import ATTACHED
from .facts import Facts
from .model import Owner
from .preemption import leaving, times
from .residence import SLICE_LEAST
from .running import holder_level, rate, slice_ends, time_slice, use_times
from .schedule import Plan, stopped, stops_at
from .session import Session
from .shares import RECHECK, Shares, Side, budget_changes_at, climbs_at


def next_recheck(facts: Facts, plan: Plan) -> float:
    """Return when the plan next changes because time passes; infinity if time alone changes
    nothing.
    """
    most = facts.settings.max_wait
    in_use = bool(facts.settings.preempt and plan.order)
    found = [] if plan.reservation is None else [plan.reservation.next_at]
    found += leaving(facts).values()
    for s in facts.leased.values() if plan.order else ():
        if s.state == "idle":
            found.append(times(s, facts)[0])
        if in_use and s.state in ATTACHED:
            found += use_times(s, facts)
    for s in plan.queue:
        found.append(s.retry_at)
        if most is not None:
            found.append(math.inf if s.preempted else s.queued_at + most)
    if facts.stops:
        shares = Shares(facts)
        found += (stops_at(s, facts) for s in facts.leased.values() if stopped(s, shares))
        found += (s.recall_at for s in facts.recalled.values())
    if facts.tree.budgeted:
        everybody = (*facts.leased.values(), *facts.waiting.values())
        owners = {(s.owner.name, s.owner.group): s.owner for s in everybody}
        found += (budget_changes_at(facts, owner) for owner in owners.values())
    if in_use:
        # A session in use that waits to grow is an asker, too; an idle session is not.
        askers = [s for s in plan.order if s.state != "idle"]
        found.append(next_turn(askers, facts))
        found.append(climbs_at(askers, facts))
    if plan.contended:
        found.append(facts.now + RECHECK)
    now = facts.now
    return min([at for at in found if at > now], default=math.inf)


def next_turn(queue: Sequence[Session], facts: Facts) -> float:
    """Return when a waiting session may first take a turn that it may not take now.

    The answer is infinity if no session may take such a turn within ``RECHECK`` seconds.
    """
    now, until, found = facts.now, facts.now + RECHECK, math.inf
    if "turns" not in facts.settings.preempt:
        return found
    holders = [v for v in facts.leased.values() if slice_ends(v, facts) <= until]
    if not holders or not queue:
        return found
    for s in queue:
        if (at := s.wait.since + SLICE_LEAST) > now:
            found = min(found, at)  # ``s`` may then take the turn of another session of its owner
    shares = Shares(facts)
    if not shares.fair:
        return found
    askers: dict[int, dict[Owner, Sequence[Side]]] = {}
    # Keep the order of the queue, and use each pair of class and owner only once.
    for level, owner in dict.fromkeys((shares.level(s), s.owner) for s in queue):
        askers.setdefault(level, {})[owner] = shares.sides(owner)
    holders.sort(key=lambda v: slice_ends(v, facts))
    for v in holders:
        theirs, since = shares.sides(v.owner), max(now, slice_ends(v, facts))
        if since >= found:
            break
        debt = time_slice(v, facts) * rate(v, shares)
        for owner, ours in askers.get(holder_level(v, facts), {}).items():
            for mine, its in zip(ours, theirs, strict=False):
                if mine.name != its.name:
                    break
            else:
                continue
            # This cheap check rules out most pairs of asker and holder, and a long queue has many
            # pairs. As a function of the decay factor, each weighted usage is the maximum of two
            # lines (memory and compute). If the same line of the asker is the higher one during the
            # whole period, the asker's usage minus the holder's is a concave function. If the
            # difference is not negative at the start and at the end of the period, a concave
            # function is never negative between them. So the asker is never behind in the period.
            gain = debt / mine.weight
            if mine.used + gain < its.used:
                if since == now:
                    continue  # the asker may take the turn now
            elif mine.then + gain >= its.then and not mine.bends:
                continue
            at = shares.behind_from(owner, v.owner, debt, since)
            if now < at < found:
                found = at
    return found
