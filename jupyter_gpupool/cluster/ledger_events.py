# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What happens to a ledger, and what it wants done. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from .messages import Epoch, Loan, Report

#: By user or group name and resource; ``"*"`` stands for all users without an entry.
Limits = Mapping[str, Mapping[str, Mapping[str, int]]]

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``now`` is in seconds, of any steady clock."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """A node's report has arrived."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged(Event):
    """The list of nodes: all that may have ceilings, those included that are dead or silent.

    A node that is no longer in it counts as fenced.
    """

    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Event):
    """An admin says that no kernel runs on this node any more.

    A ledger that starts later does not know it: take a node that does not come back from the list.
    """

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked(Event):
    """An admin wants a node to drain and to leave; with ``drains`` False, to come back.

    A ledger that starts later does not know it; a node that has begun to drain goes on.
    """

    node: str
    drains: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged(Event):
    """The quotas have been read again."""

    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time has passed; see :meth:`Ledger.next_wakeup`."""


# --------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send this answer to its node."""

    answer: Loan


@dataclass(frozen=True, slots=True)
class Stop:
    """Another ledger has taken over: end, and send nothing more."""

    by: Epoch


@dataclass(frozen=True, slots=True)
class Stranger:
    """A node has reported that is not in the list of members: it gets nothing."""

    node: str


Action = Send | Stop | Stranger
