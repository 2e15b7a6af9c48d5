# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The table in ``docs/long-tests.md``: what each long test shows, its seconds and its last run.

``make test-long`` (``pytest --note-long``) runs long tests and writes the last two columns of their
rows. People write the first two columns. ``test_longruns.py`` compares the table with the tests.
"""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "long-tests.md"
HEAD = "| Test | Shows | Seconds | Last run |"


@dataclass
class Row:
    """A long test. Its ``seconds`` and ``last`` are empty until the test has run."""

    test: str
    shows: str
    seconds: str = ""
    last: str = ""

    def __str__(self) -> str:
        return f"| `{self.test}` | {self.shows} | {self.seconds} | {self.last} |"


def name_of(nodeid: str) -> str:
    """Return a test's name in the table, without the values of its parameters."""
    return nodeid.partition("[")[0].removeprefix("tests/")


def split() -> tuple[str, dict[str, Row]]:
    """Return the page's text above the table, and a dict from each test's name to its row."""
    before, head, rest = PAGE.read_text().partition(HEAD)
    assert head, f"{PAGE} has no table"
    rows = {}
    for line in rest.splitlines()[2:]:
        test, *others = (cell.strip() for cell in line.strip("| ").split(" | "))
        others += [""] * (3 - len(others))
        rows[test.strip("`")] = Row(test.strip("`"), *others)
    return before, rows


def note(outcomes: dict[str, tuple[float, bool]]) -> None:
    """Write the seconds and the result of each test that ran into the table."""
    before, rows = split()
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    when = time.strftime("%Y-%m-%d", time.gmtime())
    for test, (seconds, passed) in outcomes.items():
        row = rows.setdefault(test, Row(test, ""))
        row.seconds = f"{seconds:.0f}"
        row.last = f"{when}, {commit or 'no commit'}, {'passed' if passed else 'failed'}"
    table = "\n".join(str(rows[test]) for test in sorted(rows))
    PAGE.write_text(f"{before}{HEAD}\n|---|---|---:|---|\n{table}\n")
