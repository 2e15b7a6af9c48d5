# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Builds the wheel, and tests it in a fresh environment that cannot import this checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


def command(*arguments, cwd=None, env=None, check=True):
    """Run a command without the variables of Python, Jupyter and the pool; return its result.

    With ``check``, fail if the command fails.
    """
    clean = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("GPUPOOL_", "JUPYTER_", "PYTHON", "VIRTUAL_ENV"))
    }
    done = subprocess.run(
        [str(a) for a in arguments],
        cwd=cwd,
        env={**clean, **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
        check=False,
    )
    assert not check or done.returncode == 0, f"{arguments}:\n{done.stdout}"
    return done


def source(folder: Path) -> Path:
    """Copy all files that git does not ignore into ``folder``.

    The copy has no compiled libraries, so the build of the wheel must compile them.
    """
    names = command("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in names.stdout.split():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def build(folder: Path, env=None, *, isolated=False) -> tuple[Path, str]:
    """Build a wheel from a copy of the sources; return the wheel and the output of pip."""
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **(env or {})}
    done = command(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        *([] if isolated else ["--no-build-isolation"]),
        "-v",
        "-w",
        folder / "dist",
        source(folder / "source"),
        cwd=folder,
        env=env,
    )
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel, done.stdout


def install(wheel: Path, folder: Path, env=None, extra="") -> Path:
    """Install the wheel and its dependencies into a new environment; return its folder ``bin``."""
    command(sys.executable, "-m", "venv", folder)
    lock = ROOT / "requirements" / "lock.txt"
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command(*pip, "-c", lock, f"{wheel}{extra}", env=env)
    return folder / "bin"


def test_wheel_has_everything_that_users_need(tmp_path):
    wheel, _ = build(tmp_path)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for wanted in (
        "emucuda/lib/libcuda.so.1",
        "emucuda/lib/libnvidia-ml.so.1",
        "jupyter_gpupool/guard/lib/libcuda.so.1",
        "jupyter_gpupool/guard/lib/libnvidia-ml.so.1",
        "share/jupyter/kernels/gpupool-python3/kernel.json",
        "share/jupyter/labextensions/@jupyter-gpupool/labextension/package.json",
        "share/jupyter/labextensions/@jupyter-gpupool/labextension/install.json",
    ):
        assert any(name.endswith(wanted) for name in names), f"{wanted} is not in {names}"
    binaries = install(wheel, tmp_path / "venv", extra="[devices]")
    env = {"PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    specs = command(binaries / "jupyter", "kernelspec", "list", env=env).stdout
    assert "gpupool-python3" in specs
    provisioners = command(binaries / "jupyter", "kernelspec", "provisioners", env=env).stdout
    assert "gpupool-provisioner" in provisioners
    doctor = command(binaries / "jupyter", "gpupool", "doctor", env=env, check=False).stdout
    assert "kernelspec" in doctor.lower(), doctor
    demo = command(binaries / "jupyter", "gpupool", "demo", cwd=tmp_path, env=env).stdout
    assert "nothing lost" in demo
    assert "attach policy 'lazy'" in demo


def test_wheel_built_without_node_has_the_jupyterlab_part(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("git", "sh", "env", "uname", "cc", "gcc", "as", "ld"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    wheel, _ = build(tmp_path, env={"PATH": str(tools)}, isolated=True)
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if "/labextensions/@jupyter-gpupool/" in n]
        entry = next(n for n in names if n.endswith("/package.json"))
        assert json.loads(archive.read(entry))["jupyterlab"]["_build"]["load"] in "".join(names)


def test_build_says_why_the_jupyterlab_part_cannot_be_built(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "jlpm").write_text("#!/bin/sh\necho no registry here\nexit 1\n")
    (tools / "jlpm").chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    done = command(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"),
        *("-w", tmp_path, source(tmp_path / "source")),
        env=env,
        check=False,
    )
    assert done.returncode
    assert "no registry here" in done.stdout
    assert "GPUPOOL_NO_LABEXTENSION=1" in done.stdout


def test_wheel_without_a_compiler_says_what_is_missing(tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("git", "sh", "env", "uname"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    bare = {"PATH": str(tools), "CC": "", "GPUPOOL_NO_LABEXTENSION": "1"}
    wheel, said = build(tmp_path, env=bare)
    assert "compiler" in said.lower(), said
    with zipfile.ZipFile(wheel) as archive:
        assert not [n for n in archive.namelist() if n.endswith("libcuda.so.1")]
    binaries = install(wheel, tmp_path / "venv", env=bare, extra="[devices]")
    env = {"PATH": f"{binaries}:{tools}", "CC": "", "HOME": str(tmp_path)}
    doctor = command(binaries / "jupyter-gpupool", "doctor", env=env, check=False)
    assert "compiler" in doctor.stdout.lower(), doctor.stdout
    assert "The guard is not compiled" in doctor.stdout
    demo = command(binaries / "jupyter-gpupool", "demo", cwd=tmp_path, env=env, check=False)
    assert demo.returncode != 0
    assert "compiler" in demo.stdout.lower(), demo.stdout
    assert "Traceback" not in demo.stdout
