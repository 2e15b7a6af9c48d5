# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Where a broker runs: the driver it sees, its files, its limits, who waits for its start."""

from __future__ import annotations

import json
import os
import resource
import zlib
from pathlib import Path
from typing import Mapping

from ..config import BrokerSettings
from ..endpoint import MACHINE_SOCKET
from ..errors import DriverError


def machine_environment(
    settings: BrokerSettings, socket: Path, base: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that, over ``base``, show a process the pool's GPUs.

    None for the real driver.

    The only place where the choice between the real and the emulated driver is made: the rest of
    the code cannot tell them apart, and NVIDIA's own client libraries find either through these.
    """
    if not settings.emulate:
        return {}
    from ..emulator import profiles

    folder = socket.with_name(socket.name + ".emulated")
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        return profiles.environment(profiles.parse_machine(settings.emulate), folder, base)
    except profiles.EmulatorError as error:
        raise DriverError(
            str(error), code="no-emulator", next_step="Or unset c.GPUPool.emulate."
        ) from None


def journal_path(settings: BrokerSettings, socket: Path) -> Path:
    """Return the journal's file: one per socket, so that two brokers never share one."""
    if socket == MACHINE_SOCKET:
        return settings.state_dir / "journal.sqlite"
    return settings.state_dir / f"journal-{zlib.crc32(os.fsencode(socket)):08x}.sqlite"


def boot_id() -> str:
    """Return what changes when the machine starts: start times of processes count from there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def report(descriptor: int, message: Mapping[str, object]) -> None:
    """Tell who started us how it went, as one line of JSON, once."""
    try:
        os.write(descriptor, json.dumps(message).encode() + b"\n")
        os.close(descriptor)
    except OSError:
        pass  # it did not wait


def raise_descriptor_limit() -> None:
    """Allow as many open files as we may: a session takes two or three."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
