# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attach, suspend and end sessions: ask the agent, call the driver, give the pool one event.

The pool takes care that at most one action runs per session. A driver call cannot be cancelled, so
an action cannot be cancelled either. If the session ends during an action, the pool ignores the
result.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Coroutine, Literal, Mapping, Sequence

from ... import procfs
from ...deadlines import within
from ...devices import Devices, SuspendOutcome
from ...errors import GPUPoolError
from ...pool import events as e
from ...pool.attribution import restore_room, state_moved, state_to_move
from ...pool.model import SessionRecord, Slice
from ...procfs import ProcessId
from ...states import ATTACHED
from ..core import Core
from ..hostmemory import HostRoom
from ..pages.activity import Activity
from ..pages.control import CLOSED, ControlPages
from ..pages.quiesce import drain
from ..sessions import LiveSession
from .health import Health
from .samples import Samples

#: Seconds within which an agent must answer a request to yield. The agent answers in its own
#: thread.
YIELD_TIMEOUT = 1.0

#: The kinds of reasons why a session is not suspended, see :class:`SuspendRefused`.
Obstacle = Literal["busy", "pinned", "drain", "host", "limit"]

#: The reason if a suspend would lose the session's CUDA graph.
RECORDING = "it records a CUDA graph"

#: The reason if the pool does not preempt a session in use that has no guard. Today's drivers end a
#: process that makes a synchronise call while it is suspended. Only the guard can keep a running
#: cell from such a call.
UNGUARDED = "it runs without the guard, so nothing would stop its CUDA calls during the suspend"

#: A process that has just ended must free its memory within ROOM_WAIT seconds. The broker checks
#: this every ROOM_POLL seconds.
ROOM_WAIT, ROOM_POLL = 1.0, 0.05

#: The suspend before a kill may take RETIRE seconds. The server must kill the kernel within RETIRED
#: seconds.
RETIRE, RETIRED = 10.0, 30.0

#: The broker waits this many seconds before it ends a lost session, so that the agent can show why
#: the session is lost.
LAST_WORDS = 0.3


class DeviceActions:
    """Performs the pool's Attach, Suspend and EndSession."""

    def __init__(
        self,
        core: Core,
        service: Devices,
        *,
        samples: Samples,
        room: HostRoom,
        pages: ControlPages,
        activity: Activity,
        health: Health,
        drain_timeout: float,
    ) -> None:
        self._core = core
        self._service = service
        #: Before the pool can preempt a session in use, the session's calls inside the driver must
        #: return within this many seconds.
        self._drain_timeout = drain_timeout
        self._samples = samples
        self._room = room
        self._pages = pages
        self._activity = activity
        self._health = health
        self._running: set[asyncio.Task[None]] = set()
        #: Sessions with an action under way.
        self.busy: set[str] = set()
        #: Whether the broker is ending. If so, it finishes the actions under way and begins no new
        #: action.
        self._closing = False

    def attach(self, action: e.Attach) -> None:
        if not action.origin and self._samples.fits(action.slices):
            # The session has no state to restore, and a fresh sample shows enough free memory.
            self._core.handle(
                e.AttachDone(now=self._core.now(), session=action.session, epoch=action.epoch)
            )
            return
        self._start(action.session, self._attach(action))

    def suspend(self, action: e.Suspend) -> None:
        self._start(action.session, self._suspend(action))

    def end_session(self, action: e.EndSession) -> None:
        self._start(action.session, self._end(action))

    async def finish(self, timeout: float) -> None:
        """Begin no new action; wait at most ``timeout`` seconds for the actions under way."""
        self._closing = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    # ------------------------------------------------------------------ attach

    async def _attach(self, action: e.Attach) -> None:
        session = self._core.sessions.find(action.session)
        if session is None:
            return
        now, name, epoch = self._core.now, action.session, action.epoch
        if action.origin:
            event = await self._resume(session, action)
        else:
            problem = await self._wait_for_room(action.slices)
            event = (
                e.AttachFailed(now=now(), session=name, epoch=epoch, message=problem)
                if problem
                else e.AttachDone(now=now(), session=name, epoch=epoch)
            )
        if event is not None:
            self._core.handle(event)

    async def _resume(self, session: LiveSession, action: e.Attach) -> e.Event | None:
        record = self._core.record(session.id)
        if session.process is None or record is None:
            return None
        outcome = await self._service.resume(
            session.process,
            [piece.device for piece in action.slices],
            action.origin,
            session=session.id,
            need=self._need(record, action),
            known=session.frozen,
        )
        now, name, epoch = self._core.now(), session.id, action.epoch
        if outcome.status == "resumed":
            # The page must change before the process makes another call.
            devices = [piece.device for piece in action.slices]
            guard = self._service.guard
            moves = guard.moves(devices, action.origin) if guard is not None else {}
            self._pages.moved(session, session.frozen, moves)
            self._pages.no_longer_aside(session)
            session.frozen = ()
            session.refusals.forget()
            return e.AttachDone(
                now=now, session=name, epoch=epoch,
                seconds=outcome.driver_seconds, waited=outcome.waited,
            )  # fmt: skip
        if outcome.status == "gone":
            return e.SessionEnded(now=now, session=name, reason="its process has ended")
        lost, message = outcome.status in ("failed", "hung"), outcome.message
        refused = outcome.status == "refused" and not outcome.stay
        targets = {piece.device for piece in action.slices}
        if refused:
            if session.refusals.another(targets, now):
                lost = True
                message = (
                    f"The driver refused {session.refusals.count} times to restore the kernel's "
                    f"GPU state, although there was room. The state is lost. {message}"
                )
            else:
                message += " The driver still has the GPU state; the pool tries again."
        if lost or refused:
            for uuid in sorted(targets):
                self._start("", self._examine(uuid, session))
        return e.AttachFailed(
            now=now,
            session=name,
            epoch=epoch,
            message=message or "The driver did not resume the process.",
            lost=lost,
            stay=outcome.stay,
        )

    async def _examine(self, uuid: str, session: LiveSession) -> None:
        """Test a device on which a resume failed; take it out of service if the test fails."""
        device = await self._service.self_test(uuid)
        if not device.can_suspend:
            session.refusals.blame(uuid)
            self._health.bad(uuid, device.tier_reason)

    def _need(self, record: SessionRecord, action: e.Attach) -> dict[str, int]:
        """Return how many bytes must be free on each target device before a restore."""
        held = {piece.device: piece.bytes for piece in record.suspended}
        need: dict[str, int] = {}
        for origin, piece in zip(action.origin, action.slices, strict=True):
            headroom = self._core.pool.headroom(piece.device)
            room = restore_room(held.get(origin, piece.bytes), piece.bytes, headroom)
            need[piece.device] = need.get(piece.device, 0) + room
        return need

    async def _wait_for_room(self, slices: Sequence[Slice]) -> str:
        """Wait until enough memory is free for ``slices``; return "" or why it is not."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + ROOM_WAIT
        while True:
            try:
                await self._samples.take()
            except GPUPoolError as error:
                return error.message
            problem = self._samples.missing(slices)
            if not problem or loop.time() >= give_up:
                return problem
            await asyncio.sleep(ROOM_POLL)

    # ------------------------------------------------------------------ suspend

    async def _suspend(self, action: e.Suspend) -> None:
        session = self._core.sessions.find(action.session)
        if session is None:
            return
        close = self._close_gate_in_use if action.busy else self._close_gate
        obstacle = await close(session)
        if obstacle:
            self._refused(action, *obstacle)
            return
        if not action.busy:
            agreed, why = await self._ask(session, action.epoch)
            if not agreed:
                self._refused(action, "busy", why)
                return
        process = session.process
        if process is None:
            self._core.handle(self._done(action, SuspendOutcome("nothing", cuda=False)))
            return
        before = await self._footprint(session, process, action.slices)
        problem, lasts = await self._room.take(session.id, process.pid, sum(before.values()))
        if problem:
            self._refused(action, "limit" if lasts else "host", problem)
            return
        try:
            session.moving = before
            self._core.dirty(session.id)
            self._core.commit()
            outcome = await self._service.suspend(
                process,
                [piece.device for piece in action.slices],
                session=session.id,
                on_kept=lambda message: self.kept(session, message),
            )
        finally:
            session.moving = {}
            self._room.give(session.id)
        session.frozen = outcome.processes
        self._core.dirty(session.id)
        if session.id not in self._core.sessions:
            self.end_frozen(session.id, session.frozen)  # the session has ended meanwhile
        name, now = session.id, self._core.now()
        if outcome.status in ("suspended", "nothing"):
            self._core.handle(self._done(action, outcome, before))
        elif outcome.status in ("pinned", "drain"):
            pinned = outcome.status == "pinned"
            self._refused(action, "pinned" if pinned else "drain", outcome.message)
        elif outcome.status == "gone":
            self._core.handle(e.SessionEnded(now=now, session=name, reason="its process has ended"))
        else:
            self._core.handle(
                e.SuspendFailed(now=now, session=name, epoch=action.epoch, message=outcome.message)
            )

    # ------------------------------------------------------------------ safe to kill

    async def retire(self, session: LiveSession) -> bool:
        """Make the processes of an ending session safe to kill; return whether they are safe.

        Some drivers hang when a process is killed that was restored before. With such a driver, the
        broker suspends the processes again. This takes at most RETIRE seconds. A failure raises no
        error, because the session ends in any case.
        """
        record = self._core.record(session.id)
        if not self._service.hazard or record is None or session.process is None:
            return True
        if not record.resumes or record.state not in ATTACHED:
            return True  # no process was ever restored, or all processes are suspended again
        self._pages.set_gate(session, CLOSED)
        devices = [piece.device for piece in record.slices]
        try:
            outcome = await within(
                self._service.suspend(session.process, devices, session=session.id), RETIRE
            )
        except (asyncio.TimeoutError, GPUPoolError) as error:
            what = str(error) or f"the suspend took more than {RETIRE:g} s"
            self._core.log.error("The driver may hang when session %s ends: %s", session.id, what)
            return False
        safe = outcome.status in ("suspended", "nothing", "gone")
        session.retired = outcome.status in ("suspended", "nothing")
        self._core.note("retired", session, reason=outcome.message, detail={"safe": safe})
        return safe

    def retire_and_end(self, session: LiveSession, done: Callable[[bool], None]) -> None:
        """Call :meth:`retire`, and give ``done`` its result.

        If the server does not kill the kernel within RETIRED seconds, the broker does so.
        """
        was = session.process

        def end() -> None:
            if self._core.sessions.find(session.id) is session and was is not None:
                # The kernel is still alive. Its processes are suspended, but the pool counts them
                # as attached.
                procfs.kill_tree(was)

        async def work() -> None:
            done(await self.retire(session))

        if self._service.hazard:
            asyncio.get_running_loop().call_later(RETIRED, end)
        self._start("", work())

    def kept(self, session: LiveSession, message: str) -> None:
        """Record that a refused suspend left part of a session in host memory."""
        self._core.note("kept", session, reason=message)
        session.send(
            {"type": "notice", "message": f"The CUDA calls of this kernel wait. {message}"}
        )

    async def _close_gate(self, session: LiveSession) -> tuple[Obstacle, str] | None:
        """Close the session's gate for a suspend; return None, or a refusal's kind and reason.

        None means that the suspend may go on. After a refusal, the gate opens again when the broker
        writes the pool's record into the page.
        """
        if moving := _moving(session):
            return "drain", moving
        if session.page is None:
            return None
        busy = self._activity.busy(session)
        if session.use.pins:
            return "pinned", session.use.pins
        if busy:
            return "busy", RECORDING if session.use.captures else "it uses its GPU"
        self._pages.set_gate(session, CLOSED)
        moving = await drain(lambda: self._activity.read(session))
        if moving:
            return "drain", moving
        if self._activity.recording(session):
            self._activity.busy(session)  # tells the pool that the session is in use
            return "busy", RECORDING  # a graph capture began just before the gate closed
        return None

    async def _close_gate_in_use(self, session: LiveSession) -> tuple[Obstacle, str] | None:
        """Close the gate of a session in use, because the pool preempts the session.

        The result is like that of :meth:`_close_gate`. The session's next calls wait at the gate.
        The broker does not ask the session's agent, and the agent keeps its holds. If the reason of
        a refusal is temporary, the kind is ``drain``, so that the pool tries again later.
        """
        if moving := _moving(session):
            return "drain", moving
        if session.page is None:
            return "drain", UNGUARDED
        self._activity.read(session)
        if session.use.pins:
            return "pinned", session.use.pins
        if self._activity.recording(session):
            return "drain", RECORDING
        self._pages.set_gate(session, CLOSED)
        moving = await drain(lambda: self._activity.read(session), patience=self._drain_timeout)
        if moving:
            return "drain", moving
        if self._activity.recording(session):
            return "drain", RECORDING  # a graph capture began just before the gate closed
        return None

    async def _ask(self, session: LiveSession, epoch: int) -> tuple[bool, str]:
        """Ask the agent to give up the lease. Return whether it does, and if not, the reason."""
        if session.grace is not None:
            return False, "the broker waits for its agent"
        agent = session.agent
        if agent is None or not agent.open:
            return True, ""
        answer: asyncio.Future[tuple[bool, bool | None]]
        answer = asyncio.get_running_loop().create_future()
        session.yielding = (epoch, answer)
        agent.send({"type": "yield", "epoch": epoch})
        try:
            yielded, cuda = await within(answer, YIELD_TIMEOUT)
        except asyncio.TimeoutError:
            return False, f"its agent did not answer in {YIELD_TIMEOUT:g} s"
        finally:
            session.yielding = None
        if cuda is not None:
            session.cuda = cuda
        return yielded, "a cell has begun" if session.agent else "its agent disconnected"

    async def _footprint(
        self, session: LiveSession, process: ProcessId, slices: Sequence[Slice]
    ) -> dict[str, int]:
        """Estimate the bytes that a suspend will move to host memory from each device."""
        try:
            samples = await self._samples.take()
        except GPUPoolError:
            samples = []  # the suspend itself will report the problem
        shown: dict[str, int] = {}
        for sample in samples:
            for entry in sample.processes:
                if entry.bytes and procfs.descends(entry.pid, process):
                    shown[sample.uuid] = shown.get(sample.uuid, 0) + entry.bytes
        contexts = {piece.device: self._service.context_bytes(piece.device) for piece in slices}
        return state_to_move(
            slices, shown, session.use.counted, contexts,
            guarded=session.page is not None, cuda=session.cuda,
        )  # fmt: skip

    def _done(
        self, action: e.Suspend, outcome: SuspendOutcome, before: Mapping[str, int] | None = None
    ) -> e.SuspendDone:
        session = self._core.sessions.find(action.session)
        suspended: tuple[Slice, ...] = ()
        if outcome.status == "suspended":
            suspended = state_moved(action.slices, outcome.freed, before or {})
        cuda = outcome.cuda
        if session is not None and (cuda is None or session.page is not None):
            cuda = session.cuda
        return e.SuspendDone(
            now=self._core.now(),
            session=action.session,
            epoch=action.epoch,
            suspended=suspended,
            cuda=cuda,
            seconds=outcome.driver_seconds,
            waited=outcome.waited,
        )

    def _refused(self, action: e.Suspend, kind: Obstacle, why: str) -> None:
        if action.busy:
            self._core.log.info("Session %s was not preempted (%s): %s", action.session, kind, why)
        session = self._core.sessions.find(action.session)
        self._core.handle(
            e.SuspendRefused(
                now=self._core.now(),
                session=action.session,
                epoch=action.epoch,
                kind=kind,
                message=why,
            )
        )
        if session is not None:
            # The agent may have given up the lease, so give the lease back to it.
            self._core.push_lease(session, why)

    # ------------------------------------------------------------------ end

    async def _end(self, action: e.EndSession) -> None:
        session = self._core.sessions.find(action.session)
        if session is None:
            return
        self._core.note("lost", session, reason=action.message)
        self._core.commit()
        self._core.log.error("Session %s is lost: %s", session.id, action.message)
        if session.has_listeners:
            session.send({"type": "lost", "message": action.message})
            await asyncio.sleep(LAST_WORDS)
        if session.process is not None:
            await self.retire(session)
            for problem in procfs.kill_tree(session.process):
                self._core.log.error("Session %s: %s", session.id, problem)
        self._core.handle(
            e.SessionEnded(
                now=self._core.now(), session=action.session, reason=f"lost: {action.message}"
            )
        )

    def end_frozen(self, name: str, frozen: Sequence[ProcessId]) -> None:
        """End the suspended processes of a kernel that has ended.

        Otherwise their state would stay in host memory, because no lease can resume them any more.
        """
        left = [process for process in frozen if procfs.alive(process)]
        if left:
            self._start("", self._end_frozen(name, left))

    async def _end_frozen(self, name: str, left: Sequence[ProcessId]) -> None:
        for process in left:
            state = await self._service.driver_state(process, session=name)
            if state == "locked":
                # The memory of the process is still on the device, so the process can go on.
                await self._service.unlock(process, session=name)
            elif state in ("checkpointed", "failed"):
                self._core.log.warning(
                    "Ended process %d of session %s: this process was still suspended when its "
                    "kernel ended",
                    process.pid, name,
                )  # fmt: skip
                for problem in procfs.kill([process]):
                    self._core.log.error("Session %s: %s", name, problem)

    # ------------------------------------------------------------------ internals

    def _start(self, name: str, work: Coroutine[None, None, None]) -> None:
        if self._closing:
            work.close()  # the journal shows the next broker that the action has not begun
            return
        task = asyncio.get_running_loop().create_task(self._guarded(name, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _guarded(self, name: str, work: Coroutine[None, None, None]) -> None:
        self.busy.add(name)
        record = self._core.record(name)
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._core.log.exception("An action for session %s failed", name)
            if record is not None:
                await self._recover(name, record, f"The broker failed ({error}); see its log.")
        finally:
            self.busy.discard(name)

    async def _recover(self, name: str, before: SessionRecord, message: str) -> None:
        """Give the pool a result for an action that raised an unexpected error.

        The result depends on the state that the driver shows for the session's process.
        """
        session = self._core.sessions.find(name)
        if session is None or session.process is None:
            return
        try:
            state = await self._service.driver_state(session.process, session=name)
            if state == "locked":
                await self._service.unlock(session.process, session=name)
                state = "running"
        except Exception:
            self._core.log.exception("The driver's state of session %s is unknown", name)
            state = "hung"
        now, epoch = self._core.now(), before.epoch
        fine = state in ("running", "none")
        event: e.Event
        if before.state == "attaching":
            fine = fine if before.suspended else False
            lost = state in ("failed", "hung")
            event = (
                e.AttachDone(now=now, session=name, epoch=epoch)
                if fine
                else e.AttachFailed(now=now, session=name, epoch=epoch, message=message, lost=lost)
            )
        elif fine:
            event = e.SuspendRefused(
                now=now, session=name, epoch=epoch, kind="drain", message=message
            )
        elif state == "checkpointed":
            event = e.SuspendDone(now=now, session=name, epoch=epoch, suspended=before.slices)
        else:
            event = e.SuspendFailed(now=now, session=name, epoch=epoch, message=message)
        self._core.handle(event)


def _moving(session: LiveSession) -> str:
    """Return why the driver must not suspend a session now, or ""."""
    if session.landing:
        return "one of its processes is moving to the GPU of its slice"
    return "the driver still restores it after a pause" if session.setting_aside else ""
