# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from jupyter_gpupool import endpoint
from jupyter_gpupool.errors import BrokerUnavailable


@pytest.fixture
def listening(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        yield path


def test_the_configured_socket_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("GPUPOOL_SOCKET", "/from/environment")
    assert endpoint.find_socket("/configured") == Path("/configured")
    assert endpoint.find_socket() == Path("/from/environment")


def test_machine_wide_socket_is_used_if_it_exists(monkeypatch, listening, tmp_path):
    monkeypatch.delenv("GPUPOOL_SOCKET", raising=False)
    monkeypatch.setattr(endpoint, "MACHINE_SOCKET", listening)
    assert endpoint.find_socket() == listening
    monkeypatch.setattr(endpoint, "MACHINE_SOCKET", tmp_path / "none")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert endpoint.find_socket() == tmp_path / "gpupool" / "broker.sock"


def test_users_without_a_runtime_directory_get_own_folders(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/does/not/exist")
    assert str(os.getuid()) in endpoint.user_runtime_dir().name


def test_a_good_socket_is_accepted(listening):
    endpoint.check_socket(listening)


def test_symlink_to_a_good_socket_is_refused(listening, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(listening)
    with pytest.raises(BrokerUnavailable, match="is a symbolic link") as caught:
        endpoint.check_socket(link)
    assert caught.value.code == "bad-socket"


def test_a_plain_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BrokerUnavailable, match="is not a socket"):
        endpoint.check_socket(tmp_path / "file")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_socket_of_another_user_is_refused(listening):
    os.chown(listening, 65534, 65534)
    with pytest.raises(BrokerUnavailable, match="belongs to user id 65534"):
        endpoint.check_socket(listening)


def test_missing_socket_says_how_to_start_a_broker(tmp_path):
    with pytest.raises(BrokerUnavailable, match="jupyter gpupool broker") as caught:
        endpoint.check_socket(tmp_path / "none")
    assert caught.value.code == "no-broker"


@pytest.mark.parametrize(
    ("path", "words"), [("/" + "x" * 107, "107"), ("relative.sock", "must be absolute")]
)
def test_impossible_paths_are_refused(path, words):
    with pytest.raises(BrokerUnavailable, match=words):
        endpoint.check_path(Path(path))
