# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The journal: what a commit keeps, and what happens to a damaged file."""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import stat

import pytest

from jupyter_gpupool.broker.store import journal as module
from jupyter_gpupool.broker.store.journal import Journal, JournalUnusable, Row
from jupyter_gpupool.broker.store.journal_file import JournalLock
from jupyter_gpupool.broker.store.records import from_json, to_json
from jupyter_gpupool.pool.model import Hold, Owner, Request, SessionRecord, Slice

from .kit import journal_rows

LOG = logging.getLogger("test")

RECORD = SessionRecord(
    id="s1",
    owner=Owner("ada"),
    request=Request(memory=5, limit=6, devices=2),
    attach="cell",
    holds=(Hold("h", "cell", 1.5),),
    slices=(Slice("GPU-a", 5), Slice("GPU-b", 5)),
    suspended=(Slice("GPU-a", 3),),
    bound=("GPU-a", "GPU-b"),
    last_devices=("GPU-a",),
)


@pytest.fixture
def path(folder):
    return folder / "state" / "journal.sqlite"


def test_record_survives_json_unchanged():
    assert from_json(to_json(RECORD)) == RECORD


def test_record_leaves_out_only_empty_fields():
    record = SessionRecord("s", Owner("ann"), Request(1, 1), "lazy", gated=False, opened_at=1.0)
    data = to_json(record)
    assert data.keys() == {"id", "owner", "request", "attach", "state", "gated", "opened_at"}
    assert from_json(json.loads(json.dumps(data))) == record


def test_record_of_a_newer_or_older_version_is_read():
    data = to_json(RECORD) | {"invented": 1}
    del data["gated"]
    assert from_json(data) == RECORD


def test_committed_rows_remain_after_a_kill(path):
    journal = Journal(path, LOG)
    journal.put("s1", to_json(RECORD))
    journal.append(Row(time=1.0, kind="open", session="s1", owner="ada", detail={"a": 1}))
    journal.remember("clock", "12.5")
    assert journal.commit()
    # The journal stays open, as after SIGKILL.
    after = Journal(path, LOG)
    assert from_json(after.records()["s1"]) == RECORD
    assert after.meta("clock") == "12.5"
    (row,) = journal_rows(after)
    assert (row.seq, row.kind, row.owner, row.detail) == (1, "open", "ada", {"a": 1})
    assert after.seq == 1
    after.put("s1", None)
    after.close()
    journal.close()
    last = Journal(path, LOG)
    assert last.records() == {}
    last.close()


def test_journal_is_readable_only_by_its_user(path):
    journal = Journal(path, LOG)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    journal.close()


def test_old_rows_are_dropped_and_numbers_continue(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 10)
    journal = Journal(path, LOG)
    for n in range(30):
        journal.append(Row(time=n, kind="k"))
    journal.commit()
    journal.tidy()
    assert [r.seq for r in journal_rows(journal)] == list(range(21, 31))
    journal.append(Row(time=1, kind="k"))
    journal.commit()
    assert journal_rows(journal)[-1].seq == 31
    journal.close()


@pytest.mark.parametrize(
    "damage", [b"not a database at all" * 100, b""], ids=["rubbish", "truncated-to-nothing"]
)
def test_damaged_file_is_set_aside_and_logged(path, damage):
    journal = Journal(path, LOG)
    journal.put("s1", to_json(RECORD))
    journal.close()
    path.write_bytes(damage)
    after = Journal(path, LOG)
    assert after.records() == {}
    after.append(Row(time=1, kind="k"))
    assert after.commit()
    if damage:
        assert "damaged" in after.set_aside
        assert [p.read_bytes() for p in path.parent.glob("*.damaged-*")] == [damage]
    after.close()


def test_file_of_a_newer_version_is_refused_and_kept(path):
    Journal(path, LOG).close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = path.read_bytes()
    with pytest.raises(JournalUnusable, match="version 99"):
        Journal(path, LOG)
    assert path.read_bytes() == before


def test_damaged_pages_in_the_middle_are_noticed(path):
    journal = Journal(path, LOG)
    for n in range(2000):
        journal.append(Row(time=n, kind="k" * 50))
    journal.commit()
    journal.tidy()
    journal.close()
    with path.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(os.urandom(4096 * 5))
    after = Journal(path, LOG)
    assert after.set_aside
    assert after.commit()
    after.close()


def test_error_names_state_dir_if_the_folder_cannot_be_made(folder):
    (folder / "file").write_text("")
    with pytest.raises(JournalUnusable, match=r"c\.GPUPool\.state_dir"):
        Journal(folder / "file" / "journal.sqlite", LOG)


def test_full_disk_is_logged_once_and_rows_are_written_later(path, caplog):
    journal = Journal(path, LOG)
    # SQLite cannot add a page, as on a full disk.
    pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
    journal._db.execute(f"PRAGMA max_page_count = {pages}")
    big = "x" * 100_000
    for _ in range(3):
        journal.append(Row(time=1, kind="k", reason=big))
        assert not journal.commit()
    assert "full" in journal.problem
    assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
    journal._db.execute("PRAGMA max_page_count = 100000")
    assert journal.commit()
    assert journal.problem == ""
    assert [r.seq for r in journal_rows(journal)] == [1, 2, 3]
    journal.close()


def test_locked_file_delays_rows_and_loses_none(path):
    journal = Journal(path, LOG)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    journal.append(Row(time=1, kind="k"))
    assert not journal.commit()
    assert "locked" in journal.problem
    other.execute("ROLLBACK")
    other.close()
    assert journal.commit()
    assert len(journal_rows(journal)) == 1
    journal.close()


def test_memory_is_bounded_while_the_disk_takes_no_rows(path, monkeypatch):
    monkeypatch.setattr(module, "MAX_PENDING", 5)
    journal = Journal(path, LOG)
    for n in range(20):
        journal.append(Row(time=n, kind="k"))
    journal.commit()
    assert [r.seq for r in journal_rows(journal)] == [16, 17, 18, 19, 20]
    journal.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_lock_on_a_full_disk_fails_and_asks_for_room(folder, monkeypatch, number):
    def full(lock):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(JournalLock, "_take", full)
    with pytest.raises(JournalUnusable) as caught:
        JournalLock(folder / "journal.sqlite", folder / "broker.sock")
    assert caught.value.code == "no-space"
    assert caught.value.next_step.startswith(f"Make room on the disk of {folder}")
