# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads ``c.GPUPool.schedules``: rules of a calendar, and the options that each rule sets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timezone, tzinfo
from functools import lru_cache
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ..text import did_you_mean, one_of
from .calendar import DAY, RuleTimes
from .mistakes import Fault, OptionKey, WrongValue

KEYS = ("name", "days", "hours", "time_zone", "set")

#: Marks a key that has no default.
_NEEDED = object()

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")

#: The keys of a group that a schedule may set. A schedule cannot change the members of a group.
GROUP_KEYS = ("guarantee", "weight", "cap", "gpu_seconds_per_day")

_SPAN = re.compile(r"(\d{1,2}):(\d{2})\s*-\s*(\d{1,2}):(\d{2})")

#: The file with the system's time zone.
LOCALTIME = Path("/etc/localtime")


@dataclass(frozen=True)
class Schedule:
    """A rule, and the values that options have while the rule is in force.

    ``values`` is the dict that the admin has written under "set".
    """

    rule: RuleTimes
    #: The name of the rule's time zone, for messages.
    zone: str
    #: The rule's days and hours as the admin has written them, for messages.
    written: str
    values: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the rule."""
        return self.rule.name


def read_schedules(value: Sequence[Any]) -> tuple[Schedule, ...]:
    """Return the schedules in ``c.GPUPool.schedules``, without a check of what they set.

    Raises
    ------
    WrongValue
        If a schedule has a mistake. The error lists all mistakes. Each mistake has the keys that
        lead to the wrong value.
    """
    faults: list[Fault] = []
    found: list[Schedule] = []
    for index, entry in enumerate(value):
        if not isinstance(entry, Mapping):
            text = f"{entry!r} is not a schedule. Write a dict with 'name', 'hours' and 'set'."
            faults.append(Fault(text, keys=(index,)))
            continue
        wrong = len(faults)
        schedule = _read_schedule(index, entry, faults)
        if len(faults) == wrong:
            assert schedule is not None
            found.append(schedule)
            if [one.name for one in found].count(schedule.name) > 1:
                text = f"Another schedule has the name {schedule.name!r}."
                faults.append(Fault(text, "Give each schedule its own name.", keys=(index, "name")))
    if faults:
        raise WrongValue(faults)
    return tuple(found)


def _read_schedule(index: int, entry: Mapping[Any, Any], faults: list[Fault]) -> Schedule | None:
    for key in entry:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS, then=f"Allowed are {one_of(KEYS)}.")
            faults.append(Fault(f"A schedule has no {key!r}.", hint, keys=(index, key)))
    for key, example in (("name", "'night'"), ("set", "{'idle_timeout': '1h'}")):
        if key not in entry:
            text = f"The schedule has no {key!r}. Write {{{key!r}: {example}}}."
            faults.append(Fault(text, keys=(index,)))
    found: dict[str, Any] = {}
    for key, read, default in (
        ("name", _read_name, _NEEDED),
        ("days", _read_days, "mon-sun"),
        ("hours", _read_hours, "00:00-24:00"),
        ("time_zone", _read_zone, None),
        ("set", _read_set, _NEEDED),
    ):
        if key not in entry and default is _NEEDED:
            continue
        try:
            found[key] = read(entry.get(key, default))
        except ValueError as error:
            faults.append(Fault(str(error), keys=(index, key)))
    if len(found) < len(KEYS):
        return None
    zone, name = found["time_zone"]
    days, hours = entry.get("days", ""), entry.get("hours", "00:00-24:00")
    words = [text if isinstance(text, str) else ", ".join(text) for text in (days, hours)]
    rule = RuleTimes(found["name"], found["days"], found["hours"], zone)
    return Schedule(rule, name, " ".join(filter(None, words)), found["set"])


def _read_name(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 64:
        raise ValueError(f"{value!r} is not a name. Write text of up to 64 characters.")
    return value


def _read_set(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(
            f"{value!r} sets nothing. Write a dict of options, such as {{'idle_timeout': '1h'}}."
        )
    return dict(value)


def _parts(value: Any, what: str) -> list[str]:
    """Return the texts in ``value``: a list of texts, or one text with commas between them."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not parts:
        raise ValueError(f"{value!r} is not {what}")
    if not all(isinstance(part, str) and part.strip() for part in parts):
        raise ValueError(f"{value!r} is not {what}")
    return [part.strip() for part in parts]


def _read_days(value: Any) -> frozenset[int]:
    what = "a list of days. Write text such as 'mon-fri' or 'mon, wed, sat-sun'."
    found: set[int] = set()
    for part in _parts(value, what):
        first, dash, last = part.partition("-")
        begin = _day(first)
        end = _day(last) if dash else begin
        found.update((begin + n) % 7 for n in range((end - begin) % 7 + 1))
    return frozenset(found)


def _day(text: str) -> int:
    name = text.strip().lower()
    for index, day in enumerate(DAYS):
        if name in (day, day[:3]):
            return index
    short = [day[:3] for day in DAYS]
    hint = did_you_mean(name, [*short, *DAYS], then=f"Write {one_of(short)}.")
    raise ValueError(f"{text.strip()!r} is not a day. {hint}")


def _read_hours(value: Any) -> tuple[tuple[int, int], ...]:
    what = "a span of hours. Write text such as '20:00-08:00' or '08:00-12:00, 13:00-18:00'."
    return tuple(_span(part, what) for part in _parts(value, what))


def _span(text: str, what: str) -> tuple[int, int]:
    match = _SPAN.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not {what}")
    first, last = (int(match[n]) * 60 + int(match[n + 1]) for n in (1, 3))
    if int(match[2]) > 59 or int(match[4]) > 59 or first >= DAY or last > DAY:
        raise ValueError(
            f"{text!r} has a time outside the day. Write times from '00:00' to '24:00'."
        )
    if first == last:
        raise ValueError(
            f"{text!r} begins and ends at the same time. Write '00:00-24:00' for the whole day."
        )
    return first, last


def _read_zone(value: Any) -> tuple[tzinfo, str]:
    if value is None:
        return machine_zone()
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a time zone. Write a name such as 'Europe/Berlin'.")
    try:
        return ZoneInfo(value), value
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    known = _zones()
    if not known:
        raise ValueError(
            f"The time zone {value!r} cannot be read: this machine has no time zone data. Install "
            "the package tzdata, of the system or of Python."
        )
    hint = did_you_mean(value, known, then="Write a name such as 'Europe/Berlin' or 'UTC'.")
    raise ValueError(f"There is no time zone {value!r}. {hint}")


@lru_cache(maxsize=1)
def _zones() -> tuple[str, ...]:
    return tuple(sorted(available_timezones()))


def machine_zone() -> tuple[tzinfo, str]:
    """Return the time zone of this machine, and its name."""
    given = os.environ.get("TZ", "").removeprefix(":")
    for path in (given, os.path.realpath(LOCALTIME)):
        name = path.rpartition("/zoneinfo/")[2]
        if name and not name.startswith("/"):
            try:
                return ZoneInfo(name), name
            except (ZoneInfoNotFoundError, ValueError, OSError):
                continue
    try:
        with LOCALTIME.open("rb") as file:
            return ZoneInfo.from_file(file, key="this machine's"), "this machine's"
    except (OSError, ValueError):
        return timezone.utc, "UTC"


# ---------------------------------------------------------------------- what they set


def with_value(old: Any, new: Any) -> Any:
    """Return the value of an option that is ``old`` before a schedule sets ``new``.

    If both values are dicts, they are merged key by key. Otherwise the result is ``new``.
    """
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: with_value(old.get(key), value) for key, value in new.items()}}


def wrong_settings(
    schedules: Sequence[Schedule], known: Iterable[str], fixed: Iterable[str], groups: Iterable[str]
) -> list[Fault]:
    """Return a fault for each option, group or key of a group that a schedule must not set.

    ``known`` are the names of all options, ``fixed`` the options that need a restart of the broker,
    and ``groups`` the names of all groups.
    """
    faults: list[Fault] = []

    def note(text: str, hint: str, *keys: OptionKey) -> None:
        faults.append(Fault(text, hint, "schedules", keys))

    known, fixed, groups = [*known], {*fixed}, [*groups]
    for index, schedule in enumerate(schedules):
        for name in schedule.values:
            keys = (index, "set", name)
            if name not in known:
                note(f"There is no option {name!r}.", did_you_mean(str(name), known), *keys)
            elif name in ("schedules", "hub_groups"):
                text = f"A schedule cannot set {name!r}."
                note(text, f"Remove {name!r} from the schedule.", *keys)
            elif name in fixed:
                text = f"A change of {name!r} takes effect only when the broker starts."
                note(text, f"Remove {name!r} from the schedule.", *keys)
        changed = schedule.values.get("groups")
        for group, entry in changed.items() if isinstance(changed, Mapping) else ():
            within: tuple[OptionKey, ...] = (index, "set", "groups", group)
            if group not in groups:
                then = "If the group is new, add it to c.GPUPool.groups."
                hint = did_you_mean(str(group), groups, then=then)
                note(f"There is no group {group!r}.", hint, *within)
            for key in entry if isinstance(entry, Mapping) else ():
                if key not in GROUP_KEYS:
                    text = f"A schedule cannot set {key!r} of a group."
                    note(text, f"A schedule can set {one_of(GROUP_KEYS)}.", *within, key)
    return faults
