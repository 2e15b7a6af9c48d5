# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Programs of the child processes: ``child.py ...devices.nvidia.child_programs NAME ...``.

=============================  ====================================================================
``monitor PARENT``             all calls to NVML; the broker has one monitor
``worker PARENT``              the driver's checkpoint calls; each device has one worker
``selftest PARENT UUID``       a few MiB of known bytes, which the self-test suspends and resumes
``packages``                   prints which of NVIDIA's packages this interpreter has, and ends
=============================  ====================================================================

A program reads requests from stdin and writes answers to stdout. Each line is one JSON object.

- A request has an operation: ``{"id": 7, "op": "sample", ...}``.
- Its answer has the handler's result: ``{"id": 7, ...}``.
- If the operation fails, the answer is ``{"id": 7, "error": text, "code": text}``.
- An event has no request: ``{"event": ...}``. The first line of each program is the event
  ``{"event": "ready", "problem": ...}``.

A program may be killed at any time. One worker makes many calls, because each new worker must call
cuInit first. If a worker is lost, the broker asks a new worker for the driver's state.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Mapping

from ... import procfs
from ...errors import Code, DriverError, GPUPoolError
from ...procfs import ProcessId
from . import members

Handler = Callable[..., Mapping[str, Any]]

#: The niceness of the monitor, which takes the samples.
NICE = 5

#: Bytes of the self-test's pattern: more than one 2 MiB page of device memory.
SIZE = 4 << 20

#: The pattern consists of pieces of _NOISE bytes. The first _NUMBER bytes of a piece are the number
#: of the piece. The other bytes are random, but equal in all pieces.
_NOISE, _NUMBER = 1 << 16, 4

_PR_SET_PDEATHSIG = 1

_write_lock = threading.Lock()


# ---------------------------------------------------------------------- for all programs


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, even during a driver call.

    If the parent dies, stdin ends, too. But a process that hangs in a driver call does not read
    stdin, so it would not notice the end.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the line above
        os._exit(0)


def be_nice() -> None:
    """Lower this process's priority: a sample can wait, but a kernel that requests a GPU cannot.

    If Linux groups processes by session (autogroup), only the niceness of the group counts. So this
    function also sets the niceness of the group. In addition, it sets the policy SCHED_BATCH: a
    process with this policy does not interrupt other processes when it wakes.
    """
    os.nice(NICE)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with contextlib.suppress(OSError):  # Linux without such groups
        Path("/proc/self/autogroup").write_text(f"{NICE}\n")


def claim_stdout() -> int:
    """Return a copy of stdout for the answers, and redirect all other output to stderr."""
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)
    return out


def emit(out: int, message: Mapping[str, Any]) -> None:
    """Write one whole line, from any thread. If the parent has ended, this process ends, too."""
    line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
    try:
        with _write_lock:
            while line:
                line = line[os.write(out, line) :]
    except OSError:
        os._exit(0)


def serve(out: int, handlers: Mapping[str, Handler]) -> None:
    """Answer requests from stdin until it ends."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        request_id, op = request.pop("id"), request.pop("op")
        answer: Mapping[str, Any]
        try:
            answer = handlers[op](**request)
        except GPUPoolError as error:
            answer = {"error": str(error), "code": error.code}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}", "code": Code.INTERNAL}
        emit(out, {"id": request_id, **answer})


# ---------------------------------------------------------------------- monitor


def monitor(out: int) -> dict[str, Handler]:
    """Start NVML and return the handlers.

    The handler ``watch`` starts a thread that sends an event for each failure of a device (Xid).
    """
    from .nvml import Nvml

    be_nice()
    nvml = Nvml()

    def discover() -> dict[str, Any]:
        driver, cuda = nvml.versions()
        devices, problems = nvml.discover()
        return {"driver": driver, "cuda": cuda, "devices": devices, "problems": problems}

    def watch(uuids: list[str], lost: dict[str, str], places: dict[str, int]) -> dict[str, Any]:
        nvml.remember(places, lost)

        def run() -> None:
            for uuid, reason in nvml.losses(uuids):
                nvml.mark_lost(uuid, reason)
                emit(out, {"event": "lost", "uuid": uuid, "reason": reason})

        threading.Thread(target=run, name="gpupool-xid", daemon=True).start()
        return {}

    def sample(uuids: list[str], lost: dict[str, str], places: dict[str, int]) -> dict[str, Any]:
        nvml.remember(places, lost)
        return {"samples": [asdict(row) for row in nvml.sample(uuids)]}

    return {"discover": discover, "watch": watch, "sample": sample}


# ---------------------------------------------------------------------- worker


def worker(_out: int) -> dict[str, Handler]:
    """Initialise the driver, without a context."""
    from . import checkpoint

    checkpoint.initialise()

    def on_process(call: Callable[..., checkpoint.DriverAnswer]) -> Handler:
        def handle(process: dict[str, int], **fields: Any) -> dict[str, Any]:
            return call(ProcessId(**process), **fields).to_wire()

        return handle

    calls = (
        *(checkpoint.state, checkpoint.thread, checkpoint.lock),
        *(checkpoint.checkpoint, checkpoint.restore, checkpoint.unlock),
    )
    ops = {call.__name__: on_process(call) for call in calls}
    finder = ProcessFinder()

    def asked(member: dict[str, Any]) -> dict[str, Any]:
        if member["libcuda"] is not False and member["presence"] == "alive":
            for op in ("thread", "state"):
                member[op] = ops[op](process=member["process"])
        return member

    def look(root: dict[str, int], session: str, known: list[dict[str, int]]) -> dict[str, Any]:
        """Return the session's processes, with the driver's answers to "thread" and "state".

        ``known`` are the processes of the last suspend. If all of them are still suspended, no
        other process of the session can have state. In this case the function does not search in
        /proc, and returns only ``known``.
        """
        top = procfs.presence(ProcessId(**root))
        suspended = [
            asked(
                {"process": each, "presence": procfs.presence(ProcessId(**each)), "libcuda": True}
            )
            for each in known
        ]
        states = {member.get("state", {}).get("value") for member in suspended}
        if top == "alive" and states == {"checkpointed"}:
            return {"root": top, "members": suspended}
        found = finder.find(root, session, again=False)
        return {**found, "members": [asked(member) for member in found["members"]]}

    def bring_back(
        suspended: list[dict[str, int]],
        locked: list[dict[str, int]],
        mapping: dict[str, str] | None,
    ) -> dict[str, Any]:
        """Restore ``suspended``, then unlock ``locked``; stop at the first call that fails."""
        answers: list[dict[str, Any]] = []
        todo = [*(("restore", each) for each in suspended), *(("unlock", each) for each in locked)]
        for op, process in todo:
            fields = {"mapping": mapping} if op == "restore" else {}
            answer = ops[op](process=process, **fields)
            answers.append({"op": op, "process": process, "answer": answer})
            if answer["outcome"] != "ok":
                break
        return {"answers": answers}

    return {"find": finder.find, "look": look, "bring_back": bring_back, **ops}


class ProcessFinder:
    """Finds the processes of a session, and keeps the last result."""

    def __init__(self) -> None:
        self._about: tuple[ProcessId, str, frozenset[int]] | None = None
        self._members: list[members.Member] = []

    def find(self, root: dict[str, int], session: str, again: bool) -> dict[str, Any]:
        """Return the processes of a session, see :func:`members.session_members`.

        ``again`` says whether the same operation has called this method before. If the machine has
        the same pids as at that call, this method only reads the processes that it found then.
        """
        top = ProcessId(**root)
        about = (top, session, procfs.all_pids())
        if again and about == self._about:
            self._members = members.look_again(self._members)
        else:
            self._members = members.session_members(top, session, os.getppid())
        self._about = about
        return {
            "root": procfs.presence(top),
            "members": [asdict(member) for member in self._members],
        }


# ---------------------------------------------------------------------- self-test


def selftest(_out: int) -> dict[str, Handler]:
    """Write known bytes to the only visible device, and return the handlers that check them."""
    pattern = Pattern(seed=sys.argv[-1])
    return {"check": pattern.check, "over": pattern.over}


class Pattern:
    """Known bytes on the only visible device."""

    def __init__(self, seed: str) -> None:
        import random

        from cuda.bindings import driver

        self._driver = driver
        self._random = random.Random(seed)
        self._call(driver.cuInit, 0)
        device = self._call(driver.cuDeviceGet, 0)
        self._call(driver.cuCtxSetCurrent, self._call(driver.cuDevicePrimaryCtxRetain, device))
        self._memory = self._call(driver.cuMemAlloc, SIZE)
        # All checks use the same two buffers: the first use of new memory takes longer than a copy.
        self._pattern, self._found = bytearray(SIZE), bytearray(SIZE)
        for place in range(0, SIZE, _NOISE):
            self._pattern[place : place + _NUMBER] = (place // _NOISE).to_bytes(_NUMBER, "big")
        self._write()

    def _call(self, function: Any, *arguments: Any) -> Any:
        result, *values = function(*arguments)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverError(f"{function.__name__} returned {result.name}.")
        return values[0] if values else None

    def _write(self) -> None:
        # All pieces get the same random bytes, because new random bytes for each piece would take
        # much longer.
        noise = self._random.randbytes(_NOISE - _NUMBER)
        for place in range(0, SIZE, _NOISE):
            self._pattern[place + _NUMBER : place + _NOISE] = noise
        self._call(self._driver.cuMemcpyHtoD, self._memory, self._pattern, SIZE)

    def check(self) -> dict[str, Any]:
        """Compare the bytes on the device with the pattern; write new bytes for the next check."""
        self._call(self._driver.cuMemcpyDtoH, self._found, self._memory, SIZE)
        same = self._found == self._pattern
        self._write()
        return {"same": same}

    def over(self, size: int) -> dict[str, Any]:
        """Try to allocate ``size`` bytes, and free them again. Return the driver's result."""
        result, *pointer = self._driver.cuMemAlloc(size)
        if result == self._driver.CUresult.CUDA_SUCCESS:
            self._call(self._driver.cuMemFree, *pointer)
        return {"result": str(result.name)}


# ---------------------------------------------------------------------- start

_PROGRAMS: dict[str, Callable[[int], dict[str, Handler]]] = {
    "monitor": monitor,
    "worker": worker,
    "selftest": selftest,
}


def main() -> None:
    """Run the program that the arguments name."""
    name, *rest = sys.argv[1:]
    if name == "packages":
        from .interpreter import report

        print(json.dumps(report()))
        return
    die_with_parent(int(rest[0]))
    out = claim_stdout()
    try:
        handlers = _PROGRAMS[name](out)
    except (DriverError, ImportError, RuntimeError) as error:
        emit(out, {"event": "ready", "problem": str(error)})
        return
    emit(out, {"event": "ready", "problem": ""})
    serve(out, handlers)


if __name__ == "__main__":
    main()
