# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Answers to users' requests about one session: a new size, growth, release, keep.

:func:`reply` answers a request for a new size or for a release. The pool calls it after it has made
the plan, because the answer depends on the plan.
"""

from __future__ import annotations

from typing import Iterator

from ..errors import Code
from ..states import ATTACHED, HAS_LEASE
from ..units import format_bytes, format_seconds
from . import events as ev
from .draft import Draft
from .facts import Facts, charge_of
from .model import Reason, Refusal, Request, Slice
from .placement import asking, ever
from .preemption import leaves_at, suspendable
from .schedule import Plan, outlook
from .session import NEVER, Session
from .transitions import Actions, resize
from .words import in_words, stays_reason

#: A sample that arrives after a change of the session may show the use of up to this many seconds
#: before the change.
SETTLE = 2.0
#: A lease keeps unused grown bytes for this many seconds, if no session needs them.
UNUSED = 60.0
#: If there is room and no session waits, a lease grows in steps of at least its limit divided by
#: this number.
STEPS = 16


def _answer(s: Session, rid: str, note: str | Refusal) -> Actions:
    if isinstance(note, Refusal):
        return [ev.Answer(session=s.id, rid=rid, refusal=note)]
    return [ev.Answer(session=s.id, rid=rid, note=note)]


# --------------------------------------------------------------------------- another size


def changed(facts: Facts, s: Session, event: ev.RequestChanged, plan: Plan) -> Actions:
    """Store a new request. If it is smaller, take bytes that it no longer covers back at once."""
    new = event.request
    refusal = change_refusal(facts, s, new)
    if refusal is not None:
        return _answer(s, event.rid, refusal)
    old = s.request
    with facts.change(s):
        s.request, s.possible = new, -1
    if s.state not in ATTACHED:
        return _answer(s, event.rid, _size_note(facts, s, plan))
    less = new.memory < old.memory or new.limit < old.limit
    if less or new.devices != len(s.lease.slices):
        return resize(facts, s, trimmed(s, reclaim=True))
    return []


def change_refusal(facts: Facts, s: Session, new: Request) -> Refusal | None:
    """Return why ``s`` cannot ask for ``new``, or None."""
    return ever(new, s, facts) or _bound(s, new) or _in_use(s, new)


def _bound(s: Session, new: Request) -> Refusal | None:
    """Return why the number of devices cannot change, or None."""
    slices = s.lease.slices
    here = len(s.suspended) or len(slices) or len(s.bound) or s.request.devices
    if new.devices in (here, s.request.devices):
        return None
    if not (s.suspended or s.bound or (slices and not s.empty)):
        return None
    return Refusal(
        Code.DEVICES_BOUND,
        f"{new.devices} GPUs were asked for; this kernel already uses CUDA on {here}, and a "
        "process cannot change that number.",
        "Restart the kernel, and ask again before it uses CUDA.",
        {"devices": new.devices, "bound": here},
    )


def _in_use(s: Session, new: Request) -> Refusal | None:
    """Return why the lease cannot shrink to the size of ``new``, or None.

    The new size must be enough for the device where the kernel uses the most bytes, because a
    kernel asks for the same size on each device.
    """
    sizes = s.lease.restored | s.lease.footprints | {x.device: x.bytes for x in s.suspended}
    used = max(sizes.values(), default=0)
    for name, wanted, had in (
        ("memory", new.memory, s.request.memory),
        ("limit", new.limit, s.request.limit),
    ):
        if wanted < had and wanted < used:
            what = "A limit of " if name == "limit" else ""
            enough = format_bytes(used, rounding="up")
            return Refusal(
                Code.IN_USE,
                f"{what}{format_bytes(wanted)} was asked for; the kernel uses {enough} now.",
                f"Free memory first, or ask for at least {enough}.",
                {"memory": new.memory, name: wanted, "in_use": used},
            )
    return None


def _size_note(facts: Facts, s: Session, plan: Plan) -> str:
    """Return the answer to a new request, after the plan is made."""
    note, request = _what_became(facts, s, plan), s.request
    if request.limit > request.memory:
        note += (
            f" The slice may grow to {format_bytes(request.limit)} while that much is free; "
            f"{format_bytes(request.memory)} is guaranteed."
        )
    return note


def _what_became(facts: Facts, s: Session, plan: Plan) -> str:
    if s.state == "queued":
        return "The kernel waits for the new size."
    if s.state not in HAS_LEASE:
        return "The change applies when the kernel next gets its slice."
    if s.state not in ATTACHED:
        return "The change applies when the current attach or suspend is done."
    slices, limit = s.lease.slices, s.request.limit
    if s.request.devices != len(slices):
        return "The change applies at the next attach: release the slice first (%gpu release)."
    have = format_bytes(slices[0].bytes)
    if s.id in plan.promises:
        return f"The slice stays at {have} until idle kernels have made room."
    if s.id in facts.short:
        why = plan.reasons.get(s.id)
        if why is not None and why.rule in ("quota", "cap"):
            held = in_words(facts, why)
            return f"The slice stays at {have}: {held}. It grows when the quota has room."
        return (
            f"The slice stays at {have}: this GPU has too little free memory. It grows as soon as "
            "memory becomes free."
        )
    if all(x.bytes <= max(limit, s.lease.footprints.get(x.device, 0)) for x in slices):
        return f"The slice is {have} now."
    return "The change applies when the pool has measured the memory in use."


# --------------------------------------------------------------------------- more than guaranteed
#
# Burst: the pool guarantees ``request.memory`` to a lease, and the lease may grow into free memory
# up to ``request.limit``. The pool preempts no lease for growth. A lease cannot grow into bytes
# that the plan promises or reserves. If a lease grows so much that its state does not fit in host
# memory, the bytes that are guaranteed to other sessions must stay free. A lease grows in steps, so
# that a program with many small allocations does not send a request for each of them. While another
# session waits, a step is no larger than the missing bytes. The pool takes back grown bytes that
# the session does not use: at once if another session waits, otherwise after ``UNUSED`` seconds. It
# gets back grown bytes in use only when it suspends the session.


def trimmed(s: Session, *, reclaim: bool, only: str = "") -> tuple[Slice, ...]:
    """Return the slices of an attached session without the bytes that the session must give back.

    A slice always keeps its guaranteed bytes and the bytes that were in use at the last
    measurement. It loses all other bytes beyond the limit of the request. With ``reclaim``, it also
    loses grown bytes within the limit if a sample shows that they are unused. If ``only`` names a
    device, only the slice on this device shrinks.
    """
    memory, limit, lease = s.request.memory, s.request.limit, s.lease
    slices = []
    for x in lease.slices:
        used = lease.footprints.get(x.device)
        if used is not None and x.bytes > memory and only in ("", x.device):
            most = max(memory, used)
            # Only a sample taken after the growth shows whether the session uses the grown bytes.
            settled = lease.measured_at.get(x.device, NEVER) >= lease.grown_at + SETTLE
            if not (reclaim and settled):
                most = max(most, limit)
            slices.append(Slice(x.device, min(x.bytes, most)))
        else:
            slices.append(x)
    return tuple(slices)


def unused_for_long(s: Session, now: float) -> bool:
    """Return whether ``UNUSED`` seconds have passed since the lease last grew, and since its use
    last rose. The pool may then take unused grown bytes back.
    """
    return now >= max(s.lease.rose_at, s.lease.grown_at) + UNUSED


def held_on(s: Session, uuid: str) -> int:
    """Return the bytes of the slice on a device; 0 without a slice there."""
    return next((x.bytes for x in s.lease.slices if x.device == uuid), 0)


def _growth_bounds(
    draft: Draft, s: Session, uuid: str, behind: Reason | None
) -> Iterator[tuple[int, Refusal]]:
    """Yield for each rule the most bytes by which a slice may grow, and the refusal of more bytes.

    ``draft`` has the memory that the plan leaves. ``behind`` is not None if another session waits
    for the owner's quota or for the cap of a group of the owner.
    """
    facts, settings = draft.facts, draft.facts.settings
    held, limit = held_on(s, uuid), s.request.limit
    numbers = {"device": uuid, "granted": held, "limit": limit}
    yield (
        limit - held,
        Refusal(
            Code.LIMIT,
            f"the limit of this kernel is {format_bytes(limit)} on a GPU.",
            "Free memory in the kernel, or ask for a higher limit with %gpu.",
            numbers,
        ),
    )
    ledger = facts.devices[uuid]
    free = 0 if ledger.drained else draft.left(ledger)
    kept = " and not reserved for waiting kernels" if ledger.free > free >= 0 else ""
    yield (
        free,
        Refusal(
            Code.NO_MEMORY,
            f"{format_bytes(max(0, free))} is free on this GPU now{kept}.",
            "Free memory in the kernel, or try again when other kernels are idle. "
            "Memory that you ask for with %gpu is guaranteed.",
            {**numbers, "free": max(0, free)},
        ),
    )
    cap = draft.room_of(s.owner)
    if cap is not None:
        step = "Free memory in the kernel, or wait until other kernels of the group end."
        left = 0 if behind else cap.most - (charge_of(s, s.lease.slices) - s.lease.charge)
        if behind is None:
            why = (
                f"your group {cap.group} may have {format_bytes(facts.tree.caps[cap.group])} at "
                f"once, and {format_bytes(max(0, left))} of this is left."
            )
        elif behind.group:
            why = (
                f"your group {behind.group} may have "
                f"{format_bytes(facts.tree.caps[behind.group])} at once, and another kernel waits "
                "for what is left of this."
            )
        else:
            why = "another kernel of yours waits for what is left of your quota."
            step = "Free memory in the kernel, or end another kernel of yours."
        yield left, Refusal(Code.QUOTA, why, step, {**numbers, "left": max(0, left)})
    if any(facts.devices[x.device].device.can_suspend for x in s.lease.slices):
        most = settings.host_most(s.owner.name)
        others = free - owed(facts, s, uuid)
        yield (
            max(most - s.lease.granted, others),
            Refusal(
                Code.NO_MEMORY,
                f"only {format_bytes(max(0, others))} of the free memory is not guaranteed to "
                "other kernels. A kernel may take more than that only if its state fits in host "
                f"memory, and at most {format_bytes(most)} fits there.",
                "Free memory in the kernel, or ask an admin for more host memory.",
                {**numbers, "most": most, "free": max(0, others)},
            ),
        )
    quota = settings.quota_of(s.owner.name)
    if quota.memory is not None:
        left = quota.memory - draft.usage(s.owner.name).memory
        left -= charge_of(s, s.lease.slices) - s.lease.charge
        why = f"your quota of GPU memory has {format_bytes(max(0, left))} left."
        if behind:
            # If the kernel grew into the rest of the quota, the owner's other session would wait
            # for longer.
            left = 0
            why = "another kernel of yours waits for what is left of your quota of GPU memory."
        step = "Free memory in the kernel, or end another kernel of yours."
        yield left, Refusal(Code.QUOTA, why, step, {**numbers, "left": max(0, left)})


def owed(facts: Facts, s: Session, uuid: str) -> int:
    """Return how many bytes of a device must stay free if ``s`` grows so much that it cannot be
    suspended.

    A program that is alone on a GPU may use the whole GPU, even if its state does not fit in host
    memory. The pool can then no longer suspend the program to get the grown bytes back. So ``s``
    must leave two amounts free on each device. The first is the largest request of a session that
    has no lease, gives its lease back or lacks guaranteed bytes. The second is the sum of the
    unused guarantees of other groups. (One request is enough: the pool can suspend other sessions
    to make room for the next request.)
    """
    ledger, most = facts.devices[uuid], 0
    for other in facts.sessions.values():
        if other is s:
            continue
        if other.state == "detaching":
            most = max([most, *(x.bytes for x in other.lease.slices)])
        elif not other.lease.slices or other.id in facts.short:
            needs = (n for n in asking(other, facts).needs if n.allows(ledger))
            most = max([most, *(n.amount(ledger) for n in needs)])
    own = facts.tree.path(s.owner.group)
    return most + sum(
        max(0, size - (held.stays if (held := facts.group_usage.get(name)) else 0))
        for name, size in facts.tree.guarantees.items()
        if name not in own
    )


def growable(facts: Facts, s: Session, plan: Plan) -> tuple[int, ...]:
    """Return by how many bytes each slice of an attached session could grow now."""
    draft, behind = outlook(facts, plan), plan.behind(s, facts)
    return tuple(
        max(0, min(most for most, _ in _growth_bounds(draft, s, x.device, behind)))
        for x in s.lease.slices
    )


def _growth(facts: Facts, s: Session, uuid: str, missing: int, plan: Plan) -> Refusal | int:
    """Return by how many bytes a slice grows, or why it cannot grow.

    ``missing`` is the number of bytes that the kernel needs in addition to the slice.
    """
    draft, behind = outlook(facts, plan, but=s.id), plan.behind(s, facts)
    bounds = list(_growth_bounds(draft, s, uuid, behind))
    for most, why in bounds:
        if most < missing:
            held = format_bytes(held_on(s, uuid))
            more = format_bytes(missing)
            asked = f"This kernel asked for {more} in addition to its slice of {held}"
            numbers = {**why.details, "bytes": missing}
            return Refusal(why.code, f"{asked}; {why.message}", why.next_step, numbers)
    if facts.waiting or any(held_on(o, uuid) for o in facts.short.values()):
        return missing
    step = max(missing, s.request.limit // STEPS, facts.settings.growth_step)
    if any(facts.devices[x.device].device.can_suspend for x in s.lease.slices):
        # A whole step may make the state too large for host memory. If so, grow only as far as the
        # state fits, but at least by the missing bytes.
        most = facts.settings.host_most(s.owner.name)
        step = max(missing, min(step, most - s.lease.granted))
    return min([step, *(most for most, _ in bounds)])


def grow(facts: Facts, s: Session, event: ev.GrowAsked, plan: Plan) -> Actions:
    """Let an attached session grow into the memory that the plan leaves, and answer."""
    uuid, missing = event.device, max(0, event.bytes)
    if s.state not in ATTACHED or not held_on(s, uuid):
        refusal = Refusal(
            Code.NO_MEMORY,
            "This kernel asked for more memory on a GPU where it has no slice now.",
            "Try again once it has a slice there.",
            {"device": uuid, "bytes": event.bytes, "granted": 0},
        )
        return _answer(s, event.rid, refusal)
    actions: Actions = []
    if missing:
        found = _growth(facts, s, uuid, missing, plan)
        if isinstance(found, Refusal) and found.code != Code.LIMIT:
            # Take back unused growth of other sessions, but not of ``s``: it needs all of its
            # bytes.
            actions = reclaim(facts, but=s)
            if actions:
                found = _growth(facts, s, uuid, missing, plan)
        if isinstance(found, Refusal):
            return [*actions, *_answer(s, event.rid, found)]
        actions += _grown(facts, s, uuid, found)
    have = format_bytes(held_on(s, uuid))
    return [*actions, *_answer(s, event.rid, f"The slice is {have} now.")]


def grow_by(facts: Facts, s: Session, uuid: str, more: int, plan: Plan) -> Actions:
    """Let a slice grow by exactly ``more`` if every rule allows it."""
    found = _growth(facts, s, uuid, more, plan)
    return [] if isinstance(found, Refusal) else _grown(facts, s, uuid, more)


def _grown(facts: Facts, s: Session, uuid: str, more: int) -> Actions:
    s.lease.grown_at = facts.now
    slices = (Slice(x.device, x.bytes + more * (x.device == uuid)) for x in s.lease.slices)
    return resize(facts, s, tuple(slices))


def reclaim(facts: Facts, but: Session | None = None) -> Actions:
    """Take back all unused growth."""
    actions: Actions = []
    for s in list(facts.grown.values()):
        if s is not but:
            actions += resize(facts, s, trimmed(s, reclaim=True))
    return actions


# --------------------------------------------------------------------------- release and keep


def release(facts: Facts, s: Session, event: ev.ReleaseAsked, _plan: Plan) -> Actions:
    """Give the slice back, now or when the last hold is dropped."""
    if s.state == "queued":
        refusal = Refusal(
            Code.NOTHING_TO_RELEASE,
            "The kernel waits for a slice and has none.",
            "Interrupt the cell to stop waiting.",
        )
        return _answer(s, event.rid, refusal)
    if s.state == "detached":
        return _answer(s, event.rid, "The kernel has no slice.")
    if s.state == "detaching":
        return _answer(s, event.rid, "The pool is already taking the slice back.")
    if not suspendable(s, facts) and (s.state == "idle" or s.lease.footprint):
        name = facts.devices[s.lease.slices[0].device].device.name
        refusal = Refusal(
            Code.CANNOT_SUSPEND,
            f"The state of this kernel cannot be moved off its GPU ({name}).",
            "Free the memory in the kernel, or restart it, to give the slice back.",
        )
        return _answer(s, event.rid, refusal)
    s.release_asked = True
    s.keep_until = 0.0
    if s.state != "idle":
        cell = any(h.kind != "device" for h in s.holds.values())
        when = "the running cell is done" if cell else "the kernel's work on the GPU is done"
        actions = _answer(s, event.rid, f"The slice goes back when {when}.")
        if s.attach == "lazy" and not s.lease.told_wanted:
            # The user gives the slice back, so the agent of the lazy kernel must from now on report
            # at once when no cell runs.
            s.lease.told_wanted = True
            actions.append(ev.Wanted(session=s.id, epoch=s.epoch))
        return actions
    return []


def _release_note(facts: Facts, s: Session) -> str:
    """Return the answer to the release of an idle slice, after the plan is made."""
    if s.state != "idle":
        return "The slice goes back to the pool."
    why, leaves = stays_reason(facts, s, facts.now), leaves_at(s, facts)
    if leaves > facts.now and not (s.pressed or (s.roomless and not s.pinned_reason)):
        why = s.pinned_reason or "the last attempt failed"
        left = format_seconds(leaves - facts.now)
        return f"The kernel cannot give its slice back now ({why}); the pool tries again in {left}."
    return why or (
        "Host memory has no room for the kernel's state now; the slice goes back as soon as there "
        "is room."
    )


def keep(facts: Facts, s: Session, event: ev.KeepAsked, _plan: Plan) -> Actions:
    """Keep the slice until a time, even if it is idle."""
    left, most = event.until - facts.now, facts.settings.max_keep
    if left > 0 and s.state not in HAS_LEASE:
        refusal = Refusal(
            Code.NOTHING_TO_KEEP,
            "The kernel has no slice to keep.",
            "Get one first: use the GPU in a cell, or type %gpu attach.",
        )
        return _answer(s, event.rid, refusal)
    if left > most:
        again = f"Ask for {format_seconds(most)}, and ask again before that time is over."
        refusal = Refusal(
            Code.OVER_KEEP,
            f"{format_seconds(left)} was asked for; an idle slice is kept for at most "
            f"{format_seconds(most)} at a time (c.GPUPool.max_keep).",
            again if most > 0 else "Ask an admin for a longer time.",
            {"seconds": left, "most": most},
        )
        return _answer(s, event.rid, refusal)
    s.keep_until = event.until
    s.release_asked = False
    if left <= 0:
        return _answer(
            s, event.rid, "The pool may take the slice back again when the kernel is idle."
        )
    note = f"The slice stays for {format_seconds(left)}, even when idle."
    if facts.now < s.recall_at < event.until:
        left = s.recall_at - facts.now
        note += f" Even so, an administrator takes it back in {format_seconds(left)}."
    return _answer(s, event.rid, note)


# --------------------------------------------------------------------------- after the plan


def reply(
    facts: Facts, event: ev.RequestChanged | ev.ReleaseAsked, plan: Plan, actions: Actions
) -> Actions:
    """Return the answer to a request for a new size or for a release, after the plan is made.

    The answer is [] if the request was already answered before the plan.
    """
    if any(isinstance(a, ev.Answer) and a.rid == event.rid for a in actions):
        return []
    s = facts.sessions[event.session]
    if isinstance(event, ev.ReleaseAsked):
        return _answer(s, event.rid, _release_note(facts, s))
    return _answer(s, event.rid, _size_note(facts, s, plan))
