# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A second, simple model of the pool. It knows only the events and the actions of the pool.

The model uses none of the pool's data structures. It checks these rules for each action of the
pool:

* a device has room for each grant, and no action exceeds a quota or host memory;
* the pool suspends a session in use only by a rule;
* a session has at most one effect under way, and its epochs grow;
* each waiting hold gets exactly one answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import path
from jupyter_gpupool.pool.model import Device, Owner, PoolSettings, Quota, Request
from jupyter_gpupool.pool.schedule import CLOSED, SPENT
from jupyter_gpupool.pool.transitions import TRANSITIONS

#: The first word of the reason of every recall.
RECALL = "recall "


@dataclass
class NaiveSession:
    owner: Owner
    request: Request
    state: str = "detached"
    epoch: int = 0
    holds: dict[str, bool] = field(default_factory=dict)  # name -> whether the hold is granted
    lease: dict[str, int] = field(default_factory=dict)
    suspended: dict[str, int] = field(default_factory=dict)
    bound: tuple[str, ...] = ()
    #: Whether the guard can move a process to another device of the same model when the process
    #: makes its first context.
    lands: bool = False
    #: Whether the guard can hold back the session's calls. If so, the pool may suspend the session
    #: while it is in use.
    gated: bool = True
    #: Whether the driver refused to move the session's state.
    immovable: bool = False
    #: Whether the state in ``suspended`` was set aside by a pause of the device.
    aside: bool = False
    effect: str = ""
    host: int = 0
    charge: int = 0
    footprints: dict[str, int] = field(default_factory=dict)
    sampled_at: float = float("-inf")
    idle_since: float = 0.0
    keep_until: float = 0.0
    #: Time at which its lease was attached.
    began: float = 0.0
    #: Weighted mean seconds of a suspend and of a resume, and the time when the last resume ended.
    suspend_mean: float = 0.0
    resume_mean: float = 0.0
    resumed_at: float = float("-inf")
    #: Time of the last growth. ``sampled``: by device, the time of the last sample in which the
    #: lease had more bytes than the request.
    grown_at: float = float("-inf")
    sampled: dict[str, float] = field(default_factory=dict)
    #: Whether the last suspend was refused, or the broker has restarted. In both cases the pool may
    #: wait before the next suspend.
    refused: bool = False
    asked: dict[str, Request] = field(default_factory=dict)
    #: The recall of the slice by an admin: its due time, or None without a recall, and its reason.
    #: ``recalls`` has the admin's orders that the pool has not answered yet.
    recall_at: float | None = None
    recall_reason: str = ""
    recalls: dict[str, ev.RecallAsked] = field(default_factory=dict)
    #: Whether a recall has suspended the session during a cell.
    recalled: bool = False
    #: Whether the session's process has ended.
    gone: bool = False
    position: int = 0

    def forget(self) -> None:
        """Forget the facts about a lease that has ended."""
        self.footprints, self.sampled_at, self.sampled = {}, float("-inf"), {}
        self.grown_at = self.resumed_at = float("-inf")
        self.recall_at, self.recall_reason = None, ""


def _cost(event: ev.AttachDone | ev.SuspendDone) -> float:
    return event.seconds + min(event.waited, 10 * event.seconds)


def _mean(mean: float, seconds: float) -> float:
    return mean if not seconds else mean + 0.3 * (seconds - mean) if mean else seconds


class Naive:
    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self.devices: dict[str, Device] = {}
        self.faulty: set[str] = set()
        self.paused: set[str] = set()
        #: Sessions on hosts that are short of memory.
        self.pressed: frozenset[str] = frozenset()
        self.foreign: dict[str, int] = {}
        #: ``available``: free bytes of host memory at the last sample. ``taken``: how many of these
        #: bytes suspends have taken since, or are about to take.
        self.available: int | None = None
        self.taken = 0
        self.sessions: dict[str, NaiveSession] = {}
        self.opening: dict[str, ev.SessionOpened] = {}
        self.now = 0.0
        self.event: ev.Event | None = None
        #: Sessions that the last event suspended and that now wait again.
        self.requeued: set[str] = set()

    @property
    def drained(self) -> set[str]:
        return self.faulty | self.paused

    # ------------------------------------------------------------------ sums

    def capacity(self, uuid: str) -> int:
        d = self.devices[uuid]
        return max(0, d.memory_total - d.memory_reserved - d.landing_bytes - self.settings.reserve)

    def granted(self, uuid: str) -> int:
        return sum(s.lease.get(uuid, 0) for s in self.sessions.values())

    def free(self, uuid: str) -> int:
        return self.capacity(uuid) - self.granted(uuid) - self.foreign.get(uuid, 0)

    def host_used(self) -> int:
        return sum(sum(s.suspended.values()) + s.host for s in self.sessions.values())

    def host_room(self) -> int:
        room = self.settings.host_memory - self.host_used()
        return room if self.available is None else min(room, self.available - self.taken)

    def charge(self, s: NaiveSession) -> int:
        return s.charge if s.lease else 0

    def stays_until(self, s: NaiveSession) -> float:
        """Return the time before which the pool may not move the session's state again."""
        share = self.settings.max_swap_overhead
        if not share or self.settings.residence != "clock":
            return float("-inf")
        return s.resumed_at + min(600.0, (s.suspend_mean + s.resume_mean) / share)

    def due(self, s: NaiveSession) -> int:
        """Return the bytes of the lease that count for the owner's quota.

        Resume headroom and bytes above the limit of the request do not count.
        """
        memory, limit = s.request.memory, s.request.limit
        state = s.suspended if s.effect == "attach" else {}
        if state:
            sizes = [
                min(size, max(memory, old))
                for size, old in zip(s.lease.values(), state.values(), strict=True)
            ]
        else:
            sizes = list(s.lease.values())
        return sum(min(size, limit) for size in sizes)

    def quota(self, owner: str) -> Quota:
        return self.settings.quotas.get(owner) or self.settings.quotas.get("*") or Quota()

    def may_go(self, s: NaiveSession, places: tuple[str, ...]) -> bool:
        """Return whether the pool may move the session's state or processes to ``places``."""
        if s.suspended:
            return all(self._moves(s, old, new) for old, new in zip(s.suspended, places))  # noqa: B905
        if not s.bound:
            return True
        for old, new in zip(s.bound, places):  # noqa: B905
            one, other = self.devices[old], self.devices[new]
            lands = s.lands and one.landing_bytes and not s.immovable
            there = one.model == other.model and other.can_migrate
            if not (there if lands else old == new):
                return False
        return len(s.bound) == len(places)

    def _moves(self, s: NaiveSession, old: str, new: str) -> bool:
        one, other = self.devices[old], self.devices[new]
        if old == new:
            return True
        stays = s.immovable and old not in self.drained
        return one.model == other.model and one.can_migrate and other.can_migrate and not stays

    def stops(self) -> bool:
        """Return whether a daily budget or a closed class may stop a session in use."""
        if self.settings.classes_allowed is not None:
            return True
        daily = [q.daily for q in self.settings.quotas.values()]
        daily += [g.daily for g in self.settings.groups.values()]
        return any(d is not None and d.then == "stop" for d in daily)

    def capped(self, group: str) -> int:
        """Return the bytes of a group's members that count for the cap of the group."""
        return sum(
            self.charge(s)
            for s in self.sessions.values()
            if group in path(self.settings.groups, s.owner.group)
        )

    def caps(self, owner: Owner) -> dict[str, int]:
        """Return the caps of the owner's groups."""
        sizes = sorted((c for u in self.devices if (c := self.capacity(u))), reverse=True)
        return {
            name: cap.of(sizes)
            for name in path(self.settings.groups, owner.group)
            if (cap := self.settings.groups[name].cap) is not None
        }

    def of(self, owner: str) -> list[NaiveSession]:
        return [s for s in self.sessions.values() if s.owner.name == owner]

    # ------------------------------------------------------------------ events

    def before(self, event: ev.Event) -> None:
        self.now = max(self.now, event.now)
        self.event = event
        self.requeued.clear()
        name = getattr(event, "session", "")
        s = self.sessions.get(name)
        if isinstance(event, ev.HostPressure):
            self.pressed = event.sessions
        elif isinstance(event, ev.HostMemorySeen):
            self.available = event.available
            self.taken = sum(x.host for x in self.sessions.values())
        elif isinstance(event, ev.DeviceAppeared):
            self.devices[event.device.uuid] = event.device
            self.faulty.discard(event.device.uuid)
        elif isinstance(event, ev.DeviceDrained):
            self.faulty.add(event.device)
        elif isinstance(event, ev.DevicePaused):
            self.paused.add(event.device)
        elif isinstance(event, ev.DeviceResumed):
            self.paused.discard(event.device)
        elif isinstance(event, ev.DeviceMemorySeen):
            self.foreign[event.device] = event.foreign
            for other, size in event.footprints.items():
                seen = self.sessions.get(other)
                if seen is not None and seen.state in ("active", "idle"):
                    seen.footprints[event.device] = size
                    seen.sampled_at = event.now
                    if seen.lease.get(event.device, 0) > seen.request.memory:
                        seen.sampled[event.device] = self.now
                    if size and event.device in seen.lease:
                        seen.bound = tuple(seen.lease)
        elif isinstance(event, ev.SettingsChanged):
            self.settings = event.settings
        elif isinstance(event, ev.SessionOpened):
            if name not in self.sessions:
                self.sessions[name] = NaiveSession(
                    event.owner, event.request, lands=event.lands, gated=event.gated
                )
                self.opening[name] = event
        elif isinstance(event, ev.SessionEnded):
            if s is not None:
                self.taken = max(0, self.taken - s.host)
                s.lease, s.suspended, s.effect, s.host = {}, {}, "", 0
                s.gone = True
        elif s is None or s.state == "ended":
            return
        elif isinstance(event, ev.HoldTaken):
            s.holds.setdefault(event.hold, False)
            if event.bound and s.state in ("detached", "queued") and not s.suspended:
                s.bound = event.bound
            if s.state in ("active", "idle"):
                s.holds[event.hold] = False  # the pool must answer the hold again
        elif isinstance(event, ev.DevicesSettled):
            if s.state in ("detached", "queued") and not s.suspended:
                s.bound = event.bound
        elif isinstance(event, ev.SetAside):
            if s.state in ("detached", "queued"):
                s.suspended = {x.device: x.bytes for x in event.suspended}
                s.bound = tuple(s.suspended) or s.bound
                s.aside = bool(s.suspended)
        elif isinstance(event, ev.LandingRefused):
            if s.state == "active" and s.epoch == event.epoch:
                s.bound, s.lease = event.bound, {}
                s.immovable = s.immovable or event.stay
                s.holds = dict.fromkeys(s.holds, False)
                s.forget()
        elif isinstance(event, ev.HoldDropped):
            if s.holds.pop(event.hold, None) is not None:
                self._bind(s, event.cuda)
                if s.state == "detaching" and not s.holds:
                    s.idle_since = self.now  # counts if the agent refuses the suspend
        elif isinstance(event, ev.HoldsReplaced):
            before = bool(s.holds)
            kept = {name: answered for name, answered in s.holds.items() if name == "device"}
            s.holds = {h.id: s.state in ("active", "idle") for h in event.holds} | kept
            if s.state == "detaching" and before and not s.holds:
                s.idle_since = self.now
            self._bind(s, event.cuda)
        elif isinstance(event, ev.RequestChanged):
            s.asked[event.rid] = event.request
        elif isinstance(event, ev.RecallAsked):
            s.recalls[event.rid] = event
        elif isinstance(event, ev.KeepAsked):
            if s.lease or event.until <= self.now:
                s.keep_until = event.until
        elif isinstance(event, (ev.AttachDone, ev.AttachFailed)):
            if s.effect == "attach" and s.epoch == event.epoch:
                s.effect = ""
                if isinstance(event, ev.AttachDone):
                    s.began = self.now
                    s.resumed_at = float("-inf")
                    if s.suspended:
                        s.bound = tuple(s.lease)
                        s.resumed_at = self.now
                        s.resume_mean = _mean(s.resume_mean, _cost(event))
                    s.suspended, s.aside = {}, False
                elif not event.lost:
                    s.lease, s.recall_at = {}, None
                    s.immovable = s.immovable or event.stay
        elif s.effect == "suspend" and s.epoch == getattr(event, "epoch", None):
            s.effect = ""
            if not isinstance(event, ev.SuspendFailed):
                state = event.suspended if isinstance(event, ev.SuspendDone) else ()
                self.taken = max(0, self.taken - s.host + sum(x.bytes for x in state))
                s.host = 0
            s.refused = isinstance(event, ev.SuspendRefused)
            if isinstance(event, ev.SuspendDone):
                if event.suspended or event.cuda:
                    s.bound = tuple(s.lease)
                elif event.cuda is False:
                    s.bound = ()
                if event.suspended:
                    s.suspend_mean = _mean(s.suspend_mean, _cost(event))
                    s.suspended = dict.fromkeys(s.lease, 0)
                    s.suspended.update({x.device: x.bytes for x in event.suspended})
                s.lease = {}
                s.forget()

    def _bind(self, s: NaiveSession, cuda: bool | None) -> None:
        if s.lease and not s.effect and s.state in ("active", "idle") and cuda is not None:
            s.bound = tuple(s.lease) if cuda else ()

    # ------------------------------------------------------------------ actions

    def action(self, a: ev.Action) -> None:
        if isinstance(a, (ev.Log, ev.Wanted)):
            return None
        if isinstance(a, ev.Answer):
            return self._answer(a)
        s = self.sessions.get(a.session)
        if isinstance(a, ev.HoldRefused) and (s is None or s.state == "ended"):
            if s is not None:
                s.holds.pop(a.hold, None)
            return None
        assert s is not None, f"{a} for an unknown session"
        if isinstance(a, ev.StateChanged):
            self._step(s, a)
        elif isinstance(a, ev.Attach):
            self._attach(s, a)
        elif isinstance(a, ev.Suspend):
            self._suspend(s, a)
        elif isinstance(a, ev.Resize):
            self._resize(s, a)
        elif isinstance(a, ev.HoldGranted):
            assert s.state == "active", a
            assert a.epoch == s.epoch
            assert {x.device: x.bytes for x in a.slices} == s.lease
            assert a.hold in s.holds, f"granted a hold that nobody has: {a}"
            s.holds[a.hold] = True
        elif isinstance(a, ev.HoldRefused):
            assert s.state not in ("active", "idle"), a
            assert not s.holds.pop(a.hold), f"refused a hold that was granted: {a}"
        elif isinstance(a, ev.QueueMoved):
            assert s.state == "queued", a
            assert 1 <= a.position <= a.length
            assert a.reason, a
            assert a.expected is None or 0 <= a.expected[0] <= a.expected[1]
        elif isinstance(a, ev.Warn):
            assert s.state in ("active", "idle"), a
            fixed = not all(self.devices[u].can_suspend for u in s.lease)
            busy = any(s.holds.values()) and not s.gated
            assert fixed or busy or s.refused or self._too_large(s), f"{a}: it can be suspended"
        elif isinstance(a, ev.EndSession):
            assert s.state == "ended", a
        else:
            raise AssertionError(f"unknown action {a}")
        return None

    def _too_large(self, s: NaiveSession) -> bool:
        """Return whether the state could be too large for host memory or the owner's quota."""
        own, most = self.quota(s.owner.name).suspended, self.settings.host_memory
        most = most if own is None else min(own, most)
        return max(sum(s.lease.values()), sum(s.footprints.values())) > most

    def _answer(self, a: ev.Answer) -> None:
        if a.session in self.opening:
            event = self.opening.pop(a.session)
            if a.refusal is not None and event.rid == a.rid:
                del self.sessions[a.session]
            return
        s = self.sessions.get(a.session)
        if s is not None and a.rid in s.recalls:
            order = s.recalls.pop(a.rid)
            if a.refusal is None:
                assert s.lease or order.at is None, f"{a}: it has no slice"
                s.recall_at, s.recall_reason = order.at, order.reason
        if s is not None and a.rid in s.asked:
            request = s.asked.pop(a.rid)
            if a.refusal is None:
                s.request = request

    def _step(self, s: NaiveSession, a: ev.StateChanged) -> None:
        assert a.old == s.state, f"{a}, but it is {s.state}"
        assert (a.old, a.new) in TRANSITIONS, a
        s.state = a.new
        if a.new == "ended":
            s.effect = ""  # its bytes still count: ``s.lease`` stays until the process ends
        if a.old == "detaching" and a.new in ("active", "idle"):
            s.recalled = False  # the agent or the driver refused the suspend
        if (a.old, a.new) == ("detaching", "queued"):
            self.requeued.add(a.session)
        if a.new == "idle" and a.old in ("active", "attaching"):
            s.idle_since = a.now

    def _attach(self, s: NaiveSession, a: ev.Attach) -> None:
        assert s.state == "attaching", a
        assert not s.effect, f"{a} during {s.effect}"
        assert not s.lease
        pressed = isinstance(self.event, ev.HostPressure) and a.session in self.pressed
        assert s.holds or (pressed and s.suspended), f"{a} though nobody waits"
        assert a.epoch > s.epoch, f"{a}, epoch was {s.epoch}"
        s.epoch = a.epoch
        s.effect = "attach"
        assert len({x.device for x in a.slices}) == len(a.slices), a
        assert a.origin == tuple(s.suspended), a
        for x in a.slices:
            assert x.device not in self.drained, a
            assert x.bytes >= s.request.memory
            assert self.free(x.device) >= x.bytes, f"{a}: only {self.free(x.device)} free"
        if s.suspended:
            assert len(a.slices) == len(s.suspended)
            for x, (origin, size) in zip(a.slices, s.suspended.items(), strict=True):
                # The grant need not be larger than the larger of the two devices. A drained device
                # does not count.
                there = {x.device, origin} - self.drained
                most = max(self.capacity(u) - self.foreign.get(u, 0) for u in there)
                enough = min(size + self.settings.resume_headroom, self.capacity(x.device), most)
                least = min(size, self.capacity(origin))
                assert x.bytes >= max(least, enough), f"{a}: {size} suspended"
        elif not s.bound:
            assert len(a.slices) == s.request.devices
        allowed = self.settings.classes_allowed
        # When host memory is short, the pool may resume a session without a hold, even if the class
        # of the session is closed.
        closed = allowed is not None and s.request.priority not in allowed
        assert not closed or not s.holds, f"{a}: its class is closed"
        places = tuple(x.device for x in a.slices)
        assert self.may_go(s, places), f"{a}: bound to {s.bound}, {s.suspended} suspended"
        s.lease = {x.device: x.bytes for x in a.slices}
        s.charge = self.due(s)
        own, limit = self.of(s.owner.name), self.quota(s.owner.name)
        for most, used in (
            (limit.memory, sum(map(self.charge, own))),
            (limit.devices, sum(len(o.lease) for o in own)),
            (limit.leases, sum(bool(o.lease) for o in own)),
        ):
            assert most is None or used <= most, f"{a}: {used} of a quota of {most}"
        for name, most in self.caps(s.owner).items():
            assert self.capped(name) <= most, f"{a}: {self.capped(name)} of {most} of group {name}"

    def _suspend(self, s: NaiveSession, a: ev.Suspend) -> None:
        assert s.state == "detaching", a
        assert not s.effect, f"{a} during {s.effect}"
        due = s.recall_at is not None and s.recall_at <= self.now
        if a.reason.startswith(RECALL):
            assert due, f"{a}: its recall is over, or comes later ({s.recall_at})"
            assert a.reason == s.recall_reason, f"{a}: not the last recall"
        s.recalled = a.busy and due
        if a.busy:
            rules = self.settings.preempt or self.stops() or due
            assert rules, f"{a}: no rule preempts what is in use"
            assert any(s.holds.values()), f"{a} though no hold is granted"
            assert s.gated, f"{a}: nothing holds its calls back"
            s.holds = dict.fromkeys(s.holds, False)
        assert not any(s.holds.values()), f"{a} though {s.holds}"
        assert a.epoch == s.epoch
        assert {x.device: x.bytes for x in a.slices} == s.lease
        known = s.sampled_at >= s.idle_since and set(s.lease) <= set(s.footprints)
        known = known and not a.busy
        used = sum(s.footprints.values())
        size = used if known else max(used, sum(s.lease.values()))
        if not all(self.devices[u].can_suspend for u in s.lease):
            assert size == 0, f"{a}: its device cannot suspend"
        if size:
            assert a.session not in self.pressed, f"{a}: host memory is short there"
            assert self.host_used() + size <= self.settings.host_memory, f"{a}: host is full"
            own, limit = self.of(s.owner.name), self.quota(s.owner.name).suspended
            have = sum(sum(o.suspended.values()) + o.host for o in own)
            assert limit is None or have + size <= limit, f"{a}: {have} of {limit} suspended"
        if (
            a.busy
            or due
            or a.reason in (SPENT, CLOSED)
            or (self.settings.preempt and self.now < self.stays_until(s))
        ):
            pass  # these rules may also preempt an idle lease within its minimum residence
        elif a.reason not in ("idle", "release") and not self.paused & s.lease.keys():
            assert self.now >= self.stays_until(s), f"{a}: it was just moved"
        s.effect, s.host = "suspend", size
        self.taken += size

    def _resize(self, s: NaiveSession, a: ev.Resize) -> None:
        assert s.state in ("active", "idle"), a
        assert a.epoch == s.epoch
        assert [x.device for x in a.slices] == list(s.lease)
        # The pool resizes the slice before it answers the request. So the new size may follow from
        # a request without an answer.
        request = next(iter(s.asked.values()), s.request)
        for x in a.slices:
            more = x.bytes - s.lease[x.device]
            if more > 0:
                assert x.device not in self.drained, a
                assert x.bytes <= request.limit, f"{a}: its limit is {request.limit}"
                assert self.free(x.device) >= more, f"{a}: only {self.free(x.device)} free"
        grows = any(x.bytes > s.lease[x.device] for x in a.slices)
        if grows and isinstance(self.event, (ev.GrowAsked, ev.DeviceMemorySeen)):
            s.grown_at = self.now
        s.lease = {x.device: x.bytes for x in a.slices}
        old, s.request = s.request, request
        before, s.charge = s.charge, self.due(s)
        s.request = old
        if not grows:
            s.charge = min(s.charge, before)
        if s.charge > before:
            for name, most in self.caps(s.owner).items():
                assert self.capped(name) <= most, f"{a}: above the cap of group {name}"
        limit = self.quota(s.owner.name).memory
        if limit is not None and s.charge > before:
            assert sum(map(self.charge, self.of(s.owner.name))) <= limit, a

    # ------------------------------------------------------------------ after each event

    def after(self) -> None:
        for name, s in list(self.sessions.items()):
            assert (s.effect == "attach") == (s.state == "attaching"), (name, s)
            assert (s.effect == "suspend") == (s.state == "detaching"), (name, s)
            if s.state == "active":
                assert s.holds, (name, s)
                assert all(s.holds.values()), f"{name}: a hold was not answered: {s}"
            if s.state in ("queued", "attaching", "detaching"):
                assert not any(s.holds.values()), (name, s)
            if s.state in ("idle", "detached"):
                assert not s.holds, f"{name}: a hold was not answered: {s}"
            if s.gone:
                assert s.state == "ended", f"{name}: the pool does not know that it has ended"
                del self.sessions[name]
        self.opening.clear()
