# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Whether a broker may go on where the one before it stopped: same socket, same journal.

Kernels know one socket. A broker at another one could read their sessions in the journal, but the
kernels would never find it; a broker at their socket that uses another journal would not know
them. Both start only when no process of such a session lives any more.
"""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Mapping

from .. import machine
from ..devices.model import ProcessId
from ..errors import Code, GPUPoolError
from ..startrecord import BadRecord, read_record
from .journal import Journal
from .processes import alive


class SessionsElsewhere(GPUPoolError):
    """Living kernels look for their broker at another socket."""

    code = Code.SESSIONS_ELSEWHERE


class JournalElsewhere(GPUPoolError):
    """Living kernels of this socket are in another journal."""

    code = Code.JOURNAL_ELSEWHERE


def check_home(journal: Journal, socket: Path) -> None:
    """Refuse the sessions of living kernels that look for their broker at another socket.

    Raises
    ------
    SessionsElsewhere
        If there are such kernels; their socket is in the details. Nothing has been changed.
    """
    home = journal.meta("socket")
    if not home or journal.meta("boot") != machine.boot_id() or _same(Path(home), socket):
        return
    pids = living(journal.records())
    if pids:
        raise SessionsElsewhere(
            f"{_kernels(pids)} a GPU pool broker at {home}, which has ended. A broker at {socket} "
            "would take over the sessions, and no kernel would find it there.",
            next_step=f"Start the broker there: jupyter gpupool broker --socket {home}. If nothing "
            "can listen there any more, start this one with --take-over: idle GPU memory is freed, "
            "but those kernels cannot ask for a GPU again until they are restarted.",
            details={"socket": home},
        )


def check_record(socket: Path, path: Path) -> None:
    """Refuse to use ``path`` as the journal while the kernels of this socket are in another one.

    The start record of a broker that died names its journal.

    Raises
    ------
    JournalElsewhere
        If a process of a session in that journal lives.
    """
    try:
        record = read_record(socket)
    except BadRecord:
        return  # another user could have written it
    if record is None or not record.journal or _same(Path(record.journal), path):
        return
    pids = living(_read(Path(record.journal)))
    if pids:
        folder = Path(record.journal).parent
        raise JournalElsewhere(
            f"{_kernels(pids)} this broker, but their sessions are in the journal "
            f"{record.journal}, and this configuration uses {path}.",
            next_step=f"Set c.GPUPool.state_dir to {str(folder)!r}, or end the kernels: processes "
            f"{', '.join(map(str, pids))}.",
        )


def living(stored: Mapping[str, Mapping[str, Any]]) -> list[int]:
    """Return the kernels' processes, of sessions in a journal, that still run."""
    found = []
    for entry in stored.values():
        try:
            if alive(ProcessId(int(entry["pid"]), int(entry["start_time"]))):
                found.append(int(entry["pid"]))
        except (KeyError, TypeError, ValueError):
            continue  # its kernel has not started yet, or the record is unreadable
    return sorted(found)


def _kernels(pids: list[int]) -> str:
    if len(pids) == 1:
        return f"A kernel (process {pids[0]}) depends on"
    return f"{len(pids)} kernels (processes {', '.join(map(str, pids))}) depend on"


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the sessions of this boot in the journal at ``path``; none if it is unreadable."""
    try:
        if os.lstat(path).st_uid != os.geteuid():
            return {}
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT value FROM meta WHERE name = 'boot'").fetchone()
            if row is None or row[0] != machine.boot_id():
                return {}
            rows = db.execute("SELECT id, record FROM sessions").fetchall()
        return {name: json.loads(text) for name, text in rows}
    except (OSError, sqlite3.Error, ValueError):
        return {}


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
