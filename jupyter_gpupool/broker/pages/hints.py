# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Writes two hints into each page: the devices that a kernel sees, and its grant's room to grow."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from ...pool.model import Request, SessionRecord, Slice
from ...pool.placement import home_devices
from ...states import ATTACHED
from ..core import Core
from ..ratelimit import PART, REST, Pace
from ..sessions import LiveSession
from .activity import Activity
from .control import ControlPages


class Rooms:
    """Writes into each page the number of bytes by which its session's grant could grow.

    The guard limits the result of ``cuMemGetInfo`` by this figure. The device's own free memory is
    too large for this purpose: it includes memory that the pool has granted to another session but
    that the other session does not use yet. A framework that sizes itself by free memory (JAX,
    TensorFlow, vLLM) would plan with this memory, and run out of memory later.

    The broker writes the figure when a lease begins, and again when another lease on a device
    changes.
    """

    def __init__(self, core: Core, pages: ControlPages, activity: Activity) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity
        #: ``_slices`` has the slices of each attached session at the last change. ``_growing`` has
        #: the slices and the limit of each session whose grant can grow. Only these sessions have a
        #: figure in their pages.
        self._slices: dict[str, tuple[Slice, ...]] = {}
        self._growing: dict[str, tuple[tuple[Slice, ...], int]] = {}
        #: By session: the figure in its page.
        self._told: dict[str, tuple[int, ...]] = {}
        #: Sessions whose figure may have changed. The first session is the next to check.
        self._due: dict[str, None] = {}
        self._later: asyncio.Handle | None = None

    def changed(self, session: LiveSession, record: SessionRecord) -> None:
        """Write the figure of a changed session at once, and the figures of all others soon."""
        slices = record.slices if record.state in ATTACHED else ()
        if slices:
            self._tell(session, slices, record.request.limit)
        elif self._told.pop(session.id, ()):
            # The session has no lease, so the figure would be meaningless.
            self._pages.set_room(session, ())
        before = self._slices.pop(session.id, ())
        self._growing.pop(session.id, None)
        if slices:
            self._slices[session.id] = slices
            if _can_grow(slices, record.request.limit):
                self._growing[session.id] = slices, record.request.limit
        if before != slices:
            self.refresh_soon()

    def ended(self, session: LiveSession) -> None:
        """Forget a session that has ended."""
        self._told.pop(session.id, None)
        self._due.pop(session.id, None)
        self._growing.pop(session.id, None)
        if self._slices.pop(session.id, None):
            self.refresh_soon()

    def refresh_soon(self) -> None:
        """Soon write each changed figure into its page; work in short steps."""
        self._due.update(dict.fromkeys(self._growing))
        if self._due and self._later is None:
            self._later = asyncio.get_running_loop().call_later(REST, self._refresh)

    def _refresh(self) -> None:
        self._later = None
        until = time.perf_counter() + PART
        while self._due and time.perf_counter() < until:
            name = next(iter(self._due))
            del self._due[name]
            session, found = self._activity.attached.get(name), self._growing.get(name)
            if session is not None and found is not None:
                self._tell(session, *found)
        if self._due:
            self._later = asyncio.get_running_loop().call_later(REST, self._refresh)

    def close(self) -> None:
        """Cancel the writes that are due later."""
        self._due.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _tell(self, session: LiveSession, slices: tuple[Slice, ...], limit: int) -> None:
        # If the grant cannot grow, the guard needs no figure.
        room = self._core.pool.growable(session.id) if _can_grow(slices, limit) else ()
        if room != self._told.get(session.id):
            self._told[session.id] = room
            self._pages.set_room(session, room)


def _can_grow(slices: tuple[Slice, ...], limit: int) -> bool:
    return any(piece.bytes < limit for piece in slices)


class Homes:
    """Chooses the devices that kernels see before a lease (see ``placement.home_devices``)."""

    def __init__(self, core: Core, pages: ControlPages, activity: Activity) -> None:
        self._core = core
        self._pages = pages
        self._activity = activity

    def first(self, request: Request) -> tuple[str, ...]:
        """Return the devices that a new kernel sees. The kernel's first attach may change them."""
        return home_devices(
            self._core.pool.device_views(),
            self._kernels(),
            memory=request.memory,
            count=request.devices,
        )

    def now(self, record: SessionRecord, seen: tuple[str, ...]) -> tuple[str, ...]:
        """Return the devices for a kernel that sees ``seen`` and is about to call cuInit."""
        planned = self._core.pool.preferred(record.id)
        return home_devices(
            self._core.pool.device_views(), self._kernels(),
            memory=record.request.memory, count=record.request.devices, seen=seen, planned=planned,
        )  # fmt: skip

    async def refresh(self) -> None:
        """Let each kernel that has not called cuInit see devices that have room for it."""
        devices, kernels = self._core.pool.device_views(), self._kernels()
        pace = Pace()
        for session in [*self._core.sessions]:
            await pace.step()
            if session.page is None or session.process is None:
                continue  # no process reads its page yet
            record, seen = self._core.record(session.id), session.home
            if not seen or record is None or _settled(record):
                continue
            better = home_devices(
                devices, kernels, memory=record.request.memory, count=len(seen), seen=seen
            )
            if better == seen:
                continue
            reading = self._activity.read(session)
            if reading is not None and not reading.cuda:
                self._pages.set_home(session, better)
                kernels.subtract(seen)
                kernels.update(better)

    def _kernels(self) -> Counter[str]:
        """Return how many kernels see each device."""
        return Counter(uuid for session in self._core.sessions for uuid in session.home)


def _settled(record: SessionRecord) -> bool:
    return record.state != "detached" or bool(record.suspended or record.bound)
