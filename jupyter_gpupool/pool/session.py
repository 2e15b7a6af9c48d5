# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A session as the pool keeps it: who it is, its lease, its wait, what was measured of it.

The fields that outlive the broker have the names of :class:`~.model.SessionRecord`, which lists
them; :func:`record` and :func:`restored` are the only places that go from one form to the other.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from .model import ATTACHED, AttachPolicy, Hold, Owner, Request, SessionRecord, Slice, State
from .residence import Gap, Habits, Stay

#: How many past transitions of a session are remembered for error messages and ``story``.
STORY_LENGTH = 32

#: Seconds after a restart of the broker in which no recovered lease is taken: agents with a
#: running cell greet first. Short, or a broker that is killed again and again never takes one.
GRACE = 1.0

#: Weight of the newest observation in a mean.
WEIGHT = 0.3

NEVER = -math.inf


@dataclass(slots=True, eq=False)
class Lease:
    """The present lease, and what was seen of it; a new one begins with each attach."""

    slices: tuple[Slice, ...] = ()
    #: Device bytes over all slices, and the bytes that the owner's quota is charged.
    granted: int = 0
    charge: int = 0
    attached_at: float = 0.0
    #: When the resume to this lease was done; minus infinity if nothing was moved for it.
    resumed_at: float = NEVER
    #: Bytes that the resume restored, by device: in use until a measurement tells.
    restored: dict[str, int] = field(default_factory=dict)
    #: Host bytes set aside while its suspend is under way.
    host_bound: int = 0
    #: Measured device bytes by device and over all, and when the last measurement came.
    footprints: dict[str, int] = field(default_factory=dict)
    footprint: int = 0
    sampled_at: float = NEVER
    #: When by device, kept only where the lease has more than is guaranteed.
    measured_at: dict[str, float] = field(default_factory=dict)
    #: When it last grew beyond what is guaranteed, and when its measured use last rose.
    grown_at: float = NEVER
    rose_at: float = NEVER
    #: Since when it is less than what is guaranteed.
    short_since: float = 0.0
    #: What was done with it since the resume, in the words of :mod:`.residence`.
    stay: Stay = field(default_factory=Stay)
    #: The session has been told that somebody waits for what it has.
    told_wanted: bool = False


@dataclass(slots=True, eq=False)
class Wait:
    """The present wait in the queue; a new one begins whenever the session is queued."""

    #: First come, first served among equals.
    number: int = 0
    #: When it first was the head of the queue.
    head_since: float | None = None
    #: Why the last attach failed; not tried again before ``retry_at``.
    failed: str = ""
    #: What its user was last told: position, length, eta, reason.
    told: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class Measured:
    """What outlives a lease: weighted means in seconds (None: never measured), and habits."""

    suspend: float | None = None
    resume: float | None = None
    #: From its first hold to its last.
    busy: float | None = None
    busy_since: float = 0.0
    #: The present or last spell without work (None: it works), and what earlier ones were like.
    gap: Gap | None = None
    habits: Habits = field(default_factory=Habits)

    @property
    def moving(self) -> float:
        """Seconds that one suspend and one resume take together."""
        return (self.suspend or 0.0) + (self.resume or 0.0)


@dataclass(slots=True, eq=False)
class Session:
    """One session: identity, what is recorded of it, and its three parts."""

    id: str
    owner: Owner
    request: Request
    attach: AttachPolicy
    label: str = ""
    lands: bool = False
    state: State = "detached"
    epoch: int = 0
    opened_at: float = 0.0
    state_since: float = 0.0
    holds: dict[str, Hold] = field(default_factory=dict)
    suspended: tuple[Slice, ...] = ()
    bound: tuple[str, ...] = ()
    last_devices: tuple[str, ...] = ()
    pinned_reason: str = ""
    pinned_at: float = 0.0
    release_asked: bool = False
    keep_until: float = 0.0
    idle_since: float = 0.0
    queued_at: float = 0.0
    wait_seconds_total: float = 0.0
    attached_seconds_total: float = 0.0
    suspends: int = 0
    resumes: int = 0
    migrations: int = 0

    lease: Lease = field(default_factory=Lease)
    wait: Wait = field(default_factory=Wait)
    measured: Measured = field(default_factory=Measured)
    #: The driver would not move its state to another device. Not recorded: whoever forgets it asks
    #: the driver once more, and gets the same answer.
    immovable: bool = False
    #: Not suspended (idle) or not attached (queued) before this time, after a failed try.
    retry_at: float = 0.0
    failures: int = 0
    #: Why its last suspend was refused for want of host memory.
    roomless: str = ""
    #: Its machine or control group is short of memory: it must not be suspended.
    pressed: bool = False
    #: What :func:`~.needs.asking` and :func:`~.preemption.times` made of the facts, and of
    #: which version of them; :meth:`~.state.State.touch` drops both.
    asking: Any = None
    times: Any = None
    story: deque[tuple[float, State, State, str, int]] = field(
        default_factory=lambda: deque(maxlen=STORY_LENGTH)
    )

    @property
    def suspended_bytes(self) -> int:
        """Host bytes of its suspended state."""
        return sum(s.bytes for s in self.suspended)

    @property
    def empty(self) -> bool:
        """Whether it is known to hold no device memory (measured since it became idle)."""
        return self.known and not self.lease.footprint

    @property
    def known(self) -> bool:
        """Whether all of its slices were measured since it became idle."""
        lease = self.lease
        return lease.sampled_at >= self.idle_since and len(lease.footprints) >= len(lease.slices)

    @property
    def state_bound(self) -> int:
        """Host bytes that suspending it may take.

        What was measured since it became idle; without such a measurement, what it was granted (or
        the older measurement, if that is more).
        """
        return self.lease.footprint if self.known else max(self.lease.granted, self.lease.footprint)

    def story_lines(self) -> list[str]:
        """Return the last steps as text, oldest first."""
        return [
            f"{now:.3f} {old} -> {new} (epoch {epoch}): {reason}"
            for now, old, new, reason, epoch in self.story
        ]


def weighted(mean: float | None, seconds: float) -> float:
    """Return an exponentially weighted mean with one more observation."""
    return seconds if mean is None else mean + WEIGHT * (seconds - mean)


_OWN = {f.name for f in fields(Session)}
_LEASE = {f.name for f in fields(Lease)} - _OWN
#: Recorded, in the order of the record, and where each is; the others are arguments below.
_PLAIN = [f.name for f in fields(SessionRecord) if f.name not in ("holds", "wait_reason")]
_VALUES = attrgetter(*(f"lease.{name}" if name in _LEASE else name for name in _PLAIN))
#: What a recovered session takes over as it is; the rest depends on what the driver found.
_KEPT = [
    f.name
    for f in fields(SessionRecord)
    if f.name in _OWN - {"state", "state_since", "holds", "suspended", "idle_since", "queued_at"}
]


def record(s: Session, wait_reason: str) -> SessionRecord:
    """Return the session as a frozen value; ``wait_reason`` says in words why it waits."""
    return SessionRecord(
        **dict(zip(_PLAIN, _VALUES(s), strict=True)),
        holds=tuple(s.holds.values()),
        wait_reason=wait_reason,
    )


def restored(r: SessionRecord, now: float) -> Session:
    """Return the session of a record, whose state has been reconciled with the driver."""
    s = Session(**{name: getattr(r, name) for name in _KEPT}, state_since=now, idle_since=now)
    if r.state in ATTACHED and r.slices:
        s.holds = {h.id: h for h in r.holds}
        s.state = "active" if s.holds else "idle"
        s.lease.slices = r.slices
        s.lease.attached_at = now
        if not s.holds and r.idle_since:
            # Idle since then: a broker that is killed again and again must not make those wait for
            # ever who wait for an idle slice.
            s.idle_since = min(now, r.idle_since)
    else:
        s.suspended = r.suspended
        # A session that was waiting keeps its place if it asks again soon.
        s.queued_at = r.queued_at
    s.measured.busy_since = now
    s.retry_at = now + GRACE
    return s
