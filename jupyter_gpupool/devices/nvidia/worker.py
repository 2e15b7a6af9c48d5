# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The suspend worker: ``child.py jupyter_gpupool.devices.nvidia.worker <parent pid>``.

One per device, kept for as long as the broker runs: a fresh process would pay for cuInit on each
call. It may be killed at any time; the broker then asks a new one for the driver's own state.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from typing import Any

from ... import procfs
from ...errors import DriverError
from ...procfs import ProcessId
from ..serve import Handler, claim_stdout, die_with_parent, emit, serve
from . import checkpoint


class Finder:
    """Looks for the processes of a session, and remembers the last look."""

    def __init__(self) -> None:
        self._about: tuple[ProcessId, str, frozenset[int]] | None = None
        self._members: list[procfs.Member] = []

    def find(self, root: dict[str, int], session: str, again: bool) -> dict[str, Any]:
        """Return the processes of a session, see :func:`procfs.session_members`.

        ``again``: within one operation, to see what was started meanwhile. If no process of the
        machine was, only those found before are looked at.
        """
        top = ProcessId(**root)
        about = (top, session, procfs.all_pids())
        if again and about == self._about:
            self._members = procfs.look_again(self._members)
        else:
            self._members = procfs.session_members(top, session, os.getppid())
        self._about = about
        return {
            "root": procfs.presence(top),
            "members": [asdict(member) for member in self._members],
        }


def state(process: dict[str, int]) -> dict[str, Any]:
    """Return the driver's state of a process."""
    return checkpoint.state(ProcessId(**process)).to_wire()


def thread(process: dict[str, int]) -> dict[str, Any]:
    """Return the driver's own thread in a process."""
    return checkpoint.thread(ProcessId(**process)).to_wire()


def look(finder: Finder, root: dict[str, int], session: str) -> dict[str, Any]:
    """Return what ``find`` does, with the driver's thread and state of each process."""
    found = finder.find(root, session, again=False)
    for member in found["members"]:
        if member["libcuda"] is not False and member["presence"] == "alive":
            member["thread"], member["state"] = thread(member["process"]), state(member["process"])
    return found


def bring_back(
    suspended: list[dict[str, int]], locked: list[dict[str, int]], mapping: dict[str, str] | None
) -> dict[str, Any]:
    """Restore and then unlock processes, up to the first call that does not succeed."""
    answers: list[dict[str, Any]] = []
    calls = [
        *(("restore", process) for process in suspended),
        *(("unlock", process) for process in locked),
    ]
    for op, process in calls:
        answer = restore(process, mapping) if op == "restore" else unlock(process)
        answers.append({"op": op, "process": process, "answer": answer})
        if answer["outcome"] != "ok":
            break
    return {"answers": answers}


def lock(process: dict[str, int], drain: float) -> dict[str, Any]:
    """Lock a process whose work may take ``drain`` seconds more."""
    return checkpoint.lock(ProcessId(**process), drain).to_wire()


def checkpoint_(process: dict[str, int]) -> dict[str, Any]:
    """Suspend a locked process."""
    return checkpoint.checkpoint(ProcessId(**process)).to_wire()


def restore(process: dict[str, int], mapping: dict[str, str] | None) -> dict[str, Any]:
    """Bring a suspended process back, locked."""
    return checkpoint.restore(ProcessId(**process), mapping).to_wire()


def unlock(process: dict[str, int]) -> dict[str, Any]:
    """Let a locked process go on."""
    return checkpoint.unlock(ProcessId(**process)).to_wire()


def main() -> None:
    """Serve until stdin ends."""
    die_with_parent()
    out = claim_stdout()
    try:
        cuda = checkpoint.initialise()
    except DriverError as error:
        emit(out, {"event": "ready", "problem": str(error)})
        return
    emit(out, {"event": "ready", "problem": "", "cuda": cuda})
    finder = Finder()
    handlers: dict[str, Handler] = {
        "find": finder.find,
        "look": partial(look, finder),
        "bring_back": bring_back,
        "state": state,
        "thread": thread,
        "lock": lock,
        "checkpoint": checkpoint_,
        "restore": restore,
        "unlock": unlock,
    }
    serve(out, handlers)


if __name__ == "__main__":
    main()
