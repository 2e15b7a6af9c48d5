# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool status --cluster``: prints what the ledger knows of all machines.

The broker of this machine asks the ledger, so users need no access to Ray. The figures of a machine
are from the machine's last report. For a silent machine, the command also prints the age of this
report.
"""

from __future__ import annotations

import json
from typing import Any, Iterator, Mapping

from ..client import Client
from ..cluster.considering import models, uses
from ..units import format_bytes, format_seconds
from .picture import printable
from .status import connect, socket_path

HEAD = ("MACHINE", "STATE", "GPUS", "MODEL", "GRANTED", "FREE", "WAITING")


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
    """Return a table of the machines, then lines about what users and groups may use."""
    view = found["view"]
    if view is None:
        age = found["age"]
        since = "" if age is None else f" Its last answer came {format_seconds(age)} ago."
        return [
            f"The ledger of the cluster does not answer {found['name']}.{since}",
            "Until it answers, c.GPUPool.on_ledger_loss says what this machine may grant.",
            "Check that jupyter gpupool node runs, first on the head.",
            *_table([(found["name"], "here", *_figures(found["own"]))]),
        ]
    nodes = view["nodes"]
    table = _table([(node["name"], _state(node), *_figures(node["summary"])) for node in nodes])
    notes = [] if view["serving"] else [
        "The ledger lends nothing until all machines have reported."
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


def _state(node: Mapping[str, Any]) -> str:
    if node["state"] == "silent":
        return f"silent for {format_seconds(node['age'])}"
    return str(node["state"])


def _figures(summary: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the cells for a machine's figures; the cell of an unknown value is a dash."""
    if summary is None:
        return ("-",) * 5
    devices, out = summary["devices"], summary["out"]
    return (
        f"{devices} ({out} out of service)" if out else str(devices),
        # The ledger does not know the models of GPUs that are out of service.
        models(summary["gpus"] or ()) or "-",
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
