# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Time slices: which session computes next if several sessions contend for a device.

The module is a pure planner that works beside the pool. At the end of every turn, the planner gets
an observation of each session, and returns the sessions that may run in the next turn. If fewer
than two sessions are busy on a device, all sessions on the device may run. If two or more are busy,
only one of the busy sessions at a time has the turn. Over time, the busy seconds of each session
are then in proportion to its share (start-time fair queueing):

* Each session has a *virtual time* on each of its devices: busy seconds / share. The session with
  the smallest virtual time has the next turn. So a session whose long kernel ran beyond the end of
  its turn waits longer for its next turn.
* A session that becomes busy (a new session, or a session after a pause) starts at the smallest
  virtual time of the sessions that are busy on the device. So it gets no credit for its pause, and
  does not get all the next turns. It also need not wait until the others have caught up with it.
* A session on several devices runs only when it has the turn on all of them at once. While it waits
  for one device, other sessions run on its other devices. It gets no credit for the turns that it
  could not use.
* A session that is not busy takes no turns, and is not paused. If it were paused, the planner would
  not see its next call, and so would not see that the session becomes busy.

Shares are proportions among the sessions that contend, not a cap: a session that is alone gets all
the time. If all contenders have asked for ``FULL``, the planner pauses none of them: the driver's
own time slices are enough.
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
    #: The ``compute`` of its request, above 0. Its busy time is in proportion to this share.
    share: int
    #: The devices of its lease.
    devices: tuple[str, ...]
    #: Whether it called CUDA, had work in flight, or waited for its turn.
    busy: bool
    #: The session's busy seconds so far. Each second counts in full on each of its devices.
    used: float


@dataclass(frozen=True, slots=True)
class Tally:
    """What the planner remembers of one session."""

    used: float
    busy: bool
    #: Virtual time by device.
    virtual: Mapping[str, float]
    #: When the session began to wait for a turn; if it does not wait, the time of the last plan.
    since: float


@dataclass(frozen=True, slots=True)
class Tallies:
    """What the planner remembers from one turn to the next; at the start it is ``Tallies()``."""

    accounts: Mapping[str, Tally] = field(default_factory=dict)
    #: For each device: the smallest virtual time of the sessions that were last busy on it. This
    #: time never falls.
    clocks: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    """The sessions that may run in the next turn, and what to remember."""

    run: frozenset[str]
    #: Sessions that are busy on a contended device and do not run in this turn.
    wait: frozenset[str]
    #: Devices whose sessions take turns.
    contended: frozenset[str]
    state: Tallies


def next_turn(state: Tallies, runners: Sequence[Contender], now: float) -> Turn:
    """Return which sessions may run in the turn that begins at ``now`` (seconds).

    The planner forgets sessions that are no longer among ``runners``. The same arguments give the
    same plan.
    """
    busy = _busy(runners)
    virtual = {r.session: _charged(state, r) for r in runners}
    clocks = dict(state.clocks)
    for uuid, there in busy.items():
        least = min(virtual[r.session][uuid] for r in there)
        clocks[uuid] = max(least, clocks.get(uuid, least))
    contended = contended_devices(runners)
    contenders = [r for r in runners if r.busy and not contended.isdisjoint(r.devices)]
    # A session must have the turn on all of its devices at once. So its rank depends on the device
    # on which its virtual time is furthest ahead of the device's clock.
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
                # A session gets no credit for turns that it could not use because it waited for its
                # other devices.
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

    On each of these devices, two or more sessions are busy, and at least one of them has asked for
    less than the whole device. (If all have asked for the whole device, the equal time slices of
    the driver are enough.)
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
    """Return the virtual times of ``r``, including what it has used since the last plan."""
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
    """Return the sessions that have a turn, at most one on each contended device.

    The sessions choose in the order of their rank. A session gets a turn if no earlier session has
    taken one of its contended devices.
    """
    chosen: list[Contender] = []
    taken: set[str] = set()
    for r in sorted(contenders, key=lambda r: (ahead[r.session], since[r.session], r.session)):
        needed = contended.intersection(r.devices)
        if taken.isdisjoint(needed):
            taken |= needed
            chosen.append(r)
    return chosen
