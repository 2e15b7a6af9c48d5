# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Each long test has a row in docs/long-tests.md. Each file in the tables of conftest.py exists."""

from __future__ import annotations

import pytest

from . import longruns
from .conftest import COSTS, HERE, LONG, QUICK


def test_each_long_test_is_in_the_table(request):
    missing = request.config.stash[LONG] - longruns.split()[1].keys()
    assert not missing, f"add a row for each to {longruns.PAGE}"


def test_rows_of_the_table_are_the_long_tests(request):
    rows = longruns.split()[1]
    assert [row.test for row in rows.values() if not row.shows] == []
    if request.config.args != request.config.getini("testpaths"):
        pytest.skip("only some of the tests were collected")
    assert rows.keys() <= request.config.stash[LONG], f"remove these rows from {longruns.PAGE}"


def test_note_of_a_run_keeps_the_text_written_by_hand(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"# Long\n\nWhy.\n\n{longruns.HEAD}\n|---|---|---:|---|\n"
                    "| `b.py::test_b` | what b shows | 7 | 2026-01-02, abc, passed |\n"
                    "| `a.py::test_a` | what a shows |  |  |\n")  # fmt: skip
    monkeypatch.setattr(longruns, "PAGE", page)
    longruns.note({"a.py::test_a": (12.4, True), "c.py::test_c": (1.0, False)})
    text, rows = longruns.split()
    assert text == "# Long\n\nWhy.\n\n"
    assert [*rows] == ["a.py::test_a", "b.py::test_b", "c.py::test_c"]
    assert rows["a.py::test_a"].shows == "what a shows"
    assert rows["a.py::test_a"].seconds == "12"
    assert rows["a.py::test_a"].last.endswith(", passed")
    assert rows["b.py::test_b"].last == "2026-01-02, abc, passed"
    assert rows["c.py::test_c"].shows == ""
    assert rows["c.py::test_c"].last.endswith(", failed")


def test_all_files_in_the_tables_of_conftest_exist():
    named = COSTS.keys() | QUICK
    assert [n for n in named if not (HERE / f"{n}.py").exists() and not (HERE / n).is_dir()] == []


@pytest.mark.parametrize(
    ("nodeid", "name"),
    [
        ("tests/pool/test_random.py::test_long_soak", "pool/test_random.py::test_long_soak"),
        ("tests/e2e/test_chaos.py::test_one_of_each[cell]", "e2e/test_chaos.py::test_one_of_each"),
    ],
)
def test_name_of_a_row_has_no_parameters(nodeid, name):
    assert longruns.name_of(nodeid) == name
