# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Answers the requests of the guard, which runs in the processes of a session.

A thread may ask for a lease, a larger grant, the devices that it sees before a lease, its page, or
a move to its slice's device. For each request, the thread makes a new connection. When the
connection ends, the thread has stopped waiting. All threads of a session share one hold, so
together they take one place in the queue.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Callable

from ...errors import Code, RefusedError
from ...guard.page import SLOT_CUDA
from ...pool import events as e
from ...pool.model import Refusal, SessionRecord
from ...protocol import Message
from ...states import ATTACHED
from ..core import Core, refused
from ..gpu.landing import Landings
from ..pages.activity import Activity, TimeShare
from ..pages.control import ControlPages
from ..pages.hints import Homes, Rooms
from ..ratelimit import TokenBucket
from ..sessions import LiveSession
from ..transport.connection import Connection

#: The most threads of one session that may wait at the same time.
MAX_GUARDS = 1000

#: The requests that one session may send: per second, and in one burst. Further requests wait.
QUESTIONS = 200.0, 400.0

#: If the broker refuses a session twice for the same reason within this many seconds, the journal
#: gets only the first refusal.
SAME = 10.0

#: Before the pool decides about a ``grow`` request, the broker reads the session's page again if
#: the last read is at least this many seconds old.
RECENT = 0.1

#: The most bytes that one ``grow`` request may ask for.
MAX_GROWTH = 1 << 50


_Method = Callable[[Connection, LiveSession, Message], None]

#: An id that no request has.
_NOBODY = -1


class GuardMessages:
    """Handles ``attach``, ``grow``, ``home``, ``page`` and ``land``.

    It also brings the session's page up to date after every change of its record (:meth:`changed`):
    this opens the gate when the session gets a slice.
    """

    def __init__(
        self,
        core: Core,
        pages: ControlPages,
        activity: Activity,
        time_share: TimeShare,
        *,
        rooms: Rooms,
        homes: Homes,
        landings: Landings,
    ) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity
        self._time_share = time_share
        self._rooms = rooms
        self._homes = homes
        self._landings = landings
        self._refused_growth = RefusedGrowth(pages)
        self._sessions: dict[Connection, LiveSession] = {}
        #: By connection with a ``grow`` request: the id of this request in the pool.
        self._growing: dict[Connection, str] = {}
        self._asked = 0
        #: By session: the token bucket that limits its requests.
        self._allowance: dict[str, TokenBucket] = {}
        #: By session: its last refusal in the journal, and the loop time of that refusal.
        self._told: dict[str, tuple[str, float]] = {}
        self._now = asyncio.get_running_loop().time

    # ------------------------------------------------------------------ messages

    def attach(self, connection: Connection, message: Message) -> None:
        session = self._session(connection, message)
        if not self._may_ask(connection, session, message, self._attach_now):
            return
        self._attach_now(connection, session, message)

    def grow(self, connection: Connection, message: Message) -> None:
        session = self._session(connection, message)
        if not 0 < message["bytes"] < MAX_GROWTH or message["device"] < 0:
            raise RefusedError(
                "The size or the device of this growth is not valid.", code=Code.BAD_REQUEST
            )
        if not self._may_ask(connection, session, message, self._grow_now):
            return
        self._grow_now(connection, session, message)

    def home(self, connection: Connection, message: Message) -> None:
        session = self._session(connection, message)
        if self._may_ask(connection, session, message, self._home_now):
            self._home_now(connection, session, message)

    def page(self, connection: Connection, message: Message) -> None:
        """Restore a page that a new process did not find, and pass the page to the process.

        A user or a logout has deleted the page, or the process is in a container. In a container,
        the page has no path.
        """
        session = self._session(connection, message)
        if self._may_ask(connection, session, message, self._page_now):
            self._page_now(connection, session, message)

    def land(self, connection: Connection, message: Message) -> None:
        session = self._session(connection, message)
        if self._may_ask(connection, session, message, self._land_now):
            self._land_now(connection, session, message)

    def gone(self, connection: Connection) -> None:
        """Note that a thread no longer waits: it was interrupted, has ended, or has its answer."""
        self._landings.gone(connection)
        rid = self._growing.pop(connection, None)
        if rid is not None:
            self._core.forget(rid)
        session = self._sessions.pop(connection, None)
        if session is None or session.guards.pop(connection, _NOBODY) is _NOBODY:
            return
        record = self._core.record(session.id)
        if record is None or session.guards or record.state in ATTACHED:
            return  # if the session is attached, its use of the GPU decides when the hold ends
        self._activity.drop(session)

    # ------------------------------------------------------------------ what the pool answers

    def granted(self, session: LiveSession, epoch: int) -> None:
        """Let the session's threads go on: the session has its lease, and its gate is open."""
        waiting, session.guards = session.guards, {}
        session.use.busy_at = self._now()
        for connection, request_id in waiting.items():
            connection.answer(request_id, {"epoch": epoch})

    def refused(self, session: LiveSession, refusal: Refusal) -> None:
        """Tell the session's threads and its user why the session does not get a lease now."""
        session.use.held = False
        waiting, session.guards = session.guards, {}
        self._tell(session, "attach", refusal)
        for connection, request_id in waiting.items():
            connection.refuse(request_id, refused(refusal))

    # ------------------------------------------------------------------ the session's life

    def about_to_change(self) -> None:
        """Withdraw the refused totals, because the next event may let the pool grant them."""
        self._refused_growth.withdraw()

    def changed(self, session: LiveSession) -> None:
        """Update the session's page after a change of its record, and before the broker answers."""
        record = self._core.record(session.id)
        if record is None:
            return
        # This call must come before the gate opens: a process may then ask at once how much memory
        # is free.
        self._rooms.changed(session, record)
        attached = self._pages.follow(session, record)
        self._activity.lease(session, attached)
        if attached:
            self._time_share.start()
        if record.state == "queued" and not record.bound:
            # A process may have called cuInit during an attach that failed. So tell the pool again
            # to which devices the session is bound.
            self._activity.settle(session)

    def ended(self, session: LiveSession, reason: str) -> None:
        """Refuse the waiting threads of a session that has ended, and remove the session's page."""
        self._allowance.pop(session.id, None)
        self._told.pop(session.id, None)
        waiting, session.guards = session.guards, {}
        for connection, request_id in waiting.items():
            connection.refuse(
                request_id,
                RefusedError(f"The session has ended: {reason}.", code=Code.UNKNOWN_SESSION),
            )
        self._activity.lease(session, False)
        self._rooms.ended(session)
        self._pages.remove(session)

    # ------------------------------------------------------------------ internals

    def _session(self, connection: Connection, message: Message) -> LiveSession:
        session = self._core.sessions.proven(connection.peer, message)
        if self._sessions.setdefault(connection, session) is not session:
            raise RefusedError("This connection belongs to another session.", code=Code.NOT_YOURS)
        if connection in session.guards or connection in self._growing:
            raise RefusedError("This connection already waits for an answer.", code=Code.DUPLICATE)
        return session

    def _attach_now(self, connection: Connection, session: LiveSession, message: Message) -> None:
        record = self._core.record(session.id)
        if record is None or record.state == "ended":
            raise RefusedError(f"Session {session.id} has ended.", code=Code.UNKNOWN_SESSION)
        if len(session.guards) >= MAX_GUARDS:
            raise RefusedError(
                f"{MAX_GUARDS} threads of the session already wait; no more may wait.",
                code=Code.TOO_MANY,
            )
        if session.page is None:
            raise RefusedError(
                "The page that this kernel shares with the broker is lost.",
                code=Code.NO_PAGE,
                next_step="Restart the kernel to use a GPU again.",
            )
        if session.process is None:
            # The program has sent this message before its server has sent ``launched``. The message
            # waits until the server sends ``launched``.
            session.put_early(connection, message)
            return
        if record.attach == "manual" and not record.slices and not record.holds:
            refusal = Refusal(
                Code.MANUAL,
                "This kernel has no GPU slice, and gets one only when you ask for it (attach "
                "policy 'manual').",
                "Run %gpu attach, or begin the cell with %%gpu, and try again.",
            )
            self._tell(session, "attach", refusal)
            raise refused(refusal)
        session.guards[connection] = message.get("id")
        self._activity.take(session)

    def _home_now(self, connection: Connection, session: LiveSession, message: Message) -> None:
        """Choose the devices that a process sees. It reads them in its page after the answer."""
        # The page already marks the sender as a process that has read its devices. But the sender
        # reads them only after the answer, so ``looking=1`` leaves the sender out.
        self._settle_home(session, looking=1)
        connection.answer(message.get("id"))

    def request_changed(self, session: LiveSession) -> None:
        """Let the kernel's processes see as many devices as the kernel now asks for.

        If a program sets ``CUDA_VISIBLE_DEVICES`` later, the guard compares the value of this
        variable with these devices.
        """
        if session.page is not None:
            self._settle_home(session, looking=0)

    def _settle_home(self, session: LiveSession, *, looking: int) -> None:
        record = self._core.record(session.id)
        places = ("detached", "queued", "attaching")
        if record is None or record.state not in places or self._settled(session, record, looking):
            return
        self._pages.set_home(session, self._homes.now(record, session.home))
        if record.state == "queued":
            # The session already waits for a slice. Tell the pool which devices the session's
            # processes see, so that the pool chooses a slice that they can use.
            self._activity.settle(session)

    def _page_now(self, connection: Connection, session: LiveSession, message: Message) -> None:
        try:
            if session.page is None:
                raise FileNotFoundError("it was lost before this broker started")
            self._pages.restore(session)
            descriptor = session.page.open_again()
        except OSError as error:
            raise RefusedError(
                f"The page that this kernel shares with the broker is lost ({error}).",
                code=Code.NO_PAGE,
                next_step="Restart the kernel to use a GPU again.",
            ) from None
        try:
            connection.answer_with(message.get("id"), descriptor)
        finally:
            os.close(descriptor)

    def _land_now(self, connection: Connection, session: LiveSession, message: Message) -> None:
        if session.page is None:
            raise RefusedError("This broker cannot move a process.", code=Code.NOT_MOVED)
        self._landings.ask(connection, session, message)

    def _settled(self, session: LiveSession, record: SessionRecord, looking: int) -> bool:
        """Return whether the devices that the session's processes see must stay as they are.

        They must stay if a process has read its list of devices. ``looking`` processes are still
        reading the list, and do not count.
        """
        if record.suspended or record.bound:
            return True
        reading = self._pages.read(session)
        looked = 0 if reading is None else sum(bool(s.flags & SLOT_CUDA) for s in reading.slots)
        return reading is None or looked > looking

    def _grow_now(self, connection: Connection, session: LiveSession, message: Message) -> None:
        record, ordinal = self._core.record(session.id), message["device"]
        if record is None or record.state not in ATTACHED or ordinal >= len(record.slices):
            raise RefusedError(
                "On this device, the session has no slice that could grow.", code=Code.NO_MEMORY
            )
        device, total = record.slices[ordinal].device, record.slices[ordinal].bytes
        total += message["bytes"]
        # The guard compares this total with the memory that it has charged. The slice also holds
        # memory that the guard does not charge (``beyond``), so the broker subtracts that memory.
        beyond = session.use.beyond
        vain = max(1, total - (beyond[ordinal] if ordinal < len(beyond) else 0))
        self._asked += 1
        rid = f"g{self._asked}"

        def reply(refusal: Refusal | None, _note: str) -> None:
            self._growing.pop(connection, None)
            if refusal is not None:
                self._tell(session, "grow", refusal)
                if refusal.code in CODES:
                    self._refused_growth.refused(session, ordinal, vain)
                connection.refuse(message.get("id"), refused(refusal))
                return
            now = self._core.record(session.id)
            sizes = [piece.bytes for piece in now.slices] if now is not None else []
            granted = sizes[ordinal] if ordinal < len(sizes) else 0
            connection.answer(message.get("id"), {"granted": granted})

        self._growing[connection] = rid
        self._core.expect(rid, reply)
        # The pool needs the session's present use of memory, and the last read of the page may be a
        # second old. So the broker reads the page again, but not more often than every RECENT
        # seconds: an application may ask hundreds of times, and a page of 256 processes takes
        # milliseconds to read.
        if self._now() - session.use.read_at >= RECENT:
            self._activity.read(session)
        self._core.handle(
            e.GrowAsked(
                now=self._core.now(), session=session.id, device=device,
                bytes=message["bytes"], rid=rid,
            )
        )  # fmt: skip

    def _tell(self, session: LiveSession, what: str, refusal: Refusal) -> None:
        """Give the reason to the agent, and write it to the journal."""
        session.send(
            {
                "type": "refused",
                "what": what,
                "code": refusal.code,
                "message": refusal.message,
                "next_step": refusal.next_step,
            }
        )
        key, at = self._told.get(session.id, ("", 0.0))
        if key == f"{what} {refusal.code}" and self._now() - at < SAME:
            return  # an application may ask for smaller and smaller sizes
        self._told[session.id] = f"{what} {refusal.code}", self._now()
        self._core.note(
            "refuse", session, reason=refusal.message, detail={"what": what, "code": refusal.code}
        )

    def _may_ask(
        self, connection: Connection, session: LiveSession, message: Message, method: _Method
    ) -> bool:
        """Return whether to handle the request now. If not, a timer handles it later."""
        now = self._now()
        bucket = self._allowance.get(session.id)
        if bucket is None:
            bucket = self._allowance[session.id] = TokenBucket(*QUESTIONS, now)
        left = bucket.left(now)
        bucket.pay(1, now)
        if left >= 1:
            return True
        if -left > MAX_GUARDS + 1:
            raise RefusedError("This session sends too many requests.", code=Code.TOO_MANY)
        loop = asyncio.get_running_loop()
        loop.call_later((1 - left) / bucket.rate, self._later, connection, session, message, method)
        return False

    def _later(
        self, connection: Connection, session: LiveSession, message: Message, method: _Method
    ) -> None:
        if connection.open:
            connection.attempt(message, lambda asking, asked: method(asking, session, asked))


#: Seconds for which the guard may repeat a refusal before it asks the broker again.
LASTS = 1.0

#: With these codes, a refusal stays right until the pool's next event. With any other code, the
#: reason of the refusal may end at any time.
CODES = (Code.LIMIT, Code.NO_MEMORY, Code.QUOTA)


class RefusedGrowth:
    """Lets the guard repeat a refusal of growth until something changes.

    A program that retries, or searches for the largest size that fits, asks hundreds of times. So
    the broker writes the smallest refused total into the page. The guard refuses growth to this
    total or more without a message to the broker. Only an event can change the pool's decision, and
    the broker withdraws the total before the pool handles the next event. So the guard never
    refuses growth that the pool would grant. The total also expires, because a killed broker cannot
    withdraw it.
    """

    def __init__(self, pages: ControlPages) -> None:
        self._pages = pages
        #: By session and device number: the smallest refused total, in bytes.
        self._totals: dict[LiveSession, dict[int, int]] = {}

    def refused(self, session: LiveSession, ordinal: int, total: int) -> None:
        """Note that a growth to ``total`` bytes on device number ``ordinal`` was just refused."""
        totals = self._totals.setdefault(session, {})
        totals[ordinal] = min(total, totals.get(ordinal, total))
        row = [totals.get(place, 0) for place in range(max(totals) + 1)]
        self._pages.set_vain(session, row, time.monotonic_ns() + int(LASTS * 1e9))

    def withdraw(self) -> None:
        """Withdraw all totals, because the pool is about to change."""
        if self._totals:
            told, self._totals = self._totals, {}
            for session in told:
                self._pages.set_vain(session, (), 0)
