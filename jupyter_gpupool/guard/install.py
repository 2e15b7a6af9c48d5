# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds the compiled guard, and makes the environment in which a session's processes use it.

This module builds nothing (see ``build``). It uses only the standard library, because provisioners
also import it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path
from typing import Mapping, MutableMapping

from ..errors import Code, GPUPoolError

#: The guard's two libraries. The first receives the calls to the CUDA driver. The second receives
#: the calls to NVML, and answers the queries about memory with the figures of the slice.
LIBRARIES = ("libcuda.so.1", "libnvidia-ml.so.1")

#: The name of the folder of links that :func:`guard_directory` makes. In a search path,
#: :func:`without_guard` finds the guard's entries by this name. It also finds the entries of a
#: broker that has ended.
FOLDER = "gpupool-guard"

#: Variables for the session's processes only: :func:`without_guard` removes them.
VARIABLES = (
    "GPUPOOL_PAGE",
    "GPUPOOL_VISIBLE",
    "GPUPOOL_DEVICES_VARIABLE",
    "GPUPOOL_REAL_LIBCUDA",
    "GPUPOOL_REVIVE",
    "GPUPOOL_START_RECORD",
    "GPUPOOL_NOTICE",
    "GPUPOOL_NO_SESSION",
)

#: The variable in which :func:`hide_devices` saves the user's value of CUDA_VISIBLE_DEVICES.
_HIDDEN = "GPUPOOL_HIDDEN"
_VISIBLE = "CUDA_VISIBLE_DEVICES"

#: The value to save if the user has not set CUDA_VISIBLE_DEVICES. It cannot be "", because a user
#: may set "" to hide every device.
_NONE = "unset"

_LIB = Path(__file__).resolve().parent / "lib"


class GuardMissing(GPUPoolError):
    """The guard has not been compiled on this machine."""

    code = Code.NO_GUARD


class GuardFolderError(GPUPoolError):
    """The folder of links cannot be made, or another user could change its content."""

    code = Code.BAD_FOLDER


def library() -> Path:
    """Return the compiled guard, ``libcuda.so.1``; ``libnvidia-ml.so.1`` is in the same folder.

    Raises
    ------
    GuardMissing
        If the guard is not compiled.
    """
    path = _LIB / LIBRARIES[0]
    if not path.is_file():
        raise GuardMissing(
            f"The guard is not compiled: {path} is missing.",
            next_step="Install a C compiler (gcc or clang, callable as cc) and run: "
            "python -m jupyter_gpupool.guard.build",
        )
    return path


def guard_directory(base: Path) -> Path:
    """Return the folder of links to the guard in ``base``; make it if it is missing.

    Frameworks ask for the driver as ``libcuda.so.1`` or ``libcuda.so``. The dynamic loader finds
    both names in this folder. Both names are links to the preloaded file, so the loader does not
    load the file again. The folder is not in the package, because a wheel cannot hold links.

    The package may be installed again in another place. The links then point to the old place, and
    this function replaces them. It replaces each link in one step, because a process may start at
    the same time. The process finds either the old link or the new link.

    Raises
    ------
    GuardMissing
        If the guard is not compiled.
    GuardFolderError
        If the folder cannot be made, or another user could change what is loaded from it.
    """
    target = library().parent
    folder = base / FOLDER
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o755)
            folder.chmod(0o755)  # mkdir applies the umask, but all users' kernels read the folder
        for path in (base, folder):
            _check(path)
        for soname in LIBRARIES:
            for name in (soname, soname.removesuffix(".1")):
                if (target / soname).is_file():
                    _link(folder / name, target / soname)
                else:  # this installation has no such library: leave no dangling link
                    (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise GuardFolderError(
            f"The guard's folder {folder} cannot be made: {error}.",
            next_step="Make room on the disk or correct the folder's permissions, then start the "
            "broker again.",
        ) from None
    return folder


def _check(path: Path) -> None:
    found = path.lstat()
    writable = found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or writable:
        raise GuardFolderError(
            f"{path} must be a folder that only this user can write to, because kernels load "
            "libraries from it.",
            next_step=f"Remove it: rm -rf {path}",
        )


def _link(path: Path, target: Path) -> None:
    with contextlib.suppress(OSError):  # the path does not exist, or is not a link
        if path.readlink() == target:
            return
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    temporary.symlink_to(target)
    try:
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def session_environment(
    directory: Path, page_path: Path, base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables that make a process and its children use the guard.

    Parameters
    ----------
    directory:
        From :func:`guard_directory`.
    page_path:
        The session's page.
    base:
        Other variables for the process, for example the variables of the emulated driver. The guard
        comes first in ``LD_PRELOAD`` and ``LD_LIBRARY_PATH``, before the values in ``base``.
    """
    base = base or {}
    folder, preload = str(directory), str(directory / LIBRARIES[0])
    return {
        "LD_PRELOAD": _in_front(preload, base.get("LD_PRELOAD", "")),
        "LD_LIBRARY_PATH": _in_front(folder, base.get("LD_LIBRARY_PATH", "")),
        "GPUPOOL_PAGE": str(page_path),
    }


def _in_front(first: str, rest: str) -> str:
    others = [entry for entry in rest.split(os.pathsep) if entry and entry != first]
    return os.pathsep.join([first, *others])


def remember_devices(env: MutableMapping[str, str]) -> None:
    """Save the user's CUDA_VISIBLE_DEVICES in ``env``, before the pool changes the variable."""
    if _HIDDEN not in env:
        env[_HIDDEN] = env.get(_VISIBLE, _NONE)


def hide_devices(env: MutableMapping[str, str]) -> None:
    """Hide every CUDA device from processes with this environment, and from their children.

    The function saves the old value. A Jupyter server or a broker that this process starts gets the
    old value back from :func:`without_guard`.
    """
    remember_devices(env)
    env[_VISIBLE] = "-1"


def without_guard(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` for a process that must not run under the guard of the present session.

    A user may start a broker, or a Jupyter server with pooled kernels, in a pooled kernel. The
    children of this broker or server must not use the page of that kernel's session.
    """
    found = {name: value for name, value in env.items() if name not in VARIABLES}
    before = found.pop(_HIDDEN, None)
    if before == _NONE:
        found.pop(_VISIBLE, None)
    elif before is not None:
        found[_VISIBLE] = before
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH"):
        if name not in found:
            continue
        # The dynamic loader also accepts spaces between the entries of LD_PRELOAD (ld.so(8)).
        text = found[name].replace(" ", os.pathsep) if name == "LD_PRELOAD" else found[name]
        entries = text.split(os.pathsep)
        kept = [entry for entry in entries if not entry or not _ours(entry)]
        if kept == entries:
            continue
        if any(kept):
            found[name] = os.pathsep.join(kept)
        else:
            del found[name]
    return found


def _ours(entry: str) -> bool:
    """Return whether this entry names the guard, or a folder that contains the guard."""
    path = Path(entry)
    folder = path.parent if path.name in LIBRARIES else path
    if folder.name == FOLDER:
        return True
    with contextlib.suppress(OSError):
        return folder.resolve() == _LIB
    return False
