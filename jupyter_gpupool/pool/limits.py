# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Limits: what a kernel and an owner may have. A refusal is a value, not an exception.

The module answers two questions. *Can the pool ever meet the request?* (:func:`never`) If not, the
pool refuses the request at once with a :class:`Refusal`. *Does the request fit beside the owner's
present leases?* (:func:`lacking`) If not, the session waits.

An owner is charged for the granted bytes, including bytes by which a lease has grown. The headroom
that a resume reserves for a short time does not count. A lease on two devices counts as two
devices. To add a limit on size, add a :class:`_Maximum` in :func:`_bounds`; refusals, the largest
size that the pool offers, and the default sizes all follow from it. To add a limit on what an owner
has at once, add a field of ``Quota`` and a line in :func:`lacking`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Collection, Iterable, Mapping, Sequence

from ..errors import Code
from ..units import format_bytes
from .groups import path
from .ledgers import OwnerUsage
from .model import NO_LIMIT, Charge, Owner, PoolSettings, Quota, Refusal, Request


def lacking(quota: Quota, usage: OwnerUsage, more: Charge, less: Charge) -> tuple[str, int] | None:
    """Return the first limit that the owner would exceed with ``more``, as (name, limit), or None.

    ``less`` is the charge that the owner will give back, for example by suspends under way.
    """
    if quota is NO_LIMIT:
        return None
    for name, most, used, add, back in (
        ("memory", quota.memory, usage.memory, more[0], less[0]),
        ("devices", quota.devices, usage.devices, more[1], less[1]),
        ("leases", quota.leases, usage.leases, more[2], less[2]),
    ):
        if most is not None and add > 0 and used - back + add > most:
            return name, most
    return None


@dataclass(frozen=True, slots=True)
class _Maximum:
    """The most bytes on each device, by one rule."""

    code: Code
    #: ``most`` is the most bytes on each device. ``whole`` is the number in the rule itself. For a
    #: quota, ``whole`` is the bytes on all devices together.
    most: int
    whole: int
    #: ``rule`` is the rule in words. ``admin`` says what the user can ask an admin for; it is "" if
    #: an admin can change nothing.
    rule: str
    admin: str
    #: True if the rule bounds both the guaranteed bytes and the limit of a request. False if it
    #: bounds only the guaranteed bytes.
    limit: bool


def _bounds(
    devices: int,
    quota: Quota,
    settings: PoolSettings,
    capacities: Sequence[int],
    suspends: bool,
    *,
    group: str = "",
) -> list[_Maximum]:
    """Return all rules about the size of a slice, for a request with this number of ``devices``.

    A refusal names the first of these rules that the request breaks. (:func:`never` tests the rules
    with ``limit`` first.)
    """
    found = []
    for name in path(settings.groups, group) if settings.groups else ():
        cap = settings.groups[name].cap
        if cap is not None:
            size = cap.of(capacities)
            rule = f"your group {name} may have at most {format_bytes(size)} at once"
            cut = size // devices
            found.append(_Maximum(Code.OVER_QUOTA, cut, size, rule, "a larger cap", False))
    most = settings.max_memory_per_kernel
    if most is not None:
        option = "c.GPUPool.max_memory_per_kernel"
        rule = f"a kernel may have at most {format_bytes(most)} on a GPU ({option})"
        found.append(_Maximum(Code.OVER_KERNEL_LIMIT, most, most, rule, "more", True))
    room = capacities[devices - 1]
    where = "the largest GPU" if devices == 1 else f"{devices} GPUs at once"
    rule = f"{where} can give at most {format_bytes(room)}"
    found.append(_Maximum(Code.OVER_DEVICE, room, room, rule, "", True))
    if quota.memory is not None:
        size = quota.memory
        rule = f"your quota for all your kernels together is {format_bytes(size)} of GPU memory"
        found.append(_Maximum(Code.OVER_QUOTA, size // devices, size, rule, "a larger quota", True))
    for code, keep, whose in (
        (Code.OVER_HOST, settings.host_memory, "this machine has room for at most"),
        (Code.OVER_QUOTA, quota.suspended, "your quota for suspended state is"),
    ):
        if keep is not None and suspends:
            fits = "the state of an idle kernel must fit in host memory"
            rule = f"{fits}, and {whose} {format_bytes(keep)}"
            admin = "a larger quota" if code == Code.OVER_QUOTA else "more host memory"
            found.append(_Maximum(code, keep // devices, keep, rule, admin, False))
    return found


def check_form(request: Request, settings: PoolSettings) -> Refusal | None:
    """Return why ``request`` is invalid on any machine, or None."""
    if request.memory <= 0:
        return Refusal(
            Code.BAD_REQUEST,
            f"The request asks for {request.memory} bytes of GPU memory; the size must be more "
            "than 0.",
            "Ask for a size like 4GiB.",
            {"memory": request.memory},
        )
    if request.limit < request.memory:
        return Refusal(
            Code.BAD_REQUEST,
            f"The memory limit {format_bytes(request.limit)} is below the guaranteed memory "
            f"{format_bytes(request.memory)}.",
            f"Give a limit of at least {format_bytes(request.memory, rounding='up')}.",
            {"memory": request.memory, "limit": request.limit},
        )
    if request.devices < 1:
        return Refusal(
            Code.BAD_REQUEST,
            f"{request.devices} GPUs were asked for; the number must be at least 1.",
            "Ask for 1 GPU or more.",
            {"devices": request.devices},
        )
    if not 1 <= request.compute <= 100:
        return Refusal(
            Code.BAD_REQUEST,
            f"A compute share of {request.compute} % was asked for; the share must be from 1 to "
            "100.",
            "Ask for a share from 1 to 100 per cent.",
            {"compute": request.compute},
        )
    if request.priority not in settings.priority_classes:
        names = ", ".join(sorted(settings.priority_classes))
        return Refusal(
            Code.UNKNOWN_PRIORITY,
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
    least: int = 0,
) -> Refusal | None:
    """Return why ``request`` can never be met on this machine by these rules, or None.

    ``capacities`` has the most bytes that each device can give, the largest number first. It
    includes drained devices, because they may come back. ``suspends`` says whether any device
    allows a suspend. If none does, the budget of host memory does not matter. ``least`` is the size
    of the smallest useful slice.
    """
    refusal = check_form(request, settings)
    if refusal is not None:
        return refusal
    numbers: dict[str, Any] = {"memory": request.memory, "devices": request.devices}
    if not capacities:
        return Refusal(
            Code.NO_DEVICE,
            "There is no GPU in this pool.",
            "Run `jupyter gpupool doctor` to see why.",
            numbers,
        )
    if request.devices > len(capacities):
        return Refusal(
            Code.TOO_MANY_DEVICES,
            f"{request.devices} GPUs were asked for; this machine has {len(capacities)}.",
            f"Ask for at most {len(capacities)}.",
            {**numbers, "most": len(capacities)},
        )
    if request.memory < least:
        enough = format_bytes(least, rounding="up")
        return Refusal(
            Code.UNDER_LEAST,
            f"{format_bytes(request.memory)} was asked for; a process that uses CUDA needs at "
            f"least {enough} on a GPU here.",
            f"Ask for at least {enough}.",
            {**numbers, "least": least},
        )
    quota = settings.quota_of(owner.name)
    bounds = _bounds(request.devices, quota, settings, capacities, suspends, group=owner.group)
    for name in ("memory", "limit"):
        for bound in bounds:
            if bound.limit and getattr(request, name) > bound.most:
                return _above(request, name, bound)
    refusal = _too_many(request, quota)
    if refusal is not None:
        return refusal
    for bound in bounds:
        if request.memory > bound.most:
            return _above(request, "memory", bound)
    return None


def _above(request: Request, name: str, bound: _Maximum) -> Refusal:
    """Return the refusal of a request whose memory or limit (``name``) is larger than ``bound``."""
    value: int = getattr(request, name)
    asked, ask = format_bytes(value), "Ask for"
    if name == "limit":
        asked = f"A limit of {asked}" + " on each GPU" * (request.devices > 1)
        ask = "Give a limit of"
    elif request.devices > 1:
        asked = f"{asked} on each of {request.devices} GPUs"
    admin = f", or ask an admin for {bound.admin}" if bound.admin else ""
    numbers = {"memory": request.memory, "devices": request.devices, name: value}
    return Refusal(
        bound.code,
        f"{asked} was asked for; {bound.rule}.",
        f"{ask} at most {format_bytes(bound.most)}{admin}.",
        {**numbers, "most": bound.whole},
    )


def _too_many(request: Request, quota: Quota) -> Refusal | None:
    """Return why the quota forbids this number of devices, or forbids any slice; else None."""
    numbers = {"memory": request.memory, "devices": request.devices, "limit": request.limit}
    if quota.devices is not None and request.devices > quota.devices:
        return Refusal(
            Code.OVER_QUOTA,
            f"{request.devices} GPUs were asked for; your quota is {quota.devices}.",
            "Ask for fewer GPUs, or ask an admin for a larger quota.",
            {**numbers, "most": quota.devices},
        )
    if quota.leases is not None and quota.leases < 1:
        return Refusal(
            Code.OVER_QUOTA,
            "Your quota allows no GPU slice.",
            "Ask an admin for a quota.",
            {**numbers, "most": quota.leases},
        )
    return None


def never_there(request: Request, model: str, most: int, devices: int, *, fixed: bool) -> Refusal:
    """Return the refusal of a session that can use only GPUs that are too small for its request."""
    each = " on each" if devices > 1 else ""
    where = f"{devices} of these GPUs" if devices > 1 else "that GPU" if fixed else "the largest"
    there = f"a GPU of the model {model}" if devices == 1 else f"GPUs of the model {model}"
    return Refusal(
        Code.OVER_DEVICE,
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
    """Return the largest memory of a request that :func:`never` allows; None if it allows none.

    The result is the bytes on each of ``devices`` devices. The other arguments are those of
    :func:`never`. This function assumes that the limit of the request is equal to its memory.
    """
    if not 1 <= devices <= len(capacities):
        return None
    quota = settings.quota_of(owner.name)
    if _too_many(Request(1, 1, devices), quota) is not None:
        return None
    bounds = _bounds(devices, quota, settings, capacities, suspends, group=owner.group)
    most = min(b.most for b in bounds)
    return most if most > 0 else None


def most_devices(owner: Owner, settings: PoolSettings, devices: int) -> int:
    """Return how many of ``devices`` a session of ``owner`` may ask for."""
    quota = settings.quota_of(owner.name).devices
    return devices if quota is None else min(devices, quota)


# --------------------------------------------------------------------------- default sizes

#: Codes of refusals about the requested amount of memory.
_ABOUT_SIZE = frozenset(
    {
        *(Code.OVER_KERNEL_LIMIT, Code.OVER_DEVICE, Code.OVER_QUOTA, Code.OVER_HOST),
        Code.UNDER_LEAST,
    }
)


def default_request(
    settings: PoolSettings, capacities: Iterable[int] = (), *, metered: bool = True
) -> Request:
    """Return the default request of a kernel, on devices of ``capacities`` bytes.

    By default the limit is the whole device. This does no harm to other sessions: when the pool
    needs bytes for a guarantee, it first takes back the bytes by which leases have grown. To take
    bytes back, the pool needs the guard, which meters the bytes and holds back the calls of a
    running cell. Without a guard (``metered`` is False), a slice cannot grow: it keeps the
    guaranteed size.
    """
    memory, limit = settings.default_memory, settings.default_limit
    if limit is None:
        limit = max([memory, *capacities]) if metered else memory
    return Request(memory=memory, limit=limit, priority=settings.default_priority)


def changed_request(base: Request, asked: Mapping[str, Any]) -> Request:
    """Return the request ``base``, with the fields in ``asked`` replaced.

    If only the memory is new, and the limit was equal to the memory before, the limit changes with
    it.
    """
    found = replace(base, **asked)
    if "memory" in asked and "limit" not in asked:
        plain = base.limit == base.memory
        found = replace(found, limit=found.memory if plain else max(base.limit, found.memory))
    return found


def fit_unasked(
    request: Request,
    asked: Collection[str],
    settings: PoolSettings,
    owner: str,
    capacities: Iterable[int],
) -> Request:
    """Return ``request`` with its default sizes reduced to what the machine can give.

    A size that is not in ``asked`` is a default. If the devices (``capacities``, in bytes) are
    smaller than the default, this function reduces the size, so that the pool does not refuse the
    kernel. It does not reduce the memory to fit a quota or the host's memory. A default above one
    of these limits is a contradiction between two options of the admin. The pool then refuses the
    kernel, and the refusal names the default (:func:`blame_default`).
    """
    sizes = sorted((size for size in capacities if size), reverse=True)
    if not 0 < request.devices <= len(sizes):
        return request
    quota = settings.quota_of(owner)
    bounds = _bounds(request.devices, quota, settings, sizes, suspends=False)
    memory, limit = request.memory, request.limit
    if "memory" not in asked:
        memory = min([memory, *(b.most for b in bounds if b.code != Code.OVER_QUOTA)])
    if "limit" not in asked:
        limit = max(memory, min([limit, *(b.most for b in bounds)]))
    return replace(request, memory=memory, limit=limit)


def blame_default(refusal: Refusal, asked: Collection[str]) -> Refusal:
    """Return the ``refusal`` of a new session.

    If the refusal is about the size, and the session named no size, the text also names the option
    with the default size.
    """
    if "memory" in asked or refusal.code not in _ABOUT_SIZE:
        return refusal
    return replace(
        refusal,
        message=f"{refusal.message} The kernel named no size, so it asked for "
        "c.GPUPool.default_memory.",
        next_step="Name another size in the kernelspec, or have an admin change "
        "c.GPUPool.default_memory.",
    )
