# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Start a broker as a daemon that writes a log, and wait until the broker listens.

Standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from . import procfs
from .errors import BrokerUnavailable, Code
from .guard.install import without_guard
from .startrecord import SESSION_VARIABLES, log_path

#: The caller waits at most this many seconds for the end of a broker that failed to start.
_END = 10.0

#: Maximum bytes of the log. If the log is longer, the next start of a broker begins a new log.
MAX_LOG = 4 << 20

#: The caller starts this program, and this program starts the broker. So the broker is not a child
#: of the caller. If it were a child of a notebook, the end or suspend of the notebook would also
#: end or suspend the broker. This program also unblocks all signals, because the caller may block
#: some signals (`jupyter gpupool run` does), and the broker would inherit this.
_BETWEEN = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_SETMASK, ())
report, command = int(sys.argv[1]), sys.argv[2:]
if os.fork():
    os._exit(0)
os.setsid()
os.set_inheritable(report, False)
os.write(report, b"%d\\n" % os.getpid())
try:
    os.execv(command[0], command)
except OSError as error:
    os.write(report, b"%d\\n" % error.errno)
os._exit(1)
"""


def launch(path: Path, command: Sequence[str], env: Mapping[str, str], give_up: float) -> None:
    """Start a broker as a daemon, in its own process session (setsid), and wait until it listens.

    Raises
    ------
    BrokerUnavailable
        If the broker did not start. The error has the broker's own message.
    """
    log_file = log_path(path)
    reading, writing = os.pipe()
    try:
        with open_log(log_file) as log:
            broker = _spawn([*command, "--ready-fd", str(writing)], env, log, writing, give_up)
    except TimeoutError:
        os.close(reading)
        raise _late(log_file) from None
    except OSError as error:
        os.close(reading)
        raise BrokerUnavailable(
            f"The GPU pool broker could not be started ({error.strerror}): {command[0]}.",
            next_step=f"See its log: {log_file}",
        ) from None
    finally:
        os.close(writing)
    try:
        answer = _read_line(reading, give_up)
    finally:
        os.close(reading)
    if answer is not None and answer.get("ok"):
        return
    if answer is None:
        with suppress(ProcessLookupError):
            os.kill(broker, signal.SIGKILL)
    _wait_end(broker)
    if answer is None:
        raise _late(log_file)
    raise BrokerUnavailable(
        str(answer.get("message") or "The GPU pool broker was killed as it started."),
        code=Code.of(answer.get("code"), Code.KILLED),
        next_step=str(answer.get("next_step") or f"See its log: {log_file}"),
        details={"socket": str(answer.get("socket") or "")},
    )


def _late(log_file: Path) -> BrokerUnavailable:
    return BrokerUnavailable(
        "The GPU pool broker did not start in time and was ended.",
        code=Code.START_TIMEOUT,
        next_step=f"See its log: {log_file}",
    )


def _spawn(
    command: Sequence[str], env: Mapping[str, str], log: int, ready: int, give_up: float
) -> int:
    """Start ``command`` by double fork; return the pid of the started program.

    Raises
    ------
    TimeoutError
        If the program does not run before ``give_up`` (monotonic time). In this case the function
        has killed the program.
    OSError
        If the program cannot be run.
    """
    _reap()
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as report:
        try:
            between = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BETWEEN, str(writing), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=dict(env),
                pass_fds=(writing, ready),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        lines, late = _read_until(report.fileno(), give_up)  # until the broker's program runs
        if late:
            for pid in (between.pid, *map(int, lines[:1])):  # each leads its own process group
                with suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        between.wait()
    if late:
        raise TimeoutError
    if not lines:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if len(lines) > 1:
        code = int(lines[1])
        raise OSError(code, os.strerror(code))
    pid = int(lines[0])
    found = procfs.read_stat(pid)
    if found is not None and found.parent == os.getpid():
        _OURS.append(pid)
    return pid


def _read_until(descriptor: int, give_up: float) -> tuple[list[bytes], bool]:
    """Return the words read until the end of the file, and whether ``give_up`` came before it."""
    data = b""
    while True:
        left = give_up - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return data.split(), True
        chunk = os.read(descriptor, 4096)
        if not chunk:
            return data.split(), False
        data += chunk


#: The pids of brokers that Linux has made children of this process. Linux does this only if this
#: process is the first process of its container, or a subreaper (PR_SET_CHILD_SUBREAPER).
_OURS: list[int] = []


def _reap() -> None:
    """Reap the brokers in ``_OURS`` that have ended. Otherwise they would stay as zombies."""
    for pid in [*_OURS]:
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                continue
        with suppress(ValueError):  # another thread has reaped it
            _OURS.remove(pid)


def _wait_end(pid: int) -> None:
    """Wait (at most _END seconds) for the end of a broker that failed to start.

    If the broker is in ``_OURS``, also reap it. The next broker needs the locks that this broker
    releases at its end.
    """
    descriptor = procfs.open_pidfd(pid)
    if descriptor is not None:
        with suppress(OSError, ValueError):
            select.select([descriptor], [], [], _END)
        os.close(descriptor)
    _reap()


def broker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` for a broker: without session and guard, with this package on its path.

    This process may run in a session. The broker outlives the session, so the guard of the session
    must not be loaded into the broker.
    """
    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    found = {**without_guard(environ), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
    for name in SESSION_VARIABLES:
        found.pop(name, None)
    return found


def _read_line(descriptor: int, give_up: float) -> dict[str, Any] | None:
    """Return the broker's report; {} if it ended without a report, None if ``give_up`` came."""
    data = b""
    while not data.endswith(b"\n"):
        left = give_up - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return {}
        data += chunk
    found = json.loads(data)
    return found if isinstance(found, dict) else {}


@contextmanager
def open_log(path: Path) -> Iterator[int]:
    """Open the log for appending; if it has more than MAX_LOG bytes, begin a new file."""
    try:
        if path.stat().st_size > MAX_LOG:
            path.replace(path.with_name(path.name + ".old"))
    except OSError:
        pass
    descriptor = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    try:
        yield descriptor
    finally:
        os.close(descriptor)
