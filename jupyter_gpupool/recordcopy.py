# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A second copy of a broker's start record, beside its journal.

A logout or a clean-up can delete the folder of the socket while no broker lives to put it back. The
journal is elsewhere, so the copy there is what the broker is started from then: by a kernel's guard
and agent, which are told its path, by the server, and by every command of the same user. It is as
durable as it has to be: without the journal a new broker would know none of the sessions.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from . import machine
from .endpoint import is_machine_path, journal_name, listening_at
from .startrecord import (
    REVIVE_VARIABLE,
    BadRecord,
    StartRecord,
    launcher,
    read_record,
    read_record_file,
    record_path,
    write_file,
)

#: In a kernel's environment: the copy from which its broker can be started again.
COPY_VARIABLE = "GPUPOOL_START_RECORD"


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
    write_file(copy_path(Path(record.journal)), record)


def remove_copy(journal: str) -> None:
    """Forget the copy: the broker ends in order. Idempotent."""
    if journal:
        with contextlib.suppress(OSError):
            copy_path(Path(journal)).unlink()


def can_restore(socket: Path, copy: str = "") -> bool:
    """Return whether :func:`restore` may find a copy, and the socket's folder can be made.

    Cheap: a look at a few files. ``copy`` is where the caller knows of one.
    """
    if is_machine_path(socket) or not any(path.exists() for path in _places(socket, copy)):
        return False
    folder = socket.parent
    return folder.exists() or os.access(folder.parent, os.W_OK | os.X_OK)


def restore(socket: Path, copy: str = "") -> bool:
    """Write the record of the broker at ``socket`` again if it was deleted; False if it was not.

    With the start's lock held. The copy is trusted as the record is: by owner and mode. Not while
    the broker lives: it puts back what was deleted by itself.
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
            write_file(record_path(socket), record)
            return True
    return False


def kernel_environment(socket: Path) -> dict[str, str]:
    """Return what a kernel's agent and guard need to start the broker again, should it die."""
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
    """Return where a copy may be: where the caller says, or beside a journal in a usual folder."""
    name = f"{journal_name(socket)}.sqlite"
    usual = [copy_path(folder / name) for folder in (machine.state_dir(), machine.local_folder())]
    return [*([Path(copy)] if copy else []), *usual]


def _put_back(path: Path, content: str) -> None:
    """Write a file that the broker's command names, unless there is one."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with (
        contextlib.suppress(FileExistsError),
        os.fdopen(os.open(path, flags, 0o600), "w") as file,
    ):
        file.write(content)
