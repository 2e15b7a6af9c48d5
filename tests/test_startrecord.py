# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The record of a broker's start: who may write it, its content, and the effect of failures."""

from __future__ import annotations

import json
import os
import time

import pytest

from jupyter_gpupool import startfailures, startrecord
from jupyter_gpupool.devices import vendor
from jupyter_gpupool.startfailures import Failures
from jupyter_gpupool.startrecord import BadRecord, read_record, record_path, write_record

COMMAND = ["/usr/bin/python3", "-m", "jupyter_gpupool.broker"]


@pytest.fixture
def socket(tmp_path):
    tmp_path.chmod(0o700)
    return tmp_path / "broker.sock"


def test_written_record_can_be_read_back_and_is_private(socket):
    environ = {"HOME": "/home/ada", "CUDA_VISIBLE_DEVICES": "3", "OTHER_DEVICES": "3"}
    write_record(socket, COMMAND, environ, vendor=vendor.VARIABLES)
    record = read_record(socket)
    assert record.command == tuple(COMMAND)
    assert record.environment == {"HOME": "/home/ada", "CUDA_VISIBLE_DEVICES": "3"}
    assert record.pid == os.getpid()
    assert record_path(socket).stat().st_mode & 0o777 == 0o600
    assert startrecord.can_revive(socket)
    startrecord.remove_record(socket)
    assert read_record(socket) is None
    assert not startrecord.can_revive(socket)


def test_record_leaves_out_secrets_and_session_variables(socket):
    environ = {
        "JUPYTER_TOKEN": "t", "JUPYTERHUB_API_TOKEN": "t", "SLURM_JWT": "t", "AWS_SECRET": "t",
        "GPUPOOL_SESSION": "s", "GPUPOOL_TOKEN": "t", "GPUPOOL_PAGE": "/dev/shm/x",
        "GPUPOOL_DEVICES_VARIABLE": "CUDA_VISIBLE_DEVICES",
        "GPUPOOL_EMULATE": "2x1GiB", "EMUCUDA_FAULTS": "hang", "SLURM_JOB_GPUS": "1",
        "XDG_STATE_HOME": "/s", "EDITOR": "vi",
    }  # fmt: skip
    write_record(socket, COMMAND, environ)
    assert set(read_record(socket).environment) == {
        "GPUPOOL_EMULATE", "EMUCUDA_FAULTS", "SLURM_JOB_GPUS", "XDG_STATE_HOME",
    }  # fmt: skip


def damage_mode(path):
    path.chmod(0o620)


def damage_link(path):
    path.rename(path.with_name("other"))
    path.symlink_to("other")


def damage_folder(path):
    path.parent.chmod(0o770)


def damage_owner(path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(path, 12345, -1)


def damage_kind(path):
    path.unlink()
    os.mkfifo(path, 0o600)


def damage_size(path):
    path.write_text(json.dumps({"command": ["x" * (1 << 20)]}))


def damage_text(path):
    path.write_text("[]")


def damage_program(path):
    path.write_text(json.dumps({**json.loads(path.read_text()), "command": ["python3"]}))


DAMAGES = [
    damage_mode, damage_link, damage_folder, damage_owner, damage_kind, damage_size, damage_text,
    damage_program,
]  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__.removeprefix("damage_"))
def test_record_that_other_users_could_write_is_refused(socket, damage):
    write_record(socket, COMMAND, {})
    damage(record_path(socket))
    with pytest.raises(BadRecord) as caught:
        read_record(socket)
    assert str(record_path(socket)) in str(caught.value)
    assert "another Pooled GPU kernel" in caught.value.next_step
    assert f"rm {record_path(socket)}" in caught.value.next_step


def test_record_from_before_a_reboot_is_ignored(socket):
    write_record(socket, COMMAND, {})
    path = record_path(socket)
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "another"}))
    assert read_record(socket) is None


def test_failed_starts_back_off_until_one_succeeds(socket):
    known = startfailures.read_failures(socket)
    assert known == Failures()
    for count in range(1, startfailures.ATTEMPTS + 1):
        assert not known.given_up
        assert known.pause(time.time()) <= 2.0
        known = startfailures.note_failure(socket, known, f"failed {count}", "do this")
    assert known.given_up
    assert known.message == "failed 3"
    assert 25 < known.pause(time.time()) <= 30
    assert startfailures.read_failures(socket) == known
    # Each broker calls ``forgive`` when it begins to serve, even if a user has started it by hand.
    startfailures.forgive(socket)
    assert startfailures.read_failures(socket) == Failures()


def died(socket, pid, **how):
    """Record that the broker ``pid`` has died; return all known failures."""
    record = startrecord.write_record(socket, COMMAND, {})
    record = startrecord.change_record(socket, record, pid=pid, **how)
    known = startfailures.read_failures(socket)
    startfailures.note_death(socket, known, read_record(socket))
    startfailures.note_start(socket, startfailures.read_failures(socket))
    return startfailures.read_failures(socket)


def test_brokers_that_serve_nobody_back_off_and_stop(socket):
    pauses = []
    for pid in range(1, startfailures.MOST_DEATHS + 1):
        assert not startfailures.too_often(startfailures.read_failures(socket))
        pauses.append(died(socket, pid).delay(time.time()))
    assert startfailures.too_often(startfailures.read_failures(socket))
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.0
    assert pauses[-1] == max(startfailures.DEATH_PAUSES) == 5.0


def test_one_more_broker_is_started_after_the_pause(socket, monkeypatch):
    for pid in range(1, startfailures.MOST_DEATHS + 1):
        known = died(socket, pid)
    known = startfailures.note_failure(socket, known, "again and again", "", final=True)
    assert known.given_up
    assert 25 < known.pause(time.time()) <= 30
    later = time.time() + 31
    monkeypatch.setattr(time, "time", lambda: later)
    assert known.pause(later) == 0.0
    assert not startfailures.too_often(known)
    assert startfailures.too_often(died(socket, 77))


def test_one_death_counts_once_if_many_processes_notice_it(socket):
    for _ in range(startfailures.MOST_DEATHS):
        known = died(socket, 7)
    assert len(known.deaths) == 1


def test_broker_killed_while_serving_is_always_restarted(
    socket,
):
    died(socket, 1)
    for pid in range(2, 10 * startfailures.MOST_DEATHS):
        known = died(socket, pid, served=True)
        assert known.deaths == ()
        assert known.delay(time.time()) == 0.0
    assert not startfailures.too_often(known)
    assert "times in the last 10 minutes" in known.often(time.time())


def test_crash_of_a_broker_counts_even_after_it_served(socket):
    for pid in range(1, startfailures.MOST_DEATHS + 1):
        known = died(socket, pid, served=True, crashed="RuntimeError: x")
    assert startfailures.too_often(known)


def test_old_deaths_do_not_count(socket, monkeypatch):
    for pid in range(1, startfailures.MOST_DEATHS + 1):
        known = died(socket, pid)
    later = time.time() + startfailures.WINDOW + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert not startfailures.too_often(known)
    assert known.often(later) == ""


def test_broker_that_ends_in_an_orderly_way_leaves_no_record(socket):
    record = startrecord.write_record(socket, COMMAND, {})
    startrecord.remove_record(socket)
    startrecord.change_record(socket, record, served=True)
    assert not startrecord.can_revive(socket)


def test_machine_wide_broker_is_not_started_again(monkeypatch, tmp_path):
    from pathlib import Path

    monkeypatch.setattr(startrecord, "record_path", lambda _: tmp_path)
    assert not startrecord.can_revive(Path("/run/gpupool/broker.sock"))
    assert startrecord.can_revive(Path("/run/user/1000/gpupool/broker.sock"))
