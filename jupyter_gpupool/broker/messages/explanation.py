# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The answer to ``why``: lines about the plan for one session, and the figures behind the plan.

Times are seconds since the epoch on the broker's clock, or null if no time is known. Sizes are
bytes. Every interface shows ``lines`` and ``standing``.
"""

from __future__ import annotations

import math
from typing import Any

from ...pool.evidence import Expected
from ...pool.explain import Explanation, HeldLease, Standing
from ...pool.model import SessionRecord
from ...pool.shares import Budget
from ...pool.why import Told


def explanation(told: Told, record: SessionRecord) -> dict[str, Any]:
    """Return the answer about a session; other users' sessions appear by id, size and class."""
    found = told.found
    return {
        "session": found.session,
        "owner": record.owner.name,
        "group": record.owner.group,
        "state": record.state,
        "lines": [*told.lines],
        "time_line": told.time,
        "standing": [*told.standing],
        "position": found.position,
        "ahead": [*found.ahead],
        "expected": expected(told.expected),
        "starts_with_bytes": told.starts_with,
        "rule": found.reason.rule if found.reason is not None else "",
        "preempted": found.preempted,
        "obstacle": found.obstacle,
        "changes": [*found.changes],
        "changes_at": _at(found.changes_at),
        **_leases(found),
        **_standing(found.standing),
    }


def _leases(found: Explanation) -> dict[str, Any]:
    return {
        "holders": [_holder(h) for h in found.holders],
        "takers": [*found.takers],
        "taken_from": _at(found.taken_from),
        "claims": [
            {"rule": rule, "at": _at(at), "session": session} for rule, at, session in found.claims
        ],
    }


def _holder(lease: HeldLease) -> dict[str, Any]:
    return {
        "session": lease.session,
        "own": lease.own,
        "label": lease.label,
        "priority": lease.priority,
        "device": lease.device,
        "bytes": lease.bytes,
        "use": lease.use,
        "yields_at": _at(lease.yields_at),
        "leaves_at": _at(lease.leaves_at),
        "rule": lease.rule,
        "rule_at": _at(lease.rule_at),
        "covered": lease.covered,
        "unmoved": lease.unmoved,
    }


def _standing(found: Standing) -> dict[str, Any]:
    return {
        "groups": [*found.groups],
        "share": shares(found.shares),
        "above_share": found.above,
        "guarantees": [
            {"group": row.group, "held_bytes": row.held, "guaranteed_bytes": row.guaranteed}
            for row in found.guarantees
        ],
        "entitled": [*found.entitled],
        "budgets": [budget(b) for b in found.budgets],
    }


def shares(found: tuple[tuple[str, float, float], ...]) -> list[dict[str, Any]]:
    """Return, for each level of the group tree, the owner's share of the usage and fair share."""
    return [{"of": name, "used": round(used, 4), "due": round(due, 4)} for name, used, due in found]


def budget(found: Budget) -> dict[str, Any]:
    """Return a daily budget in GPU-seconds; ``group`` is "" for the owner's own budget.

    ``left``: the GPU-seconds that this machine may still use. ``more_elsewhere``: whether this
    machine may still get a part of the budget from other machines.
    """
    return {
        "group": found.group,
        "seconds": found.daily.seconds,
        "left": round(max(0.0, found.daily.most - found.used), 1),
        "more_elsewhere": found.daily.more_elsewhere,
        "spent": found.spent,
        "until": _at(found.until),
    }


def expected(found: Expected | None) -> dict[str, float] | None:
    """Return two times on the broker's clock; the wait will probably end between them."""
    if found is None:
        return None
    return {"since": round(found.since, 3), "until": round(found.until, 3)}


def _at(time: float | None) -> float | None:
    return None if time is None or math.isinf(time) else round(time, 3)
