# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The socket's file: who may own it, and which process holds it."""

from __future__ import annotations

import fcntl
import os
import socket
import stat

import pytest

from jupyter_gpupool import endpoint
from jupyter_gpupool.broker.transport import listener, usersockets
from jupyter_gpupool.broker.transport.listener import Claim, is_machine_wide
from jupyter_gpupool.errors import BrokerUnavailable


def refused(path):
    with pytest.raises(BrokerUnavailable) as caught:
        Claim(path).close()
    return caught.value


def test_only_the_user_can_open_a_new_folder_and_socket(folder):
    path = folder / "new" / "broker.sock"
    claim = Claim(path)
    listening = claim.bind()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    listening.close()
    claim.close()
    assert not path.exists()


def test_second_claim_is_refused_and_names_the_holder(folder):
    claim = Claim(folder / "broker.sock")
    error = refused(folder / "broker.sock")
    assert error.code == "already-running"
    assert f"process {os.getpid()}" in error.message
    claim.close()
    Claim(folder / "broker.sock").close()


def test_refused_and_ended_claims_leave_no_lock(folder):
    path = folder / "broker.sock"
    path.symlink_to(folder / "elsewhere")
    refused(path)
    assert [p.name for p in folder.iterdir()] == ["broker.sock"]
    path.unlink()
    claim = Claim(path)
    refused(path)
    assert (folder / "broker.sock.lock").exists()  # the living broker's lock stays
    claim.close()
    assert list(folder.iterdir()) == []


def test_lock_on_a_file_that_was_just_removed_does_not_count(folder, monkeypatch):
    """A lock on a deleted lock file is worthless, because the next process locks a new file.

    Here, another process deletes the lock file after the claim opens it and before the claim locks
    it.
    """
    path = folder / "broker.sock"
    real, removed = fcntl.flock, []

    def flock(descriptor, how):
        if not removed:
            removed.append(True)
            (folder / "broker.sock.lock").unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = Claim(path)
    assert refused(path).code == "already-running"
    claim.close()


def test_stale_socket_is_replaced(folder):
    path = folder / "broker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    claim = Claim(path)
    claim.bind().close()
    claim.close()


def test_served_socket_without_a_lock_is_left_alone(folder):
    path = folder / "broker.sock"
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(path))
        living.listen()
        assert refused(path).code == "already-running"
    assert path.exists()


def test_symbolic_link_is_not_followed(folder):
    path = folder / "broker.sock"
    path.symlink_to(folder / "elsewhere")
    assert "symbolic link" in refused(path).message
    assert path.is_symlink()


def test_regular_file_is_not_removed(folder):
    path = folder / "broker.sock"
    path.write_text("important")
    assert refused(path).code == "bad-socket"
    assert path.read_text() == "important"


def test_folder_that_is_a_symbolic_link_is_refused(folder):
    (folder / "real").mkdir()
    (folder / "link").symlink_to(folder / "real")
    assert refused(folder / "link" / "broker.sock").code == "bad-socket"


def test_folder_that_others_may_write_is_refused(folder):
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    assert "to which other users may write" in refused(folder / "open" / "broker.sock").message


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_folder_and_socket_of_another_user_are_refused(folder):
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", 65534, 65534)
    assert "user id 65534" in refused(folder / "theirs" / "broker.sock").message
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "broker.sock"))
    os.chown(folder / "broker.sock", 65534, 65534)
    assert "user id 65534" in refused(folder / "broker.sock").message


def test_lock_that_is_a_symbolic_link_is_refused(folder):
    (folder / "broker.sock.lock").symlink_to(folder / "victim")
    assert refused(folder / "broker.sock").code == "bad-socket"
    assert not (folder / "victim").exists()


def test_path_that_is_too_long_names_the_limit(folder):
    error = refused(folder / ("x" * 120))
    assert "107" in error.message


def test_socket_is_machine_wide_only_for_root_and_below_run(folder):
    assert not is_machine_wide(folder / "broker.sock")
    assert not is_machine_wide(type(folder)("/run/user/1000/gpupool/broker.sock"))
    assert is_machine_wide(type(folder)("/run/gpupool/broker.sock")) == (os.geteuid() == 0)


def test_socket_of_the_machine_stays_for_the_next_broker(folder, monkeypatch):
    monkeypatch.setattr(listener, "is_machine_wide", lambda _path: True)
    path = folder / "broker.sock"
    claim = Claim(path)
    claim.bind().close()
    claim.close()
    assert [p.name for p in folder.iterdir()] == ["broker.sock"]  # the lock file is gone
    monkeypatch.setattr(endpoint, "MACHINE_SOCKET", path)
    monkeypatch.delenv("GPUPOOL_SOCKET", raising=False)
    assert endpoint.find_socket() == path
    claim = Claim(path)
    listening = claim.bind()
    assert connected(path, listening)
    listening.close()
    claim.close()


@pytest.fixture
def given(folder):
    """A socket that a service manager has bound."""
    with socket.socket(socket.AF_UNIX) as found:
        found.bind(str(folder / "broker.sock"))
        found.listen(1)
        yield found


def connected(path, listening):
    """Return whether a client of ``path`` reaches ``listening``."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.send(b"x")
        listening.setblocking(True)
        listening.settimeout(30)
        while True:  # the claim checks the socket by a connection: skip it if it is queued here
            accepted, _ = listening.accept()
            with accepted:
                if accepted.recv(1) == b"x":
                    return True


def test_given_socket_is_used_and_outlives_the_claim(folder, given):
    path = folder / "broker.sock"
    before = path.stat().st_ino
    for _ in range(2):
        claim = Claim(path, given.dup())
        listening = claim.bind()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert not claim.is_lost()
        assert connected(path, listening)
        listening.close()
        claim.close()
        assert path.stat().st_ino == before
    assert connected(path, given)


def test_given_socket_whose_file_was_deleted_is_replaced(folder, given):
    path = folder / "broker.sock"
    path.unlink()
    claim = Claim(path, given.dup())
    listening = claim.bind()
    assert connected(path, listening)
    path.unlink()
    listening.close()
    listening = claim.restore()  # a broker calls this while it serves
    assert connected(path, listening)
    listening.close()
    claim.close()
    assert not path.exists()


def test_socket_with_a_full_queue_does_not_count_as_dead(folder, given):
    path = folder / "broker.sock"
    waiting = []
    while True:
        waiting.append(socket.socket(socket.AF_UNIX))
        waiting[-1].setblocking(False)
        try:
            waiting[-1].connect(str(path))
        except BlockingIOError:
            break
    before = path.stat().st_ino
    # A living broker whose lock was deleted causes the same code.
    assert refused(path).code == "already-running"
    claim = Claim(path, given.dup())
    claim.bind().close()
    claim.close()
    assert path.stat().st_ino == before
    for client in waiting:
        client.close()


def test_link_in_the_place_of_a_users_socket_is_not_followed(folder, monkeypatch):
    """Root in a container can make such a link if it can write to the socket's folder."""
    path, aim = folder / "broker.sock", folder / "secret"
    aim.touch(mode=0o600)

    class Swapped(socket.socket):
        def bind(self, address):
            super().bind(address)
            path.unlink()
            path.symlink_to(aim)

    usersockets._bind(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    monkeypatch.setattr(socket, "socket", Swapped)
    with pytest.raises(OSError, match="has taken the place"):
        usersockets._bind(path)
    assert stat.S_IMODE(aim.stat().st_mode) == 0o600
