# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One session: its identity, its recorded fields, and the records of its lease, wait and past.

The fields that outlive the broker have the names of :class:`~.model.SessionRecord`; only
:func:`record` and :func:`restored` convert between the two forms. A session changes only inside
:meth:`.facts.Facts.change`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from ..states import ATTACHED, AttachPolicy, State
from .evidence import Expected, Figure
from .model import Hold, Owner, Request, SessionRecord, Slice
from .residence import Gap, Habits, Stay

#: How many past transitions of a session are remembered for error messages and ``story``.
STORY_LENGTH = 32

#: For so many seconds after a restart no recovered lease is preempted, so that agents with a
#: running cell can connect first. Short, so that a broker that is killed often still serves.
GRACE = 1.0

#: Weight of the newest observation in a mean.
WEIGHT = 0.3

NEVER = -math.inf


@dataclass(slots=True, eq=False)
class Lease:
    """The present lease and its measurements; each attach begins a new one."""

    slices: tuple[Slice, ...] = ()
    #: Device bytes over all slices, and the bytes that count against the owner's quota.
    granted: int = 0
    charge: int = 0
    attached_at: float = 0.0
    #: When the resume to this lease ended; minus infinity if no state was moved.
    resumed_at: float = NEVER
    #: Bytes that the resume restored, by device: they count as used until the first measurement.
    restored: dict[str, int] = field(default_factory=dict)
    #: Host bytes set aside while its suspend is under way.
    host_bound: int = 0
    #: Measured bytes by device and in all, and when the last measurement came.
    footprints: dict[str, int] = field(default_factory=dict)
    footprint: int = 0
    sampled_at: float = NEVER
    #: Measured bytes by device, kept only while the lease has more than is guaranteed.
    measured_at: dict[str, float] = field(default_factory=dict)
    #: When it last grew beyond what is guaranteed, and when its measured use last rose.
    grown_at: float = NEVER
    rose_at: float = NEVER
    #: How the session used it since the resume, in the terms of :mod:`.residence`.
    stay: Stay = field(default_factory=Stay)
    #: Whether the session was told that another one waits for its slice.
    told_wanted: bool = False
    #: Seconds that moving it out and in takes, as known when it began (until a move was measured:
    #: guessed from its measured use); see :mod:`.running`.
    cost: float = 0.0
    #: The number of the class in which it got the lease: its own, or one to which age raised it.
    level: int = -(1 << 62)
    #: Since when others wait for a session that cannot be suspended, and how often its user was
    #: warned.
    stuck_since: float | None = None
    warned: int = 0
    #: The tier in which it is being preempted while in use; 0 if it is not (see :mod:`.running`).
    preempted: int = 0


@dataclass(slots=True, eq=False)
class Wait:
    """The present wait for a lease or for growth; each wait begins a new one."""

    #: First come, first served among equals.
    number: int = 0
    since: float = 0.0
    #: When it became the head of the queue.
    head_since: float | None = None
    #: Why the last attach failed; not tried again before ``retry_at``.
    failed: str = ""
    #: The figures of the wait so far, the latest last, each with whether suspends were making room
    #: then.
    figures: list[Figure] = field(default_factory=list)
    #: When it probably ends; None without evidence.
    expected: Expected | None = None
    #: The last news to its user: position, length, reason, expected.
    told: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class Measured:
    """Measurements that outlive a lease: weighted means in seconds (None: never measured), and
    habits.
    """

    suspend: float | None = None
    resume: float | None = None
    #: From its first hold to its last.
    busy: float | None = None
    busy_since: float = 0.0
    #: The present or last gap without work (None: it works), and statistics of earlier gaps.
    gap: Gap | None = None
    habits: Habits = field(default_factory=Habits)

    @property
    def moving(self) -> float:
        """Seconds that one suspend and one resume take together."""
        return (self.suspend or 0.0) + (self.resume or 0.0)


@dataclass(slots=True, eq=False)
class Session:
    """One session: its identity, its recorded fields, and its three parts."""

    id: str
    owner: Owner
    request: Request
    attach: AttachPolicy
    label: str = ""
    lands: bool = False
    gated: bool = True
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
    recall_at: float = 0.0
    recall_reason: str = ""
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
    #: The driver would not move its state to another device. Not recorded: a restarted broker asks
    #: the driver once more, and gets the same answer.
    immovable: bool = False
    #: After a failed try: no suspend (if idle) or attach (if queued) before this time.
    retry_at: float = 0.0
    failures: int = 0
    #: Why its last suspend failed, though host memory had room; it is tried again.
    refused: str = ""
    #: The limit of host memory is below its state, so only less state or a higher limit helps.
    confined: bool = False
    #: Why it was preempted while in use, until it has its next lease; "" if it was not.
    preempted: str = ""
    #: Why its last suspend was refused for lack of host memory.
    roomless: str = ""
    #: Its machine or control group is short of memory: it must not be suspended.
    pressed: bool = False
    #: The version of devices and rules by which its request can be met; -1: not known.
    possible: int = -1
    #: Cached results of :func:`~.placement.asking` and :func:`~.preemption.times`, and their
    #: :attr:`Facts.version`. :meth:`Facts.change` drops both. ``times`` is also dropped by every
    #: event that names the session, every sample, and every wait that begins or ends beside it.
    asking: Any = None
    times: Any = None
    #: The same of :func:`~.running.terms`.
    using: Any = None
    story: deque[tuple[float, State, State, str, int]] = field(
        default_factory=lambda: deque(maxlen=STORY_LENGTH)
    )

    @property
    def suspended_bytes(self) -> int:
        """Host bytes of its suspended state."""
        return sum(s.bytes for s in self.suspended)

    @property
    def empty(self) -> bool:
        """Whether a measurement since it became idle found no device memory."""
        return self.known and not self.lease.footprint

    @property
    def known(self) -> bool:
        """Whether all of its slices were measured since it became idle."""
        lease = self.lease
        return lease.sampled_at >= self.idle_since and len(lease.footprints) >= len(lease.slices)

    @property
    def state_bound(self) -> int:
        """Host bytes that suspending it may take.

        The bytes measured since it became idle. Without a measurement, or while it is in use, the
        granted bytes or the last measurement, whichever is more.
        """
        if self.state == "active":
            return max(self.lease.granted, self.lease.footprint)
        return self.lease.footprint if self.known else max(self.lease.granted, self.lease.footprint)

    def recalled(self, now: float) -> str:
        """Return why an admin takes its slice back now; "" if none does."""
        return self.recall_reason if self.recall_at and self.recall_at <= now else ""

    def story_lines(self) -> list[str]:
        """Return the last steps as text, oldest first."""
        return [
            f"{now:.3f} {old} -> {new} (epoch {epoch}): {reason}"
            for now, old, new, reason, epoch in self.story
        ]


def weighted(mean: float | None, seconds: float) -> float:
    """Return the exponentially weighted mean with one more observation."""
    return seconds if mean is None else mean + WEIGHT * (seconds - mean)


_OWN = {f.name for f in fields(Session)}
_LEASE = {f.name for f in fields(Lease)} - _OWN
#: Recorded fields in the order of the record, and where each is; the others are arguments below.
_PLAIN = [f.name for f in fields(SessionRecord) if f.name not in ("holds", "wait_reason")]
_VALUES = attrgetter(*(f"lease.{name}" if name in _LEASE else name for name in _PLAIN))
#: Fields that a recovered session keeps unchanged; the rest depends on what the driver found.
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
    """Return the session of a record. Its state has been reconciled with the driver."""
    s = Session(**{name: getattr(r, name) for name in _KEPT}, state_since=now, idle_since=now)
    if r.state in ATTACHED and r.slices:
        s.holds = {h.id: h for h in r.holds}
        s.state = "active" if s.holds else "idle"
        s.lease.slices = r.slices
        s.lease.attached_at = now
        if not s.holds and r.idle_since:
            # The idle time counts from then: a broker that is killed often must not withhold idle
            # slices from waiting sessions.
            s.idle_since = min(now, r.idle_since)
    else:
        s.suspended = r.suspended
        s.recall_at, s.recall_reason = 0.0, ""  # it ended with the lease
        # A session that waited keeps its place if it asks again soon.
        s.queued_at = r.queued_at
    s.measured.busy_since = now
    s.retry_at = now + GRACE
    return s
