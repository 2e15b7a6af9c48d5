# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The user's next broker removes the files of killed brokers, and keeps all files in use."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_gpupool import local_machine
from jupyter_gpupool.broker.pages.control import SHARED_MEMORY, folder_name
from jupyter_gpupool.broker.store import files as kept
from jupyter_gpupool.broker.store.files import sweep

from . import kit
from .guardkit import Guarded, GuardedBroker
from .kit import BIG, wait_until

LOG = logging.getLogger("test")


def age(*paths):
    """Set the time of files back: they then look too old for a broker that is just starting."""
    then = time.time() - kept.YOUNG - 10
    for path in paths:
        if os.path.lexists(path):
            os.utime(path, (then, then), follow_symlinks=False)


@pytest.fixture
def dead(folder):
    """Yield a killed broker and its living kernel; the socket's folder has the usual name."""
    home = folder / f"gpupool-{os.geteuid()}"
    home.mkdir(mode=0o700)
    broker = GuardedBroker(home).started
    kernel = Guarded(broker, memory=BIG)
    broker.kill()
    yield broker, kernel
    kernel.close()
    broker.close()


def files(broker):
    pages = SHARED_MEMORY / folder_name(broker.socket)
    return [pages, *kept._files_of(broker.socket)]


def living(kernel):
    """Start a process whose environment names the session's page."""
    return subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE,
        env={"GPUPOOL_PAGE": str(kernel.path)},
    )  # fmt: skip


def test_dead_brokers_files_are_removed_after_its_last_kernel(dead, folder, monkeypatch):
    broker, kernel = dead
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (folder,))
    left = files(broker)
    assert len(left) >= 4
    age(*left)
    process = living(kernel)
    sweep(Path("/tmp/other.sock"), LOG)
    assert files(broker) == left
    process.communicate(b"\n", 30)
    kernel.kill()
    sweep(Path("/tmp/other.sock"), LOG)
    assert [path for path in left if os.path.lexists(path)] == []


def test_young_files_are_left_alone(dead, folder, monkeypatch):
    broker, kernel = dead
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (folder,))
    kernel.kill()
    left = files(broker)
    sweep(Path("/tmp/other.sock"), LOG)
    assert files(broker) == left


def test_files_of_living_brokers_and_other_users_stay(folder, monkeypatch):
    home = folder / f"gpupool-{os.geteuid()}"
    home.mkdir(mode=0o700)
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (folder,))
    broker = GuardedBroker(home).started
    left = files(broker)
    age(*left)
    sweep(Path("/tmp/other.sock"), LOG)
    sweep(broker.socket, LOG)
    assert [path for path in left if not os.path.lexists(path)] == []
    assert broker.status()["pid"]
    broker.close()
    if os.geteuid() == 0:
        pages = SHARED_MEMORY / folder_name(broker.socket)
        pages.mkdir()
        os.chown(pages, 65534, 65534)
        age(pages)
        sweep(Path("/tmp/other.sock"), LOG)
        assert pages.exists()
        kit.remove(pages)


def test_unused_folder_of_an_older_version_is_removed(tmp_path):
    shared = tmp_path / "shm"
    old = shared / f"gpupool-{os.geteuid()}-0123456789ab"
    (old / "gpupool-guard").mkdir(parents=True)
    age(old)
    sweep(Path("/tmp/other.sock"), LOG, shared=shared)
    assert old.exists()
    then = time.time() - kept.UNKNOWN_YOUNG - 10
    os.utime(old, (then, then))
    sweep(Path("/tmp/other.sock"), LOG, shared=shared)
    assert not old.exists()


def test_pages_of_a_container_are_left_alone(tmp_path):
    folder = tmp_path / f"gpupool-{os.geteuid()}-0123456789ab"
    folder.mkdir()
    (folder / "socket").write_text("/nowhere/broker.sock\npid:[1]")
    age(folder)
    sweep(Path("/tmp/other.sock"), LOG, shared=tmp_path)
    assert folder.exists()


def test_socket_of_a_container_is_kept_until_the_next_boot(dead, folder, monkeypatch):
    """A container may share /var/tmp with the host. Its kernels may restart their broker there."""
    broker, kernel = dead
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (folder,))
    kernel.kill()
    lock = Path(f"{broker.socket}.lock")
    assert lock.read_text().split()[1] == local_machine.pid_namespace()
    lock.write_text("1234567890\npid:[1]\n")
    mark = SHARED_MEMORY / folder_name(broker.socket) / "socket"
    mark.write_text(f"{broker.socket}\npid:[1]")
    left = files(broker)
    age(*left)
    sweep(Path("/tmp/other.sock"), LOG)
    assert files(broker) == left
    then = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) - kept.YOUNG - 10
    for path in left:
        os.utime(path, (then, then), follow_symlinks=False)
    sweep(Path("/tmp/other.sock"), LOG)
    assert files(broker)[1:] == []


def test_socket_that_names_no_namespace_is_kept_for_a_day(dead, folder, monkeypatch):
    broker, kernel = dead
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (folder,))
    kernel.kill()
    Path(f"{broker.socket}.lock").write_text("1234567890")
    beside = kept._files_of(broker.socket)
    age(*beside)
    sweep(Path("/tmp/other.sock"), LOG)
    assert kept._files_of(broker.socket) == beside
    then = time.time() - kept.UNKNOWN_YOUNG - 10
    for path in beside:
        os.utime(path, (then, then), follow_symlinks=False)
    sweep(Path("/tmp/other.sock"), LOG)
    assert kept._files_of(broker.socket) == []


def test_broker_removes_left_over_files_as_it_starts(dead, make_broker):
    broker, kernel = dead
    kernel.kill()
    pages = SHARED_MEMORY / folder_name(broker.socket)
    age(pages)
    assert make_broker().started
    wait_until(lambda: not pages.exists(), "the pages of the dead broker are removed")
