# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the broker works with, and the rules by which configured values fit together."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Mapping, NoReturn, Sequence

from ..endpoint import check_path
from ..errors import BrokerUnavailable, ConfigError
from ..pool.model import AttachPolicy, PoolSettings, Quota
from ..text import did_you_mean, one_of
from ..units import parse_bytes

#: Fills ``c.GPUPool.emulate`` where no configuration sets it.
EMULATE_VARIABLE = "GPUPOOL_EMULATE"

#: Seconds of one turn at least: the broker's timers and a kernel's polling take milliseconds.
MIN_TURN = 0.01

ForeignPolicy = Literal["count", "report", "end"]
ManagedPolicy = Literal["refuse", "allow"]
OverusePolicy = Literal["report", "end"]

QUOTA_KEYS = tuple(f.name for f in fields(Quota))


#: Bytes that stay free at least where the reserve is a share, and the part of a small limit that
#: they are at most.
LEAST_RESERVE, MOST_RESERVE_PART = 1 << 30, 4


@dataclass(frozen=True, slots=True)
class HostReserve:
    """Host memory that a suspend leaves free: a share of what is limited, or a size (None: not)."""

    share: float = 0.1
    size: int | None = None

    def of(self, limit: int, *, machine: bool) -> int:
        """Return the bytes that stay free of ``limit`` bytes, the machine's or a control group's.

        A share is 1 GiB at least; that, and a size, are at most a quarter of a control group, so
        that a small one can still hold suspended state.
        """
        scaled = limit // MOST_RESERVE_PART
        if self.size is not None:
            return min(self.size, limit if machine else scaled)
        return max(int(limit * self.share), min(LEAST_RESERVE, scaled)) if self.share else 0


@dataclass(frozen=True)
class BrokerSettings:
    """The configuration, checked. Sizes are bytes, times seconds."""

    pool: PoolSettings
    #: As configured; :func:`usable_attach` says what these devices can do.
    attach: AttachPolicy
    #: Whether kernels are started under the guard.
    guard: bool
    #: Whether a kernel is started without the guard where its page cannot be made.
    allow_unguarded: bool
    #: Seconds without a CUDA call after which a session's use of its GPU counts as over.
    quiet_after: float
    #: Seconds of one turn among sessions that contend for a device's compute time.
    turn: float
    #: Seconds after which a device that failed is tested again; 0: never by itself.
    retest_after: float
    managed_memory: ManagedPolicy
    overuse: OverusePolicy
    #: A machine to emulate, or "" for the real driver.
    emulate: str
    #: None: every device; else indices (as text) or beginnings of UUIDs.
    devices: tuple[str, ...] | None
    #: As configured; "" means :func:`jupyter_gpupool.endpoint.find_socket` decides.
    socket: str
    #: The interpreter of the device children; "" means that the broker finds one.
    device_python: str
    state_dir: Path
    #: Bytes that the journal may take on the disk.
    journal_size: int
    foreign_processes: ForeignPolicy
    sample_interval: float
    lock_timeout: float
    linger: float
    #: Sessions that one user may have in the pool.
    max_sessions_per_user: int
    #: Where the broker's metrics are served on 127.0.0.1; 0: nowhere.
    metrics_port: int
    admins: tuple[str, ...]
    #: What the admin should read in the log: settings that act differently from what they say.
    notes: tuple[str, ...] = ()
    #: The configuration files that were read, lowest precedence first.
    files: tuple[Path, ...] = ()
    #: Options that do not have their default, as JSON values; and which file or command set them.
    options: Mapping[str, Any] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    #: What a suspend leaves free of the machine's memory and of each control group's.
    host_reserve: HostReserve = HostReserve()


#: Fields that a running broker can not change; SIGHUP says so and keeps the old value.
#: ``guard``: what devices can do was tested with it, and kernels run under it.
_FIXED = ("emulate", "devices", "guard", "socket", "device_python", "state_dir", "lock_timeout")


def needs_restart(old: BrokerSettings, new: BrokerSettings) -> tuple[str, ...]:
    """Return the options that differ and take effect only when the broker is restarted."""
    return tuple(name for name in _FIXED if getattr(old, name) != getattr(new, name))


def usable_attach(
    policy: AttachPolicy, guarded: bool, reason: str = ""
) -> tuple[AttachPolicy, str]:
    """Return the policy that can be had where ``policy`` is asked for, and why it is another one.

    Parameters
    ----------
    policy:
        As configured, or as a kernelspec asks for.
    guarded:
        Whether a device of the pool has the tier "guarded".
    reason:
        Why none has, as a sentence (``DeviceService.guard_problem``).
    """
    if policy != "lazy" or guarded:
        return policy, ""
    because = f" {reason}" if reason else ""
    return "cell", (
        "Attach policy 'lazy' needs the guard, which is not available here, so kernels get "
        f"their slice when a cell starts ('cell').{because}"
    )


def refuse(name: str, message: str, *, origin: str = "", next_step: str = "") -> NoReturn:
    """Raise the :class:`ConfigError` for option ``name``, naming the file if it is known."""
    place = f" in {origin}" if origin else ""
    raise ConfigError(f"c.GPUPool.{name}{place}: {message}", next_step=next_step)


def read_quotas(value: Mapping[Any, Any]) -> dict[str, Quota]:
    """Return ``c.GPUPool.quotas`` as values; raise ``ValueError`` with a sentence."""
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
    """Return ``c.GPUPool.priority_classes``; raise ``ValueError`` with a sentence."""
    if not value:
        raise ValueError("There must be at least one priority class, such as {'notebook': 100}.")
    for name, number in value.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"{name!r} is not a name for a priority class. Use letters and '_'.")
        if type(number) is not int:
            raise ValueError(f"Priority class {name!r} is {number!r}. Write a whole number.")
    return dict(value)


def read_devices(value: Sequence[Any]) -> tuple[str, ...]:
    """Return ``c.GPUPool.devices`` as text; raise ``ValueError`` with a sentence."""
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
    """Return ``c.GPUPool.host_memory`` in bytes, per cent counted from ``total`` bytes."""
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


def check_machine(text: str, origin: str) -> None:
    """Raise :class:`ConfigError` if the machine ``text``, from ``origin``, cannot be emulated."""
    # Inside: the emulator is no part of the normal path.
    from .. import emulation

    try:
        emulation.check(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None


def read_count(value: Any) -> int:
    """Return a number of things, one at least; raise ``ValueError`` with a sentence."""
    if type(value) is not int or not 1 <= value <= 100_000:
        raise ValueError(f"{value!r} is not a number of sessions. Write a whole number above zero.")
    return value


def read_port(value: Any) -> int:
    """Return a TCP port, or 0 for none; raise ``ValueError`` with a sentence."""
    if type(value) is not int or not 0 <= value <= 65535:
        raise ValueError(
            f"{value!r} is not a port. Write a whole number up to 65535, or 0 for none."
        )
    return value


def read_path(value: str) -> Path:
    """Return the absolute path that ``value`` names; raise ``ValueError`` with a sentence."""
    path = Path(value).expanduser()
    if not path.is_absolute() or "\0" in value:
        raise ValueError(f"{value!r} is not an absolute path. Begin it with '/' or '~'.")
    return path


def read_socket(value: str) -> str:
    """Return the socket's path, "" left as it is; raise ``ValueError`` with a sentence."""
    if not value:
        return ""
    path = read_path(value)
    try:
        check_path(path)
    except BrokerUnavailable as error:
        raise ValueError(f"{error.message} Set a shorter path.") from None
    return str(path)
