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

#: The driver's state of a session: the worst state of its processes. ``none``: no CUDA context.
#: ``hung``: no answer in time, or a process is stopped (SIGSTOP) and so cannot answer.
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
    """Device bytes of one process, as NVML shows them; None if NVML does not show them."""

    #: Negative if the pid may belong to another PID namespace; see ``nvidia/sampler.py``.
    pid: int
    bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device at one instant.

    If ``lost`` is not empty, it says why the device could not be read; ``total``, ``used`` and
    ``reserved`` are then the last known figures, and ``free`` is 0.
    """

    uuid: str
    total: int
    used: int
    reserved: int
    free: int
    processes: tuple[ProcessMemory, ...] = ()
    #: The part of the last sample period in which the device was busy, in per cent; None if
    #: unknown.
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
    ``suspended``  the session's device memory is in host memory; ``message`` is empty, or warns
                   that NVML still shows bytes of it
    ``nothing``    no process of the session has a CUDA context
    ``pinned``     the driver cannot suspend it; all steps were undone, and the session runs
    ``drain``      not possible now: its work did not drain in time, a process is stopped (SIGSTOP),
                   or the operation could not begin; nothing changed, and a retry is possible
    ``kept``       the driver refused, and a part of the session is not back on its GPU yet; the
                   driver has the state. (The service never returns ``kept``: it retries until the
                   status changes.)
    ``gone``       the root process has ended
    ``failed``     the driver lost the session's state: end the session to free its memory
    ``hung``       even a new worker could not read the state: treat as ``failed``
    =============  ================================================================================
    """

    status: SuspendStatus
    message: str = ""
    #: Freed bytes, by device. A resume must reserve them.
    #:
    #: - If NVML's lists show the session's processes, the bytes come from these lists.
    #: - If the lists do not show them, the bytes are the increase of free memory. This number is
    #:   too small if other processes took memory meanwhile, so a resume must reserve the grant if
    #:   the grant is larger.
    #: - The mapping is empty if NVML did not answer, or if an earlier broker had suspended a
    #:   process (its memory is unknown). A resume must then reserve the grant.
    freed: Mapping[str, int] = field(default_factory=dict)
    #: Whether the session has called cuInit and is bound to its devices; None: unknown.
    cuda: bool | None = None
    #: Seconds of the whole operation, and of its driver calls.
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
    ``no-room``  it did not begin: NVML shows too little free memory or does not answer, or a
                 process is stopped (SIGSTOP); ``message`` gives the reason
    ``refused``  the driver refused, and reports that the state is intact: a retry is possible;
                 if ``stay`` is True, it is possible only on the devices that the state came from
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


#: Assumed bytes of a context that was not measured. With current drivers, a context takes 300 to
#: 600 MiB on a data-centre GPU. On a small (emulated) device, the assumed size is at most a
#: sixteenth of the device.
_CONTEXT = 512 << 20
_CONTEXT_PART = 16


def assumed_context(total: int) -> int:
    """Return the assumed bytes of a first context on a device of ``total`` bytes."""
    return min(_CONTEXT, total // _CONTEXT_PART)
