# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a pooled kernel is started with: the agent's flag, its environment, where it finds us."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path
from typing import Mapping, MutableMapping

from .endpoint import user_runtime_dir
from .errors import GPUPoolError

AGENT = "jupyter_gpupool.kernel"

#: In a kernel's environment: what its agent shows with the first cell.
NOTICE_VARIABLE = "GPUPOOL_NOTICE"
AGENT_FLAG = f"--IPKernelApp.extra_extensions={AGENT}"

#: Variables of the session's environment that go in front of what the kernel has already.
PATH_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")

#: Variables that only replace a default of a library: what the user has set stays.
USERS_CHOICE = ("XLA_PYTHON_CLIENT_PREALLOCATE", "TF_FORCE_GPU_ALLOW_GROWTH")


def runs_ipykernel(command: list[str]) -> bool:
    """Return whether this command starts ipykernel, and so knows the agent's flag."""
    return any(
        part in ("ipykernel_launcher", "ipykernel") or Path(part).name == "ipykernel_launcher.py"
        for part in command[1:]
    )


def same_environment(python: str) -> bool:
    """Return whether ``python`` is this process's interpreter: then it has this package too."""
    return os.path.abspath(python) == os.path.abspath(sys.executable)


def merge_environment(env: MutableMapping[str, str], ours: Mapping[str, str]) -> None:
    """Add the session's variables to the kernel's, in place."""
    for name, value in ours.items():
        if name in USERS_CHOICE and name in env:
            continue
        if name in PATH_VARIABLES and env.get(name):
            first = value.split(os.pathsep)
            rest = [part for part in env[name].split(os.pathsep) if part and part not in first]
            env[name] = os.pathsep.join([*first, *rest])
        else:
            env[name] = value


def agent_folder() -> Path:
    """Return a private folder with one link to this package, for another environment's PYTHONPATH.

    Not the folder the package is installed in: it would bring every other package along.

    Raises
    ------
    GPUPoolError
        If somebody else could change what is imported from there.
    """
    package = Path(__file__).resolve().parent
    base = user_runtime_dir()
    folder = base / f"agent-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (base, folder):
        found = path.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or stat.S_IMODE(found.st_mode) & 0o022
        ):
            raise GPUPoolError(
                f"{path} is not a folder that only you can write to, so that no kernel of another "
                "environment is started with it.",
                code="bad-folder",
                next_step=f"Remove it: rm -rf {path}",
            )
    link = folder / package.name
    try:
        link.symlink_to(package, target_is_directory=True)
    except FileExistsError:
        if link.resolve() != package:
            link.unlink()
            link.symlink_to(package, target_is_directory=True)
    return folder
