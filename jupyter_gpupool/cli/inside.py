# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool doctor --inside``: what a container must allow to use the machine's pool.

The broker outside suspends the kernels of this container from its own side. So it must call each
process by the number that the kernel has here, and each user by the same user id.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Mapping

from ..client import Client
from ..devices import Finding
from ..endpoint import dial
from ..errors import GPUPoolError

#: Seconds to wait for the broker.
PATIENCE = 10.0

_NAMESPACE = Path("/proc/self/uid_map")
_NOBODY = Path("/proc/sys/kernel/overflowuid")
_DEVICE_FILE = Path("/dev/nvidiactl")


def examine_inside(path: Path) -> list[Finding]:
    """Return the checks of this container, for a broker at ``path`` outside of it."""
    found = [libc(), users(_NAMESPACE)]
    try:
        with Client(path) as client:
            status = client.call("status", timeout=PATIENCE)
        seen = listener(path)
    except GPUPoolError as error:
        return [*found, Finding("fail", "socket", error.message, _mount(path))]
    except OSError as error:
        problem = f"the broker at {path} cannot be reached ({error.strerror})"
        return [*found, Finding("fail", "socket", problem, _mount(path))]
    found.append(Finding("ok", "socket", f"a broker answers at {path}"))
    found.append(numbers(seen, int(status["pid"])))
    found.append(pages(path.with_name(f"{path.name}.pages")))
    return [*found, devices(status, os.environ, _DEVICE_FILE)]


def _mount(path: Path) -> str:
    """Return what makes the socket at ``path`` usable here."""
    if _is_nobodys(path):
        return (
            "In this user namespace the machine's root is nobody, whose socket no kernel trusts. "
            "Run the container in the machine's user namespace: --userns=host (Docker, "
            "Podman as root), hostUsers: true (Kubernetes). An engine without root cannot do that."
        )
    return (
        f"Mount the folder {path.parent} of the machine here, not the socket alone: a new "
        "broker makes a new socket."
    )


def _is_nobodys(path: Path) -> bool:
    """Return whether ``path`` belongs to a user whom this user namespace does not know."""
    try:
        return path.lstat().st_uid == int(_NOBODY.read_text()) and not _is_whole(_rows(_NAMESPACE))
    except (OSError, ValueError):
        return False


def _rows(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()]


def _is_whole(rows: list[list[str]]) -> bool:
    """Return whether this is the machine's own user namespace."""
    return rows == [["0", "0", "4294967295"]]


def libc() -> Finding:
    """Whether the C library can load the guard, which is built for glibc."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        version = ""
    if version:
        return Finding("ok", "C library", version)
    return Finding(
        "fail", "C library", "this image has no glibc (musl?), and the guard needs it",
        "Use an image with glibc, such as one of Debian.",
    )  # fmt: skip


def users(table: Path) -> Finding:
    """Whether user ids here are those of the machine."""
    rows = _rows(table)
    if _is_whole(rows):
        return Finding("ok", "user ids", f"you are user id {os.geteuid()}, as on the machine")
    here = os.geteuid()
    outside = next(
        (int(o) + here - int(i) for i, o, n in rows if int(i) <= here < int(i) + int(n)), None
    )
    shown = "none" if outside is None else str(outside)
    return Finding(
        "warn", "user ids", f"user id {here} of this container is {shown} on the machine",
        "The broker counts by the machine's user ids: map each container user to an id of its own "
        "there, or such users share quota and sessions.",
    )  # fmt: skip


def listener(path: Path) -> int:
    """Return the number that the broker's process has here; 0 if it has none."""
    with dial(path, PATIENCE) as connection:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", raw)[0])


def numbers(seen: int, told: int) -> Finding:
    """Whether a process has the same number here and for the broker.

    ``seen`` is the broker's own number as the kernel translates it to here, ``told`` as it says.
    """
    if seen == told:
        return Finding("ok", "processes", "they have the same numbers here and for the broker")
    return Finding(
        "fail", "processes", "this container has process numbers of its own: the broker would take "
        "another process for a kernel of yours, or find none",
        "Run it with the numbers of the machine: --pid=host (Docker, Podman), hostPID: true "
        "(Kubernetes).",
    )  # fmt: skip


def pages(folder: Path) -> Finding:
    """Whether the folder in which kernels and broker share memory is here, and may be written."""
    try:
        found = folder.stat()
    except OSError as error:
        return Finding(
            "warn", "pages", f"{folder} is not here ({error.strerror}): kernels have no guard",
            f"Mount the folder {folder.parent} of the machine at the same place.",
        )  # fmt: skip
    if not stat.S_ISDIR(found.st_mode) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        return Finding(
            "fail", "pages", f"{folder} cannot be written here", "Mount it read-write: a kernel "
            "writes its own page only.",
        )  # fmt: skip
    return Finding("ok", "pages", str(folder))


def devices(status: Mapping[str, Any], environment: Mapping[str, str], file: Path) -> Finding:
    """Whether a kernel here sees the GPUs among which the pool chooses."""
    shown = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    count = len(status["devices"])
    if status["emulated"]:
        return Finding("ok", "GPUs", f"the pool's {count} are emulated")
    todo = "Give the container all GPUs: NVIDIA_VISIBLE_DEVICES=all, and no GPU request of its own."
    if not file.exists():
        return Finding("fail", "GPUs", f"{file} is not here", todo)
    if shown not in ("", "all"):
        return Finding(
            "warn", "GPUs", f"NVIDIA_VISIBLE_DEVICES is {shown!r}, and the pool has {count}: a "
            "slice on another GPU cannot be used here", todo,
        )  # fmt: skip
    return Finding("ok", "GPUs", f"{file} is here; the pool has {count}")
