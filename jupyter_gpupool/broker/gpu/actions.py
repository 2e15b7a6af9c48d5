# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Attach and suspend: the agent's consent, then the driver. Each ends as one event.

At most one effect runs per session; the pool sees to that. A driver call cannot be cancelled, so
neither is an effect: when its session has ended meanwhile, the pool drops its completion.
"""

from __future__ import annotations

import asyncio
from typing import Callable, Coroutine, Mapping, Sequence

from ... import procfs
from ...devices import Devices, DeviceSample, SuspendOutcome
from ...errors import GPUPoolError
from ...pool import events as e
from ...pool.attribution import restore_room, slack, state_moved, state_to_move
from ...pool.model import SessionRecord, Slice
from ...procfs import ProcessId
from ...states import ATTACHED
from ...units import format_bytes
from ..hostmemory import HostRoom
from ..pages.activity import Activity
from ..pages.control import CLOSED, Pages
from ..pages.quiesce import quiesce
from ..runner import Runner
from ..sessions import Session

#: Seconds that an agent has to answer a yield; it answers from a thread of its own.
YIELD_TIMEOUT = 1.0

#: A sample this young (seconds) is good enough to attach a session that holds nothing yet: there
#: is nothing to restore, and so nothing to lose if a process outside the pool was faster.
FRESH = 10.0

#: Seconds that calls inside the driver have to return once the gate is closed, and between looks.
DRAIN, DRAIN_POLL = 1.0, 0.003

#: Why a session is not suspended that would lose a graph by it.
RECORDING = "it records a CUDA graph"

#: A process that has just ended may give its memory back a moment later: seconds, and between.
ROOM_WAIT, ROOM_POLL = 1.0, 0.05

#: Seconds that a suspend before a kill may take; and then for whoever asked for it to kill.
RETIRE, RETIRED = 10.0, 30.0

#: Seconds in which the agent can still show why its session is lost.
LAST_WORDS = 0.3


class DeviceEffects:
    """Performs the pool's Attach, Suspend and EndSession."""

    def __init__(self, runner: Runner, devices: Devices) -> None:
        self._runner = runner
        self._devices = devices
        #: What suspends may take of host memory.
        self.room = HostRoom()
        self._running: set[asyncio.Task[None]] = set()
        #: Sessions with an effect under way.
        self.busy: set[str] = set()
        #: The last sample by device, and when it was taken (loop time).
        self.samples: Mapping[str, DeviceSample] = {}
        self.sampled_at = float("-inf")
        #: Seconds after which a sample is not shown to anybody any more.
        self.sample_lasts = 0.0
        #: What the guard tells and is told; None where nobody runs under it.
        self.pages: Pages | None = None
        self.activity: Activity | None = None
        #: Why a restored process must be suspended before it is killed; "" if it need not.
        self.hazard = ""
        #: The broker ends: what is begun is finished, and nothing new is begun.
        self.closing = False
        #: Called with a device that failed its self-test, and why.
        self.on_bad_device: Callable[[str, str], None] = lambda _uuid, _reason: None

    def attach(self, action: e.Attach) -> None:
        self._runner.ledger.remember_attach(action.session)
        if not action.origin and self._fits(action.slices, self._fresh()):
            # Nothing to restore and a sample that says yes: no reason to wait for anything.
            self._runner.handle(
                e.AttachDone(now=self._runner.now(), session=action.session, epoch=action.epoch)
            )
            return
        self._start(action.session, self._attach(action))

    def suspend(self, action: e.Suspend) -> None:
        self._start(action.session, self._suspend(action))

    def end_session(self, action: e.EndSession) -> None:
        self._start(action.session, self._end(action))

    async def sample(self) -> list[DeviceSample]:
        """Return a sample taken now, and keep it for the next attach.

        Raises
        ------
        DriverError
            If NVML does not answer.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await self._devices.sample()
        self.samples = {sample.uuid: sample for sample in found}
        self.sampled_at = began
        return found

    def recent(self, device: str) -> DeviceSample | None:
        """Return what a device was when last looked at; None if that is long ago or has failed.

        Devices are not looked at while nobody has a session: what was seen then is no figure.
        """
        age = asyncio.get_running_loop().time() - self.sampled_at
        sample = self.samples.get(device) if age <= self.sample_lasts else None
        return None if sample is None or sample.lost else sample

    @property
    def down(self) -> bool:
        """Whether the devices must not be asked anything: an admin has paused the pool."""
        return bool(self._devices.down)

    async def finish(self, timeout: float) -> None:
        """Begin nothing more, and wait for what is under way at most ``timeout`` seconds."""
        self.closing = True
        if self._running:
            await asyncio.wait(self._running, timeout=timeout)

    # ------------------------------------------------------------------ attach

    async def _attach(self, action: e.Attach) -> None:
        session = self._runner.sessions.find(action.session)
        if session is None:
            return
        now, name, epoch = self._runner.now, action.session, action.epoch
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
            self._runner.handle(event)

    async def _resume(self, session: Session, action: e.Attach) -> e.Event | None:
        record = self._runner.record(session.id)
        if session.process is None or record is None:
            return None
        outcome = await self._devices.resume(
            session.process,
            [piece.device for piece in action.slices],
            action.origin,
            session=session.id,
            need=self._need(record, action),
            known=session.frozen,
        )
        now, name, epoch = self._runner.now(), session.id, action.epoch
        if outcome.status == "resumed":
            guard = self._devices.guard
            if self.pages is not None and guard is not None:
                # Before its calls go on.
                devices = [piece.device for piece in action.slices]
                moves = guard.moves(devices, action.origin)
                self.pages.moved(session, session.frozen, moves)
                self.pages.no_longer_aside(session)
            session.frozen = ()
            return e.AttachDone(now=now, session=name, epoch=epoch, seconds=outcome.driver_seconds)
        if outcome.status == "gone":
            return e.SessionEnded(now=now, session=name, reason="its process has ended")
        lost = outcome.status in ("failed", "hung")
        if lost or (outcome.status == "refused" and not outcome.stay):
            for uuid in dict.fromkeys(piece.device for piece in action.slices):
                self._start("", self._examine(uuid))
        return e.AttachFailed(
            now=now,
            session=name,
            epoch=epoch,
            message=outcome.message or "The driver did not resume it.",
            lost=lost,
            stay=outcome.stay,
        )

    async def _examine(self, uuid: str) -> None:
        """Was it the process, or is it the device? A device that fails gets nobody else."""
        device = await self._devices.self_test(uuid)
        if not device.can_suspend:
            self.on_bad_device(uuid, device.tier_reason)

    def _need(self, record: SessionRecord, action: e.Attach) -> dict[str, int]:
        """Return the free bytes that each target must show before a restore is tried."""
        held = {piece.device: piece.bytes for piece in record.suspended}
        need: dict[str, int] = {}
        for origin, piece in zip(action.origin, action.slices, strict=True):
            headroom = self._runner.pool.headroom(piece.device)
            room = restore_room(held.get(origin, piece.bytes), piece.bytes, headroom)
            need[piece.device] = need.get(piece.device, 0) + room
        return need

    async def _wait_for_room(self, slices: Sequence[Slice]) -> str:
        """Return "" once the memory is free, or why it is not."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + ROOM_WAIT
        while True:
            try:
                await self.sample()
            except GPUPoolError as error:
                return error.message
            problem = self._missing(slices)
            if not problem or loop.time() >= give_up:
                return problem
            await asyncio.sleep(ROOM_POLL)

    def _fresh(self) -> bool:
        return asyncio.get_running_loop().time() - self.sampled_at < FRESH

    def _fits(self, slices: Sequence[Slice], fresh: bool) -> bool:
        return fresh and not self._missing(slices)

    def _missing(self, slices: Sequence[Slice]) -> str:
        for piece in slices:
            sample = self.samples.get(piece.device)
            if sample is None or sample.lost:
                return f"{piece.device} cannot be read: {sample.lost if sample else 'not found'}."
            # By a little the driver's own memory varies, and nothing is restored here.
            if sample.free + slack(sample.total) < piece.bytes:
                return (
                    f"{piece.device} has {format_bytes(sample.free)} free and "
                    f"{format_bytes(piece.bytes)} is needed: processes outside the pool use the "
                    "rest (nvidia-smi lists them)."
                )
        return ""

    # ------------------------------------------------------------------ suspend

    async def _suspend(self, action: e.Suspend) -> None:
        session = self._runner.sessions.find(action.session)
        if session is None:
            return
        obstacle = (
            ("drain", "one of its processes is moving to its GPU")
            if session.landing
            else await self._close_gate(session)
        )
        if obstacle:
            self._refused(action, *obstacle)
            return
        agreed, why = await self._ask(session, action.epoch)
        if not agreed:
            self._refused(action, "busy", why)
            return
        if session.process is None:
            self._runner.handle(self._done(action, SuspendOutcome("nothing", cuda=False)))
            return
        before = await self._footprint(session, action.slices)
        problem = await self.room.take(session.id, session.process.pid, sum(before.values()))
        if problem:
            self._refused(action, "host", problem)
            return
        try:
            session.moving = before
            self._runner.dirty(session.id)
            self._runner.commit()
            outcome = await self._devices.suspend(
                session.process,
                [piece.device for piece in action.slices],
                session=session.id,
                on_kept=lambda message: self._kept(session, message),
            )
        finally:
            session.moving = {}
            self.room.give(session.id)
        session.frozen = outcome.processes
        self._runner.dirty(session.id)
        if session.id not in self._runner.sessions:
            self.end_frozen(session.id, session.frozen)  # it has ended meanwhile
        name, now = session.id, self._runner.now()
        if outcome.status in ("suspended", "nothing"):
            self._runner.handle(self._done(action, outcome, before))
        elif outcome.status in ("pinned", "drain"):
            kind = "pinned" if outcome.status == "pinned" else "drain"
            self._refused(action, kind, outcome.message)
        elif outcome.status == "gone":
            self._runner.handle(
                e.SessionEnded(now=now, session=name, reason="its process has ended")
            )
        else:
            self._runner.handle(
                e.SuspendFailed(now=now, session=name, epoch=action.epoch, message=outcome.message)
            )

    # ------------------------------------------------------------------ safe to kill

    async def retire(self, session: Session) -> bool:
        """Make a session's processes safe to kill, for it is about to end; return whether they are.

        Where the driver hangs when a restored process is killed, that means to suspend them again;
        elsewhere nothing has to be done. Bounded, and never an error: the session ends anyhow.
        """
        record = self._runner.record(session.id)
        if not self.hazard or record is None or session.process is None:
            return True
        if not record.resumes or record.state not in ATTACHED:
            return True  # never restored, or suspended (again)
        if self.pages is not None:
            self.pages.set_gate(session, CLOSED)
        devices = [piece.device for piece in record.slices]
        try:
            outcome = await asyncio.wait_for(
                self._devices.suspend(session.process, devices, session=session.id), RETIRE
            )
        except (asyncio.TimeoutError, GPUPoolError) as error:
            what = str(error) or f"it took more than {RETIRE:g} s"
            self._runner.log.error("Session %s is not safe to kill: %s", session.id, what)
            return False
        safe = outcome.status in ("suspended", "nothing", "gone")
        session.retired = outcome.status in ("suspended", "nothing")
        self._runner.note("retired", session, reason=outcome.message, detail={"safe": safe})
        return safe

    def retire_and_end(self, session: Session, done: Callable[[bool], None]) -> None:
        """Do what :meth:`retire` does and tell; end the session if nobody else does."""
        was = session.process

        def end() -> None:
            if self._runner.sessions.find(session.id) is session and was is not None:
                # Its processes are suspended, and the pool takes them for attached.
                procfs.kill([*reversed(procfs.descendants(was)), was])

        async def work() -> None:
            done(await self.retire(session))

        if self.hazard:
            asyncio.get_running_loop().call_later(RETIRED, end)
        self._start("", work())

    def _kept(self, session: Session, message: str) -> None:
        """A part of a session is still in host memory, though its suspend was refused."""
        self._runner.note("kept", session, reason=message)
        if session.agent is not None:
            session.agent.send({"type": "notice", "message": f"CUDA calls wait. {message}"})

    async def _close_gate(self, session: Session) -> tuple[str, str] | None:
        """Let no call into the driver any more; return the kind of refusal, and why, if one runs.

        Whoever refuses after this opens the gate again by saying so: the page follows the record.
        """
        if session.page is None or self.pages is None or self.activity is None:
            return None
        busy = self.activity.busy(session)
        if session.use.pins:
            return "pinned", session.use.pins
        if busy:
            return "busy", RECORDING if session.use.captures else "it uses its GPU"
        loop = asyncio.get_running_loop()
        self.pages.set_gate(session, CLOSED)
        give_up = loop.time() + DRAIN
        while (reading := self.activity.read(session)) is not None and reading.inflight:
            if loop.time() >= give_up:
                return "drain", f"a CUDA call did not return within {DRAIN:g} s"
            await asyncio.sleep(DRAIN_POLL)
        if reading is not None and not await quiesce([slot.pid for slot in reading.slots]):
            return "drain", "a thread that was about to call CUDA got no processor"
        if self.activity.recording(session):
            self.activity.busy(session)  # says so to the pool
            return "busy", RECORDING  # begun just before the gate was closed
        return None

    async def _ask(self, session: Session, epoch: int) -> tuple[bool, str]:
        """Return whether the agent gives the lease up, and why not."""
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
            yielded, cuda = await asyncio.wait_for(answer, YIELD_TIMEOUT)
        except asyncio.TimeoutError:
            return False, f"its agent did not answer in {YIELD_TIMEOUT:g} s"
        finally:
            session.yielding = None
        if cuda is not None:
            session.cuda = cuda
        return yielded, "a cell has begun" if session.agent else "its agent went away"

    async def _footprint(self, session: Session, slices: Sequence[Slice]) -> dict[str, int]:
        """Return the bytes that a suspend will move, by device, as far as can be seen now."""
        try:
            samples = await self.sample()
        except GPUPoolError:
            samples = []  # the suspend itself will say what is wrong
        assert session.process is not None
        shown: dict[str, int] = {}
        for sample in samples:
            for process in sample.processes:
                if process.bytes and procfs.descends(process.pid, session.process):
                    shown[sample.uuid] = shown.get(sample.uuid, 0) + process.bytes
        contexts = {piece.device: self._devices.context_bytes(piece.device) for piece in slices}
        return state_to_move(
            slices, shown, session.use.counted, contexts,
            guarded=session.page is not None, cuda=session.cuda,
        )  # fmt: skip

    def _done(
        self, action: e.Suspend, outcome: SuspendOutcome, before: Mapping[str, int] | None = None
    ) -> e.SuspendDone:
        session = self._runner.sessions.find(action.session)
        suspended: tuple[Slice, ...] = ()
        if outcome.status == "suspended":
            suspended = state_moved(action.slices, outcome.freed, before or {})
        cuda = outcome.cuda
        if session is not None and (cuda is None or session.page is not None):
            cuda = session.cuda
        return e.SuspendDone(
            now=self._runner.now(),
            session=action.session,
            epoch=action.epoch,
            suspended=suspended,
            cuda=cuda,
            seconds=outcome.driver_seconds,
        )

    def _refused(self, action: e.Suspend, kind: str, why: str) -> None:
        assert kind in ("busy", "pinned", "drain", "host")
        session = self._runner.sessions.find(action.session)
        self._runner.handle(
            e.SuspendRefused(
                now=self._runner.now(),
                session=action.session,
                epoch=action.epoch,
                kind=kind,  # type: ignore[arg-type]
                message=why,
            )
        )
        if session is not None:
            # The agent may have given the lease up: it has it again.
            self._runner.push_lease(session, why)

    # ------------------------------------------------------------------ end

    async def _end(self, action: e.EndSession) -> None:
        session = self._runner.sessions.find(action.session)
        if session is None:
            return
        self._runner.note("lost", session, reason=action.message)
        self._runner.commit()
        self._runner.log.error("Session %s is lost: %s", session.id, action.message)
        if session.agent is not None:
            session.agent.send({"type": "lost", "message": action.message})
            await asyncio.sleep(LAST_WORDS)
        if session.process is not None:
            await self.retire(session)
            # Children first: a parent that sees its child die may start another.
            ended = [*reversed(procfs.descendants(session.process)), session.process]
            for problem in procfs.kill(ended):
                self._runner.log.error("Session %s: %s", session.id, problem)
        self._runner.handle(
            e.SessionEnded(
                now=self._runner.now(), session=action.session, reason=f"lost: {action.message}"
            )
        )

    def end_frozen(self, name: str, frozen: Sequence[ProcessId]) -> None:
        """End what is still suspended of a session whose kernel is gone.

        Nobody could resume it any more, and its state would stay in host memory for good.
        """
        left = [process for process in frozen if procfs.alive(process)]
        if left:
            self._start("", self._end_frozen(name, left))

    async def _end_frozen(self, name: str, left: Sequence[ProcessId]) -> None:
        for process in left:
            state = await self._devices.driver_state(process, session=name)
            if state == "locked":
                # It has its memory on the device still, and can go on.
                await self._devices.unlock(process, session=name)
            elif state in ("checkpointed", "failed"):
                self._runner.log.warning(
                    "Process %d of session %s was suspended when its kernel ended: ended, too",
                    process.pid, name,
                )  # fmt: skip
                for problem in procfs.kill([process]):
                    self._runner.log.error("Session %s: %s", name, problem)

    # ------------------------------------------------------------------ internals

    def _start(self, name: str, work: Coroutine[None, None, None]) -> None:
        if self.closing:
            work.close()  # the next broker finds it in the journal, not begun
            return
        task = asyncio.get_running_loop().create_task(self._guarded(name, work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _guarded(self, name: str, work: Coroutine[None, None, None]) -> None:
        self.busy.add(name)
        record = self._runner.record(name)
        try:
            await work
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._runner.log.exception("An action for session %s failed", name)
            if record is not None:
                await self._recover(name, record, f"The broker failed ({error}); see its log.")
        finally:
            self.busy.discard(name)

    async def _recover(self, name: str, before: SessionRecord, message: str) -> None:
        """End an effect that failed in a way nobody foresaw, by what the driver says is true."""
        session = self._runner.sessions.find(name)
        if session is None or session.process is None:
            return
        try:
            state = await self._devices.driver_state(session.process, session=name)
            if state == "locked":
                await self._devices.unlock(session.process, session=name)
                state = "running"
        except Exception:
            self._runner.log.exception("The driver's state of session %s is unknown", name)
            state = "hung"
        now, epoch = self._runner.now(), before.epoch
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
        self._runner.handle(event)
