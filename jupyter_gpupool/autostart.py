# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Find the broker, or start one for this user: what every provisioner does first.

Standard library and traitlets only; the broker is another process, never an import.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any, Mapping

from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString, LazyConfigValue

from .endpoint import MACHINE_SOCKET, check_path, find_socket, is_machine_path
from .errors import BrokerUnavailable, Code
from .starting import answers, broker_environment, launch, make_folder, only_one, revive_locked
from .startrecord import START_TIMEOUT

#: Seconds for the service manager to bring the machine's broker back before a kernel is refused.
SERVICE_TIMEOUT = 15.0

#: Seconds in which a living broker has put back a socket that was deleted.
JOIN_TIMEOUT = 5.0

_LOG = logging.getLogger("jupyter_gpupool.autostart")


def ensure_broker(
    settings_overrides: Config | Mapping[str, Any] | None = None,
    socket: str = "",
    *,
    timeout: float = START_TIMEOUT,
) -> Path:
    """Return the socket of a living broker; start this user's own if there is none.

    Called by the provisioner before each kernel, and by the demo. Blocks while a broker starts;
    of several callers at once, in any processes, one starts it and the others wait for it. A
    broker that has died is started again with its own configuration: kernels may depend on it.

    Parameters
    ----------
    settings_overrides:
        The caller's own configuration; its section ``GPUPool`` goes to a broker started here, and
        only to that: a broker that already runs, or is started again, keeps its own.
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
    if answers(path):
        return path
    if path == MACHINE_SOCKET:
        return _wait_for_service(path, min(timeout, SERVICE_TIMEOUT))
    give_up = time.monotonic() + timeout
    make_folder(path.parent)
    with only_one(path, give_up):
        if answers(path) or _revived(path, give_up):  # somebody was faster
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
    overrides: Config | Mapping[str, Any] | None,
    give_up: float,
) -> Path:
    """Return the socket of the broker that this user's living kernels depend on, started again.

    That is at ``home``, with the configuration it had, or else with this caller's. Only where
    nothing can listen at ``home`` any more a broker at ``path`` takes over the sessions.
    """
    _LOG.warning("GPU pool: %s It is started there, and this server uses it.", error.message)
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
            "GPU pool: %s The broker at %s takes over the kernels' sessions: restart those kernels "
            "to use a GPU in them again.", problem.message, path,
        )  # fmt: skip
    _start(path, overrides, give_up, "--take-over")
    return path


def _join(path: Path, error: BrokerUnavailable, give_up: float) -> Path:
    """Return the socket of the living broker because of which a second one did not start.

    It may just be putting back a socket that a logout has deleted.
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
    """Start a broker that has died as it was; False if there is none, or it does not start."""
    try:
        return revive_locked(path, give_up)
    except BrokerUnavailable as error:
        # What it was started with may be gone for good. Kernels that depend on it are not lost by
        # another configuration: a broker that does not reach their devices, or uses another
        # journal than the one that they are in, does not start.
        _LOG.warning("GPU pool: %s Trying with this server's own configuration.", error)
        return False


def _start(
    path: Path, overrides: Config | Mapping[str, Any] | None, give_up: float, *options: str
) -> None:
    """Start a broker with the caller's configuration."""
    command = [sys.executable, "-m", "jupyter_gpupool.broker", "--socket", str(path), *options]
    section = _section(overrides)
    if section:
        command += ["--config", str(_write_config(path.with_suffix(".config.json"), section))]
    launch(path, command, broker_environment(os.environ), give_up)


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
            code=Code.CONFIG,
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
