# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Sentences for the user of a waiting kernel: what other machines have. Pure.

A kernel stays on the machine where it has started, so free GPUs of other machines help only the
user's next kernel. But the kernel may wait because of a limit that all machines share. Then the
user needs to know how much of this limit the other machines have borrowed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..units import format_bytes, format_seconds
from .messages import GPU_SECONDS, GUARANTEE, REFILL
from .placing import PlacementRequest, lacks_model, lies_on

#: The most folders that one sentence names; a kernel may work with up to 16 folders.
MOST_FOLDERS = 3

#: By state, for the states in which a machine takes no new kernel: the answer for the user, with
#: the reason.
_CLOSED = {
    "draining": "no, it is draining and gives no new slices",
    "left": "no, it has left the cluster",
    "fenced": "no, an administrator has fenced it",
    "gone": "no, an administrator has fenced it",
    "unheard": "unknown, the ledger has no report from it yet",
}


def uses(node: Mapping[str, Any]) -> list[str]:
    """Return what each user and group may use on a machine, as one line for each."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for kind, name, resource, window, amount in node["counted"]:
        noun = "GPU-seconds" if resource in (GPU_SECONDS, REFILL) else resource
        what = noun.removesuffix("s") if amount == 1 else noun
        is_size = resource in ("memory", GUARANTEE)
        text = format_bytes(amount) if is_size else f"{amount} {what}"
        if window:
            text += f" of {window}"
        if resource == GUARANTEE:
            text += " of its guarantee"
        elif resource == REFILL:
            text += " per day (refilled all the time)"
        by_name[f"{kind} {name}"].append(text)
    return [f"{name} may use {', '.join(parts)}" for name, parts in by_name.items()]


def models(gpus: Iterable[Sequence[Any]]) -> str:
    """Return the GPUs' model as text; for several models, each with its number of GPUs."""
    counts = Counter(str(name) for name, _ in gpus)
    if len(counts) == 1:
        return next(iter(counts))
    return ", ".join(f"{count}x {name}" for name, count in sorted(counts.items()))


def elsewhere(view: Mapping[str, Any] | None, here: str, owner: str, group: str) -> list[str]:
    """Return sentences: how much of the limits of a user and a group each other machine may use."""
    if view is None:
        return ["What other machines have is unknown: the cluster's ledger does not answer now."]
    names = {("user", owner), ("group", group)}
    told = []
    for node in view["nodes"]:
        if node["name"] != here:
            counted = [row for row in node["counted"] if tuple(row[:2]) in names]
            heard = f"last report {format_seconds(node['age'])} ago"
            told += [f"On {node['name']} ({heard}) {row}." for row in uses({"counted": counted})]
    return told


def considered(
    view: Mapping[str, Any] | None, here: str, wanted: PlacementRequest
) -> dict[str, str]:
    """Return a text for each machine other than ``here``: whether it has room for ``wanted``.

    If a machine has no room, its text says what it lacks.
    """
    nodes = [] if view is None else view["nodes"]
    return {
        node["name"]: f"{_lack(node, wanted)}{_place_of_data(node, wanted)}"
        for node in nodes
        if node["name"] != here
    }


def sentences(here: str, wanted: PlacementRequest, found: Mapping[str, str]) -> list[str]:
    """Return lines: first a question to the reader, then the answer for each machine in ``found``.

    ``found`` is the result of :func:`considered`.
    """
    if not found:
        return []
    asked = format_bytes(wanted.memory)
    asked += f" on each of {wanted.devices} GPUs" if wanted.devices > 1 else ""
    asked += f" of the model {wanted.model}" if wanted.model else ""
    head = (
        f"This kernel stays on {here}. Could a new kernel that asks for {asked} start on another "
        "machine?"
    )
    return [head, *(f"{name}: {text}." for name, text in found.items())]


def _lack(node: Mapping[str, Any], wanted: PlacementRequest) -> str:
    if node["state"] in _CLOSED:
        return _CLOSED[node["state"]]
    if node["state"] == "silent":
        return f"unknown, it has not reported for {format_seconds(node['age'])}"
    summary, devices = node["summary"], wanted.devices
    if summary is None or summary["gpus"] is None:
        return "unknown, it has not reported the free memory of each GPU"
    gpus, waiting = summary["gpus"], summary["waiting"]
    if not gpus:
        return "no, it has no GPU in service"
    if wanted.model and (text := lacks_model(gpus, wanted.model)):
        return f"no, {text}"
    has = f" ({models(gpus)})"
    if len(gpus) < devices:
        there = "1 GPU" if len(gpus) == 1 else f"{len(gpus)} GPUs"
        return f"no, the kernel needs {devices} GPUs, and the machine has {there} in service{has}"
    free = sorted((free for _, free in gpus), reverse=True)[devices - 1]
    if free < wanted.memory:
        each = "a GPU" if devices == 1 else f"each of {devices} GPUs"
        return f"no, at most {format_bytes(free, rounding='down')} is free on {each}{has}"
    if waiting:
        kernels = "1 kernel waits" if waiting == 1 else f"{waiting} kernels wait"
        return f"it has room{has}, but {kernels} there"
    return f"yes, it has room{has} and nobody waits"


def _place_of_data(node: Mapping[str, Any], wanted: PlacementRequest) -> str:
    """Return a text that says which of the kernel's folders are on the machine's disks.

    The text is empty if the kernel or the machine names no folders.
    """
    own = (node["summary"] or {}).get("data")
    if not wanted.data or own is None:
        return ""
    there = [folder for folder in wanted.data if lies_on(folder, own)]
    if not there:
        return "; none of the kernel's folders is on a disk there" if own else ""
    shown = ", ".join(folder[:100] for folder in there[:MOST_FOLDERS])
    more = f" and {len(there) - MOST_FOLDERS} more" if len(there) > MOST_FOLDERS else ""
    return f"; {shown}{more} {'is' if len(there) == 1 else 'are'} on a disk there"
