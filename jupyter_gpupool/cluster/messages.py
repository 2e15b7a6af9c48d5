# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The messages between nodes and ledger. A message may be lost, late, repeated or out of order.

A *key* names one limit that all nodes share. An amount of a key is a whole number: of bytes (of
device memory, or of a group's guarantee), devices, leases or GPU-seconds. A *ceiling* is how much
of a key a node may use. The sum of all ceilings of a key never exceeds the limit. So no quota is
exceeded.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Literal, Mapping, NamedTuple

HolderKind = Literal["user", "group"]

#: The GPU-seconds of a budget. If the budget is renewed once a day, its key has a window. If the
#: budget refills, its key has no window, because used GPU-seconds come back continuously.
GPU_SECONDS = "gpu-seconds"
#: For a budget that refills: the GPU-seconds that come back in a day. The ledger divides them among
#: the nodes.
REFILL = "refill"
#: The bytes of a group's guarantee.
GUARANTEE = "guarantee"

#: By holder (a user or a group): the GPU-seconds used, decayed until the time of the report. Fair
#: shares depend on these numbers.
Usages = Mapping[tuple[HolderKind, str], float]


class Key(NamedTuple):
    """One limit of one user or group."""

    kind: HolderKind
    name: str
    #: ``memory``, ``devices``, ``leases``, ``gpu-seconds``, ``refill`` or ``guarantee``.
    resource: str
    #: The day, for GPU-seconds of a budget with windows; "" for all other amounts.
    window: str = ""

    @property
    def is_seconds(self) -> bool:
        """Whether the amount is GPU-seconds that sessions use up."""
        return self.resource == GPU_SECONDS

    @property
    def lasts(self) -> bool:
        """Whether a node's ceiling stays in force while the ledger is silent.

        Sessions hold memory, devices and leases, and give them back. Ceilings of these three do not
        stay in force: ``on_ledger_loss`` says how much a node may grant without the ledger.
        """
        return self.resource in (GPU_SECONDS, REFILL, GUARANTEE)


class Spent(NamedTuple):
    """GPU-seconds that a node used in a window before it was gone."""

    node: str
    #: The name of the journal in which the node recorded its use.
    journal: str
    key: Key


class Epoch(NamedTuple):
    """The fencing token of one life of a ledger. A node obeys the greatest token it has seen."""

    number: int = 0
    ledger: str = ""


class Holding(NamedTuple):
    """How much of one key a node may use, how much it uses, and how much it would keep."""

    #: Sessions may use this much without a message.
    ceiling: int = 0
    used: int = 0
    #: The amount that the node would keep while no other node waits, because its sessions will use
    #: it again.
    keep: int = 0


NOTHING = Holding()


class Summary(NamedTuple):
    """A node's GPUs and sessions, for people and for placing kernels only. Sizes in bytes."""

    #: The number of its GPUs, and the number of GPUs that are out of service.
    devices: int
    out: int
    #: In bytes: what the node's pool can grant at most, what it has granted, and what it could
    #: grant now without a preemption.
    capacity: int
    granted: int
    free: int
    #: Kernels that wait for a slice.
    waiting: int
    #: For each GPU in service: its model, and how many bytes of it the pool could grant now without
    #: a preemption.
    gpus: tuple[tuple[str, int], ...] = ()
    #: How many sessions each user has there.
    sessions: tuple[tuple[str, int], ...] = ()
    #: Folders on the node's own disks.
    data: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """A message from a node to the ledger, with all that the node has and waits for."""

    node: str
    #: The number of the node's life. It grows with each start of the node's broker, and each time
    #: the node comes back after it has drained or was fenced. Offers to an earlier life are void.
    life: int
    #: Grows with each report of this life.
    number: int
    #: ``epoch``: the ledger that the node obeys. ``applied``: the serial number of the last answer
    #: of this ledger that the node has applied.
    epoch: Epoch
    applied: int
    holdings: Mapping[Key, Holding] = field(default_factory=dict)
    #: What each waiting session needs in addition to what it uses. The session that has waited
    #: longest comes first. A session gets all its keys at once. Otherwise two sessions that need
    #: the same two keys might get one key each, and each would wait for the other session.
    waits: tuple[Mapping[Key, int], ...] = ()
    #: ``spent``: what gone nodes have used up of budgets with a window. The node sends ``spent``
    #: only to a ledger that has just started; it is None in other reports. ``version``: the version
    #: of ``spent`` that the node knows.
    version: int = -1
    spent: Mapping[Spent, int] | None = None
    #: ``drains``: the node grants nothing more. ``leaves``: the node has drained, its sessions have
    #: no slice, and it leaves.
    drains: bool = False
    leaves: bool = False
    summary: Summary | None = None
    #: Whether a user of this node wants to see the cluster. If so, the ledger also sends the node a
    #: view of all nodes.
    looks: bool = False
    #: ``usage``: what users and groups have used on this node; None in reports without the usage.
    #: It contains each user and group with a session, with 0 if they have used nothing.
    #: ``half_life``: the half-life of a usage in seconds, from the rules.
    usage: Usages | None = None
    half_life: float = 0.0
    #: The name of the node's journal. A node that has lost its journal reports another name, and
    #: does not know what it used before.
    journal: str = ""


def recent(spent: Mapping[Spent, int]) -> dict[Spent, int]:
    """Return the amounts in ``spent`` that belong to the last two windows of a user or group.

    The last window alone is not enough: it may be a window in the future, from a node with a wrong
    clock.
    """
    windows: dict[tuple[str, str, str], set[str]] = {}
    for _, _, key in spent:
        windows.setdefault(key[:3], set()).add(key.window)
    last = {holder: sorted(found)[-2:] for holder, found in windows.items()}
    return {what: n for what, n in spent.items() if what.key.window in last[what.key[:3]]}


@dataclass(frozen=True, slots=True)
class Loan:
    """New ceilings, from the ledger to a node. It also shows that the ledger is alive."""

    node: str
    life: int
    #: The number of the last report that the ledger has read.
    number: int
    epoch: Epoch
    #: The number of this answer; it grows with each answer to this life of the node. A node ignores
    #: an answer whose number is not larger than that of the last answer that it has applied.
    serial: int
    ceilings: Mapping[Key, int] = field(default_factory=dict)
    #: Keys that other nodes wait for. When the node uses less of one of them, it must report at
    #: once.
    wanted: frozenset[Key] = frozenset()
    #: The node may grant from its ceilings for this many seconds after it sent report ``number``.
    ttl: float = 0.0
    #: ``spent``: what gone nodes have used up; None if the node already has this ``version``.
    version: int = 0
    spent: Mapping[Spent, int] | None = None
    #: True if the ledger no longer counts anything of this life, because the node has asked to
    #: leave or an admin has fenced it. A fenced node begins a new life.
    gone: bool = False
    #: An admin's order that the node has not executed yet: True to drain, False to come back.
    drains: bool | None = None
    #: Keys of this node whose budgets of GPU-seconds all nodes together have used up.
    used_up: frozenset[Key] = frozenset()
    #: What the users and groups in the node's last ``usage`` have used on other nodes; None if the
    #: node has reported no new ``usage``.
    elsewhere: Usages | None = None


# --------------------------------------------------------------------------- as JSON


def report_to_json(report: Report) -> dict[str, Any]:
    """Return a report as JSON values."""
    found: dict[str, Any] = {
        "node": report.node,
        "life": report.life,
        "number": report.number,
        "epoch": list(report.epoch),
        "applied": report.applied,
        "journal": report.journal,
        "version": report.version,
        "holdings": [[*key, *held] for key, held in report.holdings.items()],
        "waits": [_amounts_to_json(wait) for wait in report.waits],
    }
    if report.spent is not None:
        found["spent"] = _spent_to_json(report.spent)
    if report.drains:
        found["drains"] = True
    if report.leaves:
        found["leaves"] = True
    if report.summary is not None:
        found["summary"] = list(report.summary)
    if report.looks:
        found["looks"] = True
    if report.usage is not None:
        found["usage"] = _usages_to_json(report.usage)
        found["half_life"] = report.half_life
    return found


def report_from_json(values: Mapping[str, Any]) -> Report:
    """Return the report that :func:`report_to_json` has written."""
    return Report(
        values["node"], values["life"], values["number"], epoch_from_json(values["epoch"]),
        values["applied"],
        {Key._make(row[:4]): Holding._make(map(_amount, row[4:])) for row in values["holdings"]},
        tuple(_amounts(rows) or {} for rows in values["waits"]),
        values["version"], _spent(values.get("spent")), bool(values.get("drains")),
        bool(values.get("leaves")), _summary(values.get("summary")), bool(values.get("looks")),
        _usages(values.get("usage")), values.get("half_life", 0.0),
        str(values.get("journal", "")),
    )  # fmt: skip


def loan_to_json(answer: Loan) -> dict[str, Any]:
    """Return an answer as JSON values."""
    found: dict[str, Any] = {
        "node": answer.node,
        "life": answer.life,
        "number": answer.number,
        "epoch": list(answer.epoch),
        "serial": answer.serial,
        "ttl": answer.ttl,
        "version": answer.version,
        "ceilings": _amounts_to_json(answer.ceilings),
        "wanted": sorted(map(list, answer.wanted)),
    }
    if answer.spent is not None:
        found["spent"] = _spent_to_json(answer.spent)
    if answer.gone:
        found["gone"] = True
    if answer.drains is not None:
        found["drains"] = answer.drains
    if answer.used_up:
        found["used_up"] = sorted(map(list, answer.used_up))
    if answer.elsewhere is not None:
        found["elsewhere"] = _usages_to_json(answer.elsewhere)
    return found


def loan_from_json(values: Mapping[str, Any]) -> Loan:
    """Return the answer that :func:`loan_to_json` has written."""
    return Loan(
        values["node"], values["life"], values["number"], epoch_from_json(values["epoch"]),
        values["serial"], _amounts(values["ceilings"]) or {},
        frozenset(map(Key._make, values["wanted"])), values["ttl"],
        values["version"], _spent(values.get("spent")), bool(values.get("gone")),
        values.get("drains"), frozenset(map(Key._make, values.get("used_up", ()))),
        _usages(values.get("elsewhere")),
    )  # fmt: skip


def epoch_from_json(values: Any) -> Epoch:
    """Return the fencing token that a message contains as ``values``.

    Raises
    ------
    ValueError
        If ``values`` is not a token. A node that kept a wrong token could ignore the right ledger.
    """
    if (
        not isinstance(values, list)
        or [type(value) for value in values] != [int, str]
        or not 0 <= values[0] < 1 << 53
    ):
        raise ValueError(f"{values!r:.80} is not a fencing token")
    return Epoch(*values)


def parts_to_json(parts: Mapping[Key, int]) -> str:
    """Return ceilings as text for a broker's journal."""
    return json.dumps(_amounts_to_json(parts), separators=(",", ":"))


def parts_from_json(text: str) -> dict[Key, int]:
    """Return what :func:`parts_to_json` has written; {} if the text cannot be read."""
    try:
        return _amounts(json.loads(text or "[]")) or {}
    except (ValueError, TypeError, IndexError):
        return {}


def _amount(value: Any) -> int:
    """Return ``value`` if it is an amount, else raise an error.

    An infinite amount would make the ledger's sums wrong.
    """
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is not an amount")
    return value


def _spent_to_json(spent: Mapping[Spent, int]) -> list[list[Any]]:
    return [[what.node, what.journal, *what.key, n] for what, n in spent.items()]


def _spent(rows: list[list[Any]] | None) -> dict[Spent, int] | None:
    if rows is None:
        return None
    return {
        Spent(str(row[0]), str(row[1]), Key._make(map(str, row[2:6]))): _amount(row[6])
        for row in rows
    }


def _summary(values: list[Any] | None) -> Summary | None:
    """Return a summary; None if the node has another version, whose summary has other fields."""
    if values is None or len(values) != len(Summary._fields):
        return None
    *figures, gpus, sessions, data = values
    return Summary._make([*figures, _counts(gpus), _counts(sessions), tuple(map(str, data))])


def _counts(rows: list[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((str(name), int(number)) for name, number in rows)


def _usages_to_json(usages: Usages) -> list[list[Any]]:
    return [[*holder, round(amount, 1)] for holder, amount in usages.items()]


def _usages(rows: list[list[Any]] | None) -> Usages | None:
    return None if rows is None else {(kind, name): _usage(n) for kind, name, n in rows}


def _usage(value: Any) -> float:
    found = float(value)
    if not 0 <= found < math.inf:
        raise ValueError(f"{value!r:.80} is not a usage")
    return found


def _amounts_to_json(amounts: Mapping[Key, int]) -> list[list[Any]]:
    return [[*key, amount] for key, amount in amounts.items()]


def _amounts(rows: list[list[Any]] | None) -> dict[Key, int] | None:
    return None if rows is None else {Key._make(row[:4]): _amount(row[4]) for row in rows}
