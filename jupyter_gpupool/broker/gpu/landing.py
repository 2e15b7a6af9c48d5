# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Moves a process to the device of its slice, if it has initialised CUDA on another device.

CUDA binds a process to the devices that it sees at cuInit, and cuInit needs no lease. If the slice
is on another device of the same model, the process asks to *land* before it makes its first
context. Each device keeps memory free for one such context (``Device.landing_bytes``). The process
makes its context in this memory of the device that it sees. Then the broker suspends the process
and restores it on the device of its slice. Only one process at a time may use this memory of a
device. Other processes wait for it.

Some processes cannot be moved, because the driver refuses it or because the slice is on another
model. Such a process asks to *stay*: the broker takes the slice back, and the session waits for a
GPU that the process can use.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Coroutine, Iterable

from ... import procfs
from ...devices import GuardedDevices
from ...errors import Code, GPUPoolError, RefusedError
from ...guard.page import (
    LANDING_BEGUN,
    LANDING_MOVES,
    LANDING_NONE,
    LANDING_RESTORE,
    SEES_NONE,
    SEES_SLICE,
    Reading,
    Slot,
    device_name,
)
from ...pool import events as e
from ...pool.model import SessionRecord
from ...procfs import ProcessId
from ...protocol import Message
from ...states import ATTACHED
from ..core import Core
from ..pages.control import CLOSED, PAUSED, ControlPages
from ..pages.quiesce import DRAIN_POLL, drain
from ..sessions import LiveSession
from ..transport.connection import Connection
from .actions import DeviceActions
from .landing_recovery import LandingRecovery, on_slice, process_of
from .samples import Samples

#: ROOM_POLL: seconds between two checks whether a device has room for a context. WATCH: seconds
#: between two checks of a process that uses this room.
ROOM_POLL, WATCH = 0.1, 0.5

#: A process that has got the room must make its context and report it within this many seconds.
PATIENCE = 60.0

#: TRIES: the most tries to move a process. PAUSE: seconds between two tries. A try fails, for
#: example, if a CUDA call of the process has not returned yet.
TRIES, PAUSE = 4, 0.5

#: After this many failed moves in a row, the broker tries no other device. The session then waits
#: for the devices that its processes already see.
MOST_FAILED = 3


@dataclass(eq=False)
class _Landing:
    """A process to which the broker has given the room for a context."""

    session: LiveSession
    process: ProcessId
    origin: tuple[str, ...]
    room: contextlib.AsyncExitStack
    watch: asyncio.Task[None] | None = None
    #: Whether the move failed. If it failed, the process still has the contexts on ``origin``.
    refused: bool = False


@dataclass(frozen=True)
class _Move:
    """A move from ``origin[i]`` to ``target[i]``, as the session's page shows it.

    ``seen[i]`` is the device that the process sees in the place of ``slice[i]``. It may be the same
    device. If the process cannot move, the session waits for a slice on the devices ``seen``, or,
    if ``stay`` is false, on devices of the same models.
    """

    slot: Slot
    slice: list[str]
    seen: tuple[str, ...]
    origin: tuple[str, ...] = ()
    target: tuple[str, ...] = ()
    #: ``problem``: why the broker cannot move the process. ``stay``: whether the process can use
    #: only the devices in ``seen``.
    problem: str = ""
    stay: bool = False

    @property
    def process(self) -> ProcessId:
        return process_of(self.slot)


class Landings:
    """Answers the steps of the message ``land``."""

    def __init__(
        self,
        core: Core,
        actions: DeviceActions,
        service: GuardedDevices,
        *,
        samples: Samples,
        pages: ControlPages,
        left: LandingRecovery,
        log: logging.Logger,
    ) -> None:
        self._core = core
        self._actions = actions
        self._samples = samples
        self._service = service
        self._pages = pages
        self._log = log
        self._left = left
        self._room: dict[str, asyncio.Lock] = {}
        self._under_way: dict[ProcessId, _Landing] = {}
        #: Threads that wait for room.
        self._waiting: dict[Connection, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------ messages

    def ask(self, connection: Connection, session: LiveSession, message: Message) -> None:
        """Answer one step of a process, at once or later."""
        step, rid = message["step"], message.get("id")
        if step not in ("begin", "move", "cancel", "stay"):
            raise RefusedError(f"{step[:40]!r} is not a step of a landing.", code=Code.BAD_REQUEST)
        pid = connection.peer.pid
        if task := self._left.task_of(pid):
            self._waiting[connection] = self._start(
                self._ask_later(task, connection, session, message)
            )
            return
        if step == "cancel":
            self._cancel(pid)
            connection.answer(rid)
            return
        try:
            way = self._way(session, self._record(session), pid)
            if not way.origin:
                self._cancel(pid)
                connection.answer(rid)  # the process sees its slice already
            elif step == "stay":
                self._cancel(pid)  # the process has released its contexts
                self._waiting[connection] = self._start(self._stay(connection, session, way, rid))
            elif way.problem:
                raise RefusedError(way.problem, code=Code.NOT_MOVED)
            elif step == "begin":
                self._waiting[connection] = self._start(self._begin(connection, session, way, rid))
            elif way.slot.landing < LANDING_MOVES:
                # The process has not stopped its calls, so one of them may reach the driver at any
                # moment.
                raise RefusedError("The process may still make CUDA calls.", code=Code.BAD_REQUEST)
            else:
                self._start(self._move(connection, session, way, rid))
        except RefusedError:
            self._cancel(pid)
            raise

    async def _ask_later(
        self,
        task: asyncio.Task[None],
        connection: Connection,
        session: LiveSession,
        message: Message,
    ) -> None:
        await asyncio.wait({task})
        self._waiting.pop(connection, None)
        try:
            self.ask(connection, session, message)
        except GPUPoolError as error:
            connection.refuse(message.get("id"), error)

    def _cancel(self, pid: int) -> None:
        """Take the room back from a process that will not be moved now."""
        for process in [p for p in self._under_way if p.pid == pid]:
            self._over(process)

    def gone(self, connection: Connection) -> None:
        """Note that a thread has stopped waiting for room."""
        task = self._waiting.pop(connection, None)
        if task is not None:
            task.cancel()

    def close(self) -> None:
        """Stop all moves. The next broker finishes them."""
        self._left.close()
        for task in self._tasks:
            task.cancel()

    # ------------------------------------------------------------------ which way

    def _record(self, session: LiveSession) -> SessionRecord:
        record = self._core.record(session.id)
        if record is None or record.state not in ATTACHED or not record.slices:
            raise RefusedError("The session has no slice now.", code=Code.AGAIN)
        return record

    def _way(self, session: LiveSession, record: SessionRecord, pid: int) -> _Move:
        reading = self._pages.read(session)
        slots = [slot for slot in reading.slots if slot.pid == pid] if reading else []
        if not slots:
            raise RefusedError(f"The session has no process {pid}.", code=Code.NO_PROCESS)
        known = {device_name(d.uuid): d for d in self._core.pool.devices()}
        pairs, seen, problem, stay = [], [], "", False
        for name, piece in zip(slots[0].sees, record.slices, strict=False):
            seen.append(piece.device)
            if name in (SEES_NONE, SEES_SLICE, device_name(piece.device)):
                continue
            home, target = known.get(name), self._core.pool.device(piece.device)
            if home is None or target is None:
                raise RefusedError(
                    "The GPU on which the process initialised CUDA is no longer in the pool.",
                    code=Code.NOT_MOVED,
                    next_step="Start the process (or the kernel) again.",
                )
            seen[-1] = home.uuid
            pairs.append((home.uuid, target.uuid))
            if home.model != target.model:
                problem = problem or (
                    f"The process initialised CUDA on GPU {home.index}, but the slice is on GPU "
                    f"{target.index}, which is of another model."
                )
            elif unusable := self._unusable(home.uuid):
                stay = True
                problem = f"The process initialised CUDA on GPU {home.index}. {unusable}"
            elif not (home.landing_bytes and target.can_migrate):
                stay = True
                problem = (
                    f"The process initialised CUDA on GPU {home.index}, but the slice is on GPU "
                    f"{target.index}, and this driver does not move processes."
                )
        if pairs and not problem and session.not_landed >= MOST_FAILED:
            stay, problem = True, "An earlier move of the process to the GPU of its slice failed."
        return _Move(
            slots[0], [piece.device for piece in record.slices], tuple(seen),
            tuple(o for o, _ in pairs), tuple(t for _, t in pairs),
            problem, stay,
        )  # fmt: skip

    def _unusable(self, uuid: str) -> str:
        """Return why no process can make a context on the device now, or "" if a process can."""
        if self._service.is_aside(uuid):
            return "The administrator has paused that GPU."
        sample = self._samples.last.get(uuid)
        return sample.lost if sample is not None else ""

    # ------------------------------------------------------------------ room

    async def _begin(
        self, connection: Connection, session: LiveSession, way: _Move, rid: int | None
    ) -> None:
        room = contextlib.AsyncExitStack()
        try:
            for uuid in sorted(way.origin):
                await room.enter_async_context(self._room.setdefault(uuid, asyncio.Lock()))
            while not await self._has_room(way.origin):
                self._look_again(session, way)
                await asyncio.sleep(ROOM_POLL)
            self._look_again(session, way)
            landing = _Landing(session, way.process, way.origin, room.pop_all())
            session.landing[way.process] = way.origin
            self._under_way[way.process] = landing
            landing.watch = self._start(self._watch(landing))
            connection.answer(rid)
        except GPUPoolError as error:
            connection.refuse(rid, error)
        finally:
            self._waiting.pop(connection, None)
            await room.aclose()

    def _look_again(self, session: LiveSession, way: _Move) -> None:
        """Raise RefusedError if the planned move is no longer possible or no longer necessary."""
        now = self._way(session, self._record(session), way.slot.pid)
        if now.problem:
            raise RefusedError(now.problem, code=Code.NOT_MOVED)
        if now.origin != way.origin:
            raise RefusedError("The slice is on another GPU now.", code=Code.AGAIN)

    async def _has_room(self, origin: Iterable[str]) -> bool:
        """Return whether each device has room for one context."""
        try:
            samples = {sample.uuid: sample for sample in await self._samples.take()}
        except GPUPoolError:
            return False
        return all(
            uuid in samples
            and not samples[uuid].lost
            and samples[uuid].free >= self._service.context_bytes(uuid)
            for uuid in origin
        )

    async def _watch(self, landing: _Landing) -> None:
        """Take the room back when a process ends, is too slow, or has released its contexts."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE
        while procfs.alive(landing.process) and loop.time() < give_up:
            if landing.refused and self._has_released(landing):
                break
            await asyncio.sleep(DRAIN_POLL if landing.refused else WATCH)
        landing.watch = None
        self._over(landing.process)

    def _has_released(self, landing: _Landing) -> bool:
        """Return whether a process has released the contexts of a move that failed."""
        reading = self._pages.read(landing.session)
        slots = reading.slots if reading is not None else ()
        return not any(
            slot.pid == landing.process.pid and slot.landing != LANDING_NONE for slot in slots
        )

    def _over(self, process: ProcessId) -> None:
        landing = self._under_way.pop(process, None)
        if landing is None:
            return
        self._core.moved(landing.origin)
        if landing.watch is not None:
            landing.watch.cancel()
        self._start(landing.room.aclose())
        landing.session.landing.pop(process, None)

    # ------------------------------------------------------------------ the move

    async def _move(
        self, connection: Connection, session: LiveSession, way: _Move, rid: int | None
    ) -> None:
        landing = self._under_way.get(way.process)
        if landing is None:  # an earlier broker gave the process the room
            landing = _Landing(session, way.process, way.origin, contextlib.AsyncExitStack())
            self._under_way[way.process] = landing
        if landing.watch is not None:
            landing.watch.cancel()  # the process has made its context
            landing.watch = None
        session.landing[way.process] = landing.origin
        problem, again = "", True
        try:
            for tries in range(TRIES):
                if tries:
                    await asyncio.sleep(PAUSE)
                problem, again = await self._try(session, way)
                if not again:
                    break
        except GPUPoolError as error:
            problem = error.message
            session.not_landed += 1
        except Exception:
            self._log.exception("A landing of session %s failed", session.id)
            problem = "The broker's log has the error."
            session.not_landed += 1
        finally:
            if problem and way.process in self._under_way:
                # While this process has contexts on a device outside the slice, the broker must not
                # suspend any process of the session. So the landing stays until the contexts are
                # gone.
                landing.refused = True
                landing.watch = self._start(self._watch(landing))
            else:
                self._over(way.process)
        if session.page is not None:
            with contextlib.suppress(OSError):
                if not problem:
                    session.page.set_sees(way.slot, on_slice(way.slot))
                session.page.set_landing(way.slot, LANDING_BEGUN if problem else LANDING_NONE)
        if problem:
            text = f"The process was not moved to the GPU of its slice. {problem}"
            self._log.warning("Session %s, process %d: %s", session.id, way.process.pid, text)
            connection.refuse(rid, RefusedError(text, code=Code.NOT_MOVED))
        else:
            connection.answer(rid)

    async def _try(self, session: LiveSession, way: _Move) -> tuple[str, bool]:
        """Try once to move the process.

        Return the reason of a failure ("" after a success), and whether to try again.
        """
        if await drain(lambda: self._pages.read(session), way.process.pid):
            return "A CUDA call of the process did not return.", True
        record, page = self._record(session), session.page
        if page is None:
            return "The page that the process shares with the broker is lost.", False
        sizes = {piece.device: piece.bytes for piece in record.slices}
        need = {uuid: min(self._service.context_bytes(uuid), sizes[uuid]) for uuid in way.target}
        began = self._core.now()

        def restoring() -> None:
            # The process is suspended now. A damaged page must not prevent the restore.
            with contextlib.suppress(OSError):
                page.set_landing(way.slot, LANDING_RESTORE)

        def staying() -> None:
            # The next broker must not believe that a restored process is on its slice.
            with contextlib.suppress(OSError):
                page.set_landing(way.slot, LANDING_MOVES)

        outcome = await self._service.land(
            way.process, way.target, way.origin, session=session.id, need=need,
            restoring=restoring, staying=staying,
            on_kept=lambda message: self._actions.kept(session, message),
        )  # fmt: skip
        if outcome.status == "resumed":
            session.not_landed = 0
            seconds = round(self._core.now() - began, 3)
            self._core.note(
                "land", session, device=way.target[0],
                detail={"pid": way.process.pid, "from": way.origin[0], "seconds": seconds},
            )  # fmt: skip
            return "", False
        if outcome.status in ("failed", "hung"):
            message = f"{outcome.message} The process was moving to the GPU of its slice."
            self._actions.end_session(e.EndSession(session=session.id, message=message))
            return outcome.message, False
        with contextlib.suppress(OSError):
            page.set_landing(way.slot, LANDING_MOVES)
        if outcome.status == "refused":
            session.not_landed = MOST_FAILED if outcome.stay else session.not_landed + 1
        again = outcome.status != "gone" and not outcome.stay
        return outcome.message or "The process has ended.", again

    # ------------------------------------------------------------------ not moved

    async def _stay(
        self, connection: Connection, session: LiveSession, way: _Move, rid: int | None
    ) -> None:
        """Give the slice back, because the process cannot use the slice's device.

        The process then asks for a slice on a device that it can use.
        """
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE
        text = way.problem or "The process was not moved to the GPU of its slice."
        try:
            while not self._given_back(session, way, text) and loop.time() < give_up:
                await asyncio.sleep(DRAIN_POLL)
            connection.answer(rid, {"note": text})
        except GPUPoolError as error:
            self._log.warning("Session %s, process %d: %s", session.id, way.slot.pid, error)
            connection.refuse(rid, error)
        finally:
            self._waiting.pop(connection, None)

    def _given_back(self, session: LiveSession, way: _Move, text: str) -> bool:
        """Give the slice back if no process uses it.

        Return True if the session no longer has this slice, so that the process may ask for a new
        one. Return False if the caller must try again.
        """
        record, gate = self._record(session), self._pages.gate(session)
        if [piece.device for piece in record.slices] != way.slice:
            return True
        if session.landing or record.state != "active" or gate == PAUSED:
            return False  # the slice cannot be given back yet; the caller tries again
        self._pages.set_gate(session, CLOSED)
        reading = self._pages.read(session)
        if reading is None or reading.inflight or _used_by_others(reading, way.slot.pid):
            self._pages.set_gate(session, gate)
            if reading is None or not _used_by_others(reading, way.slot.pid):
                return False
            raise RefusedError(
                f"{text} Other processes of the kernel use the slice, so the slice cannot move.",
                code=Code.NOT_MOVED,
                next_step="End those processes, or start this one again. Then try again.",
            )
        self._core.handle(
            e.LandingRefused(
                now=self._core.now(), session=session.id, epoch=record.epoch, bound=way.seen,
                message=text, stay=way.stay,
            )
        )  # fmt: skip
        now = self._core.record(session.id)
        if now is not None and now.state not in ATTACHED:
            self._pages.set_home(session, way.seen)
        self._log.info("Session %s, process %d: %s", session.id, way.slot.pid, text)
        detail = {
            "what": "land",
            "code": Code.NOT_MOVED,
            "pid": way.slot.pid,
            "from": way.origin[0],
        }
        self._core.note("refuse", session, device=way.target[0], reason=text, detail=detail)
        return True

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _used_by_others(reading: Reading, pid: int) -> bool:
    """Return whether any process of the session except ``pid`` has contexts on its slice."""
    others = [slot for slot in reading.slots if slot.pid != pid]
    return any(any(slot.used) or SEES_SLICE in slot.sees for slot in others)
