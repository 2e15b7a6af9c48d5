# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks whether the groups in the configuration contradict each other.

:func:`check_groups` finds mistakes without the GPUs of a machine, such as a group that is its own
parent, or guarantees that add up to 110 %. :func:`check_sizes` also needs the sizes of the GPUs,
for example to compare a guarantee of 3 devices with a cap of 200 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Callable, Iterator, Mapping, Sequence

from ..pool.groups import Group, Portion, path
from ..text import did_you_mean
from ..units import format_bytes
from .grouping import Groups, Members
from .mistakes import Fault
from .settings import BrokerSettings

#: On a machine, a portion or a sum of portions may exceed its limit by this many bytes. A
#: percentage of a machine is rarely a whole number of bytes, so rounding can make a sum slightly
#: too large.
_ROUNDING = 1 << 20


def check_groups(groups: Groups) -> list[Fault]:
    """Return the mistakes in groups that can be found without the GPUs of a machine."""
    tree = groups.tree
    faults = _wrong_parents(tree) or [
        fault for scale in _AS_WRITTEN for fault in _wrong_sizes(tree, scale)
    ]
    return [replace(fault, option="groups") for fault in (*faults, *_order(groups.members))]


def _wrong_parents(tree: Mapping[str, Group]) -> list[Fault]:
    """Return a fault for each parent that is not a group, and for each cycle."""
    faults = [
        Fault(
            f"There is no group {group.parent!r}.",
            did_you_mean(
                group.parent, tree, then="Without a parent a group is directly in the pool."
            ),
            keys=(name, "parent"),
        )
        for name, group in tree.items()
        if group.parent and group.parent not in tree
    ]
    seen: set[str] = set()
    for name in tree:
        walk: list[str] = []
        at = name
        while at in tree and at not in seen and at not in walk:
            walk.append(at)
            at = tree[at].parent
        if at in walk:
            cycle = walk[walk.index(at) :]
            if len(cycle) == 1:
                above, hint = "The group is its own parent.", "Write another parent, or remove it."
            else:
                links = [f"{a} is in {b}" for a, b in pairwise([*cycle, cycle[0]])]
                above = f"The parents form a circle: {', '.join(links)}."
                hint = "Remove one of these parents."
            faults.append(Fault(above, hint, keys=(cycle[0], "parent")))
        seen.update(walk)
    return faults


def _order(members: Mapping[str, Members]) -> Iterator[Fault]:
    """Yield a fault for each user, Unix group or Hub group in two groups with equal ``order``."""
    ways: list[tuple[str, str, Callable[[Members], Sequence[str]]]] = [
        ("users", "The user {} is", lambda rule: rule.users),
        ("unix_groups", "The Unix group {} is", lambda rule: rule.unix_groups),
        ("hub_groups", "The Hub group {} is", lambda rule: rule.hub_groups),
        ("users", "Everybody ({}) is", lambda rule: ("*",) if rule.everybody else ()),
    ]
    for key, subject, listed in ways:
        first: dict[tuple[str, float | None], str] = {}
        for name, rule in members.items():
            for one in listed(rule):
                other = first.setdefault((one, rule.order), name)
                if other != name:
                    yield Fault(
                        f"{subject.format(repr(one))} in the groups {other!r} and {name!r}, and "
                        "nothing says which group counts.",
                        "Set a lower 'order', such as 1, for the group that counts; a session can "
                        "choose the other group.",
                        keys=(name, key),
                    )


def children(tree: Mapping[str, Group], parent: str) -> list[str]:
    """Return the groups that are directly in ``parent``; "" is the pool itself."""
    return [name for name, group in tree.items() if group.parent == parent]


@dataclass(frozen=True, slots=True)
class _Scale:
    """A unit in which portions are compared: per cent, devices or bytes.

    ``size`` returns the size of a portion in the unit of this scale; None if the portion has no
    size in this unit. ``text`` returns a size as text.
    """

    size: Callable[[Portion], float | None]
    text: Callable[[float], str]
    #: The size of the whole pool; None if it is unknown.
    whole: float | None
    #: The words before the size of the whole pool in a message, such as "the whole pool is".
    where: str = ""
    tolerance: float = 1e-6


_AS_WRITTEN = (
    _Scale(lambda p: p.percent, lambda size: f"{size:g}%", 100.0, "the whole pool is"),
    _Scale(lambda p: p.devices, lambda size: f"{size:g} devices", None),
    _Scale(lambda p: p.bytes, lambda size: format_bytes(int(size)), None),
)


def check_machine(settings: BrokerSettings, capacities: Sequence[int]) -> list[Fault]:
    """Return the mistakes in guarantees and caps on a machine with these GPUs.

    In a cluster, a size in bytes applies to all machines together. So this function checks sizes in
    bytes only if the machine is in no cluster.
    """
    if not any(capacities):
        return []
    tree = settings.pool.groups
    if settings.cluster_nodes:
        tree = {
            name: replace(
                group, guarantee=_of_one_machine(group.guarantee), cap=_of_one_machine(group.cap)
            )
            for name, group in tree.items()
        }
    return check_sizes(tree, capacities)


def _of_one_machine(portion: Portion | None) -> Portion | None:
    return None if portion is None or portion.bytes is not None else portion


def check_sizes(tree: Mapping[str, Group], capacities: Sequence[int]) -> list[Fault]:
    """Return the faults in guarantees and caps on a machine.

    ``capacities`` has the bytes of each GPU that the pool can grant.
    """
    scale = _Scale(
        lambda portion: float(portion.of(capacities)),
        lambda size: format_bytes(int(size)),
        float(sum(capacities)),
        "the GPUs of this machine have",
        float(_ROUNDING),
    )
    return [replace(fault, option="groups") for fault in _wrong_sizes(tree, scale)]


def _wrong_sizes(tree: Mapping[str, Group], scale: _Scale) -> Iterator[Fault]:
    def size(portion: Portion | None) -> float | None:
        return None if portion is None else scale.size(portion)

    def needs(name: str) -> float:
        """Return the guarantee of a group; if it has none, the sum for the groups inside it."""
        own = size(tree[name].guarantee)
        return own if own is not None else sum(map(needs, children(tree, name)))

    def more(a: float | None, b: float | None) -> bool:
        return a is not None and b is not None and a > b + scale.tolerance

    #: If a group's guarantee exceeds the cap of an outer group, all outer groups of the group are
    #: in this set. The fault is already reported, so the sums in these groups are not checked.
    refused: set[str] = set()
    for name, group in tree.items():
        guarantee, cap = size(group.guarantee), size(group.cap)
        if more(guarantee, cap):
            yield Fault(
                f"The cap {_said(group.cap, scale)} is below the guarantee "
                f"{_said(group.guarantee, scale)}.",
                "Raise the cap or lower the guarantee.",
                keys=(name, "cap"),
            )
        for key, portion, own in (("guarantee", group.guarantee, guarantee),
                                  ("cap", group.cap, cap)):  # fmt: skip
            above = _lowest_cap(tree, group.parent, size)
            if own is None or portion is None:
                continue
            if above is not None and more(own, above[1]):
                if key == "guarantee":
                    refused.update(path(tree, name)[:-1])
                yield Fault(
                    f"The {key} {_said(portion, scale)} cannot be reached: this group is inside "
                    f"{above[0]!r}, and the cap of {above[0]!r} is "
                    f"{_said(tree[above[0]].cap, scale)}.",
                    f"Lower this {key} or raise the cap of {above[0]!r}.",
                    keys=(name, key),
                )
            elif key == "cap" and more(own, scale.whole):
                assert scale.whole is not None
                yield Fault(
                    f"The cap {_said(portion, scale)} cannot be reached: {scale.where} "
                    f"{scale.text(scale.whole)}.",
                    "Lower the cap, or remove it.",
                    keys=(name, key),
                )
    for parent in ("", *tree):
        within = size(tree[parent].guarantee) if parent else scale.whole
        bound = "guarantee"
        if within is None and parent:
            within, bound = size(tree[parent].cap), "cap"
        inner = [name for name in children(tree, parent) if needs(name) > 0]
        total = sum(map(needs, inner))
        if not inner or parent in refused or not more(total, within):
            continue
        assert within is not None
        last = inner[-1]
        if len(inner) == 1:
            sentence = f"{inner[0]!r} is guaranteed {scale.text(total)}"
        else:
            named = ", ".join(f"{name!r} ({scale.text(needs(name))})" for name in inner)
            sentence = f"The guarantees of {named} add up to {scale.text(total)}"
        if parent:
            owner = f"the {bound} of the parent group {parent!r} is {scale.text(within)}"
        else:
            owner = f"{scale.where} {scale.text(within)}"
        yield Fault(
            f"{sentence}, but {owner}.",
            "Lower these guarantees" + (f" or raise the {bound} of {parent!r}." if parent else "."),
            keys=(last, "guarantee") if tree[last].guarantee else (last,),
        )


def _lowest_cap(
    tree: Mapping[str, Group], name: str, size: Callable[[Portion | None], float | None]
) -> tuple[str, float] | None:
    """Return (group, cap) for the lowest cap among the group ``name`` and the groups above it."""
    found: list[tuple[float, str]] = []
    while name in tree:
        cap = size(tree[name].cap)
        if cap is not None:
            found.append((cap, name))
        name = tree[name].parent
    return min(found)[::-1] if found else None


def written(portion: Portion) -> str:
    """Return a portion as people write it, such as ``"40%"``, ``"2 devices"`` or ``"24 GiB"``."""
    if portion.percent is not None:
        return f"{portion.percent:g}%"
    if portion.devices is not None:
        return f"{portion.devices:g} device{'' if portion.devices == 1 else 's'}"
    return format_bytes(portion.bytes or 0)


def _said(portion: Portion | None, scale: _Scale) -> str:
    """Return the text of a portion; add its size if that is another text: ``"40% (32 GiB)"``."""
    assert portion is not None
    size = scale.size(portion)
    text, shown = written(portion), "" if size is None else scale.text(size)
    plain = {text, text.removesuffix("s")} | ({f"{text}s"} if text.endswith("device") else set())
    return text if shown in plain or not shown else f"{text} ({shown})"
