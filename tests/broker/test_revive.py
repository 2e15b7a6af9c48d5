# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The first process that notices a broker's death restarts the broker.

A broker that ended normally is not restarted.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from jupyter_gpupool import startfailures, starting, startrecord
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import BrokerUnavailable
from jupyter_gpupool.starting import ensure_broker

from . import kit
from .kit import ONE, wait_until
from .test_autostart import with_pid


@pytest.fixture
def parts():
    return kit.Broker, kit.Kernel, {"emulate": ONE}


@pytest.fixture
def dead(forked, killed):
    """Return a killed broker. The broker that replaces it is forked, see ``forks.py``."""
    return killed


@pytest.fixture
def killed(make_broker):
    """Yield a killed broker. The broker that replaces it is executed, and ends with the test."""
    broker = make_broker(idle_timeout=77).started
    broker.kill()
    yield broker
    with suppress(OSError, ValueError):
        kill(broker)


def kill(broker):
    """Kill the broker that now serves at the socket of ``broker``, and wait for its end."""
    with_pid(int(broker.socket.with_name("broker.sock.lock").read_text().split()[0]))


def test_killed_broker_is_restarted_with_its_configuration(dead):
    before = startrecord.read_record(dead.socket).pid
    assert starting.revive(dead.socket)
    found = dead.status()
    assert f"The previous broker (process {before}) died" in dead.tail()
    assert found["settings"]["idle_timeout"] == 77
    assert found["machine"] == f"EMULATED {ONE}"
    environ = Path(f"/proc/{found['pid']}/environ").read_text().split("\0")
    assert f"JUPYTER_CONFIG_DIR={dead.folder / 'no-config'}" in environ
    assert os.getsid(found["pid"]) == found["pid"]
    assert starting.revive(dead.socket)
    assert dead.status()["pid"] == found["pid"]


def test_other_server_restarts_the_broker_with_its_old_options(dead):
    """Kernels may depend on the old options. ``test_differences`` tests the message about this."""
    path = ensure_broker({"GPUPool": {"emulate": ONE, "idle_timeout": 5}}, str(dead.socket))
    assert dead.status()["settings"]["idle_timeout"] == 77
    assert path == dead.socket


def test_broker_that_ended_normally_is_not_started_again(broker):
    broker.disturbed = True
    broker.stop()
    assert not starting.revive(broker.socket)
    assert not broker.socket.exists()


def test_only_one_of_many_launchers_starts_the_broker(dead):
    command = ["/bin/sh", "-c", startrecord.launcher(dead.socket)]
    for _ in range(8):
        subprocess.run(command, check=True, timeout=60, env={"PATH": "/usr/bin:/bin"})
    wait_until(dead.socket.exists, "the broker's socket")
    wait_until(lambda: starting.answers(dead.socket), "the broker")
    pid = dead.status()["pid"]
    wait_until(lambda: not startrecord.being_started(dead.socket), "the launchers' end")
    assert dead.status()["pid"] == pid
    assert dead.tail(1 << 20).count(" listens at ") == 2
    # The broker must not be a child of this process.
    assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) != os.getpid()


def test_third_failed_start_says_why_and_names_the_log(dead):
    dead.config_file.write_text(json.dumps({"GPUPool": {"emulate": "nonsense"}}))
    with pytest.raises(BrokerUnavailable) as caught:
        starting.revive(dead.socket)
    assert "nonsense" in caught.value.message
    assert startfailures.read_failures(dead.socket).count == 3
    # Until the pause is over, the next caller fails at once, and no broker starts.
    with pytest.raises(BrokerUnavailable, match="nonsense"):
        starting.revive(dead.socket)
    assert startfailures.read_failures(dead.socket).count == 3
    # A server starts a broker with its own configuration. This start succeeds, so the count of
    # failures is 0 again.
    ensure_broker({"GPUPool": {"emulate": ONE, "state_dir": str(dead.folder / "state")}},
                  str(dead.socket))  # fmt: skip
    assert startfailures.read_failures(dead.socket).count == 0


def test_launcher_pauses_after_three_brokers_died_before_use(dead, monkeypatch):
    monkeypatch.setattr(startfailures, "DEATH_PAUSES", (0.0,))
    monkeypatch.setattr(startfailures, "MOST_DEATHS", 3)
    for _ in range(2):
        assert starting.revive(dead.socket)
        kill(dead)
    with pytest.raises(BrokerUnavailable) as caught:
        starting.revive(dead.socket)
    assert "3 brokers in a row" in caught.value.message
    assert str(dead.socket.with_suffix(".log")) in caught.value.next_step
    assert startfailures.read_failures(dead.socket).given_up
    # No broker starts until the pause is over. After the pause, one more broker starts.
    with pytest.raises(BrokerUnavailable, match="3 brokers in a row"):
        starting.revive(dead.socket)
    monkeypatch.setattr(startfailures, "PAUSES", (0.0,))
    assert starting.revive(dead.socket)


def test_broker_killed_while_it_serves_comes_back_each_time(dead, monkeypatch):
    monkeypatch.setattr(startfailures, "MOST_DEATHS", 2)
    assert starting.revive(dead.socket)
    for _ in range(3):
        with dead.client() as client:
            client.call("open", kernel_id="k")
        wait_until(lambda: startrecord.read_record(dead.socket).served, "the note of it")
        kill(dead)
        assert starting.revive(dead.socket)
    assert startfailures.read_failures(dead.socket).deaths == ()


def test_broker_that_crashes_records_its_error(dead):
    path = startrecord.record_path(dead.socket)
    record = json.loads(path.read_text())
    script = (
        "import sys; from jupyter_gpupool.broker import app\n"
        "async def fail(self): raise RuntimeError('what went wrong')\n"
        "app.Ending.wait = fail\n"
        "app.Ending.unless_asked = lambda self, work: work\n"
        "sys.exit(app.main())"
    )
    words = [sys.executable, "-c", script, *record["command"][3:]]
    path.write_text(json.dumps({**record, "command": words}))
    with suppress(BrokerUnavailable):
        starting.revive(dead.socket)
    wait_until(lambda: startrecord.read_record(dead.socket).crashed, "the error")
    assert startrecord.read_record(dead.socket).crashed == "RuntimeError: what went wrong"
    assert startrecord.read_record(dead.socket).useless


def test_broker_is_detached_from_the_session_that_started_it(killed, monkeypatch):
    """A broker that a notebook starts must outlive it, and have no part in its pool session."""
    monkeypatch.setenv("GPUPOOL_SESSION", "outer")
    monkeypatch.setenv("GPUPOOL_TOKEN", "secret")
    startrecord.remove_record(killed.socket)
    config = {"GPUPool": {"emulate": ONE, "state_dir": str(killed.folder / "state")}}
    ensure_broker(config, str(killed.socket))
    pid = killed.status()["pid"]
    assert os.getsid(pid) == pid
    assert psutil.Process(pid).ppid() != os.getpid()
    assert pid not in [child.pid for child in psutil.Process().children(recursive=True)]
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"GPUPOOL_SESSION" not in environ
    assert b"GPUPOOL_TOKEN" not in environ


def replace_in_record(broker, **changes):
    path = startrecord.record_path(broker.socket)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_broker_that_is_killed_as_it_starts_is_started_again(dead, tmp_path, monkeypatch):
    """If somebody kills the broker during a start, this start does not count as failed.

    In the past, all waiting calls failed after three such starts.
    """
    monkeypatch.setattr(startfailures, "DEATH_PAUSES", (0.0,))
    starts = tmp_path / "starts"
    script = (
        "import os, sys; from pathlib import Path\n"
        f"starts = Path({str(starts)!r})\n"
        "known = starts.read_text() if starts.exists() else ''\n"
        "starts.write_text(known + '.')\n"
        "if len(known) < 4: os.kill(os.getpid(), 9)\n"
        "from jupyter_gpupool.broker.app import main; sys.exit(main())"
    )
    command = json.loads(startrecord.record_path(dead.socket).read_text())["command"]
    replace_in_record(dead, command=[sys.executable, "-c", script, *command[3:]])
    assert starting.revive(dead.socket)
    assert starts.read_text() == "....."
    assert startfailures.read_failures(dead.socket).count == 0


def test_broker_that_cannot_be_imported_says_why(killed, tmp_path, monkeypatch):
    monkeypatch.setattr(startfailures, "PAUSES", (0.0,))
    (tmp_path / "traitlets.py").write_text("raise RuntimeError('a broken library')")
    environment = startrecord.read_record(killed.socket).environment
    paths = f"{tmp_path}{os.pathsep}{environment['PYTHONPATH']}"
    replace_in_record(killed, environment={**environment, "PYTHONPATH": paths})
    with pytest.raises(BrokerUnavailable, match="RuntimeError: a broken library"):
        starting.revive(killed.socket)
    assert startfailures.read_failures(killed.socket).given_up


def test_missing_program_of_the_broker_is_named(dead):
    path = startrecord.record_path(dead.socket)
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "command": ["/no/such/python", "-m", "x"]}))
    with pytest.raises(BrokerUnavailable, match="/no/such/python"):
        starting.revive(dead.socket)


def test_start_record_that_others_may_write_is_refused(dead):
    startrecord.record_path(dead.socket).chmod(0o666)
    with pytest.raises(BrokerUnavailable) as caught:
        starting.revive(dead.socket)
    assert "other users" in caught.value.message
    assert not dead.socket.with_name("broker.sock.lock").exists() or not starting.answers(
        dead.socket
    )


def test_broker_that_hangs_is_not_started_a_second_time(broker, monkeypatch):
    monkeypatch.setattr("jupyter_gpupool.client.CALL_TIMEOUT", 1.0)
    monkeypatch.setattr(Client.call, "__kwdefaults__", {"timeout": 1.0})
    broker.disturbed = True
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        assert not starting.revive(broker.socket)
        assert startfailures.read_failures(broker.socket).count == 0
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)


def test_launcher_needs_no_folder_or_environment_of_its_caller(dead, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('the wrong module')")
    subprocess.run(
        ["/bin/sh", "-c", startrecord.launcher(dead.socket)],
        check=True, timeout=60, cwd=tmp_path, env={},
    )  # fmt: skip
    wait_until(lambda: dead.socket.exists() and starting.answers(dead.socket), "the broker", 60)
    assert sys.executable in startrecord.launcher(dead.socket)
