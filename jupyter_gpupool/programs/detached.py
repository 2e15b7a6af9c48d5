# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Detached commands, which continue without a terminal: run them, show them, stop them.

A detached command has a supervisor. The supervisor is a daemon: it has its own process session, no
terminal and no parent. It runs the command as ``jupyter gpupool run`` does, but gives the command
its own process session, so that ``stop`` can signal the command's process group. The supervisor
stores the command's output and exit code.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Sequence

from .. import local_machine
from ..client import Client
from ..errors import Code, GPUPoolError, RefusedError
from ..procfs import open_pidfd
from . import runfiles
from .execution import Run, RunOptions
from .opening import ProgramSession
from .progress import Progress
from .runfiles import LogWriter, RunRecord
from .terminal import NOT_RUN, CommandProcess

#: After the end of the command, its child processes may still write. The supervisor copies to the
#: log the output that is ready then, for at most this many seconds.
DRAIN = 0.5

#: Seconds that the broker may take to make a command safe to kill.
RETIRE_TIMEOUT = 12.0

#: ``run`` waits at most this many seconds for the supervisor's report. In this time, the broker may
#: have to start, and opens the session.
OPEN_TIMEOUT = 60.0


def start(command: Sequence[str], options: RunOptions, name: str) -> str:
    """Start ``command`` in the background; return its name when the pool has accepted it.

    When this returns, the pool has opened the command's session. If the command holds its slice
    from start to end, it also has the slice or a place in the queue. If the supervisor reports
    neither within OPEN_TIMEOUT seconds, this returns, too.

    Raises
    ------
    RefusedError
        If the name is taken, the pool refuses, or there is no broker.
    """
    runfiles.clean(time.time())
    name = runfiles.claim(name, command)
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.setsid()
            if os.fork():
                # The supervisor comes from this second fork, so it is not the leader of its process
                # session. Only a leader can get a terminal.
                os._exit(0)
            os.close(reading)
            _supervise(command, replace(options, name=name, named=True), writing)
        finally:
            os._exit(NOT_RUN)
    os.close(writing)
    os.waitpid(between, 0)
    try:
        answer = _report(reading)
    finally:
        os.close(reading)
    if answer.get("ok"):
        return name
    with suppress(GPUPoolError):
        runfiles.remove(name)
    raise RefusedError(
        str(answer.get("message") or f"The supervisor of {name!r} ended at its start."),
        code=Code.of(answer.get("code"), Code.ERROR),
        next_step=str(answer.get("next_step") or ""),
    )


def _report(reading: int) -> dict[str, Any]:
    """Return the supervisor's report on its start; {"ok": True} if no report comes in time."""
    data, give_up = b"", time.monotonic() + OPEN_TIMEOUT
    while not data.endswith(b"\n"):
        left = give_up - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            return {"ok": True}  # the supervisor continues; `ps` and `logs` show the result
        chunk = os.read(reading, 65536)
        if not chunk:
            return {}
        data += chunk
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------- the supervisor


def _supervise(command: Sequence[str], options: RunOptions, report: int) -> NoReturn:
    """Run the command in the supervisor process. This function never returns."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    record = RunRecord(
        name=options.name,
        command=tuple(command),
        folder=str(Path.cwd()),
        boot=local_machine.boot_id(),
        supervisor=runfiles.this_process(),
        created=time.time(),
    )
    output, end = os.pipe()
    child = CommandProcess(command, alone=True, output=end)
    os.close(end)
    record = replace(record, process=runfiles.of_process(child.pid))
    runfiles.write(record)
    keeper = _RecordKeeper(record, options, report)
    log = LogWriter(options.name)
    pump = Pump(output, log)
    progress = Progress(pump.say, None, "[gpupool] ")
    run = Run(
        child, options, progress,
        on_open=keeper.opened, on_wait=keeper.taken, on_start=keeper.started,
    )  # fmt: skip
    code = NOT_RUN
    try:
        code = run.run()
    except Exception as error:
        pump.say(f"[gpupool] The supervisor failed and saves no more output: {error!r}\n")
    finally:
        pump.finish()
        keeper.ended(code, run.refused)
    os._exit(0)


class _RecordKeeper:
    """Writes the record of a command after each change, and reports the command's start."""

    def __init__(self, record: RunRecord, options: RunOptions, report: int) -> None:
        self._record = record
        self._options = options
        self._report = report

    def _change(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        with suppress(OSError):  # a full disk must not end the command
            runfiles.write(self._record)

    def _tell(self, **answer: Any) -> None:
        if self._report >= 0:
            with suppress(OSError):
                os.write(self._report, json.dumps(answer).encode() + b"\n")
            os.close(self._report)
            self._report = -1

    def opened(self, session: ProgramSession) -> None:
        self._change(state="waiting", session=session.id, socket=str(session.socket))
        if not self._options.holds_from_start(session):
            self.taken()

    def taken(self) -> None:
        self._tell(ok=True)

    def started(self) -> None:
        self._change(state="running", started=time.time())
        self.taken()

    def ended(self, code: int, refused: GPUPoolError | None) -> None:
        reason = refused.message if refused is not None else ""
        self._change(state="ended", code=code, ended=time.time(), reason=reason)
        # Send the report after the last write of the record: when ``run`` gets the report of a
        # refusal, ``run`` removes the record.
        if refused is not None:
            self._tell(message=refused.message, code=refused.code, next_step=refused.next_step)
        self._tell(ok=True)


class Pump:
    """Copies the output of a command into its log, in a thread."""

    def __init__(self, output: int, log: LogWriter) -> None:
        self._output = output
        self._log = log
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpupool-log", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        """Add a line from the supervisor to the log."""
        with self._lock:
            self._log.write(text.encode())

    def finish(self) -> None:
        """Copy the output that is left after the command's end, and end the thread."""
        self._over.set()
        self._thread.join()
        with self._lock:
            self._log.close()

    def _run(self) -> None:
        until = None
        while True:
            if until is None and self._over.is_set():
                until = time.monotonic() + DRAIN
            ready = select.select([self._output], [], [], 0.0 if until else 0.2)[0]
            if not ready:
                if until is not None:
                    break
                continue
            chunk = os.read(self._output, 1 << 16)
            if not chunk or (until is not None and time.monotonic() > until):
                break
            with self._lock:
                self._log.write(chunk)
        os.close(self._output)


# ---------------------------------------------------------------------- see and stop


def stop(name: str, number: int, after: float) -> RunRecord:
    """Send a command a signal, and SIGKILL after ``after`` seconds; return its final record.

    The signal goes to the command's process group, as Ctrl-C of a terminal does.

    Raises
    ------
    RefusedError
        If the command does not run.
    """
    record = runfiles.find(name)
    if not record.lives:
        raise RefusedError(
            f"{name} does not run: {record.describe(time.time())}.",
            code=Code.NOT_RUNNING,
            next_step=f"Its output: jupyter gpupool logs {name}",
        )
    _signal(record, number)
    ended = wait(name, after)
    if ended is None:
        with suppress(GPUPoolError), Client(Path(record.socket)) as client:
            # Some drivers hang if a process is killed that was once suspended. After this call, the
            # broker has made the command safe to kill.
            client.call("retire", session=record.session, timeout=RETIRE_TIMEOUT)
        _signal(record, signal.SIGKILL)
        ended = wait(name, None)
    assert ended is not None
    return ended


def _signal(record: RunRecord, number: int) -> None:
    """Send a signal to a command's process group, unless the command has ended."""
    if record.at_work:
        with suppress(ProcessLookupError):
            os.killpg(record.process[0], number)


def wait(name: str, seconds: float | None) -> RunRecord | None:
    """Wait until a command has ended; return its record, None if this takes too long.

    Raises
    ------
    RefusedError
        If there is no such command.
    """
    give_up = None if seconds is None else time.monotonic() + seconds
    while True:
        record = runfiles.find(name)
        if not record.lives:
            return record
        left = None if give_up is None else give_up - time.monotonic()
        if left is not None and left <= 0:
            return None
        # The supervisor writes the end of the command into the record, and then ends itself. So
        # wait for the end of the supervisor. If the supervisor is dead already, wait for the
        # command.
        watched = record.supervisor[0] if record.supervised else record.process[0]
        descriptor = open_pidfd(watched)
        if descriptor is None:
            time.sleep(0.1)
            continue
        try:
            select.select([descriptor], [], [], min(left, 10.0) if left is not None else 10.0)
        finally:
            os.close(descriptor)


def exit_code(record: RunRecord) -> int:
    """Return the exit code of a command that has ended; NOT_RUN if its record has none."""
    return NOT_RUN if record.code is None else record.code


def copy_log(name: str, *, follow: bool) -> int:
    """Write the log of a command to standard output; return 0.

    Raises
    ------
    RefusedError
        If there is no such command.
    """
    runfiles.find(name)
    out = sys.stdout.buffer
    for chunk in runfiles.follow_log(name) if follow else runfiles.read_log(name):
        if chunk:
            out.write(chunk)
        out.flush()
    return 0
