# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sessions that cannot be suspended while others wait: the pool warns, asks, and may end them.

The pool either never tries to suspend such a session, or each suspend fails (because the process is
stopped, or because its work on the GPU does not end). Without this module, other sessions could
wait for its slice without end, although a rule (:mod:`.running`) allows them to take it. There are
three stages: the pool first warns the user of the holder, later asks the user to free the slice,
and at last ends the holder. ``PoolSettings.unsuspendable`` says which stages are allowed, and
``unsuspendable_after`` when they begin. When no session waits for the slice any more, the pool goes
back to the first stage.
"""

from __future__ import annotations

import math

from ..units import format_bytes, format_seconds
from .events import EndSession, Warn
from .facts import Facts
from .model import FOR_MEMORY
from .placement import asking
from .preemption import obstacle
from .running import Asker
from .schedule import Plan
from .session import Session
from .shares import Shares
from .transitions import Actions, move

#: The rules by which a session waits for the cap of its group.
_FOR_CAP = ("cap", "behind-group")

#: The number of stages that each value of ``PoolSettings.unsuspendable`` allows.
STAGES = {"warn": 1, "ask": 2, "end": 3}


def note(facts: Facts, plan: Plan) -> None:
    """Note which sessions cannot be suspended although others wait for their slices in ``plan``."""
    ledgers, least = facts.devices.values(), facts.settings.host_least()
    fixed = any(not ledger.device.can_suspend for ledger in ledgers)
    large = least < sum([ledger.granted for ledger in ledgers])
    some = [
        s
        for s in facts.leased.values()
        if s.refused
        or s.pinned_reason
        or not s.gated
        or fixed
        or (large and s.lease.granted > least)
    ]
    found = [s for s in some if obstacle(s, facts)]
    before, facts.stuck = facts.stuck, {}
    if found:
        shares = Shares(facts)
        shares.order()
        for s in found:
            waiter = _waiter(s, plan, shares)
            if waiter is not None:
                facts.stuck[s.id] = s, waiter
                if s.lease.stuck_since is None:
                    s.lease.stuck_since = facts.now
    for name, (s, w) in before.items():
        if s.state == "detaching" and s.refused and w.id in facts.waiting:
            # the pool tries the suspend again; until it succeeds, the others wait
            facts.stuck[name] = s, w
        elif name not in facts.stuck:
            s.lease.stuck_since, s.lease.warned = None, 0


def warn(facts: Facts) -> Actions:
    """For each noted session whose next stage is due: warn its user, ask its user, or end it."""
    actions = Actions()
    for s, waiter in list(facts.stuck.values()):
        while waiter.id in facts.waiting and obstacle(s, facts) and due(s, facts) <= facts.now:
            s.lease.warned += 1
            actions += _stage(facts, s, waiter)
    return actions


def due(s: Session, facts: Facts) -> float:
    """Return when the next stage of ``s`` is due; infinity if there is no further stage."""
    lease, rules = s.lease, facts.settings
    if lease.stuck_since is None or lease.warned >= STAGES[rules.unsuspendable]:
        return math.inf
    return lease.stuck_since + rules.unsuspendable_after[lease.warned]


def ends_at(s: Session, facts: Facts) -> float:
    """Return when the pool ends ``s`` if nothing changes; infinity if the pool does not end it."""
    since, rules = s.lease.stuck_since, facts.settings
    if since is None or rules.unsuspendable != "end":
        return math.inf
    return since + rules.unsuspendable_after[2]


def _waiter(holder: Session, plan: Plan, shares: Shares) -> Session | None:
    """Return the first session that waits for the slice of ``holder`` and may take it by some rule.

    This session waits for the memory of ``holder``, or for a group cap in which the lease of
    ``holder`` counts.
    """
    facts = shares.facts
    own = [facts.devices[x.device] for x in holder.lease.slices]
    groups = facts.tree.path(holder.owner.group)
    for w in plan.queue:
        why = plan.reasons.get(w.id)
        if why is None:
            continue
        if why.rule in _FOR_CAP:
            wanted = why.group in groups
        else:
            needs = asking(w, facts).needs if why.rule in FOR_MEMORY else ()
            wanted = any(need.allows(ledger) for need in needs for ledger in own)
        if wanted:
            found = next((at for _, at in Asker(w, shares).claims(holder, stuck=True)), math.inf)
            if found <= facts.now or (holder.state == "idle" and holder.keep_until <= facts.now):
                return w
    return None


def _stage(facts: Facts, s: Session, waiter: Session) -> Actions:
    stage = s.lease.warned
    size = format_bytes(waiter.request.memory)
    what = f"{size} on " + " and ".join(
        f"GPU {facts.devices[x.device].device.index}" for x in s.lease.slices
    )
    for group in facts.tree.capped(s.owner.group):
        if group in facts.tree.path(waiter.owner.group):
            has, more = facts.usage_in(group), asking(waiter, facts).charge[0]
            if has + more > facts.tree.caps[group]:
                what = f"{size} within the cap of the group {group}"
    why = obstacle(s, facts)
    since = s.lease.stuck_since or facts.now
    waited = format_seconds(facts.now - since)
    if stage == STAGES["end"]:
        text = (
            f"Another kernel waited for {waited} for {what}, and this kernel could not "
            f"be suspended ({why}). So the pool ends this kernel now (c.GPUPool.unsuspendable)."
        )
        s.holds = {}
        return [
            *move(facts, s, "ended", text, lost=True),
            EndSession(session=s.id, message=text),
        ]
    end = ends_at(s, facts)
    at = None if end == math.inf else end
    text = (
        f"Another kernel has waited for {waited} for {what}, and this kernel cannot be "
        f"suspended ({why}). "
    )
    if stage == STAGES["warn"]:
        text += "Free the GPU memory, or restart the kernel, when you can."
        return [Warn(session=s.id, stage="warn", message=text, ends_at=at)]
    text += "Please free the GPU memory or restart the kernel now."
    if at is not None:
        text += (
            f" Otherwise the pool ends this kernel in {format_seconds(max(0.0, at - facts.now))}."
        )
    return [Warn(session=s.id, stage="ask", message=text, ends_at=at)]
