# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The runner of ``make gpu`` kills a hanging test file with its children, and keeps the results."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import plan, record, runner
from benchmarks.gpu.plan import Item

ROOT = Path(__file__).parents[2]

DEVICE = {"name": "NVIDIA Test 9", "driver": "999.1", "memory_bytes": 1, "devices": 1}

PASSES = """
def test_passes(record_property):
    pass
"""

FAILS = """
def test_fails():
    assert 1 == 2, "as it should"

def test_passes():
    pass
"""

#: A test file that hangs during its import, so the time-outs of its tests have no effect. It has a
#: child process in a separate session.
HANGS = """
import pathlib, subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, start_new_session=True)
pathlib.Path(__file__).with_suffix(".pid").write_text(str(child.pid))
time.sleep(600)
"""


@pytest.fixture
def items(tmp_path, monkeypatch):
    """Return ``make(name, text)``, which writes a test file with the conftest of ``tests/gpu``.

    Pytest runs the file with few plugins.
    """
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_timeout")

    def make(name, text, bound=60):
        path = tmp_path / f"test_{name}.py"
        path.write_text(text)
        (tmp_path / "conftest.py").write_text("from tests.gpu.conftest import *\n")
        return Item(str(path), bound)

    return make


def test_line_of_the_record_has_the_results_of_a_test_file(items):
    line = runner.run(items("a", FAILS))
    assert (line["outcome"], line["exit_code"]) == ("failed", 1)
    assert [(t["test"].split("::")[1], t["outcome"]) for t in line["tests"]] == [
        ("test_fails", "failed"),
        ("test_passes", "passed"),
    ]
    assert "as it should" in line["tests"][0]["failure"]
    assert "as it should" in line["output"]
    assert command.told(line).startswith("failed in ")
    assert command.told(line).endswith(": 1 failed, 1 passed")


def test_record_keeps_the_figures_of_a_benchmark_with_problems(monkeypatch):
    found = {"p50": 0.5, "problems": ["one cell failed"]}
    code = f"import pathlib, sys; pathlib.Path(sys.argv[2]).write_text({json.dumps(found)!r})"
    monkeypatch.setattr(runner, "BENCHMARK", code)
    line = runner.run(Item("figures", 60))
    assert (line["outcome"], line["exit_code"], line["result"]) == ("failed", 0, found)


def test_runner_does_not_touch_processes_of_others(items):
    with subprocess.Popen(["sleep", "600"]) as other:
        assert runner.run(items("a", PASSES))["outcome"] == "passed"
        try:
            assert other.poll() is None
        finally:
            other.kill()


def test_hanging_file_is_ended_with_all_its_processes(items):
    """The runner also kills a child in a separate session, because it adopts orphans.

    So that it does not adopt orphans of this test run, the runner is a separate process. The
    time-out of the file is 15 s: even on a busy machine, the file starts its child in this time.
    """
    item = items("h", HANGS)
    program = (
        "import json, sys; from benchmarks.gpu import plan, runner; runner.adopt_orphans(); "
        "print(json.dumps(runner.run(plan.Item(sys.argv[1], 15))))"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, item.name],
        capture_output=True, text=True, timeout=90, cwd=ROOT, check=True,
    )  # fmt: skip
    assert '"outcome": "hung"' in done.stdout
    assert time.monotonic() - begun < 50
    child = int(Path(item.name).with_suffix(".pid").read_text())
    assert not psutil.pid_exists(child)


def options(**fields):
    return argparse.Namespace(
        **{"minutes": 9.0, "quick": False, "rehearse": True, "names": [], **fields}
    )


def test_runner_continues_with_the_files_that_have_not_run(items, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "adopt_orphans", lambda: None)
    one, two = items("one", PASSES, bound=30), items("two", FAILS, bound=90)
    book = record.Record.at(tmp_path / "out", DEVICE)
    assert book.path.name.startswith("gpu-test9-driver999.1-")
    assert command.go_through((one, two), book, options(minutes=1)) == 2
    assert "Run it again for" in capsys.readouterr().out
    with book.path.open("a") as out:
        # A lost machine can leave such an incomplete last line in the record.
        out.write('{"item": "cut o')
    again = record.Record.at(tmp_path / "out", DEVICE)
    assert again.path == book.path
    assert [*again.ended()] == [one.name]
    assert command.go_through((one, two), again, options()) == 1
    said = capsys.readouterr().out
    assert f"-- {one.name}" not in said
    assert "2 of 2 have ended, 1 not well" in said
    assert again.ended()[two.name]["outcome"] == "failed"
    assert command.go_through((one, two), again, options(names=[one.name])) == 1
    assert f"-- {one.name}" in capsys.readouterr().out  # the user named the item
    assert record.Record.at(tmp_path / "out", DEVICE, again=True).path != book.path


def test_second_run_at_the_same_time_is_refused(tmp_path):
    first, second = (record.Record.at(tmp_path, DEVICE) for _ in range(2))
    with first.claimed() as alone, second.claimed() as too:
        assert (alone, too) == (True, False)
    with second.claimed() as alone:
        assert alone


def test_write_error_of_the_record_is_reported(items, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runner, "adopt_orphans", lambda: None)
    book = record.Record.at(tmp_path / "out", DEVICE)

    def full(_line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(book, "add", full)
    one = items("one", PASSES, bound=30)
    assert command.go_through((one,), book, options()) == 0
    said = capsys.readouterr().out
    assert "No space left on device" in said
    assert '"outcome": "passed"' in said


def test_every_item_of_the_plan_exists():
    for item in plan.PLAN:
        place = item.name if item.tests else f"benchmarks/gpu/{item.name}.py"
        assert (ROOT / place).is_file(), place
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert files - {item.name for item in plan.PLAN} == {"tests/gpu/test_runner.py"}


def test_wrong_name_is_answered_with_the_valid_names():
    with pytest.raises(ValueError, match=r"There is no 'swap_sped'; there are .*swap_speed"):
        plan.named(["swap_sped"])
