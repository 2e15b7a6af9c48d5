# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.launcher --kernel NAME -- COMMAND...``: a kernel in a session.

Clients without kernel provisioners, such as VS Code, start the ``argv`` of a kernelspec themselves.
In a pooled kernelspec the ``argv`` names this program. The program opens a session in the pool and
then becomes the kernel by exec, so the client's signals reach the kernel and the client can wait
for the kernel's process. If the provisioner has already opened the session, the program only
becomes the kernel. After a failure the kernel runs without a GPU, and one line gives the reason. No
kernel gets a GPU without a session.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import stat
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Mapping, MutableMapping, NoReturn, Sequence

from .client import ClientAgain
from .endpoint import NO_SESSION_VARIABLE, check_socket, find_socket, user_runtime_dir
from .errors import Code, ConfigError, GPUPoolError
from .guard.install import hide_devices, remember_devices, without_guard
from .startrecord import kernel_environment
from .states import POLICIES
from .text import did_you_mean
from .units import parse_bytes

AGENT = "jupyter_gpupool.kernel"

#: In a kernel's environment: a text that its agent shows with the first cell.
NOTICE_VARIABLE = "GPUPOOL_NOTICE"
AGENT_FLAG = f"--IPKernelApp.extra_extensions={AGENT}"

#: The programs that the ``argv`` of a pooled kernelspec can start. ``LAUNCHER`` runs any kernel, by
#: the command after ``--``. ``IPYKERNEL_LAUNCHER`` runs ipykernel. Clients such as VS Code
#: recognise an ipykernel by the name of this program.
LAUNCHER = "jupyter_gpupool.launcher"
IPYKERNEL_LAUNCHER = "jupyter_gpupool.ipykernel_launcher"

#: The provisioner sets this variable if it could not remove the launcher from the command. The
#: variable tells the launcher that the session is already open. The launcher deletes it, so that
#: child processes do not inherit it.
OPENED_VARIABLE = "GPUPOOL_OPENED"

#: The options that a kernelspec's ``config`` may have.
OPTIONS = ("memory", "limit", "devices", "compute", "priority", "group", "attach", "broker_socket")

#: The provisioner that starts a kernel on a machine that the cluster chooses.
#: ``PLACEMENT_OPTIONS`` are the provisioner's options for this choice.
REMOTE_PROVISIONER = "gpupool-remote-provisioner"
PLACEMENT_OPTIONS = ("model", "data")

#: The options that are not part of the request for a slice.
_BESIDE = ("group", "attach", "broker_socket", *PLACEMENT_OPTIONS)

_PYTHON = re.compile(r"python(3(\.\d+)?)?")

#: For these variables, the session's value is put in front of the kernel's own value.
PATH_VARIABLES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")

#: The session sets these variables only if the user has not set them.
USERS_CHOICE = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "TF_FORCE_GPU_ALLOW_GROWTH",
    "CUDF_PANDAS_RMM_MODE",
)


def runs_ipykernel(command: list[str]) -> bool:
    """Return whether this command starts ipykernel, which accepts the agent's flag."""
    return any(
        part in ("ipykernel_launcher", "ipykernel", IPYKERNEL_LAUNCHER)
        or Path(part).name == "ipykernel_launcher.py"
        for part in command[1:]
    )


def kernel_command(command: Sequence[str]) -> list[str]:
    """Return the kernel's own command, without our launcher.

    If the command does not begin with a Python, the function returns it with the launcher. The
    kernel may need the program at the beginning of the command (such as ``conda run``).
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
            # jupyter_client replaces a bare ``python`` at the beginning of an argv. Do the same
            # with a bare ``python`` at the beginning of the kernel's own command.
            return [command[0] if _PYTHON.fullmatch(inner[0]) else inner[0], *inner[1:]]
        break
    return [*command]


def has_launcher(command: Sequence[str]) -> bool:
    """Return whether ``command`` contains one of our launchers."""
    return any(part in (LAUNCHER, IPYKERNEL_LAUNCHER) for part in command)


def encrypts(spec: Mapping[str, Any]) -> bool:
    """Return whether a kernelspec says that its kernel encrypts its messages."""
    supported = (spec.get("metadata") or {}).get("supported_encryption") or ()
    return "curve" in ([supported] if isinstance(supported, str) else supported)


def enter_session(
    command: list[str],
    environ: MutableMapping[str, str],
    answer: Mapping[str, Any],
    socket: Path | None = None,
) -> tuple[list[str], str]:
    """Prepare ``environ``, in place, for a kernel in the session that ``answer`` describes.

    ``socket`` is the socket of that session's broker; None if there is no session. Return the
    command to start, and why the kernel gets no GPU ("" if it may get one).
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
    # This kernel has no agent, and the guard would not request a slice for it. So the kernel must
    # not find a device.
    hide_devices(environ)
    why = (
        "and the guard does not do so with attach policy 'manual'"
        if attach == "manual"
        else "and this pool runs without the guard (`jupyter gpupool doctor` says why)"
    )
    return command, f"it is not an ipykernel, so only the guard can ask for a GPU slice, {why}"


def check_options(stanza: Mapping[str, Any], kernel: str, known: Sequence[str] = OPTIONS) -> None:
    """Refuse options of a kernelspec that do not exist.

    Raises
    ------
    ConfigError
        With the unknown option and the nearest known one.
    """
    for name in stanza:
        if name not in known:
            raise ConfigError(
                f"The kernelspec of {kernel!r} sets the option {name!r}, which its GPU pool "
                f"provisioner does not have; the options are {', '.join(known)}.",
                code=Code.UNKNOWN_OPTION,
                next_step=did_you_mean(name, known),
            )


def options_of(provisioner: str) -> tuple[str, ...]:
    """Return the names of the options that ``provisioner``, one of ours, accepts."""
    return (*OPTIONS, *PLACEMENT_OPTIONS) if provisioner == REMOTE_PROVISIONER else OPTIONS


def same_environment(python: str) -> bool:
    """Return whether ``python`` is this process's interpreter, which can import this package."""
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
    """Return a private folder with a link to this package, for the PYTHONPATH of other
    environments.

    If PYTHONPATH named the folder of the installed package, the other environment could also import
    all other packages in that folder.

    Raises
    ------
    GPUPoolError
        If another user could change the files that Python imports from this folder.
    """
    package = Path(__file__).resolve().parent
    base = user_runtime_dir()
    folder = base / f"agent-{hashlib.sha256(str(package).encode()).hexdigest()[:12]}"
    for path in (base, folder):  # two calls, because mkdir gives parents the default mode
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (base, folder):
        found = path.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or stat.S_IMODE(found.st_mode) & 0o022
        ):
            raise GPUPoolError(
                f"{path} must be a folder of yours that no other user can change: the pool uses "
                "this folder to start kernels of other environments.",
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


# ---------------------------------------------------------------------- the program

#: The kernelspec that the wheel installs.
SHIPPED = "gpupool-python3"

#: The most seconds that a broker may take to start. It is less than a minute, because clients such
#: as VS Code wait a minute for a kernel.
START_TIMEOUT = 45.0

#: If the client itself runs in a pooled kernel, this process inherits these variables from that
#: kernel's session.
OUTER_VARIABLES = ("GPUPOOL_SESSION", "GPUPOOL_TOKEN", "GPUPOOL_ATTACH")

_USAGE = "usage: python -m jupyter_gpupool.launcher --kernel NAME -- COMMAND..."


def become(command: Sequence[str], kernel: str = SHIPPED) -> NoReturn:
    """Replace this process by the kernel that ``command`` starts, in its own session.

    The function opens the session, unless the provisioner has already opened it.

    Parameters
    ----------
    command:
        The kernel's own command, with the connection file.
    kernel:
        The name of the kernel's kernelspec. The request is in the kernelspec's ``config``.
    """
    if os.environ.get(OPENED_VARIABLE):
        env = {k: v for k, v in os.environ.items() if k != OPENED_VARIABLE}
        _execute(list(command), env)
    env = without_guard(os.environ)
    for name in OUTER_VARIABLES:
        env.pop(name, None)
    try:
        final, why_not = open_session(list(command), read_kernelspec(kernel), kernel, env)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except GPUPoolError as error:
        final, why_not = _without_session(list(command), env, str(error))
    except Exception as error:  # a kernel without a GPU is better than no kernel
        final, why_not = _without_session(list(command), env, f"{type(error).__name__}: {error}")
    if why_not:
        print(f"GPU pool: this kernel runs without a GPU: {why_not}", file=sys.stderr, flush=True)
    _execute(final, env)


def _execute(command: list[str], env: Mapping[str, str]) -> NoReturn:
    # Python ignores these signals, and the kernel would inherit this through exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise SystemExit(
            f"GPU pool: the kernel's command {command[0]} cannot be started ({error.strerror})."
        ) from None


def _without_session(command: list[str], env: dict[str, str], why: str) -> tuple[list[str], str]:
    """Hide the devices from the kernel, and let its agent report why."""
    hide_devices(env)
    env[NO_SESSION_VARIABLE] = why
    try:
        answer: dict[str, Any] = {"env": {}, "attach": "lazy"}
        return enter_session(command, env, answer)[0], why
    except GPUPoolError:
        return command, why  # start without an agent: it would only repeat the line on stderr


def open_session(
    command: list[str],
    spec: Mapping[str, Any],
    kernel: str,
    env: dict[str, str],
    *,
    client_here: bool = True,
    model: str = "",
    data: Sequence[str] = (),
) -> tuple[list[str], str]:
    """Open a session for this process, with the request in the kernelspec ``spec``.

    Return the kernel's command, and why the kernel gets no GPU ("" if it may get one).

    ``client_here`` says whether the kernel's client runs on this machine. If it does, this function
    compares the client's configuration with the broker's, and ``env`` gets a notice if they differ.
    ``model`` and ``data`` are the GPU model and the folders that the kernel needs, if a cluster has
    chosen this machine.
    """
    metadata = spec.get("metadata") or {}
    provisioner = metadata.get("kernel_provisioner") or {}
    stanza = provisioner.get("config") or {}
    shown = str(spec.get("display_name") or kernel)
    check_options(stanza, shown, options_of(str(provisioner.get("provisioner_name"))))
    request, attach = _wanted(stanza, shown)
    if attach != "manual" and not runs_ipykernel(command):
        attach = "lazy"  # without an agent, nobody sees the cells; the provisioner does the same
    named = str(stanza.get("broker_socket") or "")
    with closing(ClientAgain(lambda: living_broker(named), timeout=START_TIMEOUT)) as client:
        answer, socket = client.ask(
            "open",
            kernel_id=_kernel_id(command),
            label=_label(env, shown),
            request=request,
            attach=attach,
            group=str(stanza.get("group") or "") or None,
            **({"model": model} if model else {}),
            **({"data": [*data]} if data else {}),
        )
        final, why_not = enter_session(command, env, answer, socket)
        if client_here:
            # This import is slow.
            from .config.differences import notice

            text = notice(None, answer, who="This kernel's client")
            if text:
                env[NOTICE_VARIABLE] = text
        client.call("launched", session=answer["session"], pid=os.getpid())
    return final, why_not


def _wanted(stanza: Mapping[str, Any], kernel: str) -> tuple[dict[str, Any], str | None]:
    """Return the request and the attach policy in a kernelspec's ``config``."""
    request = {k: v for k, v in stanza.items() if k not in _BESIDE and v}
    for name in ("memory", "limit"):
        if name in request:
            try:
                request[name] = parse_bytes(request[name])
            except ValueError as error:
                raise ConfigError(f"The kernelspec of {kernel!r}, {name}: {error}") from None
    attach = stanza.get("attach") or None
    if attach is not None and attach not in POLICIES:
        raise ConfigError(
            f"The kernelspec of {kernel!r} has the unknown attach policy {attach!r}; the policies "
            f"are {', '.join(POLICIES)}.",
            next_step=did_you_mean(str(attach), POLICIES),
        )
    return request, attach


def read_kernelspec(name: str) -> Mapping[str, Any]:
    """Return the kernelspec ``name`` from its file; {} if no file can be read."""
    from jupyter_core.paths import jupyter_path

    for folder in jupyter_path("kernels"):
        try:
            found = json.loads(Path(folder, name, "kernel.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(found, dict):
            return found
    return {}


def _kernel_id(command: Sequence[str]) -> str:
    """Return an id for this kernel, from the name of its connection file."""
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.suffix == ".json":
            return path.stem.removeprefix("kernel-")
    return ""


def _label(env: Mapping[str, str], shown: str) -> str:
    """Return the label by which people recognise this kernel.

    It is the notebook's name if the client sets it (``JPY_SESSION_NAME``). Otherwise it is the
    working directory (usually the notebook's folder) with the name of the kernelspec.
    """
    notebook = Path(env.get("JPY_SESSION_NAME", "")).name
    if notebook:
        return notebook
    try:
        folder = Path.cwd()
    except OSError:  # the directory was deleted
        return shown
    return f"{'~' if folder == Path.home() else folder.name or '/'}: {shown}"


def living_broker(named: str) -> Path:
    """Return the socket of a running broker.

    With ``named``, only the broker of this socket counts; the function restarts it if it has died.
    Without ``named``, the function starts this user's own broker if no broker runs.
    """
    from .starting import answers, ensure_broker, revive

    if named:
        path = Path(named)
        if not answers(path):
            revive(path, timeout=START_TIMEOUT)
        check_socket(path)
        return path
    from .config import load_settings

    configured = load_settings().socket
    path = find_socket(configured)
    if answers(path):
        return path
    return ensure_broker(None, configured, timeout=START_TIMEOUT)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Read the command line and become the kernel."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] != ["--kernel"] or words[2:3] != ["--"] or not words[3:]:
        raise SystemExit(_USAGE)
    command = words[3:]
    if command[0] in ("python", "python3"):
        command[0] = sys.executable  # as in jupyter_client
    become(command, words[1])


if __name__ == "__main__":
    main()
