# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Burst: what a lease may have beyond what is guaranteed, and how the pool gets it back.

A lease is guaranteed ``request.memory`` and may grow to ``request.limit`` out of free memory:
nobody is suspended for it, and nothing is taken that a waiting session was promised. It grows in
steps, so that a program which allocates little by little does not ask each time; while somebody
waits, in steps of just what is missing. Grown bytes that are not in use are the first to be
reclaimed: at once when somebody waits, else after ``UNUSED`` seconds. Those in use come back like
all others, by suspending the session when it is idle.
"""

from __future__ import annotations

import math

from ..units import format_bytes
from . import events as ev
from .books import Books
from .inventory import DeviceLedger
from .lease import ATTACHED, Session
from .model import Refusal, Slice
from .placement import spare

#: A sample may be older than the last change of the session by up to so many seconds.
SETTLE = 2.0
#: Seconds for which grown bytes stay although they are not used and nobody needs them.
UNUSED = 60.0
#: A lease grows at least by its limit through this, if there is room and nobody waits.
STEPS = 16


def room(books: Books, ledger: DeviceLedger) -> int:
    """Return the bytes on a device that growth may take now: what no waiting session is to get."""
    if ledger.drained:
        return 0
    claim = books.claim
    wanted = claim.wanted.get(ledger.device.uuid) if claim is not None else None
    return ledger.avail if wanted is None else min(ledger.avail, spare(ledger, wanted))


def wanted_by_others(books: Books, ledger: DeviceLedger) -> bool:
    """Return whether anybody waits for memory that this device might give."""
    return bool(len(books.order) or ledger.growers)


def trim(books: Books, s: Session, *, reclaim: bool, only: str = "") -> bool:
    """Shrink the lease of an attached session; return whether anything came free.

    Nothing is taken below what is guaranteed or was last measured in use. Above that, everything
    beyond the limit goes, and with ``reclaim`` what has grown, too, once a sample shows that it is
    not used. ``only``: on this device.
    """
    memory, limit = s.request.memory, s.request.limit
    slices = []
    for x in s.slices:
        used = s.footprints.get(x.device)
        if used is not None and x.bytes > memory and only in ("", x.device):
            most = max(memory, used)
            if not (reclaim and _settled(s, x.device)):
                most = max(most, limit)
            slices.append(Slice(x.device, min(x.bytes, most)))
        else:
            slices.append(x)
    if tuple(slices) == s.slices:
        return False
    books.resize(s, slices)
    books.note_growth(s)
    return True


def reclaim(books: Books, but: Session | None = None) -> bool:
    """Take back what has grown anywhere and is not used; return whether anything came free.

    ``but``: not of this session, which is about to use all it has.
    """
    found = False
    for s in list(books.grown.values()):
        if s.state in ATTACHED and s is not but:
            found = trim(books, s, reclaim=True) or found
    return found


def measured(books: Books, s: Session, ledger: DeviceLedger, used: int, before: int) -> None:
    """Fit a lease above or below what was just measured on one device (``before``: earlier)."""
    uuid = ledger.device.uuid
    held = ledger.leases.get(s.id, 0)
    if used > before:
        s.rose_at = books.now
    if held > s.request.memory:
        s.measured_at[uuid] = books.now
    if used > held:
        # If it has grown, it took these while they were found unused and taken back.
        if s.grown_at > -math.inf and refused(books, s, ledger, used - held) is None:
            grow(books, s, uuid, used - held)
    elif held > s.request.memory:
        unused = books.now >= max(s.rose_at, s.grown_at) + UNUSED
        trim(books, s, reclaim=unused or wanted_by_others(books, ledger), only=uuid)


def refused(books: Books, s: Session, ledger: DeviceLedger, more: int) -> Refusal | None:
    """Return why a slice can not grow by ``more`` bytes now, or None."""
    uuid, held, limit = ledger.device.uuid, ledger.leases[s.id], s.request.limit
    asked = f"{format_bytes(more)} beyond the slice of {format_bytes(held)} were asked for"
    numbers = {"device": uuid, "bytes": more, "granted": held, "limit": limit}
    if held + more > limit:
        return Refusal(
            "limit",
            f"{asked}; the limit of this kernel is {format_bytes(limit)} on a GPU.",
            "Free memory in the kernel, or ask for a higher limit with %gpu.",
            numbers,
        )
    free = room(books, ledger)
    if free < more:
        kept = " without what is kept for waiting kernels" if ledger.free > free >= 0 else ""
        return Refusal(
            "no-memory",
            f"{asked}; {format_bytes(max(0, free))} are free on this GPU now{kept}.",
            "Free memory in the kernel, or try again when other kernels have gone idle; "
            "what %gpu asks for is guaranteed.",
            {**numbers, "free": max(0, free)},
        )
    most = _host_most(books, s)
    if most is not None and s.granted + more > most:
        return Refusal(
            "no-memory",
            f"{asked}; when idle the kernel must fit in host memory, of which it may have "
            f"{format_bytes(most)}.",
            "Free memory in the kernel, or ask an admin for more host memory.",
            {**numbers, "most": most},
        )
    left = _quota_left(books, s)
    if left is not None and left < more:
        waits = bool(books.by_quota.get(s.owner.name))
        return Refusal(
            "quota",
            f"{asked}; " + _WAITS
            if waits
            else f"{asked}; your quota of GPU memory has {format_bytes(max(0, left))} left.",
            "Free memory in the kernel, or end another kernel of yours.",
            {**numbers, "left": max(0, left)},
        )
    return None


_WAITS = "another kernel of yours waits for what is left of your quota of GPU memory."


def grow(books: Books, s: Session, uuid: str, more: int) -> None:
    """Let a slice grow by ``more`` bytes, which :func:`refused` allows."""
    s.grown_at = books.now
    slices = [Slice(x.device, x.bytes + more * (x.device == uuid)) for x in s.slices]
    books.resize(s, slices)
    books.note_growth(s)


def step(books: Books, s: Session, ledger: DeviceLedger, missing: int) -> int:
    """Return by how much to grow a slice that :func:`refused` lets grow by ``missing``."""
    if wanted_by_others(books, ledger):
        return missing
    most = max(missing, s.request.limit // STEPS, books.settings.growth_step)
    return min(most, largest(books, s, ledger))


def largest(books: Books, s: Session, ledger: DeviceLedger) -> int:
    """Return the most bytes that :func:`refused` lets a slice grow by now."""
    bounds: list[int | None] = [
        s.request.limit - ledger.leases[s.id],
        room(books, ledger),
        _quota_left(books, s),
    ]
    most = _host_most(books, s)
    if most is not None:
        bounds.append(most - s.granted)
    return max(0, min(bound for bound in bounds if bound is not None))


def answer(books: Books, s: Session, event: ev.GrowAsked) -> Refusal | None:
    """Let an attached session grow as ``event`` asks, or return why not."""
    ledger = books.inventory.devices.get(event.device)
    if s.state not in ATTACHED or ledger is None or s.id not in ledger.leases:
        return Refusal(
            "no-memory",
            "More memory was asked for on a GPU where the kernel has no slice now.",
            "Try again once it has its slice.",
            {"device": event.device, "bytes": event.bytes, "granted": 0},
        )
    missing = max(0, event.bytes)
    if not missing:
        return None
    refusal = refused(books, s, ledger, missing)
    if refusal is not None and refusal.code != "limit" and reclaim(books, s):
        refusal = refused(books, s, ledger, missing)
    if refusal is None:
        grow(books, s, event.device, step(books, s, ledger, missing))
    return refusal


def _settled(s: Session, uuid: str) -> bool:
    """Return whether the last sample there is younger than the last growth."""
    return s.measured_at.get(uuid, -math.inf) >= s.grown_at + SETTLE


def _quota_left(books: Books, s: Session) -> int | None:
    """Return the bytes that the owner's quota leaves for growth, None if there is no limit."""
    owner = s.owner.name
    limit = books.quotas.limit(owner).memory if books.settings.quotas else None
    if limit is None:
        return None
    if books.by_quota.get(owner):
        # A kernel of the same owner waits for it, and would for ever.
        return 0
    return limit - books.quotas.usage(owner).memory - (s.charge_of(s.slices) - s.charge)


def _host_most(books: Books, s: Session) -> int | None:
    """Return the bytes that a session may have so that it can be suspended, None: any."""
    devices = books.inventory.devices
    if not any(devices[x.device].device.can_suspend for x in s.slices):
        return None
    most = books.host.budget
    if books.settings.quotas:
        own = books.quotas.limit(s.owner.name).suspended
        most = most if own is None else min(most, own)
    return most
