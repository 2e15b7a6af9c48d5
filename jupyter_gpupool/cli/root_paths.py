# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks whether only root can change the file at a path.

It checks each folder and each link on the way to the file.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Iterator

#: The system follows at most this many links (path_resolution(7)).
_MOST_LINKS = 40


def changeable(path: Path) -> str:
    """Return through which folder or file a user other than root can change the file at ``path``.

    The result is a text with this folder or file, its owner and its mode; "" if only root can
    change the file. If the file does not exist, this function checks the folder, because another
    user might create the file.
    """
    steps = [*_steps(path)]
    for number, at in enumerate(steps):
        try:
            found = at.lstat()
        except OSError:
            return ""  # nothing exists at ``at``; the loop has already checked the folder above it
        last = number + 1 == len(steps) or not os.path.lexists(steps[number + 1])
        # The sticky bit of a folder prevents other users from replacing root's files in it, but not
        # from making new files. So the bit counts only if the next step of the path exists.
        sticky = bool(found.st_mode & stat.S_ISVTX) and not last
        by_group = found.st_mode & stat.S_IWGRP and found.st_gid != 0
        writable = bool(by_group or found.st_mode & stat.S_IWOTH) and not sticky
        if stat.S_ISLNK(found.st_mode):
            writable = False  # the system ignores the mode of a link
        if found.st_uid != 0 or writable:
            return f"{at} (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})"
    return ""


def _steps(path: Path) -> Iterator[Path]:
    """Yield each folder and link through which the system finds ``path``, and the file itself."""
    at, links = Path("/"), 0
    yield at
    left = [*reversed(path.absolute().parts[1:])]
    while left:
        name = left.pop()
        if name == "..":
            at = at.parent
            continue
        at /= name
        yield at
        if at.is_symlink():
            links += 1
            if links > _MOST_LINKS:
                return
            target = at.readlink()
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path("/") if target.is_absolute() else at.parent
