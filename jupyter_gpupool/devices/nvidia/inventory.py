# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which GPUs the machine has, what each can do, and which are set aside for maintenance.

:class:`.service.DeviceService` derives from :class:`Inventory`, and adds operations on sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Collection, Mapping, Sequence

from ...errors import Code, DriverError, GPUPoolError
from ...pool.attribution import driver_share, unlisted
from ...pool.model import Device
from ...procfs import ProcessId
from ..children import Children
from ..model import FileHolder, assumed_context
from . import driver
from .driver import MODULE
from .examiner import Examiner, Findings
from .interpreter import PROGRAMS, child_environment
from .operations import Operation
from .sampler import FREED_TIMEOUT, SAMPLE_TIMEOUT, Sampler, to_memo
from .selftest import Abilities
from .visibility import DEVICE_FILES, Aside, DeviceRow, Given, holders
from .workers import Workers

#: Maximum number of self-tests at the same time. Each starts two processes that load the driver.
_SELFTESTS = 4

#: Time-out in seconds for one driver call of a self-test. A self-test moves only a few MiB. The
#: time-out is short, because kernels wait while a broker starts and tests its devices. If the test
#: with the guard hangs, the kernels also wait for the test without the guard.
TEST_CALL_TIMEOUT = 15.0

#: Seconds between two checks of how much memory is still in use after the self-tests.
_RESIDUE_POLL = 0.1

#: Every device of the emulated driver has this word in its name.
_EMULATED = "EMULATED"


class Inventory:
    """The GPUs of this machine, and the child processes that ask the driver about them.

    Parameters
    ----------
    env:
        All environment variables for child processes. They decide which driver library a child
        process loads. None means the environment of this process.
    lock_timeout:
        Seconds that a suspend waits for a session's submitted GPU work before it gives up.
    call_timeout:
        Time-out of any other driver call, in seconds. A copy gets more time. If a call exceeds its
        time-out, the service kills the worker.
    sample_timeout:
        Seconds for NVML to take one sample.
    guard:
        Whether sessions run under the guard. If True, each device is tested under the guard, and
        gets the tier "guarded" if the device passes.
    python:
        The Python interpreter for child processes. It must have NVIDIA's packages. "" means this
        process's interpreter.
    numbers:
        The last value of :attr:`numbers` in an earlier service in this PID namespace; None if it
        is unknown.
    choose:
        A function that returns the GPUs that the pool may use, and why it may not use the others.
    files:
        Prefix of the paths of the GPUs' device files.
    version_file:
        File with the version of the loaded kernel module.
    on_device_lost:
        A function that is called with ``(uuid, reason)`` when a device fails: NVML cannot read the
        device any more, or the driver reports an Xid that is not the application's fault. It is
        called once for each of these two events, until NVML shows the device as healthy again.
    """

    def __init__(
        self,
        *,
        env: Mapping[str, str] | None = None,
        log: logging.Logger | None = None,
        lock_timeout: float = 5.0,
        call_timeout: float = 120.0,
        sample_timeout: float = SAMPLE_TIMEOUT,
        guard: bool = False,
        numbers: bool | None = None,
        python: str = "",
        choose: Callable[[Sequence[DeviceRow]], Given] = lambda rows: Given((*rows,)),
        files: str = DEVICE_FILES,
        version_file: Path = MODULE,
        on_device_lost: Callable[[str, str], None] | None = None,
    ) -> None:
        #: Why there is no usable device, in a sentence; empty if there is one.
        self.problem = ""
        #: Versions from NVML, empty if unknown.
        self.driver_version = ""
        self.cuda_version = ""
        #: Devices that had no room for a self-test. The pool assumes that they can suspend.
        self.untested: set[str] = set()
        #: The reason why no child runs and every call fails; empty if calls work.
        self.down = ""
        #: Devices that the last :meth:`renew` tested.
        self.renewed: frozenset[str] = frozenset()
        self.on_device_lost = on_device_lost
        self._log = log or logging.getLogger(__name__)
        child_env = child_environment(env, python)
        self._aside = Aside(child_env)
        self._children = Children(PROGRAMS, env=child_env, log=self._log, python=python)
        self._sampler = Sampler(
            children=self._children,
            log=self._log,
            on_lost=self._lost,
            timeout=sample_timeout,
            numbers=numbers,
        )
        self._examiner = Examiner(
            children=self._children,
            env=child_env,
            log=self._log,
            sampler=self._sampler,
            guard=guard,
        )
        self._choose = choose
        self._files = files
        self._version_file = version_file
        #: Why the pool has only some of the machine's GPUs, in sentences.
        self.limit = ""
        self._everything: tuple[str, ...] = ()
        self._devices: dict[str, Device] = {}
        self._workers = Workers(
            children=self._children,
            log=self._log,
            sampler=self._sampler,
            lock_timeout=lock_timeout,
            call_timeout=call_timeout,
        )

    # ------------------------------------------------------------------ life

    async def start(self, known: Mapping[str, Device] | None = None) -> list[Device]:
        """Find the devices, test each, and return them; return [] if there is no driver.

        If the driver is missing or broken, this method raises no error, but :attr:`problem` says
        what is wrong. ``known`` are the devices of an earlier broker, by UUID. This method does not
        test them again: a test takes memory (a CUDA context), and the earlier broker may have
        granted this memory to sessions.
        """
        if known:
            self._workers.warm(next(iter(known)))
        try:
            rows = await self._discover()
        except DriverError as error:
            self.problem = str(error)
            return []
        for row in rows:
            self._add(row)
        for uuid in self._workers.children.keys() - self._devices.keys():
            await self._workers.remove(uuid)  # this device no longer exists
        trusted = {uuid: d for uuid, d in (known or {}).items() if uuid in self._devices}
        for uuid, device in trusted.items():
            self._devices[uuid] = self._examiner.trust(self._devices[uuid], device)
        await self._sampler.watch([*self._devices])
        await self._test([uuid for uuid in self._devices if uuid not in trusted])
        return [*self._devices.values()]

    async def _discover(self) -> list[dict[str, Any]]:
        """Find the devices, and return a row for each device that the pool may use.

        Raises
        ------
        DriverError
            If the driver is missing, if NVML does not answer, or if the pool may use no device.
        """
        found = await self._sampler.discover()
        self.driver_version, self.cuda_version = found["driver"], found["cuda"]
        for problem in found["problems"]:
            self._log.warning("%s", problem)
        rows: list[dict[str, Any]] = found["devices"]
        if not rows:
            nothing = f"The NVIDIA driver {self.driver_version} sees no GPU. {driver.WITHOUT_GPU}"
            raise DriverError(" ".join(found["problems"]) or nothing, code=Code.NO_DEVICE)
        self._everything = tuple(row["uuid"] for row in rows if not row["mig"])
        self._aside.learn(rows)
        chosen = self._choose(rows)
        self.limit = chosen.limit
        if not chosen.rows:
            raise DriverError(chosen.limit, code=Code.NO_DEVICE)
        return [dict(row) for row in chosen.rows]

    async def _test(self, fresh: Sequence[str]) -> None:
        """Test devices, and measure the driver's own memory on them."""
        before = await self._unattributed(fresh)
        # Run several tests at once: on a machine with eight GPUs, one test after the other would
        # take half a minute.
        limit = asyncio.Semaphore(_SELFTESTS)

        async def test(uuid: str) -> None:
            async with limit:
                await self.self_test(uuid)

        await asyncio.gather(*(test(uuid) for uuid in fresh))
        self._sampler.numbers.settle()
        await self._set_reserved(before)
        self._devices = {uuid: self._with_landing(d) for uuid, d in self._devices.items()}

    async def close(self, grace: float = 10.0) -> None:
        """Wait at most ``grace`` seconds for operations in flight, then end all children."""
        await self._workers.drain(grace)
        await self._children.close()
        await self._workers.close(grace)

    # ------------------------------------------------------------------ maintenance

    async def assume(self, known: Mapping[str, Device], reason: str) -> list[Device]:
        """Start with the devices that an earlier broker found, without touching the driver."""
        for uuid, device in known.items():
            self._devices[uuid] = self._examiner.trust(device, device)
            self._workers.add(uuid)
        self._sampler.numbers.settle()
        await self.stand_down(reason)
        return [*self._devices.values()]

    async def stand_down(self, reason: str, uuids: Sequence[str] | None = None) -> None:
        """Wait for operations on the devices, then end the children that opened the devices' files.

        If ``uuids`` is None, the method ends all children, so that no process of this service uses
        the driver. Otherwise it ends the workers of these devices, and replaces all other children:
        the new children do not open the files of these devices. Calls fail with ``reason`` until
        :meth:`renew`.
        """
        chosen = [*self._devices] if uuids is None else [*uuids]
        async with self._workers.locked(chosen):
            if uuids is None:
                self.down = reason
                await self._sampler.child.hold(reason)
            await asyncio.gather(*(self._workers.children[uuid].hold(reason) for uuid in chosen))
        if uuids is not None and self._aside.put(chosen, reason, self._physical()):
            await self._look_away()

    async def _look_away(self) -> None:
        """Replace the other children, because they may have files of set-aside devices open.

        The new children do not open these files.
        """
        for uuid in [uuid for uuid in self._devices if uuid not in self._aside]:
            async with self._workers.locked([uuid]):
                await self._workers.children[uuid].replace()
        await self._sampler.look_away([u for u in self._devices if u not in self._aside])

    def is_aside(self, uuid: str) -> bool:
        """Return whether a :meth:`stand_down` that names the device has set the device aside."""
        return uuid in self._aside

    def has_file(self, uuid: str) -> bool:
        """Return whether a GPU has its own device file; a MIG instance has none."""
        return uuid in self._aside.numbers

    def holders(self, uuid: str = "") -> tuple[list[FileHolder], int]:
        """Return the processes that have device files open. See :func:`.visibility.holders`."""
        return holders(self._files, self._aside.numbers[uuid] if uuid else None)

    async def retest(self, uuid: str) -> Device:
        """Test a lost device, and return its new state.

        Raises
        ------
        DriverError
            If the device cannot be read, or has no room for the test.
        """
        self._aside.check(uuid)
        if self.down:
            raise DriverError(self.down, code=Code.PAUSED)
        if uuid not in self._devices:
            raise DriverError(
                "The driver did not list this GPU at the last resume. When nvidia-smi -L lists the "
                "GPU again, pause the whole pool and resume it, so that it looks for GPUs again.",
                code=Code.UNKNOWN_DEVICE,
            )
        await self._sampler.renew([uuid])
        device = await self.self_test(uuid)
        # This sample shows whether the test itself has caused an Xid.
        (sample,) = await self._sampler.sample([uuid])
        if sample.lost:
            raise DriverError(sample.lost, code=Code.LOST)
        if uuid in self.untested:
            raise DriverError(
                device.tier_reason or "The GPU has too little free memory for the test.",
                code=Code.NO_ROOM,
            )
        return device

    async def renew(self, uuids: Collection[str] | None = None) -> list[Device]:
        """Find the devices again, and test ``uuids`` (None: all) and the new devices.

        Return all devices.

        Raises
        ------
        DriverError
            If the driver does not start or shows no device. The method then changes nothing.
        """
        renewed = {*self._devices} if uuids is None else {*uuids}
        await self._sampler.child.hold("")
        await self._sampler.renew(renewed)
        try:
            rows = await self._discover()
        except GPUPoolError:
            await self._sampler.child.replace()  # the monitor may have opened set-aside devices
            await self._sampler.child.hold(self.down)
            raise
        self._aside.take(renewed, self._everything)
        there, before = {row["uuid"] for row in rows}, {*self._devices}
        for uuid in renewed & before - there:  # a missing device may come back after a reset
            await self._workers.remove(uuid)
            del self._devices[uuid]
        for row in rows:
            if row["uuid"] in renewed or row["uuid"] not in self._devices:
                self._add(row)
        self.down = self.problem = ""
        for uuid, worker in self._workers.children.items():
            if uuid not in self._aside:
                await worker.hold("")
        if self._aside:  # the search has opened all devices, even set-aside devices
            await self._sampler.look_away([u for u in self._devices if u not in self._aside])
        else:
            await self._sampler.watch([*self._devices])
        self.renewed = frozenset(uuid for uuid in self._devices if uuid in renewed | there - before)
        await self._test([uuid for uuid in self._devices if uuid in self.renewed])
        return [*self._devices.values()]

    async def _unattributed(self, uuids: Sequence[str]) -> dict[str, int]:
        """Return, by device, how many used bytes belong to no process in NVML's list.

        The result is {} if NVML does not answer.
        """
        with contextlib.suppress(DriverError):
            samples = await self._sampler.sample(uuids)
            return {
                s.uuid: unlisted(s.used, (p.bytes for p in s.processes))
                for s in samples
                if not s.lost
            }
        return {}

    async def _set_reserved(self, before: Mapping[str, int]) -> None:
        """Set the driver's own memory: the memory that is in use before the first session starts.

        ``before`` is the result of :meth:`_unattributed` before the self-tests. The first context
        on a device may leave some memory in use permanently. So this method measures again after
        the self-tests, and the larger number counts. If a number has grown, the method waits until
        the numbers stop changing, but at most FREED_TIMEOUT seconds: some drivers need a moment to
        show the memory of an ended process as free.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FREED_TIMEOUT
        after = await self._unattributed([*before])
        while any(after.get(uuid, 0) > size for uuid, size in before.items()):
            await asyncio.sleep(_RESIDUE_POLL)
            again = await self._unattributed([*before])
            if again == after or loop.time() >= deadline:
                break
            after = again
        with contextlib.suppress(DriverError):
            for sample in await self._sampler.sample([*before]):
                size = max(before[sample.uuid], after.get(sample.uuid, 0))
                share = driver_share(sample.reserved, size, sample.total)
                self._devices[sample.uuid] = replace(
                    self._devices[sample.uuid], memory_reserved=share
                )

    def _add(self, row: Mapping[str, Any]) -> None:
        uuid, mig = row["uuid"], bool(row["mig"])
        self._devices[uuid] = Device(
            uuid=uuid,
            index=row["index"],
            name=row["name"],
            model=row["name"],
            memory_total=row["total"],
            memory_reserved=row["reserved"],
            emulated=_EMULATED in row["name"],
            tier="mig" if mig else "none",
            can_suspend=False,
            can_migrate=False,
            tier_reason="A MIG instance is isolated by hardware; the driver cannot suspend "
            "processes on it."
            if mig
            else "It has not been tested.",
        )
        self._workers.add(uuid)

    async def self_test(self, uuid: str) -> Device:
        """Test a device and return its new state.

        The broker repeats the test after a failed resume. It also repeats the test of a device in
        :attr:`untested` when the device has no lease. The test takes a CUDA context and a few MiB
        for about a second.
        """
        device = self._device(uuid)
        self._aside.check(uuid)
        if self.down:
            raise DriverError(self.down, code=Code.PAUSED)
        if device.tier == "mig":
            return device
        able = driver.capabilities(self.driver_version)
        found = Findings(Abilities(False, False, able.reason))
        if able.suspend:
            found = await self._workers.shielded(self._self_test(device, migrate=able.migrate))
        (self.untested.discard if found.verdict.tested else self.untested.add)(uuid)
        limits = able.reason if self._peers(device) else ""
        tested = self._examiner.apply(found, self._device(uuid), limits)
        if tested.can_suspend and device.can_migrate and not self._peers(device):
            # All other devices of this model are set aside, so this test could not move a process.
            # But an earlier test has moved a process, so the driver can do it.
            tested = replace(tested, can_migrate=True)
        self._devices[uuid] = self._with_landing(tested)
        return self._devices[uuid]

    async def _self_test(self, device: Device, *, migrate: bool) -> Findings:
        def operation(root: ProcessId, session: str) -> Operation:
            timeout = min(self._workers.call_timeout, TEST_CALL_TIMEOUT)
            worker = self._workers.children[device.uuid]
            return self._workers.operation(worker, root, session, timeout)

        async with self._workers.locked([device.uuid]):
            peers = self._peers(device)
            return await self._examiner.examine(
                device, peers[0] if migrate and peers else None, self._physical(), operation,
                retire=bool(self.hazard),
            )  # fmt: skip

    @property
    def numbers(self) -> bool | None:
        """Whether NVML's pids belong to this PID namespace; None if that is unknown.

        If the value is not True after the self-tests, the pids in samples are negative numbers.
        """
        return self._sampler.numbers.proven

    @property
    def memo(self) -> str:
        """The value of :attr:`numbers` as text, for the next broker."""
        return to_memo(self.numbers)

    @property
    def versions(self) -> str:
        """The driver's version and CUDA's."""
        if not self.driver_version:
            return "NVIDIA driver (version not read while the pool is paused)" if self.down else ""
        return f"NVIDIA driver {self.driver_version}, CUDA {self.cuda_version}"

    @property
    def hazard(self) -> str:
        """Why a resumed process must be suspended before a kill: :func:`.driver.kill_hazard`."""
        return driver.kill_hazard(self._version_file)

    @property
    def guard_problem(self) -> str:
        """Why no device has the tier "guarded", in sentences; empty if a device has it."""
        devices = self._devices.values()
        return self._examiner.guard_problem(self.problem, [*devices])

    def context_bytes(self, uuid: str) -> int:
        """Return how many bytes of device memory the first CUDA context of a process takes.

        The self-test measures this number. If the self-test could not measure the number, the
        result is the usual size of a context.
        """
        device = self._device(uuid)
        return device.context_bytes or assumed_context(device.memory_total)

    def _with_landing(self, device: Device) -> Device:
        """Return the device with its ``landing_bytes``: room for the context of a landing process.

        A process may initialise CUDA on this device before its session gets a slice on another
        device of the same model. The process then makes its first context on this device, and the
        broker moves the process to the device of the slice.
        """
        moves = any(d.can_migrate and d.tier == "guarded" for d in self._others(device))
        lands = moves and device.can_migrate and device.tier == "guarded"
        return replace(device, landing_bytes=self.context_bytes(device.uuid) if lands else 0)

    def _others(self, device: Device) -> list[Device]:
        return [self._devices[uuid] for uuid in self._peers(device)]

    def _peers(self, device: Device) -> list[str]:
        """Return the other devices of this model, without devices that are set aside.

        The device with the next higher index comes first.
        """
        same = [d for d in self._devices.values() if d.model == device.model and d.tier != "mig"]
        others = [d for d in same if d.uuid != device.uuid and d.uuid not in self._aside]
        return [d.uuid for d in sorted(others, key=lambda d: (d.index < device.index, d.index))]

    # ------------------------------------------------------------------ one device

    def _device(self, uuid: str) -> Device:
        try:
            return self._devices[uuid]
        except KeyError:
            known = ", ".join(self._devices) or "none"
            raise DriverError(
                f"There is no device {uuid}; the devices are: {known}.", code=Code.UNKNOWN_DEVICE
            ) from None

    def _physical(self) -> tuple[str, ...]:
        """Return all GPUs that the kernel driver sees, because a restore's mapping needs all."""
        found = (d.uuid for d in self._devices.values() if d.tier != "mig")
        return self._everything or tuple(found)

    def _any_device(self) -> Sequence[str]:
        """Return a list of one device: a device whose worker is free, or else the first device."""
        if not self._devices:
            raise DriverError(self.problem or "There is no device.", code=Code.NO_DRIVER)
        serving = [uuid for uuid in self._devices if uuid not in self._aside]
        return self._workers.first_free(serving or [*self._devices])

    def _lost(self, uuid: str, reason: str) -> None:
        self._log.error("Device %s is lost: %s", uuid, reason)
        if self.on_device_lost is not None:
            self.on_device_lost(uuid, reason)
