# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Tests of ``python -m emucuda.build``."""

import os
import sys

import pytest

from emucuda import build


def test_only_stale_libraries_are_compiled(tmp_path, monkeypatch, quick_compiler):
    monkeypatch.setenv("CC", quick_compiler)
    build.compile(tmp_path)
    names = [
        *("libcuda.so", "libcuda.so.1", "libcudart.so.12", "libcudart.so.13"),
        *("libnvidia-ml.so", "libnvidia-ml.so.1"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    before = (tmp_path / "libcuda.so.1").stat().st_ino
    monkeypatch.setenv("CC", f"{sys.executable} -c raise")  # this compiler fails if it runs
    build.compile(tmp_path)
    assert (tmp_path / "libcuda.so.1").stat().st_ino == before
    monkeypatch.setenv("CC", quick_compiler)
    os.utime(tmp_path / "libcuda.so.1", (1, 1))
    build.compile(tmp_path)
    assert (tmp_path / "libcuda.so.1").stat().st_ino != before


def test_a_missing_compiler_names_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.CompilerMissing, match="Install gcc or clang"):
        build.compile(tmp_path)
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "'no-such-compiler' is not on PATH" in capsys.readouterr().err


def test_command_accepts_the_warnings_of_a_newer_compiler(tmp_path, monkeypatch, capfd):
    """Users also run this command: the error for a missing library tells them to."""
    monkeypatch.setenv("CC", "cc -Wpadded")
    assert build.main(["--out", str(tmp_path)]) == 0
    assert "-Wpadded" in capfd.readouterr().err


def test_failing_compiler_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "false")
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "failed with status 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_unwritable_directory_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert build.main(["--out", str(tmp_path / "file" / "lib")]) == 1
    assert "--out" in capsys.readouterr().err
