# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Protocol that a vendor's code implements: all that the broker needs from the vendor's GPUs.

A vendor is one folder here, such as ``nvidia``, with an ``open_devices(options)`` that returns
:class:`Devices`; ``devices/__init__.py`` chooses the vendor. Devices are named by UUID, sizes are
bytes, durations are seconds. Processes are named by :class:`~jupyter_gpupool.procfs.ProcessId`.

**Blocking.** The broker awaits the ``async`` methods on its event loop: they wait for a driver in
other processes, or in threads, never in the loop's own thread. Plain methods and properties answer
at once from memory, except :meth:`Devices.holders`, which the broker calls in a thread.

**Cancelling.** A driver call cannot be cancelled. A cancelled caller stops waiting, but the
operation continues to its end; the next operation on the same device waits for that end.

**Errors.** An operation on a session returns its result as a value with a status. ``DriverError``
means that the call itself failed; its code is ``no-driver``, ``no-device``, ``unknown-device``,
``paused`` (see :meth:`Devices.stand_down`), ``no-room``, ``lost``, or the vendor's own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Collection, Mapping, Protocol, Sequence

from ..errors import ConfigError
from ..pool.model import Device
from ..procfs import ProcessId
from .model import DeviceSample, FileHolder, ResumeOutcome, SessionState, SuspendOutcome


def _nothing(*_: str) -> None:
    pass


@dataclass(frozen=True)
class DeviceOptions:
    """Options for opening a vendor's devices; a vendor ignores options that do not concern it."""

    log: logging.Logger
    #: The whole environment of child processes; it decides which driver library they load. None:
    #: the broker's environment.
    env: Mapping[str, str] | None = None
    #: Environment variables in which a batch system or an admin lists the GPUs of this user.
    given: Mapping[str, str] = field(default_factory=dict)
    #: ``c.GPUPool.devices``: indices or beginnings of UUIDs; None: all GPUs that this user was
    #: given.
    wanted: Sequence[str] | None = None
    #: Seconds that a suspend waits for a session's submitted work to finish before it gives up.
    lock_timeout: float = 5.0
    #: Whether sessions run under the guard, if the vendor has one.
    guard: bool = False
    #: ``c.GPUPool.device_python``: the interpreter of child processes; "": the vendor's choice.
    python: str = ""
    #: :attr:`Devices.memo` of the previous broker; "" if there was none.
    memo: str = ""
    #: Prefix of the paths of the GPUs' device files; "": the vendor's usual one.
    files: str = ""
    #: The file with the version of the loaded kernel driver; None: the vendor's usual one.
    version_file: Path | None = None
    #: Called with a device's UUID and a reason, once for each failure of a device.
    on_lost: Callable[[str, str], None] = _nothing


class Devices(Protocol):
    """The pool's GPUs on this machine."""

    @property
    def problem(self) -> str:
        """Why there is no usable device, in sentences; "" if there is one."""

    @property
    def limit(self) -> str:
        """Why some of the machine's GPUs are not in the pool, in sentences; "" if all are."""

    @property
    def versions(self) -> str:
        """The driver and its version, for people; "" if unknown."""

    @property
    def hazard(self) -> str:
        """Why a resumed process must be suspended again before it is killed; "" if not needed."""

    @property
    def memo(self) -> str:
        """Text from the vendor's code that the broker keeps for the next broker on this machine."""

    @property
    def guard(self) -> GuardedDevices | None:
        """The functions that guarded kernels need; None if the vendor has no guard.

        Without a guard, no device has the tier "guarded". A kernel attaches before a cell or on
        ``%gpu attach`` instead of at its first device call, and is idle between cells. Nothing
        limits the kernel's allocations. The broker can only compare the memory in a later sample
        with the kernel's grant.
        """

    # ------------------------------------------------------------------ discover and test

    async def start(self, known: Mapping[str, Device] | None = None) -> list[Device]:
        """Find the devices, test each, and return them; return [] if there is no device.

        If the list is empty, :attr:`problem` says why. ``known`` are devices that an earlier broker
        has tested. This method does not test them again, because that broker's sessions may use
        them, and a test takes memory.

        Raises
        ------
        ConfigError
            If ``DeviceOptions.wanted`` names a device that does not exist.
        """

    async def self_test(self, uuid: str) -> Device:
        """Suspend and resume a small program on a device; return the device with the test result.

        The broker calls this when a resume has failed, to learn whether the device is at fault.
        """

    # ------------------------------------------------------------------ look

    async def sample(self) -> list[DeviceSample]:
        """Return one sample for each device; if a device cannot be read, its sample is ``lost``.

        Raises
        ------
        DriverError
            If no answer comes within the time-out. The next call tries again.
        """

    def context_bytes(self, uuid: str) -> int:
        """Return the bytes that the first context of a process takes on a device."""

    def environment(self, devices: Sequence[str]) -> dict[str, str]:
        """Return environment variables for a new program, which then sees only these devices.

        The program sees them in this order. The variables also make frameworks use only memory
        that the driver can suspend.
        """

    # ------------------------------------------------------------------ move the state of a session

    async def suspend(
        self,
        root: ProcessId,
        devices: Sequence[str],
        *,
        session: str,
        on_kept: Callable[[str], None] = _nothing,
    ) -> SuspendOutcome:
        """Move the device state of all processes of a session to host memory, or of none.

        The session's processes are ``root``, its descendants, and processes of the same user with
        ``GPUPOOL_SESSION=session`` in their environment. ``devices`` are the devices of its lease.

        If the driver refuses, the operation undoes all of its steps. If the undo does not succeed
        at once, the operation continues until it does, and calls ``on_kept`` once with the reason.
        """

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
        """Move a suspended session's state back: from ``origin[i]`` to ``devices[i]``.

        ``need`` is the free memory that the resume needs, by device. If less memory is free, the
        resume does not begin. The broker has reserved this memory. ``known`` are the processes of
        the session's last suspend.
        """

    async def driver_state(self, root: ProcessId, *, session: str) -> SessionState:
        """Return the driver's state of a session: the worst state of its processes."""

    async def unlock(self, root: ProcessId, *, session: str) -> None:
        """Let a session run again after the broker died during a suspend.

        Raises
        ------
        DriverError
            If the driver refuses or does not answer.
        """

    # ------------------------------------------------------------------ maintenance

    @property
    def down(self) -> str:
        """Why every call fails: the reason given to :meth:`stand_down`; "" if calls work."""

    @property
    def renewed(self) -> frozenset[str]:
        """The devices that the last :meth:`renew` has tested."""

    async def assume(self, known: Mapping[str, Device], reason: str) -> list[Device]:
        """Start without a call of the driver, and stand down at once; replaces :meth:`start`.

        ``known`` are the devices that an earlier broker found; this method returns them.
        """

    async def stand_down(self, reason: str, uuids: Sequence[str] | None = None) -> None:
        """Release devices (None: the whole driver), once operations on them have ended.

        After that, the broker and its children have no file of these devices open. Calls that need
        these devices raise DriverError with the code ``paused`` and ``reason`` until :meth:`renew`.
        """

    async def renew(self, uuids: Collection[str] | None = None) -> list[Device]:
        """Find the devices again, test ``uuids`` (None: all) and new devices; return all devices.

        Raises
        ------
        DriverError
            If the driver does not start or shows no device. The method then changes nothing.
        """

    async def retest(self, uuid: str) -> Device:
        """Forget a device's failure, test the device again, and return its new state.

        Raises
        ------
        DriverError
            If the device cannot be read, or has no room for the test.
        """

    def is_aside(self, uuid: str) -> bool:
        """Return whether a :meth:`stand_down` that names this device has released the device.

        A :meth:`stand_down` of the whole driver does not count. After :meth:`renew` this method
        returns False.
        """

    def has_file(self, uuid: str) -> bool:
        """Return whether the device has its own device file, which :meth:`holders` looks for.

        A part of a device, such as a MIG instance, shares the file of the whole device.
        """

    def holders(self, uuid: str = "") -> tuple[list[FileHolder], int]:
        """Return the processes with a device file open, and the number of unreadable processes.

        This method looks for the file of one device, or of any device (""). It blocks, because it
        reads ``/proc`` of the whole machine.
        """

    async def close(self, grace: float = 10.0) -> None:
        """Wait at most ``grace`` seconds for operations under way, then end all child processes."""


class GuardedDevices(Devices, Protocol):
    """Further functions of the devices, for kernels under the guard.

    A guarded process may initialise the driver before its session has a lease. The driver binds the
    process to the devices that it sees at that moment. When the session gets a lease, the process
    *lands*: the broker moves only this process to the devices of the lease.
    """

    @property
    def guard_problem(self) -> str:
        """Why no device has the tier "guarded", in sentences; "" if one has."""

    def moves(self, devices: Sequence[str], origin: Sequence[str]) -> Mapping[str, str]:
        """Return the target of each visible device in a resume from ``origin`` to ``devices``."""

    async def land(
        self,
        process: ProcessId,
        devices: Sequence[str],
        origin: Sequence[str],
        *,
        session: str,
        need: Mapping[str, int],
        restoring: Callable[[], None],
    ) -> ResumeOutcome:
        """Move one process from ``origin[i]`` to ``devices[i]``: a suspend and a resume.

        The method calls ``restoring`` after the suspend and before the resume. After a refusal the
        process continues to run on its old devices.
        """

    async def landed(self, process: ProcessId, *, session: str) -> tuple[str, str]:
        """Let a process continue after the broker died while it moved the process (the landing).

        Return the driver's state before the call, and why the process does not run ("" if it runs).
        """


#: Opens a vendor's devices. It does not look for devices yet, and does not touch the driver.
OpenDevices = Callable[[DeviceOptions], Devices]


def named(machine: Mapping[str, int], wanted: Sequence[str], limit: str = "") -> list[str]:
    """Return the devices that ``c.GPUPool.devices`` names, in the order of that option.

    ``machine`` maps each device's UUID to its index; ``limit`` is the reason why some devices are
    missing.

    Raises
    ------
    ConfigError
        If a name matches no device.
    """
    chosen: list[str] = []
    for name in wanted:
        matches = [u for u, index in machine.items() if name == str(index) or u.startswith(name)]
        if not matches:
            there = ", ".join(f"{index} ({uuid})" for uuid, index in machine.items())
            raise ConfigError(
                f"c.GPUPool.devices names {name!r}, but the GPUs of this machine are: {there}."
                + (f" {limit}" if limit else ""),
                next_step="Correct the option, or remove it to use every GPU.",
            )
        chosen += [uuid for uuid in matches if uuid not in chosen]
    return chosen
