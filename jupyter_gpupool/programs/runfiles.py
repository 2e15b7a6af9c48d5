# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Records and logs of detached commands, in a folder of this user for this machine.

Each command has a folder with the command's name. The folder contains ``record.json``, ``log`` and
``log.1``. The command's supervisor writes these files. Other processes only read the files. To
check whether a record is still true, they look at the processes that the record names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Iterator, Literal, Sequence

from .. import local_machine
from ..errors import Code, RefusedError
from ..procfs import ProcessId, alive, identify
from ..text import did_you_mean
from ..units import format_seconds

#: The folder keeps at most MOST_ENDED records of ended commands. It keeps each of them for at most
#: KEPT_FOR seconds after the command's end, or after its creation if the end's time is unknown.
MOST_ENDED, KEPT_FOR = 50, 30 * 86400.0

#: The environment variable that names the folder of the records.
FOLDER_VARIABLE = "GPUPOOL_RUNS"

#: The supervisor of a new command writes its first record within this many seconds.
FIRST_RECORD = 60.0

#: The most bytes of a log. A full log is kept as ``log.1``, and a new log begins.
MAX_LOG = 8 << 20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")

_RECORD, LOG = "record.json", "log"

RunState = Literal["starting", "waiting", "running", "ended"]


@dataclass(frozen=True)
class RunRecord:
    """The record of one detached command, as its supervisor last wrote it."""

    name: str
    command: tuple[str, ...]
    folder: str
    boot: str
    #: The pid and the start time of the supervisor. ``process`` has the same two numbers for the
    #: command, or zeros if the command has no process yet.
    supervisor: tuple[int, int]
    process: tuple[int, int] = (0, 0)
    state: RunState = "starting"
    session: str = ""
    socket: str = ""
    created: float = 0.0
    started: float = 0.0
    ended: float = 0.0
    #: How the command ended: its exit code, and the reason if the pool or a fault ended it.
    code: int | None = None
    reason: str = ""

    @property
    def lives(self) -> bool:
        """Whether the command runs or waits."""
        return self.state != "ended"

    @property
    def supervised(self) -> bool:
        """Whether the command's supervisor lives."""
        return self.boot == local_machine.boot_id() and alive(ProcessId(*self.supervisor))

    @property
    def at_work(self) -> bool:
        """Whether the command's own process lives."""
        known = self.process != (0, 0) and self.boot == local_machine.boot_id()
        return known and alive(ProcessId(*self.process))

    def now(self) -> RunRecord:
        """Return the record, corrected if its supervisor is dead."""
        if not self.lives or self.supervised:
            return self
        # After this record was read, the supervisor may have written the command's end, and then
        # ended itself. So read the record again.
        latest = read(self.name)
        if latest is not None and not latest.lives:
            return latest
        if self.boot != local_machine.boot_id():
            return replace(self, state="ended", reason="the machine restarted")
        if self.at_work:
            return replace(self, reason="its supervisor was killed, so its output is lost")
        return replace(self, state="ended", reason="its supervisor was killed")

    def describe(self, now: float) -> str:
        """Return the command's state as text for people."""
        if self.state == "ended":
            ago = f" {format_seconds(now - self.ended)} ago" if self.ended else ""
            if self.reason:
                return f"ended{ago}: {self.reason.rstrip('.')}"
            if self.code is not None and self.code > 128:
                with suppress(ValueError):
                    return f"ended{ago} by {signal.Signals(self.code - 128).name}"
            return f"ended{ago} with exit code {self.code}"
        since = format_seconds(max(0.0, now - (self.started or self.created)))
        text = f"{'running' if self.state == 'running' else 'waiting'} for {since}"
        return f"{text}; {self.reason}" if self.reason else text


def folder() -> Path:
    """Return the folder of this user's records on this machine. The folder may not exist yet.

    The folder's name contains the machine's id, because several machines may share a home folder.
    """
    chosen = os.environ.get(FOLDER_VARIABLE, "")
    if chosen:
        return Path(chosen)
    return local_machine.state_dir() / f"runs-{local_machine.machine_id()}"


def is_name(name: str) -> bool:
    """Return whether a program may have this name."""
    return _NAME.fullmatch(name) is not None


def check_name(name: str) -> str:
    """Return ``name``; refuse a name that a folder cannot have.

    Raises
    ------
    RefusedError
        With code ``bad-request``.
    """
    if not is_name(name):
        raise RefusedError(
            f"{name!r} cannot be the name of a program.",
            code=Code.BAD_REQUEST,
            next_step="Use at most 63 letters, digits, '-', '_' and '.', and begin with a letter "
            "or digit.",
        )
    return name


def claim(name: str, command: Sequence[str]) -> str:
    """Make the folder of a new command, and return the command's name.

    If ``name`` is empty, this function makes a name that is free. If an ended command has the name
    ``name``, the function removes the record of that command.

    Raises
    ------
    RefusedError
        If a command with this name runs.
    """
    base = local_machine.make_private(folder())
    if name:
        check_name(name)
        known = read(name)
        if known.now().lives if known is not None else _is_new(base / name):
            raise _taken(name)
        remove(name)
        try:
            (base / name).mkdir(mode=0o700)
        except FileExistsError:
            raise _taken(name) from None
        return name
    word = re.sub(r"[^A-Za-z0-9_-]", "", Path(command[0]).stem)[:40] or "program"
    if re.fullmatch(r"python[0-9.]*", word) and len(command) > 1:
        script = next((part for part in command[1:] if part.endswith(".py")), "")
        word = re.sub(r"[^A-Za-z0-9_-]", "", Path(script).stem)[:40] or word
    word = word if word[0].isalnum() else f"run{word}"
    number = 0
    while True:
        number += 1
        with suppress(FileExistsError):
            (base / f"{word}-{number}").mkdir(mode=0o700)
            return f"{word}-{number}"


def _taken(name: str) -> RefusedError:
    return RefusedError(
        f"A program with the name {name!r} runs already.",
        code=Code.NAME_TAKEN,
        next_step=f"Choose another name, or end that program: jupyter gpupool stop {name}",
    )


def _is_new(path: Path) -> bool:
    """Return whether a command's folder is new, so that its record may still be missing."""
    try:
        return time.time() - path.stat().st_mtime < FIRST_RECORD
    except OSError:
        return False


def remove(name: str) -> None:
    """Remove a record and its logs. A second call has no effect."""
    shutil.rmtree(folder() / check_name(name), ignore_errors=True)


def clean(now: float) -> None:
    """Remove records of ended commands: keep the newest MOST_ENDED, for KEPT_FOR seconds."""
    ended = [record for record in every() if not record.lives]
    ended.sort(key=lambda record: record.ended or record.created, reverse=True)
    for place, record in enumerate(ended):
        if place >= MOST_ENDED or now - (record.ended or record.created) > KEPT_FOR:
            remove(record.name)


def write(record: RunRecord) -> None:
    """Replace the record. A reader finds either the old record or the new one."""
    path = folder() / record.name / _RECORD
    temporary = path.with_name(f"{_RECORD}.{os.getpid()}")
    descriptor = os.open(
        temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
    )
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(record), file)
    temporary.replace(path)


def read(name: str) -> RunRecord | None:
    """Return the record as it was written; None if there is none, or if it cannot be read."""
    try:
        found = json.loads((folder() / name / _RECORD).read_text())
        known = {field.name for field in fields(RunRecord)}
        values: dict[str, Any] = {k: v for k, v in found.items() if k in known}
        for part in ("command", "supervisor", "process"):
            values[part] = tuple(values[part])
        return RunRecord(**values)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def find(name: str) -> RunRecord:
    """Return the record of a command, corrected as :meth:`RunRecord.now` describes.

    Raises
    ------
    RefusedError
        If there is no such record.
    """
    record = read(check_name(name))
    if record is None:
        near = did_you_mean(name, (one.name for one in every()))
        raise RefusedError(
            f"No detached program of yours has the name {name!r}.",
            code=Code.UNKNOWN_PROGRAM,
            next_step=near or "`jupyter gpupool ps` lists your programs.",
        )
    return record.now()


def every() -> list[RunRecord]:
    """Return all records, oldest first, each corrected as :meth:`RunRecord.now` describes."""
    try:
        names = [entry.name for entry in os.scandir(folder()) if _NAME.fullmatch(entry.name)]
    except OSError:
        return []
    found = [record.now() for name in names if (record := read(name)) is not None]
    return sorted(found, key=lambda record: (record.created, record.name))


# ---------------------------------------------------------------------- logs


def log_path(name: str) -> Path:
    """Return the path of the current log."""
    return folder() / name / LOG


class LogWriter:
    """Writes the output of a command to its log, and keeps at least the last MAX_LOG bytes.

    A full disk must not stop the command, so output that cannot be written is left out.
    """

    def __init__(self, name: str) -> None:
        self._path = log_path(name)
        self._file: int | None = None
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append ``data``."""
        with suppress(OSError):
            if self._size + len(data) > MAX_LOG and self._size:
                self.close()
                self._path.replace(self._path.with_name(f"{LOG}.1"))
            if self._file is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self._path, flags, 0o600)
                self._size = os.fstat(self._file).st_size
            while data:
                count = os.write(self._file, data)
                self._size += count
                data = data[count:]

    def close(self) -> None:
        """Close the file; a later write opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_log(name: str) -> Iterator[bytes]:
    """Yield what the log files still contain, the oldest output first."""
    for path in (log_path(name).with_name(f"{LOG}.1"), log_path(name)):
        with suppress(OSError), path.open("rb") as file:
            while chunk := file.read(1 << 16):
                yield chunk


def follow_log(name: str) -> Iterator[bytes]:
    """Yield the log, then new output until the command has ended; yield b"" if none is new."""
    rotated = log_path(name).with_name(f"{LOG}.1")
    with suppress(OSError):
        yield rotated.read_bytes()
    file = None
    while True:
        record = read(name)
        over = record is None or not record.now().lives
        if file is None:
            with suppress(OSError):
                file = log_path(name).open("rb")
        while file is not None:
            chunk = file.read(1 << 16)
            if chunk:
                yield chunk
                continue
            if not replaced(file.fileno(), log_path(name)):
                break
            yield file.read()  # what the old log got after the last read
            file.close()
            file = None
            with suppress(OSError):
                file = log_path(name).open("rb")
        if over:
            if file is not None:
                file.close()
            return
        yield b""
        time.sleep(0.1)


def replaced(descriptor: int, path: Path) -> bool:
    """Return whether another file now has this path."""
    try:
        here, there = os.fstat(descriptor), path.stat()
    except OSError:
        return True
    return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


def this_process() -> tuple[int, int]:
    """Return the pid and the start time of this process."""
    return of_process(os.getpid())


def of_process(pid: int) -> tuple[int, int]:
    """Return the pid and the start time of a process; zeros if there is no such process."""
    found = identify(pid)
    return (found.pid, found.start_time) if found is not None else (0, 0)
