# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The groups in which sessions wait, by what would have to happen for them to be served."""

from __future__ import annotations

from .lease import Session
from .queue import WaitQueue
from .quota import Quotas


class Lanes:
    """Every waiting session is in one of these (or in "later": it is tried again by the clock)."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        #: The waiting sessions that the next free bytes could serve.
        self.open = WaitQueue()
        #: Waiting sessions whose plan is under way.
        self.planned: dict[str, Session] = {}
        #: Waiting sessions held up by their owner's quota, in order, by owner.
        self.by_quota: dict[str, WaitQueue] = {}
        #: Owners for whom more host memory would make room in the quota.
        self.host_waits: dict[str, None] = {}
        #: Who waits, or which idle slices are waited for, has changed since the last look.
        self.recheck_waiters = False
        #: Somebody waited at that look.
        self.waited = False
        #: Waiting sessions for which no device will do at present.
        self.nowhere: dict[str, Session] = {}
        #: Waiting sessions that must be looked at again.
        self.fresh: dict[str, Session] = {}

    def set_lane(self, s: Session, lane: str) -> None:
        """Move a waiting session between the groups in which it waits."""
        entry, old = s.entry, s.lane
        assert entry is not None
        owner = s.owner.name
        if old == lane:
            return
        if old == "open":
            self.open.remove(entry)
        elif old == "quota":
            queue = self.by_quota[owner]
            queue.remove(entry)
            if not queue:
                del self.by_quota[owner]
            else:
                self.quotas.note(owner)
        elif old == "nowhere":
            del self.nowhere[s.id]
        elif old == "fresh":
            self.fresh.pop(s.id, None)
        s.lane = lane
        self.recheck_waiters = True
        if lane == "open":
            self.open.add(entry)
        elif lane == "quota":
            self.by_quota.setdefault(owner, WaitQueue()).add(entry)
        elif lane == "nowhere":
            self.nowhere[s.id] = s
        elif lane == "fresh":
            self.fresh[s.id] = s
