# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time slices: which session computes next where several contend for a device.

A pure planner beside the pool: at the end of every turn it gets the observations of the sessions on
the devices, and returns those that may run in the next turn. If fewer than two are busy, all may
run. If two or more are busy, one at a time has its turn, so that over time the busy seconds of each
are in proportion to its share (start-time fair queueing):

* Each session has a *virtual time* on each of its devices: busy seconds / share. The session with
  the least goes next, so later turns compensate for a long kernel that overran its turn.
* A session that becomes busy (new, or back from a pause) starts at the least virtual time among
  those that were busy there: it gets no credit for its pause, so it cannot keep the others out, and
  it does not wait for their old debts.
* A session on several devices runs only when it has the turn on all of them. While it waits for the
  last one, others run on the first; it gets no credit for missed turns.
* A session that is not busy loses nothing: its turn goes to others. It is not paused either, so
  that its next call, which starts its busy time, is seen.

Shares are proportions among those that contend, not a cap: alone, a session gets all the time. If
all contenders have asked for ``FULL``, none is paused: the driver's own time slices are enough.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Iterable, Mapping, Sequence

#: The share of a session that has not asked for less than the whole device.
FULL = 100


@dataclass(frozen=True, slots=True)
class Contender:
    """The observations of one attached session in the last turn."""

    session: str
    #: ``Request.compute``: its share against that of the others, more than 0.
    share: int
    #: The devices of its lease.
    devices: tuple[str, ...]
    #: Whether it called CUDA, had work in flight, or waited for its turn.
    busy: bool
    #: All busy seconds so far. They are the same on each of the session's devices.
    used: float


@dataclass(frozen=True, slots=True)
class Tally:
    """What the planner remembers of one session."""

    used: float
    busy: bool
    #: Virtual time by device.
    virtual: Mapping[str, float]
    #: When its wait for a turn began; without a wait, when it last had a turn.
    since: float


@dataclass(frozen=True, slots=True)
class Tallies:
    """What the planner remembers from one turn to the next; begin with ``Tallies()``."""

    accounts: Mapping[str, Tally] = field(default_factory=dict)
    #: By device, the least virtual time among those that were busy there in the last turn.
    clocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """The sessions that may run in the next turn, and what to remember."""

    run: frozenset[str]
    #: Sessions that are busy on a contended device and not in this turn.
    wait: frozenset[str]
    #: Devices whose sessions take turns.
    contended: frozenset[str]
    state: Tallies


def next_turn(state: Tallies, runners: Sequence[Contender], now: float) -> Turn:
    """Return which sessions may run in the turn that begins at ``now`` (seconds).

    Sessions that are not among ``runners`` any more are forgotten. The same arguments give the same
    plan.
    """
    busy = _busy(runners)
    virtual = {r.session: _charged(state, r) for r in runners}
    clocks = dict(state.clocks)
    for uuid, there in busy.items():
        least = min(virtual[r.session][uuid] for r in there)
        clocks[uuid] = max(least, clocks.get(uuid, least))
    contended = contended_devices(runners)
    contenders = [r for r in runners if r.busy and not contended.isdisjoint(r.devices)]
    # A session must have its turn on all of its devices, so the device with the latest turn counts.
    ahead = {
        r.session: max(virtual[r.session][u] - clocks[u] for u in contended.intersection(r.devices))
        for r in contenders
    }
    since = {
        r.session: state.accounts[r.session].since if r.session in state.accounts else now
        for r in contenders
    }
    chosen = _choose(contenders, contended, ahead, since)
    for r in chosen:
        for uuid in contended.intersection(r.devices):
            start = virtual[r.session][uuid]
            for other in busy[uuid]:
                # A session gets no credit for turns that it could not use without its other
                # devices.
                own = virtual[other.session]
                own[uuid] = max(own[uuid], start)
    run = {r.session for r in chosen}
    wait = frozenset(r.session for r in contenders) - run
    accounts = {}
    for r in runners:
        old = state.accounts.get(r.session)
        waits = r.session in wait and old is not None and old.busy
        accounts[r.session] = Tally(
            used=r.used,
            busy=r.busy,
            virtual=virtual[r.session],
            since=old.since if waits and old is not None else now,
        )
    devices = {uuid for r in runners for uuid in r.devices}
    return Turn(
        run=frozenset(r.session for r in runners) - wait,
        wait=wait,
        contended=contended,
        state=Tallies(accounts, {uuid: clock for uuid, clock in clocks.items() if uuid in devices}),
    )


def contended_devices(runners: Iterable[Contender]) -> frozenset[str]:
    """Return the devices whose sessions must take turns.

    Two sessions or more are busy there, and not all of them have asked for the whole device: the
    driver's own time slices are equal ones.
    """
    return frozenset(
        uuid
        for uuid, there in _busy(runners).items()
        if len(there) > 1 and any(r.share < FULL for r in there)
    )


def _busy(runners: Iterable[Contender]) -> dict[str, list[Contender]]:
    """Return the busy sessions by device."""
    busy: dict[str, list[Contender]] = {}
    for r in runners:
        for uuid in r.devices if r.busy else ():
            busy.setdefault(uuid, []).append(r)
    return busy


def _charged(state: Tallies, r: Contender) -> dict[str, float]:
    """Return the virtual times of ``r``, charged with what it has used since the last plan."""
    old = state.accounts.get(r.session)
    more = 0.0 if old is None else max(0.0, r.used - old.used) / max(1, r.share)
    found = {}
    for uuid in r.devices:
        clock = state.clocks.get(uuid, 0.0)
        before = clock if old is None else old.virtual.get(uuid, clock)
        if old is None or not old.busy:
            before = max(before, clock)
        found[uuid] = before + more
    return found


def _choose(
    contenders: Sequence[Contender],
    contended: frozenset[str],
    ahead: Mapping[str, float],
    since: Mapping[str, float],
) -> list[Contender]:
    """Return the sessions that have a turn: as many as possible, one on a contended device."""
    chosen: list[Contender] = []
    taken: set[str] = set()
    for r in sorted(contenders, key=lambda r: (ahead[r.session], since[r.session], r.session)):
        needed = contended.intersection(r.devices)
        if taken.isdisjoint(needed):
            taken |= needed
            chosen.append(r)
    return chosen
