# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What a pooled kernel is started with: the agent's flag, its environment, where it finds us.

Shared by the two that start kernels: the provisioner, for clients that have provisioners, and
``launcher``, which the ``argv`` of a pooled kernelspec names, for those that have none.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any, Mapping, MutableMapping, Sequence

from .endpoint import user_runtime_dir
from .errors import Code, ConfigError, GPUPoolError
from .guard.install import hide_devices, remember_devices
from .recordcopy import kernel_environment
from .text import did_you_mean

AGENT = "jupyter_gpupool.kernel"

#: In a kernel's environment: what its agent shows with the first cell.
NOTICE_VARIABLE = "GPUPOOL_NOTICE"
AGENT_FLAG = f"--IPKernelApp.extra_extensions={AGENT}"

#: Programs that the ``argv`` of a pooled kernelspec starts: any kernel after ``--``, or ipykernel.
#: The second one's name tells clients that look for it (VS Code does) that it is an ipykernel.
LAUNCHER = "jupyter_gpupool.launcher"
IPYKERNEL_LAUNCHER = "jupyter_gpupool.ipykernel_launcher"

#: Set by the provisioner for a launcher that it could not take out of the command: the session is
#: open already. The launcher removes it, so that no later process believes it.
OPENED_VARIABLE = "GPUPOOL_OPENED"

#: Options of a kernelspec's ``config``.
OPTIONS = ("memory", "limit", "devices", "compute", "priority", "attach", "broker_socket")

POLICIES = ("lazy", "cell", "manual")

_PYTHON = re.compile(r"python(3(\.\d+)?)?")

#: Variables of the session's environment that go in front of what the kernel has already.
PATH_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")

#: Variables that only replace a default of a library: what the user has set stays.
USERS_CHOICE = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "CUDF_PANDAS_RMM_MODE",
)


def runs_ipykernel(command: list[str]) -> bool:
    """Return whether this command starts ipykernel, and so knows the agent's flag."""
    return any(
        part in ("ipykernel_launcher", "ipykernel", IPYKERNEL_LAUNCHER)
        or Path(part).name == "ipykernel_launcher.py"
        for part in command[1:]
    )


def kernel_command(command: Sequence[str]) -> list[str]:
    """Return what ``command`` starts in the end: the kernel's own command without our launcher.

    Only if a Python runs the launcher: another program in front of it (``conda run``) may matter.
    """
    if not command or not _PYTHON.fullmatch(os.path.basename(command[0])):
        return [*command]
    for index, (flag, module) in enumerate(pairwise(command)):
        if flag != "-m":
            continue
        rest = [*command[index + 2 :]]
        if module == IPYKERNEL_LAUNCHER:
            return [*command[:index], "-m", "ipykernel_launcher", *rest]
        if module == LAUNCHER and "--" in rest[:-1]:
            inner = rest[rest.index("--") + 1 :]
            # As jupyter_client does for the first word of an argv.
            return [command[0] if _PYTHON.fullmatch(inner[0]) else inner[0], *inner[1:]]
        break
    return [*command]


def has_launcher(command: Sequence[str]) -> bool:
    """Return whether a launcher of ours is somewhere in ``command``."""
    return any(part in (LAUNCHER, IPYKERNEL_LAUNCHER) for part in command)


def enter_session(
    command: list[str],
    environ: MutableMapping[str, str],
    answer: Mapping[str, Any],
    socket: Path | None = None,
) -> tuple[list[str], str]:
    """Prepare ``environ``, in place, for a kernel in the session that ``answer`` opened.

    ``socket`` is where the broker is that opened it; None if there is no session. Return the
    command to start, and why it gets no GPU; "" if it may get one.
    """
    remember_devices(environ)
    merge_environment(environ, answer["env"])
    if socket is not None:
        environ.update(kernel_environment(socket))
    if runs_ipykernel(command):
        if not same_environment(command[0]):
            merge_environment(environ, {"PYTHONPATH": str(agent_folder())})
        return [*command, AGENT_FLAG], ""
    attach = str(answer.get("attach", ""))
    if "GPUPOOL_PAGE" in answer["env"] and attach == "lazy":
        return command, ""
    # Nobody would ask for a slice for it, so it must not find a device.
    hide_devices(environ)
    why = (
        "and it has attach policy 'manual'"
        if attach == "manual"
        else "which this pool does not have (`jupyter gpupool doctor` says why)"
    )
    return command, f"it is not an ipykernel, so only the guard could ask for its GPU slice, {why}"


def check_options(stanza: Mapping[str, Any], kernel: str) -> None:
    """Refuse options of a kernelspec that do not exist.

    Raises
    ------
    ConfigError
        Naming the unknown option and the nearest that there is.
    """
    for name in stanza:
        if name not in OPTIONS:
            raise ConfigError(
                f"The kernelspec of {kernel!r} has the option {name!r} for its GPU pool "
                f"provisioner, which does not exist; there are {', '.join(OPTIONS)}.",
                code=Code.UNKNOWN_OPTION,
                next_step=did_you_mean(name, OPTIONS),
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
    for path in (base, folder):  # one after the other: parents get no mode
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
                code=Code.BAD_FOLDER,
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
