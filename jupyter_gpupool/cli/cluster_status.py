# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool status --cluster``: all machines of the cluster, as its ledger knows them.

The broker of this machine asks the ledger, so users need no access to Ray. Each figure comes from
the last report of its machine; the table shows the age of an old report.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, Mapping

from ..client import Client
from ..units import format_bytes, format_seconds
from .leaving import uses
from .picture import printable
from .status import connect, socket_path

HEAD = ("MACHINE", "STATE", "GPUS", "GRANTED", "FREE", "WAITING")


def show_cluster(socket: str, *, as_json: bool) -> int:
    """Print the machines of the cluster; return 1 if the ledger does not answer."""
    with connect(socket_path(socket)) as client:
        found = ask(client)
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines(found)))
    return 0 if found["view"] is not None else 1


def ask(client: Client) -> dict[str, Any]:
    """Return what the broker knows of its cluster."""
    answer = client.call("cluster")
    return {name: answer[name] for name in ("name", "own", "connected", "age", "view")}


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the machines as a table, and below it the limits that are in use on each machine."""
    view = found["view"]
    if view is None:
        age = found["age"]
        since = "" if age is None else f" It answered {format_seconds(age)} ago."
        return [
            f"The ledger of the cluster does not answer {found['name']}.{since}",
            "c.GPUPool.on_ledger_loss is in force. Check jupyter gpupool node, first on the head.",
            *_table([(found["name"], "here", *_figures(found["own"]))]),
        ]
    nodes = view["nodes"]
    table = _table([(node["name"], _state(node), *_figures(node["summary"])) for node in nodes])
    notes = [] if view["serving"] else [
        "The ledger lends nothing before it has heard all machines."
    ]  # fmt: skip
    notes += [
        f"{node['name']}: its figures are {format_seconds(node['age'])} old."
        for node in nodes
        if node["state"] == "silent" and node["summary"] is not None
    ]
    if view["left_out"]:
        notes.append(f"{view['left_out']} more machines are not shown: the list is too long.")
    return [*table, *notes, *limits(nodes)]


def limits(nodes: list[Mapping[str, Any]]) -> list[str]:
    """Return what each user and group may use on each machine, as lines."""
    return [f"{node['name']}: {row}" for node in nodes for row in uses(node)]


def elsewhere(found: Mapping[str, Any], owner: str, group: str) -> list[str]:
    """Return how much of the limits of a user or group the other machines use, as sentences."""
    view = found["view"]
    if view is None:
        return ["What other machines have is unknown: the cluster's ledger does not answer now."]
    names = {("user", owner), ("group", group)}
    told = []
    for node in view["nodes"]:
        if node["name"] != found["name"]:
            counted = [row for row in node["counted"] if tuple(row[:2]) in names]
            heard = f"last heard {format_seconds(node['age'])} ago"
            told += [f"On {node['name']} ({heard}) {row}." for row in uses({"counted": counted})]
    return told


def considered(found: Mapping[str, Any], memory: int, devices: int) -> list[str]:
    """Return for each other machine whether it has room for such a kernel, or what it lacks.

    ``memory`` is for each of ``devices``. A running kernel never changes its machine, so this helps
    with the next kernel.
    """
    nodes = [] if found["view"] is None else found["view"]["nodes"]
    told = [
        f"{node['name']}: {_lack(node, memory, devices)}."
        for node in nodes
        if node["name"] != found["name"]
    ]
    asked = format_bytes(memory) + (f" on each of {devices} GPUs" if devices > 1 else "")
    head = f"It stays on {found['name']}. Could a new kernel of {asked} start on another machine?"
    return [head, *told] if told else []


#: Why a machine in one of these states takes no new kernel.
_CLOSED = {
    "draining": "no, it drains and gives no new slices",
    "left": "no, it has drained and left",
    "fenced": "no, an administrator has called it dead",
    "gone": "no, an administrator has called it dead",
    "unheard": "unknown, the ledger has not heard it",
}


def _lack(node: Mapping[str, Any], memory: int, devices: int) -> str:
    if node["state"] in _CLOSED:
        return _CLOSED[node["state"]]
    if node["state"] == "silent":
        return f"unknown, it has been silent for {format_seconds(node['age'])}"
    summary = node["summary"]
    if summary is None or summary["gpus"] is None:
        return "unknown, it has not told what is free on each GPU"
    frees = sorted((free for _, free in summary["gpus"]), reverse=True)
    waiting = summary["waiting"]
    if not frees:
        return "no, it has no GPU in service"
    if len(frees) < devices:
        return f"no, {len(frees)} of the {devices} GPUs that it asks for are in service"
    if frees[devices - 1] < memory:
        each = "a GPU" if devices == 1 else f"each of {devices} GPUs"
        return f"no, at most {format_bytes(frees[devices - 1], rounding='down')} is free on {each}"
    if waiting:
        kernels = "1 kernel waits" if waiting == 1 else f"{waiting} kernels wait"
        return f"it has room, but {kernels} there"
    return "yes, it has room and nobody waits"


def _state(node: Mapping[str, Any]) -> str:
    if node["state"] == "silent":
        return f"silent for {format_seconds(node['age'])}"
    return str(node["state"])


def _figures(summary: Mapping[str, int] | None) -> tuple[str, ...]:
    """Return the cells of a machine; a dash for what is unknown."""
    if summary is None:
        return ("-",) * 4
    devices, out = summary["devices"], summary["out"]
    return (
        f"{devices} ({out} out of service)" if out else str(devices),
        format_bytes(summary["granted"]),
        format_bytes(summary["free"], rounding="down"),
        str(summary["waiting"]),
    )


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    cells = [HEAD, *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(_padded(row, widths)).rstrip() for row in cells]


def _padded(row: tuple[str, ...], widths: list[int]) -> Iterator[str]:
    for text, width in zip(row, widths, strict=True):
        yield text.ljust(width)
