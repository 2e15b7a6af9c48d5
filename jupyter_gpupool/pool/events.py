# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The events that go into the pool, and the actions that come out.

``Pool.handle(event) -> list[Action]`` is the only entry point. Every event carries ``now``. Every
action that changes a lease carries the ``epoch`` of the session. The event that reports the end of
this action carries the same epoch. The pool drops an event with an old epoch.
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
    """The broker has found a device, or the device is healthy again after
    :class:`DeviceDrained`.
    """

    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceDrained(Event):
    """The device was lost (Xid) or failed its self-test: the pool grants no new lease on it.

    A session with a lease on this device keeps it until the session ends or is suspended. If a
    suspended session has state from this device, it resumes on another device.
    """

    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePaused(Event):
    """An admin takes this device out of service for a while.

    As with :class:`DeviceDrained`, the pool grants no new lease there. The pool also suspends the
    idle leases there at once, even leases that a user keeps. It suspends a busy lease as soon as
    the lease is idle. Waiting kernels show ``reason``. :class:`DeviceResumed` puts the device back
    into service.
    """

    device: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceResumed(Event):
    """The admin puts a device back into service. It may still be drained for another reason."""

    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemorySeen(Event):
    """A sample of a device: the bytes of foreign processes, and the bytes of each session."""

    device: str
    foreign: int
    footprints: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemorySeen(Event):
    """A sample of host memory: the pool can take ``available`` bytes now.

    If the pool took more bytes, the machine would swap, or would kill processes.
    """

    available: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPressure(Event):
    """Host memory is short for these sessions, on the machine or in their control groups.

    As long as host memory is short, the broker sends this event with each sample. ``sessions`` are
    all sessions that are short of memory; the last event has no sessions. At each event, the pool
    resumes one of these sessions, to free the host memory of its state. It chooses the session with
    the largest state that fits on a device without a preemption. The pool suspends none of
    ``sessions``.
    """

    sessions: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsChanged(Event):
    """The broker has read the admin's configuration again, or a schedule has begun or ended.

    ``groups`` has the sessions whose owner is now in another group, each with its new group.
    """

    settings: PoolSettings
    groups: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(Event):
    """The time of day is ``ahead`` seconds ahead of ``now``, or behind it if ``ahead`` is negative.

    ``ahead`` changes when somebody sets the time of day, or when the machine has slept. ``now`` is
    the time of a clock that nobody can set, and that stops while the machine sleeps.
    """

    ahead: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; see ``Pool.next_wakeup``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened(Event):
    """A kernel (or command) joins the pool, in the state ``detached``.

    If the pool can never serve the request, :class:`Answer` refuses the session.

    ``lands`` says whether the broker can move the session's processes to the slice from another
    device of the same model. ``gated`` says whether the guard can make the session's CUDA calls
    wait. If the guard cannot, the pool never preempts the session while it is in use, because a
    CUDA call would kill a suspended process.
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
    """The first event after a restart of the broker: all sessions, from the journal and the driver.

    The broker has corrected the ``state`` of each record by what the driver reports. The state is
    detached, active or idle.
    """

    records: tuple[SessionRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRecovered(Event):
    """The usage of users and groups before the broker restarted (a value of ``Pool.usage``).

    This event follows :class:`Recovered`. Some leases continue while the broker restarts. The pool
    counts the usage of these leases from ``since`` on (None: from now on). The pool adds ``users``
    and ``groups`` to the usage that it has counted since its own start.
    """

    users: Mapping[str, Usage] = field(default_factory=dict)
    groups: Mapping[str, Usage] = field(default_factory=dict)
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedElsewhere(Event):
    """The dominant usage of users and groups on other machines, after decay, in GPU-seconds.

    The figures replace those of the previous event of this type.
    """

    users: Mapping[str, float] = field(default_factory=dict)
    groups: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionEnded(Event):
    """The session's process has ended, or its provisioner has closed the session."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldTaken(Event):
    """A cell, callback or command needs the lease. The lease is not idle while it has this hold.

    The pool answers with :class:`HoldGranted` or :class:`HoldRefused`, at once or after a wait. If
    the session already has this hold, the pool answers again, and nothing else changes.

    ``bound`` are the devices that the session's processes got at cuInit. (A process needs no lease
    for cuInit.) If the session has no suspended state, its lease must be on these devices, or on
    other devices of the same model if the session ``lands``.
    """

    session: str
    hold: str
    kind: HoldKind
    bound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside(Event):
    """The broker has suspended processes of a session without a lease, or has resumed them.

    If ``suspended`` is empty, the processes run again. Otherwise it names the devices that the
    processes see, mostly with 0 bytes, because the processes had no context. The next lease
    restores this state like any other suspended state.
    """

    session: str
    suspended: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicesSettled(Event):
    """Processes of a session without a lease have called cuInit, and see the devices ``bound``.

    This event is necessary, because :class:`HoldTaken` may come before the broker knows these
    devices.
    """

    session: str
    bound: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingRefused(Event):
    """A process of an active session sees the devices ``bound``, and the broker could not move this
    process to the devices of the lease.

    The session has no memory on the devices of its lease. The lease goes back to the pool. If
    ``stay`` is true, the session then waits for exactly the devices ``bound``. Otherwise it waits
    for any devices of the same models.
    """

    session: str
    epoch: int
    bound: tuple[str, ...]
    message: str
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldDropped(Event):
    """The hold is over: the cell ended, or its wait was cancelled. The pool ignores unknown holds.

    ``cuda`` says whether the process has called cuInit and is therefore bound to its devices; None
    if the broker does not know.
    """

    session: str
    hold: str
    cuda: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldsReplaced(Event):
    """The agent connected, reconnected or disconnected. The session now has ``holds``; the pool
    drops its other holds.

    A hold of kind ``device`` belongs to the broker: this event does not change it, and the pool
    ignores holds of this kind in ``holds``.
    """

    session: str
    holds: tuple[Hold, ...]
    cuda: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestChanged(Event):
    """The user makes a new request (``%gpu 12GiB``).

    If the session is attached, the request applies at once. Otherwise it applies at the next
    attach.
    """

    session: str
    request: Request
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowAsked(Event):
    """An allocation does not fit in the lease: the session needs ``bytes`` more bytes on
    ``device``.

    The pool answers at once with :class:`Answer`. If it grants the growth, a :class:`Resize` comes
    before the answer, and the session gets at least ``bytes``. For growth, the pool takes free
    memory and the unused growth of other leases, but it preempts no lease. The codes of a refusal
    are ``limit`` (beyond the request's limit), ``no-memory`` (not free now, or the session has no
    slice on ``device``) and ``quota``.
    """

    session: str
    device: str
    bytes: int
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked(Event):
    """The user gives the slice back.

    An idle session gives it back at once. Another session gives it back when its last hold ends.
    """

    session: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAsked(Event):
    """The user keeps the slice until the time ``until``, even if it is idle."""

    session: str
    until: float
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallAsked(Event):
    """An admin wants the slice back at the time ``at``, even if the slice is in use. If ``at`` is
    None, the admin cancels the recall.

    At that time the pool suspends the session. If a cell runs, it waits for another slice at the
    end of the queue. ``reason`` tells the user which admin recalls the slice, and why.
    """

    session: str
    at: float | None
    reason: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAsked(Event):
    """An admin ends the session; ``reason`` tells the user which admin, and why."""

    session: str
    reason: str
    rid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachDone(Event):
    """The broker has done what :class:`Attach` asks for; the driver calls took ``seconds``.

    Before these calls, the attach waited ``waited`` seconds for other operations on the same
    devices.
    """

    session: str
    epoch: int
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachFailed(Event):
    """The attach failed. If ``lost``, the driver cannot restore this session, and it must end.

    If not ``lost``, the broker has changed nothing (for example, because the memory was not free).
    The session goes back to the queue with ``message`` as its reason. If ``stay`` is true, the
    session can only return to the devices from which its state comes.
    """

    session: str
    epoch: int
    message: str
    lost: bool = False
    stay: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendDone(Event):
    """The suspend has ended, and the device memory is free.

    ``suspended`` is the state that the session has in host memory. It is empty if the session had
    no device memory. ``seconds`` and ``waited`` have the same meaning as in :class:`AttachDone`.
    """

    session: str
    epoch: int
    suspended: tuple[Slice, ...]
    #: Whether the process has called cuInit and is therefore bound to its devices; None if unknown.
    cuda: bool | None = None
    seconds: float = 0.0
    waited: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendRefused(Event):
    """The session was not suspended and keeps running. ``kind`` is the reason.

    * ``busy``: the agent is about to take a hold, or did not answer.
    * ``pinned``: the driver cannot suspend the session (``message`` says why).
    * ``drain``: the session's work on the GPU did not end within the time-out.
    * ``host``: host memory has no room for the session's state now.
    * ``limit``: the state is larger than the limit of host memory for the session's processes.
    """

    session: str
    epoch: int
    kind: Literal["busy", "pinned", "drain", "host", "limit"]
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspendFailed(Event):
    """The driver failed during the suspend. The session must end, so that its memory is freed."""

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
    """Put the lease into effect: check that the memory is free, and restore suspended state.

    The state from the device ``origin[i]`` moves to ``slices[i].device``. ``origin`` is empty if
    the session has no suspended state. The broker replies with :class:`AttachDone` or
    :class:`AttachFailed`.
    """

    epoch: int
    slices: tuple[Slice, ...]
    origin: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspend(Action):
    """Ask the agent to yield, suspend every CUDA process of the session, and verify that the memory
    is free.

    The broker replies with :class:`SuspendDone`, :class:`SuspendRefused` or :class:`SuspendFailed`.

    If ``busy`` is true, the pool preempts the session while it is in use. The session keeps its
    holds, and the broker must not refuse the suspend because of them. The holds wait until
    :class:`HoldGranted` grants them again. The pool sends it with the next lease, or when the
    broker refuses the suspend. ``reason`` tells the user by which rule the pool preempts the
    session, and which session gets the slice.
    """

    epoch: int
    slices: tuple[Slice, ...]
    reason: str
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Action):
    """Another session waits for the slice of this session. The pool sends this once for each lease,
    under the ``lazy`` policy.

    After this action the agent reports when no cell runs. After the report the session counts as
    idle as soon as no CUDA call is running. (Under other policies, agents always report when no
    cell runs.)
    """

    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize(Action):
    """The lease of an attached session has a new size, on the same devices. No event reports that
    this is done.
    """

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
    """The hold will not get a lease, and the pool forgets it."""

    hold: str
    refusal: Refusal


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Action):
    """The answer to the event with this ``rid``. ``note`` tells the user what will happen."""

    rid: str
    refusal: Refusal | None = None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueMoved(Action):
    """The new place of a waiting session in the queue; the session at place 1 is the next.

    ``expected`` is the shortest and the longest time that the session will probably still wait, in
    seconds. It is None without evidence for an estimate. ``waited`` is how many seconds the session
    has waited so far.
    """

    position: int
    length: int
    expected: tuple[float, float] | None
    waited: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChanged(Action):
    """The session has changed its state. The journal and the watching clients get this action."""

    now: float
    old: State
    new: State
    reason: str
    epoch: int
    slices: tuple[Slice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn(Action):
    """Warn the user of this session: it cannot be suspended, and others wait for its slice.

    ``stage`` is first ``warn``, and later ``ask``. With ``ask``, the message asks the user to end
    the session or to free the memory. ``ends_at`` is the time at which the pool will end the
    session; None if the pool will not end it.
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
    """An entry for the admin's log (a dropped completion, overuse, ...)."""

    level: Literal["debug", "info", "warning", "error"]
    code: Code
    message: str
