# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which leases may be preempted, when, and for which session.

Any waiting session may preempt an idle lease if all of this is true: the lease has been idle for
``reclaim_after``; its user does not keep it; its last refused suspend is long enough ago; its
devices allow a suspend; and its state was not moved recently (:func:`stays_until`).

Such leases are tier 0 of :func:`victim_tier`. :mod:`.running` defines the higher tiers, for leases
in use. :mod:`.victims` then chooses from all tiers the leases that make room for a session.

Even if no session waits, an idle lease ends after ``idle_timeout``, or earlier if its user or an
admin asks for this (:func:`times`).
"""

from __future__ import annotations

import math
from typing import Any

from ..states import ATTACHED
from ..units import format_bytes
from .facts import Facts
from .residence import STAY_MOST, Gap, protected_until
from .running import Asker, began, free_from, kind_of
from .session import Session
from .shares import Shares

#: If this many attempts to suspend a session fail in succession, the session counts as one that
#: cannot be suspended.
TRIES = 3


# --------------------------------------------------------------------------- times


def suspendable(s: Session, facts: Facts) -> bool:
    """Return whether the devices of an idle session allow its suspend.

    On a device that cannot suspend, only a lease without used memory can be preempted, because it
    has no state to move. Any other lease stays until its kernel frees the memory or ends.
    """
    return all(facts.devices[x.device].device.can_suspend for x in s.lease.slices) or s.empty


def obstacle(s: Session, facts: Facts) -> str:
    """Return why a session with a lease cannot be suspended; "" if it can be, or if it has no
    lease.
    """
    if s.state not in ATTACHED:
        return ""
    if s.pinned_reason:
        return s.pinned_reason
    if not suspendable(s, facts):
        return "the GPU cannot suspend a process"
    if s.confined:
        return s.refused
    if s.failures >= TRIES and s.refused:
        return f"{s.failures} attempts failed; the last error was: {s.refused.rstrip('.')}"
    most = facts.settings.host_most(s.owner.name)
    if s.state_bound > most:
        size = format_bytes(s.state_bound)
        return f"its state may need {size}, and at most {format_bytes(most)} fits in host memory"
    return "it computes, and runs without the guard" if not s.gated and s.state == "active" else ""


def not_before(s: Session, facts: Facts) -> float:
    """Return the earliest time at which the pool can suspend the idle session ``s``."""
    if (s.pressed and s.state_bound) or not suspendable(s, facts):
        return math.inf
    if s.pinned_reason:
        return max(s.retry_at, s.pinned_at + facts.settings.pinned_retry)
    return s.retry_at


def stays_until(s: Session, facts: Facts) -> float:
    """Return until when the pool protects idle ``s`` because its state was moved to its slice.

    The answer is infinity while no session waits for the slice: see :mod:`.residence`.
    """
    share, lease, known = facts.settings.max_swap_overhead, s.lease, s.measured
    if share <= 0 or lease.resumed_at == -math.inf:
        return -math.inf
    if facts.settings.residence == "clock":
        return lease.resumed_at + min(STAY_MOST, known.moving / share)
    gap = known.gap or Gap(s.idle_since)
    return protected_until(gap, lease.stay, known.habits, cost=known.moving, share=share)


def times(s: Session, facts: Facts) -> tuple[float, float]:
    """Return two times: when a waiting session may preempt idle ``s``, and when the pool suspends
    ``s`` even if no session waits.

    The session caches both times until an event may have changed them: see ``Session.times``.
    (Without the cache, the median decision with 200 idle leases takes twice as long.)
    """
    if s.times is None or s.times[0] != facts.version:
        settings, possible = facts.settings, not_before(s, facts)
        idle, keep = s.idle_since, s.keep_until
        yields = max(possible, idle + settings.reclaim_after, keep, stays_until(s, facts))
        asked = s.release_asked or paused(s, facts)
        leaves = possible if asked else max(possible, idle + settings.idle_timeout, keep)
        if s.recall_at:  # an admin takes the slice back at that time, even if the user keeps it
            leaves = min(leaves, max(possible, s.recall_at))
        s.times = facts.version, yields, leaves
    return s.times[1], s.times[2]


def leaving(facts: Facts) -> dict[str, float]:
    """Return for each idle session when the pool suspends it even if no session waits.

    This is the second value of :func:`times` for each session. The pool needs the earliest of these
    values at every event, so this function caches all of them. (Without the cache, finding the
    earliest took a tenth of the time of a grant with 300 idle leases.) The function computes a
    value again after :meth:`Facts.forget_times`, or when :attr:`Facts.version` has changed.
    """
    found = facts.leaving.times
    if facts.leaving.version != facts.version:
        facts.leaving.version = facts.version
        found.clear()
        facts.untimed = dict(facts.leased)
    for name, s in facts.untimed.items():
        if s.state == "idle":
            found[name] = times(s, facts)[1]
        else:
            found.pop(name, None)
    facts.untimed.clear()
    return found


def yields_at(s: Session, facts: Facts) -> float:
    """Return when a waiting session may first preempt the lease of idle ``s``."""
    return times(s, facts)[0]


def leaves_at(s: Session, facts: Facts) -> float:
    """Return when the pool suspends idle ``s`` even if no session waits."""
    return times(s, facts)[1]


def paused(s: Session, facts: Facts) -> str:
    """Return why an admin has paused a device of ``s``; "" if all its devices are in service."""
    devices = facts.devices
    return next((text for x in s.lease.slices if (text := devices[x.device].paused)), "")


def unprotected(holder: Session, facts: Facts) -> bool:
    """Return whether any session may preempt ``holder``: it is idle, and nothing protects it."""
    return holder.state == "idle" and times(holder, facts)[0] <= facts.now


def candidate(holder: Session, facts: Facts) -> int | None:
    """Return the lowest tier in which some session might preempt ``holder`` now, or None.

    The answer is 0 for an idle lease that no rule protects, and 1 for a lease that a rule of
    :mod:`.running` might allow a session to preempt. This function is a cheap first check: the pass
    calls :func:`victim_tier` only if the answer is not None.
    """
    if unprotected(holder, facts):
        return 0
    return 1 if facts.settings.preempt and free_from(holder, facts) <= facts.now else None


def victim_tier(asker: Asker, holder: Session, facts: Facts) -> int | None:
    """Return the tier in which ``asker`` may preempt the candidate ``holder`` now; None if it may
    not.

    Tier 0 is an idle lease that no rule protects.
    """
    if holder is asker.session:
        return None
    return 0 if unprotected(holder, facts) else asker.tier(holder)


def asker_kind(asker: Session, shares: Shares, *, in_use: bool) -> Any:
    """Return the kind of an asker: askers of one owner and one kind may preempt the same leases.

    The kind contains what :func:`victim_tier` reads of an asker without a lease, except for two
    things: see :func:`~.running.kind_of`. ``in_use`` says whether one of the candidates is in use.
    If all candidates are idle, any asker may preempt all of them, so all askers have the same kind.
    """
    return kind_of(asker, shares) if in_use else None


def score(v: Session, now: float) -> tuple[float, int, str]:
    """Return the key by which the victims of one tier are sorted; the first is preempted first.

    The first victim is the lease with the largest product of bytes and idle time: a large lease
    makes much room, and a user probably does not miss a lease that has been idle for long. For a
    lease in use, the time since the lease began replaces the idle time.
    """
    granted = v.lease.granted
    since = v.idle_since if v.state == "idle" else began(v)
    return -granted * (now - since), -granted, v.id
