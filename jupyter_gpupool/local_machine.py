# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which machine this is, and which folders a logout does not remove. Standard library only.

A broker and its kernels need a folder for files that they must find again later. A home folder is
not suitable, because several machines can share it. ``/run/user/UID`` and ``/dev/shm`` are not
suitable, because a user's last logout deletes the user's files in them.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
import stat
import uuid
from functools import lru_cache
from pathlib import Path

from .errors import Code, GPUPoolError

#: Maps ``f_type`` of statfs(2) to the name of an unsuitable file system. On such a file system,
#: other machines may see the files, or SQLite's locks and shared memory maps are not reliable.
NETWORK = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB2",
    0x65735546: "FUSE",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x00C36400: "CephFS",
    0x19830326: "BeeGFS",
    0x01021997: "9P",
    0x73757245: "Coda",
    0x0000564C: "NCP",
    0x7461636F: "OCFS2",
    0x01161970: "GFS2",
    0xAAD7AAEA: "PanFS",
    0x20030528: "OrangeFS",
    0x786F4256: "VirtualBox shared folder",
    0xBACBACBC: "VMware shared folder",
}

#: Possible parents of a user's folder, the best first. All are local, and every user can write to
#: them. A logout deletes no files in the first two.
LOCAL_BASES = (Path("/var/tmp"), Path("/tmp"), Path("/dev/shm"))

#: In this folder logind makes a folder for each user at the first login, and removes it at the last
#: logout.
LOGIN_FOLDERS = Path("/run/user")

MACHINE_ID = Path("/etc/machine-id")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

#: The first PID namespace; its inode is a constant of Linux (include/linux/proc_ns.h).
FIRST_NAMESPACE = f"pid:[{0xEFFFFFFC}]"


class FolderError(GPUPoolError):
    """Raised if a folder cannot be made, or if other users can enter it."""

    code = Code.BAD_FOLDER


def boot_id() -> str:
    """Return the id of this boot. Linux counts the start time of a process from the boot."""
    return _BOOT_ID.read_text().strip()


def pid_namespace() -> str:
    """Return the PID namespace of this process. A container has its own namespace."""
    try:
        return str(_PID_NAMESPACE.readlink())
    except OSError:
        return ""


@lru_cache(maxsize=1)
def machine_id() -> str:
    """Return 12 hexadecimal digits that identify this machine; a reboot does not change them.

    They are a hash, because machine-id(5) asks programs not to show the id itself. All containers
    of an image have the same machine-id, so in a container the host name is part of the hash.
    """
    name = _number()
    if pid_namespace() not in ("", FIRST_NAMESPACE):
        name += f" {socket.gethostname()}"
    return hashlib.sha256(f"jupyter_gpupool {name}".encode()).hexdigest()[:12]


def _number() -> str:
    for path in (MACHINE_ID, Path("/var/lib/dbus/machine-id")):
        try:
            text = path.read_text().strip()
        except (OSError, ValueError):
            continue
        if len(text) == 32 and text.strip("0123456789abcdef") == "":
            return text
    # Use the host name and the network address: a reboot does not change them. Without a network
    # card, getnode() returns a random number with bit 40 set. Do not use this number.
    node = uuid.getnode()
    return f"{socket.gethostname()} {node if not node >> 40 & 1 else ''}"


def network_file_system(path: Path) -> str:
    """Return the name of the network file system of ``path``; '' if it is a local file system.

    If ``path`` does not exist, its nearest parent that exists counts.
    """
    return NETWORK.get(_file_system(path), "")


def _file_system(path: Path) -> int:
    """Return ``f_type`` of the file system of ``path``, or of its nearest parent that exists."""
    buffer = ctypes.create_string_buffer(512)
    libc = ctypes.CDLL(None, use_errno=True)
    for place in (path, *path.parents):
        if libc.statfs(os.fsencode(place), buffer) == 0:
            return int.from_bytes(buffer.raw[:8], "little") & 0xFFFFFFFF
    return 0


def state_dir() -> Path:
    """Return the default folder for the journal and the log.

    For root the folder is in /var/lib. For other users it is in XDG_STATE_HOME or in the home.
    """
    if os.getuid() == 0:
        return Path("/var/lib/gpupool")
    base = os.environ.get("XDG_STATE_HOME", "")
    home = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return home / "gpupool"


def local_folder() -> Path:
    """Return the path of this user's local folder, in the best usable folder of ``LOCAL_BASES``.

    If possible, it is a folder that a logout does not delete. It may not exist yet.
    """
    name = f"gpupool-{os.geteuid()}"
    bases = [base for base in LOCAL_BASES if base.is_dir() and not network_file_system(base)]
    for base in bases:
        # Try the next base only if another user has taken this name.
        if _taken_by(base / name) in (None, os.geteuid()):
            return base / name
    return (bases or [LOCAL_BASES[0]])[0] / name


def _taken_by(path: Path) -> int | None:
    try:
        return os.lstat(path).st_uid
    except OSError:
        return None


def make_private(folder: Path) -> Path:
    """Create ``folder`` if it is missing, make it private to this user, and return it.

    Raises
    ------
    FolderError
        If the folder cannot be made or belongs to another user, or if the path is no folder.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = os.lstat(folder)
    except OSError as error:
        raise FolderError(
            f"The folder {folder} cannot be made ({error.strerror}).",
            next_step="Free disk space there, or correct the permissions of the parent folder.",
        ) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise FolderError(
            f"The folder {folder} belongs to user id {found.st_uid}, not to you.",
            next_step="Ask its owner or an admin to remove it.",
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def removed_at_logout(path: Path) -> bool:
    """Return whether ``path`` is in a folder that logind removes at its user's last logout."""
    return LOGIN_FOLDERS in path.parents
