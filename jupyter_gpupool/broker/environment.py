# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's own process: the driver that it sees, its files and limits, its log."""

from __future__ import annotations

import json
import logging
import os
import resource
import time
from pathlib import Path
from typing import Callable, Hashable, Mapping

from .. import procfs
from ..config import BrokerSettings
from ..errors import Code, DriverError
from ..local_machine import removed_at_logout
from .transport.listener import is_machine_wide


def machine_environment(
    settings: BrokerSettings, socket: Path, journal: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that, over ``base``, show a process the pool's GPUs.

    None for the real driver.

    This module alone chooses between the real and the emulated driver: the rest of
    the code cannot tell them apart, and NVIDIA's own client libraries find either through these.
    """
    if not settings.emulate:
        return {}
    from .. import emulation

    folder = emulated_folder(socket, journal)
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_machine_wide(socket):
        # The emulated devices are files that each process using them writes: every user enters, and
        # finds what this broker's own processes have made; nobody else makes anything.
        folder.chmod(0o711)
    try:
        return emulation.environment(settings.emulate, folder, base)
    except emulation.EmulatorError as error:
        raise DriverError(
            str(error), code=Code.NO_EMULATOR, next_step="Or unset c.GPUPool.emulate."
        ) from None


def device_files(settings: BrokerSettings, socket: Path, journal: Path) -> str:
    """Return how the paths of the emulated GPUs' device files begin; "" for real ones."""
    if not settings.emulate:
        return ""
    from .. import emulation

    return emulation.device_files(emulated_folder(socket, journal))


def version_file(settings: BrokerSettings, socket: Path, journal: Path) -> Path | None:
    """Return where the emulated driver's kernel module says its version; None: the real one.

    The emulated driver has no module, so there is no such file, unless a test pretends one.
    """
    return emulated_folder(socket, journal) / "version" if settings.emulate else None


def emulated_folder(socket: Path, journal: Path) -> Path:
    """Return the folder of the emulated devices: beside the socket, or where a logout leaves it."""
    lasting = journal.with_suffix(".emulated")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if lasting.exists():
        return lasting  # of the broker before, whose XDG_RUNTIME_DIR may have been another
    if removed_at_logout(socket) or (runtime and Path(runtime) in socket.parents):
        return lasting
    return socket.with_name(socket.name + ".emulated")


def report(descriptor: int, message: Mapping[str, object]) -> None:
    """Tell who started us how it went, as one line of JSON, once."""
    try:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
        os.close(descriptor)
    except OSError:
        pass  # it did not wait


#: Fewer open files than this are worth a word.
FEW_DESCRIPTORS = 1024

#: Open files that a broker needs at most: three for each of thousands of sessions.
DESCRIPTORS = 1 << 16


def raise_descriptor_limit(log: logging.Logger) -> None:
    """Allow as many open files as we may: a session takes two or three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, DESCRIPTORS)  # above nr_open the kernel would refuse it
    for most in (max(hard, DESCRIPTORS), hard):  # only root may have more than the hard limit
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except (OSError, ValueError):
            continue
        soft = most
        break
    if soft < FEW_DESCRIPTORS:
        log.warning(
            "This broker may open %d files, enough for about %d kernels; raise its limit "
            "(LimitNOFILE, ulimit -n)", soft, soft // 3,
        )  # fmt: skip
    procfs.spare.keep()


#: Records of one cause in a PERIOD (seconds): of any, and of those that name a cause or carry a
#: traceback.
MOST, MOST_CAUSED = 100, 10
PERIOD = 60.0

#: Causes remembered at once.
MAX_CAUSES = 1000


class LogLimit(logging.Filter):
    """Bounds what one cause can write to the log, so that no client can fill root's disk.

    The next record that passes says how many were dropped.

    The cause is the record's text before its arguments are filled in. A record may add to that with
    ``extra={"cause": ...}``: of what one user does wrong, another's record must not be lost.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        #: By cause: the begin of its period, records in it, and those of them that were dropped.
        self._causes: dict[Hashable, tuple[float, int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the record may be written."""
        now, key = self._clock(), _cause(record)
        begun, count, dropped = self._causes.get(key, (now, 0, 0))
        if now - begun >= PERIOD:
            if dropped:
                record.msg = f"{record.getMessage()} ({dropped} more of these were not logged)"
                record.args = ()
            begun, count, dropped = now, 0, 0
        caused = record.exc_info or getattr(record, "cause", None) is not None
        passes = count < (MOST_CAUSED if caused else MOST)
        if key not in self._causes and len(self._causes) >= MAX_CAUSES:
            self._causes.clear()
        self._causes[key] = begun, count + 1, dropped + (not passes)
        return passes


def _cause(record: logging.LogRecord) -> Hashable:
    text = str(record.msg)[:80]
    if text.startswith("%s") and isinstance(record.args, tuple) and record.args:
        text = str(record.args[0])[:80]
    return record.name, record.levelno, text, getattr(record, "cause", None)
