# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a kernel gets that nobody asked for: sizes, and the devices that it sees without a slice.

Plain functions over plain values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Collection, Iterable, Mapping, Sequence

from .model import DeviceView, PoolSettings, Refusal, Request

#: Codes of refusals that are about how much memory was asked for.
_ABOUT_SIZE = frozenset({"over-kernel-limit", "over-device", "over-quota", "over-host"})

# ---------------------------------------------------------------------- sizes


def default_request(settings: PoolSettings) -> Request:
    """Return the request of a kernel that asks for nothing."""
    return Request(
        memory=settings.default_memory,
        limit=settings.default_limit,
        priority=settings.default_priority,
    )


def changed_request(base: Request, asked: Mapping[str, Any]) -> Request:
    """Return ``base`` with the fields ``asked``.

    Somebody who asks for memory alone, and whose limit was the memory, means just that memory.
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
    """Return ``request`` with the sizes that are not in ``asked`` cut to what the machine gives.

    Nobody asked for those, so a machine with smaller devices (``capacities``, in bytes) gives what
    it has instead of refusing. The memory is not cut to a quota or the host's memory: less than the
    admin's default because of another option of the admin's is refused, with the option's name (see
    :func:`blame_default`).
    """
    sizes = sorted((size for size in capacities if size), reverse=True)
    if not 0 < request.devices <= len(sizes):
        return request
    most = sizes[request.devices - 1]
    if settings.max_memory_per_kernel is not None:
        most = min(most, settings.max_memory_per_kernel)
    memory, limit = request.memory, request.limit
    if "memory" not in asked:
        memory = min(memory, most)
    if "limit" not in asked:
        quota = settings.quotas.get(owner) or settings.quotas.get("*")
        if quota is not None and quota.memory is not None:
            most = min(most, quota.memory // request.devices)
        limit = max(memory, min(limit, most))
    return replace(request, memory=memory, limit=limit)


def blame_default(refusal: Refusal, asked: Collection[str]) -> Refusal:
    """Return ``refusal`` of a new session, naming the option that asked if nobody else did."""
    if "memory" in asked or refusal.code not in _ABOUT_SIZE:
        return refusal
    return replace(
        refusal,
        message=f"{refusal.message} Nobody asked for that size: it is c.GPUPool.default_memory.",
        next_step="Ask for less memory in the kernelspec, or have an admin lower "
        "c.GPUPool.default_memory.",
    )


# ---------------------------------------------------------------------- devices


def home_devices(
    devices: Sequence[DeviceView],
    kernels: Mapping[str, int],
    *,
    memory: int,
    count: int,
    seen: Sequence[str] = (),
    planned: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return the ``count`` devices that a kernel without a slice should see, by UUID.

    A process settles on the devices that it sees when it calls cuInit, and needs no slice for that;
    so these should be the devices where it will get one. ``kernels`` tells how many kernels see
    each device, ``seen`` are those that this one sees so far, in its order. The first rule that
    applies decides:

    1. The devices where the pool would attach it now (``planned``).
    2. What it sees, if that is ``count`` devices with room for ``memory`` bytes each.
    3. The best devices: in service; large enough; with room now; seen so far; seen by the fewest
       kernels, as all of them may come back; with the least memory granted; the first by number.
    4. What it sees, if rule 3 finds no room on ``count`` devices: nothing is gained by a change.

    The answer is empty only where there is no device: a process keeps the driver's answer "no
    device" until it ends. Drained devices are named only where no other is left.
    """
    if planned:
        return tuple(planned)
    views = {view.device.uuid: view for view in devices}

    def has_room(uuid: str) -> bool:
        view = views.get(uuid)
        return view is not None and not view.drained_reason and view.free >= memory

    settled = tuple(seen) if seen and len(seen) == count else ()
    if settled and all(has_room(uuid) for uuid in settled):
        return settled
    in_service = [view for view in devices if not view.drained_reason] or [*devices]
    best = sorted(
        in_service,
        key=lambda view: (
            view.capacity < memory,
            view.free < memory,
            view.device.uuid not in seen,
            kernels.get(view.device.uuid, 0),
            view.granted,
            view.device.index,
        ),
    )
    chosen = tuple(view.device.uuid for view in best[: max(1, count)])
    if settled and not (len(chosen) == count and all(has_room(uuid) for uuid in chosen)):
        return settled
    return chosen or tuple(seen)
