# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A check of the pool's accounts: it computes all accounts again from the sessions, and reports the
differences.
"""

from __future__ import annotations

from dataclasses import replace

from .facts import Facts
from .ledgers import GroupUsage, OwnerUsage


def problems(facts: Facts) -> list[str]:
    """Return the errors in the accounts, as sentences with the last steps of the sessions.

    The check counts all sessions again and compares every account. It takes a millisecond or two.
    """
    again = Facts(facts.settings)
    again.devices = {
        u: replace(d, granted=0, incoming=0, leases={}) for u, d in facts.devices.items()
    }
    for s in facts.sessions.values():
        again._count(s, 1)
        again._index(s)
    found = []
    for uuid, d in facts.devices.items():
        right = again.devices[uuid]
        if (d.granted, d.incoming) != (right.granted, right.incoming):
            sums = f"the leases sum to {right.granted} and {right.incoming}"
            found.append(f"{uuid}: {d.granted} bytes granted, {d.incoming} leaving, but {sums}")
        if d.leases != right.leases:
            have, should = ({s.id: n for s, n in x.leases.items()} for x in (d, right))
            found.append(f"{uuid}: the leases are {have}, should be {should}")
        if d.granted > max(d.capacity, d.allowed):
            here = (
                s for s in facts.leased.values() if any(x.device == uuid for x in s.lease.slices)
            )
            stories = "; ".join(line for s in here for line in s.story_lines()[-6:])
            found.append(f"{uuid}: {d.granted} bytes granted of {d.capacity}. History: {stories}")
    for name in ("host_used", "host_going"):
        if getattr(facts, name) != getattr(again, name):
            found.append(f"{name} is {getattr(facts, name)}, should be {getattr(again, name)}")
    for name in ("waiting", "leased", "short", "grown"):
        have, should = getattr(facts, name), getattr(again, name)
        if have.keys() != should.keys():
            found.append(f"{name}: {list(have)}, should be {list(should)}")
    for name in {*facts.group_usage, *again.group_usage}:
        have_group = facts.group_usage.get(name, GroupUsage())
        if have_group != again.group_usage.get(name, GroupUsage()):
            found.append(f"group {name}: {have_group}, should be {again.group_usage.get(name)}")
    for owner, usage in facts.usage.items():
        right_usage = again.usage.get(owner, OwnerUsage())
        if usage != right_usage:
            found.append(f"owner {owner}: {usage}, should be {right_usage}")
    return found
