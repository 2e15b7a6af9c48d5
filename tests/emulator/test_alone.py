# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The package ``emucuda`` without jupyter_gpupool: ``python -m emucuda``, and its own wheel."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import emucuda
from emucuda import build

FOLDER = Path(emucuda.__file__).parent

#: A CUDA program that needs only the driver: it fills memory and copies it back.
PROGRAM = r"""
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *args):
    code = getattr(cuda, name)(*args)
    assert code == 0, (name, code)
name, address = ctypes.create_string_buffer(80), ctypes.c_uint64()
device, context, host = ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_uint8 * 4096)()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDeviceGetName", name, 80, device)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(4096))
call("cuMemsetD8_v2", address, ctypes.c_ubyte(7), ctypes.c_size_t(4096))
call("cuMemcpyDtoH_v2", host, address, ctypes.c_size_t(4096))
print(name.value.decode(), set(host))
"""

#: All files that the package needs if it is published separately.
PROJECT = """
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "emucuda"
version = "0.1.0"
requires-python = ">=3.10"

[tool.hatch.build]
artifacts = ["emucuda/lib/*"]

[tool.hatch.build.targets.wheel]
packages = ["emucuda"]
"""


def run(*command, **options):
    options = {"capture_output": True, "text": True, "timeout": 110, "check": True, **options}
    return subprocess.run([*map(str, command)], **options)


def emulate(*arguments, **options):
    return run(sys.executable, "-m", "emucuda", *arguments, **options)


def test_package_works_without_the_product(tmp_path):
    pytest.importorskip("hatchling")
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    shutil.copytree(FOLDER, tmp_path / "source" / "emucuda", ignore=ignored)
    (tmp_path / "source" / "pyproject.toml").write_text(PROJECT)
    # Build without optimisation: this takes less time, and the test does not need fast code.
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": ".", "CC": str(compiler)}
    here = {"cwd": tmp_path / "source", "env": env}
    run(sys.executable, "-S", "-m", "emucuda.build", **here)
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", tmp_path, tmp_path / "source", cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("emucuda-*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    # With -S, Python does not use site-packages. So no other installed package can be imported.
    there = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}}
    found = run(sys.executable, "-S", "-c", "import jupyter_gpupool", check=False, **there)
    assert "No module named 'jupyter_gpupool'" in found.stderr
    command = ("--state", tmp_path / "machine", "1x1GiB", sys.executable, "-S", "-c", PROGRAM)
    done = run(sys.executable, "-S", "-m", "emucuda", *command, **there)
    assert re.fullmatch(r".*EMULATED.* \{7\}\n", done.stdout)


def test_programs_with_one_state_directory_share_devices(tmp_path):
    names = "import pynvml as n; n.nvmlInit(); print(n.nvmlDeviceGetCount())"
    state = ("--state", tmp_path / "machine")
    assert emulate(*state, "3x1GiB", "--", sys.executable, "-c", names).stdout == "3\n"
    assert (tmp_path / "machine" / "machine").exists()


def test_c_program_links_without_a_cuda_toolkit(tmp_path):
    (tmp_path / "program.c").write_text(
        "#include <stdio.h>\nint cuInit(unsigned), cuDeviceGetCount(int *);\n"
        'int main(void) { int n = 0; cuInit(0); cuDeviceGetCount(&n); printf("%d\\n", n); }\n'
    )
    library = ("-L", emucuda.library_dir(), "-lcuda")
    run(*build.compiler(), "-o", tmp_path / "program", tmp_path / "program.c", *library)
    state = ("--state", tmp_path / "machine")
    assert emulate(*state, "2x1GiB", tmp_path / "program").stdout == "2\n"


def test_command_without_a_program_prints_shell_variables(tmp_path):
    script = 'eval "$("$0" -m emucuda --state "$1" 1x1GiB)"; exec "$0" -c "$2"'
    done = run("sh", "-c", script, sys.executable, tmp_path / "a b", PROGRAM)
    assert done.stdout.endswith("{7}\n")


def test_program_runs_with_the_given_faults(tmp_path):
    program = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceGetHandleByIndex(0)"
    options = ("--state", tmp_path / "machine", "--faults", "device-lost device=0")
    done = emulate(*options, "1x1GiB", sys.executable, "-c", program, check=False)
    assert "GPU is lost" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["2x16"], 2, "'16' in '2x16' is less than one page of 2MiB. Write a unit:"),
        (["--faults", "device-last", "1x1GiB"], 2, "Did you mean 'device-lost'?"),
        (["1x1GiB", "no-such-program"], 127, "no-such-program cannot be started: No such file"),
    ],
)
def test_wrong_arguments_get_an_error_of_one_sentence(arguments, status, said):
    done = emulate(*arguments, check=False)
    assert done.returncode == status
    assert done.stderr.startswith("emucuda: ")
    assert said in done.stderr
