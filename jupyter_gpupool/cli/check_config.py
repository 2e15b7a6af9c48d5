# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool check-config``: prints what a configuration means, and its mistakes.

It also prints the next change of schedule, and how the files differ from the running broker.
:func:`examine` collects a report of JSON values; :mod:`.config_report` writes it for people.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from ..client import Client
from ..config import (
    BrokerSettings,
    Fault,
    GPUPool,
    Timetable,
    WrongConfiguration,
    fixed_options,
    load_timetable,
)
from ..config.accounts import doubly_in, knows_everybody, unknown_names
from ..config.calendar import next_change
from ..config.schedules import Schedule, machine_zone
from ..config.tree import check_machine, children, written
from ..errors import Code, GPUPoolError, RefusedError
from ..pool.groups import DAY, Daily, Portion
from ..pool.residence import guessed_cost, slice_length
from ..units import format_bytes, format_seconds, parse_bytes
from . import config_report
from .status import style_for

#: The report has a warning if the half-life of usage is shorter than this many time slices. The
#: pool would then forget usage before each session has had a time slice.
HALF_LIVES = 4

_DEVICES = re.compile(r"([0-9]{1,4})x(.+)")


@dataclass(frozen=True)
class Gpus:
    """The GPUs with which the report compares the configured sizes.

    If the GPUs are unknown, ``capacities`` is empty.
    """

    capacities: Sequence[int]
    #: Where the GPUs are, such as "in this machine". The report prints the number of GPUs, and then
    #: this text.
    source: str


def check(
    file: Path | None, *, alone: bool, devices: str, at: str, socket: str, as_json: bool
) -> int:
    """Read the configuration, print what it means, and return 0, or 1 if it has mistakes."""
    given = parse_devices(devices) if devices else None
    now = parse_time(at) if at else time.time()
    report = examine(file, given, alone=alone, now=now, socket=socket)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(config_report.lines(report, style_for(sys.stdout).width)))
    return int(not report["ok"])


def parse_devices(text: str) -> Gpus:
    """Return the GPUs that ``--devices`` describes, such as ``16x80GiB`` or ``8x80GiB,8x40GiB``."""
    sizes: list[int] = []
    for part in text.split(","):
        match = _DEVICES.fullmatch(part.strip())
        try:
            sizes += [parse_bytes(match[2])] * int(match[1]) if match else []
        except ValueError:
            match = None
        if not match or int(match[1]) == 0:
            raise RefusedError(
                f"{part.strip()!r} in --devices does not describe GPUs.",
                code=Code.USAGE,
                next_step="Write a count and a size, such as 16x80GiB, or 8x80GiB,8x40GiB.",
            )
    return Gpus(sizes, "as given by --devices")


def parse_time(text: str) -> float:
    """Return the time that ``--at`` names. A time without a time zone is in this machine's zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise RefusedError(
            f"{text!r} in --at is not a time.",
            code=Code.USAGE,
            next_step="Write a date and a time, such as '2026-11-23 22:00'.",
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=machine_zone()[0])).timestamp()


def examine(
    file: Path | None, given: Gpus | None, *, alone: bool, now: float, socket: str
) -> dict[str, Any]:
    """Return the whole report on the configuration, as JSON values."""
    report: dict[str, Any] = {
        "ok": False, "at": now, "files": [], "faults": [], "warnings": [], "devices": None,
        "groups": [], "schedules": [], "in_force": [], "next_change": None, "broker": None,
        "differences": [], "cluster_nodes": [],
    }  # fmt: skip
    try:
        timetable = load_timetable([file] if file else [], only_given=alone, now=now)
    except WrongConfiguration as error:
        report["faults"] = [_fault(fault) for fault in error.faults]
        return report
    base = timetable.base
    status = _status(socket, base)
    machine = given or _machine(base, status)
    settings = timetable.under(timetable.rules(now))
    faults = timetable.faults(now, lambda one: check_machine(one, machine.capacities))
    names = [timetable.place(fault) for fault in unknown_names(base)]
    # The option ``--devices`` describes the GPUs of another machine. This machine does not know the
    # users of that machine, so an unknown name is then only a warning.
    certain = given is None and knows_everybody()
    faults += names if certain else []
    report["ok"] = not faults
    report["faults"] = [_fault(fault) for fault in faults]
    report["warnings"] = [
        *_warnings(base, [] if certain else names, machine), *timetable.overruled(now)
    ]  # fmt: skip
    report["files"] = [str(path) for path in base.files]
    if machine.capacities:
        report["devices"] = {
            "count": len(machine.capacities),
            "total_bytes": sum(machine.capacities),
            "source": machine.source,
        }
    report["cluster_nodes"] = [*settings.cluster_nodes]
    report["groups"] = [*_groups(settings, machine.capacities)]
    report["quotas"] = [
        {"user": user, "gpu_seconds_per_day": _daily(quota.daily)}
        for user, quota in settings.pool.quotas.items()
        if quota.daily
    ]
    report["schedules"] = [_schedule(schedule, now) for schedule in base.schedules]
    report["in_force"] = [*timetable.names(timetable.rules(now))]
    report["next_change"] = _next_change(timetable, now)
    if status is not None:
        report["broker"] = {"pid": status.get("pid"), "socket": status.get("socket")}
        report["differences"] = [*_differences(base, status.get("config") or {})]
        report["hidden"] = (status.get("config") or {}).get("hidden") or []
    return report


# ---------------------------------------------------------------------- the machine


def _status(socket: str, base: BrokerSettings) -> Mapping[str, Any] | None:
    """Return the status of the running broker; None if no broker runs."""
    from .checks import find

    try:
        with Client(find(socket, base.socket)) as client:
            return client.call("status")
    except GPUPoolError:
        return None


def _machine(base: BrokerSettings, status: Mapping[str, Any] | None) -> Gpus:
    """Return the GPUs of the running broker, or of this machine if no broker runs."""
    from .doctor import probe

    if status is not None:
        found, source = list(status["devices"]), "in the running broker"
    else:
        found = probe(base)[0]
        source = "emulated" if base.emulate else "in this machine"
    taken = 0 if status is not None else base.pool.reserve
    return Gpus([max(0, int(d["memory_capacity"]) - taken) for d in found], source)


# ---------------------------------------------------------------------- the report


def _fault(fault: Fault) -> dict[str, Any]:
    return {
        "place": fault.place,
        "option": fault.option,
        "keys": [*fault.keys],
        "origin": fault.origin,
        "line": fault.line,
        "message": fault.message,
        "next_step": fault.next_step,
    }


def _warnings(base: BrokerSettings, unknown: Sequence[Fault], machine: Gpus) -> Iterator[str]:
    yield from base.notes
    for fault in unknown:
        yield (
            f"{fault} The name may exist in a directory service, because this machine's files do "
            "not list all users."
        )
    for user, first, second in doubly_in(base):
        yield (
            f"{user!r} is in a Unix group of {first!r} and in one of {second!r}, and no 'order' "
            f"says which group counts. {first!r} counts, because it is first in the configuration."
        )
    sized = [name for name, group in base.pool.groups.items() if group.guarantee or group.cap]
    if sized and not machine.capacities:
        yield (
            "This machine has no GPU, so the guarantees and caps were only compared with each "
            "other. Name the GPUs of the real machine: --devices 16x80GiB."
        )
    yield from _short_memory(base, machine)
    yield from _without_effect(base, machine)
    for name, rule in base.members.items():
        empty = not (rule.users or rule.asks or rule.everybody)
        if empty and not children(base.pool.groups, name):
            yield f"The group {name!r} contains no users and no groups, so nobody can use it."


def _without_effect(base: BrokerSettings, machine: Gpus) -> Iterator[str]:
    """Yield warnings for settings that have no effect or that refuse default kernels.

    A default kernel asks for no memory size and no priority class.
    """
    pool = base.pool
    if pool.classes_allowed is not None and pool.default_priority not in pool.classes_allowed:
        yield (
            f"c.GPUPool.classes_allowed does not name {pool.default_priority!r}, the default "
            "class: kernels that ask for no class get no slice."
        )
    asked, text = pool.default_memory, format_bytes(pool.default_memory)
    largest = int(max(machine.capacities, default=0))
    if 0 < largest < asked:
        yield (
            f"c.GPUPool.default_memory is {text}, and the largest GPU has {format_bytes(largest)}: "
            "kernels that ask for no size get a whole GPU."
        )
        asked = largest
    yield from _budgets_without_effect(base, machine)
    for user, quota in pool.quotas.items():
        if quota.memory is not None and quota.memory < asked:
            yield (
                f"The quota of {user!r} is {format_bytes(quota.memory)} of memory, and "
                f"c.GPUPool.default_memory is {text}: kernels that ask for no size are refused."
            )
    if not machine.capacities:
        return
    for name, group in pool.groups.items():
        cap = group.cap.of(machine.capacities) if group.cap else asked
        if cap < asked:
            yield (
                f"The cap of the group {name!r} is {format_bytes(cap)}, and "
                f"c.GPUPool.default_memory is {text}: kernels that ask for no size are refused."
            )


def _budgets_without_effect(base: BrokerSettings, machine: Gpus) -> Iterator[str]:
    """Yield warnings for daily budgets that do not do what an admin would expect."""
    most = DAY * len(machine.capacities)
    found = [(f"the group {name!r}", group.daily) for name, group in base.pool.groups.items()]
    found += [(f"the user {name!r}", quota.daily) for name, quota in base.pool.quotas.items()]
    for whose, daily in found:
        if daily is None:
            continue
        if daily.rule == "refill" and daily.renews:
            yield f"The budget of {whose} refills all the time, so its 'renews' has no effect."
        if daily.seconds <= 0 and daily.then != "borrow":
            yield (
                f"The budget of {whose} is 0 and its 'then' is {daily.then!r}, so kernels with "
                "this budget never get a slice."
            )
        if machine.capacities and daily.seconds > most:
            yield (
                f"{whose[0].upper()}{whose[1:]} can never use all of its gpu_seconds_per_day: "
                f"all GPUs together provide {format_seconds(most)} of GPU time in a day."
            )


def _short_memory(base: BrokerSettings, machine: Gpus) -> Iterator[str]:
    """Yield a warning if the pool forgets usage too soon to share by weight."""
    pool = base.pool
    largest = min(max(machine.capacities, default=0), pool.max_memory_per_kernel or math.inf)
    longest = slice_length(guessed_cost(int(largest)), pool.max_swap_overhead)
    if "turns" in pool.preempt and 0 < pool.half_life < HALF_LIVES * longest:
        state = f" of a kernel with {format_bytes(int(largest))} of state" if largest else ""
        yield (
            f"c.GPUPool.fair_share_half_life is {format_seconds(pool.half_life)}, and one time "
            f"slice{state} may last {format_seconds(longest)}. So the pool forgets the use of one "
            "user before the other users get their turn, and then cannot share by weight. Set "
            f"this option to {format_seconds(HALF_LIVES * longest)} or more, or to 0 if past use "
            "must not count."
        )


def _groups(settings: BrokerSettings, capacities: Sequence[int]) -> Iterator[dict[str, Any]]:
    tree = settings.pool.groups

    def below(parent: str, depth: int) -> Iterator[dict[str, Any]]:
        names = children(tree, parent)
        weights = sum(tree[name].weight for name in names)
        for name in names:
            group, rule = tree[name], settings.members[name]
            yield {
                "name": name,
                "parent": parent,
                "depth": depth,
                "guarantee": _portion(group.guarantee, capacities),
                "cap": _portion(group.cap, capacities),
                "weight": group.weight,
                "part": group.weight / weights,
                "gpu_seconds_per_day": _daily(group.daily),
                "users": [*rule.users],
                "unix_groups": [*rule.unix_groups],
                "hub_groups": [*rule.hub_groups],
                "everybody": rule.everybody,
                "order": rule.order,
            }
            yield from below(name, depth + 1)

    yield from below("", 0)


def _portion(portion: Portion | None, capacities: Sequence[int]) -> dict[str, Any] | None:
    if portion is None:
        return None
    size = portion.of(capacities) if capacities else portion.bytes
    return {"written": written(portion), "bytes": size}


def _daily(daily: Daily | None) -> dict[str, Any] | None:
    if daily is None:
        return None
    renews = f"{int(daily.renews // 3600):02}:{int(daily.renews % 3600 // 60):02}"
    return {
        "seconds": daily.seconds, "rule": daily.rule, "renews": renews, "then": daily.then
    }  # fmt: skip


def _schedule(schedule: Schedule, now: float) -> dict[str, Any]:
    change = next_change([schedule.rule], now)
    in_force = schedule.rule.is_in_force(now)
    return {
        "name": schedule.name,
        "when": schedule.written,
        "time_zone": schedule.zone,
        "in_force": in_force,
        "changes_at": change[0] if change else None,
        "changes_at_local": _local(change[0], schedule) if change else None,
        "set": json.loads(json.dumps(schedule.values, default=str)),
    }


def _next_change(timetable: Timetable, now: float) -> dict[str, Any] | None:
    change = timetable.next_change(now)
    if change is None:
        return None
    at, rules = change
    local = next(
        (
            f"{_local(at, schedule)} {schedule.zone}"
            for schedule in timetable.base.schedules
            if (next_change([schedule.rule], now) or (0,))[0] == at
        ),
        "",
    )
    return {"at": at, "at_local": local, "in_force": [*timetable.names(rules)]}


def _local(at: float, schedule: Schedule) -> str:
    shown = datetime.fromtimestamp(at, schedule.rule.zone)
    return f"{shown:%a %d %b %Y %H:%M}"


# ---------------------------------------------------------------------- the running broker


def _differences(base: BrokerSettings, in_force: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each option or key that has another value in the files than in the broker."""
    options = in_force.get("options") or {}
    aside = {"socket", *(in_force.get("hidden") or ())}
    known, fixed = GPUPool.class_traits(config=True), fixed_options()
    for name in sorted({*base.options, *options} - aside):
        default = json.loads(json.dumps(known[name].default(), default=str))
        here = dict(_flat(base.options.get(name, default)))
        there = dict(_flat(options.get(name, default)))
        for keys in sorted({*here, *there}, key=str):
            if here.get(keys) != there.get(keys) or (keys in here) != (keys in there):
                yield {
                    "option": name,
                    "keys": [*keys],
                    "here": here.get(keys),
                    "is_here": keys in here,
                    "there": there.get(keys),
                    "is_there": keys in there,
                    "restart": name in fixed,
                }


def _flat(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value in nested dicts, with the tuple of keys that leads to the value."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(inner, (*keys, key))
    elif keys or value != {}:
        yield keys, value
