# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The settings in force at any time: the settings of the files, changed by the schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Iterator, Mapping, Sequence

from .calendar import HORIZON, changes, in_force, next_change
from .mistakes import Fault, OptionKey, WrongConfiguration
from .settings import BrokerSettings

#: The checks of the schedules cover the next YEAR seconds.
YEAR = 366 * 86400.0

#: The indices of the rules that are in force at the same time.
Rules = tuple[int, ...]


class Timetable:
    """The settings in force at any time. Pure: the caller passes the time.

    Parameters
    ----------
    base:
        The settings while no rule is in force.
    make:
        A function. It returns the settings that apply while the given rules are in force. If these
        settings have mistakes, it raises :class:`WrongConfiguration`.
    place:
        A function. It adds the file and the line to a mistake.
    """

    def __init__(
        self,
        base: BrokerSettings,
        make: Callable[[Rules], BrokerSettings],
        place: Callable[[Fault], Fault] = lambda fault: fault,
    ) -> None:
        self.base = base
        self.place = place
        self._rules = [schedule.rule for schedule in base.schedules]
        self._make = make
        self._combinations: tuple[float, tuple[Rules, ...]] = (-1.0, ())
        self._made: dict[Rules, BrokerSettings] = {(): base}

    def rules(self, now: float) -> Rules:
        """Return the rules in force at ``now`` (seconds since the epoch)."""
        return in_force(self._rules, now)

    def under(self, rules: Rules) -> BrokerSettings:
        """Return the settings while ``rules`` are in force."""
        if rules not in self._made:
            self._made[rules] = self._make(rules)
        return self._made[rules]

    def next_change(self, now: float) -> tuple[int, Rules] | None:
        """Return when the rules in force change next, and the rules in force from then on.

        The result is None if the rules in force never change.
        """
        return next_change(self._rules, now)

    def classes_open(self, now: float) -> dict[str, float]:
        """Return, for each priority class that is forbidden now, when it is allowed again.

        If a class stays forbidden for the next :data:`~.calendar.HORIZON` seconds, the result does
        not contain the class.
        """
        found: dict[str, float] = {}
        pool = self.under(self.rules(now)).pool
        closed = {*pool.priority_classes}
        closed -= closed if pool.classes_allowed is None else pool.classes_allowed
        for at, rules in changes(self._rules, now, now + HORIZON) if closed else ():
            allowed = self.under(rules).pool.classes_allowed
            opened = closed if allowed is None else closed & allowed
            found.update(dict.fromkeys(opened, float(at)))
            closed = closed - opened
            if not closed:
                break
        return found

    def names(self, rules: Rules) -> tuple[str, ...]:
        """Return the names of ``rules``."""
        return tuple(self._rules[index].name for index in rules)

    def combinations(self, now: float) -> list[Rules]:
        """Return each set of rules that is in force at some time in the next year.

        The first set in the list is in force at ``now``.
        """
        day = now // 86400
        # changes() takes tens of milliseconds, so this method calls it only once a day.
        if self._combinations[0] != day:
            found = (rules for _, rules in changes(self._rules, now, now + YEAR))
            self._combinations = day, (*dict.fromkeys(found),)
        return [*dict.fromkeys([self.rules(now), *self._combinations[1]])]

    def faults(
        self, now: float, check: Callable[[BrokerSettings], Sequence[Fault]] = lambda _: ()
    ) -> list[Fault]:
        """Return all mistakes that the settings have at any time in the next year, each only once.

        ``check`` returns the mistakes in given settings. If a mistake also exists without
        schedules, it is reported at its own option. Any other mistake is reported at the schedule
        that sets the wrong value. If several schedules set parts of the value, the schedule with
        the longest path towards the value counts. Of schedules with equal paths, the last counts.
        """
        known = {(fault.option, fault.keys, fault.message): fault for fault in check(self.base)}
        for rules in filter(None, self.combinations(now)):
            try:
                found = check(self.under(rules))
            except WrongConfiguration as error:
                found = error.faults
            for fault in found:
                identity = fault.option, fault.keys, fault.message
                known.setdefault(identity, self._of_schedules(fault, rules))
        return [self.place(fault) for fault in known.values()]

    def overruled(self, now: float) -> list[str]:
        """Return a sentence for each schedule that sets a value without effect.

        A value has no effect if later schedules in the list overwrite it whenever this schedule is
        in force in the next year.
        """
        schedules, found = self.base.schedules, []
        combinations = self.combinations(now)
        for index, schedule in enumerate(schedules):
            lost: dict[str, set[int]] = {}
            together = [rules for rules in combinations if index in rules]
            for path in _leaves(schedule.values):
                over = [
                    [i for i in rules if i > index and _sets(schedules[i].values, path)]
                    for rules in together
                ]
                if over and all(over):
                    name = path[0] + "".join(f"[{key!r}]" for key in path[1:])
                    lost[name] = {i for some in over for i in some}
            if lost:
                rivals = [schedules[i].name for i in sorted(set.union(*lost.values()))]
                found.append(_in_vain(schedule.name, [*lost], rivals))
        return found

    def _of_schedules(self, fault: Fault, rules: Rules) -> Fault:
        names = " and ".join(map(repr, self.names(rules)))
        path: tuple[OptionKey, ...] = (fault.option, *fault.keys)
        best: tuple[OptionKey, ...] = (rules[-1], "set")
        for index in rules:
            keys = (index, "set", *_written(self.base.schedules[index].values, path))
            if len(keys) >= len(best):
                best = keys
        message = f"With {names} in force: {_begun(fault)}"
        return replace(fault, message=message, option="schedules", keys=best, origin="", line=None)


def _in_vain(name: str, options: Sequence[str], rivals: Sequence[str]) -> str:
    them = "it" if len(options) == 1 else "them"
    what, either = " and ".join(options), " or ".join(map(repr, rivals))
    all_of = " and ".join(map(repr, rivals))
    return (
        f"The schedule {name!r} sets {what} without effect: whenever this schedule is in force, "
        f"{either} also sets {them}, and the last of such schedules in the list wins. Put {name!r} "
        f"after {all_of}, or remove {what} from {all_of}."
    )


def _leaves(values: Mapping[Any, Any], above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value that a schedule sets: the keys that lead to the value."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key)


def _sets(values: Any, path: Sequence[Any]) -> bool:
    """Return whether a schedule with ``values`` sets the value at ``path``, a list of keys."""
    for key in path:
        if not isinstance(values, Mapping):
            return True  # the schedule replaces the whole dict
        if key not in values:
            return False
        values = values[key]
    return True


def _begun(fault: Fault) -> str:
    """Return the message of a fault. If the fault has no keys, the option's name comes first."""
    return fault.message if fault.keys else f"c.GPUPool.{fault.option}: {fault.message}"


def _written(values: Mapping[str, Any], path: Sequence[OptionKey]) -> tuple[OptionKey, ...]:
    """Return the keys of ``path`` before the first key that ``values`` does not contain."""
    found: list[OptionKey] = []
    at: Any = values
    for key in path:
        if not isinstance(at, Mapping) or key not in at:
            break
        found.append(key)
        at = at[key]
    return tuple(found)
