# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Suspend and resume of one process: a thin typed layer on ``cuda.core.checkpoint``.

The functions that call the driver run in a worker child. The broker uses only the codes and results
that this module defines. The errors of cuda.core differ only in their text. Only this module turns
the text into a code. Before each call, the module compares the start time of the process, because
another process may now have the pid. The module also checks that the process is not stopped
(SIGSTOP), because every driver call on a stopped process hangs.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Literal, Mapping

from ... import procfs
from ...errors import DriverError
from ...procfs import ProcessId
from . import interpreter

#: - ``ok``: success.
#: - ``gone``: the process has ended, or its pid names another process.
#: - ``stopped``: the process is stopped (SIGSTOP).
#: - ``refused``: the driver refused.
#: - ``hung``: even the state of the process could not be read. Only the parent sets this code.
Outcome = Literal["ok", "gone", "stopped", "refused", "hung"]

NOT_SUPPORTED = "CUDA_ERROR_NOT_SUPPORTED"
NOT_READY = "CUDA_ERROR_NOT_READY"
NOT_INITIALIZED = "CUDA_ERROR_NOT_INITIALIZED"
INVALID_VALUE = "CUDA_ERROR_INVALID_VALUE"

#: Error codes that the driver does not return because a process is dying. After any other code,
#: :func:`_call` checks whether the process is dying.
_PLAIN = {NOT_SUPPORTED, NOT_READY}

_CODE = re.compile(r"\bCUDA_ERROR_[A-Z0-9_]+")
_UNKNOWN_STATE = re.compile(r"Unknown CUDA checkpoint process state: (\d+)")

#: Numbers of states that cuda.core 1.x does not know. Driver 615 and newer report them while they
#: copy the memory of a process.
_LATER_STATES = {"4": "checkpointing", "5": "restoring"}


@dataclass(frozen=True, slots=True)
class DriverAnswer:
    """The result of one driver call; ``seconds`` is the time that the driver took."""

    outcome: Outcome
    code: str = ""
    message: str = ""
    value: str = ""
    seconds: float = 0.0

    def to_wire(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def classify(error: Exception) -> tuple[str, str]:
    """Return a stable code and a text for an error of cuda.core.

    If the driver reports "not found" or "not supported", the text of cuda.core says that the driver
    is too old. If the self-test has passed, this is wrong: the error then means that the process
    cannot be suspended.
    """
    text = str(error)
    match = _CODE.search(text)
    if match:
        return match.group(), text
    if "not supported by the installed NVIDIA driver" in text:
        return NOT_SUPPORTED, f"{NOT_SUPPORTED}: the driver does not support this operation."
    return type(error).__name__, text


def initialise() -> str:
    """Call cuInit, without making a context; return the CUDA version of the driver.

    Without persistence mode, a restore works only if its caller has called cuInit. The caller needs
    no context, and a context would take device memory as long as it exists.

    Raises
    ------
    DriverError
        If there is no usable driver, with the reason in a sentence.
    """
    unfit = interpreter.problem(interpreter.versions())
    if unfit:
        raise DriverError(
            f"NVIDIA's Python packages in {sys.prefix} cannot suspend a process: {unfit}",
            next_step=f"Run: {interpreter.INSTALL}",
        )
    try:
        # Make the slow import now, so that it does not count in the time-out of the first call.
        import cuda.core.checkpoint  # noqa: F401
        from cuda.bindings import driver

        (result,) = driver.cuInit(0)
        if result != driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"The CUDA driver does not start (cuInit: {result.name}).")
        _, version = driver.cuDriverGetVersion()
    except ImportError as error:
        raise DriverError(
            f"The Python packages cuda-core and cuda-bindings cannot be imported ({error}).",
            next_step=f"Run: {interpreter.INSTALL}",
        ) from None
    except RuntimeError as error:
        # libcuda.so.1 is missing (DynamicLibNotFoundError), or does not have a needed function.
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DriverError(f"The CUDA driver cannot be loaded: {first}") from None
    return f"{version // 1000}.{version % 1000 // 10}"


def _ends(process: ProcessId, tries: int) -> bool:
    """Return whether ``process`` is dying; look up to ``tries`` times.

    If a process is dying, a driver call may fail before Linux shows the end of the process: the
    driver's thread in the process ends before the process.
    """
    for turn in range(tries):
        if turn:
            time.sleep(0.01)
        if procfs.ending(process):
            return True
    return False


def _call(process: ProcessId, action: Callable[[Any], object]) -> DriverAnswer:
    there = procfs.presence(process)
    if there != "alive":
        return DriverAnswer(there, message=absent(process, there))
    from cuda.core.checkpoint import Process

    begin = time.perf_counter()
    try:
        value = action(Process(process.pid))
    except Exception as error:  # cuda.core has no common base for its errors
        seconds = time.perf_counter() - begin
        match = _UNKNOWN_STATE.search(str(error))
        if match:
            name = _LATER_STATES.get(match.group(1), f"state {match.group(1)}")
            return DriverAnswer("ok", value=name, seconds=seconds)
        code, text = classify(error)
        if code not in _PLAIN and _ends(process, tries=1 if code == NOT_INITIALIZED else 5):
            return DriverAnswer("gone", message=absent(process, "gone"), seconds=seconds)
        return DriverAnswer("refused", code, text, seconds=seconds)
    seconds = time.perf_counter() - begin
    return DriverAnswer("ok", value="" if value is None else str(value), seconds=seconds)


def absent(process: ProcessId, there: str) -> str:
    """Return a sentence about a process that is gone or stopped."""
    if there == "gone":
        return f"Process {process.pid} has ended."
    return f"Process {process.pid} is stopped (SIGSTOP); continue it with: kill -CONT {process.pid}"


def state(process: ProcessId) -> DriverAnswer:
    """Return an answer whose ``value`` is the driver's state of the process.

    The state is running, locked, checkpointed, failed, checkpointing or restoring.
    """
    return _call(process, lambda target: target.state)


def thread(process: ProcessId) -> DriverAnswer:
    """Return an answer whose ``value`` is the id of the driver's thread in the process.

    The thread exists only if the process has a CUDA context.
    """
    return _call(process, lambda target: target.restore_thread_id)


def lock(process: ProcessId, drain: float) -> DriverAnswer:
    """Block new CUDA calls of a process, and wait until its submitted work has ended.

    If the work has not ended after ``drain`` seconds, the call fails with NOT_READY.
    """
    milliseconds = max(1, round(drain * 1000))  # 0 would mean no time limit
    return _call(process, lambda target: target.lock(milliseconds))


def checkpoint(process: ProcessId) -> DriverAnswer:
    """Move a locked process's device memory to the host and free its devices."""
    return _call(process, lambda target: target.checkpoint())


def restore(process: ProcessId, mapping: Mapping[str, str] | None) -> DriverAnswer:
    """Move a checkpointed process's memory from the host to devices; the process stays locked.

    Too little free device memory is fatal to the process. ``mapping`` has an entry for *every* GPU
    of the machine: it maps the UUID of the GPU (as NVML shows it) to the UUID of the GPU that
    replaces it. None means that the process returns to its old GPUs.
    """
    pairs = None
    if mapping is not None:
        pairs = {_plain(old): _plain(new) for old, new in mapping.items()}
    return _call(process, lambda target: target.restore(pairs))


def unlock(process: ProcessId) -> DriverAnswer:
    """Unlock a locked process, so that it continues."""
    return _call(process, lambda target: target.unlock())


def _plain(uuid: str) -> str:
    return uuid.removeprefix("GPU-")


def complete_mapping(
    origin: tuple[str, ...], target: tuple[str, ...], everything: tuple[str, ...]
) -> dict[str, str] | None:
    """Return a map of all GPUs that moves ``origin[i]`` to ``target[i]``; None if no device moves.

    The map must have every GPU that the driver sees (``everything``), even a GPU that
    CUDA_VISIBLE_DEVICES hides from the process. If A moves to B, B moves to C, and ``origin`` does
    not contain C, the map moves C to A. So each device maps to a device of the same model. All
    other devices map to themselves.

    Raises
    ------
    ValueError
        If ``origin`` and ``target`` differ in length, or one of them names a device twice.
    """
    if len(origin) != len(target) or len({*origin}) != len(origin) or len({*target}) != len(target):
        raise ValueError(f"{origin} cannot be mapped one to one onto {target}.")
    moves = dict(zip(origin, target, strict=True))
    if all(old == new for old, new in moves.items()):
        return None
    came_from = {new: old for old, new in moves.items()}
    for uuid in everything:
        if uuid in moves:
            continue
        place = uuid
        while place in came_from:
            place = came_from[place]
        moves[uuid] = place
    return moves
