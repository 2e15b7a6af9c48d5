# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compiling the emulated driver, by hand and with the package."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from emucuda import build

ROOT = Path(build.__file__).resolve().parents[1]


def test_only_what_is_stale_is_compiled(tmp_path, monkeypatch):
    build.compile(tmp_path)
    names = ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    before = (tmp_path / "libcuda.so.1").stat().st_ino
    monkeypatch.setenv("CC", f"{sys.executable} -c raise")  # would fail
    build.compile(tmp_path)
    assert (tmp_path / "libcuda.so.1").stat().st_ino == before
    monkeypatch.delenv("CC")
    os.utime(tmp_path / "libcuda.so.1", (1, 1))
    build.compile(tmp_path)
    assert (tmp_path / "libcuda.so.1").stat().st_ino != before


def test_without_a_compiler_the_way_to_one_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.CompilerMissing, match="Install gcc or clang"):
        build.compile(tmp_path)
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "'no-such-compiler' is not on PATH" in capsys.readouterr().err


def test_a_failing_compiler_leaves_nothing_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CC", "false")
    assert build.main(["--out", str(tmp_path)]) == 1
    assert "failed with status 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_reported(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert build.main(["--out", str(tmp_path / "file" / "lib")]) == 1
    assert "--out" in capsys.readouterr().err


class App:
    def __init__(self):
        self.warnings = []

    def display_warning(self, text):
        self.warnings.append(text)


@pytest.fixture
def module():
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("hatch_build_under_test", ROOT / "hatch_build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hook(module, monkeypatch):
    """The hook without the JupyterLab part, which has tests of its own."""
    monkeypatch.setenv("GPUPOOL_NO_LABEXTENSION", "1")

    def make(target="wheel"):
        class Hook(module.CustomBuildHook):
            root, app, target_name = str(ROOT), App(), target

            def __init__(self):
                pass

        return Hook()

    return make


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_the_package_carries_the_driver(hook, version):
    data = {"pure_python": True}
    one = hook()
    one.initialize(version, data)
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-linux_")
    assert one.app.warnings == []


def test_without_a_compiler_the_package_is_pure(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    data, one = {"pure_python": True}, hook()
    one.initialize("standard", data)
    assert data == {"pure_python": True}
    assert len(one.app.warnings) == 2  # the emulated driver, the guard
    assert not any("\n" in warning for warning in one.app.warnings)


def test_source_distributions_compile_nothing(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    data, one = {}, hook("sdist")
    one.initialize("standard", data)
    assert (data, one.app.warnings) == ({}, [])


LOCKED = ("package.json", "tsconfig.json", "yarn.lock")


def test_a_jupyterlab_part_whose_build_failed_is_built_again(module, tmp_path):
    (tmp_path / "labextension" / "src").mkdir(parents=True)
    source = tmp_path / "labextension" / "src" / "index.ts"
    for path in (source, *(source.parents[1] / name for name in LOCKED)):
        path.touch()
    out = tmp_path / "jupyter_gpupool" / "labextension"
    assert not module._ui_is_built(tmp_path)
    (out / "static").mkdir(parents=True)
    # As the builder copies it before it compiles.
    (out / "package.json").write_text(json.dumps({"jupyterlab": {"extension": "lib/index.js"}}))
    assert not module._ui_is_built(tmp_path)
    load = "static/remoteEntry.0.js"
    (out / "package.json").write_text(json.dumps({"jupyterlab": {"_build": {"load": load}}}))
    assert not module._ui_is_built(tmp_path)
    (out / load).touch()
    os.utime(source, (1, 1))
    assert module._ui_is_built(tmp_path)
    future = (out / "package.json").stat().st_mtime + 10
    os.utime(source, (future, future))
    assert not module._ui_is_built(tmp_path)
