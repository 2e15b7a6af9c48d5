# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests whether this package can be installed and works together with users' packages."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from jupyter_gpupool.devices.nvidia import interpreter
from tests import marks

from . import frameworks
from .kit import KERNEL_NAME
from .test_environments import NOTEBOOKS
from .test_install import build, command, install

pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def uv(tmp_path_factory):
    return frameworks.uv(tmp_path_factory.mktemp("uv"))


def newest(uv, framework):
    """Return the version of ``framework`` that the resolver chooses without this package."""
    done = subprocess.run(
        [
            *(*uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "-"),
            *("--python-version", frameworks.PYTHON),
            *("--python-platform", "x86_64-manylinux_2_28"),
        ],
        input=framework,
        capture_output=True,
        text=True,
        check=True,
    )
    name = frameworks.package_of(framework)
    (line,) = [
        line
        for line in done.stdout.splitlines()
        if line.lower().startswith((f"{name}==", f"{name}["))
    ]
    return line.partition("==")[2].split()[0]


@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_package_downgrades_no_framework(uv, framework):
    beside = frameworks.resolve(uv, framework)
    assert beside[frameworks.package_of(framework)] == newest(uv, framework)


def test_requirements_of_devices_resolve_for_every_python(uv):
    for version in ("3.10", "3.11", "3.12", "3.13"):
        done = subprocess.run(
            [
                *(*uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
                *("--python-version", version, "--only-binary", ":all:"),
                *("--python-platform", "x86_64-manylinux_2_28"),
                str(interpreter.REQUIREMENTS),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (version, done.stderr)
        pairs = (line.split("==") for line in done.stdout.split() if "==" in line)
        assert interpreter.problem(dict(pairs)) == "", version


def test_pool_works_with_the_pins_of_a_framework(tmp_path):
    """Server, broker and kernel have the cuda-bindings that PyTorch 2.10 for CUDA 12.8 pins."""
    wheel, _ = build(tmp_path, env={"GPUPOOL_NO_LABEXTENSION": "1"})
    binaries = install(wheel, tmp_path / "venv")
    pip = [binaries / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command(*pip, "cuda-bindings==12.9.4", "cuda-core")
    found = json.loads(command(binaries / "jupyter", "kernelspec", "list", "--json").stdout)
    assert KERNEL_NAME in found["kernelspecs"]
    with marks.short_folder() as folder:
        config = {"emulate": "1x512MiB,context=32MiB", "default_memory": "320MiB", "linger": 0}
        config |= {"state_dir": str(folder / "state"), "resume_headroom": 0}
        (folder / "jupyter_server_config.json").write_text(json.dumps({"GPUPool": config}))
        env = {
            "PATH": f"{binaries}:/usr/bin:/bin",
            "HOME": str(folder),
            marks.MARK: str(folder),
            "GPUPOOL_SOCKET": str(folder / "b.sock"),
            "JUPYTER_CONFIG_DIR": str(folder),
        }
        # NOTEBOOKS fails if NVIDIA's packages can be imported. Here they can, in unsuitable
        # versions, so remove this check.
        code = NOTEBOOKS.replace('for name in ("cuda", "pynvml"):', "for name in ():")
        refused = command(binaries / "python", "-c", code, KERNEL_NAME, env=env, check=False)
        assert "Run: jupyter gpupool install-devices" in refused.stdout
        done = command(binaries / "jupyter", "gpupool", "install-devices", env=env)
        assert str(tmp_path / "venv" / "share" / "gpupool" / "devices") in done.stdout
        done = command(binaries / "python", "-c", code, KERNEL_NAME, env=env)
        assert done.stdout.endswith("all bytes are right\n")
        # Download the wheels, and then install them without access to an index.
        wheels = folder / "wheels"
        command(binaries / "jupyter", "gpupool", "install-devices", "--download", wheels, env=env)
        offline = ["install-devices", "--wheels", wheels, "--folder", folder / "devices"]
        nowhere = {**env, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_NO_INDEX": "1"}
        done = command(binaries / "jupyter", "gpupool", *offline, env=nowhere)
        assert f"c.GPUPool.device_python = '{folder}/devices/bin/python'" in done.stdout


def test_lowest_allowed_dependencies_work_together(uv, tmp_path):
    """The pool works with the oldest allowed versions: two kernels take turns on one GPU."""
    wheel, _ = build(tmp_path, env={"GPUPOOL_NO_LABEXTENSION": "1"})
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    lowest = ["--resolution", "lowest-direct", "--python", str(venv / "bin" / "python")]
    command(*uv, "pip", "install", "--quiet", *lowest, f"{wheel}[devices]")
    with marks.short_folder() as folder:
        config = {"emulate": "1x512MiB,context=32MiB", "default_memory": "320MiB", "linger": 0}
        config |= {"state_dir": str(folder / "state"), "resume_headroom": 0}
        (folder / "jupyter_server_config.json").write_text(json.dumps({"GPUPool": config}))
        env = {
            "PATH": f"{venv / 'bin'}:/usr/bin:/bin",
            "HOME": str(folder),
            marks.MARK: str(folder),
            "GPUPOOL_SOCKET": str(folder / "b.sock"),
            "JUPYTER_CONFIG_DIR": str(folder),
        }
        code = NOTEBOOKS.replace('for name in ("cuda", "pynvml"):', "for name in ():")
        done = command(venv / "bin" / "python", "-c", code, KERNEL_NAME, env=env)
        assert done.stdout.endswith("all bytes are right\n")
