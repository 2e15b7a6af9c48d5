# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What goes into the pool and what comes out.

``Pool.handle(event) -> list[Action]`` is the only door. Every event carries ``now``; every effect
that the pool asks for carries the session's ``epoch``, and so does the event that reports its
completion. The pool drops a completion with an old epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Mapping

from ..errors import Code
from ..states import AttachPolicy, State
from .model import (
    Device,
    Hold,
    HoldKind,
    Owner,
    PoolSettings,
    Refusal,
    Request,
    SessionRecord,
    Slice,
    Usage,
)

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAppeared(Event):
    """A device was found, or is healthy again after :class:`DeviceDrained`."""

    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrained(Event):
    """No new lease on this device: it was lost (Xid), or failed its self-test.

    A session that is attached there stays until it ends or is suspended. A session that was
    suspended from there resumes elsewhere.
    """

    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePaused(Event):
    """An admin takes this device out of service for a while.

    As :class:`DeviceDrained`. Also suspends idle leases at once, even kept ones, and busy leases
    once idle. Waiting kernels show ``reason``. Ends with :class:`DeviceResumed`.
    """

    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResumed(Event):
    """The admin puts a device back into service. It may still be drained for another reason."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemorySeen(Event):
    """A sample of a device: the bytes of foreign processes, and those of each session."""

    device: str
    foreign: int
    footprints: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySeen(Event):
    """A sample of the host: bytes that could be taken now without swapping or an OOM kill."""

    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressure(Event):
    """Host memory is short for these sessions: the machine's, or that of their control groups.

    Sent with each sample while that lasts, with all sessions concerned, and once with none at the
    end. Each time, the pool resumes the largest of their suspended states that fits on a device
    without a preemption. It suspends none of these sessions.
    """

    sessions: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """The admin's configuration was read again, or a schedule began or ended.

    ``groups``: sessions whose owner is in another group since then, and which.
    """

    settings: PoolSettings
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """The time of day is ``ahead`` of ``now`` by so many seconds, or behind if that is negative.

    Somebody has set it, or the machine has slept: the clock of ``now`` does not count that.
    """

    ahead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; see ``Pool.next_wakeup``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Event):
    """A kernel (or command) joins, detached. If it can never be served, :class:`Answer` refuses it.

    ``lands``: its processes can be moved to their slice from another device of the model.
    ``gated``: its CUDA calls can be held back; without that it is not preempted while in use,
    because a call to the driver would end a suspended process.
    """

    session: str
    owner: Owner
    request: Request
    attach: AttachPolicy
    label: str = ""
    rid: str = ""
    lands: bool = False
    gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered(Event):
    """After a restart of the broker: all sessions, from the journal and the driver.

    The ``state`` of each record has been reconciled with the driver: detached, active or idle.
    """

    records: tuple[SessionRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecovered(Event):
    """After a restart of the broker: what users and groups had used (``Pool.usage``).

    After :class:`Recovered`: the memory of leases that have outlived the broker counts from
    ``since`` on (None: from now on). What the pool has counted since its own start is added.
    """

    users: Mapping[str, Usage] = field(default_factory=dict)
    groups: Mapping[str, Usage] = field(default_factory=dict)
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded(Event):
    """The session's process is gone (or was closed by its provisioner)."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTaken(Event):
    """A cell, callback or command wants the lease, and keeps it from being idle.

    Answered by :class:`HoldGranted` or :class:`HoldRefused`, at once or after a wait. A hold that
    the session already has is answered again; nothing else changes.

    ``bound`` are the devices that its processes got at cuInit (which needs no lease). Without
    suspended state, the lease must be on these, or on others of the model if the session lands.
    """

    session: str
    hold: str
    kind: HoldKind
    bound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Event):
    """The broker suspended processes of a session without a lease; () if they run again.

    They had no context, so ``suspended`` names the devices that they see, mostly with 0 bytes. Like
    any other suspended state it is restored with the next lease.
    """

    session: str
    suspended: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSettled(Event):
    """Processes of a session without a lease have called cuInit, and see the devices ``bound``.

    An event of its own, because a hold may already wait, or begin to wait without this fact.
    """

    session: str
    bound: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingRefused(Event):
    """A process of an active session sees ``bound``, and was not moved from there to the lease.

    Nothing of the session is on the lease. The lease goes back, and the session waits for devices
    of the models of ``bound``; if ``stay``, for ``bound`` itself.
    """

    session: str
    epoch: int
    bound: tuple[str, ...]
    message: str
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldDropped(Event):
    """The hold is over: the cell ended, or its wait was cancelled. The pool ignores unknown holds.

    ``cuda`` tells whether the process has called cuInit, and so is bound to its devices; None if
    the broker could not tell.
    """

    session: str
    hold: str
    cuda: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsReplaced(Event):
    """The agent (re)connected or went away. It has these holds now; the pool drops its others.

    A hold of kind ``device`` belongs to the broker: it stays as it is, and is ignored in ``holds``.
    """

    session: str
    holds: tuple[Hold, ...]
    cuda: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChanged(Event):
    """``%gpu 12GiB``: a new request. It counts at once if attached, else at the next attach."""

    session: str
    request: Request
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowAsked(Event):
    """An allocation does not fit: ``bytes`` more than granted are needed on ``device``.

    :class:`Answer` follows at once, after a :class:`Resize` if the pool grants it. The pool grants
    at least that much, out of free memory only; it preempts no lease for it. It refuses with
    ``limit`` (beyond the request's limit), ``no-memory`` (not free now, or no slice there) or
    ``quota``.
    """

    session: str
    device: str
    bytes: int
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked(Event):
    """Give the slice back: now if idle, else when the last hold is dropped."""

    session: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAsked(Event):
    """The idle slice stays until ``until``."""

    session: str
    until: float
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallAsked(Event):
    """An admin wants the slice back ``at`` that time, in use or not; None: not any more.

    Then the session is suspended, and a running cell waits for another slice at the end of the
    queue. ``reason`` tells its user who wants that, and why.
    """

    session: str
    at: float | None
    reason: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked(Event):
    """An admin ends the session; ``reason`` tells its user who does, and why."""

    session: str
    reason: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachDone(Event):
    """The effect of :class:`Attach` is complete; ``seconds`` is what the driver calls took.

    Before them it ``waited`` so many seconds for other operations on the same devices.
    """

    session: str
    epoch: int
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachFailed(Event):
    """The attach failed. If ``lost``, the driver cannot restore this session, and it must end.

    Otherwise the broker changed nothing (the memory was not free after all, for example), and the
    session goes back to the queue with ``message`` as its reason. If ``stay``, it can only return
    to the devices that its state came from.
    """

    session: str
    epoch: int
    message: str
    lost: bool = False
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendDone(Event):
    """The device memory is free. ``suspended`` is empty if the process held no memory.

    ``seconds`` and ``waited``: as in :class:`AttachDone`.
    """

    session: str
    epoch: int
    suspended: tuple[Slice, ...]
    #: The process has called cuInit and is bound to its devices (None: not known).
    cuda: bool | None = None
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRefused(Event):
    """The session was not suspended and keeps running.

    ``busy``: its agent has a hold on the way, or did not answer. ``pinned``: the driver cannot
    suspend it (``message`` says why). ``drain``: work did not drain in time. ``host``: no room now.
    ``limit``: its state is larger than a limit of host memory where its processes run.
    """

    session: str
    epoch: int
    kind: Literal["busy", "pinned", "drain", "host", "limit"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendFailed(Event):
    """The driver failed half-way. The session must end, so that its memory is freed."""

    session: str
    epoch: int
    message: str


# --------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all actions."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attach(Action):
    """Carry out the lease: check that the memory is free, restore suspended state.

    ``origin[i]`` moves to ``slices[i].device``; ``origin`` is empty if nothing is suspended.
    Ends with :class:`AttachDone` or :class:`AttachFailed`.
    """

    epoch: int
    slices: tuple[Slice, ...]
    origin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(Action):
    """Ask the agent to yield, suspend every CUDA process of the session, verify the memory is free.

    Ends with :class:`SuspendDone`, :class:`SuspendRefused` or :class:`SuspendFailed`.

    ``busy``: the session is in use and is preempted all the same. Its holds stay and are no reason
    to refuse; they wait until :class:`HoldGranted` grants them again, with the next lease or after
    a refusal. ``reason`` tells its user by which rule, and for whom.
    """

    epoch: int
    slices: tuple[Slice, ...]
    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Action):
    """A session waits for what this one has; once for each lease, in ``lazy`` policy.

    Its agent then reports when no cell runs. From then on the session is idle if nothing is in
    flight, without the wait for calls that may still come. (In other policies agents always report
    it.)
    """

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Action):
    """The lease of an attached session has a new size (same devices). No completion."""

    epoch: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldGranted(Action):
    """The hold has its lease."""

    hold: str
    epoch: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldRefused(Action):
    """The hold will not get a lease, and is forgotten."""

    hold: str
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Action):
    """The answer to an event with ``rid``; ``note`` tells people what will happen."""

    rid: str
    refusal: Refusal | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMoved(Action):
    """Where a waiting session stands: 1 is next.

    ``expected``: the least and the most seconds that it will probably wait from now on; None where
    nothing supports an estimate. ``waited``: the seconds so far.
    """

    position: int
    length: int
    expected: tuple[float, float] | None
    waited: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(Action):
    """A transition, for the journal and for watchers."""

    now: float
    old: State
    new: State
    reason: str
    epoch: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn(Action):
    """A session that cannot be suspended keeps others waiting: tell its user.

    ``stage`` is ``warn``, then ``ask`` (please end or free it); ``ends_at``: when the pool is going
    to end it, None if it will not.
    """

    stage: Literal["warn", "ask"]
    message: str
    ends_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSession(Action):
    """The session is lost: tell its user in plain words and end its processes."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log(Action):
    """Something for the admin's log (a dropped completion, overuse, ...)."""

    level: Literal["debug", "info", "warning", "error"]
    code: Code
    message: str
