# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads ``c.GPUPool.groups``: what each group gets, and who is in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isnan
from typing import Any, Callable, Iterable, Mapping, get_args

from ..pool.groups import Daily, DailyEnd, DailyRule, Group, Portion
from ..text import did_you_mean, one_of
from ..units import LEAST_BYTES, parse_bytes, parse_seconds
from .mistakes import Fault, WrongValue

KEYS = ("parent", "users", "unix_groups", "hub_groups", "order", "guarantee", "weight", "cap",
        "gpu_seconds_per_day")  # fmt: skip
DAILY_KEYS = ("seconds", "rule", "renews", "then")

_NAME = re.compile(r"[^\W_][\w.-]{0,63}")
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})")
_DEVICES = re.compile(r"([0-9]*\.?[0-9]+)\s*(?:devices?|gpus?)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Members:
    """Who is in a group: named users, members of Unix groups and Hub groups, or everybody.

    A user may be in several groups. They have three ranks: groups that name the user come first,
    then groups with a Unix group or a Hub group of the user, then groups for all users. Inside a
    rank, the group with the lowest ``order`` comes first. Groups with the same ``order`` stay in
    the order in which the configuration lists them.
    """

    users: tuple[str, ...] = ()
    unix_groups: tuple[str, ...] = ()
    hub_groups: tuple[str, ...] = ()
    everybody: bool = False
    order: float | None = None

    @property
    def asks(self) -> bool:
        """Whether the broker must ask the system or the Hub for the members of the group."""
        return bool(self.unix_groups or self.hub_groups)


@dataclass(frozen=True, slots=True)
class Groups:
    """The value of ``c.GPUPool.groups``."""

    tree: Mapping[str, Group]
    members: Mapping[str, Members]


def groups_of(
    members: Mapping[str, Members],
    user: str,
    unix_groups: Iterable[str],
    hub_groups: Iterable[str] = (),
) -> tuple[str, ...]:
    """Return the groups of ``user``. A kernel belongs to the first one if it chooses no other."""
    found: list[tuple[int, float, int, str]] = []
    unix, hub = frozenset(unix_groups), frozenset(hub_groups)
    for place, (name, rule) in enumerate(members.items()):
        rank = (
            0 if user in rule.users
            else 1 if not (unix.isdisjoint(rule.unix_groups) and hub.isdisjoint(rule.hub_groups))
            else 2 if rule.everybody
            else None
        )  # fmt: skip
        if rank is not None:
            order = float("inf") if rule.order is None else rule.order
            found.append((rank, order, place, name))
    return tuple(name for *_, name in sorted(found))


# ---------------------------------------------------------------------- reading


def read_groups(value: Mapping[Any, Any]) -> Groups:
    """Check the value of ``c.GPUPool.groups``, and return it in the form for the broker.

    Raises
    ------
    WrongValue
        With the mistakes of all groups, each with the keys that lead to it. This function does not
        check whether groups contradict each other.
    """
    faults: list[Fault] = []
    tree, members = {}, {}
    for name, entry in value.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            faults.append(
                Fault(
                    f"{name!r} is not a name for a group.",
                    "Use up to 64 letters, digits, '_', '-' and '.', and begin with a letter or "
                    "digit.",
                )
            )
        elif not isinstance(entry, Mapping):
            faults.append(
                Fault(
                    f"The value of the group {name!r} is {entry!r}, not a dict.",
                    "Write a dict such as {'guarantee': '40%', 'users': ['ada']}.",
                    keys=(name,),
                )
            )
        else:
            tree[name], members[name] = _read_group(name, entry, faults)
    if faults:
        raise WrongValue(faults)
    return Groups(tree, members)


def _read_group(name: str, entry: Mapping[Any, Any], faults: list[Fault]) -> tuple[Group, Members]:
    found: dict[str, Any] = {}
    for key, value in entry.items():
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS, then=f"Allowed are {one_of(KEYS)}.")
            faults.append(Fault(f"A group has no {key!r}.", hint, keys=(name, key)))
            continue
        if value is None:
            continue
        try:
            found[key] = _READERS[key](value)
        except WrongValue as error:
            faults += [fault.inside(name, key) for fault in error.faults]
        except ValueError as error:
            faults.append(Fault(str(error), keys=(name, key)))
    users = found.get("users", ())
    group = Group(
        parent=found.get("parent", ""),
        guarantee=found.get("guarantee"),
        weight=found.get("weight", 1.0),
        cap=found.get("cap"),
        daily=found.get("gpu_seconds_per_day"),
    )
    everybody = users == "*"
    return group, Members(
        users=() if everybody else users,
        unix_groups=found.get("unix_groups", ()),
        hub_groups=found.get("hub_groups", ()),
        everybody=everybody,
        order=found.get("order"),
    )


def _read_parent(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not the name of a group.")
    return value


def _read_users(value: Any) -> tuple[str, ...] | str:
    if value == "*":
        return "*"
    names = _read_names(value, "user", "['ada', 'bob'], or '*' for everybody")
    if "*" in names:
        raise ValueError("'*' is in a list of names. For everybody, write '*' without a list.")
    return names


def _read_unix_groups(value: Any) -> tuple[str, ...]:
    return _read_names(value, "Unix group", "['research']")


def _read_hub_groups(value: Any) -> tuple[str, ...]:
    return _read_names(value, "Hub group", "['research']")


def _read_names(value: Any, what: str, example: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{value!r} is not a list of names. Write {example}.")
    for name in value:
        if not isinstance(name, str) or not name.strip() or name != name.strip():
            raise ValueError(f"{name!r} is not the name of a {what}. Write {example}.")
        if name.startswith("@"):
            raise ValueError(f"{name!r} begins with '@'. Write Unix groups in 'unix_groups'.")
    doubled = sorted({name for name in value if value.count(name) > 1})
    if doubled:
        raise ValueError(f"{doubled[0]!r} is listed twice.")
    return tuple(value)


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or isnan(value):
        raise ValueError(f"{value!r} is not a number.")
    return float(value)


def _read_weight(value: Any) -> float:
    number = _read_number(value)
    if not 0 < number <= 1_000_000:
        raise ValueError(
            f"The weight is {value!r}. Write a number above zero; of what is left over, a group "
            "with weight 2 gets twice as much as a group with weight 1."
        )
    return number


def read_bytes(value: Any) -> int:
    """Return the bytes of a size. Refuse a small number without a unit as a probable mistake.

    Raises
    ------
    ValueError
        With a sentence for people.
    """
    found = parse_bytes(value)
    if not isinstance(value, str) and found < LEAST_BYTES:
        raise ValueError(f"{value} means {value} bytes. Write a unit, such as '{value}GiB'.")
    return found


def read_portion(value: Any) -> Portion:
    """Return a part of the pool: ``"40%"``, ``"2 devices"``, ``"24GiB"`` or bytes.

    Raises
    ------
    ValueError
        With a sentence for people.
    """
    form = "Write '40%' of the pool's memory, '2 devices', or a size like '24GiB'."
    text = value.strip() if isinstance(value, str) else ""
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            raise ValueError(f"{value!r} is not a part of the pool. {form}") from None
        if not 0 < percent <= 100:
            raise ValueError(f"{value!r} must be above 0% and at most 100%. {form}")
        return Portion(percent=percent)
    devices = _DEVICES.fullmatch(text)
    if devices:
        if not float(devices[1]) > 0:
            raise ValueError(f"{value!r} is not above zero. {form}")
        return Portion(devices=float(devices[1]))
    try:
        parse_bytes(value)
    except ValueError:
        raise ValueError(f"{value!r} is not a part of the pool. {form}") from None
    try:
        return Portion(bytes=read_bytes(value))
    except ValueError:
        raise ValueError(f"{value} means {value} bytes. {form}") from None


def read_daily(value: Any) -> Daily:
    """Return a budget of GPU-seconds per day: seconds, ``"8h"``, or a dict with a rule.

    Raises
    ------
    WrongValue
        If ``value`` is a dict with mistakes. The error contains all of them.
    ValueError
        If ``value`` is no dict and is wrong. The error's text is a sentence for people.
    """
    if not isinstance(value, Mapping):
        return Daily(_read_seconds(value))
    faults = []
    for key in value:
        if key not in DAILY_KEYS:
            hint = did_you_mean(str(key), DAILY_KEYS, then=f"Allowed are {one_of(DAILY_KEYS)}.")
            faults.append(Fault(f"A daily budget has no {key!r}.", hint, keys=(key,)))
    found: dict[str, Any] = {"rule": "window", "then": "borrow"}
    for key, allowed in (("rule", get_args(DailyRule)), ("then", get_args(DailyEnd))):
        found[key] = value.get(key, found[key])
        if found[key] not in allowed:
            hint = did_you_mean(str(found[key]), allowed, then=f"Allowed are {one_of(allowed)}.")
            faults.append(Fault(f"{found[key]!r} is not allowed.", hint, keys=(key,)))
    try:
        found["renews"] = _read_renews(value.get("renews", "00:00"))
    except ValueError as error:
        faults.append(Fault(str(error), keys=("renews",)))
    if "seconds" not in value:
        faults.append(Fault("The daily budget has no 'seconds'.", "Write {'seconds': '8h'}."))
    else:
        try:
            found["seconds"] = _read_seconds(value["seconds"])
        except ValueError as error:
            faults.append(Fault(str(error), keys=("seconds",)))
    if faults:
        raise WrongValue(faults)
    return Daily(**found)


def _read_renews(value: Any) -> float:
    match = _CLOCK.fullmatch(value) if isinstance(value, str) else None
    if match is None or int(match[1]) > 23 or int(match[2]) > 59:
        raise ValueError(f"{value!r} is not a time of the day in UTC. Write text such as '05:00'.")
    return int(match[1]) * 3600.0 + int(match[2]) * 60.0


def _read_seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(
            f"{value!r} is not a daily budget. Write GPU-seconds, text like '8h', or a dict such "
            "as {'seconds': '8h', 'rule': 'refill', 'then': 'refuse'}."
        )
    if str(value).strip() in ("0", "0.0"):
        return 0.0
    return parse_seconds(value)


_READERS: dict[str, Callable[[Any], Any]] = {
    "parent": _read_parent,
    "users": _read_users,
    "unix_groups": _read_unix_groups,
    "hub_groups": _read_hub_groups,
    "order": _read_number,
    "guarantee": read_portion,
    "weight": _read_weight,
    "cap": read_portion,
    "gpu_seconds_per_day": read_daily,
}
