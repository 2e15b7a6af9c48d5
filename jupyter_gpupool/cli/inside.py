# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool doctor --inside``: checks whether a container can use the machine's pool.

The broker runs outside this container and suspends the kernels in it. The operating system reports
the kernels' process ids to the broker. A container mounts either the folder of one user of the
pool, or the machine's own folder. With the machine's folder, user ids and process ids in the
container must be the same as on the machine.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path
from typing import Any, Mapping

from ..client import Client
from ..containers.content import NAME
from ..containers.start import problem
from ..devices import Finding
from ..endpoint import dial, mounted_by_root, whole_user_namespace
from ..errors import GPUPoolError
from ..guard.install import FOLDER, LIBRARIES

#: Seconds to wait for an answer of the broker.
PATIENCE = 10.0

_NAMESPACE = Path("/proc/self/uid_map")
_NOBODY = Path("/proc/sys/kernel/overflowuid")

#: The text with which messages name the folder of a user of the pool on the machine.
_USERS = "/run/gpupool/users/NAME, if the broker has c.GPUPool.user_sockets"

_DEVICE_FILE = Path("/dev/nvidiactl")


def examine_inside(path: Path) -> list[Finding]:
    """Return the findings about this container, for a broker at ``path`` outside it."""
    content = path.with_name(NAME)
    of_user = content.is_dir()
    guard = (content if of_user else path.with_name(f"{path.name}.pages")) / FOLDER / LIBRARIES[0]
    found = [image(guard)] if of_user else [libc(), users(_NAMESPACE)]
    try:
        with Client(path) as client:
            status = client.call("status", timeout=PATIENCE)
        seen = listener(path)
    except GPUPoolError as error:
        return [*found, Finding("fail", "socket", error.message, _mount(path))]
    except OSError as error:
        problem = f"the broker at {path} cannot be reached ({error.strerror})"
        return [*found, Finding("fail", "socket", problem, _mount(path))]
    if of_user:
        found.append(identity(path, str(status["user"])))
        return [*found, devices(status, os.environ, _DEVICE_FILE)]
    found.append(Finding("ok", "socket", f"a broker answers at {path}"))
    found.append(loadable(guard))
    found.append(numbers(seen, int(status["pid"])))
    found.append(pages(path.with_name(f"{path.name}.pages")))
    return [*found, devices(status, os.environ, _DEVICE_FILE)]


def _mount(path: Path) -> str:
    """Return what the user must do so that the socket at ``path`` works in this container."""
    if _is_nobodys(path):
        return (
            "In this user namespace the machine's root appears as the user 'nobody'. A kernel "
            "trusts a socket that belongs to 'nobody' only if the socket is directly in a mounted "
            f"folder. Mount the folder of a user of the pool ({_USERS}), or run the container in "
            "the machine's user namespace: --userns=host (Docker, Podman as root), hostUsers: true "
            "(Kubernetes)."
        )
    return (
        f"Mount the folder {path.parent} of the machine here, not the socket alone: a new "
        "broker makes a new socket."
    )


def _is_nobodys(path: Path) -> bool:
    """Return whether ``path`` belongs to a user whom this user namespace does not know."""
    try:
        found = path.lstat().st_uid
        nobody = found == int(_NOBODY.read_text()) and not whole_user_namespace(_NAMESPACE)
        return nobody and not mounted_by_root(path, found)
    except (OSError, ValueError):
        return False


def _rows(table: Path) -> list[list[str]]:
    return [line.split() for line in table.read_text().splitlines()]


def image(guard: Path) -> Finding:
    """Check whether this image can run kernels under the guard."""
    why = problem(str(guard)) if guard.exists() else f"{guard} is not here"
    if not why:
        return Finding("ok", "image", "this image's Python and C library can load the guard")
    return Finding(
        "fail", "image", why, "Use an image such as one of Debian 12 or Ubuntu 22.04, or newer.",
    )  # fmt: skip


def identity(path: Path, user: str) -> Finding:
    """Check whether the mounted folder of a pool user is read-only in this container."""
    if not os.statvfs(path.parent).f_flag & os.ST_RDONLY:
        return Finding(
            "fail", "socket", f"{path.parent} is writable here: root in this container could "
            "change libraries that other containers load",
            "Mount it read-only (:ro, readOnly: true).",
        )  # fmt: skip
    return Finding("ok", "socket", f"a broker answers at {path} and knows you as {user!r}")


def loadable(guard: Path) -> Finding:
    """Check whether this image has the guard.

    The machine's folder contains only a link to the guard's file.
    """
    if guard.exists():
        return Finding("ok", "guard", str(guard.resolve()))
    return Finding(
        "fail", "guard", f"{guard} leads to no file here: kernels would run without the guard",
        f"Mount the folder of a user of the pool instead ({_USERS}): it has the guard.",
    )  # fmt: skip


def libc() -> Finding:
    """Check whether the C library can load the guard, which is built for glibc."""
    try:
        version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        version = ""
    if version:
        return Finding("ok", "C library", version)
    return Finding(
        "fail", "C library", "this image has musl or another C library, and the guard needs glibc",
        "Use an image with glibc, such as one of Debian.",
    )  # fmt: skip


def users(table: Path) -> Finding:
    """Check whether user ids in this container are the same as on the machine."""
    rows = _rows(table)
    if whole_user_namespace(table):
        return Finding("ok", "user ids", f"you are user id {os.geteuid()}, as on the machine")
    here = os.geteuid()
    outside = next(
        (int(o) + here - int(i) for i, o, n in rows if int(i) <= here < int(i) + int(n)), None
    )
    shown = "none" if outside is None else str(outside)
    return Finding(
        "warn", "user ids", f"user id {here} of this container is {shown} on the machine",
        "The broker knows users by their ids on the machine. Map each container user to its own id "
        "on the machine; users with the same id share quota and sessions.",
    )  # fmt: skip


def listener(path: Path) -> int:
    """Return the broker's process id as this container sees it; 0 if it has no id here."""
    with dial(path, PATIENCE) as connection:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", raw)[0])


def numbers(seen: int, told: int) -> Finding:
    """Check whether processes have the same ids in this container as on the machine.

    ``seen`` is the broker's process id that the operating system reports in this container.
    ``told`` is the process id that the broker reports about itself.
    """
    if seen == told:
        return Finding("ok", "processes", "processes have the same ids here as on the machine")
    return Finding(
        "fail", "processes", "this container has its own PID namespace, so the broker would not "
        "find your kernel, or would take another process for it",
        f"Mount the folder of a user of the pool instead ({_USERS}), or run the container in the "
        "PID namespace of the machine: --pid=host (Docker, Podman), hostPID: true (Kubernetes).",
    )  # fmt: skip


def pages(folder: Path) -> Finding:
    """Check whether this container mounts the sessions' pages and may write them.

    Kernels and the broker share these pages.
    """
    try:
        found = folder.stat()
    except OSError as error:
        return Finding(
            "warn", "pages", f"{folder} is not here ({error.strerror}): kernels have no guard",
            f"Mount the folder {folder.parent} of the machine at the same place.",
        )  # fmt: skip
    if not stat.S_ISDIR(found.st_mode) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        return Finding(
            "fail", "pages", f"{folder} cannot be written here", "Mount the folder read-write: "
            "each kernel writes only its own page.",
        )  # fmt: skip
    return Finding("ok", "pages", str(folder))


def devices(status: Mapping[str, Any], environment: Mapping[str, str], file: Path) -> Finding:
    """Check whether a kernel in this container sees the GPUs of the pool."""
    shown = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    count = len(status["devices"])
    if status["emulated"]:
        return Finding("ok", "GPUs", f"the pool's GPUs ({count}) are emulated")
    todo = (
        "Give the container all GPUs: set NVIDIA_VISIBLE_DEVICES=all, and request no GPU for the "
        "container."
    )
    if not file.exists():
        return Finding("fail", "GPUs", f"{file} is not here", todo)
    if shown not in ("", "all"):
        return Finding(
            "warn", "GPUs", f"NVIDIA_VISIBLE_DEVICES is {shown!r}, so kernels here cannot use "
            f"slices on the other GPUs of the pool, which has {count} in all", todo,
        )  # fmt: skip
    return Finding("ok", "GPUs", f"{file} is here; GPUs of the pool: {count}")
