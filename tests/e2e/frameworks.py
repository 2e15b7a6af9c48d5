# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Finds out whether this package can be installed together with the packages that users have.

``python -m tests.e2e.frameworks`` writes the table of docs/admins.md. It fetches only metadata.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]

#: Requirements as users type them after ``pip install``. For each release of PyTorch, the
#: requirement selects its newest patch.
FRAMEWORKS = (
    *(f"torch=={version}.*" for version in ("2.6", "2.7", "2.8", "2.9", "2.10", "2.11")),
    *(f"torch=={version}.*" for version in ("2.12", "2.13", "2.14")),
    "torch",
    "jax[cuda12]",
    "jax[cuda13]",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "tensorflow[and-cuda]",
    "cudf-cu12",
    "cudf-cu13",
    "cuml-cu12",
    "numba-cuda[cu12]",
    "numba-cuda[cu13]",
)

#: The Python version for the resolver; every framework above has wheels for it.
PYTHON = "3.12"


def uv(folder: Path) -> list[str]:
    """Return the command of uv; install uv into ``folder`` if it is not available."""
    if found := shutil.which("uv"):
        return [found]
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(folder), "uv"], check=True)
    return [str(folder / "bin" / "uv")]


def resolve(command: list[str], *requirements: str, extra: str = "") -> dict[str, str]:
    """Resolve this package together with ``requirements``; return the version of each package.

    Raises
    ------
    ValueError
        If no versions fit together. The message comes from the resolver.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.in")
        wanted.write_text("\n".join(requirements) + "\n")
        done = subprocess.run(
            [
                *(*command, "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
                *("--no-emit-index-url", "--no-emit-find-links", "--python-version", PYTHON),
                *("--python-platform", "x86_64-manylinux_2_28"),
                *(("--extra", extra) if extra else ()),
                *(str(ROOT / "pyproject.toml"), str(wanted)),
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "UV_NO_PROGRESS": "1"},
            check=False,
        )
    if done.returncode:
        raise ValueError(done.stderr)
    pairs = re.findall(r"^([A-Za-z0-9_.-]+)(?:\[.*?\])?==(\S+)", done.stdout, re.MULTILINE)
    return {name.lower(): version for name, version in pairs}


def package_of(framework: str) -> str:
    """Return the package name in a requirement."""
    return re.split(r"[\[=<>!~]", framework)[0]


def main() -> None:
    """Print the table."""
    print("| beside | resolves to | `cuda-bindings` there | with `[devices]` in that environment |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        command = uv(Path(folder))
        for framework in FRAMEWORKS:
            found = resolve(command, framework)
            name = package_of(framework)
            try:
                resolve(command, f"{name}=={found[name]}", framework, extra="devices")
                together = "yes"
            except ValueError:
                together = "no"
            bindings = found.get("cuda-bindings", "-")
            print(f"| `{framework}` | {name} {found[name]} | {bindings} | {together} |", flush=True)


if __name__ == "__main__":
    main()
