# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``DeviceService`` makes all GPU calls of the broker, and never blocks the broker's event loop.

One worker child per device makes the checkpoint calls, and one monitor child calls NVML. All tasks
of the event loop may call the service. Operations on the same device wait for each other.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Callable, Mapping, Sequence

from ... import procfs
from ...errors import Code, DriverError
from ...procfs import ProcessId
from ..model import Continued, DeviceSample, ResumeOutcome, SessionState, SuspendOutcome
from .checkpoint import absent, complete_mapping
from .inventory import Inventory
from .landing_move import LandingMove, interrupted
from .operations import ROOM_WAIT, Operation
from .visibility import VISIBLE, environment
from .workers import KEPT_MOST, KEPT_PATIENCE, KEPT_PAUSE, KEPT_POLL


class DeviceService(Inventory):
    """The GPUs of this machine, with the calls that suspend, resume and move sessions.

    Its parameters are those of :class:`.inventory.Inventory`.
    """

    @property
    def guard(self) -> DeviceService:
        """The service itself, which also has the functions for guarded kernels."""
        return self

    @property
    def visible(self) -> str:
        """The name of the environment variable that lists the devices of a program."""
        return VISIBLE

    def environment(self, devices: Sequence[str]) -> dict[str, str]:
        """Return environment variables for a new program, which then sees only these devices."""
        return environment(devices)

    # ------------------------------------------------------------------ calls of the broker

    async def sample(self) -> list[DeviceSample]:
        """Return one sample per device.

        Raises
        ------
        DriverError
            If NVML does not answer in time. The next call starts a new monitor process.
        """
        return await self._sampler.sample()

    async def suspend(
        self,
        root: ProcessId,
        devices: Sequence[str],
        *,
        session: str,
        on_kept: Callable[[str], None] = lambda _message: None,
    ) -> SuspendOutcome:
        """Suspend all CUDA processes of a session; if the driver refuses one, undo the suspend.

        The session's processes are ``root``, its descendants, and processes of the same user whose
        environment has ``GPUPOOL_SESSION=session``. ``devices`` are the devices of the session's
        lease. If the caller is cancelled, the operation continues: a driver call cannot be stopped.

        If a refused suspend cannot be undone (a program outside the pool took the memory, or the
        restore fails), the service calls ``on_kept`` once with the reason, and retries the undo.
        Other sessions do not wait for these retries. After KEPT_MOST refusals with room, the state
        counts as lost.
        """
        refused = [self._device(uuid) for uuid in devices if not self._device(uuid).can_suspend]
        if refused:
            return SuspendOutcome("pinned", f"{refused[0].name}: {refused[0].tier_reason}")

        last: list[Operation] = []

        async def run(operation: Operation) -> SuspendOutcome:
            last[:] = [operation]
            return await operation.suspend(devices)

        outcome = await self._workers.perform(run, root, session, devices)
        if outcome.status == "kept":
            self._log.error("%s", outcome.message)
            on_kept(outcome.message)
            outcome = await self._bring_back(last[0], session, devices)
        return outcome

    async def _bring_back(
        self, earlier: Operation, session: str, devices: Sequence[str], *, alone: bool = False
    ) -> SuspendOutcome:
        """Retry until no process that ``earlier`` left suspended is suspended any more.

        The outcome is ``failed`` if the driver goes on refusing although there is room, and
        although the devices pass their test.
        """

        async def again(operation: Operation) -> SuspendOutcome:
            nonlocal earlier
            self._check_in_use(devices)
            before, earlier = earlier, operation
            return await operation.bring_back(before)

        pause, refusals = KEPT_POLL, _RefusedTries()
        while procfs.presence(earlier.root) != "gone":
            await asyncio.sleep(pause)
            pause = min(2 * pause, KEPT_PAUSE)
            try:
                outcome = await self._workers.perform(
                    again, earlier.root, session, devices, alone=alone
                )
                if outcome.status != "kept":
                    return outcome
                if refusals.too_many(earlier.kept_with_room) and await self._all_pass(devices):
                    return SuspendOutcome("failed", refusals.message(earlier.kept[0]))
            except DriverError as error:
                # The state is safe in host memory until the device is back.
                self._log.info("Session %s stays suspended: %s", session, error)
        return SuspendOutcome("gone", absent(earlier.root, "gone"), processes=(*earlier.kept,))

    def _check_in_use(self, devices: Sequence[str]) -> None:
        """Raise DriverError if a device is paused or no longer listed."""
        if self.down:
            raise DriverError(self.down, code=Code.PAUSED)
        for uuid in devices:
            if uuid not in self._devices:
                raise DriverError(f"The driver no longer lists device {uuid}.")
            if self.is_aside(uuid):
                raise DriverError(f"Device {uuid} is paused.", code=Code.PAUSED)

    async def _all_pass(self, devices: Sequence[str]) -> bool:
        """Test devices on which the driver refuses restores; return whether all pass."""
        for uuid in devices:
            device = await self.self_test(uuid)
            if not device.can_suspend and self.on_device_lost is not None:
                self.on_device_lost(uuid, device.tier_reason)
            if not device.can_suspend or uuid in self.untested:
                return False
        return True

    async def resume(
        self,
        root: ProcessId,
        devices: Sequence[str],
        origin: Sequence[str],
        *,
        session: str,
        need: Mapping[str, int],
        known: Sequence[ProcessId] = (),
    ) -> ResumeOutcome:
        """Resume a session: move the state of its old device ``origin[i]`` to ``devices[i]``.

        ``need`` has the bytes that must be free on each device. The caller has reserved them, so
        that no other session takes them. If fewer bytes are free, the resume does not begin.
        ``known`` are the processes that the session's last suspend has suspended.
        """
        for uuid in devices:
            self._device(uuid)
        gone = [uuid for uuid in origin if uuid not in self._devices]
        if gone:
            # The session's state is safe in host memory. But without its old device, the driver may
            # be unable to restore the state on any GPU.
            return ResumeOutcome(
                "no-room",
                f"The session was suspended from device {gone[0]}, which the driver no longer "
                "lists.",
            )

        async def run(operation: Operation) -> ResumeOutcome:
            return await operation.resume(devices, origin, need, self._physical(), known)

        return await self._workers.perform(run, root, session, devices)

    def moves(self, devices: Sequence[str], origin: Sequence[str]) -> Mapping[str, str]:
        """Return, for each GPU of the machine, the GPU that replaces it; {} if no GPU changes.

        The resume moves the state of ``origin[i]`` to ``devices[i]``.
        """
        return complete_mapping((*origin,), (*devices,), self._physical()) or {}

    async def land(
        self,
        process: ProcessId,
        devices: Sequence[str],
        origin: Sequence[str],
        *,
        session: str,
        need: Mapping[str, int],
        restoring: Callable[[], None],
        staying: Callable[[], None],
        on_kept: Callable[[str], None] = lambda _message: None,
    ) -> ResumeOutcome:
        """Move one process of a session to the session's devices.

        See :class:`.landing_move.LandingMove`. If the driver refuses the move and the process
        cannot be restored on its old devices, the service retries this restore, as :meth:`suspend`
        does.
        """
        move = LandingMove(
            devices, origin, need, self._contexts(origin), self._physical(), restoring, staying
        )
        last: list[Operation] = []

        async def run(operation: Operation) -> ResumeOutcome:
            last[:] = [operation]
            return await move.land(operation)

        both = [*dict.fromkeys((*devices, *origin))]
        outcome = await self._workers.perform(run, process, session, both, alone=True)
        if not last[0].kept or outcome.status not in ("refused", "no-room"):
            return outcome
        self._log.error("%s", outcome.message)
        on_kept(outcome.message)
        back = await self._bring_back(last[0], session, origin, alone=True)
        if back.status in ("gone", "failed", "hung"):
            return ResumeOutcome(back.status, back.message)
        return replace(outcome, message=back.message)

    async def landed(
        self,
        process: ProcessId,
        *,
        session: str,
        origin: Sequence[str] = (),
        staying: Callable[[], None] = lambda: None,
        patience: float = ROOM_WAIT,
    ) -> Continued:
        """Let a process continue, after an earlier broker died during the landing of the process.

        See :func:`.landing_move.interrupted`. ``origin`` are the devices on which the process had a
        context.
        """
        if procfs.presence(process) == "gone":
            return Continued("gone")

        async def run(operation: Operation) -> Continued:
            self._check_in_use(origin)
            if not patience:
                operation.hurry()
            return await interrupted(
                operation, process, self._contexts(origin), staying, patience=patience
            )

        devices = [*dict.fromkeys(origin)] or self._any_device()
        return await self._workers.perform(run, process, session, devices, alone=True)

    async def bring_back(
        self,
        process: ProcessId,
        *,
        session: str,
        origin: Sequence[str] = (),
        staying: Callable[[], None] = lambda: None,
        on_kept: Callable[[str], None] = lambda _message: None,
    ) -> str:
        """Call :meth:`landed` until the process runs or has ended; return why its state is lost."""
        pause, refusals, told = KEPT_POLL, _RefusedTries(), False
        while procfs.presence(process) != "gone":
            try:
                found = await self.landed(
                    process, session=session, origin=origin, staying=staying, patience=0.0
                )
                if not found.problem:
                    return ""
                if found.state == "failed":
                    return found.problem
                if refusals.too_many(found.refused) and await self._all_pass(origin):
                    return refusals.message(process)
                problem = found.problem
            except DriverError as error:
                problem = str(error)
            if not told:
                self._log.error("Session %s: %s", session, problem)
                on_kept(problem)
                told = True
            await asyncio.sleep(pause)
            pause = min(2 * pause, KEPT_PAUSE)
        return ""

    def _contexts(self, devices: Sequence[str]) -> dict[str, int]:
        """Return the size of a context for each device that the driver lists."""
        return {uuid: self.context_bytes(uuid) for uuid in devices if uuid in self._devices}

    async def driver_state(self, root: ProcessId, *, session: str) -> SessionState:
        """Return the driver's state of a session: the worst state of its processes.

        The state is ``hung`` if the driver does not answer for a process. It never answers for a
        stopped process (SIGSTOP).
        """
        if procfs.presence(root) == "gone":
            return "gone"

        async def run(operation: Operation) -> SessionState:
            return await operation.state()

        return await self._workers.perform(run, root, session, self._any_device())

    async def unlock(self, root: ProcessId, *, session: str) -> None:
        """Unlock the processes that a dead broker left locked.

        Raises
        ------
        DriverError
            If the driver refuses, or a process does not answer.
        """

        async def run(operation: Operation) -> None:
            await operation.unlock()

        await self._workers.perform(run, root, session, self._any_device())


@dataclass
class _RefusedTries:
    """Refusals in a row to restore a process although there was room."""

    count: int = 0
    first: float = 0.0

    def too_many(self, refused: bool) -> bool:
        """Count a try; return whether the state counts as lost if the devices pass their test."""
        now = time.monotonic()
        self.first = self.first if self.count else now
        self.count = self.count + 1 if refused else 0
        return self.count >= KEPT_MOST and now - self.first >= KEPT_PATIENCE

    def message(self, process: ProcessId) -> str:
        return (
            f"The driver refused {self.count} times to restore process {process.pid}, although "
            "there was room. Its state is lost."
        )
