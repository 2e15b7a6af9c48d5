# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's own process: the driver that it sees, its files and limits, its log."""

from __future__ import annotations

import json
import logging
import os
import resource
from pathlib import Path
from typing import Mapping

from .. import procfs
from ..config import BrokerSettings
from ..containers.content import Content
from ..errors import Code, DriverError
from ..local_machine import removed_at_logout
from .transport.listener import is_machine_wide


def machine_environment(
    settings: BrokerSettings, socket: Path, journal: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment variables with which a process sees the emulated GPUs.

    ``base`` is the environment of the process. For real GPUs the result is empty.

    Only this module chooses between the real and the emulated driver. No other part of the code can
    distinguish them. With these variables, NVIDIA's own client libraries also find the chosen
    driver.
    """
    if not settings.emulate:
        return {}
    from .. import emulation

    folder = emulated_folder(socket, journal)
    folder.mkdir(mode=0o700, exist_ok=True)
    if is_machine_wide(socket):
        # The processes of all users write the files of the emulated devices, so all users may enter
        # the folder. Only this broker's user may create files in the folder.
        folder.chmod(0o711)
    try:
        return emulation.environment(settings.emulate, folder, base)
    except emulation.EmulatorError as error:
        raise DriverError(
            str(error), code=Code.NO_EMULATOR, next_step="Or unset c.GPUPool.emulate."
        ) from None


def content_inside(settings: BrokerSettings, socket: Path) -> Content | None:
    """Return the files that the broker gives to containers, or None if it serves no container."""
    if not settings.user_sockets:
        return None
    if not settings.emulate:
        return Content(socket)
    from .. import emulation

    return Content(socket, emulation.library_dir())


def device_files(settings: BrokerSettings, socket: Path, journal: Path) -> str:
    """Return the prefix of the paths of the emulated GPUs' device files; "" for real GPUs."""
    if not settings.emulate:
        return ""
    from .. import emulation

    return emulation.device_files(emulated_folder(socket, journal))


def version_file(settings: BrokerSettings, socket: Path, journal: Path) -> Path | None:
    """Return the path of the emulated driver's version file; None for the real driver.

    The real driver's version file belongs to its kernel module. The emulated driver has no module,
    so only a test makes this file.
    """
    return emulated_folder(socket, journal) / "version" if settings.emulate else None


def emulated_folder(socket: Path, journal: Path) -> Path:
    """Return the folder of the emulated devices.

    This is usually a folder beside the socket. If a logout deletes folders beside the socket, it is
    a folder beside the journal.
    """
    lasting = journal.with_suffix(".emulated")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if lasting.exists():
        return lasting  # made by an earlier broker, perhaps with another XDG_RUNTIME_DIR
    if removed_at_logout(socket) or (runtime and Path(runtime) in socket.parents):
        return lasting
    return socket.with_name(socket.name + ".emulated")


def remove_emulated(socket: Path, journal: Path) -> None:
    """Remove the emulated devices."""
    from ..emulation import remove_state

    remove_state(emulated_folder(socket, journal))


def report(descriptor: int, message: Mapping[str, object]) -> None:
    """Write the result of the start to ``descriptor`` as one line of JSON, and close it."""
    try:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
        os.close(descriptor)
    except OSError:
        pass  # the process that started the broker no longer waits


#: The broker logs a warning if its limit of open files is lower than this.
FEW_DESCRIPTORS = 1024

#: The largest number of open files that a broker needs. A broker may have thousands of sessions,
#: with up to three files for each session.
DESCRIPTORS = 1 << 16


def raise_descriptor_limit(log: logging.Logger) -> None:
    """Raise the limit of open files as far as the system allows.

    Each session needs two or three open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = max(soft, DESCRIPTORS)  # the kernel refuses a limit above nr_open
    for most in (max(hard, DESCRIPTORS), hard):  # only root may have more than the hard limit
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        except (OSError, ValueError):
            continue
        soft = most
        break
    if soft < FEW_DESCRIPTORS:
        log.warning(
            "This broker may open only %d files, which is enough for about %d kernels. To serve "
            "more, raise the limit (LimitNOFILE, ulimit -n)", soft, soft // 3,
        )  # fmt: skip
    procfs.spare.keep()
