# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Writes the report of ``check-config`` for people.

The module is pure: it only makes lines of text from a report and a width.
"""

from __future__ import annotations

import textwrap
from typing import Any, Iterator, Mapping, Sequence

from ..units import format_bytes, format_seconds

ConfigReport = Mapping[str, Any]

#: The largest number of columns in a line: wider text is hard to read.
WIDEST = 100


def lines(report: ConfigReport, width: int = 80) -> list[str]:
    """Return the whole report."""
    width = min(width, WIDEST)
    if report["faults"]:
        return [*_faults(report, width)]
    found = [*_head(report, width)]
    for part in (_tree, _cluster, _members, _budgets, _schedules, _differences, _warnings):
        section = [*part(report, width)]
        if section:
            found += ["", *section]
    return [*found, "", _summary(report)]


def _wrapped(text: str, width: int, first: str = "", then: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=then, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _faults(report: ConfigReport, width: int) -> Iterator[str]:
    faults = report["faults"]
    for fault in faults:
        indent = ""
        if fault["option"]:
            yield _name(fault)
            indent = "  "
            line = f", line {fault['line']}" if fault["line"] else ""
            if fault["origin"]:
                yield f"  {fault['origin']}{line}"
        text = f"{fault['message']} {fault['next_step']}".rstrip()
        if not text.startswith("c."):  # the name of an option keeps its lower-case first letter
            text = text[0].upper() + text[1:]
        yield from _wrapped(text, width, indent, indent)
        yield ""
    count = "1 mistake" if len(faults) == 1 else f"{len(faults)} mistakes"
    yield f"The configuration has {count}."


def _name(one: ConfigReport) -> str:
    return f"c.GPUPool.{one['option']}" + "".join(f"[{key!r}]" for key in one["keys"])


def _head(report: ConfigReport, _width: int) -> Iterator[str]:
    files = report["files"]
    if not files:
        yield "No configuration file: every option has its default."
    for path in files:
        yield f"Read: {path}"
    devices = report["devices"]
    if devices:
        count = "1 GPU" if devices["count"] == 1 else f"{devices['count']} GPUs"
        size = format_bytes(devices["total_bytes"])
        yield f"GPUs: {count} {devices['source']}, {size} for kernels"
    else:
        yield "GPUs: none"


def _tree(report: ConfigReport, width: int) -> Iterator[str]:
    groups = report["groups"]
    if not groups:
        yield "No groups: all users share the pool equally."
        return
    if report["in_force"]:
        yield from _wrapped(f"With {' and '.join(report['in_force'])} in force:", width)
    rows = [("GROUP", "GUARANTEE", "CAP", "WEIGHT", "GPU TIME PER DAY")]
    rows += [
        (
            "  " * group["depth"] + group["name"],
            _size(group["guarantee"]),
            _size(group["cap"]),
            f"{group['weight']:g} ({group['part']:.0%})",
            _daily(group["gpu_seconds_per_day"]),
        )
        for group in groups
    ]
    yield from _columns(rows, width)
    devices = report["devices"]
    # In a cluster, the guarantees are for all machines together, but ``devices`` has only the GPUs
    # of this machine. So the report does not compare the guarantees with these GPUs.
    together = bool(report["cluster_nodes"])
    if devices and not together and any(group["guarantee"] for group in groups):
        top = sum(_needs(groups, group["name"]) for group in groups if not group["depth"])
        left = max(0, devices["total_bytes"] - top)
        text = (
            f"Guaranteed: {format_bytes(top)}. Shared by weight: {format_bytes(left)} and unused "
            "guaranteed memory."
        )
        yield text


def _columns(rows: Sequence[tuple[str, ...]], width: int) -> Iterator[str]:
    """Yield the rows of a table without its empty columns.

    Texts in the first column that are too long for ``width`` are cut.
    """
    keep = [n for n in range(len(rows[0])) if n == 0 or any(row[n] != "-" for row in rows[1:])]
    widths = {n: max(len(row[n]) for row in rows) for n in keep}
    rest = sum(widths[n] + 2 for n in keep[1:])
    widths[0] = min(widths[0], max(12, width - rest))
    for row in rows:
        first = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 3] + "..."
        cells = [first.ljust(widths[0]), *(row[n].ljust(widths[n]) for n in keep[1:])]
        yield "  ".join(cells).rstrip()


def _needs(groups: Sequence[ConfigReport], name: str) -> int:
    group = next(one for one in groups if one["name"] == name)
    if group["guarantee"]:
        return int(group["guarantee"]["bytes"])
    return sum(_needs(groups, one["name"]) for one in groups if one["parent"] == name)


def _size(portion: ConfigReport | None) -> str:
    if portion is None:
        return "-"
    return portion["written"] if portion["bytes"] is None else format_bytes(portion["bytes"])


def _daily(daily: ConfigReport | None) -> str:
    if daily is None:
        return "-"
    late = f", from {daily['renews']} UTC" if daily["renews"] != "00:00" else ""
    rule = ", refilling" if daily["rule"] == "refill" else late
    return f"{format_seconds(daily['seconds'])}{rule}, then {daily['then']}"


def _cluster(report: ConfigReport, width: int) -> Iterator[str]:
    nodes = report["cluster_nodes"]
    if nodes:
        yield f"CLUSTER OF {len(nodes)}"
        text = (
            f"{', '.join(nodes)}: caps, GPU time, and guarantees that are sizes are for all "
            "machines together. Guarantees in per cent or devices are for each machine."
        )
        yield from _wrapped(text, width, "  ", "    ")


def _members(report: ConfigReport, width: int) -> Iterator[str]:
    named = [group for group in report["groups"] if _who(group)]
    if not named:
        return
    yield "MEMBERS"
    for group in named:
        yield from _wrapped(f"{group['name']}: {_who(group)}", width, "  ", "    ")
    if not any(group["everybody"] for group in named):
        yield from _wrapped("all others: in no group, directly in the pool", width, "  ", "    ")


def _who(group: ConfigReport) -> str:
    parts = []
    if group["users"]:
        parts.append(", ".join(group["users"]))
    for key, what in (("unix_groups", "Unix"), ("hub_groups", "Hub")):
        if group[key]:
            many = "s" if len(group[key]) > 1 else ""
            parts.append(f"{what} group{many} {', '.join(group[key])}")
    if group["everybody"]:
        parts.append("everybody else")
    order = "" if group["order"] is None else f" (order {group['order']:g})"
    return "; ".join(parts) + order if parts else ""


def _budgets(report: ConfigReport, width: int) -> Iterator[str]:
    if report.get("quotas"):
        yield "GPU TIME PER DAY OF USERS"
        for quota in report["quotas"]:
            who = "each other user" if quota["user"] == "*" else quota["user"]
            text = f"{who}: {_daily(quota['gpu_seconds_per_day'])}"
            yield from _wrapped(text, width, "  ", "    ")


def _schedules(report: ConfigReport, width: int) -> Iterator[str]:
    if not report["schedules"]:
        return
    yield "SCHEDULES"
    for schedule in report["schedules"]:
        until = schedule["changes_at_local"]
        if schedule["in_force"]:
            state = f"in force until {until}" if until else "in force at all times"
        else:
            state = f"begins {until}" if until else "never in force"
        text = f"{schedule['name']}: {schedule['when']} {schedule['time_zone']}; {state}"
        yield from _wrapped(text, width, "  ", "    ")
        for keys, value in _flat(schedule["set"]):
            yield from _wrapped(f"{keys} = {value!r}", width, "    ", "      ")
    change = report["next_change"]
    if change:
        then = " and ".join(change["in_force"]) or "no schedule"
        yield from _wrapped(f"Next change: {change['at_local']}, then {then}.", width)


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            for keys, inner in _flat(value):
                head, bracket, tail = keys.partition("[")
                yield f"{name}[{head!r}]{bracket}{tail}", inner
        else:
            yield name, value


def _differences(report: ConfigReport, width: int) -> Iterator[str]:
    broker = report["broker"]
    if not broker:
        return
    found = report["differences"]
    if not found:
        yield from _wrapped(
            f"The running broker (process {broker['pid']}) has the same configuration.", width
        )
    else:
        yield from _wrapped(f"DIFFERENT FROM THE RUNNING BROKER (process {broker['pid']})", width)
    for one in found:
        here = f"{one['here']!r}" if one["is_here"] else "not set"
        there = f"{one['there']!r}" if one["is_there"] else "not set"
        late = "; takes effect only when the broker starts" if one["restart"] else ""
        yield from _wrapped(f"{_name(one)}: {there} there, {here} here{late}", width, "  ", "    ")
    if report.get("hidden"):
        names = ", ".join(report["hidden"])
        yield from _wrapped(
            f"Not compared, because only admins of the broker see these options: {names}.", width
        )


def _warnings(report: ConfigReport, width: int) -> Iterator[str]:
    if report["warnings"]:
        yield "WARNINGS"
    for text in report["warnings"]:
        yield from _wrapped(text, width, "  - ", "    ")


def _summary(report: ConfigReport) -> str:
    counts = []
    for key, one, many in (
        ("groups", "group", "groups"),
        ("schedules", "schedule", "schedules"),
        ("warnings", "warning", "warnings"),
    ):
        number = len(report[key])
        if number:
            counts.append(f"{number} {one if number == 1 else many}")
    return f"The configuration is good{': ' if counts else ''}{', '.join(counts)}."
