# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which requests of waiting sessions lie within the guarantees of their groups.

A request is within the guarantee of a group if the guarantee is large enough for three things
together: the leases of all members, the members' earlier requests, and the request itself. The
module first counts the requests of sessions that wait for memory alone, because these sessions can
use the guarantee now. After that it counts the requests of sessions that wait for something else
(for example, for the owner's quota).
"""

from __future__ import annotations

from typing import Callable, Iterable

from .facts import Facts
from .ledgers import OwnerUsage
from .limits import lacking
from .model import Charge, Owner
from .placement import asking, impossible
from .session import Session


def entitled(
    facts: Facts, ordered: Iterable[Session], spent: Callable[[Owner], object]
) -> dict[str, frozenset[str]]:
    """Return, for each session, the groups whose guarantee covers its request.

    ``ordered`` are the sessions in the order of service. ``spent`` returns a used-up daily budget
    of an owner, or None.
    """
    guarantees, path = facts.tree.guarantees, facts.tree.path
    allowed = facts.settings.classes_allowed
    held = {
        name: usage.stays if (usage := facts.group_usage.get(name)) else 0 for name in guarantees
    }
    first: list[tuple[Session, list[str]]] = []
    last: list[tuple[Session, list[str]]] = []
    limits = _LimitCheck(facts)
    for s in ordered:
        if s.state == "idle" or not s.owner.group:
            continue
        names = [name for name in path(s.owner.group) if name in guarantees]
        closed = allowed is not None and s.request.priority not in allowed
        if not names or closed or spent(s.owner) is not None:
            continue
        (first if limits.allow(s) else last).append((s, names))
    found: dict[str, frozenset[str]] = {}
    for s, names in (*first, *last):
        more = asking(s, facts).charge[0]
        within = frozenset(name for name in names if held[name] + more <= guarantees[name])
        if within:
            found[s.id] = within
            for name in names:
                held[name] += more
    return found


class _LimitCheck:
    """Finds the requests that wait for memory alone.

    If a request waits for memory alone, the check of all later requests treats it as granted.
    """

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        #: The totals of owners and groups, with the requests that the check treats as granted.
        self._owners: dict[str, OwnerUsage] = {}
        self._groups: dict[str, int] = {}

    def allow(self, s: Session) -> bool:
        """Return whether ``s`` waits for memory alone, and count its request if it does."""
        facts, found = self._facts, asking(s, self._facts)
        if (s.wait.failed and s.retry_at > facts.now) or impossible(found, facts) is not None:
            return False
        more: Charge = found.charge
        capped = facts.tree.capped(s.owner.group)
        for name in capped:
            if more[0] > 0 and self._in(name) + more[0] > facts.tree.caps[name]:
                return False
        if facts.settings.quotas:
            usage = self._of(s.owner.name)
            if lacking(facts.settings.quota_of(s.owner.name), usage, more, (0, 0, 0)) is not None:
                return False
            usage.add(more)
        for name in capped:
            self._groups[name] = self._in(name) + more[0]
        return True

    def _of(self, owner: str) -> OwnerUsage:
        if owner not in self._owners:
            self._owners[owner] = self._facts.usage_of(owner)
        return self._owners[owner]

    def _in(self, group: str) -> int:
        if group not in self._groups:
            self._groups[group] = self._facts.usage_in(group)
        return self._groups[group]
