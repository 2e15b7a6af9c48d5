# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a client may ask for, read from a message: numbers that make sense, names that are short."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Iterable, Mapping, cast, get_args

from ..errors import ProtocolError, RefusedError
from ..pool.model import Hold, HoldKind, PoolSettings, Refusal, Request
from ..protocol import MAX_HOLDS

#: Characters of a name that a client chooses.
MAX_NAME = 200

#: Codes of refusals that are about how much memory was asked for.
_ABOUT_SIZE = frozenset({"over-kernel-limit", "over-device", "over-quota", "over-host"})

_HOLD_KINDS = frozenset(get_args(HoldKind))


def default_request(settings: PoolSettings) -> Request:
    """Return what a kernel gets that does not ask."""
    return Request(
        memory=settings.default_memory,
        limit=settings.default_limit,
        priority=settings.default_priority,
    )


def read_request(base: Request, fields: Mapping[str, Any]) -> Request:
    """Return ``base`` with what ``fields`` asks for.

    Raises
    ------
    RefusedError
        With code ``bad-request``. Whether the pool can do it, the pool says.
    """
    wanted: dict[str, Any] = {}
    for name in ("memory", "limit", "devices", "compute"):
        value = fields.get(name)
        if value is None:
            continue
        if type(value) is not int or not 0 < value < 1 << 60:
            raise RefusedError(
                f"A request for {name} = {value!r} makes no sense; it must be a whole number "
                "above zero.",
                code="bad-request",
            )
        wanted[name] = value
    priority = fields.get("priority")
    if priority is not None:
        if not isinstance(priority, str):
            raise RefusedError("A priority class is a name.", code="bad-request")
        wanted["priority"] = priority
    if "memory" in wanted and "limit" not in wanted:
        # Who asks for memory alone and had no burst means just that memory.
        plain = base.limit == base.memory
        wanted["limit"] = wanted["memory"] if plain else max(base.limit, wanted["memory"])
    return replace(base, **wanted)


def fit_unasked(
    request: Request,
    fields: Mapping[str, Any],
    settings: PoolSettings,
    owner: str,
    capacities: Iterable[int],
) -> Request:
    """Return ``request`` with the sizes that ``fields`` does not name cut to what can be had.

    Nobody asked for those, so a machine with smaller devices (``capacities``, in bytes) gives what
    it has instead of refusing.
    """
    sizes = sorted((size for size in capacities if size), reverse=True)
    if not 0 < request.devices <= len(sizes):
        return request
    most = sizes[request.devices - 1]
    if settings.max_memory_per_kernel is not None:
        most = min(most, settings.max_memory_per_kernel)
    memory, limit = request.memory, request.limit
    if fields.get("memory") is None:
        memory = min(memory, most)
    if fields.get("limit") is None:
        quota = settings.quotas.get(owner) or settings.quotas.get("*")
        if quota is not None and quota.memory is not None:
            most = min(most, quota.memory // request.devices)
        limit = max(memory, min(limit, most))
    return replace(request, memory=memory, limit=limit)


def blame_default(refusal: Refusal, fields: Mapping[str, Any]) -> Refusal:
    """Return ``refusal`` of a new session, naming the option that asked if nobody else did."""
    if fields.get("memory") is not None or refusal.code not in _ABOUT_SIZE:
        return refusal
    return replace(
        refusal,
        message=f"{refusal.message} Nobody asked for that size: it is c.GPUPool.default_memory.",
        next_step="Ask for less memory in the kernelspec, or have an admin lower "
        "c.GPUPool.default_memory.",
    )


def read_hold_kind(kind: str) -> HoldKind:
    """Return ``kind`` if it is one; raise :class:`ProtocolError` otherwise."""
    if kind not in _HOLD_KINDS:
        raise ProtocolError(f"There is no kind of hold {kind[:40]!r}.")
    return cast(HoldKind, kind)


def read_holds(given: list[Any], now: float) -> tuple[Hold, ...]:
    """Return the holds that an agent says it has."""
    holds = []
    for entry in given[:MAX_HOLDS]:
        name = entry.get("id", entry.get("hold")) if isinstance(entry, dict) else entry
        kind = entry.get("kind", "cell") if isinstance(entry, dict) else "cell"
        if not isinstance(name, str) or not name or not isinstance(kind, str):
            raise ProtocolError("A hold in 'holds' must be an object with 'id' and 'kind'.")
        holds.append(Hold(name[:MAX_NAME], read_hold_kind(kind), now))
    return tuple(holds)
