# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Commands that survive the terminal: ``run --detach``, ``ps``, ``logs``, ``stop``, ``wait``."""

from __future__ import annotations

import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from jupyter_gpupool import local_machine, procfs
from jupyter_gpupool.errors import RefusedError
from jupyter_gpupool.programs import detached, runfiles
from tests.broker import kit
from tests.broker.kit import wait_until

from .runkit import CLI, environment, run, session_of, state_of


@pytest.fixture(autouse=True)
def state(broker, monkeypatch):
    """Give the test its own folder of records. At the end, kill the processes in the records."""
    monkeypatch.setenv(runfiles.FOLDER_VARIABLE, str(broker.folder / "runs"))
    yield
    for record in runfiles.every():
        for pid, start in (record.supervisor, record.process):
            one = procfs.ProcessId(pid, start)
            procfs.kill([one] if pid not in (0, os.getpid()) else [])
            # A process that still runs could write files into the folder of the next test.
            wait_until(lambda: pid == os.getpid() or not procfs.alive(one), "its end")  # noqa: B023
        runfiles.remove(record.name)


def started(broker, *words, command):
    """Start a command; return its name."""
    done = run(broker, "run", "--detach", *words, "--", *command)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    return done.stdout.decode().strip()


def rows(broker):
    done = run(broker, "ps", "--json")
    assert done.returncode == 0, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)}


def test_command_gets_a_name_and_its_end_is_recorded(broker):
    script = "echo out; echo err >&2; cat; exit 4"
    name = started(broker, command=["sh", "-c", script])
    assert name == "sh-1"
    assert run(broker, "wait", name).returncode == 4
    assert run(broker, "logs", name).stdout == b"out\nerr\n"
    done = run(broker, "ps")
    assert b"ended" in done.stdout
    assert b"with exit code 4" in done.stdout
    assert started(broker, command=["sh", "-c", "exit"]) == "sh-2"
    script = broker.folder / "train.py"
    script.write_text("")
    assert started(broker, command=[sys.executable, str(script)]) == "train-1"
    path = runfiles.folder()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((path / name / "log").stat().st_mode) == 0o600
    assert stat.S_IMODE((path / name / "record.json").stat().st_mode) == 0o600


def test_program_runs_without_a_terminal(broker):
    code = "import os; print(os.environ['GPUPOOL_NAME'], os.getsid(0) == os.getpid()); "
    code += "open('/dev/tty')"
    name = started(broker, "--name", "far", command=[sys.executable, "-c", code])
    assert name == "far"
    assert run(broker, "wait", name).returncode == 1
    log = run(broker, "logs", name).stdout
    assert log.startswith(b"far True\n")
    assert b"No such device or address: '/dev/tty'" in log


def test_program_survives_its_terminal(broker, terminal):
    script = f"cd {broker.folder}; while [ ! -e go ]; do sleep 0.05; done; echo survived"
    screen = terminal([*CLI, "run", "--detach", "--name", "far", "--", "sh", "-c", script])
    screen.read_until(b"far")
    screen.hang_up()
    screen.wait()
    wait_until(lambda: rows(broker)["far"]["state"] == "running", "its start")
    (broker.folder / "go").touch()
    assert run(broker, "wait", "far").returncode == 0
    (broker.folder / "go").unlink()
    assert run(broker, "logs", "far").stdout == b"survived\n"


def test_stop_ends_the_program_and_its_session(broker):
    script = "trap 'echo bye; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
    name = started(broker, "--name", "loop", command=["sh", "-c", script])
    assert session_of(broker, "loop") is not None
    wait_until(lambda: run(broker, "logs", name).stdout == b"ready\n", "its start")
    done = run(broker, "stop", name)
    assert (done.returncode, b"with exit code 9" in done.stdout) == (0, True), done
    assert run(broker, "logs", name).stdout.endswith(b"bye\n")
    wait_until(lambda: session_of(broker, "loop") is None, "the session's end")
    done = run(broker, "stop", name)
    assert (done.returncode, b"loop does not run" in done.stderr) == (1, True)


def test_stop_kills_a_program_that_does_not_end(broker):
    script = "trap '' TERM; echo ready; while :; do sleep 0.05; done"
    name = started(broker, command=["sh", "-c", script])
    wait_until(lambda: run(broker, "logs", name).stdout == b"ready\n", "its start")
    done = run(broker, "stop", name, "--after", "0.1s")
    assert b"by SIGKILL" in done.stdout
    assert run(broker, "wait", name).returncode == 137


def test_waiting_program_is_shown_and_can_be_stopped(broker, program):
    first = program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    name = started(broker, "--attach", "hold", command=["echo", "never"])
    wait_until(lambda: "waits, 1 of 1" in rows(broker)[name]["gpu"], "its place in the queue")
    assert b"waiting for " in run(broker, "ps").stdout
    done = run(broker, "stop", name)
    assert b"by SIGTERM" in done.stdout
    first.end()
    assert b"never" not in run(broker, "logs", name).stdout


def test_refused_program_leaves_no_record(broker):
    done = run(broker, "run", "-d", "--memory", "9TiB", "--name", "big", "--", "echo")
    assert (done.returncode, done.stdout) == (125, b"")
    assert b"9 TiB" in done.stderr
    assert rows(broker) == {}


def test_program_whose_slice_is_refused_at_once_does_not_start(make_broker):
    daily = {"seconds": 0, "then": "refuse"}
    broker = make_broker(quotas={"*": {"gpu_seconds_per_day": daily}}).started
    for words in (["-d", "--name", "none"], []):
        done = run(broker, "run", *words, "--attach", "hold", "--", "echo", "ran")
        assert (done.returncode, done.stdout) == (125, b"")
        assert b"You get no GPU-seconds: the daily budget is 0" in done.stderr
    assert rows(broker) == {}
    assert started(broker, command=["echo", "lazy"]) == "echo-1"
    assert run(broker, "wait", "echo-1").returncode == 0


def test_refusal_is_reported_after_the_last_record(monkeypatch):
    """``run --detach`` removes the record when it gets the report of the record keeper.

    So the record keeper must write the record for the last time before it sends the report.
    """
    reading, writing = os.pipe()
    told = []
    monkeypatch.setattr(
        runfiles, "write", lambda _: told.append(select.select([reading], [], [], 0)[0])
    )
    keeper = detached._RecordKeeper(record("none"), None, writing)
    told.clear()
    keeper.ended(125, RefusedError("There is none."))
    assert told == [[]]
    assert json.loads(os.read(reading, 4096))["message"] == "There is none."
    os.close(reading)


def test_program_that_is_refused_later_points_to_its_log(broker, program):
    first = program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    name = started(broker, "--attach", "hold", "--max-wait", "2s", command=["echo", "never"])
    assert run(broker, "wait", name).returncode == 125
    shown = run(broker, "ps").stdout.decode()
    assert " ago: No GPU slice became free within 2 s (--max-wait)" in shown
    assert shown.endswith(f"Its output says what to do next: jupyter gpupool logs {name}\n")
    done = run(broker, "why", name)
    assert done.returncode == 1
    assert f"The program {name!r} no longer has a session; it ended ".encode() in done.stderr
    assert f"Its output: jupyter gpupool logs {name}".encode() in done.stderr
    assert b"wait longer" in run(broker, "logs", name).stdout
    first.end()


def test_name_is_unique_while_the_program_lives(broker):
    script = "while :; do sleep 0.05; done"
    assert started(broker, "--name", "one", command=["sh", "-c", script]) == "one"
    done = run(broker, "run", "-d", "--name", "one", "--", "echo")
    assert done.returncode == 125
    assert b"A program with the name 'one' runs already." in done.stderr
    run(broker, "stop", "one")
    assert started(broker, "--name", "one", command=["echo", "again"]) == "one"
    assert run(broker, "wait", "one").returncode == 0
    assert run(broker, "logs", "one").stdout == b"again\n"
    done = run(broker, "run", "-d", "--name", "../one", "--", "echo")
    assert b"cannot be the name of a program" in done.stderr
    done = run(broker, "logs", "onne")
    assert (done.returncode, b"Did you mean 'one'?" in done.stderr) == (1, True)


def test_followed_log_ends_with_the_program(broker):
    script = "echo a; while [ ! -e go ]; do sleep 0.05; done; echo b"
    name = started(broker, command=["sh", "-c", f"cd {broker.folder}; {script}"])
    with subprocess.Popen(
        [*CLI, "logs", "-f", name], env=environment(broker), cwd=kit.ROOT, stdout=subprocess.PIPE
    ) as follower:
        assert follower.stdout.readline() == b"a\n"
        (broker.folder / "go").touch()
        assert follower.stdout.readline() == b"b\n"
        assert follower.stdout.readline() == b""
        assert follower.wait(60) == 0
    (broker.folder / "go").unlink()


def test_death_of_the_supervisor_is_reported(broker):
    name = started(broker, command=["sleep", "600"])
    wait_until(lambda: rows(broker)[name]["state"] == "running", "its start")
    record = runfiles.read(name)
    os.kill(record.supervisor[0], signal.SIGKILL)
    wait_until(lambda: not runfiles.read(name).supervised, "the supervisor's end")
    assert b"its supervisor was killed, so its output is lost" in run(broker, "ps").stdout
    assert b"ended: its supervisor was killed" in run(broker, "stop", name).stdout
    done = run(broker, "wait", name)
    assert (done.returncode, b"its supervisor was killed" in done.stderr) == (125, True)


# ---------------------------------------------------------------------- records


def record(name, **changes):
    """Write a record of a command that has ended; return it."""
    runfiles.claim(name, ["echo"])
    made = runfiles.RunRecord(
        name=name, command=("echo",), folder="/", boot=local_machine.boot_id(), supervisor=(1, 1),
        state="ended", created=1.0, ended=time.time(), code=0,
    )  # fmt: skip
    runfiles.write(replace(made, **changes))
    return made


def test_records_from_before_a_restart_count_as_ended():
    record("old", state="running", boot="another", ended=0.0, code=None, process=(os.getpid(), 1))
    found = runfiles.find("old")
    assert found.state == "ended"
    assert found.describe(time.time()) == "ended: the machine restarted"


def test_program_that_ends_after_the_read_counts_as_ended():
    """The test reads a record. Then the supervisor writes the end of the program, and exits.

    ``now`` must return this end. It must not say that the supervisor was killed.
    """
    record("late", state="running", ended=0.0, code=None)
    before = runfiles.read("late")
    runfiles.write(replace(before, state="ended", ended=time.time(), code=3))
    assert before.now().code == 3


def test_old_records_are_removed_by_age_and_number(monkeypatch):
    monkeypatch.setattr(runfiles, "MOST_ENDED", 3)
    now = time.time()
    for number in range(5):
        record(f"n{number}", ended=now - number)
    record("aged", ended=now - runfiles.KEPT_FOR - 1)
    record("boot", ended=0.0, created=now + 1, state="running", boot="another")
    runfiles.clean(now)
    assert {one.name for one in runfiles.every()} == {"boot", "n0", "n1"}


def test_log_has_a_limited_size(monkeypatch):
    monkeypatch.setattr(runfiles, "MAX_LOG", 100)
    record("log")
    writer = runfiles.LogWriter("log")
    for number in range(50):
        writer.write(b"%09d\n" % number)
    writer.close()
    kept = b"".join(runfiles.read_log("log"))
    assert kept.endswith(b"000000049\n")
    assert 100 <= len(kept) <= 200
    assert b"".join(runfiles.follow_log("log")) == kept


def test_followed_log_continues_in_the_next_file(monkeypatch):
    monkeypatch.setattr(runfiles, "MAX_LOG", 100)
    record("log", state="running", supervisor=runfiles.this_process(), code=None, ended=0.0)
    writer, follower = runfiles.LogWriter("log"), runfiles.follow_log("log")

    def next_bytes(count):
        found = b""
        while len(found) < count:
            found += next(follower)
        return found

    for letter in (b"a", b"b", b"c"):
        writer.write(90 * letter)
        assert next_bytes(90) == 90 * letter
    writer.write(b"end")
    writer.close()
    runfiles.write(replace(runfiles.read("log"), state="ended"))
    assert b"".join(follower) == b"end"


def test_damaged_records_are_ignored():
    record("good")
    runfiles.claim("bad", ["echo"])
    (runfiles.folder() / "bad" / "record.json").write_text('{"name": ')
    assert [one.name for one in runfiles.every()] == ["good"]
