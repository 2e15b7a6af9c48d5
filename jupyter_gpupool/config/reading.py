# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Reads the values that an admin writes: sizes, durations, quotas, devices, paths.

A reader returns the value for the broker, or raises ``ValueError`` with a sentence for people.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from traitlets import TraitError, TraitType

from .. import local_machine
from ..endpoint import check_path
from ..errors import BrokerUnavailable
from ..pool.model import PREEMPT_ALL, PreemptRule, Quota
from ..text import did_you_mean, one_of
from ..units import parse_bytes, parse_seconds
from .grouping import read_bytes, read_daily
from .mistakes import Fault, WrongValue

#: A function that returns the Hub groups of the user with a given name.
HubGroups = Callable[[str], Iterable[str]]

#: For each key of the option ``quotas`` that differs from its field in :class:`Quota`: the field.
_QUOTA_FIELDS = {"gpu_seconds_per_day": "daily"}
QUOTA_KEYS = tuple(
    {field: key for key, field in _QUOTA_FIELDS.items()}.get(f.name, f.name) for f in fields(Quota)
)

#: If the reserve is a share of a limit, and the share is not 0, the reserve is at least
#: LEAST_RESERVE bytes, or a quarter of the limit (limit // MOST_RESERVE_PART) if that is less.
LEAST_RESERVE, MOST_RESERVE_PART = 1 << 30, 4


#: The maximum number of folders in ``cluster_data``, and the maximum number of characters of each
#: path. Both are limited because each report of a machine to the cluster contains all paths.
MOST_FOLDERS, MOST_PATH = 8, 200


@dataclass(frozen=True, slots=True)
class HostReserve:
    """The host memory that suspends must leave free: ``size`` bytes, or a share of each limit.

    ``share`` counts only if ``size`` is None.
    """

    share: float = 0.1
    size: int | None = None

    def of(self, limit: int, *, machine: bool) -> int:
        """Return how many bytes of ``limit`` must stay free.

        ``limit`` is the memory of the machine, or the memory limit of a control group.

        - Share above 0: the result is at least 1 GiB, or a quarter of ``limit`` if that is less.
        - Fixed size: in a control group, the result is at most a quarter of ``limit``. So a small
          control group still has room for suspended state.
        """
        scaled = limit // MOST_RESERVE_PART
        if self.size is not None:
            return min(self.size, limit if machine else scaled)
        return max(int(limit * self.share), min(LEAST_RESERVE, scaled)) if self.share else 0


# ---------------------------------------------------------------------- traits


class _Quantity(TraitType[Any, Any]):
    """A trait whose value is a number, or text with a unit.

    ``zero`` says whether the value 0 is allowed. Any other value must be at least ``least``.
    """

    what = ""
    nothing: float = 0.0

    def __init__(
        self, default: Any, *, zero: bool = False, least: float = 0, **kwargs: Any
    ) -> None:
        self.zero = zero
        self.least = least
        super().__init__(default, **kwargs)

    def from_string(self, s: str) -> Any:
        """Return the value of ``--GPUPool.name=s``."""
        return None if self.allow_none and s == "None" else s

    def read(self, value: Any) -> float:
        raise NotImplementedError

    def validate(self, obj: Any, value: Any) -> Any:  # noqa: ARG002 (traitlets' contract)
        """Return ``value`` as a plain number, or raise an error with the reason."""
        if not isinstance(value, (int, float, str)) or isinstance(value, bool):
            raise TraitError(f"{value!r} is not {self.what}")
        if self.zero and str(value).strip() in ("0", "0.0"):
            return self.nothing
        try:
            found = self.read(value)
        except ValueError as error:
            raise TraitError(str(error)) from None
        if found < self.least:
            raise TraitError(f"{value!r} is too small. Write {self.least:g} or more.")
        return found


class Size(_Quantity):
    """Bytes: an int, or text such as ``"12GiB"``."""

    nothing = 0
    what = "a size. Write a number of bytes, or text like '12GiB'."

    def read(self, value: Any) -> int:
        if isinstance(value, float):
            raise ValueError(f"{value!r} is not a whole number of bytes.")
        return read_bytes(value)


class Seconds(_Quantity):
    """Seconds: a number, or text such as ``"10m"``."""

    what = "a duration. Write a number of seconds, or text like '10m'."

    def read(self, value: Any) -> float:
        return parse_seconds(value)


class Share(_Quantity):
    """A part of a whole: a number between 0 and 1, or text such as ``"10%"``."""

    what = "a share. Write a number like 0.1, or text like '10%'."

    def read(self, value: Any) -> float:
        text = str(value).strip()
        try:
            found = float(text[:-1]) / 100 if text.endswith("%") else float(text)
        except ValueError:
            found = 0.0
        if not 0 < found < 1:
            raise ValueError(f"{value!r} is not a share above 0 and below 1. Write 0.1 or '10%'.")
        return found


# ---------------------------------------------------------------------- readers


def read_quotas(value: Mapping[Any, Any]) -> dict[str, Quota]:
    """Return ``c.GPUPool.quotas`` as one :class:`Quota` for each user name.

    If the option has mistakes, this function raises one :class:`WrongValue` that lists all of them.
    """
    quotas, faults = {}, []
    for owner, entry in value.items():
        if not isinstance(owner, str) or not owner.strip():
            text = f"{owner!r} is not a user name. Write a name, or '*' for all others."
            faults.append(Fault(text))
        elif owner.startswith("@"):
            text = (
                f"{owner!r} looks like a group, but quotas are per user. Write names of users, or "
                "'*' for all others. For groups, use c.GPUPool.groups."
            )
            faults.append(Fault(text))
        elif not isinstance(entry, Mapping):
            text = f"{entry!r} is not a quota. Write a dict such as {{'memory': '16GiB'}}."
            faults.append(Fault(text, keys=(owner,)))
        else:
            quotas[owner] = _read_quota(owner, entry, faults)
    if faults:
        raise WrongValue(faults)
    return quotas


def _read_quota(owner: str, entry: Mapping[Any, Any], faults: list[Fault]) -> Quota:
    found: dict[str, Any] = {}
    for key, limit in entry.items():
        if key not in QUOTA_KEYS:
            hint = did_you_mean(str(key), QUOTA_KEYS, then=f"Allowed are {one_of(QUOTA_KEYS)}.")
            faults.append(Fault(f"A quota has no {key!r}.", hint, keys=(owner, key)))
            continue
        try:
            found[_QUOTA_FIELDS.get(key, key)] = None if limit is None else _limit(key, limit)
        except WrongValue as error:
            faults += [fault.inside(owner, key) for fault in error.faults]
        except ValueError as error:
            faults.append(Fault(str(error), keys=(owner, key)))
    return Quota(**found)


def _limit(key: str, limit: Any) -> Any:
    if key == "gpu_seconds_per_day":
        return read_daily(limit)
    if key in ("memory", "suspended"):
        return 0 if type(limit) is int and limit == 0 else read_bytes(limit)
    if type(limit) is not int or limit < 0:
        raise ValueError(f"{limit!r} is not a limit. Write a whole number, 0 or more.")
    return limit


def read_priority_classes(value: Mapping[Any, Any]) -> dict[str, int]:
    """Return ``c.GPUPool.priority_classes``."""
    if not value:
        raise ValueError("There must be at least one priority class, such as {'notebook': 100}.")
    for name, number in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is not a name for a priority class. Use letters and '_'.")
        if type(number) is not int:
            raise ValueError(
                f"The priority class {name!r} has the value {number!r}. Write a whole number."
            )
    return dict(value)


def read_preempt(value: Sequence[str]) -> frozenset[PreemptRule]:
    """Return ``c.GPUPool.preempt``."""
    for name in value:
        if name not in PREEMPT_ALL:
            rules = sorted(PREEMPT_ALL)
            hint = did_you_mean(name, rules, then=f"Allowed are {one_of(rules)}.")
            raise ValueError(f"There is no rule {name!r}. {hint}")
    return frozenset(rule for rule in PREEMPT_ALL if rule in value)


def read_unsuspendable_after(value: Sequence[Any]) -> tuple[float, float, float]:
    """Return the three durations in ``c.GPUPool.unsuspendable_after``, in seconds."""
    if len(value) != 3:
        raise ValueError(
            "Write three durations: after how long the broker warns the user, asks the user to end "
            "the kernel, and ends it, such as ['1m', '10m', '1h']."
        )
    first, second, third = (parse_seconds(one) for one in value)
    if not first <= second <= third:
        raise ValueError(
            "The warning comes first, then the request, then the end. Write three durations, each "
            "at least as long as the one before."
        )
    return first, second, third


def read_devices(value: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return ``c.GPUPool.devices`` as texts; None means every device."""
    if value is None:
        return None
    if not value:
        raise ValueError("The list is empty, so the pool would have no GPU. Use None for all GPUs.")
    found: list[str] = []
    for entry in value:
        index = type(entry) is int and entry >= 0
        text = str(entry).strip()
        if not index and not (
            isinstance(entry, str)
            and (text.isdigit() or re.match(r"(GPU|MIG)-[0-9A-Za-z-]+$", text))
        ):
            raise ValueError(
                f"{entry!r} is not an index or a UUID of a GPU. Write an index such as 0, or the "
                "beginning of a UUID such as 'GPU-5d1c'; `nvidia-smi -L` shows both."
            )
        if text in found:
            raise ValueError(f"{text!r} is listed twice.")
        found.append(text)
    return tuple(found)


def read_function(value: Any) -> HubGroups | None:
    """Return ``c.GPUPool.hub_groups``."""
    if value is not None and not callable(value):
        raise ValueError(
            f"{value!r} is not a function. In a Python configuration file, define a function that "
            "gets the name of a user and returns a list of the names of groups."
        )
    found: HubGroups | None = value
    return found


def read_identity(value: Any) -> str:
    """Return ``c.GPUPool.cluster_identity``."""
    text = str(value)
    kind, _, rest = text.partition(":")
    if text in ("", "munge") or (kind == "munge" and rest.startswith("/")):
        return text
    if kind in ("http", "https") and rest.startswith("//"):
        return text
    raise ValueError(
        f"{text!r} is not a way to identify users. Write 'munge', 'munge:/path/of/its/socket', or "
        "the address of a JupyterHub's API."
    )


def read_host_memory(value: Any, total: int) -> int:
    """Return ``c.GPUPool.host_memory`` in bytes; a percentage refers to ``total``."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1])
        except ValueError:
            share = 0.0
        if not 0 < share <= 100:
            raise ValueError(f"{value!r} is not a share of memory. Write '1%' to '100%'.")
        return int(total * share / 100)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size. Write '64GiB', bytes, or per cent like '50%'.")
    try:
        return parse_bytes(value)
    except ValueError as error:
        raise ValueError(f"{error} A percentage like '50%' is allowed, too.") from None


def read_host_reserve(value: Any) -> HostReserve:
    """Return ``c.GPUPool.host_reserve``: a size in bytes, or a share of each limit."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            raise ValueError(f"{value!r} is not a share of memory. Write '0%' to '99%'.")
        return HostReserve(share=share)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise ValueError(f"{value!r} is not a size. Write '4GiB', bytes, or per cent like '10%'.")
    try:
        return HostReserve(size=0 if value in (0, "0") else parse_bytes(value))
    except ValueError as error:
        raise ValueError(f"{error} A percentage like '10%' is allowed, too.") from None


def read_count(value: Any) -> int:
    """Return a count of at least 1."""
    if type(value) is not int or not 1 <= value <= 100_000:
        raise ValueError(f"{value!r} is not a number of sessions. Write a whole number above zero.")
    return value


def read_uid(value: Any) -> int:
    """Return a user id that is not root's."""
    if type(value) is not int or not 1 <= value < (1 << 32) - 1:
        raise ValueError(
            f"{value!r} is not allowed. Write a user id, 1 at least: 0, the id of root, is refused."
        )
    return value


def read_folders(value: Sequence[str]) -> tuple[str, ...]:
    """Return ``c.GPUPool.cluster_data`` as absolute paths; refuse too many or too long paths."""
    if len(value) > MOST_FOLDERS:
        raise ValueError(f"There are {len(value)} folders. Write at most {MOST_FOLDERS}.")
    found = tuple(os.path.normpath(read_path(one)) for one in value)
    for path in found:
        if len(path) > MOST_PATH:
            raise ValueError(
                f"{path[:40]!r}... has {len(path)} characters. Write a path of at most {MOST_PATH}."
            )
    return found


def read_port(value: Any) -> int:
    """Return a TCP port; 0 means no port."""
    if type(value) is not int or not 0 <= value <= 65535:
        raise ValueError(
            f"{value!r} is not a port. Write a whole number up to 65535, or 0 for none."
        )
    return value


def read_path(value: str) -> Path:
    """Return the absolute path that ``value`` names."""
    path = Path(value).expanduser()
    if not path.is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path. Begin it with '/' or '~'.")
    return path


def read_program(value: str) -> str:
    """Return the absolute path of the program ``value``; "" if ``value`` is ""."""
    return str(read_path(value)) if value else ""


def read_folder(value: str) -> Path:
    """Return the folder of the journal; "" means the default folder."""
    return read_path(value) if value else local_machine.state_dir()


def read_socket(value: str) -> str:
    """Return the socket's path; "" stays ""."""
    if not value:
        return ""
    path = read_path(value)
    try:
        check_path(path)
    except BrokerUnavailable as error:
        raise ValueError(f"{error.message} Set a shorter path.") from None
    return str(path)
