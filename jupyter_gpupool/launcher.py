# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``python -m jupyter_gpupool.launcher --kernel NAME -- COMMAND...``: a kernel in a session.

Clients without kernel provisioners (VS Code is one) start the ``argv`` of a kernelspec themselves.
That of a pooled one is this program: it opens a session in the pool and becomes the kernel by exec,
so that the client's signals and its wait for the process reach the kernel. Where the provisioner
has opened the session, it only becomes the kernel. What fails leaves the kernel without a GPU and
says why, in one line; no kernel is ever started that nobody governs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Mapping, NoReturn, Sequence

from .again import ClientAgain
from .endpoint import NO_SESSION_VARIABLE, check_socket, find_socket
from .errors import ConfigError, GPUPoolError
from .guard.install import hide_devices, without_guard
from .launch import (
    NOTICE_VARIABLE,
    OPENED_VARIABLE,
    POLICIES,
    check_options,
    enter_session,
    runs_ipykernel,
)
from .text import did_you_mean
from .units import parse_bytes

#: The kernelspec that is shipped.
SHIPPED = "gpupool-python3"

#: Seconds for a broker to start. Clients give a kernel a minute (VS Code does).
START_TIMEOUT = 45.0

#: Of a session that this process inherits from the kernel which its client runs in.
_OUTER = ("GPUPOOL_SESSION", "GPUPOOL_TOKEN", "GPUPOOL_ATTACH")

_USAGE = "usage: python -m jupyter_gpupool.launcher --kernel NAME -- COMMAND..."


def become(command: Sequence[str], kernel: str = SHIPPED) -> NoReturn:
    """Become the kernel that ``command`` starts, in a session of its own.

    Parameters
    ----------
    command:
        The kernel's own, with the connection file in it.
    kernel:
        The name of its kernelspec, whose ``config`` says what to ask for.
    """
    if os.environ.get(OPENED_VARIABLE):
        env = {k: v for k, v in os.environ.items() if k != OPENED_VARIABLE}
        _execute(list(command), env)
    env = without_guard(os.environ)
    for name in _OUTER:
        env.pop(name, None)
    try:
        final, why_not = _open(list(command), kernel, env)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except GPUPoolError as error:
        final, why_not = _without_session(list(command), env, str(error))
    except Exception as error:  # a kernel without a GPU is better than none, whatever went wrong
        final, why_not = _without_session(list(command), env, f"{type(error).__name__}: {error}")
    if why_not:
        print(f"GPU pool: this kernel runs without a GPU: {why_not}", file=sys.stderr, flush=True)
    _execute(final, env)


def _execute(command: list[str], env: Mapping[str, str]) -> NoReturn:
    # Python ignores these, and what is ignored stays so after exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        raise SystemExit(
            f"GPU pool: the kernel's command {command[0]} cannot be started ({error.strerror})."
        ) from None


def _without_session(command: list[str], env: dict[str, str], why: str) -> tuple[list[str], str]:
    """Prepare for a kernel that finds no device, and whose agent says why."""
    hide_devices(env)
    env[NO_SESSION_VARIABLE] = why
    try:
        answer: dict[str, Any] = {"env": {}, "attach": "lazy"}
        return enter_session(command, env, answer)[0], why
    except GPUPoolError:
        return command, why  # without the agent, which only says what stderr says


def _open(command: list[str], kernel: str, env: dict[str, str]) -> tuple[list[str], str]:
    """Open a session for this process; return the command to become, and why it gets no GPU."""
    from .config.differences import notice

    spec = _kernelspec(kernel)
    metadata = spec.get("metadata") or {}
    stanza = (metadata.get("kernel_provisioner") or {}).get("config") or {}
    shown = str(spec.get("display_name") or kernel)
    request, attach = _wanted(stanza, shown)
    if attach != "manual" and not runs_ipykernel(command):
        attach = "lazy"  # as the provisioner does: it has no agent that sees cells
    named = str(stanza.get("broker_socket") or "")
    with closing(ClientAgain(lambda: _broker(named), timeout=START_TIMEOUT)) as client:
        answer = client.call(
            "open",
            kernel_id=_kernel_id(command),
            label=_label(env, shown),
            request=request,
            attach=attach,
        )
        final, why_not = enter_session(command, env, answer, client.path)
        text = notice(None, answer, who="This kernel's client")
        if text:
            env[NOTICE_VARIABLE] = text
        client.call("launched", session=answer["session"], pid=os.getpid())
    return final, why_not


def _wanted(stanza: Mapping[str, Any], kernel: str) -> tuple[dict[str, Any], str | None]:
    """Return what a kernelspec's ``config`` asks for: the request, and the attach policy."""
    check_options(stanza, kernel)
    request = {k: v for k, v in stanza.items() if k not in ("attach", "broker_socket") and v}
    for name in ("memory", "limit"):
        if name in request:
            try:
                request[name] = parse_bytes(request[name])
            except ValueError as error:
                raise ConfigError(f"The kernelspec of {kernel!r}, {name}: {error}") from None
    if "memory" in request:
        request.setdefault("limit", request["memory"])
    attach = stanza.get("attach") or None
    if attach is not None and attach not in POLICIES:
        raise ConfigError(
            f"The kernelspec of {kernel!r} has attach policy {attach!r}; there are "
            f"{', '.join(POLICIES)}.",
            next_step=did_you_mean(str(attach), POLICIES),
        )
    return request, attach


def _kernelspec(name: str) -> Mapping[str, Any]:
    """Return the kernelspec ``name`` as a file has it; {} if there is none that can be read."""
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
    """Return a name for this kernel: its client told none, but for the file it is given."""
    for word in command:
        path = Path(word.rpartition("=")[2])
        if path.suffix == ".json":
            return path.stem.removeprefix("kernel-")
    return ""


def _label(env: Mapping[str, str], shown: str) -> str:
    """Return what people recognise this kernel by.

    That is its notebook, where the client tells (``JPY_SESSION_NAME``), else the folder in which it
    is started, which is mostly the notebook's, and the name of its kernelspec.
    """
    notebook = Path(env.get("JPY_SESSION_NAME", "")).name
    if notebook:
        return notebook
    try:
        folder = Path.cwd()
    except OSError:  # it was deleted
        return shown
    return f"{'~' if folder == Path.home() else folder.name or '/'}: {shown}"


def _broker(named: str) -> Path:
    """Return the socket of a living broker; start this user's own if there is none."""
    from .autostart import ensure_broker
    from .config import load_settings
    from .starting import answers, revive

    if named:
        path = Path(named)
        if not answers(path):
            revive(path, timeout=START_TIMEOUT)
        check_socket(path)
        return path
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
        command[0] = sys.executable  # as jupyter_client does
    become(command, words[1])


if __name__ == "__main__":
    main()
