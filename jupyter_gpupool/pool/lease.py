# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One session and the lease it may have: the states, the table of transitions, the history.

Everything that affects the state machine lives in ``TRANSITIONS``; ``docs/states.md`` is generated
from it. Time slices will add the row ``("active", "detaching")`` (a holder whose quantum is over)
and nothing else here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Mapping, Sequence

from ..errors import GPUPoolError
from .model import AttachPolicy, Hold, Owner, Request, SessionRecord, Slice, State

if TYPE_CHECKING:
    from .placement import Need
    from .policy import Plan
    from .queue import Entry

#: Every transition that may happen, and when. Anything else is a bug in this package.
TRANSITIONS: Mapping[tuple[State, State], str] = {
    ("detached", "queued"): "a hold is taken and needs a slice, or host memory is short",
    ("queued", "detached"): "the last waiting hold is cancelled, refused or waited too long",
    ("queued", "attaching"): "a plan gives it a slice; the driver is asked to attach",
    ("attaching", "active"): "attached, and a hold is there",
    ("attaching", "idle"): "attached, but every hold was dropped meanwhile",
    ("attaching", "queued"): "not attached (nothing lost); back to its old place",
    ("attaching", "detached"): "not attached (nothing lost), and no hold is left",
    ("active", "idle"): "the last hold is dropped",
    ("active", "detached"): "nothing of it is on the slice, and it cannot be moved there",
    ("idle", "active"): "a hold is taken",
    ("idle", "detaching"): "idle time-out, pressure or release; the driver is asked to suspend",
    ("detaching", "detached"): "the device memory is free; the slice is back in the pool",
    ("detaching", "queued"): "the slice is back in the pool, and a hold was taken meanwhile",
    ("detaching", "idle"): "the suspend was refused; the lease stays",
    ("detaching", "active"): "the suspend was refused, and a hold was taken meanwhile",
    ("detached", "ended"): "the process is gone",
    ("queued", "ended"): "the process is gone",
    ("attaching", "ended"): "the process is gone, or the driver lost its state",
    ("active", "ended"): "the process is gone",
    ("idle", "ended"): "the process is gone",
    ("detaching", "ended"): "the process is gone, or the driver lost its state",
}

#: The session has (part of) a device: its slices count as granted.
HAS_LEASE: frozenset[State] = frozenset({"attaching", "active", "idle", "detaching"})

#: The session may use its slice now.
ATTACHED: frozenset[State] = frozenset({"active", "idle"})

#: How many past transitions of a session are remembered for error messages and ``story``.
STORY_LENGTH = 32


class InvalidTransition(GPUPoolError):
    """A session was to make a step that the table does not have; a bug in this package.

    ``story`` holds the last steps of the session, oldest first.
    """

    code = "invalid-transition"

    def __init__(self, session: Session, new: State, reason: str) -> None:
        self.story = session.story_lines()
        super().__init__(
            f"Session {session.id} can not go from {session.state} to {new} ({reason}).",
            next_step="This should never happen: please report it with the history below.\n"
            + "\n".join(self.story),
            details={"session": session.id, "old": session.state, "new": new},
        )


@dataclass(slots=True, eq=False)
class Session:
    """A session as the pool keeps it; :meth:`record` is its frozen public form."""

    id: str
    owner: Owner
    request: Request
    attach: AttachPolicy
    label: str = ""
    state: State = "detached"
    epoch: int = 0
    opened_at: float = 0.0
    state_since: float = 0.0
    holds: dict[str, Hold] = field(default_factory=dict)
    slices: tuple[Slice, ...] = ()
    suspended: tuple[Slice, ...] = ()
    bound: tuple[str, ...] = ()
    lands: bool = False
    last_devices: tuple[str, ...] = ()
    pinned_reason: str = ""
    pinned_at: float = 0.0
    release_asked: bool = False
    keep_until: float = 0.0
    idle_since: float = 0.0
    queued_at: float = 0.0
    wait_total: float = 0.0
    attached_total: float = 0.0
    suspends: int = 0
    resumes: int = 0
    migrations: int = 0

    #: Measured device bytes by device, and when the last measurement came.
    footprints: dict[str, int] = field(default_factory=dict)
    sampled_at: float = -math.inf
    #: When by device, kept only where the lease has more than is guaranteed.
    measured_at: dict[str, float] = field(default_factory=dict)
    #: When the lease last grew beyond what is guaranteed, and when its measured use last rose.
    grown_at: float = -math.inf
    rose_at: float = -math.inf
    #: Bytes that the resume to this lease restored, by device: in use until a measurement tells.
    restored: dict[str, int] = field(default_factory=dict)
    #: When the present lease was granted.
    attached_at: float = 0.0
    #: Bytes that the owner's quota is charged for the lease.
    charge: int = 0
    #: Device bytes of the lease, over all its devices.
    granted: int = 0
    #: Device bytes as last measured, over all its devices.
    footprint: int = 0
    #: Host bytes that a suspend of the idle session may take; see :func:`~.yielding.host_bound`.
    state_bound: int = 0
    #: Host bytes set aside while a suspend is under way.
    host_bound: int = 0
    #: The driver would not move its state to another device. Not recorded: whoever forgets it asks
    #: the driver once more, and gets the same answer.
    immovable: bool = False
    #: Not suspended (idle) or not attached (queued) before this time, after a failed try.
    retry_at: float = 0.0
    failures: int = 0
    #: Its machine or control group is short of memory: it must not be suspended.
    pressed: bool = False
    #: Idle, and may be taken by a waiting session now; counted so in the device ledgers.
    yieldable: bool = False
    #: Where it waits: "" (does not), "open", "planned", "quota", "later" or "nowhere".
    lane: str = ""
    #: Its place in the total order of waiting sessions.
    entry: Entry | None = None
    #: When it first was the head of the queue, in this wait.
    head_since: float | None = None
    #: What it waits for, while it waits.
    needs: tuple[Need, ...] = ()
    groups: tuple[str, ...] = ()
    #: A reservation under way: for a lease, or for the growth of one.
    plan: Plan | None = None
    #: Attached with less than it asks for, since then.
    growing: bool = False
    #: Why it waits, as (code, figures...); :mod:`.wording` makes the sentence.
    why: tuple[Any, ...] = ()
    #: What its user was last told: position, length, eta, why.
    told: tuple[Any, ...] | None = None
    #: When the resume to the present lease was done; minus infinity if nothing was moved for it.
    resumed_at: float = -math.inf
    #: Exponentially weighted seconds that its suspends and its resumes take; None: never measured.
    suspend_mean: float | None = None
    resume_mean: float | None = None
    #: Exponentially weighted seconds from its first hold to its last, and their count.
    busy_mean: float | None = None
    busy_since: float = 0.0
    #: Next time at which the clock alone changes something, and the earliest timer set for it.
    wake: float = math.inf
    timer: float = math.inf
    story: deque[tuple[float, State, State, str, int]] = field(
        default_factory=lambda: deque(maxlen=STORY_LENGTH)
    )

    @property
    def suspended_bytes(self) -> int:
        """Host bytes of its suspended state."""
        return sum(s.bytes for s in self.suspended)

    @property
    def moving(self) -> float:
        """Seconds that one suspend and one resume take together, as far as they were measured."""
        return (self.suspend_mean or 0.0) + (self.resume_mean or 0.0)

    def charge_of(self, slices: Sequence[Slice]) -> int:
        """Return the bytes that the owner's quota is charged for ``slices``.

        That is all of them up to the request's limit, but for the headroom of a resume.
        """
        limit, memory = self.request.limit, self.request.memory
        if not self.suspended:
            return sum(min(x.bytes, limit) for x in slices)
        return sum(
            min(x.bytes, limit, max(memory, state.bytes))
            for x, state in zip(slices, self.suspended, strict=True)
        )

    def move(self, new: State, now: float, reason: str) -> State:
        """Make one step of the table and return the old state.

        Raises
        ------
        InvalidTransition
            If the table has no such step.
        """
        old = self.state
        if (old, new) not in TRANSITIONS:
            raise InvalidTransition(self, new, reason)
        self.story.append((now, old, new, reason, self.epoch))
        self.state = new
        self.state_since = now
        return old

    def story_lines(self) -> list[str]:
        """Return the last steps as text, oldest first."""
        return [
            f"{now:.3f} {old} -> {new} (epoch {epoch}): {reason}"
            for now, old, new, reason, epoch in self.story
        ]

    def record(self, wait_reason: str) -> SessionRecord:
        """Return the session as a frozen value; ``wait_reason`` is :attr:`why` in words."""
        return SessionRecord(
            id=self.id,
            owner=self.owner,
            request=self.request,
            attach=self.attach,
            label=self.label,
            state=self.state,
            epoch=self.epoch,
            opened_at=self.opened_at,
            state_since=self.state_since,
            holds=tuple(self.holds.values()),
            slices=self.slices,
            suspended=self.suspended,
            bound=self.bound,
            lands=self.lands,
            last_devices=self.last_devices,
            footprint=self.footprint,
            pinned_reason=self.pinned_reason,
            pinned_at=self.pinned_at,
            release_asked=self.release_asked,
            keep_until=self.keep_until,
            idle_since=self.idle_since,
            queued_at=self.queued_at,
            wait_reason=wait_reason,
            wait_seconds_total=self.wait_total,
            attached_seconds_total=self.attached_total,
            suspends=self.suspends,
            resumes=self.resumes,
            migrations=self.migrations,
        )
