# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Limits: what a kernel and an owner may have. A refusal is a value, not an exception.

Two questions, kept apart because their answers differ. *Can it ever be met?* No is a
:class:`Refusal`, at once. *Does it fit beside what the owner has now?* No means waiting.

An owner is charged the granted bytes, grown ones included, but not the headroom that a resume
reserves for a moment; a lease on two devices counts as two devices. To add a limit: a
field of ``Quota``, a clause in ``never`` and in ``Quotas.lacking``. Limits per group and
GPU-seconds per day will be more columns of :class:`Usage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

from ..units import format_bytes
from .model import Owner, PoolSettings, Quota, Refusal, Request

NO_LIMIT = Quota()


@dataclass(slots=True)
class Usage:
    """What one owner has, or is promised by a plan under way."""

    memory: int = 0
    devices: int = 0
    leases: int = 0
    #: Host bytes of suspended state, suspends under way included.
    suspended: int = 0


class Quotas:
    """What every owner has, against what every owner may have."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings = settings
        self._limits: dict[str, Quota] = {}
        self._usage: dict[str, Usage] = {}
        #: Some owner's quota of suspended state has more room than at the last look.
        self.eased = False
        #: Owners whose use fell since the last look.
        self.fell: dict[str, None] = {}

    def limit(self, owner: str) -> Quota:
        """Return the owner's limits; ``"*"`` is everybody who is not named."""
        found = self._limits.get(owner)
        if found is None:
            quotas = self.settings.quotas
            found = self._limits[owner] = quotas.get(owner) or quotas.get("*") or NO_LIMIT
        return found

    def configure(self, settings: PoolSettings) -> None:
        """Apply other limits."""
        self.settings = settings
        self._limits.clear()

    def note(self, owner: str) -> None:
        """Remember to look again at what waits for the quota of ``owner``, if it has one."""
        if self.settings.quotas and self.limit(owner) is not NO_LIMIT:
            self.fell[owner] = None

    def usage(self, owner: str) -> Usage:
        """Return the owner's account."""
        found = self._usage.get(owner)
        if found is None:
            found = self._usage[owner] = Usage()
        return found

    def charge(self, owner: str, memory: int, devices: int, leases: int, sign: int) -> None:
        """Add to (``sign`` 1) or take from (-1) the owner's account."""
        usage = self.usage(owner)
        usage.memory += sign * memory
        usage.devices += sign * devices
        usage.leases += sign * leases
        if sign < 0:
            self.note(owner)

    def suspended(self, owner: str, size: int) -> None:
        """Add ``size`` bytes (may be negative) of suspended state to the owner's account."""
        self.usage(owner).suspended += size
        if size < 0 and self.limit(owner).suspended is not None:
            self.eased = True
            self.fell[owner] = None

    def suspend_room(self, owner: str) -> int | None:
        """Return the host bytes that the owner may still fill, None without a limit."""
        if not self.settings.quotas:
            return None
        limit = self.limit(owner).suspended
        return None if limit is None else limit - self.usage(owner).suspended

    def lacking(
        self, owner: str, memory: int, devices: int, leases: int, less: Usage | None = None
    ) -> tuple[str, int, int] | None:
        """Return which limit one more lease would exceed, as (name, limit, in use), or None.

        ``less`` is what the owner's own idle leases would give back.
        """
        limit = self.limit(owner) if self.settings.quotas else NO_LIMIT
        if limit is NO_LIMIT:
            return None
        usage, less = self.usage(owner), less or Usage()
        for name, most, used, more in (
            ("memory", limit.memory, usage.memory - less.memory, memory),
            ("devices", limit.devices, usage.devices - less.devices, devices),
            ("leases", limit.leases, usage.leases - less.leases, leases),
        ):
            if most is not None and more > 0 and used + more > most:
                return name, most, used
        return None


def check_form(request: Request, settings: PoolSettings) -> Refusal | None:
    """Return why ``request`` makes no sense, or None."""
    if request.memory <= 0:
        return Refusal(
            "bad-request",
            f"{request.memory} bytes of GPU memory were asked for; it must be more than nothing.",
            "Ask for a size like 4GiB.",
            {"memory": request.memory},
        )
    if request.limit < request.memory:
        return Refusal(
            "bad-request",
            f"The memory limit {format_bytes(request.limit)} is below the guaranteed memory "
            f"{format_bytes(request.memory)}.",
            "Give a limit that is at least the memory.",
            {"memory": request.memory, "limit": request.limit},
        )
    if request.devices < 1:
        return Refusal(
            "bad-request",
            f"{request.devices} GPUs were asked for; it must be at least 1.",
            "Ask for 1 GPU or more.",
            {"devices": request.devices},
        )
    if not 1 <= request.compute <= 100:
        return Refusal(
            "bad-request",
            f"A compute share of {request.compute} % was asked for; it must be from 1 to 100.",
            "Ask for a share from 1 to 100 per cent.",
            {"compute": request.compute},
        )
    if request.priority not in settings.priority_classes:
        names = ", ".join(sorted(settings.priority_classes))
        return Refusal(
            "unknown-priority",
            f"There is no priority class {request.priority!r}.",
            f"Use one of: {names}.",
            {"priority": request.priority, "known": sorted(settings.priority_classes)},
        )
    return None


def never(
    request: Request,
    owner: Owner,
    settings: PoolSettings,
    capacities: Sequence[int],
    *,
    suspends: bool,
) -> Refusal | None:
    """Return why ``request`` can never be met on this machine by these rules, or None.

    ``capacities`` are the bytes that each device can give at most, largest first, drained devices
    included (they may come back). ``suspends``: some device can suspend; the host's budget only
    matters then.
    """
    refusal = check_form(request, settings)
    if refusal is not None:
        return refusal
    asked = format_bytes(request.memory)
    each = f"{asked} on each of {request.devices} GPUs" if request.devices > 1 else asked
    numbers: dict[str, Any] = {"memory": request.memory, "devices": request.devices}
    if not capacities:
        return Refusal(
            "no-device",
            "There is no GPU in this pool.",
            "Run `jupyter gpupool doctor` to see why.",
            numbers,
        )
    if request.devices > len(capacities):
        return Refusal(
            "too-many-devices",
            f"{request.devices} GPUs were asked for; this machine has {len(capacities)}.",
            f"Ask for at most {len(capacities)}.",
            {**numbers, "most": len(capacities)},
        )
    most = settings.max_memory_per_kernel
    for name, value in (("memory", request.memory), ("limit", request.limit)):
        if most is not None and value > most:
            return Refusal(
                "over-kernel-limit",
                f"A {name} of {format_bytes(value)} was asked for; a kernel may have at most "
                f"{format_bytes(most)} on a GPU (max_memory_per_kernel).",
                f"Ask for at most {format_bytes(most)}, or ask an admin for more.",
                {**numbers, name: value, "most": most},
            )
    room = capacities[request.devices - 1]
    where = "the largest GPU" if request.devices == 1 else f"{request.devices} GPUs at once"
    if request.memory > room:
        return Refusal(
            "over-device",
            f"{each} was asked for; {where} can give at most {format_bytes(room)}.",
            f"Ask for at most {format_bytes(room)}.",
            {**numbers, "most": room},
        )
    total = request.memory * request.devices
    limit = settings.quotas.get(owner.name) or settings.quotas.get("*") or NO_LIMIT
    if limit.memory is not None and total > limit.memory:
        return Refusal(
            "over-quota",
            f"{each} was asked for; your quota is {format_bytes(limit.memory)} of GPU memory over "
            "all your kernels.",
            f"Ask for at most {format_bytes(limit.memory // request.devices)}, or ask an admin "
            "for a larger quota.",
            {**numbers, "most": limit.memory},
        )
    high = f"A limit of {format_bytes(request.limit)}" + " on each GPU" * (request.devices > 1)
    numbers["limit"] = request.limit
    if request.limit > room:
        return Refusal(
            "over-device",
            f"{high} was asked for; {where} can give at most {format_bytes(room)}.",
            f"Give a limit of at most {format_bytes(room)}.",
            {**numbers, "most": room},
        )
    if limit.memory is not None and request.limit * request.devices > limit.memory:
        return Refusal(
            "over-quota",
            f"{high} was asked for; your quota is {format_bytes(limit.memory)} of GPU memory over "
            "all your kernels.",
            f"Give a limit of at most {format_bytes(limit.memory // request.devices)}, or ask an "
            "admin for a larger quota.",
            {**numbers, "most": limit.memory},
        )
    if limit.devices is not None and request.devices > limit.devices:
        return Refusal(
            "over-quota",
            f"{request.devices} GPUs were asked for; your quota is {limit.devices}.",
            "Ask for fewer GPUs, or ask an admin for a larger quota.",
            {**numbers, "most": limit.devices},
        )
    if limit.leases is not None and limit.leases < 1:
        return Refusal(
            "over-quota",
            "A GPU slice was asked for; your quota is no slice at all.",
            "Ask an admin for a quota.",
            {**numbers, "most": limit.leases},
        )
    if suspends:
        budgets: tuple[tuple[str, int | None, str], ...] = (
            ("over-host", settings.host_memory, "this machine keeps at most"),
            ("over-quota", limit.suspended, "your quota of suspended state is"),
        )
        for code, size, whose in budgets:
            if size is not None and total > size:
                return Refusal(
                    code,
                    f"{each} was asked for; when idle it must fit in host memory, and {whose} "
                    f"{format_bytes(size)} there.",
                    f"Ask for at most {format_bytes(size // request.devices)}, or ask an admin "
                    "for more host memory.",
                    {**numbers, "most": size},
                )
    return None


def never_there(request: Request, model: str, most: int, devices: int, *, fixed: bool) -> Refusal:
    """Say that a session waits for GPUs of a model, or for one GPU, that are too small for it."""
    each = " on each" if devices > 1 else ""
    where = f"{devices} of these GPUs" if devices > 1 else "that GPU" if fixed else "the largest"
    there = f"a GPU of the model {model}" if devices == 1 else f"GPUs of the model {model}"
    return Refusal(
        "over-device",
        f"{format_bytes(request.memory)}{each} was asked for; this kernel initialised CUDA on "
        f"{there}, and {where} can give at most {format_bytes(most)}{each}.",
        f"Restart the kernel to use another GPU, or ask for at most {format_bytes(most)}.",
        {"memory": request.memory, "devices": request.devices, "most": most, "model": model},
    )


def most_memory(
    devices: int,
    owner: Owner,
    settings: PoolSettings,
    capacities: Sequence[int],
    *,
    suspends: bool,
) -> int | None:
    """Return the most bytes on each of ``devices`` that :func:`never` lets pass; None if none do.

    The arguments are those of :func:`never`; the limit is meant to be no more than the memory.
    """
    if not 1 <= devices <= len(capacities):
        return None
    limit = settings.quotas.get(owner.name) or settings.quotas.get("*") or NO_LIMIT
    if (limit.devices is not None and devices > limit.devices) or (
        limit.leases is not None and limit.leases < 1
    ):
        return None
    totals = [limit.memory]
    if suspends:
        totals += [settings.host_memory, limit.suspended]
    bounds = [total // devices for total in totals if total is not None]
    if settings.max_memory_per_kernel is not None:
        bounds.append(settings.max_memory_per_kernel)
    most = min(capacities[devices - 1], *bounds) if bounds else capacities[devices - 1]
    return most if most > 0 else None
