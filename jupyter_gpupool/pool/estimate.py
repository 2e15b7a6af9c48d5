# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""How long a waiting session will probably wait: a range, computed from past waits.

1. *The figure* is the length of the wait in a simulation of the sessions ahead. In the simulation,
   a kernel on a suitable GPU gives its slice back at the first of three times: when its work ends
   (estimated from the duration of earlier work), when its time slice is over, or when nothing
   protects its slice any more. The sessions ahead get slices in their order, and keep each slice
   for as long as such work usually takes. The pool makes a figure when a session begins to wait. It
   makes a new figure when the session's place changes, or when suspends begin to make room for the
   session.
2. *The range.* When a wait ends, the pool notes the ratio of the real wait to its figure. The range
   is the figure times quantiles of the last ``MOST`` ratios (split conformal prediction: V. Vovk et
   al., "Algorithmic Learning in a Random World", 2005). If future ratios are similar to past
   ratios, a part ``COVER`` of all waits ends inside the range, even if the simulation is not exact.
   While a session waits, the ratio of its wait to its figure grows. A past wait counts only if its
   ratio is greater than the ratio that the present wait has reached. If all past waits counted, a
   long wait would always seem nearly over.
3. *No evidence.* If fewer than ``LEAST`` past waits count, there is no range.

Estimates are not a part of the plan. :class:`~.news.News` computes them after the plan is made, for
the sessions that it informs of their place. In a long queue, it does so at most once a second.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

from .evidence import SHORTEST, Figure
from .facts import DeviceLedger, Facts
from .placement import asking
from .preemption import times
from .residence import guessed_cost
from .running import free_from, slice_ends
from .schedule import Plan
from .session import Session

#: The pool simulates this many sessions at the head of the queue. For each session behind them, it
#: adds the usual time between two grants.
SIMULATED = 6

#: The pool estimates only waits by these rules, in which a session waits for the leases of others.
ESTIMATED = ("planned", "busy", "behind-head")


class Way(NamedTuple):
    """The bytes of a lease on a device, and the times from which other sessions can get them."""

    #: The time from which a session of any class can get the bytes.
    ends: float
    #: ``turn`` is the time from which a session of the same class can get the bytes, because the
    #: time slice is over. ``taken`` is the time from which a session of a higher class can get
    #: them. Each is infinity if no rule allows this. ``level`` is the class of the lease.
    turn: float
    taken: float
    level: int
    bytes: int

    def at(self, level: int) -> float:
        """Return when a waiting session of class ``level`` can get the bytes of the lease."""
        if level > self.level:
            return min(self.ends, self.taken)
        return min(self.ends, self.turn) if level == self.level else self.ends


class Ahead:
    """The simulation of the queue at one moment: when the sessions ahead get their slices."""

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self._facts = facts
        #: When each simulated session gets its slice, and when the last of them gets its slice.
        self._starts: dict[str, float] = {}
        self._last = facts.now
        self._pace: float | None = None
        self._ways: dict[str, list[Way]] = {uuid: [] for uuid in facts.devices}
        #: Maps a device to pairs (time, bytes). At this time a simulated session takes bytes
        #: (negative), or gives bytes back (positive).
        self._changes: dict[str, list[tuple[float, int]]] = {}
        self._simulate(plan)

    def figure(self, s: Session, position: int) -> Figure | None:
        """Return the figure of a session that waits for leases of others; None if unknown."""
        at = self._starts.get(s.id)
        if at is None:
            if self._pace is None or position <= SIMULATED:
                return None
            at = self._last + (position - SIMULATED) * self._pace
        if at == math.inf:
            return None
        facts = self._facts
        seconds = at - facts.now + resuming(s, facts)
        return Figure(facts.now, max(SHORTEST, seconds), position, len(facts.leased))

    def _simulate(self, plan: Plan) -> None:
        facts, queue = self._facts, plan.queue
        for v in facts.leased.values():
            for x in v.lease.slices:
                self._ways[x.device].append(way(v, x.bytes, facts))
        for promise in plan.promises.values():
            for x in promise.takes:
                self._changes.setdefault(x.device, []).append((facts.now, -x.bytes))
        for s in queue[:SIMULATED]:
            hold = facts.evidence.next_spell(s.measured.busy)
            if s.id in plan.promises or hold is None:
                continue
            at = self._starts[s.id] = self._serve(s, hold)
            if at < math.inf:
                self._last = max(self._last, at)
        if len(queue) > SIMULATED:
            self._pace = self._usual_pace(queue)

    def _serve(self, s: Session, hold: float) -> float:
        """Return when ``s`` gets its slices, and note when it takes and gives back their bytes."""
        facts = self._facts
        needs = asking(s, facts).needs
        level = facts.settings.priority_classes.get(s.request.priority, 0)
        found: list[tuple[float, str, int]] = []
        for uuid, ledger in facts.devices.items():
            if ledger.drained:
                continue
            amounts = [need.amount(ledger) for need in needs if need.allows(ledger)]
            if amounts:
                found.append((self._room(ledger, max(amounts), level), uuid, max(amounts)))
        found.sort()
        if len(found) < len(needs):
            return math.inf
        chosen = found[: len(needs)]
        at = max(t for t, _, _ in chosen)
        if at < math.inf:
            back = at + resuming(s, facts) + hold
            for _, uuid, size in chosen:
                self._changes.setdefault(uuid, []).extend(((at, -size), (back, size)))
        return at

    def _room(self, ledger: DeviceLedger, size: int, level: int) -> float:
        """Return the time from which on ``size`` bytes of a device are free and stay free."""
        uuid = ledger.device.uuid
        steps = [(w.at(level), w.bytes) for w in self._ways[uuid]]
        steps += self._changes.get(uuid, ())
        steps.sort()
        free, found = ledger.free + sum(change for _, change in steps), math.inf
        # Undo one change after another, beginning with the last, until too few bytes are free. The
        # bytes are free, and stay free, from the change that was undone last.
        for at, change in reversed(steps):
            if free < size:
                return found
            found, free = at, free - change
        return self._facts.now if free >= size else found

    def _usual_pace(self, queue: Sequence[Session]) -> float | None:
        """Return the usual time between two grants, in seconds; None if unknown.

        It is the usual time of a cell, a suspend and a resume together, divided by the number of
        sessions that fit on the devices at the same time.
        """
        facts = self._facts
        holds = [facts.evidence.next_spell(s.measured.busy) for s in queue[:SIMULATED]]
        known = [hold for hold in holds if hold is not None]
        room = sum(facts.capacities)
        if not known or not room:
            return None
        sizes = [s.request.memory * s.request.devices for s in queue]
        moves = 2 * (facts.swap or 0.0)
        return (sum(known) / len(known) + moves) * sum(sizes) / len(sizes) / room


def way(v: Session, size: int, facts: Facts) -> Way:
    """Return when waiting sessions can get ``size`` bytes of the lease of ``v``."""
    now, gone = facts.now, suspending(v, facts)
    settings = facts.settings
    level = max(settings.priority_classes.get(v.request.priority, 0), v.lease.level)
    turn = taken = math.inf
    if v.state == "detaching":
        ends = max(now, v.state_since + gone)
        return Way(ends, turn, taken, level, size)
    if v.state == "idle":
        yields, leaves = times(v, facts)
        ends = max(now, min(yields, leaves)) + gone
    else:
        left = facts.evidence.spell_left(v.measured.busy, now - v.measured.busy_since)
        ends = math.inf if left is None else now + left + gone
    if "turns" in settings.preempt:
        turn = max(now, slice_ends(v, facts)) + gone
    if "class" in settings.preempt:
        taken = max(now, free_from(v, facts)) + gone
    return Way(ends, turn, taken, level, size)


def moving(s: Session, devices: Sequence[str], position: int, facts: Facts) -> Figure:
    """Return the figure of a session that waits only for suspends under way on ``devices``."""
    now = facts.now
    gone = [v for v in facts.leased.values() if v.state == "detaching"]
    gone = [v for v in gone if any(x.device in devices for x in v.lease.slices)]
    begun = max([suspending(v, facts) - (now - v.state_since) for v in gone], default=0.0)
    seconds = max(0.0, begun) + resuming(s, facts)
    return Figure(now, max(SHORTEST, seconds), position, len(gone), moving=True)


def suspending(v: Session, facts: Facts) -> float:
    """Return the seconds that suspending ``v`` will probably take."""
    if v.measured.suspend is not None:
        return v.measured.suspend
    return facts.swap if facts.swap is not None else guessed_cost(v.lease.footprint) / 2


def resuming(s: Session, facts: Facts) -> float:
    """Return the seconds that bringing the state of ``s`` back will probably take."""
    if not s.suspended:
        return 0.0
    if s.measured.resume is not None:
        return s.measured.resume
    return facts.swap if facts.swap is not None else guessed_cost(s.suspended_bytes) / 2
