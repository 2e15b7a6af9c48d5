# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What the end of an effect means: attached or not, suspended or not.

Each effect ends once. A completion that does not belong to the effect under way (another epoch,
another state, a session that is gone) is logged and dropped: its session has moved on.
"""

from __future__ import annotations

from . import events as ev
from .books import BACK_OFF, BACK_OFF_MOST, Books
from .estimate import weighted
from .events import Log
from .growth import trim
from .lease import Session
from .model import Slice, State
from .residence import Stay
from .serve import Server


class Effects:
    """One method per completion."""

    def __init__(self, books: Books, server: Server) -> None:
        self._books = books
        self._server = server

    def _current(self, name: str, epoch: int, state: State, what: str) -> Session | None:
        books = self._books
        s = books.sessions.get(name)
        if s is not None and s.state == state and s.epoch == epoch:
            return s
        now = "gone" if s is None else f"{s.state}, epoch {s.epoch}"
        books.emit(
            Log(
                session=name,
                level="debug" if s is None else "warning",
                code="stale-completion",
                message=f"{what} of epoch {epoch} came for a session that is {now}; dropped.",
            )
        )
        return None

    # ------------------------------------------------------------------ attach

    def attach_done(self, event: ev.AttachDone) -> None:
        books = self._books
        s = self._current(event.session, event.epoch, "attaching", "AttachDone")
        if s is None:
            return
        s.failures = 0
        resumed = s.suspended
        if resumed:
            s.resumes += 1
            s.bound = tuple(x.device for x in s.slices)
            if tuple(x.device for x in resumed) != s.bound:
                s.migrations += 1
            if event.seconds > 0:
                books.estimates.swapped(event.seconds)
                s.resume_mean = weighted(s.resume_mean, event.seconds)
            s.resumed_at = books.now
            s.stay = Stay()
            books.drop_suspended(s)
        s.wait_total += max(0.0, books.now - s.queued_at)
        s.queued_at = 0.0
        books.move(s, "active" if s.holds else "idle", "attached")
        self._settle_size(s, resumed)
        books.grant_holds(s)

    def _settle_size(self, s: Session, resumed: tuple[Slice, ...]) -> None:
        """Give back the headroom of the resume; note what is missing if the request grew."""
        books = self._books
        held = [x.bytes for x in resumed] or [0] * len(s.slices)
        if resumed:
            # It uses at least this much, whenever the first sample comes.
            s.restored = {x.device: size for x, size in zip(s.slices, held, strict=True)}
        memory = s.request.memory
        slices = [
            Slice(x.device, min(x.bytes, max(memory, h)))
            for x, h in zip(s.slices, held, strict=True)
        ]
        if tuple(slices) != s.slices and resumed:
            books.resize(s, slices)
        books.note_growth(s)
        if s.growing:
            self._server.grow(s)

    def attach_failed(self, event: ev.AttachFailed) -> None:
        books = self._books
        s = self._current(event.session, event.epoch, "attaching", "AttachFailed")
        if s is None:
            return
        if event.lost:
            books.lose(s, event.message)
            return
        s.immovable = s.immovable or event.stay
        # last_devices stays: the session has never been on these.
        last, since = s.last_devices, s.queued_at
        books.return_lease(s)
        s.last_devices = last
        self._back_off(s, "attach")
        if s.holds:
            books.move(s, "queued", event.message)
            books.enqueue(s, since)
            s.why = ("retry", event.message)
            books.set_lane(s, "later")
            books.offer(s)
        else:
            s.wait_total += max(0.0, books.now - since)
            s.queued_at = 0.0
            books.move(s, "detached", event.message)

    def _back_off(self, s: Session, kind: str) -> None:
        pause = min(BACK_OFF_MOST, BACK_OFF[kind] * 2.0**s.failures)
        s.failures = min(s.failures + 1, 16)
        s.retry_at = self._books.now + pause

    # ------------------------------------------------------------------ suspend

    def suspend_done(self, event: ev.SuspendDone) -> None:
        books = self._books
        s = self._current(event.session, event.epoch, "detaching", "SuspendDone")
        if s is None:
            return
        devices = tuple(x.device for x in s.slices)
        state = _in_order(event.suspended, devices)
        books.suspend_over(s, sum(x.bytes for x in state))
        if event.seconds > 0 and state:
            books.estimates.swapped(event.seconds)
            s.suspend_mean = weighted(s.suspend_mean, event.seconds)
        s.suspended = state
        for x in state:
            books.inventory.placeholder(x.device)
        if state or event.cuda:
            s.bound = devices
        elif event.cuda is False:
            s.bound = ()
        s.suspends += bool(state)
        s.failures = 0
        s.retry_at = 0.0
        books.roomless.pop(s.id, None)
        s.pinned_reason = ""
        s.release_asked = False
        books.return_lease(s)
        if s.holds:
            since = min(h.since for h in s.holds.values())
            books.move(s, "queued", "suspended, and a hold was taken meanwhile")
            books.enqueue(s, since)
        else:
            books.move(s, "detached", "suspended" if state else "detached; nothing to suspend")

    def suspend_refused(self, event: ev.SuspendRefused) -> None:
        books = self._books
        s = self._current(event.session, event.epoch, "detaching", "SuspendRefused")
        if s is None:
            return
        books.suspend_over(s, None)
        idle_since = s.idle_since
        books.roomless.pop(s.id, None)
        if event.kind == "host" and not s.holds:
            books.roomless[s.id] = event.message
        if event.kind == "pinned":
            s.pinned_reason = event.message or "the driver can not suspend it"
            s.pinned_at = books.now
        elif not (event.kind == "busy" and s.holds):
            # Else it is known what is in the way, and it may be asked again once that is over. Not
            # later: who has short cells all the time would have one again.
            self._back_off(s, event.kind)
        books.move(s, "active" if s.holds else "idle", f"{event.kind}: {event.message}")
        s.told_wanted = -1  # its agent has given the slice up, and forgotten it
        if s.state == "idle":
            # It has been idle all the time, or since a hold was dropped meanwhile.
            s.idle_since = idle_since
            books.offer(s)
        books.note_growth(s)
        if len(books.order):
            # Somebody may have begun to wait while nothing could be taken of it.
            trim(books, s, reclaim=True)
        books.grant_holds(s)

    def suspend_failed(self, event: ev.SuspendFailed) -> None:
        s = self._current(event.session, event.epoch, "detaching", "SuspendFailed")
        if s is not None:
            self._books.lose(s, event.message)


def _in_order(state: tuple[Slice, ...], devices: tuple[str, ...]) -> tuple[Slice, ...]:
    """Return the suspended state in the order in which the process sees its devices.

    A device of the lease that held nothing is kept with 0 bytes: the process is bound to it too,
    and its resume must name a new place for it. () if nothing is suspended at all.
    """
    if not state:
        return ()
    size = {x.device: x.bytes for x in state}
    order = [*devices, *(u for u in size if u not in devices)]
    return tuple(Slice(u, size.get(u, 0)) for u in order)
