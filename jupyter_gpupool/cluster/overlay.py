# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Translate the pool's rules into the ledger's keys, and ceilings of keys into rules. Pure."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timezone
from typing import Callable, Container, Iterable, Mapping

from ..pool.groups import DAY, EXACT, Daily, PoolUsage, Usage, path, window_began
from ..pool.model import Charge, Owner, PoolSettings, Quota
from .ledger_events import Limits
from .messages import GPU_SECONDS, GUARANTEE, REFILL, HolderKind, Key

#: The limits on slices that machines share.
RESOURCES = ("memory", "devices", "leases")

#: A report of usage names all users and groups that have a session. It also names at most
#: ``MOST_USAGES`` other users and at most ``MOST_USAGES`` other groups. Each of these others has
#: used more than ``LEAST_USAGE`` GPU-seconds.
LEAST_USAGE, MOST_USAGES = 1.0, 200

#: A function that returns how much of a key this machine may have.
Most = Callable[[Key], int]

SILENT = "the ledger of the cluster does not answer, so this machine can borrow no more now"
DRAINS = "this machine is leaving the cluster and can borrow no more"


class Elsewhere(dict[str, Charge]):
    """By user: how much of the user's quota other machines have.

    For a user without an entry it is ``rest``.
    """

    def __init__(self, rest: Charge) -> None:
        super().__init__()
        self.rest = rest

    def get(  # type: ignore[override]
        self,
        key: str,
        default: Charge | None = None,  # noqa: ARG002
    ) -> Charge | None:
        """Return what other machines have of a user's quota; None if they have nothing of it."""
        found = super().get(key, self.rest)
        return found if any(found) else None

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Elsewhere) and self.rest == other.rest
        return same and dict.__eq__(self, other)


def limits_of(settings: PoolSettings) -> Limits:
    """Return the limits that the ledger divides; a limit of GPU-seconds applies to each window."""
    users, groups = {}, {}
    for name, quota in settings.quotas.items():
        users[name] = {
            resource: amount
            for resource in RESOURCES
            if (amount := getattr(quota, resource)) is not None
        } | _seconds(quota.daily)
    for name, group in settings.groups.items():
        limits = _seconds(group.daily)
        if group.cap is not None and group.cap.bytes is not None:
            limits["memory"] = group.cap.bytes
        if group.guarantee is not None and group.guarantee.bytes is not None:
            limits[GUARANTEE] = group.guarantee.bytes
        if limits:
            groups[name] = limits
    return {"user": users, "group": groups}


def _seconds(daily: Daily | None) -> dict[str, int]:
    if daily is None:
        return {}
    limits = {GPU_SECONDS: math.ceil(daily.seconds)}
    return limits | {REFILL: math.ceil(daily.seconds)} if daily.rule == "refill" else limits


def guarantees_of(settings: PoolSettings, owner: Owner) -> list[Key]:
    """Return the keys of those of an owner's guarantees that all machines share.

    The machines share a guarantee if it is a number of bytes. If it is a percentage or a number of
    devices, each machine gives the whole guarantee separately.
    """
    return [
        Key("group", name, GUARANTEE)
        for name in (path(settings.groups, owner.group) if settings.groups else ())
        if (size := settings.groups[name].guarantee) is not None and size.bytes is not None
    ]


def refills_of(settings: PoolSettings, spent: Mapping[Key, int]) -> dict[Key, int]:
    """Return how much refill per day this machine wants for each budget that it has used.

    The result contains only budgets that refill. The machine wants the whole refill. If other
    machines have used the budget, too, the ledger divides the refill among the machines. ``spent``
    is what this machine has used of each budget.
    """
    found = {}
    for key in spent:
        if not key.window:
            if key.kind == "user":
                daily = settings.quota_of(key.name).daily
            else:
                daily = settings.groups[key.name].daily
            if daily is not None:
                found[key._replace(resource=REFILL)] = math.ceil(daily.seconds)
    return found


def keys_of(settings: PoolSettings, owner: Owner) -> list[Key]:
    """Return the keys of the limits for which an owner's slices count."""
    quota = settings.quota_of(owner.name)
    found = [Key("user", owner.name, r) for r in RESOURCES if getattr(quota, r) is not None]
    for name in path(settings.groups, owner.group) if settings.groups else ():
        cap = settings.groups[name].cap
        if cap is not None and cap.bytes is not None:
            found.append(Key("group", name, "memory"))
    return found


def budgets_of(settings: PoolSettings, owner: Owner, now: float) -> dict[Key, Daily]:
    """Return the shared budgets of an owner by their keys; ``now`` is seconds since the epoch."""
    found = {}
    if (daily := settings.quota_of(owner.name).daily) is not None:
        found[_seconds_key("user", owner.name, daily, now)] = daily
    for name in path(settings.groups, owner.group) if settings.groups else ():
        if (daily := settings.groups[name].daily) is not None:
            found[_seconds_key("group", name, daily, now)] = daily
    return found


def seconds_used(settings: PoolSettings, usage: PoolUsage, now: float) -> dict[Key, int]:
    """Return how many GPU-seconds of each shared budget this machine has used, rounded up."""
    found = {}
    for name, used in usage.users.items():
        if (daily := settings.quota_of(name).daily) is not None:
            found[_seconds_key("user", name, daily, now)] = math.ceil(used.today - EXACT)
    for name, used in usage.groups.items():
        group = settings.groups.get(name)
        if group is not None and group.daily is not None:
            found[_seconds_key("group", name, group.daily, now)] = math.ceil(used.today - EXACT)
    return {key: amount for key, amount in found.items() if amount > 0}


def usage_of(
    settings: PoolSettings, usage: PoolUsage, owners: Iterable[Owner]
) -> dict[tuple[HolderKind, str], float]:
    """Return the decayed usage of this machine, for fair shares over all machines.

    The result contains ``owners`` (who have a session now) and their groups. It also contains other
    users and groups with more than :data:`LEAST_USAGE`.
    """
    found: dict[tuple[HolderKind, str], float] = {}
    for owner in owners:
        found["user", owner.name] = 0.0
        for name in path(settings.groups, owner.group):
            found["group", name] = 0.0
    kinds: tuple[tuple[HolderKind, Mapping[str, Usage]], ...]
    kinds = ("user", usage.users), ("group", usage.groups)
    for kind, known in kinds:
        worth = sorted(known, key=lambda name: -known[name].here)[:MOST_USAGES]
        for name in worth:
            if known[name].here > LEAST_USAGE or (kind, name) in found:
                found[kind, name] = known[name].here
    return found


def windows(settings: PoolSettings, now: float) -> tuple[float, float] | None:
    """Return when the oldest current window of a budget began, and when the next window begins.

    Return None if no user and no group has a budget. If a budget refills, the first time is minus
    infinity.
    """
    dailies = [quota.daily for quota in settings.quotas.values()]
    dailies += [group.daily for group in settings.groups.values()]
    budgets = [daily for daily in dailies if daily is not None]
    if not budgets:
        return None
    began = [window_began(now, daily.renews) for daily in budgets if daily.rule == "window"]
    refills = len(began) < len(budgets)
    return -math.inf if refills else min(began), min(began, default=now) + DAY


def _seconds_key(kind: HolderKind, name: str, daily: Daily, now: float) -> Key:
    """Return the key of a budget. A window is named by the date (UTC) on which it began."""
    if daily.rule == "refill":
        return Key(kind, name, GPU_SECONDS)
    began = datetime.fromtimestamp(window_began(now, daily.renews), timezone.utc)
    return Key(kind, name, GPU_SECONDS, began.date().isoformat())


def overlay(
    settings: PoolSettings,
    owners: Iterable[str],
    most: Most,
    *,
    connected: bool,
    drains: bool,
    now: float = 0.0,
    used_up: Container[Key] = (),
) -> PoolSettings:
    """Return rules in which the shared amounts that this machine may not use count as used.

    ``owners`` are the users of this machine. ``now`` is the time in seconds since the epoch; the
    windows of budgets depend on it. ``used_up`` contains the keys of the budgets of which all
    machines together have used everything.
    """

    def part(kind: HolderKind, name: str, daily: Daily | None) -> Daily | None:
        if daily is None:
            return None
        key = _seconds_key(kind, name, daily, now)
        here = min(daily.seconds, float(most(key)))
        more = here < daily.seconds and key not in used_up
        refill = float(most(key._replace(resource=REFILL))) if daily.rule == "refill" else math.inf
        return replace(daily, here=here, more_elsewhere=more, refill_here=refill)

    elsewhere = Elsewhere(_whole(settings.quota_of("*")))
    quotas = dict(settings.quotas)
    for name in (*settings.quotas, *owners):
        if name != "*":
            quota = settings.quota_of(name)
            elsewhere[name] = _missing(quota, name, most)
            if quota.daily is not None:
                quotas[name] = replace(quota, daily=part("user", name, quota.daily))
    if "*" in quotas and (daily := quotas["*"].daily) is not None:
        # The entry "*" is for users whom this machine has not yet reported to the ledger. So the
        # ledger has lent this machine nothing of their budgets.
        none = replace(daily, here=0.0, more_elsewhere=daily.seconds > 0, refill_here=0.0)
        quotas["*"] = replace(quotas["*"], daily=none)
    missing, groups = {}, dict(settings.groups)
    for name, group in settings.groups.items():
        if group.cap is not None and group.cap.bytes is not None:
            lacks = max(0, group.cap.bytes - most(Key("group", name, "memory")))
            if lacks:
                missing[name] = lacks
        if group.daily is not None:
            groups[name] = replace(groups[name], daily=part("group", name, group.daily))
        if group.guarantee is not None and group.guarantee.bytes is not None:
            here = min(group.guarantee.bytes, most(Key("group", name, GUARANTEE)))
            groups[name] = replace(groups[name], guarantee_here=here)
    found = replace(
        settings, elsewhere=elsewhere, elsewhere_groups=missing, quotas=quotas, groups=groups
    )
    if drains:
        return replace(found, elsewhere_reason=DRAINS)
    return found if connected else replace(found, elsewhere_reason=SILENT)


def _whole(quota: Quota) -> Charge:
    return quota.memory or 0, quota.devices or 0, quota.leases or 0


def _missing(quota: Quota, owner: str, most: Most) -> Charge:
    """Return how much of a user's quota this machine may not use."""
    found = []
    for resource in RESOURCES:
        amount = getattr(quota, resource)
        found.append(0 if amount is None else max(0, amount - most(Key("user", owner, resource))))
    return found[0], found[1], found[2]
