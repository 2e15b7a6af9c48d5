# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Why a session waits, or may lose its slice, in lines for its owner.

``jupyter gpupool why``, ``%gpu why``, the server and JupyterLab all show these lines. The lines
show sessions of other users by size and class, never by name.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Iterable, Mapping

from ..units import format_bytes, format_range, format_seconds, format_waited
from .estimate import ESTIMATED
from .evidence import Expected
from .explain import Explanation, GroupGuarantee, HeldLease, Standing, explain
from .facts import Facts
from .groups import DailyEnd
from .model import Owner
from .offers import smaller
from .schedule import Plan
from .session import Session
from .words import taken_reason

#: An explanation has at most this many lines about leases of the same owner, and at most this many
#: about leases of other owners. One more line gives the number of leases without a line.
MOST_TOLD = 6


@dataclass(frozen=True, slots=True)
class Told:
    """An explanation as data and in words: one sentence per line, the most important first."""

    found: Explanation
    #: The earliest and the latest time at which the wait will probably end; None without evidence.
    expected: Expected | None
    #: The waiting session would start now if it asked for only this many bytes on each GPU. None if
    #: it would have to wait with any size.
    starts_with: int | None
    #: The lines about the session's lease or wait, about the leases that it waits for, and about
    #: the events that would end the wait or take the lease.
    lines: tuple[str, ...]
    #: The line about how long the session has waited or will wait; "" if there is none.
    time: str
    #: The lines about guarantees, shares and budgets of its owner and groups; () if there are none.
    standing: tuple[str, ...]


def told(facts: Facts, plan: Plan, s: Session) -> Told:
    """Return :func:`~.explain.explain` with its lines for the owner of ``s``."""
    found = explain(facts, plan, s)
    expected = None if found.position is None else s.wait.expected
    about_time = [*_expected_lines(facts, s, found)] if found.position is not None else []
    lines = [*_state_lines(facts, plan, s, found, about_time)]
    size = smaller(facts, plan, s)
    if size is not None:
        each = " on each GPU" if s.request.devices > 1 else ""
        asked = format_bytes(s.request.memory)
        lines.append(f"With {format_bytes(size)}{each} instead of {asked}, it would start now.")
    if found.reason is not None:
        lines += _holder_lines(facts, found)
        lines += _host_lines(found)
        lines += _change_lines(facts, found)
    elif s.lease.slices and s.state != "detaching":
        if s.recall_at:
            until = format_seconds(max(0.0, s.recall_at - facts.now))
            lines.append(
                f"An administrator takes its slice back in {until}, even if the slice is in use."
            )
        lines += _exposed_lines(facts, s, found)
    standing = tuple(standing_lines(found.standing, facts.now))
    time = about_time[0] if about_time else ""
    return Told(found, expected, size, tuple(lines), time, standing)


def _state_lines(
    facts: Facts, plan: Plan, s: Session, found: Explanation, about_time: Iterable[str]
) -> Iterable[str]:
    sizes = ", ".join(f"{format_bytes(x.bytes)} on {_gpu(facts, x.device)}" for x in s.lease.slices)
    if found.position is not None:
        rank = f"It is {_ordinal(found.position)} of {len(plan.queue)} in the queue"
        yield f"{rank}: {found.text}."
        yield from about_time
        if found.standing.entitled:
            yield (
                f"A guarantee of its group {found.standing.entitled[0]} covers what it asks for, "
                "so it goes before all kernels without a guarantee."
            )
        else:
            yield from _beyond_lines(found)
        yield from _ahead_lines(facts, s, found)
    elif s.state == "detaching":
        yield f"It is giving back {sizes}" + (f": {found.preempted}." if found.preempted else ".")
    elif found.reason is not None:
        yield f"It has {sizes} and waits for the rest of its guaranteed memory."
    elif s.lease.slices:
        use = {"active": "is active and has", "idle": "is idle and keeps"}.get(s.state, "has")
        yield f"It {use} {sizes}." + (f" {found.text}" if found.text else "")
    else:
        yield "It has no slice and waits for none."
        if taken := taken_reason(s):
            yield f"The pool took its slice while it was idle: {taken}."


def _expected_lines(facts: Facts, s: Session, explained: Explanation) -> Iterable[str]:
    """Yield how long a session will probably wait, and the evidence for that."""
    found = s.wait.expected
    left = None if found is None else found.left(facts.now)
    if found is None or left is None:
        waited = format_waited(facts.now - s.queued_at)
        if waited:
            yield f"It has waited for {waited}; there is no estimate yet."
        elif explained.reason is not None and explained.reason.rule in ESTIMATED:
            yield "There is no estimate yet of how long it will wait."
        return
    yield f"It will probably wait for another {format_range(*left)}."
    moving = s.wait.figures[-1].moving
    what = "suspends take" if moving else "the cells ahead of this kernel usually run"
    yield (
        f"The pool computes this range from two facts: how long {what}, and how wrong its "
        f"forecasts of the last {found.waits} waits were."
    )


def _beyond_lines(found: Explanation) -> Iterable[str]:
    """Yield why a waiting session does not go first although its group has a guarantee."""
    where, rule = found.standing, found.reason.rule if found.reason else ""
    if not where.guarantees or rule == "class-closed" or any(b.spent for b in where.budgets):
        return
    last = where.guarantees[-1]
    yield (
        f"With this request, group {last.group} would have more than its guarantee of "
        f"{format_bytes(last.guaranteed)}{_where(last)}, so the guarantee does not put the kernel "
        "first in the queue."
    )


def _where(found: GroupGuarantee) -> str:
    """Return the words for this machine's part of a guarantee that several machines share.

    The answer is "" if only this machine has the guarantee.
    """
    if found.of_all is None:
        return ""
    return f" on this machine ({format_bytes(found.of_all)} on all machines)"


def _ahead_lines(facts: Facts, s: Session, found: Explanation) -> Iterable[str]:
    """Yield how many sessions are ahead of ``s`` in the queue.

    If any of these sessions has another class than ``s``, the line also names their classes.
    """
    ahead = [facts.sessions[name] for name in found.ahead]
    if not ahead:
        return
    classes = Counter(w.request.priority for w in ahead)
    mine = sum(1 for w in ahead if w.owner.name == s.owner.name)
    same = {*classes} == {s.request.priority}
    if len(ahead) == 1:
        whose = "kernel of yours" if mine else "kernel"
        which = "" if same else f", of class {ahead[0].request.priority}"
        yield f"Ahead of it is 1 {whose}{which}."
        return
    counts = ", ".join(f"{count} of class {name}" for name, count in sorted(classes.items()))
    if len(classes) == 1:
        counts = f"all of class {ahead[0].request.priority}"
    counts = "" if same else f": {counts}"
    whose = f"; {mine} of them {'is' if mine == 1 else 'are'} yours" if mine else ""
    yield f"Ahead of it are {len(ahead)} kernels{counts}{whose}."


def _holder_lines(facts: Facts, found: Explanation) -> Iterable[str]:
    """Yield a line for each lease that a session waits for, first for leases of its own owner.

    Both for the own leases and for the leases of others, the leases that the session may preempt
    soonest come first. Equal leases of others share a line.
    """
    alike: dict[tuple[int, str, str], list[HeldLease]] = {}
    own: list[HeldLease] = []
    level = facts.sessions[found.session].request.priority
    for h in sorted(found.holders, key=_may_take_at):
        if h.own:
            own.append(h)
            continue
        key = facts.devices[h.device].device.index, _holds(facts, h, 1, level), _taken(facts, h)
        alike.setdefault(key, []).append(h)
    for h in own[:MOST_TOLD]:
        yield f"Your kernel {h.label or h.session}{_holds(facts, h, 1, level)}{_taken(facts, h)}."
    others = [*alike.values()]
    for leases in others[:MOST_TOLD]:
        number, first = len(leases), leases[0]
        who = "A kernel of another user" if number == 1 else f"{number} kernels of other users"
        yield f"{who}{_holds(facts, first, number, level)}{_taken(facts, first, number)}."
    left = len(own[MOST_TOLD:]) + sum(map(len, others[MOST_TOLD:]))
    if left:
        kernels = "1 more slice is" if left == 1 else f"{left} more slices are"
        yield f"{kernels} on GPUs that it could use."


_USES = {
    "busy": ("is active and has", "are active and have"),
    "idle": ("is idle and keeps", "are idle and keep"),
    "leaving": ("is giving back", "are giving back"),
}


def _holds(facts: Facts, h: HeldLease, number: int, level: str) -> str:
    """Return words for the lease of a session, or for the leases of ``number`` equal sessions.

    The caller puts the words into the middle of a sentence. The words name the class of the holder
    only if it differs from ``level``, the class of the waiting session: between two sessions of the
    same class, the class decides nothing.
    """
    which = "" if h.priority == level else f" (class {h.priority})"
    each = " each" if number > 1 else ""
    use = _USES[h.use][number > 1]
    size = format_bytes(h.bytes)
    return f"{which} {use} {size}{each} on {_gpu(facts, h.device)}"


def _may_take_at(h: HeldLease) -> float:
    times = [at for at in (h.yields_at, h.rule_at) if at is not None]
    return math.inf if h.covered or not times else min(times)


def _taken(facts: Facts, h: HeldLease, number: int = 1) -> str:
    """Return when the waiting session may first preempt a lease, as the end of a sentence."""
    if h.use == "leaving":
        return ""
    if h.covered:
        its = "its group protects it" if number == 1 else "their group protects each"
        return f"; a guarantee of {its}"
    at = _may_take_at(h)
    if h.unmoved and (at <= facts.now or (at == math.inf and h.use == "idle")):
        who = "it" if number == 1 else "they"
        return f"; {who} cannot be suspended: {_UNMOVED[h.unmoved]}"
    ends = f"; the pool ends it {_when(h.ends_at, facts.now)}" if h.ends_at is not None else ""
    if at == math.inf:
        return ends or "; no rule lets this kernel take that memory"
    its = "that kernel's" if number == 1 else "their"
    rule = f" ({_rule_words(h.rule, its, at > facts.now)})" if h.rule and at == h.rule_at else ""
    if facts.sessions[h.session].refused and at > facts.now:
        who = "it" if number == 1 else "them"
        tries = f"and tries again {_when(at, facts.now)}"
        return f"; the pool could not suspend {who}, {tries}{ends}"
    enough = ", if that makes enough room" if at <= facts.now else ""
    return f"; this kernel may take that memory {_when(at, facts.now)}{rule}{enough}"


_RULE_WORDS = {
    "burst": "it is more than {its} guarantee",
    "guarantee": "by the guarantee of your group",
    "budget": "{its} GPU-seconds of today are used up",
    "class": "this kernel's class is higher",
    "turns": "{its} time slice is over",
}


def _rule_words(rule: str, its: str, later: bool) -> str:
    """Return, as a clause, why a rule lets a waiting session take the lease of a holder.

    ``its`` stands for the holder in the genitive, for example "their". ``later`` is true if the
    rule does not yet allow this.
    """
    return "when " * (later and rule == "turns") + _RULE_WORDS[rule].format(its=its)


_UNMOVED = {
    "size": "the state is larger than the host memory that it may use",
    "quota": "its user has too little quota of suspended state left",
    "room": "host memory has too little room for the state",
}


def _host_lines(found: Explanation) -> Iterable[str]:
    """Yield the use of host memory for suspended state."""
    host = found.host
    if host is None or not (host.own or host.others):
        return
    users = "another user" if host.other_sessions == 1 else "other users"
    mine, theirs = f"{_kernels(host.own_sessions)} of yours", _kernels(host.other_sessions)
    if host.own and host.others:
        mine = f"{mine} ({format_bytes(host.own)}) and"
    whose = [mine] * (host.own > 0) + [f"{theirs} of {users}"] * (host.others > 0)
    used = f"{format_bytes(host.own + host.others)} of the {format_bytes(host.budget)}"
    yield f"{used} of host memory for suspended state is in use by {' '.join(whose)}."


def _kernels(number: int) -> str:
    return "1 kernel" if number == 1 else f"{number} kernels"


def _change_lines(facts: Facts, found: Explanation) -> Iterable[str]:
    words = [_CHANGE_WORDS[name] for name in found.changes if name in _CHANGE_WORDS]
    if words:
        # When a suspend under way ends, the session certainly goes on, because the plan promised it
        # the memory. After the other changes, it may still have to wait.
        goes = "goes" if "suspend-ends" in found.changes else "may go"
        yield f"It {goes} on when {', or when '.join(words)}."
    if found.changes_at is not None:
        comes = _TIME_WORDS[found.changes_by]
        yield f"If nothing else changes, {comes} {_when(found.changes_at, facts.now)}."


_CHANGE_WORDS = {
    "suspend-ends": "the current suspend is done",
    "lease-ends": "another kernel stops using its GPU",
    "own-lease-ends": "another kernel of yours gives its slice back",
    "group-lease-ends": "another kernel of the group gives its slice back",
    "head-is-served": "the first kernel of the queue has got its slice",
    "host-memory": "host memory becomes free",
    "holder-host-memory": "the user of a kernel that blocks it has quota of suspended state again",
    "holder-frees": "a kernel that blocks it frees GPU memory",
    "device-returns": "the GPU is back in service",
    "outside-use-ends": "programs outside the pool free their memory",
    "budget-renews": "there are GPU-seconds again",
    "settings": "the schedule or the administrator lets its class run",
}

#: The words for what happens to a waiting session because time passes.
_TIME_WORDS = {
    "idle-lease-yields": "it may take the slice of an idle kernel",
    "busy-lease-yields": "it may take the slice of a running kernel",
    "kernel-ends": "the pool ends a blocking kernel",
    "ageing": "its long wait raises its priority",
    "budget-renews": "there are GPU-seconds again",
    "settings": "the schedule lets its class run",
    "retry": "the pool tries again",
}


def _exposed_lines(facts: Facts, s: Session, found: Explanation) -> Iterable[str]:
    """Yield whether a holder can be suspended, how much of its lease is guaranteed, and which
    session may take the lease.
    """
    here = "this GPU" if len(s.lease.slices) == 1 else "these GPUs"
    if found.obstacle:
        yield f"It cannot be suspended: {found.obstacle.rstrip('.')}."
        if found.ends_at is not None:
            when = _when(found.ends_at, facts.now)
            yield f"The pool ends this kernel {when}, if another kernel waits."
    elif s.id in facts.grown:
        most = format_bytes(s.request.memory)
        yield (
            f"Only {most} of this is guaranteed to it; if another kernel needs memory, the pool "
            "takes back the rest first."
        )
    if found.claims:
        rule, at, taker = min(found.claims, key=lambda claim: claim[1])
        asker = facts.sessions[taker].owner
        who = "A waiting kernel" if asker.name != s.owner.name else "Another kernel of yours"
        later = rule == "turns" and at > facts.now
        words = _turn_words(facts, s, asker, later) if rule == "turns" else _CLAIM_WORDS[rule]
        yield f"{who} may take this slice {_when(at, facts.now)}{',' if later else ':'} {words}."
    elif found.takers and found.obstacle:
        yield f"Other kernels wait for {here}."
    elif found.takers and s.state == "idle" and found.taken_from is not None:
        if found.taken_from < math.inf:
            when = _when(found.taken_from, facts.now)
            yield f"A waiting kernel may take this slice {when}, because it is idle."
    elif found.takers:
        yield f"Other kernels wait for {here}, and no rule lets them take this slice."
    elif not found.obstacle and s.state == "idle" and (found.taken_from or 0) < math.inf:
        yield (
            f"No kernel waits for {here}. Another kernel that asks for a slice may take this one "
            f"{_when(found.taken_from or 0, facts.now)}, if this kernel is still idle."
        )
    else:
        yield f"No kernel waits for {here}."


_CLAIM_WORDS = {
    "burst": "it has grown beyond its guarantee",
    "guarantee": "this memory is guaranteed to the other kernel's group",
    "budget": "this kernel's GPU-seconds of today are used up",
    "class": "the other kernel's class is higher",
}


def _turn_words(facts: Facts, s: Session, asker: Owner, later: bool) -> str:
    over = _rule_words("turns", "this kernel's", later)
    if asker == s.owner or facts.settings.half_life <= 0:
        return over
    return f"{over}, and the other kernel's user has used less, relative to that user's weight"


def standing_lines(found: Standing, now: float) -> Iterable[str]:
    """Yield what guarantees, shares and daily budgets an owner and its groups have at ``now``."""
    if found.groups:
        *outer, inner = found.groups
        yield f"Your group is {inner}" + (f", a part of {outer[-1]}." if outer else ".")
    for row in found.guarantees:
        held, guaranteed = row.held, row.guaranteed
        where = "below" if held < guaranteed else "above" if held > guaranteed else "exactly"
        size = format_bytes(guaranteed)
        yield (
            f"Group {row.group} has {format_bytes(held)}, {where} its guaranteed {size}"
            f"{_where(row)}."
        )
    whole = "the pool"
    for name, used, due in found.shares:
        group = name.startswith("group ")
        who, whose = (f"G{name[1:]} has", "its") if group else ("You have", "your")
        if due < 1:
            yield f"{who} {used:.0%} of the usage of {whole}; {whose} fair share is {due:.0%}."
        whole = name
    for budget in found.budgets:
        if budget.none:
            whose = f"Group {budget.group} gets" if budget.group else "You get"
            kernels = "its kernels" if budget.group else "your kernels"
            yield f"{whose} no GPU-seconds: {kernels} {_END_WORDS[budget.daily.then]}."
            continue
        whose = f"Group {budget.group} has" if budget.group else "You have"
        left, seconds = max(0.0, budget.daily.most - budget.used), budget.daily.seconds
        line = f"{whose} {left:.0f} of {seconds:.0f} GPU-seconds left today"
        if budget.daily.more_elsewhere:
            line = (
                f"{whose} {left:.0f} GPU-seconds left today on this machine "
                f"(the budget for all machines is {seconds:.0f})"
            )
        whose = "its" if budget.group else "your"
        if budget.spent or budget.until < math.inf:
            what = "there are more" if budget.spent else "at the present rate, they are used up"
            # With the rule ``refill``, a budget stays used up as long as its kernels use
            # GPU-seconds as fast as they come back.
            at = _when(budget.until, now)
            if budget.until == math.inf:
                soonest = budget.soonest(now)
                at = "when other machines give up some of their GPU-seconds"
                if soonest < math.inf:
                    soon = _when(soonest, now)
                    at = f"when {whose} kernels use less, {soon} at the earliest"
            line += f"; {what} {at}"
            when = "Until then" if budget.spent else "From then on"
            line += f". {when} {whose} kernels {_END_WORDS[budget.daily.then]}"
        yield f"{line}."


#: What happens to kernels when a daily budget is used up.
_END_WORDS: Mapping[DailyEnd, str] = {
    "borrow": "get only what no other kernel wants",
    "refuse": "get no new slice",
    "stop": "are suspended, even if no other kernel waits",
}


def _gpu(facts: Facts, uuid: str) -> str:
    return f"GPU {facts.devices[uuid].device.index}"


def _when(at: float, now: float) -> str:
    return "now" if at <= now else f"in {format_seconds(at - now)}"


def _ordinal(number: int) -> str:
    teen = 10 < number % 100 < 20
    return f"{number}{'th' if teen else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"
