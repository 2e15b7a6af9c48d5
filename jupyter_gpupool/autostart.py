# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Find the broker, or start one for this user: what every provisioner does first.

Standard library and traitlets only; the broker is another process, never an import.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import stat
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator, Mapping

from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString, LazyConfigValue

from .client import Client
from .endpoint import MACHINE_SOCKET, check_path, check_socket, find_socket
from .errors import BrokerUnavailable
from .guard.install import without_guard

#: Seconds for a broker to start: it loads the driver and tests every device.
START_TIMEOUT = 90.0

#: Bytes of log after which a new one is begun when a broker is started.
MAX_LOG = 4 << 20


def ensure_broker(
    settings_overrides: Config | Mapping[str, Any] | None = None,
    socket: str = "",
    *,
    timeout: float = START_TIMEOUT,
) -> Path:
    """Return the socket of a living broker; start this user's own if there is none.

    Called by the provisioner before each kernel, and by the demo. Blocks while a broker starts;
    of several callers at once, in any processes, one starts it and the others wait for it.

    Parameters
    ----------
    settings_overrides:
        The caller's own configuration; its section ``GPUPool`` goes to a broker started here, and
        only to that: a broker that already runs keeps its own.
    socket:
        Where to look, see :func:`jupyter_gpupool.endpoint.find_socket`.
    timeout:
        Seconds to wait for a start.

    Raises
    ------
    BrokerUnavailable
        With the broker's own words if it could not start.
    """
    path = find_socket(socket)
    check_path(path)
    if _answers(path):
        return path
    if path == MACHINE_SOCKET and os.geteuid() != 0:
        raise BrokerUnavailable(
            f"This machine's GPU pool broker at {path} does not answer.",
            code="no-broker",
            next_step="Ask your admin to look at it (systemctl status gpupool).",
        )
    give_up = time.monotonic() + timeout
    _make_folder(path.parent)
    with _only_one(path.with_name(path.name + ".start"), give_up):
        if not _answers(path):  # nobody was faster
            _start(path, settings_overrides, give_up)
    return path


def _answers(path: Path) -> bool:
    """Return whether a broker that may be trusted answers at ``path``.

    Raises
    ------
    BrokerUnavailable
        If what is there must not be used.
    """
    try:
        check_socket(path)
        with Client(path) as client:
            client.call("ping")
    except BrokerUnavailable as error:
        if error.code == "bad-socket":
            raise
        return False
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise BrokerUnavailable(
            f"The folder {folder} for the broker socket cannot be made ({error.strerror}).",
            code="bad-socket",
            next_step="Set GPUPOOL_SOCKET to a path in a folder of your own.",
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
        raise BrokerUnavailable(
            f"The folder {folder} for the broker socket is not yours.",
            code="bad-socket",
            next_step="Remove it, or set GPUPOOL_SOCKET to a path in a folder of your own.",
        )


@contextmanager
def _only_one(path: Path, give_up: float) -> Iterator[None]:
    """Hold a lock between processes."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BrokerUnavailable(
            f"{path} cannot be used as a lock ({error.strerror}).",
            code="bad-socket",
            next_step="Set GPUPOOL_SOCKET to a path in a folder of your own.",
        ) from None
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise BrokerUnavailable(
                        "Somebody else is starting the GPU pool broker and does not finish.",
                        next_step=f"See the log beside {path}.",
                    ) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(lock)


def _start(path: Path, overrides: Config | Mapping[str, Any] | None, give_up: float) -> None:
    """Start a broker of its own session and wait until it listens."""
    log_path = path.with_suffix(".log")
    command = [sys.executable, "-m", "jupyter_gpupool.broker", "--socket", str(path)]
    section = _section(overrides)
    if section:
        command += ["--config", str(_write_config(path.with_suffix(".config.json"), section))]
    reading, writing = os.pipe()
    try:
        with _open_log(log_path) as log:
            broker = subprocess.Popen(
                [*command, "--ready-fd", str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=_environment(),
                pass_fds=(writing,),
                start_new_session=True,
            )
    except OSError as error:
        os.close(reading)
        raise BrokerUnavailable(
            f"The GPU pool broker could not be started ({error.strerror}): {log_path}.",
        ) from None
    finally:
        os.close(writing)
    try:
        answer = _read_line(reading, give_up)
    finally:
        os.close(reading)
    if answer is None:
        broker.kill()
        broker.wait()
        raise BrokerUnavailable(
            "The GPU pool broker did not start in time and was ended.",
            code="start-timeout",
            next_step=f"See its log: {log_path}",
        )
    if answer.get("ok"):
        # It is ours to wait for, or it would be a zombie when it ends; but nobody waits.
        _forget(broker)
        return
    broker.wait()
    raise BrokerUnavailable(
        str(answer.get("message") or "The GPU pool broker ended at its start."),
        code=str(answer.get("code") or "start-failed"),
        next_step=str(answer.get("next_step") or f"See its log: {log_path}"),
    )


def _environment() -> dict[str, str]:
    """Return our environment for the broker, so that it finds this very package.

    It outlives the session that we may be in, and is not to be governed by it.
    """
    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**without_guard(os.environ), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _read_line(descriptor: int, give_up: float) -> dict[str, Any] | None:
    """Return the broker's report, {} if it ended without one, None if it took too long."""
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


_STARTED: list[subprocess.Popen[bytes]] = []


def _forget(broker: subprocess.Popen[bytes]) -> None:
    """Keep the handle: a collected one warns, and each start collects those that have ended."""
    _STARTED[:] = [process for process in _STARTED if process.poll() is None]
    _STARTED.append(broker)


def _section(overrides: Config | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the section GPUPool as JSON values.

    Raises
    ------
    BrokerUnavailable
        If it holds what JSON has no form for.
    """
    found = {} if overrides is None else dict(overrides.get("GPUPool", {}))
    values: dict[str, Any] = {}
    for name, value in found.items():
        if isinstance(value, DeferredConfigString):
            values[name] = str(value)
        elif isinstance(value, LazyConfigValue):
            continue  # an empty trace of somebody having looked at the option
        else:
            values[name] = value
    try:
        json.dumps(values)
    except (TypeError, ValueError) as error:
        raise BrokerUnavailable(
            f"c.GPUPool cannot be handed to the broker: {error}.",
            code="config",
            next_step="Use plain numbers, texts, lists and dicts.",
        ) from None
    return values


def _write_config(path: Path, section: Mapping[str, Any]) -> Path:
    """Write what the broker reads with --config; nobody else may read or replace it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "w") as file:
        json.dump({"GPUPool": section}, file)
    temporary.rename(path)
    return path


@contextmanager
def _open_log(path: Path) -> Iterator[int]:
    """Open the log for appending; begin a new one if it has become long."""
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
