# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The data types of the pool: frozen values. Their methods need no clock and no I/O.

All sizes are in bytes, all times in seconds. ``now`` is the time in seconds since the epoch. It
comes from a clock of the broker that never steps. The name of a device is its UUID.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Mapping, NamedTuple

from ..errors import Code
from ..states import AttachPolicy, State
from .groups import Daily as Daily  # noqa: PLC0414
from .groups import Group as Group  # noqa: PLC0414
from .groups import PoolUsage as PoolUsage  # noqa: PLC0414
from .groups import Portion as Portion  # noqa: PLC0414
from .groups import Usage as Usage  # noqa: PLC0414
from .residence import ResidenceRule

MiB = 1 << 20
GiB = 1 << 30

#: A tier is the mechanism that enforces slices on a device; see the security page of the
#: documentation.
Tier = Literal["guarded", "unguarded", "mig", "none"]


#: The kinds of holds. A lease with a hold is in use; a lease without a hold is idle. The broker
#: takes the holds of kind ``device``, when it sees CUDA activity. The session's own processes take
#: all other holds.
HoldKind = Literal["cell", "comm", "manual", "device"]


#: The rules of the planner that make a session wait (see :class:`Reason`).
Rule = Literal[
    "planned",
    "busy",
    "behind-head",
    "host",
    "quota",
    "quota-host",
    "behind-own",
    "cap",
    "behind-group",
    "budget",
    "class-closed",
    "paused",
    "drained",
    "foreign",
    "nowhere",
    "retry",
]


#: The rules by which the pool may preempt a session in use (the victim) for a waiting session.
#: ``guarantee``: the group of the victim has more than its guarantee, and the request of the
#: waiting session is within the guarantee of its own group. ``class``: the victim has a lower
#: priority class. ``turns``: both have the same class, and the victim's time slice is over.
#: ``burst``: the victim has grown beyond its guaranteed memory, and the waiting session needs only
#: the memory that is guaranteed to it. See :mod:`.running`.
PreemptRule = Literal["class", "guarantee", "turns", "burst"]
PREEMPT_ALL: frozenset[PreemptRule] = frozenset({"class", "guarantee", "turns", "burst"})

Unsuspendable = Literal["warn", "ask", "end"]


#: Why the state of a lease does not fit in host memory. ``size``: the state is larger than the
#: limit for the state of one session. ``quota``: the owner's quota for suspended state has too few
#: bytes left. ``room``: host memory has too few bytes left.
HostLack = Literal["", "size", "quota", "room"]

#: ``FOR_MEMORY``: the rules by which a session waits for memory that other sessions have.
#: ``FOR_QUOTA``: the rules by which a session waits for its owner's quota or its group's cap.
FOR_MEMORY: frozenset[Rule] = frozenset({"busy", "behind-head", "host"})
FOR_QUOTA: frozenset[Rule] = frozenset({"quota", "quota-host", "cap"})


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a session waits: the rule, and the figures that the rule compared.

    * ``planned``: the plan has chosen ``devices``, and suspends under way make room there.
    * ``busy``: the session needs ``bytes`` on each of ``count`` devices, and other sessions use
      this memory.
    * ``behind-head``: the bytes are free, but reserved for the head of the queue.
    * ``host``: the pool could make room by preempting leases, but the state of these leases does
      not fit in the remaining ``most`` bytes of host memory; ``lacks`` says why.
    * ``quota``: too little is left of one limit of the owner's quota. ``limit`` is its name, and
      ``most`` its value. ``count`` other sessions of the owner use it.
    * ``quota-host``: the pool would have to suspend a lease that counts in the quota, but the state
      of this lease does not fit in host memory. ``most`` and ``lacks`` are as with ``host``.
    * ``behind-own``: an earlier session of the owner waits for the quota.
    * ``cap``: too little is left of the cap of ``group`` (``most`` bytes). ``count`` other sessions
      of its members use it.
    * ``behind-group``: an earlier session waits for the cap of ``group``.
    * ``budget``: the daily budget of ``group`` is used up, or that of the owner if ``group`` is "".
      The budget is available again at ``at``, or never if ``most`` is 0. If ``text`` is not empty,
      only this machine's part of the budget is used up.
    * ``class-closed``: the priority class of the session (``limit``) may not run now; the schedules
      allow it again at ``at``.
    * ``paused``, ``drained``, ``foreign``, ``nowhere``: no device would be suitable even if no
      session had a lease.
    * ``retry``: the last attach failed.

    If memory and quota are both short, ``rule`` is the rule about memory, and ``limit`` names the
    limit of the quota.
    """

    rule: Rule
    bytes: int = 0
    count: int = 0
    limit: str = ""
    most: int = 0
    devices: tuple[str, ...] = ()
    #: The sentence of the admin or the driver that explains the rule; "" if there is none.
    text: str = ""
    #: The group that the rule belongs to; "" for a rule of the owner or the pool.
    group: str = ""
    #: The time at which the wait ends even if no event happens, in seconds since the epoch; 0 if
    #: only an event can end the wait.
    at: float = 0.0
    #: For the rules about host memory: why the state does not fit there.
    lacks: HostLack = ""


class Owner(NamedTuple):
    """The user of a session, as the broker determined it (never as the client claims).

    ``group`` is the group whose share the session uses; "" is the pool itself.
    """

    name: str
    group: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """What a session asks for.

    ``memory`` and ``limit`` are bytes on *each* of ``devices`` devices and include the CUDA
    context that the driver charges for every process.
    """

    memory: int
    limit: int
    devices: int = 1
    compute: int = 100
    priority: str = "notebook"


@dataclass(frozen=True, slots=True)
class Device:
    """One physical GPU (or MIG instance) of the pool."""

    uuid: str
    index: int
    name: str
    #: Chip type: a suspended session can be restored only on a device of the same model.
    model: str
    #: Bytes as NVML reports them.
    memory_total: int
    #: Bytes that the driver itself takes and never frees: NVML's ``reserved``, and memory that
    #: belonged to no process before the first session started.
    memory_reserved: int = 0
    emulated: bool = False
    tier: Tier = "unguarded"
    #: The self-test suspended and resumed a process on this device.
    can_suspend: bool = True
    #: A suspended process may be restored on another device of the same model.
    can_migrate: bool = True
    #: Why the device does not have a better tier; empty if it has the best one.
    tier_reason: str = ""
    #: Measured bytes that the first CUDA context of a process takes on this device; 0 if not known.
    context_bytes: int = 0
    #: Bytes that no slice may use. If a process saw this device at cuInit, but its slice is on
    #: another device, it creates its first context in these bytes; the broker then moves the
    #: process to its slice. The value is 0 if the broker cannot move processes.
    landing_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of device memory granted on one device."""

    device: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Quota:
    """Limits of one owner; ``None`` means no limit.

    Each limit is for all sessions of the owner together. ``memory`` limits the granted
    device bytes, ``devices`` the devices in use at once, ``leases`` the sessions attached at once,
    and ``suspended`` the host bytes of suspended state.
    """

    memory: int | None = None
    devices: int | None = None
    leases: int | None = None
    suspended: int | None = None
    #: GPU-seconds per day.
    daily: Daily | None = None


NO_LIMIT = Quota()

#: How much of each limit of a quota a lease uses: bytes, devices, leases.
Charge = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """All settings that the rules of the pool may read, made from ``c.GPUPool.*``."""

    default_memory: int = 4 * GiB
    #: The default ``limit`` of a kernel. If this is None, the default is the size of the device if
    #: the guard meters the memory beyond the guarantee, and ``default_memory`` if it does not.
    default_limit: int | None = None
    #: The largest ``memory`` or ``limit`` that one kernel may ask for on a device. None stands for
    #: the device's size.
    max_memory_per_kernel: int | None = None
    #: The quota of each owner, by name. The entry ``"*"`` is for owners without their own entry.
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    #: The number of each priority class, by name. The pool serves higher numbers first.
    priority_classes: Mapping[str, int] = field(
        default_factory=lambda: {"interactive": 200, "notebook": 100, "batch": 0}
    )
    #: How much of each owner's quota (``elsewhere``) and of each group's cap (``elsewhere_groups``)
    #: the other machines of a cluster use or may take. This amount counts like leases on this
    #: machine, but no preemption on this machine can free it.
    elsewhere: Mapping[str, Charge] = field(default_factory=dict)
    elsewhere_groups: Mapping[str, int] = field(default_factory=dict)
    #: Why this machine cannot have a larger part of these quotas and caps. Messages use this text
    #: as the end of a sentence.
    elsewhere_reason: str = "kernels on other machines use the rest"
    default_priority: str = "notebook"
    #: The priority classes that may have a slice; None stands for all classes. The pool suspends
    #: the sessions of all other classes, even while they are in use, and serves none of them.
    classes_allowed: frozenset[str] | None = None
    #: For each closed class: the time at which the schedules allow it again. These times are in
    #: seconds since the epoch on the machine's clock. ``now`` comes from another clock, which does
    #: not step when somebody sets the machine's clock: see :class:`~.events.ClockSet`.
    classes_open: Mapping[str, float] = field(default_factory=dict)
    #: Seconds without a hold after which a slice goes back to the pool even if no session waits.
    idle_timeout: float = 300.0
    #: Seconds without a hold after which a *waiting* session may take the slice.
    reclaim_after: float = 0.0
    #: The longest time that a hold may wait in the queue; None: no limit.
    max_wait: float | None = None
    #: The most seconds for which a user may keep an idle slice with one command; 0: users may not
    #: keep idle slices.
    max_keep: float = 4 * 3600.0
    #: A session gains one priority point each time it has waited for this many seconds, so that no
    #: session starves.
    ageing: float = 60.0
    #: Bytes per device that are never granted.
    reserve: int = 0
    #: The total bytes of host memory that suspended state may take.
    host_memory: int = 16 * GiB
    #: The bytes that a resume reserves in addition to the size of the suspended state. On a small
    #: device, it reserves fewer bytes: see :func:`~.placement.headroom`.
    resume_headroom: int = 256 * MiB
    #: Seconds until the pool tries to suspend a pinned session again (the reason may be gone).
    pinned_retry: float = 60.0
    #: A lease grows beyond its guarantee in steps of at least this many bytes, if so many are free.
    growth_step: int = 64 * MiB
    #: The highest allowed ratio of the time in which the pool moves state to the time in which
    #: sessions use their slices; see :mod:`.residence`. With 0, the pool ignores the cost of moves:
    #: a waiting session gets an idle slice at once.
    max_swap_overhead: float = 0.1
    #: The rule by which an idle kernel keeps its slice for some time although other kernels wait,
    #: because its state was moved to this slice.
    residence: ResidenceRule = "work"
    #: The tree of groups, by name. An owner without a group belongs to the pool itself.
    groups: Mapping[str, Group] = field(default_factory=dict)
    #: After this many seconds, a used GPU-second counts only half when the pool orders the queue.
    #: With 0, past usage does not count.
    half_life: float = 8 * 3600.0
    #: The rules by which a session in use may be preempted; see :data:`PreemptRule`.
    preempt: frozenset[PreemptRule] = PREEMPT_ALL
    #: What the pool may do while other sessions wait for the slice of a session that cannot be
    #: suspended. ``warn``: the pool warns the user. ``ask``: it later also asks the user to end the
    #: session or to free the memory. ``end``: at last it also ends the session itself.
    unsuspendable: Unsuspendable = "warn"
    #: The times of these three steps (warn, ask, end), in seconds after another session began to
    #: wait for the slice.
    unsuspendable_after: tuple[float, float, float] = (60.0, 600.0, 3600.0)

    def quota_of(self, owner: str) -> Quota:
        """Return the limits of ``owner``; ``"*"`` stands for all owners without an entry."""
        return self.quotas.get(owner) or self.quotas.get("*") or NO_LIMIT

    def host_most(self, owner: str) -> int:
        """Return the most host bytes that the state of one session of ``owner`` may take."""
        own = self.quota_of(owner).suspended
        return self.host_memory if own is None else min(self.host_memory, own)

    def host_least(self) -> int:
        """Return the smallest :meth:`host_most` over all owners."""
        quotas = (quota.suspended for quota in self.quotas.values())
        return min([self.host_memory, *(most for most in quotas if most is not None)])


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal as a value: a stable code, a sentence for people, the numbers, the next step."""

    code: Code
    message: str
    next_step: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.message} {self.next_step}".rstrip()


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason why a session's lease is in use."""

    id: str
    kind: HoldKind
    since: float


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """All data of one session that the journal stores.

    A restarted broker continues from this record.
    """

    id: str
    owner: Owner
    request: Request
    attach: AttachPolicy
    label: str = ""
    state: State = "detached"
    epoch: int = 0
    opened_at: float = 0.0
    state_since: float = 0.0
    holds: tuple[Hold, ...] = ()
    #: The lease; empty unless attaching, active, idle or detaching.
    slices: tuple[Slice, ...] = ()
    #: Bytes of suspended state per device, in the order in which the process sees the devices;
    #: empty if nothing is suspended.
    suspended: tuple[Slice, ...] = ()
    #: Devices to which the session's processes have been bound since cuInit. Only a suspend and a
    #: restore can move the processes to other devices.
    bound: tuple[str, ...] = ()
    #: Whether the broker can move each process of the session to the slice when the process creates
    #: its first context (see the guard).
    lands: bool = False
    #: Whether the guard can hold back the session's CUDA calls. If so, the pool may preempt the
    #: session while it is in use.
    gated: bool = True
    #: The devices of the last lease: placement prefers them.
    last_devices: tuple[str, ...] = ()
    footprint: int = 0
    pinned_reason: str = ""
    pinned_at: float = 0.0
    release_asked: bool = False
    keep_until: float = 0.0
    #: The time at which the pool takes the slice back because an admin wants it; 0 without such a
    #: recall. ``recall_reason`` says which admin, and why.
    recall_at: float = 0.0
    recall_reason: str = ""
    idle_since: float = 0.0
    queued_at: float = 0.0
    wait_reason: str = ""
    #: Why the pool preempted the session while it was in use; "" if the pool did not preempt it, or
    #: if the session has had a new lease since.
    preempted: str = ""
    wait_seconds_total: float = 0.0
    attached_seconds_total: float = 0.0
    suspends: int = 0
    resumes: int = 0
    migrations: int = 0

    @property
    def granted_bytes(self) -> int:
        """Device bytes of the lease, over all its devices."""
        return sum(s.bytes for s in self.slices)

    @property
    def suspended_bytes(self) -> int:
        """Host bytes that the suspended state takes."""
        return sum(s.bytes for s in self.suspended)


@dataclass(frozen=True, slots=True)
class DeviceView:
    """One device and its ledger at one instant."""

    device: Device
    capacity: int
    granted: int
    foreign: int
    drained_reason: str = ""

    @property
    def free(self) -> int:
        """Bytes that can be granted without a preemption."""
        return max(0, self.capacity - self.granted - self.foreign)
