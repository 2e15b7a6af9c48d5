# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Computes how much of each cluster limit this machine's sessions use and will soon need.

A budget is in GPU-seconds, and sessions use them up. While sessions on this machine use a budget,
the machine borrows GPU-seconds of this budget in small parts. Shortly before the next day begins,
the machine also borrows GPU-seconds of the next day. A group's guarantee is in bytes. The machine
borrows the bytes that the group's sessions have, and the bytes that they wait for.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from ..cluster.budgets import Budgets, Demand
from ..cluster.messages import Key
from ..cluster.overlay import (
    RESOURCES,
    budgets_of,
    guarantees_of,
    keys_of,
    refills_of,
    seconds_used,
    windows,
)
from ..pool.model import Charge, PoolSettings
from .core import Core

#: While a user or group has a session on this machine, the machine keeps a stock of borrowed
#: GPU-seconds. The stock is PART seconds, plus EACH seconds for each GPU that the sessions have.
#: The sessions cannot use up this stock before the broker checks it again.
PART, EACH = 300, 60
#: The machine borrows GPU-seconds in multiples of STEP. With single seconds, it would send a
#: message for each second of use. A session that may not run without GPU-seconds waits for STEP
#: GPU-seconds.
STEP = 60
#: The machine borrows GPU-seconds for a window this many seconds before the window begins.
AHEAD = 60.0


class Demands(NamedTuple):
    """Arguments of :meth:`Budgets.use`."""

    uses: Mapping[Key, Demand]
    waits: Sequence[Mapping[Key, int]]
    #: Whether no session has a slice.
    is_empty: bool


def demands_of(core: Core, rules: PoolSettings, budgets: Budgets, now: float) -> Demands:
    """Return how much of each limit the sessions use and need; ``now`` is the time of day."""
    used, keep = Counter[Key](), Counter[Key]()
    waits: list[tuple[float, dict[Key, int]]] = []
    leases = core.pool.leases()
    spent: dict[Key, int] = {}
    if found := windows(rules, now):
        # Leave out the many users who have used no GPU since the window began.
        since = core.now() - (now - found[0])
        spent = seconds_used(rules, core.pool.usage(core.now(), since), now)
    #: For each key of GPU-seconds: the number of GPUs of the sessions that use this key.
    gpus = Counter[Key]()
    #: For each key of a guarantee: the bytes that sessions of the group have.
    held = Counter[Key]()
    for session in core.sessions:
        if session.id not in core.pool:
            continue
        keys, daily = keys_of(rules, session.owner), budgets_of(rules, session.owner, now)
        guaranteed = guarantees_of(rules, session.owner)
        if not (keys or daily or guaranteed):
            continue
        request = core.pool.request(session.id)
        slices = leases.get(session.id, ((), None))[0]
        have = sum(x.bytes for x in slices), len(slices), int(bool(slices))
        lacks = (0, 0, 0)
        if slices:
            # The session lacks the bytes of its request that its slices do not have. It does not
            # lack the bytes between its request and its limit, because ``keep`` already contains
            # them.
            lacks = sum(max(0, request.memory - x.bytes) for x in slices), 0, 0
        elif core.busy.get(session.id) == "queued":
            state = core.pool.record(session.id).suspended_bytes
            lacks = max(request.memory * request.devices, state), request.devices, 1
        most = request.limit if slices else request.memory
        again = max(have[0], most * request.devices), request.devices, 1
        for key in keys:
            used[key] += _of(key, have)
            keep[key] += _of(key, again)
        # Each window of a budget has its own key. In the last AHEAD seconds of a window, this loop
        # counts the session under two keys: for this window and for the next.
        for key in {*daily, *budgets_of(rules, session.owner, now + AHEAD)}:
            gpus[key] += len(slices)
        for key in guaranteed:
            held[key] += have[0]
            keep[key] += have[0] + lacks[0]
        if not any(lacks):
            continue
        needs = {key: n for key in keys if (n := _of(key, lacks))}
        if not slices:
            bars = {key for key, rule in daily.items() if rule.then != "borrow"}
            if bars & budgets.used_up:
                continue  # no machine can give this session any GPU-seconds
            for key in bars:
                if budgets.most(key, time.monotonic()) <= spent.get(key, 0):
                    needs[key] = STEP
        if needs:
            waits.append((session.queued_at or core.now(), needs))
    for key in {*gpus, *spent}:
        used[key] = spent.get(key, 0)
        more = PART + EACH * gpus[key] if key in gpus else 0
        keep[key] = -(-(used[key] + more) // STEP) * STEP if more else used[key]
    keep.update(refills_of(rules, spent))
    for key, amount in held.items():
        # The group's sessions may have more bytes than this machine's part of the guarantee. Only
        # the bytes within this part count as used.
        used[key] = min(amount, budgets.most(key, time.monotonic()))
    waits.sort(key=itemgetter(0))
    return Demands(
        {key: Demand(used[key], keep[key]) for key in keep},
        [needs for _, needs in waits],
        not any(slices for slices, _ in leases.values()),
    )


def _of(key: Key, sizes: Charge) -> int:
    return sizes[RESOURCES.index(key.resource)]
