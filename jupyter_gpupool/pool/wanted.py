# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whose slice is waited for, and since when: kept true to the queue for :mod:`.residence`."""

from __future__ import annotations

import math
from dataclasses import replace

from . import residence
from .books import Books
from .events import Wanted
from .lease import Session


def wanted_since(v: Session, books: Books) -> float:
    """Return since when somebody waits who could use the slice of ``v``; infinity if nobody does.

    The first in the queue for its devices, whether or not there is room with it alone; its owner's
    first one that the quota keeps back; and who would grow there.
    """
    times = [math.inf]
    own = books.by_quota.get(v.owner.name)
    first = own.first() if own is not None else None
    if first is not None:
        times.append(books.sessions[first[4]].queued_at)
    ledgers = [books.inventory[x.device] for x in v.slices]
    for ledger in ledgers:
        times += [g.growing_since for g in ledger.growers.values() if g is not v]
    for entry in books.open:
        s = books.sessions[entry[4]]
        if any(need.allows(ledger) for need in s.needs for ledger in ledgers):
            times.append(s.queued_at)
            break
    return min(times)


def note(books: Books) -> None:
    """Note since when somebody waits for each idle slice, and tell lazy kernels that one does.

    Only where that may have changed since the last time.
    """
    if not books.recheck_waiters or books.settings.residence == "clock":
        return
    books.recheck_waiters = False
    before = books.waited
    books.waited = bool(books.order) or any(d.growers for d in books.inventory.devices.values())
    if not (before or books.waited):
        return
    for s in [v for leases in books.leased.values() for v in leases.values()]:
        if s.state == "idle" and s.gap is not None and s.resumed_at > -math.inf:
            since = wanted_since(s, books)
            if since < math.inf:
                # Whoever waited first may be served by now; the slice was waited for all the time.
                since = min(since, s.gap.wanted)
            if since != s.gap.wanted:
                s.gap = replace(s.gap, wanted=since)
                books.offer(s)
        untold = s.attach == "lazy" and s.state == "active" and s.told_wanted != s.epoch
        if untold and wanted_since(s, books) < math.inf:
            s.told_wanted = s.epoch
            books.emit(Wanted(session=s.id, epoch=s.epoch))


def wish(books: Books, s: Session) -> None:
    """Take note that a session wants to work (again)."""
    gap, s.gap = s.gap, None
    if gap is None:
        return
    s.habits = residence.returned(s.habits, gap, books.now, s.moving)
    if s.state == "idle":
        s.stay = residence.kept_idle(s.stay, gap, books.now)
