# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The sentences of the pool: why a session waits, and why it keeps its slice.

The sentences for all reasons are in this module and in :mod:`.why`. No sentence names another
owner.
"""

from __future__ import annotations

import math
from collections import Counter
from functools import cached_property
from typing import Mapping

from ..errors import Code
from ..states import HAS_LEASE, WAITING
from ..units import format_bytes, format_seconds
from .facts import Facts
from .model import Reason, Refusal, Rule
from .placement import asking
from .preemption import stays_until, suspendable, yields_at
from .schedule import Plan
from .session import Session
from .shares import Budget

# --------------------------------------------------------------------------- why it waits, in words


class Scene:
    """Values that the sentences of many sessions share. They are valid until the facts or the plan
    change.
    """

    def __init__(self, facts: Facts, plan: Plan) -> None:
        self._facts = facts
        self._plan = plan

    @cached_property
    def avail(self) -> Mapping[str, int]:
        """The bytes that are free and not promised, by device in service."""
        return _avail(self._facts, self._plan)

    @cached_property
    def users(self) -> str:
        """Which kernels have the slices, as the end of a sentence."""
        return _users(self._facts)


def reason(facts: Facts, plan: Plan, s: Session, scene: Scene | None = None) -> str:
    """Return why ``s`` waits for a lease, in words; "" if it does not.

    A caller that asks for many sessions at once passes the same ``scene`` for all of them.
    """
    why = plan.reasons.get(s.id)
    if why is None or s.state != "queued":
        return ""
    if s.preempted:
        return f"it was preempted: {s.preempted}; it goes on by itself" + _behind(why, facts)
    v = _stayer(facts, plan, s)
    if v is not None:
        ago = format_seconds(facts.now - v.lease.resumed_at)
        left = format_seconds(stays_until(v, facts) - facts.now)
        return (
            f"an idle kernel got its slice back {ago} ago and keeps it for {left} more, because "
            f"moving that kernel takes {v.measured.moving:.2g} s"
        )
    if why.rule == "planned":
        return _planned(facts, why.devices)
    if why.rule == "busy":
        scene = scene or Scene(facts, plan)
        avail = scene.avail
        settled = s.bound and (s.immovable or not s.suspended)
        enough = sum(1 for size in avail.values() if size >= s.request.memory)
        if settled and enough >= len(s.bound):
            return _settled(facts, avail, s)
        return _busy(facts, scene, why)
    return in_words(facts, why)


def _behind(why: Reason, facts: Facts) -> str:
    """Return when a preempted session continues, as the end of a sentence; "" if that is
    unknown.
    """
    if why.rule == "budget":
        if not why.most:
            return ""
        if why.at == math.inf:
            return " when other kernels of the same budget stop"
        return f" when there are GPU-seconds again, {_clock(facts, why.at)}"
    if why.rule == "class-closed" and why.at:
        return f" when the schedule lets its class run, {_clock(facts, why.at)}"
    if why.rule == "busy":
        where = "a GPU" if why.count <= 1 else f"each of {why.count} GPUs"
        return f" as soon as {format_bytes(why.bytes)} is free on {where}"
    return " after the next kernel in the queue" if why.rule == "behind-head" else ""


def in_words(facts: Facts, why: Reason) -> str:
    """Return why a session waits, in words, if the words depend only on the figures in ``why``."""
    if why.rule in ("host", "quota-host"):
        return f"{_UNMOVED}: {_host(facts, why)}"
    if why.rule == "quota":
        nouns = {"devices": "GPU", "leases": "slice"}
        most, limit = why.most, why.limit
        size = format_bytes(most) if limit == "memory" else _count(most, nouns[limit])
        if why.text:
            if not why.count:
                none = f"your kernels on this machine use none of your quota of {size}"
                return f"{none}, and {why.text}"
            return f"your quota of {size} is in use by {_others(why.count)} here, and {why.text}"
        if not why.count:
            return f"another waiting kernel of yours has reserved your quota of {size}"
        return f"your quota of {size} is in use by {_others(why.count)}"
    if why.rule == "drained":
        name = facts.devices[why.devices[0]].device.name
        return f"its GPU ({name}) is out of service: {why.text}"
    if why.rule == "foreign":
        size = format_bytes(why.bytes)
        return f"{size} is not free, because processes outside the pool use the GPUs"
    if why.rule == "cap":
        size = format_bytes(why.most)
        cap = f"the cap of your group {why.group} ({size})"
        if why.text:
            if not why.count:
                return f"kernels on this machine use none of {cap}, and {why.text}"
            return f"{cap} is in use by {_count(why.count, 'kernel')} here, and {why.text}"
        if not why.count:
            return f"another waiting kernel has reserved {cap}"
        kernels = _count(why.count, "kernel")
        return f"{cap} is in use by {kernels}"
    if why.rule == "behind-group":
        return (
            f"another kernel of your group {why.group} is ahead in the queue and waits for room in "
            "the group's cap"
        )
    if why.rule == "class-closed":
        closed = f"kernels of the priority class {why.limit!r} get no GPU at this time"
        opens = f"; the schedule lets them run {_clock(facts, why.at)}" if why.at else ""
        return closed + opens
    if why.rule == "budget":
        whose = f"your group {why.group}" if why.group else "you"
        if not why.most:
            return f"{whose} {'gets' if why.group else 'get'} no GPU-seconds"
        if why.text:
            text = f"{whose} used up this machine's part of today's GPU-seconds, and {why.text}"
            if why.at < math.inf:
                text += f"; there are more {_clock(facts, why.at)} at the latest"
            return text
        return f"{whose} used up the GPU-seconds of today; {_again(facts, why)}"
    return why.text or _SENTENCES[why.rule]


_UNMOVED = "the pool cannot suspend any kernel that could make room"


def _host(facts: Facts, why: Reason) -> str:
    """Return, as a clause, why host memory has no room for the state of other sessions.

    The pool would have to suspend these other sessions to make room on a device.
    """
    if why.lacks == "size":
        return "the state of each of these kernels is larger than the host memory that it may use"
    if why.lacks == "quota":
        return "the users of these kernels have too little quota of suspended state left"
    used, budget = facts.host_used + facts.host_going, facts.settings.host_memory
    if facts.host_room < budget - used:
        room = format_bytes(max(0, facts.host_room))
        return f"this machine has room for only {room} of suspended state now"
    left = max(0, budget - used)
    text = f"only {format_bytes(left)} of the {format_bytes(budget)} for suspended state is free"
    kept = left - max(0, why.most)
    head = (
        f", and {format_bytes(kept)} of this is reserved for the next kernel in the queue"
        if kept > 0
        else ""
    )
    return text + head


def _again(facts: Facts, why: Reason) -> str:
    """Return, as a clause, when a budget is available again."""
    if why.at == math.inf:
        return "there are more when other kernels of the same budget stop"
    return f"there are more {_clock(facts, why.at)}"


def _clock(facts: Facts, at: float) -> str:
    """Return as text how long it will be until ``at``, and which time of day ``at`` is.

    The time of day is in UTC, so that every machine shows the same text.
    """
    minutes = int((at + facts.meters.ahead) // 60) % 1440
    soon = format_seconds(max(1.0, at - facts.now))
    return f"in {soon}, at {minutes // 60:02}:{minutes % 60:02} UTC"


def budget_refusal(spent: Budget, facts: Facts) -> Refusal:
    """Return the refusal of a new lease when a daily budget is used up."""
    whose = f"The group {spent.group}" if spent.group else "You"
    s, have = ("s", "has") if spent.group else ("", "have")
    text = f"{whose} {have} used the {spent.daily.seconds:.0f} GPU-seconds of today."
    soonest = spent.soonest(facts.now)
    if spent.none:
        option = "groups" if spent.group else "quotas"
        text = f"{whose} get{s} no GPU-seconds: the daily budget is 0 (c.GPUPool.{option})."
        step = "Ask the administrator of the pool for a daily budget."
    elif spent.until == math.inf:
        kernels = f"Kernels of the group {spent.group}" if spent.group else "Your other kernels"
        step = "Try again later: this budget now refills on other machines only."
        if soonest < math.inf:
            step = (
                f"{kernels} use GPU-seconds as fast as the budget refills. If these kernels stop "
                f"now, there are more GPU-seconds {_clock(facts, soonest)}."
            )
    else:
        step = f"Try again later: there are more GPU-seconds {_clock(facts, soonest)}."
    ahead = facts.meters.ahead
    return Refusal(
        Code.BUDGET,
        text,
        step,
        {
            "group": spent.group,
            "seconds": spent.daily.seconds,
            "used": None if spent.daily.is_shared else round(spent.used, 3),
            "renews_at": None if spent.until == math.inf else spent.until + ahead,
            "soonest": None if soonest == math.inf else soonest + ahead,
        },
    )


_SENTENCES = {
    "behind-head": "the free memory is reserved for the next kernel in the queue",
    "behind-own": "another kernel of yours is ahead in the queue and waits for your quota",
    "nowhere": "every GPU that this kernel can use is out of service",
    "retry": "the last attempt to attach failed",
}


#: For each rule: what a session waits for, in words for people who may not see the details of the
#: session. The words contain no figures, no names of groups and no text of an admin. The words are
#: the same for all limits, so that they do not show whose quota, cap or budget is used up.
_LIMIT = "a limit of its user or group"
_SERVICE = "a GPU to come back into service"
FOR_OTHERS: Mapping[Rule, str] = {
    "planned": "GPU memory that other kernels are giving back",
    "busy": "GPU memory that is in use",
    "behind-head": "the kernel ahead of it, for which the free memory is reserved",
    "host": "room in host memory to suspend other kernels",
    "quota": _LIMIT,
    "quota-host": _LIMIT,
    "behind-own": _LIMIT,
    "cap": _LIMIT,
    "behind-group": _LIMIT,
    "budget": _LIMIT,
    "class-closed": "the hours of its priority class",
    "paused": _SERVICE,
    "drained": _SERVICE,
    "foreign": "GPU memory that is in use outside the pool",
    "nowhere": _SERVICE,
    "retry": "its next attempt to attach",
}


def waits_for(plan: Plan, s: Session) -> str:
    """Return what ``s`` waits for, in words for every user of the pool; "" if it does not wait."""
    why = plan.reasons.get(s.id)
    return "" if why is None or s.state != "queued" else FOR_OTHERS[why.rule]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _others(number: int) -> str:
    return "your other kernel" if number == 1 else f"{number} other kernels of yours"


def _avail(facts: Facts, plan: Plan) -> dict[str, int]:
    """Return the bytes that are free and not promised, by device in service."""
    found = {uuid: d.free for uuid, d in facts.devices.items() if not d.drained}
    for promise in plan.promises.values():
        for x in promise.takes:
            if x.device in found:
                found[x.device] -= x.bytes
    return found


def _planned(facts: Facts, devices: tuple[str, ...]) -> str:
    leaving = [
        s
        for s in facts.leased.values()
        if s.state == "detaching" and any(x.device in devices for x in s.lease.slices)
    ]
    if not leaving:
        return "waiting for memory to become free"
    noun = "kernel" if any(s.lease.preempted for s in leaving) else "idle kernel"
    return f"waiting for {_count(len(leaving), noun)} to be suspended"


def _busy(facts: Facts, scene: Scene, why: Reason) -> str:
    free, users = scene.avail, scene.users
    best = max(free.values(), default=0)
    if best <= 0:
        total = sum(d.capacity for d in facts.devices.values() if not d.drained)
        return f"all {format_bytes(total)} in use by {users}"
    if why.count > 1:
        large = sum(1 for size in free.values() if size >= why.bytes)
        there = f"{_count(large, 'GPU')} {'has' if large == 1 else 'have'} that much free"
        return (
            f"{format_bytes(why.bytes)} on each of {why.count} GPUs is needed and {there}; "
            f"the rest is in use by {users}"
        )
    return (
        f"{format_bytes(why.bytes)} is needed and at most {format_bytes(best)} is free on a GPU; "
        f"the rest is in use by {users}"
    )


def _users(facts: Facts) -> str:
    """Return which kernels have the slices, as the end of a sentence."""
    idle = [s for s in facts.leased.values() if s.state == "idle"]
    roomless = sum(1 for s in idle if s.roomless)
    failed = sum(1 for s in idle if s.refused and not s.roomless and s.retry_at > facts.now)
    users = []
    if any(s.state == "active" for s in facts.leased.values()):
        users.append("running cells")
    elif len(idle) > roomless + failed:
        users.append("kernels that keep their slice")
    elif not idle:
        users.append("kernels that are being moved")
    if roomless:
        kernels = _count(roomless, "idle kernel")
        users.append(f"{kernels} that cannot be suspended, because host memory is short")
    if failed:
        kernels = _count(failed, "idle kernel")
        users.append(f"{kernels} that could not be suspended (the pool tries again)")
    return " and ".join(users)


def _settled(facts: Facts, avail: Mapping[str, int], s: Session) -> str:
    """Return why ``s`` must wait for certain devices, although other devices may be free.

    The reason is that CUDA binds a process to devices, and the driver or the pool cannot move it to
    all other devices.
    """
    needs = asking(s, facts).needs
    ledgers = [facts.devices[uuid] for uuid in s.bound]
    if not any(need.fixed for need in needs):
        models = [ledger.device.model for ledger in ledgers]
        same = (n for u, n in avail.items() if facts.devices[u].device.model in models)
        free = format_bytes(max(0, max(same, default=0)))
        size = format_bytes(s.request.memory)
        counts = Counter(models)
        if len(counts) > 1:
            kinds = " and ".join(f"{n} of the model {model}" for model, n in counts.items())
            return (
                f"{size} is needed on each of {len(s.bound)} GPUs ({kinds}), because the kernel "
                "initialised CUDA on these models; too few such GPUs have that much free"
            )
        names = models[0]
        if len(s.bound) > 1:
            return (
                f"{size} is needed on each of {len(s.bound)} GPUs of the model {names}, because "
                "the kernel initialised CUDA on this model; too few such GPUs have that much free"
            )
        return (
            f"{size} is needed on a GPU of the model {names}, because the kernel initialised CUDA "
            f"on this model; at most {free} is free on such a GPU"
        )
    free = format_bytes(max(0, min(avail.get(uuid, 0) for uuid in s.bound)))
    names = ", ".join(str(ledger.device.index) for ledger in ledgers)
    if len(ledgers) == 1:
        where, here, other = f"GPU {names}", "this GPU", "another GPU"
    else:
        where, here, other = f"each of the GPUs {names}", "these GPUs", "other GPUs"
    needed = max([s.request.memory, *(need.bytes for need in needs)])
    why = (
        f"was suspended from {here}, and the driver cannot move its state to {other}"
        if s.suspended
        else f"initialised CUDA on {here}, and the driver could not move it to {other}"
        if s.immovable
        else f"initialised CUDA on {here}, and the pool cannot move it to {other} before its first "
        "slice"
    )
    size = format_bytes(needed)
    return f"{size} is needed on {where}, and {free} is free there; the kernel {why}"


def _stayer(facts: Facts, plan: Plan, s: Session) -> Session | None:
    """Return the protected idle session whose lease the head ``s`` waits for, or None.

    The pool protects an idle session for some time after it has moved the session's state. If each
    of several protected leases would make room for the head, the answer is the session whose
    protection ends first. If ``s`` is not the head, the answer is None: ``s`` then also waits for
    the head.
    """
    held = plan.reservation
    if held is None or held.session != s.id or plan.reasons[s.id].rule != "busy":
        return None
    needs, avail = asking(s, facts).needs, _avail(facts, plan)
    #: Bytes of idle leases that may be preempted now, by device.
    idle: dict[str, int] = {}
    stayers: list[tuple[float, int, Session]] = []
    for v in facts.leased.values():
        if v.state != "idle":
            continue
        stays, yields = stays_until(v, facts), yields_at(v, facts)
        if yields <= facts.now:
            for x in v.lease.slices:
                idle[x.device] = idle.get(x.device, 0) + x.bytes
        elif stays == yields < math.inf:  # else another rule protects the lease for longer
            stayers.append((stays, len(stayers), v))
    for _, _, v in sorted(stayers):
        for x in v.lease.slices:
            ledger = facts.devices[x.device]
            room = avail.get(x.device, 0) + ledger.incoming + idle.get(x.device, 0) + x.bytes
            if any(n.allows(ledger) and n.amount(ledger) <= room for n in needs):
                return v
    return None


# --------------------------------------------------------------------------- why it stays, in words


def stays_reason(facts: Facts, s: Session, now: float) -> str:
    """Return, as a sentence, why idle ``s`` keeps its slice although its time is over; else "".

    If ``s`` cannot be suspended, or if a suspend failed, the answer may come before this time. The
    answer is "" for a pinned session: its ``pinned_reason`` says why the session keeps its slice.
    """
    if s.state != "idle" or s.pinned_reason:
        return ""
    if not suspendable(s, facts):
        # If the last measurement found no device memory, the lease probably has no state. The pool
        # can then take the slice even from a GPU that cannot suspend a process.
        lease = s.lease
        nothing = len(lease.footprints) >= len(lease.slices) and not lease.footprint
        return "" if nothing else _STAYS["fixed"]
    asked = s.release_asked or any(facts.devices[x.device].paused for x in s.lease.slices)
    due = 0.0 if asked else max(s.idle_since + facts.settings.idle_timeout, s.keep_until)
    if s.pressed and s.state_bound:
        return _STAYS["pressed"] if due <= now else ""
    if s.roomless:
        return s.roomless
    if s.failures and now < s.retry_at and (s.failures > 1 or due < s.retry_at):
        why = f": {s.refused.rstrip('.')}" if s.refused else ""
        return (
            f"The last attempt to suspend the kernel failed{why}. The pool tries again by itself."
        )
    if max(due, s.retry_at) > now:
        return ""
    bound, budget = s.state_bound, facts.settings.host_memory
    free = budget - facts.host_used - facts.host_going
    if bound > budget:
        return (
            f"Its state may need {format_bytes(bound)}, and this machine keeps at most "
            f"{format_bytes(budget)} of state in host memory; the slice stays until the kernel "
            "frees memory or ends."
        )
    own = facts.settings.quota_of(s.owner.name).suspended
    usage = facts.usage.get(s.owner.name)
    if own is not None and usage is not None and bound > own - usage.suspended:
        size = format_bytes(own)
        return f"Your quota of {size} of suspended state is full; the slice goes back {_ROOM}."
    if bound > free:
        return (
            f"Its state may need {format_bytes(bound)}, and only {format_bytes(free)} of the "
            f"{format_bytes(budget)} of host memory for suspended kernels is free; the slice "
            f"goes back {_ROOM}."
        )
    return _STAYS["machine"] if bound > facts.host_room else _STAYS["kept"]


def taken_reason(s: Session) -> str:
    """Return, as a clause, why the pool took the slice of a session while the session was idle.

    The answer is "" in three cases: the idle time-out ended the lease, the user gave the lease
    back, or the broker has restarted since the suspend.
    """
    if s.state != "detached" or not s.suspended:
        return ""
    why = next((text for _, _, new, text, _ in reversed(s.story) if new == "detaching"), "")
    # Use the past tense: when people read the clause, the other session may no longer wait.
    return "" if why in ("idle", "release") else why.replace(" waits for ", " waited for ")


_ROOM = "as soon as there is room"

_STAYS = {
    "fixed": (
        "State on this GPU cannot be moved to host memory; the slice stays until the kernel frees "
        "its memory or ends."
    ),
    "pressed": (
        "The host memory that this kernel may use is nearly full, so its state stays on the GPU. "
        f"The slice goes back {_ROOM}."
    ),
    "machine": f"This machine has too little free memory now; the slice goes back {_ROOM}.",
    "kept": (
        "The remaining host memory is reserved for the next kernel in the queue; the slice "
        f"goes back {_ROOM}."
    ),
}


def seconds(s: Session, now: float) -> tuple[float, float]:
    """Return how many seconds ``s`` has waited so far, and how many it has been attached so far."""
    waited, attached = s.wait_seconds_total, s.attached_seconds_total
    if s.state in WAITING:
        waited += max(0.0, now - s.queued_at)
    if s.state in HAS_LEASE:
        attached += max(0.0, now - s.lease.attached_at)
    return waited, attached
