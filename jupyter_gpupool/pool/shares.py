# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The order of service by guarantees, budgets, classes, fair shares and age; and which daily
budgets are used up.

The order
---------
The pool compares sessions by one key after the other. It does not add the keys to one number,
because they have different units:

1. Sessions *within a guarantee* go before all other sessions. A session is within a guarantee if
   the leases of its group, the earlier requests of the group and its own request together need no
   more memory than the guarantee of the group.
2. Owners and groups whose *daily budget* is used up go last.
3. *Class*: the higher priority class goes first.
4. *Fair share*: at each level of the tree of groups, from the pool down to the owner, the child
   that has used the least for its weight goes first (Slurm's Fair Tree: R. Cox and L. Morrison,
   "Fair Tree: Fairshare Algorithm for Slurm", 2014; siblings are compared only with siblings). The
   usage of a child is the sum of three parts: its dominant decayed usage (:mod:`.metering`), the
   devices that it uses now x ``HORIZON`` seconds, and the devices that its earlier requests in the
   queue ask for x ``HORIZON`` seconds. Without the third part, all of 50 requests of one owner
   could go before the first request of another owner who has used a little more.
5. *Age*: the session that has waited for longer goes first.

Age raises a session by a *class*: after ``ageing`` x (difference of the class numbers) seconds it
competes in the next class. Age does not raise a session while its owner or a group of the owner has
used more than its fair share. So age never outweighs a share. (Other schedulers often add priority,
share and age to one sum. In a long queue, age then decides in the end. For example, two owners with
weights of 3:1 and endless demand got usage of 2:1.)

No session starves
------------------
*Claim.* If no quota, cap, budget or closed class forbids a session to run, and the session is the
first of its owner in the queue, it starts within max(C, S) + L seconds:

* C = ``ageing`` x (number of the highest class - number of its own);
* S = ``half_life`` x log2(1 + U / B). Here U is the usage of its owner when the session begins to
  wait. B is the usage that the owner would have in the long run if it used devices in proportion to
  its weight: (weight of the owner / weights of the others) x (devices that the others use) x
  half_life / ln 2. U is largest if the owner has used the same number of devices for a very long
  time. Then U / B is (weights of the others / weight of the owner), and S depends on the weights
  alone;
* L = ``ageing`` + the time until each lease on the devices that the session reserves has ended, or
  has been preempted and suspended. The size of the request matters only for L.

*Proof.* (1) The owner of the session gets nothing, so after t seconds U has become U x 2^(-t /
half_life). If the others use R devices, they have used R x half_life / ln 2 x (1 - 2^(-t /
half_life)) since then. Within a class, the owner with the least usage for its weight goes first. So
each of the other owners that has enough work gets a part of this usage in proportion to its weight,
with a difference of at most one cell. As soon as the decayed U, divided by the owner's weight, is
no more than such a part, divided by its weight, the owner has the least usage for its weight. This
condition, U x 2^(-t / half_life) <= B x (1 - 2^(-t / half_life)), is true after S seconds. (The
present leases of the others also count against them.) (2) The condition then stays true: all usage
decays by the same factor, and only the other owners add to their usage. While it is true, the owner
is not above its fair share, so age raises the session: C seconds after the session began to wait,
it competes in the highest class. C and S run at the same time. (3) Now the session is the first in
the queue and reserves devices (:mod:`.schedule`). Sessions behind it may use memory only if this
does not delay the session. After ``ageing`` seconds, the pool suspends idle leases on the reserved
devices for the session, even if one such lease alone is not enough. The time that remains is L.
With groups, the same is true for the siblings at each level.

*What the claim leaves out.* Sessions within a guarantee go before the session, but only until their
groups use their whole guarantees; all guarantees together are less than the machine. An owner that
has never used a GPU goes before the session once. A lease in use that no rule may preempt lasts as
long as its cell (:mod:`.unsuspendable`). For each ``ageing`` seconds of its wait, the head of the
queue reserves one more device. If ``half_life`` is 0, S is 0: class and age alone decide.

Without groups, budgets and past usage, the order is the order of class and age.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Iterable, Mapping

from .facts import Facts
from .groups import DAY, EXACT, Daily
from .guarantees import entitled
from .metering import LN2, Meter, back_at
from .model import Owner
from .placement import Age, asking
from .session import Session

#: For the order, the leases and earlier requests of an owner count as if the owner had already used
#: their devices for this many seconds, which is the length of a long cell. With a smaller value, an
#: owner with a little less usage than the others would get all devices that become free at the same
#: time. With a larger value, present leases would count more than past usage.
HORIZON = 60.0
#: The pool computes the order again after this many seconds while sessions of several owners wait.
RECHECK = 10.0
#: An owner is above its fair share only if its usage is more than the share times this factor.
#: Without the factor, a rounding error could put one of several equal users above its share.
ABOVE = 1.02

#: A session with its sort key for the order of classes: whether the budget is used up, the negative
#: class, and the age. The session itself never decides the order, because no two ages are equal: an
#: age contains the number of the wait.
Aged = tuple[bool, int, Age, Session]
#: A session with its sort key for the order of shares: whether the budget is used up, the negative
#: class, the score, and the place in the order of age. The last two fields, the size of the request
#: and the session, never decide the order, because no two sessions have the same place.
QueueEntry = tuple[bool, int, float, int, float, Session]
#: (account, weight, name) of a group or an owner.
TreeStep = tuple[Meter | None, float, str]


@dataclass(frozen=True, slots=True)
class Side:
    """One of two accounts that are compared. Each usage in it is already divided by the weight."""

    name: str
    weight: float
    used: float
    #: The usage ``RECHECK`` seconds later, if the rates stay as they are now.
    then: float
    #: Whether the usage by memory is the larger one now, and the usage by compute is the larger one
    #: ``RECHECK`` seconds later, or the reverse.
    bends: bool


class Shares:
    """What one pass must know about shares: the order, guarantees and budgets.

    The methods change no facts.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.tree = facts.tree
        self.fair = facts.settings.half_life > 0
        self.budgeted = facts.tree.budgeted
        #: For each waiting session: the groups whose guarantee covers its request.
        self.entitled: dict[str, frozenset[str]] = {}
        self._spent: dict[tuple[str, str], Budget | None] = {}
        #: The results of :meth:`level` so far, by session.
        self.levels: dict[str, int] = {}
        #: The numbers of the classes, the highest first.
        self._classes = sorted(facts.settings.priority_classes.values(), reverse=True)
        self._above: dict[tuple[str, str], bool] = {}
        self._used: dict[Meter, float] = {}
        self._known_lines: dict[Meter, tuple[tuple[float, float], tuple[float, float]]] = {}
        self._sides: dict[Owner, list[Side]] = {}
        self._steps: dict[Owner, list[TreeStep]] = {}
        self._parts: dict[Owner, list[tuple[str, float, float]]] = {}
        self._present: Mapping[str, list[tuple[str, float, float]]] | None = None
        self._mean = sum(facts.capacities) / max(1, len(facts.capacities)) or 1.0

    # ------------------------------------------------------------------ the order

    def order(self) -> list[Session]:
        """Return the sessions that wait for a lease or for growth, in the order of service."""
        facts = self.facts
        found: list[Session] = [*facts.waiting.values(), *facts.short.values()]
        if len(found) > 1:
            aged = self._by_age(found)
            found = self._by_share(aged) if self.fair else [item[-1] for item in aged]
            if facts.short:  # an idle session that waits for growth comes last
                found.sort(key=_idle)
        if self.tree.guarantees and found:
            self.entitled = entitled(facts, found, self.spent)
            if self.entitled:
                found.sort(key=lambda s: s.id not in self.entitled)
        return found

    def _by_age(self, waiting: Iterable[Session]) -> list[Aged]:
        """Return the sessions in the order of budgets, classes and age.

        The method also notes the :meth:`level` of each session. Most sessions have waited too
        briefly to be raised; their level is their own class and needs no call.
        """
        facts, now, levels = self.facts, self.facts.now, self.levels
        version, ageing = facts.version, facts.settings.ageing
        found: list[Aged] = []
        # Without shares and budgets, the age contains the class: see asking().
        budgeted, by_class = self.budgeted, self.fair or self.budgeted
        spent, lower = False, 0
        for s in waiting:
            asked = s.asking  # saves most calls of asking()
            if asked is None or asked.version != version:
                asked = asking(s, facts)
            age = asked.age
            if by_class:
                young = ageing <= 0 or now - age[1] + EXACT < ageing
                levels[s.id] = level = asked.level if young else self._level(s)
                lower = -level
                spent = budgeted and self.spent(s.owner) is not None
            found.append((spent, lower, age, s))
        found.sort()
        return found

    def level(self, s: Session) -> int:
        """Return the class in which a waiting session competes: its own class, or the higher class
        to which its age raises it.
        """
        found = self.levels.get(s.id)
        if found is None:
            found = self.levels[s.id] = self._level(s)
        return found

    def _level(self, s: Session) -> int:
        settings = self.facts.settings
        own = settings.priority_classes.get(s.request.priority, 0)
        # climbs_at() may have rounded its result down. ``now`` is then slightly before the time at
        # which the session has waited for long enough, and must count as this time.
        waited = self.facts.now - s.wait.since + EXACT
        if settings.ageing <= 0 or waited < settings.ageing:
            return own
        points = own + waited / settings.ageing
        for level in self._classes:
            if level <= points:
                return level if level > own and not self.above(s.owner) else own
        return own

    def _by_share(self, aged: Iterable[Aged]) -> list[Session]:
        """Return the sessions of ``aged`` in the order of classes, and within a class of shares."""
        users, mean = self.facts.meters.users, self._mean
        tree, groups = self.tree, self.facts.meters.groups
        #: For each group: the sessions of its members. ``top`` has the sessions without a group.
        top: list[QueueEntry] = []
        lists: dict[str, list[QueueEntry]] = {"": top}
        #: For each owner: its usage, its present rate, and the size of its requests so far.
        owners: dict[str, list[float]] = {}
        for place, (spent, lower, _, s) in enumerate(aged):
            asked, owner = s.request, s.owner
            known = owners.get(owner.name)
            if known is None:
                account = users.get(owner.name)
                known = [0.0] * 3 if account is None else [self.used(account), account.rate, 0.0]
                owners[owner.name] = known
            size = asked.memory * asked.devices / mean  # in devices
            used, rate, had = known
            known[2] = had + size
            item = spent, lower, used + HORIZON * (rate + had), place, size, s
            if path := tree.path(owner.group) if tree.groups else ():
                lists.setdefault(path[-1], []).append(item)
            else:
                top.append(item)
        for name in sorted(tree.groups, key=lambda g: -len(tree.path(g))) if tree.groups else ():
            members = lists.pop(name, None)
            if members is None:
                continue
            members.sort()
            weight, account, had = tree.groups[name].weight, groups.get(name), 0.0
            above = tree.path(name)[:-1]
            where = lists.setdefault(above[-1] if above else "", [])
            for spent, lower, _, place, size, s in members:
                where.append((spent, lower, self._score(account, had) / weight, place, size, s))
                had += size
        top.sort()
        return [item[-1] for item in top]

    def _score(self, account: Meter | None, before: float) -> float:
        if account is None:
            return HORIZON * before
        return self.used(account) + HORIZON * (account.rate + before)

    def used(self, account: Meter) -> float:
        """Return the dominant decayed usage of an account."""
        found = self._used.get(account)
        if found is None:
            facts = self.facts
            found = account.dominant(facts.now, facts.settings.half_life)
            self._used[account] = found
        return found

    # ------------------------------------------------------------------ shares

    def steps(self, owner: Owner) -> list[TreeStep]:
        """Return (account, weight, name) of the groups of an owner, and of the owner at the end."""
        found = self._steps.get(owner)
        if found is None:
            meters = self.facts.meters
            found = [
                (meters.groups.get(name), self.tree.groups[name].weight, f"group {name}")
                for name in self.tree.path(owner.group)
            ]
            found.append((meters.users.get(owner.name), 1.0, owner.name))
            self._steps[owner] = found
        return found

    def parts(self, owner: Owner) -> list[tuple[str, float, float]]:
        """Return (name, part used, part due) of an owner at each level of the tree.

        At each level, the owner or its group is compared with those siblings that use a GPU or
        wait, and with sibling groups that have past usage. The part used is its part of the sum of
        all their usage, the part due is its part of the sum of all their weights. The list is empty
        if past usage does not count.
        """
        if not self.fair:
            return []
        found = self._parts.get(owner)
        if found is not None:
            return found
        found = self._parts[owner] = []
        parent = ""
        if self._present is None:
            self._present = self._siblings()
        present = self._present
        for account, weight, name in self.steps(owner):
            total = weights = 0.0
            for sibling, other, heavy in present.get(parent, ()):
                if sibling != name:
                    total += other
                    weights += heavy
            mine = 0.0 if account is None else self.used(account)
            total += mine
            due = weight / (weights + weight)
            found.append((name, mine / total if total > 0 else 0.0, due))
            parent = name
        return found

    def _siblings(self) -> Mapping[str, list[tuple[str, float, float]]]:
        """Return, by the name of the parent, (name, usage, weight) of each child that uses a GPU or
        waits. The children are owners and groups. Groups with past usage are there in any case.
        """
        facts, tree = self.facts, self.tree
        found: dict[str, dict[str, tuple[float, float]]] = {}
        # Use a fixed order, because sums of floats depend on the order.
        owners = dict.fromkeys(s.owner for s in (*facts.leased.values(), *facts.waiting.values()))
        for owner in owners:
            parent = ""
            for account, weight, name in self.steps(owner):
                used = 0.0 if account is None else self.used(account)
                found.setdefault(parent, {})[name] = used, weight
                parent = name
        for name, account in facts.meters.groups.items():
            if name in tree.groups and (used := self.used(account)) > 0:
                above = tree.path(name)[:-1]
                parent = f"group {above[-1]}" if above else ""
                found.setdefault(parent, {})[f"group {name}"] = used, tree.groups[name].weight
        return {p: [(n, *x) for n, x in children.items()] for p, children in found.items()}

    def above(self, owner: Owner) -> bool:
        """Return whether an owner, or one of its groups, has used more than its fair share."""
        key = owner.name, owner.group
        found = self._above.get(key)
        if found is None:
            found = self.fair and any(used > due * ABOVE for _, used, due in self.parts(owner))
            self._above[key] = found
        return found

    def behind(self, asker: Owner, holder: Owner, gain: float) -> bool:
        """Return whether ``asker`` would have used less than ``holder`` even with ``gain`` added.

        The method compares usage divided by weight, where the two paths first differ. On each side
        it takes the usage of the group there, or of the owner if no group is left on its path.
        """
        parted = self._parted(asker, holder)
        if parted is None:
            return False
        (mine, light, _), (its, heavy, _) = parted
        a = 0.0 if mine is None else self.used(mine)
        b = 0.0 if its is None else self.used(its)
        return (a + gain) / light < b / heavy

    def behind_from(self, asker: Owner, holder: Owner, gain: float, since: float) -> float:
        """Return the first time from ``since`` on at which :meth:`behind` is true, if the rates
        stay as they are now; infinity if never.
        """
        parted = self._parted(asker, holder)
        half_life = self.facts.settings.half_life
        if parted is None or half_life <= 0:
            return math.inf
        (mine, light, _), (its, heavy, _) = parted
        latest = _part_left(since - self.facts.now, half_life)
        # Let d be the part of the present usage that is left at a later time: a smaller d stands
        # for a later time. As functions of d, the usage by memory and the usage by compute are
        # straight lines. The asker is behind at each d where one line of the holder is above both
        # lines of the asker. The largest of these d gives the first time.
        best = 0.0
        for end, slope in self._lines(its):
            low, high = 0.0, latest
            for other, its_slope in self._lines(mine):
                c = light * end - heavy * (other + gain)
                m = light * slope - heavy * its_slope
                if m > 0:
                    low = max(low, -c / m)
                elif m < 0:
                    high = min(high, -c / m)
                elif c <= 0:
                    high = 0.0
            if low < high:
                best = max(best, high)
        if best <= 0:
            return math.inf
        at = self.facts.now - half_life * math.log2(best)
        return max(since, at + EXACT) if best < latest else since

    def sides(self, owner: Owner) -> list[Side]:
        """Return the figures that :meth:`behind` compares at each of the owner's :meth:`steps`."""
        found = self._sides.get(owner)
        if found is None:
            found = self._sides[owner] = []
            d = _part_left(RECHECK, self.facts.settings.half_life)
            for account, weight, name in self.steps(owner):
                used = 0.0 if account is None else self.used(account)
                (c, m), (other_c, other_m) = self._lines(account)
                then, other = c + m * d, other_c + other_m * d
                bends = (c + m > other_c + other_m) != (then > other)
                found.append(Side(name, weight, used / weight, max(then, other) / weight, bends))
        return found

    def _lines(self, account: Meter | None) -> tuple[tuple[float, float], tuple[float, float]]:
        """Return the usage by memory and by compute, each as (c, m) for the line c + m x d.

        :meth:`behind_from` explains d.
        """
        if account is None:
            return (0.0, 0.0), (0.0, 0.0)
        if account in self._known_lines:
            return self._known_lines[account]
        half_life = self.facts.settings.half_life
        had = account.read(self.facts.now, half_life, None)
        memory, compute = (
            rate * half_life / LN2 for rate in (account.memory_rate, account.compute_rate)
        )
        # The usage on other machines counts in both sums (see Meter.dominant()), and only decays.
        found = (
            (memory, had.memory + had.elsewhere - memory),
            (compute, had.compute + had.elsewhere - compute),
        )
        self._known_lines[account] = found
        return found

    def _parted(self, one: Owner, other: Owner) -> tuple[TreeStep, TreeStep] | None:
        """Return the steps at which the paths of two owners separate; None if they never do."""
        for mine, its in zip(self.steps(one), self.steps(other), strict=False):
            if mine[2] != its[2]:
                return mine, its
        return None

    # ------------------------------------------------------------------ budgets

    def spent(self, owner: Owner) -> Budget | None:
        """Return a used-up daily budget of an owner or of one of its groups, or None.

        If several budgets are used up, return the budget with the strictest rule.
        """
        if not self.budgeted:
            return None
        key = owner.name, owner.group
        if key not in self._spent:
            found = [b for b in budgets(self.facts, owner, self.facts.now) if b.spent]
            self._spent[key] = min(found, key=lambda b: _ENDS.index(b.daily.then), default=None)
        return self._spent[key]


def level(s: Session, facts: Facts) -> int:
    """Return the class in which a waiting session competes: see :meth:`Shares.level`.

    If the session is too young to be raised, this function does not compute the shares.
    """
    settings = facts.settings
    if settings.ageing <= 0 or facts.now - s.wait.since + EXACT < settings.ageing:
        return settings.priority_classes.get(s.request.priority, 0)
    return Shares(facts).level(s)


def climbs_at(queue: Iterable[Session], facts: Facts) -> float:
    """Return when age may next raise one of the waiting sessions by a class; infinity if never.

    (Age does not raise the session if its owner is above its fair share at that time.)
    """
    settings, now, found = facts.settings, facts.now, math.inf
    if settings.ageing <= 0:
        return found
    classes = settings.priority_classes
    #: By class: the seconds of waiting after which age raises a session to each higher class.
    steps: dict[str, list[float]] = {}
    for s in queue:
        name, since = s.request.priority, s.wait.since
        if name not in steps:
            own = classes.get(name, 0)
            steps[name] = [settings.ageing * (n - own) for n in classes.values() if n > own]
        for step in steps[name]:
            if now < since + step < found:
                found = since + step
    return found


def _part_left(seconds: float, half_life: float) -> float:
    """Return the part of a usage that the decay leaves after ``seconds``."""
    return 2.0 ** (-max(0.0, seconds) / half_life) if half_life > 0 else 0.0


def _idle(s: Session) -> bool:
    return s.state == "idle"


#: What the pool does when a budget is used up; the strictest rule first.
_ENDS = ("stop", "refuse", "borrow")


@dataclass(frozen=True, slots=True)
class Budget:
    """The present state of a daily budget of an owner."""

    #: The group whose budget it is; "" for the owner's own.
    group: str
    daily: Daily
    #: GPU-seconds that count against it.
    used: float
    spent: bool
    #: When the budget will be used up. If it is ``spent`` already: when it will be available again.
    #: Both times assume that the rates stay as they are now; infinity stands for never.
    until: float

    @property
    def none(self) -> bool:
        """Whether the budget is 0 on every day."""
        return self.daily.seconds <= EXACT

    def soonest(self, now: float) -> float:
        """Return when a spent budget is available again if nothing uses it from ``now`` on."""
        if self.until < math.inf or self.none:
            return self.until
        refill = self.daily.refill
        return (
            now + max(0.0, self.used - back_at(self.daily)) * DAY / refill if refill else math.inf
        )


def budgets(facts: Facts, owner: Owner, now: float) -> list[Budget]:
    """Return the daily budgets of an owner and its groups at ``now``."""
    rules, meters = facts.settings, facts.meters
    found: list[Budget] = []
    if not facts.tree.budgeted:
        return found
    accounts = [("", rules.quota_of(owner.name).daily, meters.users.get(owner.name))]
    for name in facts.tree.with_budget(owner.group):
        accounts.append((name, rules.groups[name].daily, meters.groups.get(name)))
    for name, daily, known in accounts:
        if daily is not None:
            account = known or Meter(now)
            until = account.changes_at(now, daily)
            found.append(Budget(name, daily, *account.budget(now, daily), until))
    return found


def budget_changes_at(facts: Facts, owner: Owner) -> float:
    """Return when a daily budget of an owner is next used up or available again; infinity if
    never.
    """
    return min((budget.until for budget in budgets(facts, owner, facts.now)), default=math.inf)
