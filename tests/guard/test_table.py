# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Runs table.c: no way to allocate device memory exceeds the limit, and the docs show its table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated import library_dir

MIB = 1 << 20
SOURCES = Path(__file__).parents[2] / "jupyter_gpupool" / "guard" / "src"
DOCS = Path(__file__).parents[2] / "docs" / "guard-table.md"
COLUMNS = ("main", "thread", "fork", "exec", "static", "address", "per-thread")

#: The text above the table in docs/guard-table.md. If this page differs from the program's output,
#: the test prints the command that rewrites the page.
HEAD = """\
<!-- Written by GPUPOOL_WRITE_TABLE=1 python -m pytest tests/guard/test_table.py -->

# What the guard counts

The output of `tests/guard/table.c` on the emulated driver: for each way to take device memory, and
from each kind of thread, process and look-up of the driver's functions, the program asks for 1 MiB
more than the limit (refused, with the code in brackets; nothing is left over, neither in the
session's account nor on the device), then for exactly the limit (given), then for one MiB more
(refused), and frees it (credited).

"""


@pytest.fixture
def table(session, compiled):
    """Return a function that runs the program with arguments."""
    program = compiled("table", f"-I{SOURCES}", "-ldl", "-pthread")
    session.grant(session.uuids, each=192 * MIB, limit=192 * MIB)
    session.broker.answer = lambda _: {"type": "error", "code": "limit", "message": "no"}
    nvml = str(library_dir() / "libnvidia-ml.so.1")

    def run(*arguments):
        return session.run(program, *arguments, check=False, TABLE_NVML=nvml)

    return run


@pytest.mark.parametrize("column", COLUMNS)
def test_every_way_to_allocate_is_counted(table, column):
    done = table(column)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(cells) == 35
    assert [cell for cell in cells if cell[1].startswith("FAILED")] == []


def test_docs_page_shows_the_programs_output(table):
    done = table()
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    if os.environ.get("GPUPOOL_WRITE_TABLE"):
        DOCS.write_text(HEAD + done.stdout)
    assert DOCS.read_text() == HEAD + done.stdout, (
        "docs/guard-table.md is not what the program prints: run GPUPOOL_WRITE_TABLE=1 "
        f"{sys.executable} -m pytest {__file__}"
    )


def test_most_cells_of_the_table_fail_without_a_guard(table, session, compiled):
    """Without the guard, most cells must fail. This shows that the tests above can fail."""
    program = compiled("table", f"-I{SOURCES}", "-ldl", "-pthread")
    env = {**os.environ, **session.machine_env, "GPUPOOL_PAGE": str(session.page_path)}
    env["TABLE_NVML"] = str(library_dir() / "libnvidia-ml.so.1")
    env["LD_PRELOAD"] = str(library_dir() / "libcuda.so.1")
    done = subprocess.run(
        [program, "main"], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.count("FAILED") > 20, done.stdout + done.stderr
