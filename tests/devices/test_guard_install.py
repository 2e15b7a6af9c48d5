# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The guard's library, the links to it, and environments with and without the guard."""

from __future__ import annotations

import os
import stat

import pytest

from jupyter_gpupool.guard import install
from jupyter_gpupool.guard.install import (
    FOLDER,
    GuardFolderError,
    GuardMissing,
    guard_directory,
    library,
    session_environment,
    without_guard,
)

NAMES = ["libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"]


@pytest.fixture
def lib(tmp_path, monkeypatch):
    """A package whose files look as if its guard is compiled."""
    folder = tmp_path / "package" / "guard" / "lib"
    folder.mkdir(parents=True)
    for name in install.LIBRARIES:
        (folder / name).write_bytes(name.encode())
    monkeypatch.setattr(install, "_LIB", folder)
    return folder


@pytest.fixture
def base(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    return folder


def links(folder):
    return {path.name: str(path.readlink()) for path in sorted(folder.iterdir())}


# ------------------------------------------------------------------ the library


def test_library_is_in_the_folder_of_the_package(lib):
    assert library() == lib / "libcuda.so.1"


def test_guard_that_is_not_compiled_says_how_to_compile_it(lib):
    (lib / "libcuda.so.1").unlink()
    with pytest.raises(GuardMissing) as caught:
        library()
    assert str(caught.value) == (
        f"The guard is not compiled: {lib}/libcuda.so.1 is missing. Install a C compiler (gcc or "
        "clang, callable as cc) and run: python -m jupyter_gpupool.guard.build"
    )


# ------------------------------------------------------------------ the folder of links


def test_folder_has_a_link_for_each_name_of_the_driver(lib, base):
    folder = guard_directory(base)
    assert folder == base / FOLDER
    assert links(folder) == {
        name: str(lib / (name if name.endswith(".1") else f"{name}.1")) for name in NAMES
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_every_user_can_read_the_folder_with_any_umask(lib, base):
    old = os.umask(0o077)
    try:
        folder = guard_directory(base)
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_second_call_changes_nothing(lib, base):
    before = {path.name: path.lstat().st_ino for path in guard_directory(base).iterdir()}
    assert {path.name: path.lstat().st_ino for path in guard_directory(base).iterdir()} == before


@pytest.mark.parametrize("name", NAMES)
def test_stale_links_are_repaired(lib, base, name):
    folder = guard_directory(base)
    good = links(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/nowhere/of/an/older/installation")
    assert links(guard_directory(base)) == good
    (folder / name).unlink()
    assert links(guard_directory(base)) == good
    (folder / name).unlink()
    (folder / name).write_text("no link at all")
    assert links(guard_directory(base)) == good


def test_no_link_points_to_a_missing_library(lib, base):
    guard_directory(base)
    (lib / "libnvidia-ml.so.1").unlink()
    assert [*links(guard_directory(base))] == ["libcuda.so", "libcuda.so.1"]


def test_no_folder_is_made_without_a_guard(lib, base):
    (lib / "libcuda.so.1").unlink()
    with pytest.raises(GuardMissing):
        guard_directory(base)
    assert [*base.iterdir()] == []


@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_folder_that_others_may_write_to_is_refused(lib, base, mode):
    guard_directory(base).chmod(mode)
    with pytest.raises(GuardFolderError, match=f"rm -rf {base / FOLDER}"):
        guard_directory(base)
    (base / FOLDER).chmod(0o755)
    base.chmod(mode)
    with pytest.raises(GuardFolderError, match="only this user can write to"):
        guard_directory(base)


def test_link_in_place_of_the_folder_is_refused(lib, base, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (base / FOLDER).symlink_to(elsewhere)
    with pytest.raises(GuardFolderError):
        guard_directory(base)
    assert [*elsewhere.iterdir()] == []


def test_folder_that_cannot_be_made_is_explained(lib, tmp_path):
    with pytest.raises(GuardFolderError, match=r"cannot be made: .*No such file"):
        guard_directory(tmp_path / "missing")


# ------------------------------------------------------------------ environments


def test_session_has_its_page_and_the_guard_comes_first(lib, base):
    folder = guard_directory(base)
    assert session_environment(folder, base / "page") == {
        "LD_PRELOAD": f"{folder}/libcuda.so.1",
        "LD_LIBRARY_PATH": f"{folder}",
        "GPUPOOL_PAGE": f"{base}/page",
    }


def test_other_entries_of_a_session_follow_the_guard(lib, base):
    folder = guard_directory(base)
    found = session_environment(
        folder,
        base / "page",
        {"LD_PRELOAD": "/jemalloc.so", "LD_LIBRARY_PATH": f"/emulator:{folder}", "A": "b"},
    )
    assert found == {
        "LD_PRELOAD": f"{folder}/libcuda.so.1:/jemalloc.so",
        "LD_LIBRARY_PATH": f"{folder}:/emulator",
        "GPUPOOL_PAGE": f"{base}/page",
    }


def test_environment_without_the_guard_equals_the_original(lib, base):
    users = {"LD_PRELOAD": "/jemalloc.so", "LD_LIBRARY_PATH": "/a:/b", "PATH": "/bin"}
    session = session_environment(guard_directory(base), base / "page", users)
    inside = {**users, **session, "GPUPOOL_VISIBLE": "GPU-1", "GPUPOOL_REAL_LIBCUDA": "/x"}
    assert without_guard(inside) == users
    bare = {"PATH": "/bin", **session_environment(guard_directory(base), base / "page")}
    assert without_guard(bare) == {"PATH": "/bin"}


def test_entries_of_a_dead_brokers_folder_are_removed_too():
    gone = {
        "LD_PRELOAD": "/dev/shm/gone/gpupool-guard/libcuda.so.1 /jemalloc.so",
        "LD_LIBRARY_PATH": "/dev/shm/gone/gpupool-guard/:/a",
    }
    assert without_guard(gone) == {"LD_PRELOAD": "/jemalloc.so", "LD_LIBRARY_PATH": "/a"}


def test_entries_of_the_packages_own_folder_are_removed_too(lib):
    inside = {"LD_PRELOAD": f"{lib}/libcuda.so.1", "LD_LIBRARY_PATH": f"{lib}:/a"}
    assert without_guard(inside) == {"LD_LIBRARY_PATH": "/a"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"LD_PRELOAD": "/usr/lib/libcuda.so.1", "LD_LIBRARY_PATH": "/usr/lib:"},
        {"LD_PRELOAD": "/a.so /b.so"},
        {"LD_LIBRARY_PATH": ""},
    ],
)
def test_environment_that_has_no_guard_stays_unchanged(env):
    assert without_guard(env) == env
