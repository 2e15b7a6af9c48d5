# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool install-service``: installs one broker for the machine, as a service.

``install-service`` prints each file and each command before it writes the file or runs the command.
``--undo`` removes everything. To start and stop the service, use the service manager's own
commands. ``install-service`` also upgrades the service: it restarts the broker, and a restart ends
no kernel.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Mapping, Sequence

from ..config import load_timetable
from ..endpoint import MACHINE_SOCKET, listening_at
from ..errors import Code, GPUPoolError
from .root_paths import changeable
from .service_files import (
    MANAGERS,
    Layout,
    Manager,
    ServiceFile,
    earlier_config,
    is_unchanged,
    stamped,
)

#: By service manager: a folder that exists only while this manager runs. For systemd, see
#: sd_booted(3).
_RUNNING = {"systemd": Path("/run/systemd/system"), "openrc": Path("/run/openrc")}

#: The journal's folder if the configuration names no other folder.
_STATE = Path("/var/lib/gpupool")


class ServiceError(GPUPoolError):
    """The service cannot be installed or removed; the text says why."""

    code = Code.SERVICE


def install_service(
    *,
    manager: str,
    root: Path | None,
    config: Sequence[Path],
    undo: bool,
    dry_run: bool,
    machine: Path = Path("/"),
) -> int:
    """Install, upgrade or remove the service; return 0.

    Parameters
    ----------
    manager:
        "systemd", "openrc" or "runit"; "" means the manager that runs on this machine.
    root:
        The root folder of an image. If it is given, the files are written below it, and no command
        runs.
    config:
        Further configuration files that the broker reads.
    undo:
        Remove everything that an earlier call has installed.
    dry_run:
        Print each step, but change nothing.
    machine:
        The root folder of the running machine.
    """
    chosen = MANAGERS[manager or _running_manager(root)]
    if os.geteuid() and not dry_run and root is None:
        raise ServiceError(
            "Only root may install or remove the machine's service.",
            next_step="Use sudo, or --dry-run to see what would happen.",
        )
    base = root.expanduser().absolute() if root is not None else machine
    found = _found(chosen, base)
    for path in found.values():
        _check_ours(path)
    if undo:
        _remove(chosen, base, found, run=root is None, dry_run=dry_run)
        return 0
    layout = _layout(config or _kept(chosen, found))
    if root is None:
        _check_programs(layout)
        if not found:
            _check_free(layout)
    for file in chosen.files(layout):
        _write(base / file.path.relative_to("/"), file, dry_run)
    again = bool(found) and _has_begun(chosen, base)
    commands = chosen.upgrade(layout) if again else chosen.begin(layout)
    for command in commands:
        problem = _run(command, run=root is None, dry_run=dry_run)
        if problem:
            raise ServiceError(
                problem, next_step="The files written before this step stay; --undo removes them."
            )
    if dry_run:
        print("Nothing was changed.")
    elif root is None:
        print(
            f"The service {'now runs this version' if again else 'runs'}. New kernels of all "
            "users join its pool.\nCheck it: jupyter gpupool doctor"
        )
    return 0


def _found(manager: Manager, base: Path) -> dict[Path, Path]:
    """Return the service's installed files.

    Each key is the path of a file on the machine. Its value is the path of this file below
    ``base``.
    """
    # The paths of the files are the same for each layout, so the values of this layout do not
    # matter.
    places = [file.path for file in manager.files(Layout(Path("/"), (), MACHINE_SOCKET, _STATE))]
    found = {place: base / place.relative_to("/") for place in places}
    return {place: path for place, path in found.items() if path.exists()}


def _has_begun(manager: Manager, base: Path) -> bool:
    return manager.sign is None or os.path.lexists(base / manager.sign.relative_to("/"))


def _kept(manager: Manager, found: Mapping[Path, Path]) -> tuple[Path, ...]:
    """Print and return the files after ``--config`` in the command of the installed service."""
    kept = tuple(
        path for file in found.values() for path in earlier_config(manager, file.read_text())
    )
    for path in kept:
        print(f"The service keeps --config {path} of the earlier installation")
    return kept


def _running_manager(root: Path | None) -> str:
    if root is not None:
        return "systemd"
    for name, sign in _RUNNING.items():
        if sign.is_dir():
            return name
    if shutil.which("sv"):
        return "runit"
    raise ServiceError(
        "This machine runs neither systemd nor OpenRC nor runit.",
        next_step="Run the broker yourself: jupyter gpupool broker --socket "
        f"{MACHINE_SOCKET}. Or name a service manager with --manager.",
    )


def _layout(config: Sequence[Path]) -> Layout:
    """Return the layout of a service whose broker reads the configuration files ``config``."""
    wanted = [path.expanduser().absolute() for path in config]
    settings = load_timetable(wanted).base
    if settings.socket and Path(settings.socket) != MACHINE_SOCKET:
        raise ServiceError(
            f"c.GPUPool.socket is {settings.socket}, but the service must listen at "
            f"{MACHINE_SOCKET}, where the kernels of all users look for a broker.",
            next_step="Remove c.GPUPool.socket from the configuration.",
        )
    if settings.cluster_identity:
        print(
            "c.GPUPool.cluster_identity is set, so the broker starts kernels for servers on other "
            "machines. The limits of the broker's unit would also apply to these kernels, so the "
            "unit sets no limits and keeps all rights of root."
        )
    loader = shutil.which("nvidia-modprobe")
    return Layout(
        python=Path(sys.executable), config=tuple(wanted), socket=MACHINE_SOCKET,
        state=settings.state_dir if os.geteuid() == 0 else _STATE,
        loader=Path(loader) if loader else None, hosts_kernels=bool(settings.cluster_identity),
    )  # fmt: skip


# ---------------------------------------------------------------------- checks before


def _check_ours(path: Path) -> None:
    """Refuse to replace or remove a file that somebody else wrote or has changed."""
    if not is_unchanged(path.read_text(encoding="utf-8", errors="replace")):
        raise ServiceError(
            f"Somebody has changed {path}, or this command did not write it.",
            next_step="Move the file away and run this command again. With systemd, your own "
            "settings belong in a drop-in (systemctl edit gpupool).",
        )


def _check_programs(layout: Layout) -> None:
    """Refuse to install if a user who is not root can change a program that root would run."""
    package = Path(__file__).resolve().parents[1]
    # The broker starts in another folder, and without the PYTHONPATH of this process. So this check
    # leaves out the first entry of sys.path (the present folder, or the script's folder) and the
    # entries from PYTHONPATH.
    here = [*sys.path[:1], *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    imported = [Path(folder) for folder in sys.path if folder and folder not in here]
    programs = [layout.python, package, *imported, *layout.config]
    for program in [*programs, layout.loader] if layout.loader else programs:
        where = changeable(program)
        if where:
            raise ServiceError(
                f"The service would run {program} as root, but a user who is not root can "
                f"change {where}.",
                next_step="Install jupyter_gpupool into an environment of root, such as "
                "/opt/gpupool, and run this command from there. Put configuration files into a "
                "folder of root, such as /etc/gpupool.",
            )


def _check_free(layout: Layout) -> None:
    """Refuse to install while another broker listens at the socket that the service needs."""
    from ..endpoint import journal_name

    lock = layout.state / f"{journal_name(layout.socket)}.lock"
    if listening_at(lock) == layout.socket:
        raise ServiceError(
            f"A broker that no service manager started listens at {layout.socket}.",
            next_step="End that broker first. Its kernels keep their state on the GPU, and the "
            "service takes over their sessions.",
        )


# ---------------------------------------------------------------------- changing the machine


def _write(path: Path, file: ServiceFile, dry_run: bool) -> None:
    text, mode = stamped(file.text), 0o755 if file.program else 0o644
    print(f"Write {path}")
    if dry_run:
        print("".join(f"    {line}" for line in text.splitlines(keepends=True)))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Write a new file and then rename it, so that the service manager never reads an incomplete
        # file.
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)  # an earlier call that was killed may have left this file
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(new, flags, 0o600), "w", encoding="utf-8") as opened:
            opened.write(text)
            os.fchmod(opened.fileno(), mode)
        new.rename(path)
    except OSError as error:
        raise ServiceError(f"{path} cannot be written ({error.strerror}).") from None


def _remove(
    manager: Manager, base: Path, found: Mapping[Path, Path], *, run: bool, dry_run: bool
) -> None:
    """Stop the service and remove its files.

    This continues after a failed step, because the service may be only half installed.
    """
    if not found:
        print("The service is not installed, so nothing was removed.")
        return
    layout = Layout(Path("/"), (), MACHINE_SOCKET, _STATE)
    failed = [_run(command, run=run, dry_run=dry_run) for command in manager.end(layout)]
    lock = base / f"{MACHINE_SOCKET}.lock".lstrip("/")
    if run and not dry_run and _is_held(lock):
        raise ServiceError(
            "\n".join(filter(None, ["The service's broker still runs.", *failed])),
            next_step="No file was removed. End the broker, then run this again.",
        )
    for path in found.values():
        print(f"Remove {path}")
        if not dry_run:
            path.unlink()
    # While the socket's file exists, kernels expect that the machine's broker starts again soon. So
    # remove the file.
    for command in (["rm", "-f", str(MACHINE_SOCKET)], *manager.ended):
        failed.append(_run(command, run=run, dry_run=dry_run))
    for problem in filter(None, failed):
        print(problem)
    if dry_run:
        print("Nothing was changed.")
    elif run:
        print(
            "The service is gone. Its journal stays: a broker that starts later takes over the "
            "kernels that still run."
        )


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock on this file."""
    with suppress(OSError):
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _run(command: Sequence[str], *, run: bool, dry_run: bool) -> str:
    """Print and run a command. Return why it failed; "" if it did not fail."""
    text = " ".join(command)
    print(f"Run {text}" if run else f"Not run, because of --root: {text}")
    if not run or dry_run:
        return ""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as error:
        return f"{command[0]} cannot be run ({error.strerror})."
    if not done.returncode:
        return ""
    said = "\n".join(done.stdout.strip().splitlines()[-8:])
    return f"This command failed with exit code {done.returncode}: {' '.join(command)}\n{said}\n"
