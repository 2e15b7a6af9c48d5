# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Offers: the size that a waiting session could request to get its slice at once.

The pool makes an offer only if it can keep the offer. The size to try is the memory that the last
plan leaves free. The pool makes a trial plan with a copy of the facts, in which the session
requests this size. If the trial plan grants a slice, the pool offers the size. The pool preempts no
lease for an offer.
"""

from __future__ import annotations

import copy
from dataclasses import replace

from .facts import Facts
from .model import Request
from .placement import asking, headroom
from .requests import change_refusal
from .schedule import Plan, outlook, plan
from .session import Session

_MIB = 1 << 20

#: The pool rounds an offer down to a multiple of one of these steps: the largest step that is not
#: larger than the offer. The reason is that messages show sizes in GiB with one decimal.
STEPS = (512 * _MIB, 64 * _MIB, 1)


def smaller(facts: Facts, last: Plan, s: Session) -> int | None:
    """Return the largest size, in bytes on each GPU, that ``s`` would get now if it asked for it.

    The answer is None if ``s`` is not in the queue for a lease, or if no size below its request
    would let it start now.
    """
    if s.state != "queued":
        return None
    least = max([facts.least, *(x.bytes for x in s.suspended), 1])
    for most in _candidates(facts, last, s):
        size = _rounded(min(most, s.request.memory - 1))
        if size >= least and _starts(facts, last, s, size):
            return size
    return None


def _candidates(facts: Facts, last: Plan, s: Session) -> list[int]:
    """Return the sizes to try for each slice of ``s``, in bytes.

    The first size is all that is free and within the quota and the caps. If ``s`` has suspended
    state, the second size leaves room for the headroom of a resume.
    """
    draft, needs = outlook(facts, last, but=s.id), asking(s, facts).needs
    suited = [d for d in facts.devices.values() if any(need.allows(d) for need in needs)]
    count = len(needs)
    if not count or len(suited) < count:
        return []
    most = sorted((draft.left(d) for d in suited), reverse=True)[count - 1]
    quota = facts.settings.quota_of(s.owner.name).memory
    if quota is not None:
        most = min(most, (quota - draft.usage(s.owner.name).memory) // count)
    cap = draft.room_of(s.owner)
    if cap is not None:
        most = min(most, cap.most // count)
    if not s.suspended:
        return [most]
    return [most, most - max(headroom(d, facts.settings) for d in suited)]


def _rounded(size: int) -> int:
    step = next((step for step in STEPS if size >= step), 1)
    return size // step * step


def _starts(facts: Facts, last: Plan, s: Session, size: int) -> bool:
    """Return whether a trial plan grants a slice to ``s`` at once if ``s`` asks for ``size``."""
    plain = s.request.limit == s.request.memory
    asks: Request = replace(
        s.request, memory=size, limit=size if plain else max(size, s.request.limit)
    )
    if change_refusal(facts, s, asks) is not None:
        return False
    other = copy.copy(s)
    other.request, other.asking, other.possible = asks, None, -1
    trial = copy.copy(facts)
    trial.sessions = {**facts.sessions, s.id: other}
    trial.waiting = {**facts.waiting, s.id: other}
    return any(granted is other for granted, _, _ in plan(trial, last).grants)
