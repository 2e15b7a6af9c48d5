# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What each event means for the session or device that it names.

Handlers change one session and mark what must be looked at again; who is served is decided
afterwards, in :mod:`.serve`. Completions of effects are in :mod:`.effects`.
"""

from __future__ import annotations

from typing import Callable, Mapping

from . import events as ev
from .books import Books
from .effects import Effects
from .lease import ATTACHED, Session
from .model import Hold, PoolSettings, Refusal
from .placement import headroom
from .quota import never
from .requests import Requests
from .serve import Server
from .wording import reason
from .yielding import timeout_at


class Handlers:
    """One method per event."""

    def __init__(self, books: Books, server: Server) -> None:
        self._books = books
        self._server = server
        self._requests = Requests(books, server)
        effects = Effects(books, server)
        self._table: Mapping[type[ev.Event], Callable[..., None]] = {
            ev.DeviceAppeared: self._device_appeared,
            ev.DeviceDrained: self._device_drained,
            ev.DevicePaused: self._device_paused,
            ev.DeviceResumed: self._device_resumed,
            ev.DeviceMemorySeen: self._device_memory,
            ev.HostMemorySeen: self._host_memory,
            ev.HostPressure: self._host_pressure,
            ev.SettingsChanged: self._settings,
            ev.Tick: self._tick,
            ev.SessionOpened: self._opened,
            ev.SessionRecovered: self._recovered,
            ev.SessionEnded: self._ended,
            ev.HoldTaken: self._hold_taken,
            ev.DevicesSettled: self._devices_settled,
            ev.SetAside: self._set_aside,
            ev.LandingRefused: self._landing_refused,
            ev.HoldDropped: self._hold_dropped,
            ev.HoldsReplaced: self._holds_replaced,
            ev.RequestChanged: self._requests.changed,
            ev.GrowAsked: self._requests.grow,
            ev.ReleaseAsked: self._requests.release,
            ev.KeepAsked: self._requests.keep,
            ev.AttachDone: effects.attach_done,
            ev.AttachFailed: effects.attach_failed,
            ev.SuspendDone: effects.suspend_done,
            ev.SuspendRefused: effects.suspend_refused,
            ev.SuspendFailed: effects.suspend_failed,
        }

    def handle(self, event: ev.Event) -> None:
        """Take note of one event."""
        self._table[type(event)](event)

    # ------------------------------------------------------------------ the clock

    def clock(self) -> None:
        """Act on every session whose time has come."""
        books = self._books
        now = books.now
        for s in books.timers.due(now):
            if s.state == "idle":
                if timeout_at(s, books) <= now and s.id not in books.leaving:
                    self._server.expire(s)
                if s.state == "idle":
                    books.offer(s)
            elif s.state == "queued":
                most = books.settings.max_wait
                if most is not None and s.queued_at + most <= now:
                    self._waited_too_long(s, most)
                    continue
                if s.lane == "later" and s.retry_at <= now:
                    books.set_lane(s, "fresh")
                if books.claim is not None and books.claim.session == s.id:
                    books.recheck_head = True
                books.offer(s)

    def _waited_too_long(self, s: Session, most: float) -> None:
        books = self._books
        last = reason(books, s)
        books.refuse_holds(
            s,
            Refusal(
                "wait-timeout",
                f"No GPU slice came free within {most:g} s (c.GPUPool.max_wait)"
                + (f"; at the end: {last}." if last else "."),
                "Run the cell again to wait once more, or ask for less with %gpu.",
                {"max_wait": most, "reason": last},
            ),
        )
        self._stop_waiting(s, "waited too long")

    def _stop_waiting(self, s: Session, reason: str) -> None:
        books = self._books
        s.wait_total += max(0.0, books.now - s.queued_at)
        books.dequeue(s)
        s.queued_at = 0.0
        books.move(s, "detached", reason)

    def _tick(self, event: ev.Tick) -> None:
        """The clock has been looked at already."""

    # ------------------------------------------------------------------ the machine

    def _device_appeared(self, event: ev.DeviceAppeared) -> None:
        books = self._books
        books.inventory.appeared(event.device, books.settings)
        # What a session needs depends on the devices there are and on what its own can do.
        for entry in list(books.order):
            books.requeue(books.sessions[entry[4]])
        self._recheck(event.device.uuid)

    def _device_drained(self, event: ev.DeviceDrained) -> None:
        if self._known(event.device):
            self._books.inventory.drain(event.device, event.reason)
            self._replace(event.device)

    def _device_paused(self, event: ev.DevicePaused) -> None:
        if self._known(event.device):
            self._books.inventory.pause(event.device, event.reason or "paused")
            # The idle leases there are offered again, and now their time is over.
            self._replace(event.device)

    def _device_resumed(self, event: ev.DeviceResumed) -> None:
        if self._known(event.device):
            self._books.inventory.pause(event.device, "")
            self._replace(event.device)

    def _known(self, uuid: str) -> bool:
        if uuid in self._books.inventory.devices:
            return True
        self._books.log("", "warning", "unknown-device", f"There is no device {uuid}.")
        return False

    def _replace(self, uuid: str) -> None:
        """A device went out of service or came back: suspended sessions may have to go elsewhere.

        Another device may be the one with the most headroom now. And a session that the driver
        does not move is better tried elsewhere than left to wait for what does not come.
        """
        books = self._books
        for entry in list(books.order):
            s = books.sessions[entry[4]]
            if s.suspended:
                books.requeue(s)
        self._recheck(uuid)

    def _recheck(self, uuid: str) -> None:
        """A device changed in what it can do at all, not only in what is free."""
        books = self._books
        books.recheck_head = True
        for s in list(books.nowhere.values()):
            books.set_lane(s, "fresh")
        for name in books.inventory[uuid].leases:
            books.offer(books.sessions[name])

    def _device_memory(self, event: ev.DeviceMemorySeen) -> None:
        books = self._books
        ledger = books.inventory.devices.get(event.device)
        if ledger is None:
            books.log("", "warning", "unknown-device", f"There is no device {event.device}.")
            return
        before = ledger.foreign + ledger.overuse
        if event.foreign != ledger.foreign:
            usable = ledger.capacity - max(event.foreign, ledger.foreign)
            usable -= headroom(ledger, books.settings)
            # Before the sessions: what they may grow by is another now.
            books.inventory.seen(event.device, event.foreign, ledger.overuse)
            for entry in list(books.order):
                waiting = books.sessions[entry[4]]
                if waiting.suspended and any(need.least > usable for need in waiting.needs):
                    books.requeue(waiting)  # there is more or less headroom to be had
        over = 0
        for name, size in event.footprints.items():
            s = books.sessions.get(name)
            if s is not None:
                over += self._requests.measured(s, event.device, size)
        if event.foreign + over < before:
            for s in list(books.nowhere.values()):
                books.set_lane(s, "fresh")
        elif event.foreign + over > before:
            books.recheck_head = True
        if (event.foreign, over) != (ledger.foreign, ledger.overuse):
            books.inventory.seen(event.device, event.foreign, over)

    def _host_memory(self, event: ev.HostMemorySeen) -> None:
        self._books.host.seen(event.available)

    def _host_pressure(self, event: ev.HostPressure) -> None:
        books = self._books
        for s in books.sessions.values():
            if s.pressed != (s.id in event.sessions):
                s.pressed = not s.pressed
                # Its alarm comes again when the pressure is over.
                books.leaving.pop(s.id, None)
                books.offer(s)
        concerned = [books.sessions[n] for n in event.sessions if n in books.sessions]
        if any(s.state == "attaching" for s in concerned):
            return  # one at a time: it may be enough
        away = [s for s in concerned if s.state == "detached" and s.retry_at <= books.now]
        for s in sorted(away, key=lambda s: (-s.suspended_bytes, s.id)):
            if s.suspended_bytes and self._server.bring_back(s, "host memory is short"):
                return

    def _settings(self, event: ev.SettingsChanged) -> None:
        """Apply new rules to everything; this reads all sessions, and happens rarely."""
        books = self._books
        new: PoolSettings = event.settings
        books.settings = new
        books.quotas.configure(new)
        books.host.budget = new.host_memory
        books.inventory.configure(new)
        if books.claim is not None:
            books.set_claim(None)
        waiting = [books.sessions[entry[4]] for entry in books.order]
        for s in waiting:
            refusal = self._requests.never(s.request, s)
            if refusal is not None and not s.suspended:
                books.refuse_holds(s, refusal)
                self._stop_waiting(s, "the rules changed")
            else:
                books.requeue(s)
        for s in books.sessions.values():
            books.offer(s)

    # ------------------------------------------------------------------ sessions

    def _opened(self, event: ev.SessionOpened) -> None:
        books = self._books
        refusal: Refusal | None
        if event.session in books.sessions:
            refusal = Refusal("session-exists", f"There is a session {event.session} already.")
        else:
            refusal = never(
                event.request,
                event.owner,
                books.settings,
                self._requests.capacities(),
                suspends=self._requests.suspends(),
            )
        if refusal is None:
            books.sessions[event.session] = Session(
                id=event.session,
                owner=event.owner,
                request=event.request,
                attach=event.attach,
                label=event.label,
                lands=event.lands,
                opened_at=books.now,
                state_since=books.now,
            )
        if refusal is not None or event.rid:
            books.emit(ev.Answer(session=event.session, rid=event.rid, refusal=refusal))

    def _recovered(self, event: ev.SessionRecovered) -> None:
        books = self._books
        record = event.record
        if record.id in books.sessions:
            books.log(record.id, "warning", "session-exists", "Recovered twice; ignored.")
            return
        attached = record.state in ATTACHED and bool(record.slices)
        idle = attached and not record.holds
        s = Session(
            id=record.id,
            owner=record.owner,
            request=record.request,
            attach=record.attach,
            label=record.label,
            epoch=record.epoch,
            opened_at=record.opened_at,
            state_since=books.now,
            holds={h.id: h for h in record.holds} if attached else {},
            slices=record.slices if attached else (),
            suspended=() if attached else record.suspended,
            bound=record.bound,
            lands=record.lands,
            last_devices=record.last_devices,
            pinned_reason=record.pinned_reason,
            pinned_at=record.pinned_at,
            release_asked=record.release_asked,
            keep_until=record.keep_until,
            # Who was seen idle before has been idle since then: a broker that is killed again and
            # again must not make those wait for ever who wait for an idle slice.
            idle_since=min(books.now, record.idle_since or books.now) if idle else books.now,
            #: A session that was waiting keeps its place if it asks again soon.
            queued_at=0.0 if attached else record.queued_at,
            wait_total=record.wait_seconds_total,
            attached_total=record.attached_seconds_total,
            suspends=record.suspends,
            resumes=record.resumes,
            migrations=record.migrations,
            attached_at=books.now,
            busy_since=books.now,
            retry_at=books.now + GRACE,
        )
        if attached:
            s.state = "active" if s.holds else "idle"
        books.sessions[s.id] = s
        books.adopt(s)
        if attached:
            books.note_growth(s)

    def _ended(self, event: ev.SessionEnded) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None:
            books.log(
                event.session, "debug", "unknown-session", f"Session {event.session} ended twice."
            )
            return
        books.remove(s, event.reason)

    # ------------------------------------------------------------------ holds

    def _hold_taken(self, event: ev.HoldTaken) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None or s.state == "ended":
            refusal = (
                Refusal(
                    "unknown-session",
                    f"There is no session {event.session}.",
                    "Restart the kernel.",
                )
                if s is None
                else Refusal(
                    "lost", "The GPU state of this kernel was lost.", "Restart the kernel."
                )
            )
            books.emit(ev.HoldRefused(session=event.session, hold=event.hold, refusal=refusal))
            return
        known = event.hold in s.holds
        self._settle(s, event.bound)
        if known and event.hold not in s.holds:
            return  # refused just now, with the others
        if not known:
            s.holds[event.hold] = Hold(event.hold, event.kind, books.now)
        self.held(s)
        if s.state in ATTACHED:
            books.emit(
                ev.HoldGranted(session=s.id, hold=event.hold, epoch=s.epoch, slices=s.slices)
            )

    def _devices_settled(self, event: ev.DevicesSettled) -> None:
        s = self._books.sessions.get(event.session)
        if s is not None:
            self._settle(s, event.bound)

    def _set_aside(self, event: ev.SetAside) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None or s.state not in ("detached", "queued"):
            return  # it was attached meanwhile: whoever suspended it restores it
        books.drop_plan(s)
        books.drop_suspended(s)
        books.take_suspended(s, event.suspended)
        if s.suspended:
            s.bound = tuple(x.device for x in s.suspended)
        if s.entry is not None:
            books.requeue(s)

    def _settle(self, s: Session, bound: tuple[str, ...]) -> None:
        if not bound or s.state not in ("detached", "queued") or s.suspended:
            return
        s.bound, before = bound, s.bound
        if s.entry is not None and s.bound != before:
            # A hold of it waits already, and would take any device.
            refusal = self._requests.never(s.request, s)
            if refusal is None:
                self._books.requeue(s)
                return
            self._books.refuse_holds(s, refusal)
            self._stop_waiting(s, "no GPU that its processes can use is large enough")

    def _landing_refused(self, event: ev.LandingRefused) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None or s.state != "active" or s.epoch != event.epoch:
            books.log(event.session, "debug", "stale-landing", "A landing in no lease refused.")
            return
        last, since = s.last_devices, min(hold.since for hold in s.holds.values())
        books.return_lease(s)
        s.last_devices = last  # the session has never been on these
        s.bound = event.bound
        s.immovable = s.immovable or event.stay
        books.move(s, "detached", event.message)
        s.queued_at = since  # its place, as if it had waited on
        self.held(s)
        if s.entry is None:
            s.queued_at = 0.0

    def held(self, s: Session) -> None:
        """Let a session with at least one hold be active or wait."""
        books = self._books
        if s.state == "idle":
            books.move(s, "active", "a hold was taken")
        elif s.state == "detached":
            refusal = None if s.suspended else self._requests.never(s.request, s)
            if refusal is not None:
                books.refuse_holds(s, refusal)
                return
            since = s.queued_at
            if not since or books.now - s.state_since > REJOIN:
                since = books.now
            books.move(s, "queued", "a hold needs a slice")
            books.enqueue(s, since)

    def _hold_dropped(self, event: ev.HoldDropped) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None:
            books.log(event.session, "debug", "unknown-session", "A hold of no session dropped.")
            return
        if s.holds.pop(event.hold, None) is None:
            return
        self._bind(s, event.cuda)
        self.unheld(s)

    def unheld(self, s: Session) -> None:
        """Let a session without a hold be idle, or stop waiting."""
        books = self._books
        if s.holds:
            return
        if s.state == "active":
            # A release that was asked for makes it due at once.
            books.move(s, "idle", "the last hold was dropped")
        elif s.state == "queued":
            self._stop_waiting(s, "the wait was cancelled")
        elif s.state == "detaching":
            s.idle_since = books.now  # from now on, if the suspend is refused

    def _holds_replaced(self, event: ev.HoldsReplaced) -> None:
        books = self._books
        s = books.sessions.get(event.session)
        if s is None or s.state == "ended":
            books.log(event.session, "debug", "unknown-session", "Holds of no session replaced.")
            return
        self._bind(s, event.cuda)
        before = bool(s.holds)
        # The agent says nothing about the device's activity, which the broker watches itself.
        s.holds = {h.id: h for h in event.holds if h.kind != "device"} | {
            h.id: h for h in s.holds.values() if h.kind == "device"
        }
        if s.holds:
            self.held(s)
        elif before:
            self.unheld(s)

    def _bind(self, s: Session, cuda: bool | None) -> None:
        if s.state not in ATTACHED or cuda is None:
            return
        s.bound = tuple(x.device for x in s.slices) if cuda else ()


#: Seconds after a restart of the broker in which no recovered lease is taken: all sessions must be
#: counted first. (For an agent that may have a running cell the broker keeps a hold.) Short, or a
#: broker that is killed again and again would never come to take one.
GRACE = 1.0
#: Seconds after a restart of the broker in which a session that was waiting may claim its place.
REJOIN = 60.0
