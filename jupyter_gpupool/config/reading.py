# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Read the values that an admin writes: sizes, durations, quotas, devices, paths.

A reader returns the value for the broker, or raises ``ValueError`` with a sentence for people.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Mapping, Sequence

from traitlets import TraitError, TraitType

from .. import local_machine
from ..endpoint import check_path
from ..errors import BrokerUnavailable
from ..pool.model import Quota
from ..text import did_you_mean, one_of
from ..units import parse_bytes, parse_seconds

QUOTA_KEYS = tuple(f.name for f in fields(Quota))

#: A reserve that is a share has at least so many bytes, but at most this part of a small limit.
LEAST_RESERVE, MOST_RESERVE_PART = 1 << 30, 4


@dataclass(frozen=True, slots=True)
class HostReserve:
    """Host memory that a suspend leaves free: a share of each limit, or the configured size."""

    share: float = 0.1
    size: int | None = None

    def of(self, limit: int, *, machine: bool) -> int:
        """Return how many bytes of a machine's or control group's ``limit`` stay free.

        A share is at least 1 GiB. The result is at most a quarter of a control group, so that a
        small group can still hold suspended state.
        """
        scaled = limit // MOST_RESERVE_PART
        if self.size is not None:
            return min(self.size, limit if machine else scaled)
        return max(int(limit * self.share), min(LEAST_RESERVE, scaled)) if self.share else 0


# ---------------------------------------------------------------------- traits


class _Quantity(TraitType[Any, Any]):
    """A trait that takes a number or text with a unit.

    ``zero`` says whether 0 is allowed, ``least`` is the smallest value.
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
        """Return ``value`` as a plain number, or raise with the reason."""
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
        return parse_bytes(value)


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
    """Return ``c.GPUPool.quotas`` as values."""
    quotas = {}
    for owner, entry in value.items():
        if not isinstance(owner, str) or not owner.strip():
            raise ValueError(f"{owner!r} is not a user name. Write a name, or '*' for all others.")
        if owner.startswith("@"):
            raise ValueError(
                f"{owner!r} looks like a group, and quotas are per user. "
                "Name the users, or use '*' for all others."
            )
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"The quota of {owner!r} is {entry!r}. Write a dict such as {{'memory': '16GiB'}}."
            )
        found: dict[str, int | None] = {}
        for key, limit in entry.items():
            if key not in QUOTA_KEYS:
                hint = did_you_mean(str(key), QUOTA_KEYS, then=f"Allowed are {one_of(QUOTA_KEYS)}.")
                raise ValueError(f"The quota of {owner!r} has an unknown limit {key!r}. {hint}")
            found[key] = None if limit is None else _limit(owner, key, limit)
        quotas[owner] = Quota(**found)
    return quotas


def _limit(owner: str, key: str, limit: Any) -> int:
    if key in ("memory", "suspended"):
        if type(limit) is int and limit == 0:
            return 0
        try:
            return parse_bytes(limit)
        except ValueError as error:
            raise ValueError(f"The {key} quota of {owner!r}: {error}") from None
    if type(limit) is not int or limit < 0:
        raise ValueError(
            f"The {key} quota of {owner!r} is {limit!r}. Write a whole number, 0 or more."
        )
    return limit


def read_priority_classes(value: Mapping[Any, Any]) -> dict[str, int]:
    """Return ``c.GPUPool.priority_classes``."""
    if not value:
        raise ValueError("There must be at least one priority class, such as {'notebook': 100}.")
    for name, number in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is not a name for a priority class. Use letters and '_'.")
        if type(number) is not int:
            raise ValueError(f"Priority class {name!r} is {number!r}. Write a whole number.")
    return dict(value)


def read_devices(value: Sequence[Any] | None) -> tuple[str, ...] | None:
    """Return ``c.GPUPool.devices`` as text; None: every device."""
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
                f"{entry!r} names no GPU. Write an index such as 0, or the beginning of a UUID "
                "such as 'GPU-5d1c'; `nvidia-smi -L` shows both."
            )
        if text in found:
            raise ValueError(f"{text!r} is listed twice.")
        found.append(text)
    return tuple(found)


def read_host_memory(value: Any, total: int) -> int:
    """Return ``c.GPUPool.host_memory`` in bytes; per cent values are parts of ``total``."""
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
    """Return ``c.GPUPool.host_reserve``: a size in bytes, or per cent of each limit."""
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


def read_port(value: Any) -> int:
    """Return a TCP port, or 0 for none."""
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
    """Return the absolute path of a program; "" stays ""."""
    return str(read_path(value)) if value else ""


def read_folder(value: str) -> Path:
    """Return the folder of the journal; "" is the default."""
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
