# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What status shows of the pool and of each session: the fields, and how they are computed.

A new field of a session needs a line in :class:`SessionView` and a line in :func:`session_views`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Mapping

from .evidence import Expected
from .facts import Facts
from .model import DeviceView, PoolSettings, SessionRecord
from .preemption import leaves_at
from .schedule import Plan
from .session import Session
from .words import seconds, stays_reason, taken_reason, waits_for


@dataclass(frozen=True, slots=True)
class SessionView:
    """One session as status shows it."""

    record: SessionRecord
    queue_position: int | None
    queue_length: int
    #: The earliest and the latest time at which the wait will probably end. None if the pool has no
    #: evidence for an estimate.
    expected: Expected | None
    #: When the present wait began; None if the session does not wait.
    queued_at: float | None
    wait_seconds_total: float
    attached_seconds_total: float
    #: Why the session keeps its slice although it has been idle for long enough to lose it. Empty
    #: for all other sessions.
    stays_reason: str = ""
    #: When the pool suspends the idle session if nothing else happens. None if this does not depend
    #: on time alone: for example, if something keeps the slice (``stays_reason``), or if other
    #: sessions wait for the slice (``wanted``).
    leaves_at: float | None = None
    #: Whether other sessions wait for the slice of this idle session.
    wanted: bool = False
    #: Why the pool took the slice while the session was idle; "" if it did not, and in the cases
    #: that :func:`~.words.taken_reason` names.
    taken_reason: str = ""
    #: What the session waits for, in words that every user may see; "" if it does not wait.
    waits_for: str = ""
    #: For each device of the session: the bytes in use at the last measurement. A device without a
    #: measurement has no entry.
    footprints: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolView:
    """The whole pool at one instant."""

    now: float
    devices: tuple[DeviceView, ...]
    sessions: tuple[SessionView, ...]
    host_budget: int
    host_used: int
    settings: PoolSettings


def session_views(
    facts: Facts,
    plan: Plan,
    now: float,
    record: Callable[[str], SessionRecord],
    wanted_since: Callable[[Session], float],
) -> tuple[SessionView, ...]:
    """Return all sessions at ``now``, in the order in which they were opened.

    ``record`` returns the record of a session by its id. ``wanted_since`` returns since when other
    sessions wait for what a session uses, or infinity if no session waits for it.
    """
    positions = {s.id: at for at, s in enumerate(plan.queue, 1)}
    found = []
    for s in facts.sessions.values():
        position = positions.get(s.id)
        stays = stays_reason(facts, s, now)
        wanted = s.state == "idle" and wanted_since(s) < math.inf
        leaves = leaves_at(s, facts) if s.state == "idle" else math.inf
        waited, attached = seconds(s, now)
        found.append(
            SessionView(
                record=record(s.id),
                queue_position=position,
                queue_length=len(positions),
                expected=None if position is None else s.wait.expected,
                queued_at=None if position is None else s.queued_at,
                wait_seconds_total=waited,
                attached_seconds_total=attached,
                stays_reason=stays,
                leaves_at=None if stays or wanted or leaves == math.inf else leaves,
                wanted=wanted,
                taken_reason=taken_reason(s),
                waits_for=waits_for(plan, s),
                footprints=dict(s.lease.footprints),
            )
        )
    return tuple(found)
