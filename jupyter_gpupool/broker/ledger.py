# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Transitions as rows of the journal: what reports add up and timelines draw.

``state`` is every transition of a lease. Beside it, one row for each device: ``attach`` (first
bytes), ``resume`` and ``migrate`` (state that came back, and from elsewhere), ``suspend``,
``release`` (a slice given back that held nothing), ``queue`` and ``refuse``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..pool import events as e
from ..pool.model import SessionRecord
from .sessions import Session

if TYPE_CHECKING:
    from .runner import Runner


def steady(change: e.StateChanged) -> bool:
    """Return whether only a hold came or went: the lease is as it was."""
    return {change.old, change.new} == {"active", "idle"}


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
        elif change.old == "attaching" and change.new in ("active", "idle"):
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
