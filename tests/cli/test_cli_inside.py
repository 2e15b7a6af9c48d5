# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``doctor --inside``: what it finds in containers; some tests use real Linux namespaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from snapshots import pool

from jupyter_gpupool.cli import doctor, inside
from jupyter_gpupool.guard.install import guard_directory
from jupyter_gpupool.protocol import decode, encode

ROOT = Path(__file__).parents[2]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make all namespaces")


class Outside:
    """A broker outside the container. Its answer to ``status`` has the pid of the tests."""

    def __init__(self, folder):
        self.path = folder / "broker.sock"
        (folder / "broker.sock.pages").mkdir()
        guard_directory(folder / "broker.sock.pages")
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        status = pool(pid=os.getpid(), emulated=True)
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer, peer.makefile("rb") as lines:
                for line in lines:
                    peer.sendall(encode({**status, "type": "ok", "id": decode(line)["id"]}))

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def outside(tmp_path):
    found = Outside(tmp_path)
    yield found
    found.close()


def look(path, *container):
    done = subprocess.run(
        [*container, sys.executable, "-m", "jupyter_gpupool.cli", "doctor", "--inside", "--json",
         "--socket", str(path)], capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return done.returncode, {f["name"]: f for f in json.loads(done.stdout)}


@root_only
def test_container_with_its_own_process_numbers_is_refused(outside):
    code, found = look(outside.path, "unshare", "--pid", "--fork", "--mount-proc")
    assert (code, found["processes"]["verdict"]) == (1, "fail")
    assert "--pid=host" in found["processes"]["todo"]


@root_only
def test_container_with_its_own_mounts_and_network_passes(outside):
    code, found = look(outside.path, "unshare", "--mount", "--net", "--ipc")
    assert code == 0
    assert {f["verdict"] for f in found.values()} == {"ok"}


@root_only
def test_read_only_mount_of_the_pages_is_refused(outside):
    folder = outside.path.parent
    script = f'mount --bind {folder} {folder} && mount -o remount,ro,bind {folder} && exec "$@"'
    code, found = look(outside.path, "unshare", "--mount", "sh", "-c", script, "sh")
    assert (code, found["pages"]["verdict"]) == (1, "fail")


def test_missing_socket_names_the_folder_to_mount(tmp_path):
    found = inside.examine_inside(tmp_path / "broker.sock")[-1]
    assert found.verdict == "fail"
    assert f"Mount the folder {tmp_path}" in found.todo


def test_doctor_inside_defaults_to_the_machines_socket(monkeypatch):
    monkeypatch.delenv("GPUPOOL_SOCKET", raising=False)
    asked = []
    monkeypatch.setattr(inside, "examine_inside", lambda path: asked.append(path) or [])
    doctor._inside("", [])
    doctor._inside("/named", [])
    monkeypatch.setenv("GPUPOOL_SOCKET", "/elsewhere")
    doctor._inside("", [])
    assert [*map(str, asked)] == ["/run/gpupool/broker.sock", "/named", "/elsewhere"]


@root_only
def test_socket_that_belongs_to_the_overflow_user_is_refused(outside, tmp_path, monkeypatch):
    """In a user namespace, the files of unmapped users seem to belong to the overflow uid."""
    os.chown(outside.path, 65534, -1)
    table = tmp_path / "uid_map"
    monkeypatch.setattr(inside, "_NAMESPACE", table)
    for mapping, todo in (("0 1000 1", "--userns=host"), ("0 0 4294967295", "Mount the folder")):
        table.write_text(mapping)
        found = inside.examine_inside(outside.path)[-1]
        assert (found.verdict, found.name) == ("fail", "socket")
        assert todo in found.todo


def test_check_fails_if_the_broker_ends_during_the_check(outside, monkeypatch):
    def refuse(*_):
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(inside, "dial", refuse)
    found = inside.examine_inside(outside.path)[-1]
    assert (found.verdict, found.name) == ("fail", "socket")
    assert "Connection refused" in found.message


def test_report_shows_which_user_id_the_machine_sees(tmp_path):
    table = tmp_path / "uid_map"
    table.write_text(f"         0     100000  65536\n   {os.geteuid() + 70000}  5 1\n")
    assert f"is {100000 + os.geteuid()} on the machine" in inside.users(table).message
    table.write_text("         0          0 4294967295\n")
    assert inside.users(table).verdict == "ok"


def test_image_without_glibc_is_refused_in_one_line(monkeypatch):
    def musl(_name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "confstr", musl)
    found = inside.libc()
    assert found.verdict == "fail"
    assert "musl" in found.message


@pytest.mark.parametrize(
    ("shown", "there", "verdict"),
    [("all", True, "ok"), ("", True, "ok"), ("all", False, "fail"), ("0", True, "warn")],
)
def test_container_that_hides_a_gpu_is_reported(tmp_path, shown, there, verdict):
    file = tmp_path / "nvidiactl"
    if there:
        file.touch()
    status = pool(emulated=False)
    found = inside.devices(status, {"NVIDIA_VISIBLE_DEVICES": shown}, file)
    assert found.verdict == verdict
    assert bool(found.todo) == (verdict != "ok")
