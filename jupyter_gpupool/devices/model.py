# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Results that the devices return, as frozen values.

Sizes are bytes, durations are seconds, and devices are named by UUID.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Mapping

from ..procfs import ProcessId

SuspendStatus = Literal["suspended", "nothing", "pinned", "drain", "gone", "failed", "hung", "kept"]
ResumeStatus = Literal["resumed", "no-room", "refused", "gone", "failed", "hung"]

#: The driver's state of a session is the worst state of its processes. ``none`` means that no
#: process has a CUDA context. ``hung`` means that a process did not answer in time, or cannot
#: answer because it is stopped (SIGSTOP).
SessionState = Literal["running", "locked", "checkpointed", "failed", "none", "gone", "hung"]


Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report; ``todo`` is "" if no action is needed."""

    verdict: Verdict
    name: str
    message: str
    todo: str = ""


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """The device memory of one process; ``bytes`` is None if NVML does not show the size."""

    #: Negative if the pid may belong to another PID namespace; see ``nvidia/sampler.py``.
    pid: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """The state of one device at one instant.

    If the device could not be read, ``lost`` says why. In this case ``total``, ``used`` and
    ``reserved`` are the last known figures, and ``free`` is 0.
    """

    uuid: str
    total: int
    used: int
    reserved: int
    free: int
    processes: tuple[ProcessMemory, ...] = ()
    #: How much of the last sample period the device was busy, in per cent; None if unknown.
    utilisation: int | None = None
    lost: str = ""


@dataclass(frozen=True, slots=True)
class FileHolder:
    """A process that has device files open."""

    process: ProcessId
    uid: int
    #: Its command line, cut short.
    command: str
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SuspendOutcome:
    """How a suspend ended.

    =============  ================================================================================
    ``suspended``  the session's device memory is in host memory; if NVML still shows some of the
                   memory, or does not answer, ``message`` is a warning
    ``nothing``    no process of the session has a CUDA context
    ``pinned``     the driver cannot suspend the session; all steps were undone: the session runs
    ``drain``      a suspend is not possible now: the session's GPU work did not end in time, a
                   process is stopped (SIGSTOP), or the operation could not begin; the session is
                   as before, and a retry is possible
    ``kept``       the driver refused, and some processes could not be resumed yet; the driver has
                   their state. The service never returns ``kept``: it retries the undo until the
                   status changes.
    ``gone``       the root process has ended
    ``failed``     the driver lost the session's state: end the session to free its memory
    ``hung``       even a new worker could not read the state: treat as ``failed``
    =============  ================================================================================
    """

    status: SuspendStatus
    message: str = ""
    #: The bytes that the suspend has freed, by device. A resume must reserve as many bytes.
    #:
    #: - If NVML's lists show the session's processes, the numbers come from these lists.
    #: - Otherwise, each number is the increase of the device's free memory. It is too small if
    #:   other processes took memory during the suspend. So a resume must reserve this number or
    #:   the session's grant, whichever is larger.
    #: - The mapping is empty if NVML did not answer, or if an earlier broker had suspended one of
    #:   the processes, whose memory is unknown. A resume must then reserve the grant.
    freed: Mapping[str, int] = field(default_factory=dict)
    #: Whether a process of the session has called cuInit, which binds it to its devices. None
    #: means unknown.
    cuda: bool | None = None
    #: How long the whole operation took, and how long its driver calls took, in seconds.
    seconds: float = 0.0
    driver_seconds: float = 0.0
    #: Seconds that the operation waited for other operations on the same devices.
    waited: float = 0.0
    #: The suspended processes, in the order of their suspend (children first).
    processes: tuple[ProcessId, ...] = ()


@dataclass(frozen=True, slots=True)
class ResumeOutcome:
    """How a resume ended.

    ===========  ==================================================================================
    ``resumed``  every process runs, on the new devices
    ``no-room``  nothing was resumed: NVML shows too little free memory or does not answer, or a
                 process is stopped (SIGSTOP); ``message`` gives the reason
    ``refused``  the driver refused, but the session's state is intact, so a retry is possible; if
                 ``stay`` is True, a retry is possible only on the session's old devices
    ``gone``     the root process has ended
    ``failed``   the driver lost the session's state: end the session to free its memory
    ``hung``     even a new worker could not read the state: treat as ``failed``
    ===========  ==================================================================================
    """

    status: ResumeStatus
    message: str = ""
    seconds: float = 0.0
    driver_seconds: float = 0.0
    #: Seconds that the operation waited for other operations on the same devices.
    waited: float = 0.0
    #: True if the driver cannot move this session to another device.
    stay: bool = False


@dataclass(frozen=True, slots=True)
class Continued:
    """Whether a process runs again that an earlier operation has left suspended or locked."""

    #: The driver's state of the process before the call. ``failed`` also means that the restore
    #: failed, and that the state is lost.
    state: SessionState
    #: Why the process does not run; "" if it runs or has ended.
    problem: str = ""
    #: Whether the driver refused the restore although there was room. The state is intact.
    refused: bool = False


#: If the size of a context was not measured, this many bytes are assumed. With current drivers, a
#: context takes 300 to 600 MiB on a data-centre GPU. On a small (emulated) device, the assumed size
#: is at most a sixteenth of the device's memory.
_CONTEXT = 512 << 20
_CONTEXT_PART = 16


def assumed_context(total: int) -> int:
    """Return how many bytes a context is assumed to take on a device of ``total`` bytes."""
    return min(_CONTEXT, total // _CONTEXT_PART)
