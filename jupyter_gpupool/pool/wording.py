# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What waiting sessions are told, and when: the reason in words, the position, the estimate.

No sentence names another owner.
"""

from __future__ import annotations

from typing import Any

from ..units import format_bytes, format_seconds
from .books import Books
from .events import QueueMoved
from .lease import ATTACHED, HAS_LEASE, Session
from .yielding import stayer, stays, stays_until

#: Queues up to this length are told of every change at once.
AT_ONCE = 8
#: In longer ones, the first so many positions and as many others in turns are told ...
AT_A_TIME = 50
#: ... at most once in so many seconds. (A session whose own reason changed is told at once.)
INTERVAL = 1.0


def reason(books: Books, s: Session) -> str:
    """Return why ``s`` waits, in words; "" if it does not."""
    if not s.why:
        return ""
    v = _stayer(books, s)
    if v is None:
        settled = s.why[0] == "busy" and s.bound and (s.immovable or not s.suspended)
        if settled and books.inventory.best() >= s.request.memory:
            return _settled(books, s)
        return explain(books, s.why)
    ago = format_seconds(books.now - v.resumed_at)
    left = format_seconds(stays_until(v, books) - books.now)
    return (
        f"the idle kernel there was moved {ago} ago; moving takes {v.moving:.2g} s, so it keeps "
        f"its slice for {left} more"
    )


def _stayer(books: Books, s: Session) -> Session | None:
    """Return the idle session for which the head of the queue waits as it was just moved, or None.

    For those behind the head that is only a part of the wait.
    """
    if not books.staying or books.claim is None or books.claim.session != s.id:
        return None
    return stayer(s, books) if s.why[0] == "busy" else None


def explain(books: Books, why: tuple[Any, ...]) -> str:
    """Return in words the rule that failed, ``why`` as (code, figures...)."""
    code, *figures = why
    if code == "planned":
        return _planned(books, figures[0])
    if code == "behind":
        return "the free memory is kept for the kernel that is next in the queue"
    if code == "host":
        host = books.host
        if host.room < host.budget - host.used - host.going:
            return (
                "the state of idle kernels has no room in host memory: of this machine's memory "
                f"{format_bytes(max(0, host.room))} may be used for it now"
            )
        text = f"{format_bytes(host.used + host.going)} of {format_bytes(host.budget)} in use"
        return f"host memory for suspended state is full ({text})"
    if code == "quota":
        name, limit, _, others = figures
        size = format_bytes(limit) if name == "memory" else f"{limit} {_NAMES[name]}"
        return f"your quota of {size} is in use by your other {_count(others, 'kernel')}"
    if code == "quota-behind":
        return "another kernel of yours is ahead and waits for your quota"
    if code == "paused":
        return str(figures[0])
    if code == "drained":
        return f"its GPU ({figures[0]}) is out of service: {figures[1]}"
    if code == "foreign":
        return (
            f"{format_bytes(figures[0])} is not there as long as the GPUs are used outside the pool"
        )
    if code == "nowhere":
        return "no GPU that it can use is in service"
    if code == "retry":
        return str(figures[0])
    return _busy(books, *figures)


def stays_reason(books: Books, s: Session, now: float) -> str:
    """Return in one sentence why idle ``s`` keeps its slice although its time is over; or ""."""
    why = stays(s, books, now) if s.state == "idle" else ()
    if not why:
        return ""
    code, *figures = why
    if code == "never":
        size, budget = map(format_bytes, figures)
        return (
            f"Its state may take {size}, and this machine keeps at most {budget} in host memory; "
            "the slice stays until the kernel frees memory or ends."
        )
    if code == "quota":
        size = format_bytes(figures[0])
        return f"Your quota of {size} of suspended state is full; the slice leaves {_ROOM}."
    if code == "host":
        size, free, budget = map(format_bytes, figures)
        return (
            f"Its state may take {size}, and of {budget} of host memory for suspended kernels "
            f"{free} is free; the slice leaves {_ROOM}."
        )
    if code == "refused-host":
        return str(figures[0])
    return _STAYS[code]


_ROOM = "as soon as there is room"

_STAYS = {
    "fixed": (
        "This GPU cannot be suspended; the slice stays until the kernel frees its memory or ends."
    ),
    "refused": "The last try to move it to host memory was refused; it is tried again by itself.",
    "pressed": (
        "Host memory is short where the kernel runs, so its state is not moved there; the slice "
        f"leaves {_ROOM}."
    ),
    "machine": f"This machine has too little free memory now; the slice leaves {_ROOM}.",
    "kept": (
        "The host memory that is left is kept for the kernel that is next in the queue; the slice "
        f"leaves {_ROOM}."
    ),
}

_NAMES = {"devices": "GPUs", "leases": "slices"}


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _planned(books: Books, devices: tuple[str, ...]) -> str:
    leaving = {
        name
        for uuid in devices
        for name in books.inventory[uuid].leases
        if books.sessions[name].state == "detaching"
    }
    if not leaving:
        return "waiting for memory to come free"
    return f"waiting for {_count(len(leaving), 'idle kernel')} to be suspended"


def _busy(books: Books, memory: int, devices: int) -> str:
    best = books.inventory.best()
    total = format_bytes(books.inventory.total())
    users = "running cells" if books.active else "kernels that keep their slice"
    if books.roomless:
        idle = _count(len(books.roomless), "idle kernel")
        users += f", and {idle} cannot be moved to host memory, which is short or limited there"
    if best <= 0:
        return f"all {total} in use by {users}"
    where = "" if devices == 1 else f" on each of {devices} GPUs"
    return (
        f"{format_bytes(memory)}{where} is needed and at most {format_bytes(best)} is free on a "
        f"GPU; the rest is in use by {users}"
    )


def _settled(books: Books, s: Session) -> str:
    """Say why a session waits for devices of its own while others may be free: CUDA's rule."""
    ledgers = [books.inventory[uuid] for uuid in s.bound]
    if s.needs and not any(need.fixed for need in s.needs):
        return _of_model(books, s, [ledger.device.model for ledger in ledgers])
    free = format_bytes(max(0, min(ledger.avail for ledger in ledgers)))
    names = ", ".join(str(ledger.device.index) for ledger in ledgers)
    where = f"GPU {names}" if len(ledgers) == 1 else f"each of GPUs {names}"
    needed = max([s.request.memory, *(need.bytes for need in s.needs)])
    why = (
        "its state is from there, and the driver does not move it"
        if s.suspended
        else "it has initialised CUDA there, and the driver did not move it to another GPU"
        if s.immovable
        else "it has initialised CUDA there, and can move only once it has had its slice"
    )
    return f"{format_bytes(needed)} is needed on {where} and {free} is free there; {why}"


def _of_model(books: Books, s: Session, models: list[str]) -> str:
    names = " and ".join(dict.fromkeys(models))
    free = max(
        (d.avail for d in books.inventory.devices.values() if d.device.model in models), default=0
    )
    return (
        f"{format_bytes(s.request.memory)} is needed on a GPU of the model {names}, and at most "
        f"{format_bytes(max(0, free))} is free on one; CUDA was initialised on this model"
    )


class News:
    """Tells waiting sessions where they stand, as often as is useful and no more."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self._told_at = -INTERVAL
        self._spot = AT_A_TIME
        self._stale = False

    def next_at(self) -> float | None:
        """Return when somebody must be told something, None if all know."""
        return self._told_at + INTERVAL if self._stale else None

    def run(self, touched: list[Session], *, changed: bool) -> None:
        """Tell ``touched`` sessions at once, all others now or later.

        ``changed``: there may be something new to tell.
        """
        books = self._books
        length = len(books.order)
        if not length:
            self._stale = False
            return
        if changed:
            self._stale = True
        if not self._stale:
            return
        if length <= AT_ONCE:
            for entry in list(books.order):
                self._tell(books.sessions[entry[4]], length)
            self._stale = False
            return
        for s in touched:
            if s.entry is not None:
                self._tell(s, length)
        if books.now < self._told_at + INTERVAL:
            return
        self._told_at = books.now
        self._stale = False
        for at, entry in enumerate(books.order.slice(0, AT_A_TIME), 1):
            self._tell(books.sessions[entry[4]], length, at)
        if length > AT_A_TIME:
            if self._spot >= length:
                self._spot = AT_A_TIME
            stop = self._spot + AT_A_TIME
            for at, entry in enumerate(books.order.slice(self._spot, stop), self._spot + 1):
                self._tell(books.sessions[entry[4]], length, at)
            # Whoever was not reached hears at one of the next rounds.
            self._stale = length > 2 * AT_A_TIME or stop < length
            self._spot = stop

    def _tell(self, s: Session, length: int, position: int | None = None) -> None:
        books = self._books
        assert s.entry is not None
        if position is None:
            position = books.order.position(s.entry)
        eta = self.eta(s, position)
        text = reason(books, s)
        told = (position, length, eta, text)
        if s.told is not None and s.told[:2] == told[:2] and s.told[3] == text:
            before = s.told[2]
            if before == eta or (
                before is not None and eta is not None and abs(eta - before) <= 0.2 * before
            ):
                return
        s.told = told
        books.emit(QueueMoved(session=s.id, position=position, length=length, eta=eta, reason=text))

    def eta(self, s: Session, position: int) -> float | None:
        """Return the seconds that ``s`` will probably wait, None if nothing is known."""
        books = self._books
        if s.why and s.why[0] == "host":
            return None  # how long GPUs were used says nothing about when host memory comes free
        eta = books.estimates.wait(
            position, planned=s.lane == "planned", waited=books.now - s.queued_at
        )
        v = _stayer(books, s)
        if v is None:
            return eta
        left = stays_until(v, books) - books.now
        return left + books.estimates.moving(v) + (books.estimates.moving(s) if s.suspended else 0)


def seconds(s: Session, now: float) -> tuple[float, float]:
    """Return the seconds that ``s`` has waited and been attached so far."""
    waited, attached = s.wait_total, s.attached_total
    if s.state in ("queued", "attaching"):
        waited += max(0.0, now - s.queued_at)
    if s.state in HAS_LEASE or s.state in ATTACHED:
        attached += max(0.0, now - s.attached_at)
    return waited, attached
