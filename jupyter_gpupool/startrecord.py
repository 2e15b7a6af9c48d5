# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The start record: how a broker was started, so that another process can restart it.

A broker writes its record when it begins to serve, and removes the record when it ends normally. So
if a record exists but its broker does not, the broker has died. Standard library only, because
kernels also use this module.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import stat
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Mapping, Sequence

from . import local_machine
from .endpoint import is_machine_path, journal_name, listening_at
from .errors import Code, GPUPoolError

#: This environment variable of a kernel has the shell command that restarts the user's own broker.
REVIVE_VARIABLE = "GPUPOOL_REVIVE"

#: This environment variable of a kernel has the path of the second copy of its broker's record.
COPY_VARIABLE = "GPUPOOL_START_RECORD"

#: The size limit of a record in bytes. A record has a command, some tens of variables, and files.
_MOST_BYTES = 256 << 10

#: All configuration files in a record together have at most this many bytes. A file that would
#: exceed the limit is left out.
_MOST_FILE = 64 << 10

#: Variables that a broker or its libraries use: the next broker must see the same values. A name
#: that ends with "*" stands for all names with that prefix. The broker adds the variables of the
#: GPUs' vendor.
_KEPT = (
    "HOME", "USER", "LOGNAME", "PATH", "SHELL", "LANG", "LC_*", "TZ", "TMPDIR",
    "PYTHON*", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "LD_PRELOAD",
    "XDG_*", "JUPYTER_*", "GPUPOOL_*", "EMUCUDA_*",
    "SLURM_*", "PBS_*", "LSB_*", "SGE_*", "FLUX_*",
)  # fmt: skip

#: A variable with one of these words in its name is never written to a file.
_SECRET = ("TOKEN", "PASSWORD", "SECRET", "JWT", "COOKIE", "CREDENTIAL", "_KEY")

#: Variables of a kernel's session. If a kernel starts the broker, the broker must not get these
#: variables.
SESSION_VARIABLES = (
    "GPUPOOL_SESSION", "GPUPOOL_TOKEN", "GPUPOOL_PAGE", "GPUPOOL_VISIBLE",
    "GPUPOOL_DEVICES_VARIABLE", "GPUPOOL_REAL_LIBCUDA", "GPUPOOL_ATTACH",
    REVIVE_VARIABLE, COPY_VARIABLE,
)  # fmt: skip


class BadRecord(GPUPoolError):
    """The record cannot be read, or another user could have written it."""

    code = Code.BAD_RECORD


@dataclass(frozen=True)
class StartRecord:
    """The command, the environment and the files from which the broker can be restarted."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    #: The id of the boot in which the broker was started. No session survives a reboot, so a record
    #: of an earlier boot does not count.
    boot: str
    pid: int
    #: The PID namespace to which ``pid`` belongs: a container has its own pids.
    namespace: str = ""
    #: The file with the broker's sessions.
    journal: str = ""
    #: Whether the broker has served a kernel, or a server that starts kernels.
    served: bool = False
    #: The unhandled error that ended the broker.
    crashed: str = ""
    #: The path at which the broker listens.
    socket: str = ""
    #: The files in the socket's folder that ``command`` names: maps each file's name to the file's
    #: contents. A clean-up that deletes the folder deletes these files, too, so the record keeps
    #: their contents.
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def useless(self) -> bool:
        """Whether the dead broker crashed, or died before it served a kernel.

        False if the broker had served a kernel and was then killed. The next broker can then serve,
        too.
        """
        return bool(self.crashed) or not self.served


# ---------------------------------------------------------------------- the record


def record_path(socket: Path) -> Path:
    """Return the file of the record for the broker at ``socket``."""
    return socket.with_name(socket.name + ".start.json")


def log_path(socket: Path) -> Path:
    """Return the log of a broker that another process started."""
    return socket.with_suffix(".log")


def lock_path(socket: Path) -> Path:
    """Return the lock file for starts of the broker at ``socket``."""
    return socket.with_name(socket.name + ".start")


def worth_keeping(environ: Mapping[str, str], vendor: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that the next broker must see, without secrets.

    ``vendor`` has the names of further variables, as in :data:`_KEPT`.
    """

    def kept(name: str) -> bool:
        if name in SESSION_VARIABLES or any(word in name.upper() for word in _SECRET):
            return False
        return any(
            name.startswith(entry[:-1]) if entry.endswith("*") else name == entry
            for entry in (*_KEPT, *vendor)
        )

    return {name: value for name, value in environ.items() if kept(name)}


def write_record(
    socket: Path,
    command: Sequence[str],
    environ: Mapping[str, str],
    journal: str = "",
    vendor: Sequence[str] = (),
) -> StartRecord:
    """Write the record of this process, which is the broker at ``socket``; return the record.

    ``vendor`` has the names of the variables that the code of the GPUs' vendor reads.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    record = StartRecord(
        tuple(command),
        worth_keeping(environ, vendor),
        local_machine.boot_id(),
        os.getpid(),
        local_machine.pid_namespace(),
        journal,
        socket=str(socket),
        files=_files(socket, command),
    )
    write_private(record_path(socket), asdict(record))
    return record


def change_record(socket: Path, record: StartRecord, **changes: Any) -> StartRecord:
    """Write ``changes`` to the record of a broker; return the new record."""
    changed = replace(record, **changes)
    with contextlib.suppress(OSError):
        if record_path(socket).exists():  # otherwise the broker is ending normally
            write_private(record_path(socket), asdict(changed))
    return changed


def remove_record(socket: Path) -> None:
    """Delete the record, because the broker ends normally. Idempotent."""
    with contextlib.suppress(OSError):
        record_path(socket).unlink()


def read_record(socket: Path) -> StartRecord | None:
    """Return the record of the broker at ``socket``; None if it ended normally or never ran.

    Raises
    ------
    BadRecord
        If the record cannot be trusted or read.
    """
    return read_record_file(record_path(socket))


def read_record_file(path: Path) -> StartRecord | None:
    """Return the record in ``path``, as :func:`read_record` does."""
    found = read_private(path)
    if found is None:
        return None
    try:
        record = StartRecord(
            command=tuple(str(word) for word in found["command"]),
            environment={str(k): str(v) for k, v in found["environment"].items()},
            boot=str(found["boot"]),
            pid=int(found["pid"]),
            namespace=str(found.get("namespace", "")),
            journal=str(found.get("journal", "")),
            served=bool(found.get("served", True)),
            crashed=str(found.get("crashed", "")),
            socket=str(found.get("socket", "")),
            files={str(k): str(v) for k, v in found.get("files", {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise _bad(path, "is not a record of a broker's start") from None
    if not record.command or not record.command[0].startswith("/"):
        raise _bad(path, "names no program")
    return record if record.boot == local_machine.boot_id() else None


def can_revive(socket: Path) -> bool:
    """Return whether the broker at ``socket`` has a record, and so may have died.

    This is cheap: the function checks that the record's file exists, and does not read it.
    """
    return not is_machine_path(socket) and record_path(socket).exists()


def being_started(socket: Path) -> bool:
    """Return whether a process is starting the broker at ``socket`` now."""
    try:
        lock = os.open(lock_path(socket), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    else:
        return False
    finally:
        os.close(lock)


# ---------------------------------------------------------------------- the second copy
# A logout or a clean-up can delete the socket's folder, and with it the record. If no broker lives,
# no process makes the folder again. The journal is in another folder, so a second copy of the
# record is there, too. Kernels have the path of this copy in COPY_VARIABLE. The server knows the
# journal's path, and the commands of the same user look in the usual folders. A third copy would
# not help: without the journal, a new broker would lose all sessions.


def copy_path(journal: Path) -> Path:
    """Return the file of the copy beside ``journal``."""
    return journal.with_suffix(".start.json")


def write_copy(record: StartRecord) -> None:
    """Write the copy of a broker's record.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    write_private(copy_path(Path(record.journal)), asdict(record))


def remove_copy(journal: str) -> None:
    """Delete the copy, because the broker ends normally. Idempotent."""
    if journal:
        with contextlib.suppress(OSError):
            copy_path(Path(journal)).unlink()


def can_restore(socket: Path, copy: str = "") -> bool:
    """Return whether :func:`restore` may find a copy, and the socket's folder can be created.

    This is cheap: the function only checks whether a few files exist. ``copy`` is the path of a
    copy that the caller knows.
    """
    if is_machine_path(socket) or not any(path.exists() for path in _places(socket, copy)):
        return False
    folder = socket.parent
    return folder.exists() or os.access(folder.parent, os.W_OK | os.X_OK)


def restore(socket: Path, copy: str = "") -> bool:
    """Restore a deleted record of the broker at ``socket``; return whether this was done.

    The caller holds the lock for starts. The function trusts a copy only if its owner and mode are
    safe, as for the record itself. If the broker lives, the function does nothing: the broker
    restores its deleted files itself.
    """
    if is_machine_path(socket) or record_path(socket).exists():
        return False
    for path in _places(socket, copy):
        with contextlib.suppress(BadRecord, OSError, ValueError):
            record = read_record_file(path)
            if record is None or record.socket != str(socket):
                continue
            if listening_at(Path(record.journal).with_suffix(".lock")) is not None:
                return False
            for name, content in record.files.items():
                _put_back(socket.with_name(name), content)
            write_private(record_path(socket), asdict(record))
            return True
    return False


def kernel_environment(socket: Path) -> dict[str, str]:
    """Return the variables with which a kernel's agent and guard can restart the broker."""
    if is_machine_path(socket):
        return {}
    record = None
    with contextlib.suppress(BadRecord):
        record = read_record(socket)
    if record is None or not record.journal:
        return {REVIVE_VARIABLE: launcher(socket)}
    copy = str(copy_path(Path(record.journal)))
    return {REVIVE_VARIABLE: launcher(socket, copy), COPY_VARIABLE: copy}


def _places(socket: Path, copy: str) -> list[Path]:
    """Return where a copy may be: at ``copy``, or beside a journal in one of the usual folders."""
    name = f"{journal_name(socket)}.sqlite"
    usual = [
        copy_path(folder / name)
        for folder in (local_machine.state_dir(), local_machine.local_folder())
    ]
    return [*([Path(copy)] if copy else []), *usual]


def _put_back(path: Path, content: str) -> None:
    """Write a file that the broker's command names, unless the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        contextlib.suppress(FileExistsError),
        os.fdopen(os.open(path, flags, 0o600), "w") as file,
    ):
        file.write(content)


# ---------------------------------------------------------------------- the launcher


def launcher(socket: Path, copy: str = "") -> str:
    """Return the shell command with which a kernel restarts the broker at ``socket``.

    ``copy`` is the second copy of the record, see :func:`copy_path`. The kernel's own environment
    may have neither this package nor this Python, so the command has the paths of both. The command
    returns at once, and the broker does not become a child of the kernel.
    """
    package = Path(__file__).resolve().parent.parent
    words = [sys.executable, "-m", "jupyter_gpupool.starting", str(socket), *filter(None, [copy])]
    return (
        f"cd / && PYTHONPATH={shlex.quote(str(package))} {shlex.join(words)} "
        "</dev/null >/dev/null 2>&1 &"
    )


# ---------------------------------------------------------------------- files


def _bad(path: Path, what: str) -> BadRecord:
    return BadRecord(
        f"{path} {what}, so the pool starts no broker from this file.",
        next_step="Open another Pooled GPU kernel: its server then starts a broker with the "
        f"server's options. Or remove the file (rm {path}) and run `jupyter gpupool broker`.",
    )


def read_private(path: Path) -> dict[str, Any] | None:
    """Return the object in ``path``; None if there is no such file."""
    try:
        folder = os.lstat(path.parent)
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _bad(path, f"cannot be opened ({error.strerror})") from None
    try:
        shared = folder.st_mode & 0o022 and not folder.st_mode & stat.S_ISVTX
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid not in (os.geteuid(), 0) or shared:
            raise _bad(path, "is in a folder that other users may change")
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise _bad(path, "is no regular file")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise _bad(path, "belongs to another user, or other users may read or change it")
        if found.st_size > _MOST_BYTES:
            raise _bad(path, "is too large")
        data = os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _bad(path, "is not JSON") from None
    if not isinstance(value, dict):
        raise _bad(path, "is not a JSON object")
    return value


def _files(socket: Path, command: Sequence[str]) -> dict[str, str]:
    """Return, by name, the contents of small files beside the socket that ``command`` names."""
    found: dict[str, str] = {}
    for path in map(Path, command):
        with contextlib.suppress(OSError, ValueError):
            if path.parent != socket.parent or not path.is_file():
                continue
            if path.stat().st_size + sum(map(len, found.values())) <= _MOST_FILE:
                found[path.name] = path.read_text()
    return found


def write_private(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` atomically; only this user can read it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(value, file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
