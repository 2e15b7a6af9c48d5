# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool install-service``: one broker for the machine, as a service.

It says each file and each command before it acts, and ``--undo`` takes all back. The service
manager's own commands do the rest: a restart of the broker ends no kernel, so an upgrade is
the same command again.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Sequence

from ..config import load_timetable
from ..endpoint import MACHINE_SOCKET, listening_at
from ..errors import Code, GPUPoolError
from .service_files import MANAGERS, Layout, Manager, ServiceFile, is_unchanged, stamped

#: A running systemd makes this folder (sd_booted(3)); OpenRC the second one.
_RUNNING = {"systemd": Path("/run/systemd/system"), "openrc": Path("/run/openrc")}


class ServiceError(GPUPoolError):
    """The service cannot be installed or removed; nothing was changed, or the step is named."""

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
        "systemd", "openrc" or "runit"; "" is the one that runs here.
    root:
        Write the files below this folder (an image), and run no command.
    config:
        Files that the broker also reads.
    undo:
        Remove what an earlier call has installed.
    dry_run:
        Only print.
    machine:
        The root folder of the machine that runs.
    """
    chosen = MANAGERS[manager or _running_manager(root)]
    if os.geteuid() and not dry_run and root is None:
        raise ServiceError(
            "Only root may install or remove the machine's service.",
            next_step="Use sudo, or --dry-run to see what would happen.",
        )
    layout = _layout(config)
    files = chosen.files(layout)
    base = root.expanduser().absolute() if root is not None else machine
    present = [file for file in files if _at(base, file).exists()]
    for file in present:
        _check_ours(_at(base, file))
    if undo:
        _remove(chosen, layout, base, present, run=root is None, dry_run=dry_run)
        return 0
    if root is None:
        _check_program(layout.python)
        if not present:
            _check_free(layout)
    for file in files:
        _write(_at(base, file), file, dry_run)
    commands = chosen.upgrade(layout) if present else chosen.begin(layout)
    _run_all(commands, run=root is None, dry_run=dry_run)
    if dry_run:
        print("Nothing was changed.")
    elif root is None:
        print(
            f"The service {'now runs this version' if present else 'runs'}: new kernels of "
            "every user are in its pool.\nCheck it: jupyter gpupool doctor"
        )
    return 0


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
        f"{MACHINE_SOCKET}. Or name one with --manager.",
    )


def _layout(config: Sequence[Path]) -> Layout:
    """Return what the files say, by the configuration that the broker will read."""
    wanted = [path.expanduser().absolute() for path in config]
    settings = load_timetable(wanted).base
    if settings.socket and Path(settings.socket) != MACHINE_SOCKET:
        raise ServiceError(
            f"c.GPUPool.socket is {settings.socket}, and the service listens at {MACHINE_SOCKET}, "
            "where every user's kernels look for it.",
            next_step="Remove c.GPUPool.socket from the configuration.",
        )
    state = settings.state_dir if os.geteuid() == 0 else Path("/var/lib/gpupool")
    loader = shutil.which("nvidia-modprobe") or ""
    return Layout(
        python=Path(sys.executable), config=tuple(wanted), socket=MACHINE_SOCKET, state=state,
        loader=f"{loader} -u -c 0" if loader else "",
    )  # fmt: skip


# ---------------------------------------------------------------------- checks before


def _check_ours(path: Path) -> None:
    """Refuse to replace or remove a file that somebody else wrote or has changed."""
    if not is_unchanged(path.read_text(encoding="utf-8", errors="replace")):
        raise ServiceError(
            f"Somebody has changed {path}, or this command did not write it.",
            next_step="Move it away and run this again; with systemd your own settings belong in "
            "a drop-in (systemctl edit gpupool).",
        )


def _check_program(python: Path) -> None:
    """Refuse to run as root what another user could change."""
    package = Path(__file__).resolve().parents[1]
    for program in (python, python.resolve(), package):
        for path in (program, *program.parents):
            found = path.lstat()
            sticky = bool(found.st_mode & stat.S_ISVTX)
            if stat.S_ISLNK(found.st_mode):
                continue  # what it points at is looked at itself
            if found.st_uid != 0 or (found.st_mode & 0o022 and not sticky):
                raise ServiceError(
                    f"The service would run {program} as root, and a user who is not root may "
                    f"change it: {path} (owner {found.st_uid}, mode "
                    f"{stat.S_IMODE(found.st_mode):o}).",
                    next_step="Install jupyter_gpupool into an environment of root, such as "
                    "/opt/gpupool, and run this command from there.",
                )


def _check_free(layout: Layout) -> None:
    """Refuse while a broker that is no service has the socket: two would fight for it."""
    from ..endpoint import journal_name

    lock = layout.state / f"{journal_name(layout.socket)}.lock"
    if listening_at(lock) == layout.socket:
        raise ServiceError(
            f"A broker that no service manager started listens at {layout.socket}.",
            next_step="End it first: its kernels keep what they have on the GPU, and the service "
            "takes over their sessions.",
        )


# ---------------------------------------------------------------------- acting


def _at(base: Path, file: ServiceFile) -> Path:
    return base / file.path.relative_to("/")


def _write(path: Path, file: ServiceFile, dry_run: bool) -> None:
    text, mode = stamped(file.text), 0o755 if file.program else 0o644
    print(f"Write {path}")
    if dry_run:
        print("".join(f"    {line}" for line in text.splitlines(keepends=True)))
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A service manager must not read half a file.
        new = path.with_name(f".{path.name}.new")
        new.write_text(text, encoding="utf-8")
        new.chmod(mode)
        new.rename(path)
    except OSError as error:
        raise ServiceError(f"{path} cannot be written ({error.strerror}).") from None


def _remove(
    manager: Manager,
    layout: Layout,
    base: Path,
    present: Sequence[ServiceFile],
    *,
    run: bool,
    dry_run: bool,
) -> None:
    if not present:
        print("The service is not installed: there is nothing to undo.")
        return
    _run_all(manager.end(layout), run=run, dry_run=dry_run)
    for file in present:
        path = _at(base, file)
        print(f"Remove {path}")
        if not dry_run:
            path.unlink()
    _run_all(manager.ended, run=run, dry_run=dry_run)
    if dry_run:
        print("Nothing was changed.")
    elif run:
        print(
            f"The service is gone. {layout.state} stays: a broker that starts later takes over the "
            "kernels that still run."
        )


def _run_all(commands: Sequence[Sequence[str]], *, run: bool, dry_run: bool) -> None:
    for command in commands:
        print(f"Run {' '.join(command)}" if run else f"Not run here: {' '.join(command)}")
        if not run or dry_run:
            continue
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
            )
        except OSError as error:
            raise ServiceError(f"{command[0]} cannot be run ({error.strerror}).") from None
        if done.returncode:
            said = "\n".join(done.stdout.strip().splitlines()[-8:])
            raise ServiceError(
                f"This failed with exit code {done.returncode}: {' '.join(command)}\n{said}\n",
                next_step="The files written before this step stay; --undo removes them.",
            )
