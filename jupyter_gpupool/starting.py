# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Find the broker, start it for this user, or restart a dead one with its own options.

All starts of a broker use this module. The provisioner, the server extension and the command line
call it; agents and guards run it as a program (:func:`jupyter_gpupool.startrecord.launcher`).
Standard library only.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import stat
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

from . import startfailures, startrecord
from .client import Client, first_answer
from .daemon import broker_environment, launch, open_log
from .endpoint import (
    MACHINE_SOCKET,
    START_TIMEOUT,
    check_path,
    check_socket,
    find_socket,
    is_machine_path,
)
from .errors import BrokerUnavailable, Code, GPUPoolError
from .startfailures import Failures
from .startrecord import log_path

#: A caller that is not ``patient`` does not wait until another process has started the broker. It
#: tries to get the lock for only this many seconds.
_LOOKS = 1.0

#: The service manager must restart the machine's broker within this many seconds.
SERVICE_TIMEOUT = 15.0

#: A living broker puts a deleted socket back within this many seconds.
JOIN_TIMEOUT = 5.0

_LOG = logging.getLogger("jupyter_gpupool.starting")


def ensure_broker(
    settings_overrides: Mapping[str, Any] | None = None,
    socket: str = "",
    *,
    timeout: float = START_TIMEOUT,
) -> Path:
    """Return the socket of a living broker; start this user's own broker if none lives.

    The provisioner calls this function before each kernel; the demo calls it, too. The function
    blocks while a broker starts. If several callers, in any processes, need a broker at once, one
    of them starts it and the others wait. If a broker has died, this function restarts it with the
    dead broker's configuration, because kernels may depend on that broker.

    Parameters
    ----------
    settings_overrides:
        The caller's configuration. A new broker gets its section ``GPUPool``. A running or
        restarted broker keeps its own configuration.
    socket:
        The configured socket, see :func:`jupyter_gpupool.endpoint.find_socket`.
    timeout:
        Seconds to wait for a start.

    Raises
    ------
    BrokerUnavailable
        With the broker's own message if it could not start.
    """
    path = find_socket(socket)
    check_path(path)
    if answers(path):
        return path
    if path == MACHINE_SOCKET:
        return _wait_for_service(path, min(timeout, SERVICE_TIMEOUT))
    give_up = time.monotonic() + timeout
    make_folder(path.parent)
    with only_one(path, give_up):
        if answers(path) or _revived(path, give_up):  # another process was faster
            return path
        try:
            _start(path, settings_overrides, give_up)
        except BrokerUnavailable as error:
            other = Path(error.details.get("socket") or path)
            if error.code == Code.ALREADY_RUNNING:
                return _join(other, error, give_up)
            if error.code == Code.SESSIONS_ELSEWHERE:
                return _bring_back(other, path, error, settings_overrides, give_up)
            raise
    return path


def _bring_back(
    home: Path,
    path: Path,
    error: BrokerUnavailable,
    overrides: Mapping[str, Any] | None,
    give_up: float,
) -> Path:
    """Restart the broker that this user's living kernels depend on; return its socket.

    The broker starts at ``home`` with its own configuration. If that fails, it starts with the
    caller's configuration. If no process can listen at ``home`` any more, a broker at ``path``
    takes over the sessions.
    """
    _LOG.warning("GPU pool: %s This server starts that broker again and uses it.", error.message)
    if is_machine_path(home):
        return _wait_for_service(home, max(0.0, give_up - time.monotonic()))
    try:
        make_folder(home.parent)
        with only_one(home, give_up):
            if not answers(home) and not _revived(home, give_up):
                _start(home, overrides, give_up)
        return home
    except BrokerUnavailable as problem:
        if problem.code == Code.ALREADY_RUNNING:
            return _join(Path(problem.details.get("socket") or home), problem, give_up)
        if problem.code != Code.BAD_SOCKET:
            raise
        _LOG.warning(
            "GPU pool: %s So the broker at %s takes over the sessions of your kernels. Restart "
            "each of these kernels to use a GPU in it again.", problem.message, path,
        )  # fmt: skip
    _start(path, overrides, give_up, "--take-over")
    return path


def _join(path: Path, error: BrokerUnavailable, give_up: float) -> Path:
    """Wait for the living broker that prevented a second start; return its socket.

    If a logout has deleted that broker's socket, the broker makes the socket again soon.
    """
    give_up = min(give_up, time.monotonic() + JOIN_TIMEOUT)
    while not answers(path):
        if time.monotonic() > give_up:
            raise error
        time.sleep(0.05)
    return path


def _wait_for_service(path: Path, timeout: float) -> Path:
    """Wait until the service manager has started the machine's broker again."""
    give_up = time.monotonic() + timeout
    while time.monotonic() < give_up:
        time.sleep(0.2)
        if answers(path):
            return path
    raise BrokerUnavailable(
        f"This machine's GPU pool broker at {path} does not answer.",
        code=Code.NO_BROKER,
        next_step="Ask your admin to look at it (systemctl status gpupool).",
    )


def _revived(path: Path, give_up: float) -> bool:
    """Restart a dead broker with its own options; return whether it serves."""
    try:
        return revive_locked(path, give_up)
    except BrokerUnavailable as error:
        # Perhaps the broker's own options no longer work. So return False: the caller then tries
        # its own configuration. This is safe, because a broker does not start if it cannot reach
        # the kernels' devices, or if its journal lacks the kernels' sessions. If the disk is full,
        # another configuration does not help.
        if error.details.get("cause") == Code.NO_SPACE:
            raise
        _LOG.warning("GPU pool: %s This server tries again with its own configuration.", error)
        return False


def _start(path: Path, overrides: Mapping[str, Any] | None, give_up: float, *options: str) -> None:
    """Start a broker with the caller's configuration."""
    command = [sys.executable, "-m", "jupyter_gpupool.broker", "--socket", str(path), *options]
    section = _section(overrides)
    if section:
        command += ["--config", str(_write_config(path.with_suffix(".config.json"), section))]
    launch(path, command, broker_environment(os.environ), give_up)


def _section(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the section GPUPool as JSON values.

    Raises
    ------
    BrokerUnavailable
        If JSON cannot express a value.
    """
    found = {} if overrides is None else dict(overrides.get("GPUPool", {}))
    values: dict[str, Any] = {}
    for name, value in found.items():
        # If code reads an option that a traitlets Config does not have, the Config stores an empty
        # LazyConfigValue for it. This is not a value, so leave it out. Leave out functions, too:
        # they come from a configuration file, and the broker reads this file itself.
        if type(value).__name__ != "LazyConfigValue" and not callable(value):
            values[name] = value
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise BrokerUnavailable(
            f"c.GPUPool has a value that cannot be passed to the broker: {error}.",
            code=Code.CONFIG,
            next_step="Use plain numbers, texts, lists and dicts.",
        ) from None
    return values


def _write_config(path: Path, section: Mapping[str, Any]) -> Path:
    """Write the file for ``--config`` so that only this user can read or replace it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "w") as file:
        json.dump({"GPUPool": section}, file)
    temporary.rename(path)
    return path


# ---------------------------------------------------------------------- a dead broker


def answers(path: Path) -> bool:
    """Return whether a trustworthy broker answers at ``path``.

    Raises
    ------
    BrokerUnavailable
        If another user controls the socket.
    """
    try:
        check_socket(path)
        with Client(path) as client:
            client.call("ping", timeout=first_answer(path))
    except BrokerUnavailable as error:
        if error.code == Code.BAD_SOCKET:
            raise
        return False
    return True


def revive(
    path: Path, *, timeout: float = START_TIMEOUT, patient: bool = True, copy: str = ""
) -> bool:
    """Restart the broker at ``path`` if it has died; return whether a broker serves there now.

    The function blocks while the broker starts. If several callers, in any processes, want to
    restart the broker, one of them restarts it. Of the others, a ``patient`` caller waits. Any
    other caller waits at most :data:`_LOOKS` seconds, and then gets False. The function never
    starts the machine's broker or a broker that ended normally. ``copy`` is the path of the
    record's second copy. The function uses this copy if the record was deleted, for example
    together with the socket's folder.

    Raises
    ------
    BrokerUnavailable
        If the broker does not start. The message has the reason and the path of its log.
    """
    if not startrecord.can_revive(path):
        if not startrecord.can_restore(path, copy):
            return False
        make_folder(path.parent)
    give_up = time.monotonic() + timeout
    try:
        # Try to get the lock more than once: a process that only checks the lock also holds it for
        # a moment.
        with only_one(path, give_up if patient else time.monotonic() + _LOOKS):
            return answers(path) or revive_locked(path, give_up, copy)
    except _Busy:
        return False


def revive_locked(path: Path, give_up: float, copy: str = "") -> bool:
    """Start the broker at ``path`` from its record; return False if there is no record.

    The caller holds the lock for starts. The function tries again after growing pauses, until
    :data:`startfailures.ATTEMPTS` starts in a row have failed. If the record was deleted, the
    function restores it from its ``copy`` (see :func:`revive`).

    Raises
    ------
    BrokerUnavailable
        If the broker does not start, or failed recently and the next attempt is not due yet.
    """
    if startrecord.restore(path, copy):
        _LOG.warning("The start record of the broker at %s was deleted; it is restored", path)
    while True:
        known = startfailures.read_failures(path)
        try:
            record = startrecord.read_record(path)
        except startrecord.BadRecord as error:
            raise _failed(path, known, error.message, error.next_step, final=True) from None
        if record is None:
            return False
        if known.given_up and known.pause(time.time()):
            raise _unavailable(known)
        known = startfailures.note_death(path, known, record)
        if startfailures.too_often(known):
            message = (
                f"{startfailures.MOST_DEATHS} brokers in a row crashed, or ended before they "
                "served a kernel."
            )
            if record.crashed:
                message += f" The last error was: {record.crashed}"
            raise _failed(path, known, message, "", final=True)
        time.sleep(known.delay(time.time()))
        try:
            launch(path, record.command, record.environment, give_up)
        except BrokerUnavailable as error:
            if error.code == Code.ALREADY_RUNNING:
                return False  # the broker lives but does not answer: a second broker would not help
            if error.code == Code.KILLED and time.monotonic() < give_up:
                # Another process killed the broker. Count this as a death, and not as a failed
                # start.
                startfailures.note_killed(path, known)
                continue
            failed = _failed(path, known, error.message, error.next_step, code=error.code)
            if startfailures.read_failures(path).given_up or time.monotonic() > give_up:
                raise failed from None
            continue
        startfailures.note_start(path, known)
        return True


def _failed(
    path: Path,
    known: Failures,
    message: str,
    next_step: str,
    *,
    code: str = "",
    final: bool = False,
) -> BrokerUnavailable:
    """Write a failure where all waiting callers read it; return the error for it."""
    log = f"See its log: {log_path(path)}"
    step = next_step if log in next_step else f"{next_step} {log}".strip()
    return _unavailable(
        startfailures.note_failure(path, known, message, step, code=code, final=final)
    )


def _unavailable(known: Failures) -> BrokerUnavailable:
    return BrokerUnavailable(
        known.sentence,
        code=Code.START_FAILED,
        next_step=known.next_step,
        details={"cause": known.code},
    )


class _Busy(BrokerUnavailable):
    """Another process is starting the broker."""


@contextmanager
def only_one(socket: Path, give_up: float) -> Iterator[None]:
    """Hold the lock for starts of the broker at ``socket``: only one process can hold it.

    Raises
    ------
    BrokerUnavailable
        If another process still holds the lock at ``give_up`` (monotonic time).
    """
    path = startrecord.lock_path(socket)
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BrokerUnavailable(
            f"The lock file {path} cannot be opened ({error.strerror}).",
            code=Code.BAD_SOCKET,
            next_step="Set GPUPOOL_SOCKET to a path in a folder of your own.",
        ) from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise _Busy(
                        "Another process is starting the GPU pool broker and has not finished.",
                        next_step=f"See its log: {log_path(socket)}",
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def make_folder(folder: Path) -> None:
    """Make the folder of a socket, private to this user.

    Raises
    ------
    BrokerUnavailable
        If it cannot be created, or belongs to another user.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise BrokerUnavailable(
            f"The folder {folder} for the broker socket cannot be made ({error.strerror}).",
            code=Code.BAD_SOCKET,
            next_step="Set GPUPOOL_SOCKET to a path in a folder of your own.",
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise BrokerUnavailable(
            f"The folder {folder} for the broker socket is not yours.",
            code=Code.BAD_SOCKET,
            next_step="Remove it, or set GPUPOOL_SOCKET to a path in a folder of your own.",
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Restart the broker at the given socket, for an agent or a guard; return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    path = Path(arguments[0])
    # The broker must not inherit a kernel's process group, signal mask or ignored signals.
    with suppress(OSError):
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    if is_machine_path(path):
        return 1
    try:
        return 0 if revive(path, patient=False, copy="".join(arguments[1:2])) else 1
    except GPUPoolError as error:
        with suppress(OSError), open_log(log_path(path)) as log:
            os.write(log, f"{time.strftime('%F %T')} {error}\n".encode())
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
