# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The usage of users and groups: decayed sums of memory and compute, and the usage of today.

A session with a lease uses, on each of its devices, the part of the memory that it was granted.
While it is active, it also uses a part of the device's compute: its ``compute`` divided by the sum
of ``compute`` over all active sessions on the device. So the only active session on a device uses
the device's whole compute. The two parts are *rates*. The unit of a rate is devices, so the sum of
a rate over time is in device-seconds. The larger of the two sums is the *dominant* usage (Ghodsi et
al., "Dominant Resource Fairness", NSDI 2011): a session that has much memory and computes little
pays for its memory, and a small session that computes all the time pays for its compute.

Rates change at events only. So a :class:`Meter` holds the sums at the time of the last change, and
the rates since this change. A formula gives the sums at any later time: if the decayed sum is u and
the rate is r, the decayed sum some seconds later is u x d + r x (1 - d) / ln 2 x half-life, with
d = 2 ^ (-seconds / half-life).

Usage counts against a daily budget without decay (see :class:`~.groups.Daily`). With the rule
``window``, all usage since the present window began counts. With the rule ``refill``, the
GPU-seconds of the budget come back at a constant rate, the whole budget in one day.

A window begins at a fixed time of day. When somebody sets the clock of the machine, or when the
machine sleeps, the time of day steps. It is then ``ahead`` seconds ahead of the pool's own clock,
which does not step. After a step forward, usage has decayed and budgets are renewed as if the
skipped time had passed, but the pool charges no user for this time. A step back changes no usage
and no budget.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Iterable, Mapping, NamedTuple

from .groups import DAY, EXACT, Daily, PoolUsage, Usage, path, window_began
from .model import Owner, PoolSettings

#: With the rule ``refill``, a used-up budget counts as available again only after this part of the
#: budget has come back. Otherwise the user's sessions would stop and continue every second.
BACK = 1 / 24

#: If this machine may still get a part of the budget from other machines, the used-up budget counts
#: as available again as soon as this many GPU-seconds have come back, or ``BACK`` of the budget if
#: this is less. The other machines can then give up more of the budget to this machine.
BACK_HERE = 30.0

LN2 = math.log(2)

#: The meters sum rates as whole numbers of units; one device is this many units. So a meter can add
#: and subtract a rate without a rounding error, and need not sum the rates of all sessions again
#: after a change. A change therefore takes the same time with one session as with a thousand.
UNITS = 1 << 100


def back_at(daily: Daily) -> float:
    """Return the usage at which a used-up budget that refills is available again."""
    gap = daily.most * BACK
    return daily.most - (min(gap, BACK_HERE) if daily.more_elsewhere else gap)


@dataclass(slots=True, eq=False)
class Meter:
    """The usage of a user or a group: the sums at ``at``, and the rates since then."""

    at: float
    memory: float = 0.0
    compute: float = 0.0
    today: float = 0.0
    spent: bool = False
    #: Devices in use now, by memory and by compute.
    memory_rate: float = 0.0
    compute_rate: float = 0.0
    #: For each session: the devices that it uses, by memory and by compute. Then the sums over all
    #: sessions, in :data:`UNITS`.
    parts: dict[str, tuple[float, float]] = field(default_factory=dict)
    memory_units: int = 0
    compute_units: int = 0
    #: Seconds by which the time of day is ahead of the pool's clock.
    ahead: float = 0.0
    #: The dominant usage on other machines.
    elsewhere: float = 0.0

    @property
    def rate(self) -> float:
        """The larger of the two rates: the devices in use now, by memory or by compute."""
        return max(self.memory_rate, self.compute_rate)

    def dominant(self, now: float, half_life: float) -> float:
        """Return the dominant usage at ``now``."""
        if half_life <= 0:
            return 0.0
        gone = -math.expm1(-LN2 * max(0.0, now - self.at) / half_life)
        left, more = 1.0 - gone, gone * half_life / LN2
        return self.elsewhere * left + max(
            self.memory * left + self.memory_rate * more,
            self.compute * left + self.compute_rate * more,
        )

    def read(self, now: float, half_life: float, daily: Daily | None) -> Usage:
        """Return the usage at ``now``."""
        memory = compute = elsewhere = 0.0
        if half_life > 0:
            gone = -math.expm1(-LN2 * max(0.0, now - self.at) / half_life)
            left, more = 1.0 - gone, gone * half_life / LN2
            memory = self.memory * left + self.memory_rate * more
            compute = self.compute * left + self.compute_rate * more
            elsewhere = self.elsewhere * left
        today, spent = self.budget(now, daily)
        return Usage(memory, compute, today, spent, now, elsewhere)

    def budget(self, now: float, daily: Daily | None) -> tuple[float, bool]:
        """Return the usage that counts against the budget at ``now``, and whether the budget is
        used up.
        """
        rate, seconds = self.rate, max(0.0, now - self.at)
        if daily is not None and daily.rule == "refill":
            # The rate has not changed since ``at``.
            today = self.today + (rate - daily.refill / DAY) * seconds
            # Usage beyond the budget, or beyond this machine's part of the budget, does not count.
            today = min(daily.seconds, max(self.today, daily.most), max(0.0, today))
            if today >= daily.most - EXACT:
                return today, True
            return today, self.spent and today > back_at(daily) + EXACT
        renews = daily.renews if daily is not None else 0.0
        began = window_began(now + self.ahead, renews) - self.ahead
        today = rate * (now - began) if began > self.at else self.today + rate * seconds
        return today, daily is not None and today >= daily.most - EXACT

    def advance(self, now: float, half_life: float, daily: Daily | None) -> None:
        """Compute the sums at ``now``. Call this before the rates change."""
        if now > self.at:
            found = self.read(now, half_life, daily)
            self.memory, self.compute = found.memory, found.compute
            self.today, self.spent, self.at = found.today, found.spent, now
            self.elsewhere = found.elsewhere

    def set_clock(self, now: float, ahead: float, half_life: float, daily: Daily | None) -> None:
        """Note that the time of day is now ``ahead`` seconds ahead of the pool's clock."""
        self.advance(now, half_life, daily)
        # The time of day jumps here. Advance the sums over the jump, with all rates 0.
        before = Meter(
            now + self.ahead, self.memory, self.compute, self.today, self.spent,
            elsewhere=self.elsewhere,
        )  # fmt: skip
        after = before.read(now + ahead, half_life, daily)
        self.memory, self.compute = after.memory, after.compute
        self.today, self.spent, self.ahead = after.today, after.spent, ahead
        self.elsewhere = after.elsewhere

    def use(self, session: str, part: tuple[float, float] | None) -> None:
        """Set the ``part`` of devices that a session uses from now on; None if it uses nothing.

        Call :meth:`advance` first.
        """
        memory, compute = self.parts.pop(session, (0.0, 0.0))
        more, faster = part or (0.0, 0.0)
        if part is not None:
            self.parts[session] = part
        # A part gives the same whole number when it is added and when it is subtracted. So the sums
        # return to exactly 0.
        self.memory_units += int(more * UNITS) - int(memory * UNITS)
        self.compute_units += int(faster * UNITS) - int(compute * UNITS)
        self.memory_rate = self.memory_units / UNITS
        self.compute_rate = self.compute_units / UNITS

    def use_nothing(self) -> None:
        """Set all rates to 0 from now on."""
        self.parts.clear()
        self.memory_units = self.compute_units = 0
        self.memory_rate = self.compute_rate = 0.0

    def changes_at(self, now: float, daily: Daily) -> float:
        """Return when the budget will be used up or, if it is used up now, available again.

        The answer is infinity if this never happens.
        """
        if daily.seconds <= EXACT:
            return math.inf  # a budget of 0 is always used up
        today, spent = self.budget(now, daily)
        if daily.rule == "window":
            if spent:
                return window_began(now + self.ahead, daily.renews) + DAY - self.ahead
            return now + (daily.most - today) / self.rate if self.rate > 0 else math.inf
        slope = self.rate - daily.refill / DAY
        if spent:
            back = back_at(daily)
            return now + max(0.0, today - back) / -slope if slope < 0 else math.inf
        return now + (daily.most - today) / slope if slope > 0 else math.inf


class LeaseInUse(NamedTuple):
    """The data of a lease that meters read."""

    owner: Owner
    #: Whether the session computes.
    active: bool
    compute: int
    #: For each device of the lease: the part of the device's memory that was granted.
    memory: Mapping[str, float]


class Meters:
    """The meters of all users and groups. :meth:`settle` updates them after leases have changed."""

    def __init__(self) -> None:
        self.users: dict[str, Meter] = {}
        self.groups: dict[str, Meter] = {}
        #: Seconds by which the time of day is ahead of the pool's clock.
        self.ahead = 0.0
        #: Sessions whose leases may have changed since the last :meth:`settle`, in the order of the
        #: changes.
        self.changed: dict[str, bool] = {}
        self._leases: dict[str, LeaseInUse] = {}
        #: By device: the leases of sessions that compute.
        self._computing: dict[str, dict[str, LeaseInUse]] = {}
        #: What has changed since the last :meth:`settle`: new and changed leases, devices on which
        #: a session has begun or stopped computing, and sessions that have lost their lease.
        self._put: dict[str, LeaseInUse] = {}
        self._devices: dict[str, bool] = {}
        self._gone: list[str] = []
        #: For each session with a lease: its accounts and their daily budgets.
        self._of: dict[str, list[tuple[Meter, Daily | None]]] = {}

    def put(self, session: str, lease: LeaseInUse) -> None:
        """Record the lease of a session."""
        old = self._leases.get(session)
        if old == lease and session in self._of:
            return
        self._compute_no_more(session, old)
        self._leases[session] = self._put[session] = lease
        for device in lease.memory if lease.active else ():
            self._computing.setdefault(device, {})[session] = lease
            self._devices[device] = True

    def drop(self, session: str) -> None:
        """Record that a session has no lease."""
        self._compute_no_more(session, self._leases.pop(session, None))
        self._put.pop(session, None)
        self._gone.append(session)

    def _compute_no_more(self, session: str, lease: LeaseInUse | None) -> None:
        for device in lease.memory if lease is not None and lease.active else ():
            del self._computing[device][session]
            self._devices[device] = True

    def settle(self, now: float, rules: PoolSettings) -> None:
        """Update the rates from ``now`` on, after leases have changed.

        The method computes the parts of two kinds of sessions again. The first are the sessions
        whose leases have changed. The second are the sessions that compute on a device where
        another session has begun or stopped computing, because this changes their part of the
        compute. A session's part of the memory does not depend on other sessions.
        """
        devices, self._devices = self._devices, {}
        gone, self._gone = self._gone, []
        changed, self._put = self._put, {}
        for device in devices:
            changed.update(self._computing.get(device, {}))
        total: dict[str, int] = {}
        half_life = rules.half_life
        for session, lease in changed.items():
            compute = 0.0
            for device in lease.memory if lease.active else ():
                if device not in total:
                    there = self._computing[device].values()
                    total[device] = sum([other.compute for other in there])
                compute += lease.compute / total[device]
            found = self._of.get(session)
            if found is None:
                found = self._of[session] = list(self._accounts(lease.owner, now, rules))
            part = math.fsum(lease.memory.values()), compute
            if found[0][0].parts.get(session) != part:
                for account, daily in found:
                    account.advance(now, half_life, daily)
                    account.use(session, part)
        for session in gone:
            for account, daily in self._of.pop(session, ()):
                account.advance(now, half_life, daily)
                account.use(session, None)

    def _accounts(
        self, owner: Owner, now: float, rules: PoolSettings
    ) -> Iterable[tuple[Meter, Daily | None]]:
        daily = rules.quota_of(owner.name).daily if rules.quotas else None
        yield self.users.setdefault(owner.name, Meter(now, ahead=self.ahead)), daily
        for group in path(rules.groups, owner.group) if rules.groups else ():
            account = self.groups.setdefault(group, Meter(now, ahead=self.ahead))
            yield account, rules.groups[group].daily

    # ------------------------------------------------------------------ all meters

    def close(self, now: float, rules: PoolSettings) -> None:
        """Compute all sums at ``now`` with the old ``rules``, and set all rates to 0.

        Call this before the rules change. Then record all leases again with :meth:`put`: the next
        :meth:`settle` continues from the sums and sets the new rates.
        """
        for name, account in self.users.items():
            account.advance(now, rules.half_life, rules.quota_of(name).daily)
        for name, account in self.groups.items():
            group = rules.groups.get(name)
            account.advance(now, rules.half_life, group.daily if group else None)
        for account in (*self.users.values(), *self.groups.values()):
            account.use_nothing()
        self._of.clear()

    def set_clock(self, now: float, rules: PoolSettings, ahead: float) -> None:
        """Call :meth:`Meter.set_clock` of all meters."""
        for name, account in self.users.items():
            account.set_clock(now, ahead, rules.half_life, rules.quota_of(name).daily)
        for name, account in self.groups.items():
            group = rules.groups.get(name)
            account.set_clock(now, ahead, rules.half_life, group.daily if group else None)
        self.ahead = ahead

    def recovered(
        self,
        now: float,
        rules: PoolSettings,
        users: Mapping[str, Usage],
        groups: Mapping[str, Usage],
        since: float,
    ) -> None:
        """Add the usage from before a restart of the broker, decayed until ``now``.

        Leases that stayed during the restart count from ``since`` on, by their memory alone.
        """
        for known, found in ((self.users, users), (self.groups, groups)):
            for name in dict.fromkeys((*found, *known)):
                daily = rules.quota_of(name).daily
                if known is self.groups:
                    group = rules.groups.get(name)
                    daily = group.daily if group else None
                account = known.setdefault(name, Meter(now, ahead=self.ahead))
                account.advance(now, rules.half_life, daily)
                had = found.get(name) or Usage(at=since)
                old = Meter(had.at, had.memory, had.compute, had.today, had.spent, ahead=self.ahead)
                old.advance(min(since, now), rules.half_life, daily)
                old.memory_rate = account.memory_rate
                old.advance(now, rules.half_life, daily)
                account.memory += old.memory
                account.compute += old.compute
                account.today += old.today
                account.spent = account.spent or old.spent

    def used_elsewhere(
        self,
        now: float,
        rules: PoolSettings,
        users: Mapping[str, float],
        groups: Mapping[str, float],
    ) -> None:
        """Set the dominant usage on other machines at ``now``.

        A user or group without a figure has used nothing on other machines.
        """
        for known, found in ((self.users, users), (self.groups, groups)):
            for name in {**known, **found}:
                amount = found.get(name, 0.0)
                account = known.get(name)
                if not amount and (account is None or not account.elsewhere):
                    continue
                if account is None:
                    account = known[name] = Meter(now, ahead=self.ahead)
                group = rules.groups.get(name) if known is self.groups else None
                daily = rules.quota_of(name).daily if known is self.users else None
                account.advance(now, rules.half_life, group.daily if group else daily)
                account.elsewhere = amount

    def view(self, now: float, rules: PoolSettings, since: float = -math.inf) -> PoolUsage:
        """Return the usage at ``now`` of each user and group that used a GPU after ``since``."""
        return PoolUsage(
            users={
                name: account.read(now, rules.half_life, rules.quota_of(name).daily)
                for name, account in self.users.items()
                if account.at >= since or account.parts
            },
            groups={
                name: account.read(now, rules.half_life, rules.groups[name].daily)
                for name, account in self.groups.items()
                if name in rules.groups and (account.at >= since or account.parts)
            },
        )
