# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Which processes have a GPU's device files open: these keep a driver from being replaced."""

from __future__ import annotations

from pathlib import Path

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
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        pid = int(entry.name)
        try:
            paths = _open_files(entry, begin)
            uid = entry.stat().st_uid
        except PermissionError:
            unseen += 1
            continue
        except OSError:
            continue  # ended meanwhile
        if number is not None:
            paths &= {f"{begin}{number}"}
        process = procfs.identify(pid) if paths else None
        if process is not None:
            found.append(Holder(process, uid, _command(entry), tuple(sorted(paths))))
    return sorted(found, key=lambda holder: holder.process.pid), unseen


def _open_files(entry: Path, begin: str) -> set[str]:
    found = set()
    for link in (entry / "fd").iterdir():
        try:
            path = str(link.readlink())
        except FileNotFoundError:
            continue  # closed meanwhile
        if path.startswith(begin):
            found.add(path)
    return found


def _command(entry: Path) -> str:
    try:
        line = (entry / "cmdline").read_bytes()[:4096]
        text = line.replace(b"\0", b" ").decode(errors="replace").strip()
        if not text:
            text = f"[{(entry / 'comm').read_text(errors='replace').strip()}]"
    except OSError:
        return ""
    return text if len(text) <= _COMMAND else f"{text[: _COMMAND - 3]}..."
