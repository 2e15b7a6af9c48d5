# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``jupyter gpupool run``: exit codes, streams, signals, and the wait for a slice."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.broker.kit import BIG, MiB, wait_until

from .runkit import CLI, Program, environment, run, session_of, state_of

#: A program that prints the name of each signal that it gets. It ends at SIGTERM. For each signal,
#: Python writes a byte to a pipe. The program waits for this byte, so its handler runs at once.
LISTENER = """
import os, signal, sys
told, tell = os.pipe()
os.set_blocking(tell, False)
signal.set_wakeup_fd(tell)
def got(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for name in ("INT", "HUP", "QUIT", "USR1", "USR2", "WINCH", "TERM"):
    signal.signal(getattr(signal, f"SIG{name}"), got)
print("ready", os.environ["GPUPOOL_SESSION"], os.getpid(), flush=True)
while True:
    os.read(told, 1)
"""


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -TERM $$", 143)])
def test_exit_code_is_that_of_the_command(broker, script, code):
    done = run(broker, "run", "--", "sh", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (code, b"", b"")


def test_program_uses_the_share_of_the_group_that_it_names(make_broker):
    groups = {"first": {"users": "*", "order": 1}, "second": {"users": "*"}}
    broker = make_broker(groups=groups).started
    script = "jupyter_gpupool.cli status --json"
    for words, group in (([], "first"), (["--group", "second"], "second")):
        done = run(broker, "run", *words, "--", sys.executable, "-m", *script.split())
        assert [one["group"] for one in json.loads(done.stdout)["sessions"]] == [group]
        wait_until(lambda: not broker.status()["sessions"], "the session's end")
    done = run(broker, "run", "--group", "third", "--", "true")
    assert done.returncode == 125
    assert done.stderr.startswith(b"jupyter gpupool run: You are not in a group 'third'")


def test_streams_reach_the_command_unchanged(broker):
    data = bytes(range(256)) * 1000
    script = "cat; echo wrong >&2"
    done = run(broker, "run", "sh", "-c", script, input_=data)
    assert (done.returncode, done.stdout, done.stderr) == (0, data, b"wrong\n")


def test_closed_streams_stay_closed(program):
    line = " ".join([*CLI, "run", "--", "ls", "-l", "/proc/self/fd"])
    one = program(command=["sh", "-c", f"exec {line} 0<&- 2>&-"])
    names = {line.split()[8] for line in iter(one.line, "") if "->" in line}
    assert one.wait() == 0
    assert names == {"0", "1"}, "ls opens the folder as the first that is free; 2 is closed"


def test_service_manager_starts_the_command_itself(program):
    """systemd puts the pid of ``run`` into LISTEN_PID. A program accepts only its own pid there.

    The command is a child of ``run``. So ``run`` puts the pid of this child into LISTEN_PID.
    """
    line = " ".join([*CLI, "run", "--", "sh", "-c", "'echo $LISTEN_PID $$'"])
    one = program(command=["sh", "-c", f"export LISTEN_PID=$$; exec {line}"])
    named, own = one.line().split()
    assert named == own


def test_command_that_cannot_run_has_the_exit_code_of_a_shell(broker, tmp_path):
    (tmp_path / "data").write_text("no program")
    done = run(broker, "run", "--", "no-such-program")
    assert done.returncode == 127
    assert done.stderr == b"jupyter gpupool run: no-such-program: command not found\n"
    done = run(broker, "run", "--", str(tmp_path / "data"))
    assert done.returncode == 126
    assert done.stderr.endswith(b"data: is not executable\n")
    (tmp_path / "script").write_text("#!/no/such/interpreter\n")
    (tmp_path / "script").chmod(0o755)
    done = run(broker, "run", "--", str(tmp_path / "script"))
    assert done.returncode == 127
    assert b"script: No such file or directory" in done.stderr
    assert run(broker, "run").returncode == 2


def test_command_does_not_run_after_a_refusal(broker, tmp_path):
    done = run(broker, "run", "--memory", "9TiB", "--", "touch", str(tmp_path / "ran"))
    assert done.returncode == 125
    assert done.stderr.startswith(b"jupyter gpupool run: ")
    assert b"9 TiB" in done.stderr
    assert not (tmp_path / "ran").exists()
    assert broker.status()["sessions"] == []
    done = run(broker, "run", "--memory", "12", "--", "touch", str(tmp_path / "ran"))
    assert (done.returncode, b"has no unit" in done.stderr) == (125, True)
    done = run(broker, "run", "--memory", "1MiB", "--", "true")
    assert done.returncode == 125
    assert b"1 MiB was asked for; a process that uses CUDA needs at least" in done.stderr


def test_zero_is_refused_and_does_not_mean_the_default(broker):
    """In an earlier version, ``run`` did not refuse these values: it used its defaults instead.

    So a program with --compute 0 got the whole time of a GPU.
    """
    for words, code, text in (
        (["--compute", "0"], 2, b"'0' is not a percentage from 1 to 100"),
        (["--compute", "101%"], 2, b"'101%' is not a percentage from 1 to 100"),
        (["--devices", "0"], 2, b"'0' is not a number of GPUs"),
    ):
        done = run(broker, "run", *words, "--", "echo", "ran")
        assert (done.returncode, done.stdout, text in done.stderr) == (code, b"", True), done
    assert run(broker, "run", "--compute", "20%", "--", "echo", "ran").stdout == b"ran\n"


def test_session_lasts_as_long_as_the_command(broker, program):
    words = ("--memory", "100MiB", "--limit", "200MiB", "--compute", "20", "--name", "train")
    one = program(*words)
    pid = one.answer()
    session = session_of(broker, "train")
    assert (session["state"], session["pid"], session["guard"]) == ("detached", pid, True)
    request = session["request"]
    assert (request["memory"], request["limit"], request["compute"]) == (100 * MiB, 200 * MiB, 20)
    one.do("context")
    assert state_of(broker, "train") in ("active", "idle")
    assert one.end() == 0
    wait_until(lambda: session_of(broker, "train") is None, "the session's end")


def test_command_knows_its_session_and_its_name(program):
    one = program("--name", "serve", command=["env"])
    found = dict(line.split("=", 1) for line in iter(lambda: one.line().strip(), "") if "=" in line)
    assert found["GPUPOOL_NAME"] == "serve"
    assert found["GPUPOOL_SESSION"]
    assert found["GPUPOOL_PAGE"]


def test_run_inside_run_gets_its_own_session(program):
    code = "import os; print(os.environ['GPUPOOL_SESSION'], flush=True); "
    code += f"os.execv({CLI[0]!r}, {CLI!r} + ['run', 'sh', '-c', 'echo $GPUPOOL_SESSION'])"
    one = program(command=[sys.executable, "-c", code])
    outer, inner = one.line().strip(), one.line().strip()
    assert one.wait() == 0
    assert outer
    assert inner
    assert outer != inner


def test_held_slice_lasts_from_start_to_end(broker, program):
    one = program("--attach", "hold", "--name", "held", command=["cat"])
    one.process.stdin.write(b"x\n")
    one.process.stdin.flush()
    assert one.line() == "x\n"
    session = session_of(broker, "held")
    assert session["state"] == "active"
    assert [hold["id"] for hold in session["holds"]] == ["run"]
    assert one.end() == 0


def test_each_signal_reaches_the_command_once(program):
    one = program(command=[sys.executable, "-c", LISTENER])
    assert one.line().startswith("ready")
    for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGINT", "SIGQUIT", "SIGWINCH"):
        one.process.send_signal(getattr(signal, name))
        assert one.line().strip() == name
    one.process.terminate()
    assert one.line().strip() == "SIGTERM"
    assert one.line() == ""
    assert one.wait() == 5


def test_ignored_signals_stay_ignored(program):
    one = program(command=["sh", "-c", "trap '' HUP; exec " + " ".join(
        [*CLI, "run", "--", "sh", "-c", "'echo ready; kill -HUP $$; echo alive'"])])  # fmt: skip
    assert one.line().strip() == "ready"
    assert one.line().strip() == "alive"
    assert one.wait() == 0


# ---------------------------------------------------------------------- the wait


def test_waiting_command_says_why_it_waits_and_then_runs(broker, program):
    first = program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    second = program("--attach", "hold", "--name", "second", command=["echo", "its turn"])
    wait_until(lambda: state_of(broker, "second") == "queued", "the wait")
    wait_until(lambda: "position 1 of 1" in second.stderr, "the line")
    # ``run`` may print a line before it knows the queue position. The test skips this line.
    line = next(line for line in second.stderr.splitlines() if "position" in line)
    assert line.startswith("jupyter gpupool run: Waiting for a GPU slice of 300 MiB: position 1")
    assert first.end() == 0
    assert second.line() == "its turn\n"
    assert second.wait() == 0
    assert "The program has its GPU slice after" in second.stderr


def test_waiting_cuda_call_says_why(broker, program):
    first = program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    second = program("--name", "second")
    second.answer()
    second.tell("context")
    wait_until(lambda: "Waiting for a GPU slice of 300 MiB" in second.stderr, "the line")
    assert first.end() == 0
    second.answer()
    # The call may return before ``run`` has printed that the wait is over.
    wait_until(
        lambda: "The program has its GPU slice after" in second.stderr, "the end of the wait"
    )
    assert second.end() == 0


@pytest.mark.parametrize("attach", ["hold", "lazy"])
def test_command_ends_when_max_wait_is_over(broker, program, attach):
    program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    second = program("--max-wait", "2s", "--attach", attach, "--name", "second")
    if attach == "lazy":
        second.answer()
        second.tell("context")
    assert second.wait() == 125
    assert "No GPU slice became free within" in second.stderr
    assert "(--max-wait). The last reason: " in second.stderr
    assert "is needed" in second.stderr.partition("The last reason: ")[2]
    wait_until(lambda: session_of(broker, "second") is None, "the session's end")
    assert state_of(broker, "first") == "active"


def test_interrupt_ends_the_wait(broker, program):
    program("--attach", "hold", "--name", "first", command=["cat"])
    wait_until(lambda: state_of(broker, "first") == "active", "the first")
    second = program("--attach", "hold", "--name", "second", command=["echo", "never"])
    wait_until(lambda: state_of(broker, "second") == "queued", "the wait")
    second.process.send_signal(signal.SIGINT)
    assert second.wait() == 130
    assert second.line() == ""
    wait_until(lambda: session_of(broker, "second") is None, "the session's end")


def test_idle_program_is_suspended_for_another_and_returns(program):
    first, second = program("--name", "first"), program("--name", "second")
    for byte, one in ((1, first), (2, second)):
        one.answer()
        one.do("context")
        one.do("alloc", bytes=200 * MiB, byte=byte)
    for one in (first, second, first):
        assert one.do("check") == 200 * MiB
    assert first.end() == second.end() == 0


def test_children_share_the_slice(broker, program):
    one = program("--memory", "300MiB", "--limit", "300MiB", "--name", "family")
    one.answer()
    one.do("context")
    one.do("sub", command={"do": "context"})
    assert one.do("sub", command={"do": "alloc", "bytes": 100 * MiB, "byte": 3}) is None
    too_much = one.do("alloc", bytes=BIG - 50 * MiB, byte=4)
    assert too_much == {"cuda": 2}, "both are within one slice"
    assert len(broker.status()["sessions"]) == 1


def test_command_holds_its_slice_to_the_end_without_a_guard(make_broker):
    broker = make_broker(guard=False, emulate="1x512MiB,context=32MiB").started
    code = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], 'GPUPOOL_PAGE' in os.environ)"
    done = run(broker, "run", "--name", "bare", "--", sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    uuid = broker.status()["devices"][0]["uuid"]
    assert done.stdout.decode().split() == [uuid, "False"]
    wait_until(lambda: broker.rows("close"), "the session's end")
    assert [row["kind"] for row in broker.rows("attach", "close")] == ["attach", "close"]


def test_broker_is_started_by_the_first_command(folder):
    from jupyter_gpupool.client import Client

    class NoBroker:
        socket = folder / "gpupool" / "broker.sock"

    NoBroker.folder = folder
    config = folder / "config"
    config.mkdir()
    values = {"emulate": "1x512MiB,context=32MiB", "linger": 3600, "state_dir": str(folder / "s")}
    (config / "jupyter_server_config.json").write_text(json.dumps({"GPUPool": values}))
    env = environment(NoBroker, JUPYTER_CONFIG_DIR=str(config))
    del env["JUPYTER_NO_CONFIG"]
    import subprocess

    try:
        done = subprocess.run(
            [*CLI, "run", "--", "sh", "-c", "echo $GPUPOOL_SESSION"], env=env, timeout=120,
            capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    finally:
        with Client(NoBroker.socket) as client:
            pid = client.call("status")["pid"]
        blocked = re.search(r"^SigBlk:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.M)[1]
        os.kill(pid, signal.SIGTERM)
        assert int(blocked, 16) == 0, "the broker has none of the signals blocked that run blocks"
        wait_until(lambda: not NoBroker.socket.exists(), "the broker's end")


def test_commands_continue_while_the_broker_is_away(folder, make_broker):
    """``lazy`` computes in its slice, ``holder`` only holds its slice, and ``third`` waits for one.

    Then the broker dies. The next broker takes over all three commands.
    """

    broker = make_broker(emulate="2x512MiB,context=32MiB", quiet_after=0.3).started
    programs = []
    try:
        lazy = Program(broker, "--name", "lazy")
        holder = Program(broker, "--attach", "hold", "--name", "holder", command=["cat"])
        programs += [lazy, holder]
        lazy.answer()
        lazy.do("context")
        lazy.do("alloc", bytes=200 * MiB, byte=7)
        lazy.do("storm")  # ``lazy`` uses its slice, so ``third`` must wait
        wait_until(lambda: state_of(broker, "holder") == "active", "the holder")
        third = Program(broker, "--attach", "hold", "--name", "third", command=["echo", "turn"])
        programs.append(third)
        wait_until(lambda: state_of(broker, "third") == "queued", "the wait")
        pid = broker.status()["pid"]
        broker.kill()
        wait_until(lambda: broker_is_back(broker, pid), "another broker")
        wait_until(lambda: state_of(broker, "third") == "queued", "the wait again")
        wait_until(lambda: holds(broker, "holder") == ["run"], "the holder's hold again")
        assert state_of(broker, "holder") == "active"
        lazy.do("calm")
        assert lazy.do("check") == 200 * MiB
        assert lazy.end() == 0
        assert third.line() == "turn\n"
        assert [third.wait(), holder.end()] == [0, 0]
    finally:
        for one in programs:
            one.close()
        os.kill(broker.status()["pid"], signal.SIGTERM)
        wait_until(lambda: not broker.socket.exists(), "the broker's end")


def holds(broker, label):
    return [hold["id"] for hold in session_of(broker, label)["holds"] if hold["id"] != "device"]


def broker_is_back(broker, was):
    from jupyter_gpupool.errors import GPUPoolError

    try:
        return broker.status()["pid"] != was
    except GPUPoolError:
        return False


# ---------------------------------------------------------------------- preemption

CLASSES = {"low": 0, "high": 1000}


@pytest.mark.parametrize("attach", ["lazy", "hold"])
def test_computing_program_is_preempted_and_continues(make_broker, attach):
    """A program of a higher class takes the slice of a computing program. No data is lost."""
    broker = make_broker(
        emulate="1x512MiB,context=32MiB", quiet_after=0.3, priority_classes=CLASSES,
        default_priority="low", preempt=["class"],
    ).started  # fmt: skip
    low = Program(broker, "--attach", attach, "--name", "low")
    high = Program(broker, "--class", "high", "--name", "high")
    try:
        for byte, one in ((1, low), (2, high)):
            one.answer()
            if one is low:
                one.do("context")
                one.do("alloc", bytes=200 * MiB, byte=byte)
                one.do("storm")
        high.do("context")
        high.do("alloc", bytes=200 * MiB, byte=2)
        high.do("storm")  # without calls, ``high`` would give its slice back at once
        wait_until(lambda: state_of(broker, "low") == "queued", "its next call waits")
        wait_until(lambda: "Waiting for a GPU slice of 300 MiB" in low.stderr, "the line")
        calls = low.do("calls")
        assert high.do("calm")["error"] == 0
        assert high.end() == 0
        wait_until(lambda: low.do("calls") > calls, "its calls go on")
        assert "It was preempted: a kernel of a higher priority class needs the GPU" in low.stderr
        # The program's calls may continue before ``run`` has printed that the wait is over.
        wait_until(
            lambda: "The program has its GPU slice after" in low.stderr, "the end of the wait"
        )
        assert low.do("calm")["error"] == 0
        assert low.do("check") == 200 * MiB
        assert low.end() == 0
    finally:
        low.close()
        high.close()
