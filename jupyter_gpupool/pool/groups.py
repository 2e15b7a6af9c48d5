# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Groups of users, and what an admin grants each group, as frozen values.

Each owner belongs to one group, and a group may belong to another group. The groups form a tree.
The root of the tree is the pool itself (the name ""). An admin can give a group four rules:

* A *guarantee* is memory that the members get at once, even if sessions outside the group have
  borrowed it.
* The *weight* decides the group's part of the remaining memory. The weights of all groups and users
  of one parent divide this memory.
* A *cap* is the most memory that all members together may have at once.
* A *daily* budget limits the members' usage in one day.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Literal, Mapping, Sequence

DAY = 86400.0

#: A budget counts as used up when at most this many GPU-seconds are left. A smaller number makes no
#: sense, because the pool's times (in seconds since the epoch) are not more exact than this.
EXACT = 0.001

#: How a budget is renewed. ``window``: the whole budget is renewed once a day, at a fixed time.
#: ``refill``: the budget is renewed continuously, at a rate of one whole budget per day.
DailyRule = Literal["window", "refill"]

#: What happens when the budget is used up. With ``borrow``, sessions continue on GPUs that no other
#: session wants, and the pool may preempt them for any session that has budget left. With
#: ``refuse``, the pool also refuses new leases. With ``stop``, it also suspends running sessions,
#: even if no other session waits.
DailyEnd = Literal["borrow", "refuse", "stop"]


@dataclass(frozen=True, slots=True)
class Portion:
    """A part of the pool. Exactly one of ``bytes``, ``devices`` and ``percent`` gives its size.

    Raises
    ------
    ValueError
        If none or more than one of the three is given, or if the number is negative or more than
        100 %.
    """

    bytes: int | None = None
    devices: float | None = None
    percent: float | None = None

    def __post_init__(self) -> None:
        given = [x for x in (self.bytes, self.devices, self.percent) if x is not None]
        if len(given) != 1:
            raise ValueError("Give exactly one of bytes, devices and percent.")
        if not 0 <= given[0] < math.inf:
            raise ValueError(f"{given[0]} was given; the number must be finite and at least 0.")
        if self.percent is not None and self.percent > 100:
            raise ValueError(f"{self.percent} % was given; it must be at most 100.")

    def of(self, capacities: Sequence[int]) -> int:
        """Return the size of this part in bytes, in a pool with devices of ``capacities`` bytes.

        If the devices differ in size, one device counts as the mean of all sizes.
        """
        total = sum(capacities)
        if self.bytes is not None:
            return self.bytes
        if self.devices is not None:
            return int(total * self.devices / len(capacities)) if capacities else 0
        return int(total * (self.percent or 0.0) / 100)


@dataclass(frozen=True, slots=True)
class Daily:
    """A budget of GPU-seconds per day, and what happens when it is used up.

    One GPU-second is the use of one whole device for one second. A session with half the memory of
    a device uses half a GPU. A session that computes while one other session computes on the same
    device also uses half a GPU. If a session's parts of the memory and of the compute time differ,
    the larger part counts.

    Raises
    ------
    ValueError
        If ``seconds`` is negative, or ``renews`` is not a second of the day.
    """

    seconds: float
    rule: DailyRule = "window"
    then: DailyEnd = "borrow"
    #: When a window begins, in seconds after midnight UTC.
    renews: float = 0.0
    #: The GPU-seconds of a window that this machine may use, if several machines share the budget.
    here: float = math.inf
    #: Whether this machine may still get a part of the budget from other machines, because they
    #: may not have used their parts.
    more_elsewhere: bool = False
    #: With the rule ``refill``, if several machines share the budget: the GPU-seconds that come
    #: back on this machine in a day.
    refill_here: float = math.inf

    @property
    def most(self) -> float:
        """The GPU-seconds that sessions of this machine may use."""
        return min(self.seconds, self.here)

    @property
    def refill(self) -> float:
        """The GPU-seconds that come back on this machine in a day, under the rule ``refill``."""
        return min(self.seconds, self.refill_here)

    @property
    def is_shared(self) -> bool:
        """Whether other machines use the same budget. The figures of this machine are then only a
        part of the whole.
        """
        return self.here < math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.seconds < math.inf:
            raise ValueError(
                f"{self.seconds} GPU-seconds per day were given; the number must be finite and at "
                "least 0."
            )
        if not 0 <= self.renews < DAY:
            raise ValueError(
                f"{self.renews} was given as a second of the day; it must be from 0 to {DAY:.0f}."
            )
        if self.rule not in ("window", "refill"):
            raise ValueError(f"There is no rule {self.rule!r}: use 'window' or 'refill'.")
        if self.then not in ("borrow", "refuse", "stop"):
            raise ValueError(
                f"{self.then!r} is not a value of 'then': use 'borrow', 'refuse' or 'stop'."
            )


def window_began(now: float, renews: float) -> float:
    """Return when the window that contains ``now`` began.

    A new window begins each day, ``renews`` seconds after midnight UTC.
    """
    return math.floor((now - renews) / DAY) * DAY + renews


@dataclass(frozen=True, slots=True)
class Group:
    """The rules for all members of a group together; ``parent`` "" is the pool itself.

    Raises
    ------
    ValueError
        If ``weight`` is not more than 0.
    """

    parent: str = ""
    guarantee: Portion | None = None
    weight: float = 1.0
    cap: Portion | None = None
    daily: Daily | None = None
    #: If several machines share the guarantee: how many of its bytes this machine guarantees.
    guarantee_here: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"A weight of {self.weight} was given; it must be more than 0.")


def path(groups: Mapping[str, Group], name: str) -> tuple[str, ...]:
    """Return ``name`` and all groups above it, the outermost first; () for the pool itself.

    An unknown group counts as the pool itself. If a parent is already in the path, so that the
    groups form a cycle, the path ends there.
    """
    found: list[str] = []
    while name in groups and name not in found:
        found.append(name)
        name = groups[name].parent
    return tuple(reversed(found))


class Tree:
    """The groups of one configuration on one machine: their paths, and their guarantees and caps in
    bytes.
    """

    __slots__ = ("_budgets", "_paths", "budgeted", "caps", "groups", "guarantees", "stops")

    def __init__(
        self,
        groups: Mapping[str, Group],
        capacities: Sequence[int] = (),
        *,
        users: Iterable[Daily | None] = (),
    ) -> None:
        self.groups = groups
        budgets = [*users, *(group.daily for group in groups.values())]
        #: ``budgeted`` says whether any user or group has a daily budget. ``stops`` says whether at
        #: least one of these budgets suspends running sessions when it is used up.
        self.budgeted = any(budgets)
        self.stops = any(daily is not None and daily.then == "stop" for daily in budgets)
        self._budgets: dict[str, tuple[str, ...]] = {}
        self.guarantees = {
            name: group.guarantee.of(capacities)
            if group.guarantee_here is None
            else group.guarantee_here
            for name, group in groups.items()
            if group.guarantee
        }
        self.caps = {name: group.cap.of(capacities) for name, group in groups.items() if group.cap}
        self._paths: dict[str, tuple[str, ...]] = {}

    def path(self, name: str) -> tuple[str, ...]:
        """Return the group ``name`` and all above it, the outermost first; () for the pool."""
        found = self._paths.get(name)
        if found is None:
            found = self._paths[name] = path(self.groups, name)
        return found

    def with_budget(self, name: str) -> tuple[str, ...]:
        """Return ``name`` and the groups above it, but only those with a daily budget."""
        found = self._budgets.get(name)
        if found is None:
            found = tuple(group for group in self.path(name) if self.groups[group].daily)
            self._budgets[name] = found
        return found

    def capped(self, name: str) -> list[str]:
        """Return ``name`` and the groups above it, but only those with a cap."""
        return [group for group in self.path(name) if group in self.caps] if self.caps else []


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a user or a group at one time.

    The unit is one device for one second. ``memory`` and ``compute`` decay with
    ``PoolSettings.half_life``. ``today`` is the usage that counts against the daily budget. With
    the rule ``window`` this is the usage since the window began. With ``refill`` it is the part of
    the usage that has not come back yet. At each time, the larger of memory and compute counts.
    """

    memory: float = 0.0
    compute: float = 0.0
    today: float = 0.0
    #: Whether its daily budget is used up: see :class:`Daily`.
    spent: bool = False
    #: The time to which the figures apply, in seconds since the epoch.
    at: float = 0.0
    #: The dominant usage on other machines of a cluster. It decays like ``memory`` and ``compute``.
    elsewhere: float = 0.0

    @property
    def here(self) -> float:
        """The dominant usage of this machine: the larger of memory and compute."""
        return max(self.memory, self.compute)

    @property
    def dominant(self) -> float:
        """The dominant usage on all machines. Fair sharing compares users and groups by it."""
        return self.here + self.elsewhere


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The usage of all users and groups that have used a GPU."""

    users: Mapping[str, Usage]
    groups: Mapping[str, Usage]
