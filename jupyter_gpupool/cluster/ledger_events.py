# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The events that a ledger handles, and the actions that it returns. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping

from .messages import Epoch, Loan, Report

#: The limits by kind ("user" or "group"), name and resource. The name ``"*"`` means all users
#: without an entry.
Limits = Mapping[str, Mapping[str, Mapping[str, int]]]

# --------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``now`` is the time of a monotonic clock in seconds."""

    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(Event):
    """A node's report has arrived."""

    report: Report


@dataclass(frozen=True, slots=True, kw_only=True)
class MembersChanged(Event):
    """The list of members has changed.

    The list must contain all nodes that may have ceilings, even dead and silent nodes. The ledger
    fences a node that is no longer in the list.
    """

    names: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fenced(Event):
    """An admin says that no kernel runs on this node any more.

    A ledger that starts later does not know what the admin has said. So if a node does not come
    back, the admin should also remove it from the list of nodes.
    """

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAsked(Event):
    """An admin orders a node to drain and leave, or (if not ``drains``) to come back.

    A ledger that starts later does not know this order. But a node that has begun to drain
    continues to drain without the order.
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
    """A node that is not in the list of members has reported. The ledger lends it nothing."""

    node: str


@dataclass(frozen=True, slots=True)
class FenceDropped:
    """The ledger counts the ceilings of a fenced node again."""

    node: str
    #: Why: True if the fenced node has reported. False if the fenced node may have borrowed from
    #: another ledger before this ledger took over.
    reported: bool


Action = Send | Stop | Stranger | FenceDropped
