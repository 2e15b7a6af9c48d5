# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Take failed devices out of service, test them again later, bring back those that pass."""

from __future__ import annotations

import asyncio
import logging
from typing import Awaitable, Callable, Iterable, Mapping

from ... import procfs
from ...devices import Devices
from ...errors import Code, DriverError, GPUPoolError
from ...pool import events as e
from ...pool.model import Device, SessionRecord
from ..configuration import Configuration
from ..core import Core

#: Longest pause between two tests of a device that keeps failing, in seconds.
MOST = 3600.0

#: Codes of a test that did not run. They do not show whether the device works.
_NO_VERDICT = (Code.NO_ROOM, Code.PAUSED)


class Health:
    """Tells the pool which devices are out of service.

    A device that NVML could not read comes back when NVML can read it again. A device that had an
    Xid, or failed a self-test, comes back when it passes a self-test. The first test runs after
    ``retest_after`` seconds. After each failed test, the pause doubles. If ``retest_after`` is 0,
    these tests do not run. A test also runs when an admin asks for one, and when :meth:`suspect`
    reports a device that may hang.

    ``retest`` tests a device, and raises :class:`GPUPoolError` if the test fails.
    """

    def __init__(
        self,
        core: Core,
        configuration: Configuration,
        retest: Callable[[str], Awaitable[Device]],
        log: logging.Logger,
    ) -> None:
        #: By UUID: the pool's devices as they were when they last passed a self-test.
        self.devices: dict[str, Device] = {}
        #: By UUID: why a device is out of service.
        self.failed: dict[str, str] = {}
        self._core = core
        self._configuration = configuration
        self._retest_device = retest
        self._log = log
        #: Devices that only a self-test can bring back.
        self._bad: set[str] = set()
        self._failures: dict[str, int] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tests: dict[str, asyncio.Task[GPUPoolError | None]] = {}

    def begin(self, devices: Iterable[Device]) -> None:
        """Tell the pool about all devices, and take those that have failed out of service."""
        for device in devices:
            reason = self.failed.get(device.uuid)
            self.add(device)
            if reason is not None:
                self.lost(device.uuid, reason)

    def measured(self, device: Device) -> None:
        """Store the new figures of a device."""
        self.devices[device.uuid] = device

    def add(self, device: Device) -> None:
        """Announce a device that is in service now."""
        self.devices[device.uuid] = device
        self._forget(device.uuid)
        self._core.note(
            "device-seen", device=device.uuid, bytes=device.memory_total,
            detail={"name": device.name, "tier": device.tier, "reason": device.tier_reason},
        )  # fmt: skip
        self._core.handle(e.DeviceAppeared(now=self._core.now(), device=device))

    def lost(self, uuid: str, reason: str) -> None:
        """Take a device out of service."""
        self.failed[uuid] = reason
        if uuid not in self.devices:
            return  # the pool does not know the device yet
        self._core.note("device-lost", device=uuid, reason=reason)
        self._core.handle(e.DeviceDrained(now=self._core.now(), device=uuid, reason=reason))
        self._schedule(uuid)

    def bad(self, uuid: str, reason: str) -> None:
        """Take a failed device out of service until it passes a self-test."""
        self._bad.add(uuid)
        self.lost(uuid, reason)

    def suspect(self, uuid: str, reason: str) -> None:
        """Take a device out of service because it may hang, and test it at once."""
        if uuid not in self.devices:
            return
        self.bad(uuid, f"{reason} The GPU is being tested.")

        def tested(test: asyncio.Task[GPUPoolError | None]) -> None:
            error = None if test.cancelled() else test.result()
            if error is not None and uuid in self.failed:
                failed = error.code not in _NO_VERDICT
                what = "The GPU's test failed" if failed else "The GPU has not been tested yet"
                self.lost(uuid, f"{reason} {what}: {error.message}")

        self._test(uuid).add_done_callback(tested)

    def readable(self, uuid: str, failed: Mapping[str, str]) -> None:
        """Note that a sample could read a device; bring it back if it needs no test.

        ``failed`` is what :attr:`failed` contained before the sample was taken. The sample says
        nothing about a failure that came later.
        """
        reason = self.failed.get(uuid)
        if reason is not None and failed.get(uuid) == reason and uuid not in self._bad:
            self._back(uuid, "healthy again")

    async def retest(self, uuid: str) -> str:
        """Test a device that is out of service; return "" if it is back, or why it is not."""
        error = await asyncio.shield(self._test(uuid))
        return "" if error is None else error.message

    def close(self) -> None:
        """Stop testing."""
        for timer in self._timers.values():
            timer.cancel()
        for test in self._tests.values():
            test.cancel()

    # ------------------------------------------------------------------ internals

    def _test(self, uuid: str) -> asyncio.Task[GPUPoolError | None]:
        """Return the test that is under way, or begin one."""
        test = self._tests.get(uuid)
        if test is None:
            test = asyncio.get_running_loop().create_task(self._retest(uuid))
            self._tests[uuid] = test
            test.add_done_callback(lambda _: self._tests.pop(uuid, None))
        return test

    async def _retest(self, uuid: str) -> GPUPoolError | None:
        # Before the test, the sampler forgets the device's Xid, so the next sample shows no fault.
        # Without this mark, :meth:`readable` would bring the device back during the test.
        self._bad.add(uuid)
        before = self.devices[uuid]
        try:
            device = await self._retest_device(uuid)
            if before.can_suspend and not device.can_suspend:
                raise DriverError(device.tier_reason)
        except GPUPoolError as error:
            self._log.warning("GPU %d is still out of service: %s", before.index, error)
            if error.code not in _NO_VERDICT:
                self._failures[uuid] = self._failures.get(uuid, 0) + 1
            if uuid in self.failed:
                self._schedule(uuid)
            return error
        self.devices[uuid] = device
        self._back(uuid, "passed its self-test")
        return None

    def _back(self, uuid: str, why: str) -> None:
        self._forget(uuid)
        if uuid in self.devices:
            device = self.devices[uuid]
            self._log.info("GPU %d (%s) is back in service: %s", device.index, uuid, why)
            self._core.note("device-seen", device=uuid, reason=why)
            self._core.handle(e.DeviceAppeared(now=self._core.now(), device=device))

    def _forget(self, uuid: str) -> None:
        self.failed.pop(uuid, None)
        self._failures.pop(uuid, None)
        self._bad.discard(uuid)
        timer = self._timers.pop(uuid, None)
        if timer is not None:
            timer.cancel()

    def _schedule(self, uuid: str) -> None:
        timer = self._timers.pop(uuid, None)
        if timer is not None:
            timer.cancel()
        retest_after = self._configuration.settings.retest_after
        if retest_after:
            pause = min(MOST, retest_after * 2.0 ** min(self._failures.get(uuid, 0), 16))
            loop = asyncio.get_running_loop()
            self._timers[uuid] = loop.call_later(pause, self._due, uuid)

    def _due(self, uuid: str) -> None:
        self._timers.pop(uuid, None)
        if uuid in self.failed:
            self._test(uuid)


class SuddenEnds:
    """Tests a GPU after a restored process on it has ended without a suspend.

    Some drivers hang when a restored process ends without a suspend. The pool and its servers
    suspend a kernel again before they end it. But a kernel may also call exit(), or the
    out-of-memory killer or a user's ``kill -9`` may end it. After such an end, the GPU may hang
    when the next kernel uses it. So the pool gives the GPU to no kernel before the GPU has passed a
    test.
    """

    def __init__(self, core: Core, service: Devices, health: Health, log: logging.Logger) -> None:
        self._core = core
        self._service = service
        self._health = health
        self._log = log

    def ending(self, event: e.SessionEnded) -> None:
        """Test the GPUs of a session that ends because its process has ended."""
        session = self._core.sessions.find(event.session)
        record = self._core.record(event.session)
        if session is None or record is None or session.retired or session.process is None:
            return
        if not procfs.alive(session.process):
            self.ended(record)

    def ended(self, record: SessionRecord) -> None:
        """Test the GPUs of a kernel that ended without a suspend."""
        if not self._service.hazard or not record.resumes or not record.slices:
            return
        why = (
            "A resumed kernel ended on this GPU before the pool suspended it again. Such an end is "
            "known to hang this driver."
        )
        for uuid in dict.fromkeys(piece.device for piece in record.slices):
            if uuid in self._health.devices:
                self._log.error(
                    "GPU %d: %s The pool did not end session %s: the kernel called exit(), or was "
                    "killed from outside (see dmesg). No kernel gets the GPU before the GPU has "
                    "passed a test", self._health.devices[uuid].index, why, record.id,
                )  # fmt: skip
                self._health.suspect(uuid, why)
