# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Between the pool's rules and keys of the ledger: limits, and what of them is elsewhere. Pure."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterable

from ..pool.groups import path
from ..pool.model import Charge, Owner, PoolSettings, Quota
from .ledger_events import Limits
from .messages import Key

#: The limits of a quota that machines share.
RESOURCES = ("memory", "devices", "leases")

#: Tells how much of a key this machine may have.
Most = Callable[[Key], int]

SILENT = "the ledger of the cluster does not answer, so this machine gets no more of it now"
DRAINS = "this machine is leaving the cluster and gets no more of it"


class Elsewhere(dict[str, Charge]):
    """What other machines have, by user; for a user that is not in it, ``rest``."""

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
    """Return the limits that the ledger divides."""
    return {
        "user": {
            name: {
                resource: amount
                for resource in RESOURCES
                if (amount := getattr(quota, resource)) is not None
            }
            for name, quota in settings.quotas.items()
        },
        "group": {
            name: {"memory": group.cap.bytes}
            for name, group in settings.groups.items()
            if group.cap is not None and group.cap.bytes is not None
        },
    }


def keys_of(settings: PoolSettings, owner: Owner) -> list[Key]:
    """Return the keys that count the slices of an owner."""
    quota = settings.quota_of(owner.name)
    found = [Key("user", owner.name, r) for r in RESOURCES if getattr(quota, r) is not None]
    for name in path(settings.groups, owner.group) if settings.groups else ():
        cap = settings.groups[name].cap
        if cap is not None and cap.bytes is not None:
            found.append(Key("group", name, "memory"))
    return found


def overlay(
    settings: PoolSettings, owners: Iterable[str], most: Most, *, connected: bool, drains: bool
) -> PoolSettings:
    """Return the rules with all that this machine may not have now counted as elsewhere."""
    elsewhere = Elsewhere(_whole(settings.quota_of("*")))
    for name in (*settings.quotas, *owners):
        if name != "*":
            elsewhere[name] = _missing(settings.quota_of(name), name, most)
    groups = {}
    for name, limits in limits_of(settings)["group"].items():
        missing = max(0, limits["memory"] - most(Key("group", name, "memory")))
        if missing:
            groups[name] = missing
    found = replace(settings, elsewhere=elsewhere, elsewhere_groups=groups)
    if drains:
        return replace(found, elsewhere_reason=DRAINS)
    return found if connected else replace(found, elsewhere_reason=SILENT)


def _whole(quota: Quota) -> Charge:
    return quota.memory or 0, quota.devices or 0, quota.leases or 0


def _missing(quota: Quota, owner: str, most: Most) -> Charge:
    """Return how much of a quota this machine may not have."""
    found = []
    for resource in RESOURCES:
        amount = getattr(quota, resource)
        found.append(0 if amount is None else max(0, amount - most(Key("user", owner, resource))))
    return found[0], found[1], found[2]
