# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""An admin's commands for one session: take its slice back, or end it. Each command has an answer.

A *recall* takes the slice back at a set time, even if the user keeps the slice or the kernel runs a
cell. Nothing is lost: the state moves to host memory, and a running cell continues with the next
slice. The kernel then waits at the end of its class in the queue, because the admin took the slice
for other kernels. When the lease ends, for any reason, the recall also ends.
"""

from __future__ import annotations

from ..errors import Code
from ..states import ATTACHED, HAS_LEASE
from ..units import format_seconds
from . import events as ev
from .facts import Facts
from .model import Refusal
from .preemption import suspendable
from .session import Session
from .transitions import Actions, move, refuse_holds


def recall(facts: Facts, s: Session, event: ev.RecallAsked, _plan: object) -> Actions:
    """Note the time at which the slice goes back to the pool, or withdraw the recall."""
    refusal = None if event.at is None else _refusal(facts, s)
    if refusal is not None:
        return [ev.Answer(session=s.id, rid=event.rid, refusal=refusal)]
    if event.at is None:
        note = "The slice stays." if s.recall_at else "No admin has recalled this slice."
        facts.set_recall(s, 0.0)
    else:
        facts.set_recall(s, event.at, event.reason)
        left = format_seconds(max(0.0, event.at - facts.now))
        note = (
            f"The pool takes the slice back in {left}: the state of the kernel moves to host "
            "memory, and a running cell waits for its next slice."
        )
    return [ev.Answer(session=s.id, rid=event.rid, note=note)]


def _refusal(facts: Facts, s: Session) -> Refusal | None:
    """Return why an admin cannot recall a slice of ``s``, or None."""
    if s.state not in HAS_LEASE:
        return Refusal(Code.NOTHING_TO_RELEASE, "The kernel has no slice.")
    if s.state == "detaching":
        return Refusal(Code.NOTHING_TO_RELEASE, "The pool is already taking the slice back.")
    fixed = s.state in ATTACHED and not suspendable(s, facts)
    why = s.pinned_reason or ("the GPU cannot suspend a process" if fixed else "")
    if not why:
        return None
    return Refusal(
        Code.CANNOT_SUSPEND,
        f"The state of this kernel cannot leave its GPU: {why.rstrip('.')}.",
        "Ask the kernel's owner to free the memory, or end the kernel.",
    )


def end(facts: Facts, s: Session, event: ev.EndAsked, _plan: object) -> Actions:
    """End a session, because an admin wants it."""
    refusal = Refusal(Code.LOST, event.reason, "Start the kernel again.")
    waits = [] if s.state in ATTACHED else refuse_holds(s, refusal)
    s.holds.clear()  # the pool has already answered the holds of an attached session
    return [
        *waits,
        *move(facts, s, "ended", event.reason, lost=True),
        ev.EndSession(session=s.id, message=event.reason),
        ev.Answer(session=s.id, rid=event.rid, note="The pool ends the kernel."),
    ]
