# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The program that starts a kernel in a container: the images that it refuses, and its messages."""

from __future__ import annotations

import os
import sys
from collections import namedtuple

import pytest

from jupyter_gpupool.containers import start
from jupyter_gpupool.guard.install import library

GUARD = str(library())

Version = namedtuple("Version", "major minor micro")


def unknown(_name):
    raise ValueError("unrecognized configuration name")


#: The line that refuses an image without glibc.
NO_GLIBC = (
    "this image has musl or another C library, and the guard needs glibc; use an image of Debian"
)


@pytest.mark.parametrize(
    ("libc", "why"),
    [
        (lambda _: "glibc 2.34", ""),
        (lambda _: "glibc 3.0", ""),
        (lambda _: "glibc 2.31", "the guard needs glibc 2.34 or newer, and this image has 2.31"),
        (lambda _: "", NO_GLIBC),
        (unknown, NO_GLIBC),
    ],
)
def test_image_is_refused_if_its_c_library_is_unsuitable(monkeypatch, tmp_path, libc, why):
    needs = tmp_path / "libcuda.so.1"
    needs.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.9\0")
    monkeypatch.setattr(os, "confstr", libc)
    assert start.problem(str(needs)) == why


def test_image_with_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "version_info", Version(3, 9, 2))
    assert start.problem(GUARD) == (
        "Pooled GPU kernels need Python 3.10 or newer, and this image has 3.9"
    )


@pytest.fixture
def started(monkeypatch, tmp_path):
    """Return a function that runs the program in a folder like the mounted one.

    The function returns the command that the program executes, and the environment.
    """
    (tmp_path / "gpupool-guard").mkdir()
    (tmp_path / "gpupool-guard" / "libcuda.so.1").symlink_to(GUARD)
    environment, commands = {"PYTHONPATH": "/mine"}, []
    monkeypatch.setattr(start, "__file__", str(tmp_path / "start.py"))
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["start.py", "-f", "file.json"])
    monkeypatch.setattr(os, "execv", lambda *command: commands.append(command))

    def run():
        start.main()
        return commands[-1][1], {k: v for k, v in environment.items() if "PYTEST" not in k}

    return run


def test_good_image_starts_the_kernel_with_the_mounted_package(started, tmp_path):
    command, environment = started()
    assert command[1:] == ["-m", "jupyter_gpupool.ipykernel_launcher", "-f", "file.json"]
    assert environment == {"PYTHONPATH": f"{tmp_path}/python:/mine"}


def test_unsuitable_image_starts_a_kernel_without_gpu(started, monkeypatch, capsys):
    monkeypatch.setattr(os, "confstr", unknown)
    command, environment = started()
    assert command[1:] == ["-m", "ipykernel_launcher", "-f", "file.json"]
    assert environment == {"PYTHONPATH": "/mine", "CUDA_VISIBLE_DEVICES": "-1"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"GPU pool: this kernel runs without a GPU: {NO_GLIBC}."
