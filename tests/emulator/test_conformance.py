# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs conformance.c on the emulated driver. The program also works with any other driver."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from emucuda import build

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    out = tmp_path_factory.mktemp("conformance") / "conformance"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror"]
    command = [*build.compiler(), *flags, "-o", str(out), str(HERE / "conformance.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return out


def _run(program, machine, *skip):
    env = {**os.environ, **machine.env}
    done = subprocess.run(
        [program, *skip], env=env, capture_output=True, text=True, timeout=110, check=False
    )
    results = re.findall(r"^(ok|not ok) \d+ - (\w+)(?: # (SKIP))?", done.stdout, re.M)
    return done, {name: skip or result for result, name, skip in results}


def test_the_emulated_driver_conforms(program, emulated):
    done, results = _run(program, emulated("2x1GiB"))
    assert done.returncode == 0, done.stdout
    assert len(results) >= 26
    assert set(results.values()) == {"ok"}


def test_cases_can_be_left_out(program, emulated):
    rest = re.findall(r"CASE\((\w+)\)", (HERE / "conformance.c").read_text())
    left_out = [name for name in rest if name not in ("name", "version", "device")]
    done, results = _run(program, emulated("1x1GiB"), *left_out)
    assert done.returncode == 0, done.stdout
    assert {name for name, result in results.items() if result == "ok"} == {"version", "device"}


def test_program_ends_if_the_driver_cannot_be_loaded(program, emulated, tmp_path):
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    machine = emulated()
    machine.env["LD_LIBRARY_PATH"] = str(tmp_path)
    done, _ = _run(program, machine)
    assert done.returncode == 2
    assert "Bail out!" in done.stdout
