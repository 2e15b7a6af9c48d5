# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool: events in, actions out.

One event passes through four steps: the event itself (:mod:`.handlers`: what it means for one
session), the clock (sessions whose time has come), the queue (:mod:`.serve`: who is served now) and
the news (:mod:`.wording`: who is told what).
"""

from __future__ import annotations

from . import checks
from .books import Books
from .events import Action, Event, StateChanged, Tick
from .growth import largest
from .handlers import Handlers
from .lease import ATTACHED
from .model import Device, PoolSettings, PoolView, SessionRecord, SessionView
from .placement import headroom, needs_of
from .policy import Plan, plan_attach
from .serve import Server
from .wording import News, reason, seconds, stays_reason


class Pool:
    """Decides who gets which slice of which device, and when; performs nothing itself."""

    def __init__(self, settings: PoolSettings) -> None:
        self._books = Books(settings)
        self._server = Server(self._books)
        self._handlers = Handlers(self._books, self._server)
        self._news = News(self._books)

    @property
    def settings(self) -> PoolSettings:
        """The rules in force."""
        return self._books.settings

    def handle(self, event: Event) -> list[Action]:
        """Take note of ``event`` and return what is to be done, in this order.

        Events must come with a ``now`` that does not go back; one that does counts as the latest.
        Unknown sessions and stale completions are answered or logged, never an error.

        Raises
        ------
        InvalidTransition
            If the pool is broken; the message asks for a report and holds the session's history.
        """
        books = self._books
        books.now = max(books.now, event.now)
        books.actions = []
        # The clock second: a hold that comes as the idle time-out passes must find its lease.
        self._handlers.handle(event)
        self._handlers.clock()
        self._server.run(tick=isinstance(event, Tick))
        steps = [a for a in books.actions if isinstance(a, StateChanged)]
        joined = dict.fromkeys(a.session for a in steps if a.new == "queued")
        touched = [books.sessions[name] for name in joined if name in books.sessions]
        self._news.run(touched, changed=bool(steps) or isinstance(event, Tick))
        books.timers.trim(len(books.sessions))
        actions, books.actions = books.actions, []
        return actions

    def next_wakeup(self) -> float | None:
        """Return when the broker must send a ``Tick`` at the latest, on the clock of ``now``.

        None if nothing happens by itself. A time that has passed means: at once.
        """
        if self._server.unfinished:
            return self._books.now
        times = [t for t in (self._books.timers.next(), self._news.next_at()) if t is not None]
        return min(times, default=None)

    def __contains__(self, session: str) -> bool:
        return session in self._books.sessions

    def record(self, session: str) -> SessionRecord:
        """Return a session as it is now.

        Raises
        ------
        KeyError
            If there is no such session.
        """
        found = self._books.sessions[session]
        return found.record(reason(self._books, found))

    def preferred(self, session: str) -> tuple[str, ...]:
        """Return the devices that the session would get if it asked now; nothing is promised.

        Those that it has or is bound to, else those of the plan that was or would be made for it
        (idle leases may have to yield); empty if it has to wait for a lease in use.

        Raises
        ------
        KeyError
            If there is no such session.
        """
        books = self._books
        s = books.sessions[session]
        settled = [x.device for x in s.slices or s.suspended] or [*s.bound]
        if not settled and s.plan is not None:
            settled = [x.device for x in s.plan.takes]
        if not settled and books.claim is not None and books.claim.session == s.id:
            settled = [*books.claim.wanted][: s.request.devices]
        if settled or s.entry is not None:
            return tuple(settled)
        claimed = books.claim.wanted if books.claim is not None else {}
        before, s.needs = s.needs, needs_of(s, books.inventory, books.settings)
        try:
            plan = plan_attach(books, s, claimed, guarded=bool(claimed))
        finally:
            s.needs = before
        return tuple(x.device for x in plan.takes) if isinstance(plan, Plan) else ()

    def device(self, uuid: str) -> Device | None:
        """Return a device as it was announced; None if there is no such."""
        ledger = self._books.inventory.devices.get(uuid)
        return None if ledger is None else ledger.device

    def devices(self) -> list[Device]:
        """Return all devices as they were announced."""
        return [ledger.device for ledger in self._books.inventory.devices.values()]

    def suspended(self) -> dict[str, int]:
        """Return the host bytes of suspended state, by session; cheap for many of them."""
        return {s.id: s.suspended_bytes for s in self._books.sessions.values() if s.suspended}

    def growable(self, session: str) -> tuple[int, ...]:
        """Return by how many bytes each slice of an attached session could grow now, in order.

        Out of memory that is free and promised to nobody: what neighbours are guaranteed is not in
        it, whether they use it or not. Empty for a session without a lease.

        Raises
        ------
        KeyError
            If there is no such session.
        """
        books = self._books
        s = books.sessions[session]
        if s.state not in ATTACHED:
            return ()
        return tuple(largest(books, s, books.inventory[x.device]) for x in s.slices)

    def headroom(self, uuid: str) -> int:
        """Return the bytes beyond its state that a session is resumed with on a device."""
        books = self._books
        return headroom(books.inventory.placeholder(uuid), books.settings)

    def records(self) -> list[SessionRecord]:
        """Return all sessions as they are now, in the order in which they were opened."""
        return [self.record(name) for name in self._books.sessions]

    def story(self, session: str) -> list[str]:
        """Return the last steps of a session as lines of text, oldest first; [] if unknown."""
        found = self._books.sessions.get(session)
        return [] if found is None else found.story_lines()

    def view(self, now: float) -> PoolView:
        """Return everything at ``now``; for status, not for decisions (it reads all sessions)."""
        books = self._books
        positions = {entry[4]: at for at, entry in enumerate(books.order, 1)}
        sessions = []
        for s in books.sessions.values():
            position = positions.get(s.id)
            waited, attached = seconds(s, now)
            sessions.append(
                SessionView(
                    record=s.record(reason(books, s)),
                    queue_position=position,
                    queue_length=len(positions),
                    eta_seconds=None if position is None else self._news.eta(s, position),
                    queued_at=None if position is None else s.queued_at,
                    wait_seconds_total=waited,
                    attached_seconds_total=attached,
                    stays_reason=stays_reason(books, s, now),
                    footprints=dict(s.footprints),
                )
            )
        return PoolView(
            now=now,
            devices=tuple(
                ledger.view()
                for ledger in sorted(books.inventory.devices.values(), key=lambda d: d.device.index)
            ),
            sessions=tuple(sessions),
            host_budget=books.host.budget,
            host_used=books.host.used,
            settings=books.settings,
        )

    def check_invariants(self) -> None:
        """Recompute every account from the sessions and compare; for tests (reads everything).

        Raises
        ------
        AssertionError
            Saying what does not agree, with the story of the session concerned.
        """
        problems = checks.everything(self._books)
        assert not problems, "\n".join(problems)

    def self_check(self) -> list[str]:
        """Return what is wrong, as sentences with history; cheap enough for every minute."""
        return checks.cheap(self._books)
