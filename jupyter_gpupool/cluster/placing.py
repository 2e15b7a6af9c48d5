# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Choose the machine for a kernel, once at its start: a running kernel does not move."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from ..units import format_bytes


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a kernel will ask for, and its user."""

    user: str
    #: Bytes on each GPU, and the number of GPUs.
    memory: int
    devices: int = 1
    #: Words that the name of each GPU must have; "" for any model.
    model: str = ""
    #: Folders that the kernel works with.
    data: tuple[str, ...] = ()


class Considered(NamedTuple):
    """One machine, and what it lacks ('' if the kernel can start there)."""

    node: str
    lacks: str


@dataclass(frozen=True, slots=True)
class Placement:
    """The chosen machine ('' if no machine can take the kernel), and all considered machines."""

    node: str
    considered: tuple[Considered, ...]

    @property
    def reasons(self) -> str:
        """A text that names each unsuitable machine and what it lacks."""
        return "; ".join(f"{node}: {lacks}" for node, lacks in self.considered if lacks)


def place(nodes: Iterable[Mapping[str, Any]], wanted: PlacementRequest) -> Placement:
    """Choose a machine for a kernel from ``nodes``, the nodes in the ledger's view.

    A machine that lacks something is not chosen. The function compares the others by these
    criteria, in this order: enough GPUs with room now; the shortest queue; the largest number of
    the kernel's folders on the machine's own disks; the largest number of leases that the machine
    has already borrowed of the user's quota; the most free memory; the name.
    """
    found: list[tuple[tuple[Any, ...], str]] = []
    considered = []
    for node in nodes:
        lacks = _lacks(node, wanted)
        considered.append(Considered(node["name"], lacks))
        if lacks:
            continue
        summary = node["summary"]
        rank = (
            not has_room(summary, wanted.memory, wanted.devices),
            summary["waiting"],
            -_folders(summary["data"] or (), wanted.data),
            -_leases(node, wanted.user),
            -summary["free"],
            node["name"],
        )
        found.append((rank, node["name"]))
    return Placement(min(found)[1] if found else "", tuple(considered))


def has_room(summary: Mapping[str, Any], memory: int, devices: int) -> bool:
    """Return whether at least ``devices`` GPUs of a machine each have ``memory`` bytes free.

    A view that would be too long does not list the GPUs. In this case only the free memory of the
    whole machine must be large enough.
    """
    if summary["gpus"] is None:
        return bool(summary["free"] >= memory * devices)
    return len([free for _, free in summary["gpus"] if free >= memory]) >= devices


def is_model(name: str, model: str) -> bool:
    """Return whether a GPU's name has all words of ``model``: "NVIDIA A100" has no word "A10"."""
    return {*_words(model)} <= {*_words(name)}


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _lacks(node: Mapping[str, Any], wanted: PlacementRequest) -> str:
    """Return why a machine cannot take the kernel, even if the kernel waits; '' if it can."""
    summary = node["summary"]
    if node["state"] != "present":
        return f"it is {node['state']}"
    if summary is None:
        return "its GPUs are not known yet"
    works = summary["devices"] - summary["out"]
    if works < wanted.devices:
        needs = _count(wanted.devices)
        return f"the kernel needs {needs}, and the machine has {_count(works)} in service"
    most = summary["capacity"] // summary["devices"]
    if most < wanted.memory:
        needs, has = format_bytes(wanted.memory), format_bytes(most)
        return f"the kernel needs {needs} on a GPU, and the machine's GPUs have {has} each"
    if wanted.model:
        return lacks_model(summary["gpus"], wanted.model)
    return ""


def lacks_model(gpus: list[Any] | None, model: str) -> str:
    """Return why it is not certain that a kernel gets a GPU of ``model``; '' if it is certain.

    The machine's pool chooses the kernel's GPU, and it does not know models. So all GPUs of the
    machine must be of this model.
    """
    if gpus is None:
        return "the models of its GPUs are not known: the cluster is too large to list them"
    others = sorted({name for name, _ in gpus if not is_model(name, model)})
    if not others:
        return ""
    if any(is_model(name, model) for name, _ in gpus):
        return f"its pool may choose a GPU of another model ({', '.join(others)})"
    return f"the kernel needs the model {model}, and the machine has only {', '.join(others)}"


def _count(gpus: int) -> str:
    return "1 GPU" if gpus == 1 else f"{gpus} GPUs"


def _folders(own: Iterable[str], wanted: Iterable[str]) -> int:
    """Return how many of the kernel's folders are, or are below, the machine's own folders."""
    folders = [*own]
    return sum(lies_on(one, folders) for one in {*wanted})


def lies_on(one: str, own: Iterable[str]) -> bool:
    """Return whether a folder is one of a machine's own folders, or is below one of them."""
    return any(PurePosixPath(one).is_relative_to(folder) for folder in own)


def _leases(node: Mapping[str, Any], user: str) -> int:
    """Return how many leases count for the user on a machine."""
    return sum(row[-1] for row in node["counted"] if tuple(row[:3]) == ("user", user, "leases"))
