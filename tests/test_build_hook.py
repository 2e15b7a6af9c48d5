# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The build hook of the package: what it compiles, and when it builds the part for JupyterLab."""

import importlib.util
import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


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
    """Return a function that makes a build hook without the part for JupyterLab.

    Other tests check the part for JupyterLab.
    """
    monkeypatch.setenv("GPUPOOL_NO_LABEXTENSION", "1")

    def make(target="wheel"):
        class Hook(module.CustomBuildHook):
            root, app, target_name = str(ROOT), App(), target

            def __init__(self):
                pass

        return Hook()

    return make


@pytest.mark.parametrize("version", ["standard", "editable"])
def test_the_package_contains_the_emulated_driver(hook, version):
    data = {"pure_python": True}
    one = hook()
    one.initialize(version, data)
    assert data["pure_python"] is False
    assert data["tag"].startswith("py3-none-linux_")
    assert one.app.warnings == []


def test_package_built_without_a_compiler_is_pure_python(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    data, one = {"pure_python": True}, hook()
    one.initialize("standard", data)
    assert data == {"pure_python": True}
    assert len(one.app.warnings) == 2  # one for the emulated driver, one for the guard
    assert not any("\n" in warning for warning in one.app.warnings)


def test_source_distributions_compile_nothing(hook, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    data, one = {}, hook("sdist")
    one.initialize("standard", data)
    assert (data, one.app.warnings) == ({}, [])


LOCKED = ("package.json", "tsconfig.json", "yarn.lock")


def test_jupyterlab_part_is_built_again_after_a_failed_build(module, tmp_path):
    (tmp_path / "labextension" / "src").mkdir(parents=True)
    source = tmp_path / "labextension" / "src" / "index.ts"
    for path in (source, *(source.parents[1] / name for name in LOCKED)):
        path.touch()
    out = tmp_path / "jupyter_gpupool" / "labextension"
    assert not module._ui_is_built(tmp_path)
    (out / "static").mkdir(parents=True)
    # JupyterLab's builder first copies the file in this form. It adds ``_build`` after it has
    # compiled.
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
