# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Who may yield, and what would come free if they did, on paper.

An idle lease yields to a waiting session when nothing holds it, it has been idle for
``reclaim_after``, its user does not keep it, the last refusal is long enough ago, its devices can
suspend, and its state has not just been moved (:func:`stays_until`). The largest bytes x idle time
go first, no more of them than needed, as far as host memory and their owners' quotas of suspended
state have room.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Iterable, Iterator, Mapping, Sequence

from .inventory import DeviceLedger
from .lease import Session
from .model import Slice
from .placement import Need, in_order, in_turn, preferred, spare
from .residence import STAY_MOST, Gap, protected_until

if TYPE_CHECKING:
    from .books import Books

#: When idle leases must yield, the best of so many devices is taken, those with the most to give
#: first; and after so many that will not do for want of host memory, no more are looked at.
WIDTH = 4
FAILURES = 16


def empty(s: Session) -> bool:
    """Return whether it is known to hold no device memory (measured since it became idle)."""
    return (
        s.sampled_at >= s.idle_since
        and len(s.footprints) >= len(s.slices)
        and not any(s.footprints.values())
    )


def suspendable(s: Session, books: Books) -> bool:
    """Return whether suspending an idle session can work at all.

    On a device that can not suspend, only a lease that is known to hold nothing can be taken
    back: there is nothing to move. Anything else stays until its kernel frees it or ends.
    """
    devices = books.inventory.devices
    for x in s.slices:
        if not devices[x.device].device.can_suspend:
            return empty(s)
    return True


def _not_before(s: Session, books: Books) -> float:
    if (s.pressed and host_bound(s)) or not suspendable(s, books):
        return math.inf
    at = s.retry_at
    if s.pinned_reason:
        at = max(at, s.pinned_at + books.settings.pinned_retry)
    return at


def stays_until(s: Session, books: Books) -> float:
    """Return until when idle ``s`` keeps its slice from those who wait because it was moved there.

    Infinity while nobody waits for it: see :mod:`.residence`.
    """
    share = books.settings.max_swap_overhead
    if share <= 0 or s.resumed_at == -math.inf:
        return -math.inf
    if books.settings.residence == "clock":
        return s.resumed_at + min(STAY_MOST, s.moving / share)
    gap = s.gap or Gap(books.now)
    return protected_until(gap, s.stay, s.habits, cost=s.moving, share=share)


def stayer(s: Session, books: Books) -> Session | None:
    """Return the first of the idle sessions that ``s`` waits for as they stay, or None."""
    found = None
    for v in books.staying.values():
        for x in v.slices:
            ledger = books.inventory[x.device]
            room = ledger.pot + x.bytes
            if stays_until(v, books) == math.inf:
                continue  # it is not known yet that somebody waits, or another rule keeps it
            if any(n.allows(ledger) and n.amount(ledger) <= room for n in s.needs) and (
                found is None or stays_until(v, books) < stays_until(found, books)
            ):
                found = v
    return found


def yield_at(s: Session, books: Books) -> float:
    """Return from when on a waiting session may take the lease of idle ``s``."""
    return max(
        _not_before(s, books),
        s.idle_since + books.settings.reclaim_after,
        s.keep_until,
        stays_until(s, books),
    )


def paused(s: Session, books: Books) -> str:
    """Return why an admin wants the lease of ``s`` back; "" if none does."""
    devices = books.inventory.devices
    return next((devices[x.device].paused for x in s.slices if devices[x.device].paused), "")


def timeout_at(s: Session, books: Books) -> float:
    """Return when idle ``s`` gives its lease back on its own."""
    if s.release_asked or paused(s, books):
        return _not_before(s, books)
    return max(_not_before(s, books), s.idle_since + books.settings.idle_timeout, s.keep_until)


def stays(s: Session, books: Books, now: float) -> tuple[Any, ...]:
    """Return why idle ``s`` does not leave although it should, as (code, figures...); () if not.

    A pinned session is not meant: its ``pinned_reason`` says why. Codes: ``fixed`` (its device can
    not suspend), ``pressed`` (memory is short where it runs), ``refused-host`` (there was no room
    where it runs at the last try) and ``refused`` (that failed otherwise; it is tried again),
    ``never`` (its state is more than host memory takes), ``quota``, ``machine``, ``kept`` and
    ``host`` (no room for its state now).
    """
    if s.state != "idle" or s.pinned_reason:
        return ()
    if not suspendable(s, books):
        # Where it was seen to hold nothing, the next measurement will most likely say so again.
        nothing = len(s.footprints) >= len(s.slices) and not s.footprint
        return () if nothing else ("fixed",)
    asked = s.release_asked or bool(paused(s, books))
    due = 0.0 if asked else max(s.idle_since + books.settings.idle_timeout, s.keep_until)
    if s.pressed and s.state_bound:
        return ("pressed",) if due <= now else ()
    if s.id in books.roomless:
        return "refused-host", books.roomless[s.id]
    if s.failures and now < s.retry_at and due < s.retry_at:
        return ("refused",)
    if s.id not in books.leaving:
        return ()
    host, bound = books.host, s.state_bound
    own = books.quotas.suspend_room(s.owner.name)
    if bound > host.budget:
        return "never", bound, host.budget
    if own is not None and bound > own:
        return "quota", books.quotas.limit(s.owner.name).suspended
    if bound > host.budget - host.used - host.going:
        return "host", bound, host.budget - host.used - host.going, host.budget
    return ("machine",) if bound > host.room else ("kept",)


def host_bound(s: Session) -> int:
    """Return the host bytes that suspending ``s`` may take (kept in ``s.state_bound``).

    What was measured since it became idle; without such a measurement, what it was granted (or
    the older measurement, if that is more).
    """
    if s.sampled_at >= s.idle_since and len(s.footprints) >= len(s.slices):
        return s.footprint
    return max(s.granted, s.footprint)


def score(s: Session, now: float) -> tuple[float, int, str]:
    """Return the order in which idle leases yield, smallest first: most bytes x idle time."""
    return -s.granted * (now - s.idle_since), -s.granted, s.id


def host_room(books: Books, claimed: Iterable[str] = (), *, guarded: bool) -> int:
    """Return the host bytes that a suspend may take now.

    ``guarded``: less what the head of the queue is still going to need, unless all devices in
    ``claimed`` (where bytes come free) are its own.
    """
    room = books.host.room
    claim = books.claim
    if guarded and claim is not None:
        freed = set(claimed)
        if not freed or not freed <= claim.wanted.keys():
            devices = books.inventory.devices
            missing = [max(0, n - devices[u].expect) for u, n in claim.wanted.items()]
            if len(missing) > claim.devices:
                # The claim has grown beyond what is needed: count the cheapest devices only.
                missing = sorted(missing)[: claim.devices]
            room -= sum(missing)
    return room


class WhatIf:
    """Which idle leases would have to yield; a copy of the few figures that this changes."""

    def __init__(self, books: Books, room: int) -> None:
        self._books = books
        self._now = books.now
        self.room = room
        self.chosen: dict[str, Session] = {}
        self._freed: dict[str, int] = {}
        self._by_owner: dict[str, int] = {}
        #: A choice failed for want of host memory, not of idle leases.
        self.host_short = False

    def add(self, victims: Iterable[Session]) -> None:
        """Let ``victims`` yield."""
        for v in victims:
            self.chosen[v.id] = v
            self._take(v)
            for x in v.slices:
                self._freed[x.device] = self._freed.get(x.device, 0) + x.bytes

    def _take(self, v: Session) -> None:
        owner, bound = v.owner.name, v.state_bound
        self.room -= bound
        self._by_owner[owner] = self._by_owner.get(owner, 0) + bound

    def _untake(self, v: Session) -> None:
        self.room += v.state_bound
        self._by_owner[v.owner.name] -= v.state_bound

    def expect(self, ledger: DeviceLedger) -> int:
        """Return the bytes that come free there without more victims."""
        return ledger.expect + self._freed.get(ledger.device.uuid, 0)

    def fits(self, v: Session) -> bool:
        """Return whether the state of ``v`` has room besides that of those chosen."""
        bound = v.state_bound
        if not bound:
            return True
        if bound > self.room:
            return False
        most = self._books.quotas.suspend_room(v.owner.name)
        return most is None or self._by_owner.get(v.owner.name, 0) + bound <= most

    def fit_together(self, victims: Iterable[Session]) -> bool:
        """Return whether the state of all ``victims`` has room besides that of those chosen."""
        taken: list[Session] = []
        for v in victims:
            if not self.fits(v):
                break
            self._take(v)
            taken.append(v)
        else:
            for v in taken:
                self._untake(v)
            return True
        for v in taken:
            self._untake(v)
        return False

    def victims(self, ledger: DeviceLedger, missing: int, spared: str) -> list[Session] | None:
        """Return the idle leases on a device that free ``missing`` bytes there, or None."""
        options = [v for v in ledger.idle.values() if v.id not in self.chosen and v.id != spared]
        size = ledger.leases
        if sum(size[v.id] for v in options) < missing:
            return None
        fitting = [v for v in options if self.fits(v)]
        if sum(size[v.id] for v in fitting) < missing:
            self.host_short = True
            return None
        now = self._now
        fitting.sort(key=lambda v: score(v, now))
        found = self._greedy(fitting, missing, size)
        if found is None:
            # Short of host memory: what frees the most for the least.
            self.host_short = True
            fitting.sort(key=lambda v: (v.state_bound / (size[v.id] or 1), v.id))
            found = self._greedy(fitting, missing, size)
        return found

    def _greedy(
        self, options: Sequence[Session], missing: int, size: Mapping[str, int]
    ) -> list[Session] | None:
        found: list[Session] = []
        total = 0
        for v in options:
            if self.fits(v):
                self._take(v)
                found.append(v)
                total += size[v.id]
                if total >= missing:
                    break
        for v in found:
            self._untake(v)
        if total < missing:
            return None
        for v in reversed(found[:-1]):
            if total - size[v.id] >= missing:
                found.remove(v)
                total -= size[v.id]
        return found

    def place(
        self,
        s: Session,
        needs: Sequence[Need],
        claimed: Mapping[str, int],
        *,
        only: Mapping[str, DeviceLedger] | None = None,
        more: bool = True,
    ) -> bool:
        """Choose a device for every need, with ``more`` victims if needed; fill :attr:`takes`.

        On ``claimed`` devices nobody yields; only what the head can spare is taken. With ``only``,
        no other devices are looked at.
        """
        last = preferred(s)
        takes: dict[int, Slice] = {}
        used: set[str] = set()
        for at in in_turn(needs):
            need = needs[at]
            best: tuple[tuple[Any, ...], DeviceLedger, list[Session]] | None = None
            good = bad = 0
            for ledger in self._options(need, used, claimed, only):
                missing = need.amount(ledger) - self.expect(ledger)
                found: list[Session] | None = []
                if missing > 0 and ledger.device.uuid not in claimed:
                    found = self.victims(ledger, missing, s.id) if more else None
                if found is None:
                    bad += 1
                    if bad == FAILURES:
                        break
                    continue
                order = (
                    bool(found),
                    ledger.device.uuid not in last,
                    score(found[0], self._now)[0] if found else self.expect(ledger),
                    ledger.device.index,
                )
                if best is None or order < best[0]:
                    best = order, ledger, found
                good += 1
                if good == WIDTH:
                    break
            if best is None:
                return False
            _, ledger, found = best
            self.add(found)
            used.add(ledger.device.uuid)
            takes[at] = Slice(ledger.device.uuid, need.amount(ledger))
        self.takes = in_order(needs, takes, self._books.inventory)
        return True

    def _options(
        self,
        need: Need,
        used: set[str],
        claimed: Mapping[str, int],
        only: Mapping[str, DeviceLedger] | None,
    ) -> Iterator[DeviceLedger]:
        inventory = self._books.inventory
        ledgers: Iterable[DeviceLedger]
        if need.fixed:
            ledgers = [inventory.placeholder(need.fixed)]
        elif only is not None:
            ledgers = only.values()
        else:
            ledgers = inventory.by_pot(need.least)
        for ledger in ledgers:
            uuid = ledger.device.uuid
            if uuid in used or not need.allows(ledger):
                continue
            wanted = claimed.get(uuid)
            if wanted is None:
                room = self.expect(ledger) + ledger.yieldable
            else:
                room = min(ledger.avail, spare(ledger, wanted))
            if room >= need.amount(ledger):
                yield ledger
