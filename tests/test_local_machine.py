# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_gpupool import local_machine
from jupyter_gpupool.local_machine import FolderError


@pytest.fixture
def fresh():
    local_machine.machine_id.cache_clear()
    yield
    local_machine.machine_id.cache_clear()


def test_machine_id_is_stable_and_hides_the_real_number():
    command = [
        sys.executable,
        "-c",
        "from jupyter_gpupool import local_machine as m; print(m.machine_id())",
    ]
    other = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert other == local_machine.machine_id()
    assert re.fullmatch(r"[0-9a-f]{12}", other)
    if local_machine.MACHINE_ID.exists():
        assert other not in local_machine.MACHINE_ID.read_text()


@pytest.mark.parametrize("text", [None, "", "uninitialized\n", "x" * 32])
def test_machine_without_an_id_gets_one_from_name_and_network(fresh, monkeypatch, tmp_path, text):
    path = tmp_path / "machine-id"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(local_machine, "MACHINE_ID", path)
    first = local_machine.machine_id()
    local_machine.machine_id.cache_clear()
    assert local_machine.machine_id() == first
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    if not Path("/var/lib/dbus/machine-id").exists():
        local_machine.machine_id.cache_clear()
        assert local_machine.machine_id() != first


def test_a_container_has_another_id_than_its_host(fresh, monkeypatch):
    host = local_machine.machine_id()
    local_machine.machine_id.cache_clear()
    monkeypatch.setattr(local_machine, "FIRST_NAMESPACE", "another")
    assert local_machine.machine_id() != host


@pytest.mark.parametrize(
    ("number", "name"),
    [(0x6969, "NFS"), (0xFE534D42, "SMB2"), (0x65735546, "FUSE"), (0x0BD00BD0, "Lustre"),
     (0x47504653, "GPFS"), (0x00C36400, "CephFS"), (0x01021997, "9P"), (0xEF53, ""),
     (0x01021994, ""), (0x9123683E, ""), (0x794C7630, "")],
)  # fmt: skip
def test_network_file_systems_are_recognised_by_number(monkeypatch, number, name):
    monkeypatch.setattr(local_machine, "_file_system", lambda _: number)
    assert local_machine.network_file_system(Path("/anywhere")) == name


def test_file_system_comes_from_the_nearest_existing_folder(tmp_path):
    assert local_machine._file_system(tmp_path / "not" / "yet") == local_machine._file_system(
        tmp_path
    )
    assert local_machine._file_system(Path("/proc/self/none")) == 0x9FA0  # the file system of /proc
    assert local_machine.network_file_system(tmp_path) == ""


def test_local_folder_skips_network_mounts_and_taken_names(monkeypatch, tmp_path):
    bases = [tmp_path / name for name in ("network", "taken", "good")]
    for base in bases:
        base.mkdir()
    monkeypatch.setattr(local_machine, "LOCAL_BASES", tuple(bases))
    monkeypatch.setattr(
        local_machine,
        "_file_system",
        lambda path: 0x6969 if bases[0] in (path, *path.parents) else 0,
    )
    name = f"gpupool-{os.geteuid()}"
    assert local_machine.local_folder() == bases[1] / name
    monkeypatch.setattr(
        local_machine, "_taken_by", lambda path: 4321 if path.parent == bases[1] else None
    )
    assert local_machine.local_folder() == bases[2] / name


def test_private_folder_is_closed_to_other_users(tmp_path):
    folder = tmp_path / "a" / "b"
    assert local_machine.make_private(folder) == folder
    folder.chmod(0o777)
    local_machine.make_private(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(FolderError):
        local_machine.make_private(tmp_path / "link")
    if os.geteuid() == 0:
        os.chown(folder, 65534, 65534)
        with pytest.raises(FolderError, match="belongs to user id 65534"):
            local_machine.make_private(folder)
