# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Rows of the journal: what reports add up and timelines draw, and how many a user may cause.

``state`` is every transition of a lease. Beside it, one row for each device: ``attach`` (first
bytes), ``resume`` and ``migrate`` (state that came back, and from elsewhere), ``suspend``,
``release`` (a slice given back that held nothing), ``queue`` and ``refuse``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...pool import events as e
from ...pool.model import SessionRecord
from ...states import ATTACHED
from ..pace import Bucket
from ..sessions import Session
from .journal import Row

if TYPE_CHECKING:
    from ..runner import Runner


#: Rows a second that a user may cause for long, and at once.
ROWS = 5.0, 2000.0

#: Seconds of rows that one row stands for, once there were too many.
SUMMARY = 60.0

_CHEAP = frozenset({"open", "close", "refuse", "queue"})


@dataclass(slots=True)
class _User:
    bucket: Bucket
    #: Rows that were not written, by kind, and since when.
    missing: Counter[str] = field(default_factory=Counter)
    since: float = 0.0


class RowBudget:
    """Bounds the rows that one user may cause without using a device.

    Opening and closing sessions, requests that are refused and queueing cost a client nothing, so
    one user could push everybody's history out of the journal. What is accounted (slices, suspends
    and resumes) takes its time in the driver and is always written. Times are seconds of any clock
    that does not go back.
    """

    def __init__(self) -> None:
        self._users: dict[str, _User] = {}

    def admits(self, row: Row, now: float) -> bool:
        """Return whether the row is to be written; one that is not is counted."""
        cheap = row.kind in _CHEAP or (row.kind == "state" and row.device is None)
        if not cheap or not row.owner:
            return True
        user = self._users.get(row.owner)
        if user is None:
            user = self._users[row.owner] = _User(Bucket(*ROWS, now))
        if user.bucket.left(now) >= 1:
            user.bucket.pay(1.0, now)
            return True
        if not user.missing:
            user.since = now
        user.missing[row.kind] += 1
        return False

    def summaries(self, now: float, *, all_of_them: bool = False) -> list[tuple[str, Counter[str]]]:
        """Return whose rows were not written, and how many by kind; for one row each."""
        found = []
        for owner, user in list(self._users.items()):
            if user.missing and (all_of_them or now - user.since >= SUMMARY):
                found.append((owner, user.missing))
                user.missing = Counter()
            elif not user.missing and user.bucket.left(now) >= user.bucket.size:
                del self._users[owner]  # as one who has caused nothing
        return found


def steady(change: e.StateChanged) -> bool:
    """Return whether only a hold came or went: the lease is as it was."""
    return {change.old, change.new} == ATTACHED


class Ledger:
    """Writes the rows of sessions."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._last: dict[str, SessionRecord] = {}

    def remember_attach(self, session: str) -> None:
        """Keep the record as it is while an attach begins: the journal row at its end needs it."""
        record = self._runner.record(session)
        if record is not None:
            self._last[session] = record

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._last.pop(session, None)

    def change(self, change: e.StateChanged, cause: e.Event) -> None:
        """Note a transition and what it means; ``cause`` is the event that brought it."""
        session = self._runner.sessions.find(change.session)
        if session is None or steady(change):
            return
        record = self._runner.record(change.session)
        first = change.slices[0] if change.slices else None
        busy = {"busy_seconds": round(session.use.busy_seconds, 3)} if session.page else {}
        self._runner.note(
            "state",
            session,
            device=first.device if first else None,
            bytes=sum(s.bytes for s in change.slices) or None,
            reason=change.reason,
            detail={
                "old": change.old,
                "new": change.new,
                "epoch": change.epoch,
                "suspended_bytes": record.suspended_bytes if record else 0,
                **busy,
            },
        )
        if change.new == "queued":
            session.queued_at = change.now
            self._runner.note("queue", session, reason=change.reason)
        elif change.old == "attaching" and change.new in ATTACHED:
            self._attach(session, change, cause)
        elif change.old == "detaching":
            self._suspend(session, change, cause)

    def _attach(self, session: Session, change: e.StateChanged, cause: e.Event) -> None:
        waited = max(0.0, change.now - session.queued_at) if session.queued_at else 0.0
        session.queued_at = 0.0
        before = self._last.pop(session.id, None)
        resumed = before is not None and bool(before.suspended)
        for index, piece in enumerate(change.slices):
            origin = before.suspended[index].device if resumed and before is not None else ""
            self._runner.note(
                "resume" if resumed else "attach",
                session,
                device=piece.device,
                bytes=piece.bytes,
                seconds=waited,
                reason=change.reason,
                detail={"driver_seconds": getattr(cause, "seconds", 0.0)},
            )
            if origin and origin != piece.device:
                self._runner.note("migrate", session, device=piece.device, bytes=piece.bytes,
                          detail={"from": origin})  # fmt: skip

    def _suspend(self, session: Session, change: e.StateChanged, cause: e.Event) -> None:
        if isinstance(cause, e.SuspendDone):
            for piece in cause.suspended:
                self._runner.note("suspend", session, device=piece.device, bytes=piece.bytes,
                          seconds=cause.seconds, reason=change.reason)  # fmt: skip
            if not cause.suspended:
                self._runner.note("release", session, reason=change.reason)
        elif isinstance(cause, e.SuspendRefused):
            self._runner.note("refuse", session, reason=cause.message,
                      detail={"what": "suspend", "kind": cause.kind})  # fmt: skip
