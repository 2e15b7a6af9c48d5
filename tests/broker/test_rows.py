# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Even if a user sends requests without end, they add few rows to the journal of all users."""

from __future__ import annotations

from pathlib import Path

from jupyter_gpupool.broker import ratelimit as module
from jupyter_gpupool.broker.ratelimit import RowBudget
from jupyter_gpupool.broker.store import journal as journal_module
from jupyter_gpupool.broker.store.journal import Row

RATE, BURST = module.ROWS

RATE, BURST = module.ROWS


def row(kind="open", owner="mallory", **fields):
    return Row(time=0.0, kind=kind, owner=owner, **fields)


def test_rows_beyond_the_allowance_are_counted_in_one_row():
    budget = RowBudget()
    admitted = [budget.admits(row(), 0.0) for _ in range(int(BURST) + 30)]
    assert admitted.count(True) == BURST
    assert not budget.admits(row("close"), 0.1)
    assert budget.summaries(1.0) == []
    assert budget.summaries(module.SUMMARY) == [("mallory", {"open": 30, "close": 1})]
    assert budget.summaries(2 * module.SUMMARY) == []


def test_rows_of_others_and_of_devices_are_always_written():
    budget = RowBudget()
    while budget.admits(row(), 0.0):
        pass
    assert budget.admits(row(owner="ada"), 0.0)
    assert budget.admits(row("attach", device="GPU-a"), 0.0)
    assert budget.admits(row("state", device="GPU-a"), 0.0)
    assert not budget.admits(row("state"), 0.0)
    assert budget.admits(row("device-lost", owner=""), 0.0)


def test_allowance_refills_and_idle_users_are_forgotten():
    budget = RowBudget()
    while budget.admits(row(), 0.0):
        pass
    budget.summaries(0.0, all_of_them=True)
    assert [budget.admits(row(), 1.0) for _ in range(6)] == [True] * int(RATE) + [False]
    budget.summaries(1.0, all_of_them=True)
    budget.summaries(1.0 + BURST / RATE)
    assert budget._users == {}


def test_journal_stays_small_after_many_short_sessions(make_broker):
    """In this test, the broker once wrote 1.6 GB into its write-ahead log within 20 s."""
    broker = make_broker().started
    log, most = Path(f"{broker.status()['broker']['journal']}-wal"), 0
    with broker.client() as client:
        for n in range(1300):
            name = client.call("open", kernel_id="x" * 200, label="y" * 200)["session"]
            client.call("close", session=name, reason="z" * 200)
            if n % 50 == 0:
                most = max(most, log.stat().st_size)
    # The broker overwrites the log from the start if no other connection reads the log. But while
    # ``tidy`` waits for the disk, the log grows: on a busy machine, by 3 MiB.
    assert most < 2 * journal_module.MAX_LOG
    broker.stop()
    assert broker.started
    rows = broker.rows()
    counted = [row for row in rows if row["kind"] in ("open", "close", "state")]
    assert len(counted) < BURST + 60 * RATE
    (omitted,) = [row for row in rows if row["kind"] == "omitted"]
    assert sum(omitted["detail"]["rows"].values()) + len(counted) == 3900
