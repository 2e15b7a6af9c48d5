# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The Protocols that a vendor's code implements: all that the product needs from the vendor's GPUs.

Each vendor has its own folder in this package, such as ``nvidia``. The folder's ``__init__.py`` is
a :class:`Vendor`: a module that has the names in this Protocol. Its function ``open_devices``
returns :class:`Devices`, which the broker uses. ``devices/__init__.py`` chooses the vendor.
A device is named by its UUID, a process by its :class:`~jupyter_gpupool.procfs.ProcessId`. Sizes
are in bytes, durations in seconds.

**Blocking.** The broker awaits the ``async`` methods on its event loop. These methods call the
driver in other processes or in threads, so they never block the loop. Plain methods and properties
answer at once from memory. The exception is :meth:`Devices.holders`: the broker calls it in a
thread.

**Cancelling.** A driver call cannot be cancelled. A cancelled caller stops waiting, but the
operation continues. The next operation on the same device waits until this operation has ended.

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
from .model import (
    Continued,
    DeviceSample,
    FileHolder,
    Finding,
    ResumeOutcome,
    SessionState,
    SuspendOutcome,
)


def _nothing(*_: str) -> None:
    pass


@dataclass(frozen=True)
class DeviceOptions:
    """The options for ``open_devices``. A vendor ignores the options that it does not need."""

    log: logging.Logger
    #: All environment variables of the child processes. They decide which driver library a child
    #: process loads. None means the environment of the broker.
    env: Mapping[str, str] | None = None
    #: Environment variables in which a batch system or an admin lists the GPUs of this user.
    given: Mapping[str, str] = field(default_factory=dict)
    #: The value of ``c.GPUPool.devices``: the GPUs to use, as indices or beginnings of UUIDs. None
    #: means all GPUs that the variables in ``given`` allow.
    wanted: Sequence[str] | None = None
    #: Seconds that a suspend waits for a session's submitted work to finish before it gives up.
    lock_timeout: float = 5.0
    #: Whether sessions run under the guard, if the vendor has one.
    guard: bool = False
    #: The value of ``c.GPUPool.device_python``: the Python interpreter of the child processes. ""
    #: means that the vendor's code chooses the interpreter.
    python: str = ""
    #: :attr:`Devices.memo` of the previous broker; "" if there was none.
    memo: str = ""
    #: Prefix of the paths of the GPUs' device files; "" means the vendor's usual prefix.
    files: str = ""
    #: The file with the version of the loaded kernel driver; None means the vendor's usual file.
    version_file: Path | None = None
    #: A function that the vendor's code calls once for each failure of a device, with the device's
    #: UUID and the reason.
    on_lost: Callable[[str, str], None] = _nothing


class Devices(Protocol):
    """The pool's GPUs on this machine."""

    @property
    def problem(self) -> str:
        """Sentences that say why the pool has no usable device; "" if it has one."""

    @property
    def limit(self) -> str:
        """Sentences that say why some of the machine's GPUs are not in the pool; "" if all are."""

    @property
    def versions(self) -> str:
        """The driver and its version, for people; "" if unknown."""

    @property
    def hazard(self) -> str:
        """Why a resumed process must be suspended again before it is killed; "" if not needed."""

    @property
    def memo(self) -> str:
        """A text of the vendor's code. The broker saves it for the next broker on this machine."""

    @property
    def visible(self) -> str:
        """The name of the environment variable that lists the devices which a program sees.

        The kernel learns the name when it starts, and later sets the variable to the devices of its
        slice.
        """

    @property
    def guard(self) -> GuardedDevices | None:
        """The functions that guarded kernels need; None if the vendor has no guard.

        Without a guard, no device has the tier "guarded". A kernel cannot attach at its first
        device call. Instead it attaches before a cell or on ``%gpu attach``, and between cells it
        counts as idle. Nothing limits the kernel's allocations. The broker can only compare the
        memory in a later sample with the kernel's grant.
        """

    # ------------------------------------------------------------------ discover and test

    async def start(self, known: Mapping[str, Device] | None = None) -> list[Device]:
        """Find the devices, test each, and return them; return [] if there is no device.

        If the list is empty, :attr:`problem` says why. ``known`` are devices that an earlier broker
        has tested. Sessions of the earlier broker may still use these devices, and a test takes
        memory. So this method does not test the devices again.

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
        """Return one sample for each device.

        If a device cannot be read, the attribute ``lost`` of its sample has the reason.

        Raises
        ------
        DriverError
            If the driver does not answer within the time-out. The next call tries again.
        """

    def context_bytes(self, uuid: str) -> int:
        """Return the bytes that the first context of a process takes on a device."""

    def environment(self, devices: Sequence[str]) -> dict[str, str]:
        """Return the environment variables that make a new program see only these devices.

        The program sees the devices in the order of ``devices``. The variables also tell frameworks
        to use only memory that the driver can suspend.
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
        """Suspend a session: move the device state of all its processes to host memory.

        The session's processes are ``root``, its descendants, and processes of the same user with
        ``GPUPOOL_SESSION=session`` in their environment. ``devices`` are the devices of the
        session's lease.

        If the driver refuses to suspend a process, the operation undoes all of its steps, so that
        all processes run again. If the undo fails at first, the operation calls ``on_kept`` once
        with the reason, and retries the undo until all processes run or the state counts as lost.
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
        """Resume a session: move the state of its old device ``origin[i]`` to ``devices[i]``.

        ``need`` has the bytes that must be free on each device. The broker has reserved them. If
        fewer bytes are free, the resume does not begin. ``known`` are the processes that the
        session's last suspend has suspended.
        """

    async def driver_state(self, root: ProcessId, *, session: str) -> SessionState:
        """Return the driver's state of a session: the worst state of its processes."""

    async def unlock(self, root: ProcessId, *, session: str) -> None:
        """Unlock the processes of a session that an earlier broker, when it died, left locked.

        Raises
        ------
        DriverError
            If the driver refuses or does not answer.
        """

    # ------------------------------------------------------------------ maintenance

    @property
    def down(self) -> str:
        """The reason why every call fails, as given to :meth:`stand_down`; "" if calls work."""

    @property
    def renewed(self) -> frozenset[str]:
        """The devices that the last :meth:`renew` has tested."""

    async def assume(self, known: Mapping[str, Device], reason: str) -> list[Device]:
        """Start with the devices that an earlier broker found, without calling the driver.

        The broker calls this method instead of :meth:`start` if the driver must not be used now.
        The method stands down the whole driver at once, with ``reason`` (see :meth:`stand_down`).
        It returns the devices in ``known``.
        """

    async def stand_down(self, reason: str, uuids: Sequence[str] | None = None) -> None:
        """Wait for the operations on devices, then release the devices (None: the whole driver).

        The broker and its children then have no file of these devices open. Until :meth:`renew`, a
        call that needs one of these devices raises DriverError with the code ``paused`` and with
        ``reason``.
        """

    async def renew(self, uuids: Collection[str] | None = None) -> list[Device]:
        """Find the devices again, and test ``uuids`` (None: all) and the new devices.

        Return all devices.

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
        """Return whether the device is set aside: a :meth:`stand_down` has named the device.

        After a :meth:`stand_down` of the whole driver, the result is False for each device that no
        :meth:`stand_down` has named. After :meth:`renew` of the device, the result is False.
        """

    def has_file(self, uuid: str) -> bool:
        """Return whether the device has its own device file, so that :meth:`holders` accepts it.

        A part of a GPU, such as a MIG instance, has no file of its own: it shares the file of the
        whole GPU.
        """

    def holders(self, uuid: str = "") -> tuple[list[FileHolder], int]:
        """Return the processes with a device file open, and the number of unreadable processes.

        ``uuid`` names the device whose file counts. If ``uuid`` is "", the file of every device
        counts. This method blocks, because it reads ``/proc`` of the whole machine.
        """

    async def close(self, grace: float = 10.0) -> None:
        """Wait at most ``grace`` seconds for running operations, then end all child processes."""


class GuardedDevices(Devices, Protocol):
    """Further functions of the devices, for kernels under the guard.

    A guarded process may initialise the driver before its session has a lease. The driver binds the
    process to the devices that the process sees at that moment. When the session gets a lease, the
    process *lands*: the broker moves only this process to the devices of the lease.
    """

    @property
    def guard_problem(self) -> str:
        """Sentences that say why no device has the tier "guarded"; "" if a device has this tier."""

    def moves(self, devices: Sequence[str], origin: Sequence[str]) -> Mapping[str, str]:
        """Return, for each GPU of the machine, the GPU that replaces it in a resume.

        The resume moves the state of ``origin[i]`` to ``devices[i]``. The result is empty if no
        device changes.
        """

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
        on_kept: Callable[[str], None] = _nothing,
    ) -> ResumeOutcome:
        """Suspend one process on its devices ``origin[i]``, and resume it on ``devices[i]``.

        The method calls ``restoring`` after the suspend and before the resume. If the driver
        refuses, the process continues to run on its old devices; the method calls ``staying``
        before it restores the process there. If the process cannot continue at first, the operation
        retries until it can, and calls ``on_kept`` once with the reason.
        """

    async def landed(
        self,
        process: ProcessId,
        *,
        session: str,
        origin: Sequence[str] = (),
        staying: Callable[[], None] = lambda: None,
        patience: float = 5.0,
    ) -> Continued:
        """Let a process continue, after an earlier broker died during the landing of the process.

        ``origin`` are the devices on which the process had a context. The process needs room there,
        and the method waits ``patience`` seconds for it. It calls ``staying`` before it restores
        the process.

        Raises
        ------
        DriverError
            If the operation could not begin, for example because a device is paused.
        """

    async def bring_back(
        self,
        process: ProcessId,
        *,
        session: str,
        origin: Sequence[str] = (),
        staying: Callable[[], None] = lambda: None,
        on_kept: Callable[[str], None] = _nothing,
    ) -> str:
        """Call :meth:`landed` until the process runs or has ended.

        Return "", or why the driver has lost the state of the process. If the process does not run
        at first, call ``on_kept`` once with the reason.
        """


#: A function that returns a vendor's :class:`Devices`. It does not call the driver, and does not
#: search for devices: :meth:`Devices.start` does both.
OpenDevices = Callable[[DeviceOptions], Devices]


class InterpreterAnswer(Protocol):
    """What an interpreter reports about the vendor's packages."""

    @property
    def python(self) -> str:
        """The interpreter's version; "" if unknown."""

    @property
    def versions(self) -> Mapping[str, str]:
        """The version of each of the vendor's packages."""

    @property
    def problem(self) -> str:
        """Why the child processes cannot use the interpreter; "" if they can use it."""


class Interpreter(Protocol):
    """The Python environment with the vendor's packages, which ``install-devices`` makes."""

    #: The file with the tested versions of the packages.
    REQUIREMENTS: Path
    #: The command that makes the environment.
    INSTALL: str

    def places(self) -> tuple[Path, Path]:
        """Return the two places for the environment; the second if the first is not writable."""

    def ask(self, python: str) -> InterpreterAnswer:
        """Return which of the vendor's packages the interpreter ``python`` has; this blocks."""


class Vendor(Protocol):
    """The module of a vendor's folder: all names that the product uses from it."""

    #: The vendor's name in sentences, such as "NVIDIA".
    NAME: str
    #: The environment variables that the vendor's code and libraries read in the broker, without
    #: those of batch systems. A broker that replaces a dead broker gets the values of the dead one.
    #: A name that ends with "*" stands for all names with that prefix.
    VARIABLES: Sequence[str]
    #: The module for the interpreter of the child processes.
    interpreter: Interpreter

    def open_devices(self, options: DeviceOptions) -> Devices:
        """See :data:`OpenDevices`."""

    def driver_present(self) -> bool:
        """Return whether this machine has the vendor's kernel driver, without loading a library."""

    def inspect(self, python: str, *, driver: bool) -> list[Finding]:
        """Return the doctor's findings on this machine, without starting the driver.

        ``python`` is ``c.GPUPool.device_python``; ``driver`` says whether to check the kernel
        driver.
        """


def named(machine: Mapping[str, int], wanted: Sequence[str], limit: str = "") -> list[str]:
    """Return the devices that ``c.GPUPool.devices`` names, in the order of that option.

    ``machine`` maps each device's UUID to its index. ``limit`` is a sentence for the error message:
    it says why ``machine`` does not contain all GPUs.

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
