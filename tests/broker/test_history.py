# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Clients read the journal in bounded pages. Users take turns, and each reads only allowed rows."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from jupyter_gpupool.broker.store import history
from jupyter_gpupool.broker.store.history import JournalPage, JournalReader, Query
from jupyter_gpupool.broker.store.journal import Journal, Row

from .kit import journal_rows


@pytest.fixture
def journal(folder):
    made = Journal(folder / "journal.sqlite", logging.getLogger("test"))
    yield made
    made.close()


def fill(journal, count, *, reason="r", owners=("ada", "ben")):
    for number in range(count):
        journal.append(
            Row(
                time=1234567890.123456 + number, kind="attach", session=f"s{number % 3}",
                owner=owners[number % len(owners)], device=None if number % 2 else "GPU-é",
                bytes=number, seconds=0.1, reason=reason, detail={"n": number, "half": "\ud800"},
            )
        )  # fmt: skip
    assert journal.commit()


def pages(journal, *asked):
    """Send each ``(uid, query)``; return each ``(uid, answer)`` in the order of arrival."""

    async def main():
        reader, found = JournalReader(journal.path), []
        for uid, query in asked:
            reader.ask(uid, query, lambda page, uid=uid: found.append((uid, page)))
        while len(found) < len(asked):
            await asyncio.sleep(0.001)
        reader.close()
        return found

    return asyncio.run(asyncio.wait_for(main(), 60))


def rows(page):
    assert isinstance(page, JournalPage), page
    return json.loads(f"[{page.rows}]")


def test_row_is_the_same_as_in_the_journal(journal):
    fill(journal, 4)
    ((_, page),) = pages(journal, (1, Query()))
    assert rows(page) == [row.as_message() for row in journal_rows(journal)]
    assert not page.more


def test_page_has_bounded_rows_and_the_next_page_continues(journal):
    fill(journal, history.MAX_ROWS + 5)
    ((_, first), (_, second)) = pages(
        journal, (1, Query(limit=1 << 62)), (1, Query(after=history.MAX_ROWS))
    )
    assert [r["seq"] for r in rows(first)] == [*range(1, history.MAX_ROWS + 1)]
    assert first.more
    assert len(rows(second)) == 5
    assert not second.more


def test_bytes_of_a_page_are_bounded(journal):
    fill(journal, 200, reason="x" * 10_000)
    ((_, page),) = pages(journal, (1, Query()))
    assert len(page.rows) < history.MAX_BYTES + 20_000
    assert page.more


def test_rare_rows_of_one_owner_are_all_found(journal):
    fill(journal, 3000, owners=("ada",) * 2999 + ("ben",))
    ((_, page),) = pages(journal, (1, Query(owner="ben", limit=10)))
    assert [r["owner"] for r in rows(page)] == ["ben"]
    assert not page.more


def test_users_take_turns(journal):
    fill(journal, 1)
    asked = [(1, Query())] * 6 + [(2, Query())] * 2
    order = [uid for uid, _ in pages(journal, *asked)]
    assert order[:4].count(2) >= 1
    assert order[:5].count(2) == 2


def test_missing_journal_is_an_error_and_no_crash(journal, folder):
    journal.close()
    for path in folder.glob("journal.sqlite*"):
        path.unlink()
    ((_, error),) = pages(journal, (1, Query()))
    assert "unable to open" in str(error)
