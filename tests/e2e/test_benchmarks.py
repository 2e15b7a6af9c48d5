# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The benchmarks run, and users can publish the files that they write."""

from __future__ import annotations

import getpass
import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import find
from benchmarks.owed import beyond, waits

ROOT = Path(__file__).parents[2]

#: The arguments of the benchmarks that take minutes; each benchmark has its own test.
SCENARIOS = {
    "day_and_night": ["day_and_night"],
    "half_time": ["half_time"],
    **{
        case: ["field_cases", "--case", case]
        for case in ("services", "resident", "production", "people", "flood")
    },
}


def start(*command, timeout):
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run(*arguments):
    return start("benchmarks", *arguments, timeout=1500)


def check_anonymous(name, text):
    secrets = [platform.node(), str(Path.home()), str(ROOT), sys.prefix]
    if getpass.getuser() not in ("root", "user"):
        secrets.append(getpass.getuser())
    for secret in filter(None, secrets):
        assert secret not in text, f"{name} names {secret}"


def test_figures_in_the_browser_may_lag_behind_the_broker():
    """The page shows the first ten seconds of a wait in steps of 1 s, and later seconds in steps of
    10 s. The page may be one second behind the broker.
    """
    from benchmarks.ui_contended import figure, figures_between  # imports a browser client

    assert figure("1. 77aa33 asks for 6 GiB, no estimate yet: 6 GiB is needed") == ""
    assert figure("1. 77aa33 asks for 6 GiB, waiting for 4 s, no estimate yet") == "4 s"
    waits = {"state": "queued", "queued_at": 100.0, "expected": None}
    assert figures_between((waits, 119.5), (waits, 119.9)) == ("10 s",)
    assert figures_between((waits, 119.5), (waits, 120.2)) == ("10 s", "20 s")
    assert figures_between((waits, 120.5), (waits, 121.5)) == ("10 s", "20 s")
    ends = {**waits, "expected": {"since": 110.0, "until": 150.0}}
    assert figures_between((waits, 110.5), (ends, 115.0)) == (
        "9 s",
        "10 s",
        "up to 60 s",
        "up to 40 s",
    )
    idle = {"state": "idle", "leaves_at": 200.0}
    assert figures_between((idle, 158.2), (idle, 158.4)) == ("0:43", "0:42")
    assert figures_between((idle, 158.2), (waits, 158.4))[:2] == ("0:43", "0:42")


def moved(at, session, old, new, group):
    detail = {"old": old, "new": new, "group": group}
    return {"kind": "state", "time": at, "session": session, "detail": detail}


def shown(*, leaves):
    """Return a journal: the crowd's kernel gets a slice at 100 s; ann's kernel asks at 104 s."""
    return [
        moved(99.0, "c", "queued", "attaching", "crowd"),
        moved(100.0, "c", "attaching", "active", "crowd"),
        {"kind": "queue", "time": 104.0, "session": "p", "detail": {}},
        moved(104.0, "p", "detached", "queued", "ann"),
        moved(leaves, "c", "active", "detaching", "crowd"),
        moved(leaves + 0.1, "c", "detaching", "queued", "crowd"),
        moved(leaves + 0.1, "p", "queued", "attaching", "ann"),
        moved(leaves + 0.2, "p", "attaching", "active", "ann"),
    ]


@pytest.mark.parametrize(
    ("leaves", "owed"), [(104.0, 0.0), (106.5, 2.5), (110.0, 6.0), (125.0, 6.0)]
)
def test_owed_seconds_are_at_most_the_rest_of_a_time_slice(leaves, owed):
    (wait,) = waits(shown(leaves=leaves), "crowd", 10.0)
    assert (wait.group, wait.asked, wait.owed) == ("ann", 104.0, owed)
    took = leaves + 0.2 - 104.0
    assert beyond([(90.0, 0.0), (104.0, took), (130.0, 1.0)], [wait]) == [0.0, took - owed, 1.0]


def test_a_lost_turn_adds_no_owed_seconds_to_a_wait():
    """When the time slice ends, another kernel of the crowd gets the GPU, not ann's kernel."""
    rows = shown(leaves=110.0)[:-2]
    rows += [
        moved(110.1, "q", "queued", "attaching", "crowd"),
        moved(110.2, "q", "attaching", "active", "crowd"),
        moved(120.2, "q", "active", "detaching", "crowd"),
        moved(120.3, "q", "detaching", "queued", "crowd"),
        moved(120.3, "p", "queued", "attaching", "ann"),
    ]
    assert [wait.owed for wait in waits(rows, "crowd", 10.0)] == [6.0]


def test_unknown_benchmark_is_refused_with_the_known_names():
    done = run("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr
    assert "suspend_overhead" in done.stderr


def test_no_benchmark_starts_if_its_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    done = run("guard_calls", "--out", str(tmp_path / "file" / "results"))
    assert done.returncode == 2
    assert "results cannot be made: Not a directory" in done.stderr
    assert "==" not in done.stdout


def test_every_benchmark_compares_its_figures_with_a_budget():
    sources = {name: (ROOT / "benchmarks" / f"{name}.py").read_text() for name in find()}
    assert [name for name, source in sources.items() if '"budgets"' not in source] == []


@pytest.mark.long
@pytest.mark.timeout(1600)
def test_every_benchmark_writes_anonymous_figures(tmp_path):
    long = {module for module, *_ in SCENARIOS.values()}
    assert long <= set(find())
    names = [name for name in find() if name not in long]
    done = run("--quick", "--out", str(tmp_path), *names)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    written = sorted(tmp_path.glob("*.json"))
    assert {json.loads(path.read_text())["benchmark"] for path in written} == set(names)
    for path in written:
        text = path.read_text()
        check_anonymous(path.name, text)
        result = json.loads(text)
        assert result["machine"]["cores"] > 0
        assert result["budgets"], f"{path.name} compares nothing with a budget"


@pytest.mark.long
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name", SCENARIOS)
def test_benchmarks_of_shared_devices_meet_their_budgets(name):
    module, *case = SCENARIOS[name]
    done = start(f"benchmarks.{module}", "--quick", *case, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stderr)
    check_anonymous(name, done.stdout)
    result = json.loads(done.stdout)
    missed = [line for line in result["budgets"] if not line["met"]]
    assert result["budgets"]
    assert not missed, done.stderr + json.dumps(missed, indent=2) + done.stdout
