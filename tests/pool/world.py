# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A pool, the naive model, a simulated runner, and the random steps that the tests take.

Each step makes its random choices with a ``Chooser``. In the soak this is a ``random.Random``. In
the property test it is a ``Draws``, which gets its values from Hypothesis.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol, Sequence, TypeVar

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.explain import Explanation
from jupyter_gpupool.pool.groups import Daily, Group, Portion
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import (
    PREEMPT_ALL,
    Device,
    Hold,
    Owner,
    PoolSettings,
    PreemptRule,
    Quota,
    Request,
    Slice,
)

from .checks import check_pool
from .liveness import Look, check_backfill, check_guarantees, check_liveness, check_recalls
from .naive import RECALL, Naive

T = TypeVar("T")


class Chooser(Protocol):
    def choice(self, options: Sequence[T]) -> T: ...
    def randint(self, low: int, high: int) -> int: ...


SIZES = (1, 2, 3, 4, 5, 6, 8, 10)
OWNERS = (Owner("ann", "lab"), Owner("bob", "team"), Owner("cyd"))
CLASSES = ("interactive", "notebook", "notebook", "notebook", "batch")


def random_groups(c: Chooser) -> dict[str, Group]:
    """Return two groups; one of them may be inside the other.

    The sum of their guarantees may be more bytes than the machine has.
    """
    return {
        "lab": Group(
            guarantee=c.choice([None, Portion(percent=50), Portion(bytes=12)]),
            weight=c.choice([1.0, 3.0]),
            cap=c.choice([None, None, Portion(devices=1)]),
            daily=c.choice([None, None, None, random_daily(c)]),
        ),
        "team": Group(
            parent=c.choice(["", "lab"]),
            guarantee=c.choice([None, Portion(devices=0.5), Portion(bytes=6)]),
            cap=c.choice([None, None, Portion(bytes=15)]),
        ),
    }


def random_daily(c: Chooser) -> Daily:
    seconds, rule = float(c.choice([0, 20, 300])), c.choice(["window", "refill"])
    found = Daily(
        seconds, rule=rule, then=c.choice(["borrow", "refuse", "stop"]),
        renews=float(c.choice([0, 1200])),
    )  # fmt: skip
    here = c.choice([math.inf, math.inf, 0.0, 10.0])
    if rule == "refill" or here >= seconds:
        return found
    return dataclasses.replace(found, here=here, more_elsewhere=c.choice([True, False]))


def random_preempt(c: Chooser) -> frozenset[PreemptRule]:
    some = frozenset(rule for rule in sorted(PREEMPT_ALL) if c.choice([True, False]))
    return c.choice([PREEMPT_ALL, PREEMPT_ALL, some, frozenset()])


def random_settings(c: Chooser, *, shares: bool = False) -> PoolSettings:
    """Return random settings; ``shares`` adds groups, budgets and preemption of running work."""
    settings = _random_settings(c)
    if not shares:
        return settings
    quotas = dict(settings.quotas)
    if c.choice([True, False, False]):
        quotas["bob"] = dataclasses.replace(quotas.get("bob", Quota()), daily=random_daily(c))
    return dataclasses.replace(
        settings,
        quotas=quotas,
        groups=c.choice([{}, random_groups(c), random_groups(c)]),
        preempt=random_preempt(c),
        classes_allowed=c.choice(
            [None, None, None, frozenset(CLASSES[:1]), frozenset(CLASSES[1:])]
        ),
        unsuspendable=c.choice(["warn", "ask", "end"]),
        unsuspendable_after=c.choice([(5.0, 20.0, 60.0), (60.0, 600.0, 3600.0)]),
    )


def _random_settings(c: Chooser) -> PoolSettings:
    quota = c.choice(
        [
            {},
            {},
            {"ann": Quota(memory=10), "*": Quota(memory=14, leases=3)},
            {"bob": Quota(devices=2, suspended=8), "ann": Quota(leases=1)},
        ]
    )
    return PoolSettings(
        quotas=quota,
        idle_timeout=float(c.choice([5, 30, 300])),
        reclaim_after=float(c.choice([0, 0, 3])),
        max_wait=c.choice([None, None, 40.0]),
        ageing=float(c.choice([10, 60])),
        reserve=c.choice([0, 0, 1]),
        host_memory=c.choice([12, 30, 1000]),
        resume_headroom=c.choice([0, 1]),
        pinned_retry=20.0,
        max_swap_overhead=c.choice([0.0, 0.1, 0.5]),
        residence=c.choice(["work", "work", "clock"]),
        growth_step=c.choice([1, 1, 3]),
        max_memory_per_kernel=c.choice([None, None, 10]),
        half_life=c.choice([0.0, 0.0, 60.0, 3600.0]),
        preempt=frozenset(),
    )


class World:
    """A machine with up to ``most`` sessions."""

    def __init__(
        self,
        c: Chooser,
        *,
        devices: int = 3,
        most: int = 9,
        deep: bool = True,
        every: int = 1,
        shares: bool = False,
    ) -> None:
        self.c = c
        self.shares = shares
        self.most = most
        self.deep = deep
        #: The world checks each explanation after every ``every`` events.
        self.every = every
        self.now = 1000.0
        self.settings = random_settings(c, shares=shares)
        self.pool = Pool(self.settings)
        self.naive = Naive(self.settings)
        self.count = 0
        self.events = 0
        self.kinds: dict[str, int] = {}
        #: Explanation of each session after the last event.
        self.plans: dict[str, Explanation] = {}
        for index in range(devices):
            self.send(
                ev.DeviceAppeared(
                    now=self.now,
                    device=Device(
                        uuid=f"GPU-{index}",
                        index=index,
                        name="test",
                        model=c.choice(["A", "A", "B"]),
                        memory_total=c.choice([8, 10, 12]),
                        memory_reserved=c.choice([0, 0, 1]),
                        can_suspend=c.choice([True] * 5 + [False]),
                        can_migrate=c.choice([True] * 3 + [False]),
                        landing_bytes=c.choice([0, 0, 1]),
                    ),
                )
            )

    # ------------------------------------------------------------------ sending

    def send(self, event: ev.Event) -> list[ev.Action]:
        self.events += 1
        name = type(event).__name__
        self.kinds[name] = self.kinds.get(name, 0) + 1
        self.naive.before(event)
        actions = self.pool.handle(event)
        for a in actions:
            name = type(a).__name__
            self.kinds[name] = self.kinds.get(name, 0) + 1
            self.naive.action(a)
        self.naive.after()
        each = self.events % self.every == 0
        before, self.plans = (
            self.plans,
            check_pool(self.pool, self.now, deep=self.deep, one_by_one=each),
        )
        if self.deep:
            look = Look.at(self.pool, self.naive, self.plans)
            check_liveness(look)
            check_guarantees(look)
            check_recalls(look)
            if not isinstance(event, (ev.HostPressure, ev.Recovered)):
                check_backfill(look, before, actions)
        if isinstance(event, ev.Tick):
            at = self.pool.next_wakeup()
            assert at is None or at > self.now, "the pool asks for a Tick that is already due"
        return actions

    def _promised(self) -> set[str]:
        return {n for n in self._sessions("queued") if self.pool.explain(n).promised}

    def _sessions(self, *states: str) -> list[str]:
        return [n for n, s in self.naive.sessions.items() if not states or s.state in states]

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """Take one random step."""
        name = self.c.choice(WEIGHTED)
        getattr(self, name)()

    def wait(self) -> None:
        self.now += self.c.choice([0.0, 0.5, 1.0, 3.0, 11.0])

    def wait_long(self) -> None:
        self.now += self.c.choice([30.0, 61.0, 120.0])
        self.send(ev.Tick(now=self.now))

    def tick(self) -> None:
        at = self.pool.next_wakeup()
        if at is not None and self.c.choice([True, True, False]):
            self.now = max(self.now, min(at, self.now + 1000))
        self.send(ev.Tick(now=self.now))

    def request(self) -> Request:
        memory = self.c.choice(SIZES)
        return Request(
            memory=memory,
            limit=memory + self.c.choice([0, 0, 2, 5]),
            devices=self.c.choice([1, 1, 1, 1, 2]),
            compute=self.c.choice([100, 100, 50]) if self.shares else 100,
            priority=self.c.choice(CLASSES),
        )

    def open(self) -> None:
        if len(self.naive.sessions) >= self.most:
            return
        self.count += 1
        self.send(
            ev.SessionOpened(
                now=self.now,
                session=f"s{self.count}",
                owner=self.c.choice(OWNERS),
                request=self.request(),
                attach=self.c.choice(["cell", "lazy"]),
                lands=self.c.choice([False, True]),
                gated=self.c.choice([True] * 5 + [False]),
                rid=self.c.choice(["", "r"]),
            )
        )

    def hold(self) -> None:
        names = self._sessions()
        if names:
            name = self.c.choice(names)
            hold = self.c.choice(["h1", "h2", "device"])
            kind: Any = "device" if hold == "device" else "cell"
            bound: tuple[str, ...] = ()
            if kind == "device" and self.c.choice([False] * 5 + [True]):
                count = self.naive.sessions[name].request.devices
                bound = tuple(sorted(self.naive.devices))[-count:]
            self.send(ev.HoldTaken(now=self.now, session=name, hold=hold, kind=kind, bound=bound))

    def drop(self) -> None:
        names = [n for n, s in self.naive.sessions.items() if s.holds]
        if names:
            name = self.c.choice(names)
            hold = self.c.choice(sorted(self.naive.sessions[name].holds))
            cuda = self.c.choice([None, None, True, False])
            self.send(ev.HoldDropped(now=self.now, session=name, hold=hold, cuda=cuda))

    def replace(self) -> None:
        names = self._sessions()
        if names:
            holds = self.c.choice([(), ("h1",), ("h1", "h3")])
            self.send(
                ev.HoldsReplaced(
                    now=self.now,
                    session=self.c.choice(names),
                    holds=tuple(Hold(h, "cell", self.now) for h in holds),
                    cuda=self.c.choice([None, True]),
                )
            )

    def complete(self) -> None:
        """Complete one effect, in most cases with success."""
        names = [n for n, s in self.naive.sessions.items() if s.effect]
        if not names:
            return
        name = self.c.choice(names)
        s = self.naive.sessions[name]
        how = self.c.randint(1, 20)
        common: dict[str, Any] = {"now": self.now, "session": name, "epoch": s.epoch}
        if s.effect == "attach":
            if how <= 17:
                # In every fourth epoch, the attach took longer because it waited for other moves.
                waited = 40.0 if s.epoch % 4 == 3 else 0.0
                seconds = self.c.choice([0.0, 1.5])
                self.send(ev.AttachDone(**common, seconds=seconds, waited=waited))
            else:
                stay = how == 19 and self.c.choice([False, True])
                lost = how == 20
                self.send(ev.AttachFailed(**common, message="not free", lost=lost, stay=stay))
        elif how <= 14:
            state: tuple[Slice, ...] = ()
            if self.c.choice([True, True, False]):
                most = s.host // len(s.lease)
                state = tuple(
                    Slice(u, self.c.randint(1, max(1, min(size, most))))
                    for u, size in s.lease.items()
                    if min(size, most) > 0
                )[: self.c.choice([1, 2, 2])]
            cuda = self.c.choice([None, True, False])
            self.send(ev.SuspendDone(**common, suspended=state, cuda=cuda, seconds=2.0))
        elif how <= 19:
            kind: Any = self.c.choice(["busy", "pinned", "drain", "host", "limit"])
            self.send(ev.SuspendRefused(**common, kind=kind, message="no"))
        else:
            self.send(ev.SuspendFailed(**common, message="hung"))

    def settle(self) -> None:
        """Let processes of a session without a lease call cuInit."""
        names = [n for n in self._sessions("detached", "queued") if not self._suspended(n)]
        if names:
            name = self.c.choice(names)
            bound = self._some_devices(name)
            self.send(ev.DevicesSettled(now=self.now, session=name, bound=bound))

    def land(self) -> None:
        """Report that the guard could not move a process to its session's slice."""
        active = [n for n in self._sessions("active") if self.naive.sessions[n].lands]
        if active:
            name = self.c.choice(active)
            s = self.naive.sessions[name]
            self.send(
                ev.LandingRefused(
                    now=self.now,
                    session=name,
                    epoch=s.epoch,
                    bound=self._some_devices(name),
                    message="its calls go on",
                    stay=self.c.choice([False, True]),
                )
            )

    def aside(self) -> None:
        """Set the processes of a session aside, as the pause of a device does, or restore them.

        These processes have called cuInit, and have no other GPU state.
        """
        names = self._sessions("detached", "queued")
        fresh = [n for n in names if self.naive.sessions[n].bound and not self._suspended(n)]
        back = [n for n in names if self.naive.sessions[n].aside]
        if back and self.c.choice([True, False]):
            self.send(ev.SetAside(now=self.now, session=self.c.choice(back), suspended=()))
        elif fresh:
            name = self.c.choice(fresh)
            bound = self.naive.sessions[name].bound
            state = tuple(Slice(uuid, self.c.choice([0, 0, 1])) for uuid in bound)
            self.send(ev.SetAside(now=self.now, session=name, suspended=state))

    def _suspended(self, name: str) -> bool:
        return bool(self.naive.sessions[name].suspended)

    def _some_devices(self, name: str) -> tuple[str, ...]:
        count = self.naive.sessions[name].request.devices
        devices = sorted(self.naive.devices)
        return tuple(devices[-count:] if self.c.choice([True, False]) else devices[:count])

    def stale(self) -> None:
        """Report the end of an effect that the pool does not wait for.

        The epoch of the report is wrong, no effect is under way, or the session is unknown.
        """
        name = self.c.choice([*self._sessions(), "nobody"])
        epoch = self.c.randint(0, 3)
        s = self.naive.sessions.get(name)
        if s is not None and (s.effect or s.state == "active") and s.epoch == epoch:
            return
        common: dict[str, Any] = {"now": self.now, "session": name, "epoch": epoch}
        self.send(
            self.c.choice(
                [
                    ev.AttachDone(**common),
                    ev.AttachFailed(**common, message="x", lost=True),
                    ev.SuspendDone(**common, suspended=(Slice("GPU-0", 4),)),
                    ev.SuspendRefused(**common, kind="busy", message="x"),
                    ev.SuspendFailed(**common, message="x"),
                    ev.LandingRefused(**common, bound=("GPU-0",), message="x"),
                ]
            )
        )

    def end(self) -> None:
        names = [*self._sessions(), "nobody"]
        dead = self._sessions("ended")
        name = self.c.choice(dead) if dead else self.c.choice(names)
        self.send(ev.SessionEnded(now=self.now, session=name, reason="exit"))

    def change(self) -> None:
        self.count += 1
        name = self.c.choice([*self._sessions(), "nobody"])
        self.send(
            ev.RequestChanged(
                now=self.now, session=name, request=self.request(), rid=f"q{self.count}"
            )
        )

    def elsewhere(self) -> None:
        """Report what owners and groups have used on other machines."""
        users = {o.name: float(self.c.randint(0, 60)) for o in OWNERS if self.c.choice([1, 0])}
        groups = {"lab": float(self.c.randint(0, 60))} if self.c.choice([1, 0]) else {}
        self.send(ev.UsedElsewhere(now=self.now, users=users, groups=groups))

    def grow(self) -> None:
        """Let a session ask for growth, as for an allocation that does not fit in its slice.

        In most cases, the session has a slice.
        """
        self.count += 1
        attached = self._sessions("active", "idle")
        if not attached or self.c.choice([False] * 9 + [True]):
            attached = [*self._sessions(), "nobody"]
        name = self.c.choice(attached)
        s = self.naive.sessions.get(name)
        uuid = self.c.choice(sorted((s and s.lease) or self.naive.devices))
        more, rid = self.c.randint(0, 4), f"g{self.count}"
        # At this tick, the pool does all work that is due. So the growth alone causes the changes
        # after the tick.
        self.send(ev.Tick(now=self.now))
        before = dict(s.lease) if s else {}
        planned = self._promised()
        actions = self.send(
            ev.GrowAsked(now=self.now, session=name, device=uuid, bytes=more, rid=rid)
        )
        gone = planned - self._promised()
        waits = {n for n in gone if self.naive.sessions[n].state == "queued"}
        assert not waits, f"{waits} had a plan before {name} grew"
        (answer,) = [a for a in actions if isinstance(a, ev.Answer) and a.rid == rid]
        if answer.refusal is None:
            assert s is not None
            assert s.lease[uuid] >= before[uuid] + more, f"{answer}: it has {s.lease}"
            assert not more or s.lease[uuid] <= s.request.limit, f"{answer}: it has {s.lease}"
        else:
            codes = ("limit", "no-memory", "quota", "unknown-session")
            assert answer.refusal.code in codes, answer

    def release(self) -> None:
        name = self.c.choice([*self._sessions(), "nobody"])
        self.send(ev.ReleaseAsked(now=self.now, session=name, rid="x"))

    def keep(self) -> None:
        name = self.c.choice([*self._sessions(), "nobody"])
        until = self.now + self.c.choice([0, 5, 50])
        s = self.naive.sessions.get(name)
        if s is not None:
            self.send(ev.KeepAsked(now=self.now, session=name, until=until, rid="x"))

    def recall(self) -> None:
        """Let an admin recall a slice: it leaves at the given time, even if it is in use."""
        self.count += 1
        name = self.c.choice([*(self._sessions("active", "idle") or self._sessions()), "nobody"])
        at = self.now + self.c.choice([0.0, 5.0, 60.0, 600.0])
        self._order(
            ev.RecallAsked(
                now=self.now, session=name, at=at, reason=f"{RECALL}{self.count}", rid="a"
            )
        )

    def cancel(self) -> None:
        """Let an admin drop a recall."""
        living = {n: s for n, s in self.naive.sessions.items() if s.state != "ended"}
        recalled = [n for n, s in living.items() if s.recall_at is not None]
        name = self.c.choice(recalled or [*living, "nobody"])
        self._order(ev.RecallAsked(now=self.now, session=name, at=None, reason="", rid="a"))
        assert name == "nobody" or not self.pool.record(name).recall_at

    def prioritise(self) -> None:
        """Let an admin change the priority class of a session's request, and nothing else."""
        names = self._sessions()
        if not names:
            return
        name = self.c.choice(names)
        request = dataclasses.replace(
            self.naive.sessions[name].request, priority=self.c.choice(CLASSES)
        )
        before = self.pool.record(name).request
        answer = self._order(
            ev.RequestChanged(now=self.now, session=name, request=request, rid="a")
        )
        expected = request if answer.refusal is None else before
        assert self.pool.record(name).request == expected, answer

    def dismiss(self) -> None:
        """Let an admin end a session; its process ends later."""
        name = self.c.choice([*self._sessions(), "nobody"])
        known = name in self._sessions("detached", "queued", "attaching", "active", "idle")
        answer = self._order(ev.EndAsked(now=self.now, session=name, reason="ended", rid="a"))
        assert not known or answer.refusal is None
        assert answer.refusal is not None or self.naive.sessions[name].state == "ended"

    def _order(self, event: ev.Event) -> ev.Answer:
        (answer,) = [a for a in self.send(event) if isinstance(a, ev.Answer) and a.rid == "a"]
        return answer

    def sample(self) -> None:
        uuid = self.c.choice(sorted(self.naive.devices))
        prints = {}
        for name, s in self.naive.sessions.items():
            if uuid in s.lease and s.state in ("active", "idle") and self.c.choice([True, False]):
                prints[name] = self.c.randint(0, s.lease[uuid])
                if self.c.choice([False] * 9 + [True]):
                    prints[name] = s.lease[uuid] + 1  # overuse
        foreign = self.c.choice([0, 0, 0, 2, 5])
        self.send(
            ev.DeviceMemorySeen(now=self.now, device=uuid, foreign=foreign, footprints=prints)
        )

    def host(self) -> None:
        self.send(ev.HostMemorySeen(now=self.now, available=self.c.choice([5, 20, 1000])))

    def pressure(self) -> None:
        names = self._sessions()
        some = {self.c.choice(names) for _ in range(self.c.choice([0, 0, 1, 3]))} if names else ()
        for _ in range(self.c.choice([1, 2])):
            self.send(ev.HostPressure(now=self.now, sessions=frozenset(some)))

    def drain(self) -> None:
        uuid = self.c.choice([*sorted(self.naive.devices), "GPU-none"])
        if uuid in self.naive.devices:
            self.send(ev.DeviceDrained(now=self.now, device=uuid, reason="Xid 79"))

    def heal(self) -> None:
        for uuid in sorted(self.naive.faulty):
            self.send(ev.DeviceAppeared(now=self.now, device=self.naive.devices[uuid]))

    def pause(self) -> None:
        """Let an admin pause devices. The pool suspends their idle sessions at once, if it can."""
        for uuid in self.c.choice([sorted(self.naive.devices), sorted(self.naive.devices)[:1]]):
            self.send(ev.DevicePaused(now=self.now, device=uuid, reason="paused by the admin"))

    def unpause(self) -> None:
        for uuid in sorted(self.naive.paused):
            self.send(ev.DeviceResumed(now=self.now, device=uuid))

    def configure(self) -> None:
        self.settings = random_settings(self.c, shares=self.shares)
        self.send(ev.SettingsChanged(now=self.now, settings=self.settings))

    def restart(self) -> None:
        """Kill the broker; a new pool gets the data of the journal and of the driver."""
        old = self.pool
        records, usage = old.records(), old.usage()
        self.pool = Pool(self.settings)
        self.naive.pressed = frozenset()
        self.naive.available, self.naive.taken = None, 0
        self.now += 1
        found = []
        for d in self.naive.devices.values():
            self.pool.handle(ev.DeviceAppeared(now=self.now, device=d))
        for uuid in self.naive.faulty:
            self.pool.handle(ev.DeviceDrained(now=self.now, device=uuid, reason="Xid 79"))
        for uuid in self.naive.paused:
            self.pool.handle(
                ev.DevicePaused(now=self.now, device=uuid, reason="paused by the admin")
            )
        for uuid, foreign in self.naive.foreign.items():
            self.pool.handle(ev.DeviceMemorySeen(now=self.now, device=uuid, foreign=foreign))
        for r in records:
            s = self.naive.sessions[r.id]
            if r.state == "ended":
                del self.naive.sessions[r.id]
                continue
            # A restarted broker first completes or undoes each attach and suspend that was under
            # way. Give the session the state that it has after this.
            state = {"queued": "detached", "attaching": "detached", "detaching": "idle"}.get(
                r.state, r.state
            )
            attached = state in ("active", "idle")
            r = dataclasses.replace(
                r,
                state=state,
                slices=r.slices if attached else (),
                holds=r.holds if state == "active" else (),
            )
            s.effect, s.host = "", 0
            s.state = "active" if attached and r.holds else "idle" if attached else "detached"
            s.idle_since = r.idle_since if attached and not r.holds else self.now
            recall = s.recall_at, s.recall_reason
            s.forget()
            s.recall_at, s.recall_reason = recall
            s.suspend_mean = s.resume_mean = 0.0
            s.recalled = False
            if not attached:
                s.lease, s.recall_at = {}, None
            s.holds = {h.id: True for h in r.holds}
            s.immovable = False  # after a restart the driver may try again
            s.charge = self.naive.due(s)
            s.refused = True
            found.append(r)
        self.send(ev.Recovered(now=self.now, records=tuple(found)))
        self.send(
            ev.UsageRecovered(
                now=self.now, users=usage.users, groups=usage.groups, since=self.now - 1
            )
        )


_WEIGHTS = {
    "wait": 10,
    "wait_long": 1,
    "tick": 4,
    "open": 8,
    "hold": 22,
    "drop": 16,
    "replace": 1,
    "complete": 26,
    "settle": 2,
    "land": 1,
    "aside": 1,
    "stale": 1,
    "end": 2,
    "change": 3,
    "grow": 5,
    "release": 1,
    "keep": 1,
    "recall": 2,
    "cancel": 0,
    "prioritise": 1,
    "dismiss": 0,
    "sample": 4,
    "host": 1,
    "pressure": 1,
    "drain": 0,
    "heal": 1,
    "pause": 0,
    "unpause": 2,
}
WEIGHTED = [name for name, weight in _WEIGHTS.items() for _ in range(2 * weight)] + [
    "cancel",
    "dismiss",
    "drain",
    "pause",
    "configure",
    "elsewhere",
    "restart",
]
