# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""One journal for each machine and user, and one broker that writes it."""

from __future__ import annotations

import itertools
import logging
import os
import sqlite3
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from jupyter_gpupool import endpoint, local_machine
from jupyter_gpupool.broker.store import journal as module
from jupyter_gpupool.broker.store import journal_file
from jupyter_gpupool.broker.store.journal import Journal, JournalUnusable, Row
from jupyter_gpupool.broker.store.journal_file import JournalLock, take_over
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.starting import ensure_broker

from . import kit
from .kit import Kernel, journal_rows
from .test_autostart import clean, kernel_on, settings, status, with_pid  # noqa: F401 (a fixture)

LOG = logging.getLogger("test")
SOCKET = Path("/run/user/1/gpupool/broker.sock")


@pytest.fixture
def parts():
    return kit.Broker, kit.Kernel, {"emulate": kit.ONE}


def journal_of(broker):
    return Path(broker.status()["broker"]["journal"])


def change(path, sql, *values):
    db = sqlite3.connect(path)
    with db:
        db.execute(sql, values)
    db.close()


# ---------------------------------------------------------------------- owner


def test_journals_path_and_content_show_the_machines_id(broker):
    path = journal_of(broker)
    assert local_machine.machine_id() in path.name
    db = sqlite3.connect(path)
    assert db.execute("SELECT value FROM meta WHERE name = 'machine'").fetchone() == (
        local_machine.machine_id(),
    )
    db.close()


def test_records_of_another_machine_are_left_alone(make_broker):
    """Two machines may share a home folder. Each of the machines has its own boot id."""
    broker = make_broker().started
    path = journal_of(broker)
    one = Kernel(broker, "one")
    broker.kill()
    change(path, "UPDATE meta SET value = 'other' WHERE name = 'machine'")
    change(path, "UPDATE meta SET value = 'other' WHERE name = 'boot'")
    before = path.read_bytes()
    answer = broker.start()
    assert answer["ok"] is False
    assert answer["code"] == "journal"
    assert "another machine" in answer["message"]
    assert path.read_bytes() == before
    assert not [*path.parent.glob("*damaged*")]
    one.close()


def test_records_of_an_earlier_boot_are_removed(make_broker):
    broker = make_broker().started
    path = journal_of(broker)
    one = Kernel(broker, "one")
    broker.kill()
    change(path, "UPDATE meta SET value = 'earlier' WHERE name = 'boot'")
    assert broker.started
    assert broker.status()["sessions"] == []
    one.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_journal_of_another_user_is_refused(folder):
    path = folder / "j.sqlite"
    Journal(path, LOG).close()
    os.chown(path, 65534, 65534)
    with pytest.raises(JournalUnusable, match="another user"):
        Journal(path, LOG)


def test_newer_schema_is_refused_in_one_sentence_and_kept(make_broker):
    broker = make_broker().started
    path = journal_of(broker)
    with kernel_on(broker) as one:
        one.attach()
        broker.stop()
        change(path, "PRAGMA user_version = 7")
        before = path.read_bytes()
        answer = broker.start()
        assert (answer["ok"], answer["code"]) == (False, "journal-newer")
        assert "newer jupyter_gpupool" in answer["message"]
        assert path.read_bytes() == before
        assert not [*path.parent.glob("*damaged*")]
        change(path, f"PRAGMA user_version = {module.SCHEMA_VERSION}")
        assert broker.started
        assert one.state() in ("active", "idle")


# ---------------------------------------------------------------------- on the network


def test_journal_is_never_on_a_network_file_system(make_broker, folder):
    broker = make_broker()
    broker.module = "tests.broker.networked_broker"
    environment = {**kit.environment(folder), "TEST_FOLDER": str(folder)}
    assert broker.start(env=environment)["ok"]
    path = journal_of(broker)
    assert path.parent == folder / "local" / f"gpupool-{os.geteuid()}"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not [*(folder / "state").glob("*")]
    note = broker.status()["broker"]["journal_note"]
    assert "NFS" in note
    assert note in broker.tail()
    from jupyter_gpupool.cli import checks

    (finding,) = checks.journal(broker.status())
    assert (finding.verdict, finding.message) == ("warn", note)


# ---------------------------------------------------------------------- older name


@pytest.mark.parametrize("boot", ["this", "another"])
@pytest.mark.parametrize("network", [False, True])
def test_older_journal_of_this_machine_is_taken_over(folder, monkeypatch, boot, network):
    old = folder / f"journal-{zlib.crc32(os.fsencode(SOCKET)):08x}.sqlite"
    journal = Journal(old, LOG)
    journal.append(Row(time=1.0, kind="open", session="s", owner="ada"))
    journal.put("s", {"a": 1})
    journal.remember("boot", local_machine.boot_id() if boot == "this" else "another")
    journal.close()
    before = old.read_bytes()
    monkeypatch.setattr(local_machine, "network_file_system", lambda _: "NFS" if network else "")
    new = folder / "new.sqlite"
    take_over(new, folder, SOCKET, LOG)
    if network and boot == "another":
        assert old.read_bytes() == before
        assert not new.exists()
        return
    assert not old.exists()
    after = Journal(new, LOG)
    assert after.records() == {"s": {"a": 1}}
    assert [row.owner for row in journal_rows(after)] == ["ada"]
    after.close()


def test_living_older_broker_keeps_its_journal(folder, monkeypatch):
    socket = folder / "gpupool" / "broker.sock"
    other = folder / "x" / "gpupool" / "broker.sock"
    other.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder / "x"))
    lock = Path(f"{other}.lock")
    lock.touch()
    old = folder / f"journal-{zlib.crc32(os.fsencode(other)):08x}.sqlite"
    Journal(old, LOG).close()
    script = (
        "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    try:
        with pytest.raises(BrokerUnavailable) as caught:
            take_over(folder / "new.sqlite", folder, socket, LOG)
    finally:
        holder.communicate(b"\n", 30)
        holder.stdout.close()
    assert caught.value.details == {"socket": str(other)}
    take_over(folder / "new.sqlite", folder, socket, LOG)
    assert (folder / "new.sqlite").exists()


def older(folder, socket=SOCKET):
    """Make a journal with one session, under the file name of an older version; return its path."""
    old = folder / f"journal-{zlib.crc32(os.fsencode(socket)):08x}.sqlite"
    journal = Journal(old, LOG)
    journal.put("s", {"a": 1})
    journal.remember("boot", local_machine.boot_id())
    journal.close()
    return old


def test_living_broker_whose_lock_was_deleted_keeps_its_journal(folder):
    old = older(folder)
    script = (
        "import logging, sys; from pathlib import Path;"
        "from jupyter_gpupool.broker.store.journal import Journal;"
        "j = Journal(Path(sys.argv[1]), logging.getLogger()); print(flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(old)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=kit.ROOT,
    )  # fmt: skip
    holder.stdout.readline()
    try:
        with pytest.raises(BrokerUnavailable, match=f"process {holder.pid}") as caught:
            take_over(folder / "new.sqlite", folder, SOCKET, LOG)
    finally:
        holder.communicate(b"\n", 30)
        holder.stdout.close()
    assert caught.value.code == "already-running"
    assert old.exists()
    assert not (folder / "new.sqlite").exists()
    take_over(folder / "new.sqlite", folder, SOCKET, LOG)
    assert not old.exists()


@pytest.mark.parametrize("boot", ["this", "another"])
def test_older_journal_open_on_another_machine_is_left_alone(folder, monkeypatch, boot):
    """SQLite's lock shows that a broker on another machine or in a container has the journal open.

    All machines that mount a network home see SQLite's locks there. But only the broker's own
    machine sees the lock of the broker's socket.
    """
    old = older(folder)
    if boot == "another":
        change(old, "UPDATE meta SET value = 'another' WHERE name = 'boot'")
    monkeypatch.setattr(local_machine, "network_file_system", lambda _: "NFS")
    # Linux reports pid 0 if the lock's holder is on another machine or in another container.
    monkeypatch.setattr(journal_file, "_holder", lambda _: 0)
    if boot == "this":  # the holder is in a container on this machine
        with pytest.raises(BrokerUnavailable):
            take_over(folder / "new.sqlite", folder, SOCKET, LOG)
    else:
        take_over(folder / "new.sqlite", folder, SOCKET, LOG)
    assert old.exists()
    assert not (folder / "new.sqlite").exists()


def test_older_journal_is_found_in_a_folder_with_any_name(folder):
    odd = folder / "100%41 #1?"
    odd.mkdir()
    older(odd)
    take_over(odd / "new.sqlite", odd, SOCKET, LOG)
    after = Journal(odd / "new.sqlite", LOG)
    assert after.records() == {"s": {"a": 1}}
    after.close()


def fail_copy(monkeypatch, _old):
    def connect(path, **kwargs):
        if str(path).endswith(".new"):
            raise sqlite3.OperationalError("database or disk is full")
        return CONNECT(path, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", connect)


def fail_rename(monkeypatch, _old):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", refuse)


def fail_damage(_monkeypatch, old):
    old.write_bytes(b"SQLite format 3\0" + b"x" * 5000)


CONNECT = sqlite3.connect


@pytest.mark.parametrize("failure", [fail_copy, fail_rename, fail_damage])
def test_failed_take_over_is_an_error_and_loses_no_session(folder, monkeypatch, failure):
    old, new = older(folder), folder / "new.sqlite"
    with monkeypatch.context() as patch:
        failure(patch, old)
        before = old.read_bytes()
        with pytest.raises(JournalUnusable) as caught:
            take_over(new, folder, SOCKET, LOG)
    assert str(old) in caught.value.message
    assert f"mv {old} " in caught.value.next_step
    assert [path.name for path in folder.glob("new*")] == []
    assert old.read_bytes() == before
    if failure is not fail_damage:
        take_over(new, folder, SOCKET, LOG)
        after = Journal(new, LOG)
        assert after.records() == {"s": {"a": 1}}
        after.close()


# ---------------------------------------------------------------------- one broker


def test_lock_names_the_socket_of_its_living_broker(folder):
    path = folder / "journal.sqlite"
    lock = JournalLock(path, SOCKET)
    assert endpoint.listening_at(lock.path) == SOCKET
    with pytest.raises(BrokerUnavailable) as caught:
        JournalLock(path, Path("/elsewhere"))
    assert caught.value.code == "already-running"
    assert caught.value.details == {"socket": str(SOCKET)}
    assert not lock.is_lost()
    lock.path.unlink()
    assert lock.is_lost()
    lock.restore()
    assert endpoint.listening_at(lock.path) == SOCKET
    lock.close()
    assert endpoint.listening_at(lock.path) is None
    JournalLock(path, SOCKET).close()


def test_user_has_one_journal_for_all_folders_of_sockets():
    uid = os.geteuid()
    paths = [
        f"/run/user/{uid}/gpupool/broker.sock",
        f"/tmp/gpupool-{uid}/broker.sock",
        f"/var/tmp/gpupool-{uid}/broker.sock",
    ]
    assert len({endpoint.journal_name(Path(path)) for path in paths}) == 1
    assert endpoint.journal_name(Path("/tmp/mine/broker.sock")) != endpoint.journal_name(
        Path(paths[0])
    )


def test_second_broker_joins_the_first_from_another_folder(clean, monkeypatch):  # noqa: F811
    """In cron and tmux, XDG_RUNTIME_DIR may have another value than in the user's login."""
    first = ensure_broker(settings(clean))
    pid = status(first)["pid"]
    (clean / "cron").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(clean / "cron"))
    assert ensure_broker(settings(clean)) == first
    assert status(first)["pid"] == pid
    log = (clean / "cron" / "gpupool" / "broker.log").read_text()
    assert f"process {pid}" in log


def test_second_broker_waits_until_the_socket_is_put_back(clean):  # noqa: F811
    path = ensure_broker(settings(clean))
    pid = status(path)["pid"]
    for name in ("broker.sock", "broker.sock.lock"):
        path.with_name(name).unlink()
    assert ensure_broker(settings(clean)) == path
    assert status(path)["pid"] == pid


def test_living_broker_is_found_without_a_runtime_folder(clean, monkeypatch):  # noqa: F811
    monkeypatch.setattr(local_machine, "state_dir", lambda: clean / "state")
    monkeypatch.setattr(local_machine, "LOCAL_BASES", (clean,))
    first = ensure_broker(settings(clean))
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert endpoint.find_socket() == first
    with_pid(status(first)["pid"])
    assert endpoint.find_socket() == clean / f"gpupool-{os.geteuid()}" / "broker.sock"


def test_sockets_are_not_in_a_folder_that_a_logout_deletes(monkeypatch, tmp_path):
    monkeypatch.setattr(local_machine, "LOGIN_FOLDERS", tmp_path)
    (tmp_path / "1000").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "1000"))
    assert endpoint.user_runtime_dir() == local_machine.local_folder()


# ---------------------------------------------------------------------- size


def test_write_ahead_log_is_bounded_under_steady_commits(folder):
    path = folder / "journal.sqlite"
    journal = Journal(path, LOG)
    log, most = Path(f"{path}-wal"), 0
    for n in range(4000):
        journal.append(Row(time=n, kind="open", session=f"s{n}", owner="mallory", reason="x" * 900))
        journal.put(f"s{n % 50}", {"record": "x" * 2000})
        assert journal.commit()
        most = max(most, log.stat().st_size)
    assert module.MAX_LOG <= most < module.MAX_LOG + (1 << 20)
    assert log.stat().st_size <= most
    assert len(journal_rows(journal)) == 4000
    journal.close()


def test_journal_over_its_size_limit_drops_the_oldest_rows(folder):
    path = folder / "journal.sqlite"
    journal = Journal(path, LOG, max_bytes=lambda: 2 << 20)
    for n in range(60):
        for _ in range(100):
            journal.append(Row(time=n, kind="k", reason="x" * 1000))
        assert journal.commit()
        if n % 10 == 9:
            journal.tidy()
    journal.tidy()
    assert path.stat().st_size < 3 << 20
    rows = journal_rows(journal)
    assert 1000 < len(rows) < 2500
    assert rows[-1].seq == 6000
    assert rows[0].seq == 6001 - len(rows)
    journal.close()


# ---------------------------------------------------------------------- deleted files


def test_deleted_journal_is_written_again(folder):
    path = folder / "journal.sqlite"
    journal = Journal(path, LOG, machine="m")
    journal.remember("boot", "b")
    journal.append(Row(time=1, kind="k"))
    journal.commit()
    assert not journal.is_lost()
    for file in folder.glob("journal.sqlite*"):
        file.unlink()
    assert journal.is_lost()
    journal.restore()
    assert not journal.is_lost()
    journal.put("s", {"a": 1})
    journal.append(Row(time=2, kind="k"))
    assert journal.commit()
    journal.close()
    after = Journal(path, LOG, machine="m")
    assert after.records() == {"s": {"a": 1}}
    assert (after.meta("boot"), after.seq) == ("b", 2)
    after.close()


def test_long_log_is_reported_once_and_not_at_each_check(folder):
    """SQLite overwrites the log file from its begin after ``tidy``; the file keeps its length."""
    long = []
    journal = Journal(folder / "journal.sqlite", LOG, on_long=lambda: long.append(written))
    for written in range(3000):
        journal.append(Row(time=0, kind="open", session="s", owner="ann", reason="x" * 3000))
        journal.put(f"s{written % 50}", {"record": "x" * 2000})
        assert journal.commit()
        if long and long[-1] == written:
            journal.tidy()
    assert long
    gaps = [after - before for before, after in itertools.pairwise(long)]
    assert min(gaps, default=1000) > 2 * module.LOOK_AT_LOG
    journal.close()


def test_log_is_overwritten_and_not_truncated(folder):
    """To truncate and sync the log would block the event loop for milliseconds."""
    path = folder / "journal.sqlite"
    journal = Journal(path, LOG)
    log, sizes = Path(f"{path}-wal"), []
    for n in range(1500):
        journal.append(Row(time=n, kind="open", session=f"s{n}", owner="ann", reason="x" * 900))
        journal.put(f"s{n % 50}", {"record": "x" * 2000})
        assert journal.commit()
        if n % 300 == 299:
            journal.tidy()  # the next commit writes the log from its begin
        sizes.append(log.stat().st_size)
    assert sizes == sorted(sizes)
    assert sizes[-1] < module.MAX_LOG
    assert journal._log_size() < sizes[-1]
    journal.close()


def test_commit_that_overwrites_a_long_log_is_not_synced(folder):
    """To sync the log would not help: SQLite has moved its data to the database without a sync."""
    journal = Journal(folder / "journal.sqlite", LOG)
    unsynced = []
    for n in range(1500):
        before = journal._log_size()
        journal.append(Row(time=n, kind="open", session=f"s{n}", owner="ann", reason="x" * 3000))
        journal.put(f"s{n % 50}", {"record": "x" * 9000})
        (synced,) = journal._db.execute("PRAGMA synchronous").fetchone()
        assert journal.commit()
        if not synced:
            unsynced.append(n)
            assert journal._log_size() < before
    assert unsynced
    journal.close()
