# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which processes have a GPU's device files open: these keep a driver from being replaced."""

from __future__ import annotations

from ... import procfs
from ..model import Holder

#: How the paths of NVIDIA's device files begin.
DEVICE_FILES = "/dev/nvidia"

#: Characters of a command line that are shown.
_COMMAND = 60


def holders(begin: str, number: int | None = None) -> tuple[list[Holder], int]:
    """Return who has device files open, and how many processes cannot be asked.

    Those whose paths begin with ``begin``; with a ``number`` that GPU's file alone. Reads ``/proc``
    of the whole machine: not for an event loop. The files of other users' processes can be seen by
    root alone.
    """
    found, unseen = [], 0
    for pid in procfs.all_pids():
        try:
            paths = {path for _, path in procfs.open_files(pid) if path.startswith(begin)}
        except PermissionError:
            unseen += 1
            continue
        except OSError:
            continue  # ended meanwhile
        if number is not None:
            paths &= {f"{begin}{number}"}
        process = procfs.identify(pid) if paths else None
        uid = procfs.owner(pid)
        if process is not None and uid is not None:
            found.append(Holder(process, uid, _command(pid), tuple(sorted(paths))))
    return sorted(found, key=lambda holder: holder.process.pid), unseen


def _command(pid: int) -> str:
    text = procfs.command(pid)
    return text if len(text) <= _COMMAND else f"{text[: _COMMAND - 3]}..."
