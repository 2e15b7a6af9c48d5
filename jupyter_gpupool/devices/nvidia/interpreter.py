# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Choose the Python interpreter for the child processes. It must have NVIDIA's packages.

Frameworks require other versions of these packages (PyTorch 2.10 requires cuda-bindings 12.9.4). So
the packages may be in a separate environment, and may be missing in the broker's environment.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping

from ...errors import ConfigError
from ...guard.install import without_guard
from ..child import SCRIPT

#: Allowed versions of each package. cuda.core.checkpoint needs ``CUcheckpointGpuPair``, which is in
#: cuda-bindings 13.0.2 and newer, but in no release 12. In cuda-bindings 13.3.0 the restore call is
#: broken.
RANGES = {
    "cuda-core": ">=1.0",
    "cuda-bindings": ">=13.0.2,!=13.3.0,<14",
    "nvidia-ml-py": ">=12.560",
}

#: The command that makes an environment with these packages.
INSTALL = "jupyter gpupool install-devices"

#: Advice for a problem of the interpreter.
TODO = f"Run: {INSTALL}"

#: The file with the tested versions of the packages, for each supported version of Python.
REQUIREMENTS = Path(__file__).with_name("requirements.txt")

#: The module whose programs run in child processes.
PROGRAMS = f"{__package__}.child_programs"

#: The last two parts of the paths that :func:`places` returns:
#: ``<environment>/share/gpupool/devices`` and ``~/.local/share/gpupool/devices``.
_BELOW = Path("gpupool", "devices")

#: Seconds for an interpreter to report its packages.
_ASK_TIMEOUT = 60.0

#: Variables that are removed from the environment of children. The first two would hide devices
#: from the children. If a user starts the broker inside a session, the last two would make the
#: children count as processes of that session.
_SCRUBBED = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "GPUPOOL_SESSION",
    "GPUPOOL_TOKEN",
)


@dataclass(frozen=True)
class Found:
    """An interpreter and what it reports; ``problem`` is "" if the children can use it."""

    path: str
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""


def places() -> tuple[Path, Path]:
    """Return the two places where ``jupyter gpupool install-devices`` can make the environment.

    The first place is in this interpreter's environment. If the user cannot write there, the
    command uses the second place, which is in the user's data folder.
    """
    data = os.environ.get("XDG_DATA_HOME", "")
    base = Path(data) if data.startswith("/") else Path.home() / ".local" / "share"
    return Path(sys.prefix, "share") / _BELOW, base / _BELOW


def _is_ours(folder: Path) -> bool:
    """Return whether this user or root owns ``folder``: root must not run a program of others."""
    try:
        return folder.stat().st_uid in (0, os.geteuid())
    except OSError:
        return False


def choose(configured: str = "") -> str:
    """Return the interpreter for child processes.

    If ``configured`` (``c.GPUPool.device_python``) is set, it is the result. Otherwise the result
    is the interpreter in the environment that ``jupyter gpupool install-devices`` has made. If this
    environment does not exist, the result is the interpreter of this process.

    Raises
    ------
    ConfigError
        If the configured program cannot be started.
    """
    if configured:
        if not os.access(configured, os.X_OK) or Path(configured).is_dir():
            raise ConfigError(
                f"c.GPUPool.device_python is {configured}, which is not a program that can be "
                "started.",
                next_step=f"Remove the option from the configuration, then run: {INSTALL}",
            )
        return configured
    for folder in places():
        python = folder / "bin" / "python"
        if os.access(python, os.X_OK) and _is_ours(folder):
            return str(python)
    return sys.executable


def environment(python: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env``, changed for child processes that ``python`` runs.

    If ``python`` is not this process's interpreter, the result has no ``PYTHONPATH`` and no
    ``PYTHONHOME``: their folders have packages for this process's version of Python.
    """
    if os.path.abspath(python) == os.path.abspath(sys.executable):
        return dict(env)
    return {k: v for k, v in env.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def child_environment(base: Mapping[str, str] | None, python: str = "") -> dict[str, str]:
    """Return the environment for children that ``python`` runs, made from ``base``.

    If ``base`` is None, the environment of this process is used. If ``python`` is "", the
    interpreter of this process is used.
    """
    # A user may start the broker inside a session. The guard of this session must not be loaded
    # into the broker's children.
    env = without_guard(os.environ if base is None else base)
    for name in _SCRUBBED:
        env.pop(name, None)
    return environment(python or sys.executable, env)


def ask(python: str, env: Mapping[str, str] | None = None) -> Found:
    """Return which versions of NVIDIA's packages ``python`` has. This function blocks."""
    import subprocess

    try:
        done = subprocess.run(
            [python, str(SCRIPT), PROGRAMS, "packages"],
            env=environment(python, os.environ if env is None else env),
            cwd="/",
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT,
            check=False,
        )
        said = json.loads(done.stdout)
    except OSError as error:
        return Found(python, problem=f"It cannot be started ({error.strerror}).")
    except subprocess.TimeoutExpired:
        return Found(python, problem=f"It gave no answer in {_ASK_TIMEOUT:g} s.")
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        return Found(python, problem=f"It does not work: {last[0]}.")
    return Found(python, said["python"], said["versions"], said["problem"])


def versions() -> dict[str, str]:
    """Return the versions that this interpreter would import; "" for a package that is missing."""
    # This import is slow, and a monitor or a self-test does not need it.
    import importlib.metadata

    found = {}
    for name in RANGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def problem(found: Mapping[str, str]) -> str:
    """Return why the packages ``found`` cannot be used, in a sentence; "" if they can."""
    missing = [name for name in RANGES if not found.get(name)]
    if missing:
        return f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} not installed."
    wrong = [
        f"{name} is {found[name]} and must be {RANGES[name]}"
        for name in RANGES
        if not _satisfies(found[name], RANGES[name])
    ]
    return f"{'; '.join(wrong)}." if wrong else ""


def _satisfies(version: str, wanted: str) -> bool:
    have = _numbers(version)
    for clause in wanted.split(","):
        operator, text = re.match(r"(>=|<|!=)(.*)", clause).groups()  # type: ignore[union-attr]
        limit = _numbers(text)
        width = max(len(have), len(limit))
        a, b = (numbers + (0,) * (width - len(numbers)) for numbers in (have, limit))
        if not {">=": a >= b, "<": a < b, "!=": a != b}[operator]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release part of a version: 13.0.2.post1 is (13, 0, 2)."""
    return tuple(map(int, re.match(r"\d*(?:\.\d+)*", version)[0].split(".") if version else ()))  # type: ignore[index]


def report() -> dict[str, Any]:
    """Return the packages of this interpreter. The child program ``packages`` calls this."""
    import platform

    found = versions()
    return {"python": platform.python_version(), "versions": found, "problem": problem(found)}
