# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One session: its identity, the fields that the journal records, its lease, its wait and its past.

The fields that survive a restart of the broker have the same names as in
:class:`~.model.SessionRecord`; only :func:`record` and :func:`restored` convert between the two
forms. A session changes only inside :meth:`.facts.Facts.change`.
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

#: For this many seconds after a restart of the broker, the pool preempts no recovered lease, so
#: that agents with a running cell can connect first. The time must be short: with a long time, a
#: broker that is killed often would never serve waiting sessions.
GRACE = 1.0

#: Weight of the newest observation in a mean.
WEIGHT = 0.3

NEVER = -math.inf


@dataclass(slots=True, eq=False)
class Lease:
    """The present lease and its measurements; a new object for each lease."""

    slices: tuple[Slice, ...] = ()
    #: Device bytes over all slices, and the bytes that count against the owner's quota.
    granted: int = 0
    charge: int = 0
    attached_at: float = 0.0
    #: When the resume to this lease ended; minus infinity if no state was moved.
    resumed_at: float = NEVER
    #: Bytes that the resume restored, by device. They count as used until the first measurement.
    restored: dict[str, int] = field(default_factory=dict)
    #: Host bytes that are set aside for the state while its suspend is under way.
    host_bound: int = 0
    #: Measured bytes by device and in total, and the time of the last measurement.
    footprints: dict[str, int] = field(default_factory=dict)
    footprint: int = 0
    sampled_at: float = NEVER
    #: For each device: when the pool last measured the use of a slice that had more bytes than are
    #: guaranteed.
    measured_at: dict[str, float] = field(default_factory=dict)
    #: When the lease last grew beyond its guarantee, and when its measured use last rose.
    grown_at: float = NEVER
    rose_at: float = NEVER
    #: How the session has used the lease since the resume; :mod:`.residence` explains the terms.
    stay: Stay = field(default_factory=Stay)
    #: Whether the pool has informed the session that another session waits for its slice.
    told_wanted: bool = False
    #: How many seconds a suspend and a resume of the session take together, as the pool knew this
    #: when the lease began. Until the pool has measured a move, the value is a guess from the bytes
    #: in use. See :func:`.running.cost`.
    cost: float = 0.0
    #: The number of the class in which the session got the lease: its own class, or a higher class
    #: to which its age raised it.
    level: int = -(1 << 62)
    #: If the session cannot be suspended: since when other sessions wait for its slice, and how
    #: many warnings its user has got.
    stuck_since: float | None = None
    warned: int = 0
    #: The tier by which the pool is preempting this lease while it is in use (see :mod:`.running`);
    #: 0 if the pool is not doing this.
    preempted: int = 0


@dataclass(slots=True, eq=False)
class Wait:
    """The present wait for a lease or for growth; a new object for each wait."""

    #: The pool numbers waits in the order in which they begin. If two sessions are equal in the
    #: order of service, the session whose wait has the smaller number goes first.
    number: int = 0
    since: float = 0.0
    #: When the session became the head of the queue.
    head_since: float | None = None
    #: Why the last attach failed; the pool does not try again before ``retry_at``.
    failed: str = ""
    #: The figures from which the pool has estimated this wait, the latest last. A figure also says
    #: whether suspends under way made room for the session when the pool made the figure.
    figures: list[Figure] = field(default_factory=list)
    #: When the wait will probably end; None without evidence.
    expected: Expected | None = None
    #: The last news that its user got: position, length, reason, expected.
    told: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class Measured:
    """Measurements that the session keeps after a lease ends.

    A number is a weighted mean in seconds; None means that it was never measured.
    """

    suspend: float | None = None
    resume: float | None = None
    #: Seconds of one period of work: from its first hold until its last hold is dropped.
    busy: float | None = None
    busy_since: float = 0.0
    #: ``gap`` is the present time without work (see :class:`~.residence.Gap`); None if the session
    #: works or waits to work. ``habits`` has figures on earlier gaps.
    gap: Gap | None = None
    habits: Habits = field(default_factory=Habits)

    @property
    def moving(self) -> float:
        """Seconds that one suspend and one resume take together."""
        return (self.suspend or 0.0) + (self.resume or 0.0)


@dataclass(slots=True, eq=False)
class Session:
    """One session: its identity, its recorded fields, and its lease, wait and measurements."""

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
    #: Whether the driver has refused to move the session's state to another device. The journal
    #: does not record this: a restarted broker asks the driver again and gets the same answer.
    immovable: bool = False
    #: After a failed suspend or attach, the pool makes no new attempt before this time.
    retry_at: float = 0.0
    failures: int = 0
    #: Why the session's last suspend failed although host memory had room; the pool tries again.
    refused: str = ""
    #: Whether the session's state is larger than the host memory that its processes may use; a
    #: control group may limit this memory, for example. The pool can suspend the session only after
    #: the state shrinks or the limit rises.
    confined: bool = False
    #: Why the pool preempted the session while it was in use; "" if the pool did not preempt it, or
    #: if the session has got a new lease or has stopped waiting since.
    preempted: str = ""
    #: Why its last suspend was refused for lack of host memory.
    roomless: str = ""
    #: Whether the machine, or the control group of the session, is short of host memory. If so, the
    #: pool must not suspend the session.
    pressed: bool = False
    #: The :attr:`Facts.version` at which the pool last found that the devices and rules can meet
    #: the session's request; -1 if the pool has not found this for the present request.
    possible: int = -1
    #: Cached results of :func:`~.placement.asking` and :func:`~.preemption.times`, each with its
    #: :attr:`Facts.version`. :meth:`Facts.change` drops both. The pool also drops ``times`` at
    #: every event that names the session, at every sample of the session's memory, and when another
    #: session begins or stops waiting for its slice.
    asking: Any = None
    times: Any = None
    #: The cached result of :func:`~.running.terms`. The pool drops it together with ``times``.
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
        """Whether a measurement since the session became idle found no device memory."""
        return self.known and not self.lease.footprint

    @property
    def known(self) -> bool:
        """Whether all of its slices have been measured since the session became idle."""
        lease = self.lease
        return lease.sampled_at >= self.idle_since and len(lease.footprints) >= len(lease.slices)

    @property
    def state_bound(self) -> int:
        """The most host bytes that its state will take if the pool suspends it now.

        For an idle session, the answer is the measured bytes, if all of its slices have been
        measured since it became idle. In any other case, the answer is the granted bytes or the
        last measured bytes, whichever is more.
        """
        if self.state == "active":
            return max(self.lease.granted, self.lease.footprint)
        return self.lease.footprint if self.known else max(self.lease.granted, self.lease.footprint)

    def recalled(self, now: float) -> str:
        """Return why an admin has recalled the slice; "" if no recall is due at ``now``."""
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
#: The names of the fields that :func:`record` copies, in the order of the record, and a function
#: that gets their values from a session. :func:`record` sets the other fields separately.
_PLAIN = [f.name for f in fields(SessionRecord) if f.name not in ("holds", "wait_reason")]
_VALUES = attrgetter(*(f"lease.{name}" if name in _LEASE else name for name in _PLAIN))
#: The fields that a recovered session copies from its record. The other fields depend on the state
#: in which the broker found its processes after the restart.
_KEPT = [
    f.name
    for f in fields(SessionRecord)
    if f.name in _OWN - {"state", "state_since", "holds", "suspended", "idle_since", "queued_at"}
]


def record(s: Session, wait_reason: str) -> SessionRecord:
    """Return the record of ``s``, a frozen value; ``wait_reason`` says in words why ``s`` waits."""
    return SessionRecord(
        **dict(zip(_PLAIN, _VALUES(s), strict=True)),
        holds=tuple(s.holds.values()),
        wait_reason=wait_reason,
    )


def restored(r: SessionRecord, now: float) -> Session:
    """Return a session with the data of ``r``. The broker has checked ``r`` with the driver."""
    s = Session(**{name: getattr(r, name) for name in _KEPT}, state_since=now, idle_since=now)
    if r.state in ATTACHED and r.slices:
        s.holds = {h.id: h for h in r.holds}
        s.state = "active" if s.holds else "idle"
        s.lease.slices = r.slices
        s.lease.attached_at = now
        if not s.holds and r.idle_since:
            # Count the idle time from the recorded time. If the idle time began again at each
            # restart, a broker that is killed often would never give idle slices to waiting
            # sessions.
            s.idle_since = min(now, r.idle_since)
    else:
        s.suspended = r.suspended
        s.recall_at, s.recall_reason = 0.0, ""  # The recall ended with the lease.
        # A session that waited before the restart keeps its place if it asks again soon.
        s.queued_at = r.queued_at
    s.measured.busy_since = now
    s.retry_at = now + GRACE
    return s
