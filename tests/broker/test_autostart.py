# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Brokers start on demand, end when idle, and read their configuration again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from traitlets.config import Config
from traitlets.config.loader import KVArgParseConfigLoader

from jupyter_gpupool import daemon
from jupyter_gpupool.client import Client
from jupyter_gpupool.errors import BrokerUnavailable, RefusedError
from jupyter_gpupool.procfs import identify
from jupyter_gpupool.starting import ensure_broker

from . import kit
from .kit import BIG, ONE, Kernel, MiB, wait_until


@pytest.fixture
def clean(monkeypatch, folder):
    """Set the environment of a user without configuration; yield its folder for sockets."""
    for name in list(os.environ):
        if name.startswith(("GPUPOOL_", "JUPYTER_")):
            monkeypatch.delenv(name)
    for name, value in kit.environment(folder).items():
        if name.startswith("JUPYTER_"):
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    yield folder
    for log in folder.rglob("*.sock.lock"):
        words = log.read_text().split()
        if words:
            with_pid(int(words[0]))


def with_pid(pid):
    """End a broker that a test started, and wait for its exit."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    try:
        os.waitpid(pid, 0)
    except ChildProcessError:
        wait_until(lambda: identify(pid) is None, "the broker's end")


def settings(folder, **more):
    return {
        "GPUPool": {
            "emulate": ONE,
            "state_dir": str(folder / "state"),
            "default_memory": BIG,
            **more,
        }
    }


def status(path):
    with Client(path) as client:
        return client.call("status")


def test_broker_starts_once_and_is_found_again(clean):
    path = ensure_broker(settings(clean))
    assert path == clean / "gpupool" / "broker.sock"
    first = status(path)
    assert first["machine"] == f"EMULATED {ONE}"
    assert ensure_broker(None) == path
    assert status(path)["pid"] == first["pid"]
    # The broker has its own process session: ^C in the server's terminal does not end it.
    assert os.getsid(first["pid"]) == first["pid"]
    config = path.with_suffix(".config.json")
    assert config.stat().st_mode & 0o777 == 0o600
    assert json.loads(config.read_text())["GPUPool"]["emulate"] == ONE


@pytest.mark.parametrize("starters", [8, pytest.param(20, marks=pytest.mark.long)])
def test_concurrent_callers_start_one_broker(clean, starters):
    script = (
        "import json, sys; from jupyter_gpupool.starting import ensure_broker;"
        "from jupyter_gpupool.client import Client;"
        "path = ensure_broker(json.loads(sys.argv[1]));"
        "print(Client(path).call('status')['pid'])"
    )
    command = [sys.executable, "-c", script, json.dumps(settings(clean))]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=kit.ROOT)
        for _ in range(starters)
    ]
    pids = set()
    for starter in started:
        out, _ = starter.communicate(timeout=110)
        assert starter.returncode == 0
        pids.add(out.strip())
    assert len(pids) == 1
    log = (clean / "gpupool" / "broker.log").read_text()
    assert log.count(" listens at ") == 1


def test_options_of_a_command_line_reach_the_broker(clean):
    r"""``jupyter lab --GPUPool.emulate=...`` puts its options into the server's configuration."""
    loader = KVArgParseConfigLoader(
        argv=[
            f"--GPUPool.emulate={ONE}",
            f"--GPUPool.state_dir={clean / 's'}",
            "--GPUPool.idle_timeout=77",
        ]
    )
    path = ensure_broker(loader.load_config())
    found = status(path)
    assert found["settings"]["idle_timeout"] == 77
    assert found["emulated"]


def test_broker_starts_with_a_configuration_object(clean):
    config = Config(settings(clean, idle_timeout=55))
    assert status(ensure_broker(config))["settings"]["idle_timeout"] == 55


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"idle_timeoutt": 5}, "idle_timeout"),
        ({"emulate": "2x"}, "2x"),
        ({"devices": [7]}, "devices names '7'"),
    ],
    ids=str,
)
def test_a_broker_that_cannot_start_says_why(clean, more, says):
    with pytest.raises(BrokerUnavailable) as caught:
        ensure_broker(settings(clean, **more))
    assert says in str(caught.value)
    assert not (clean / "gpupool" / "broker.sock").exists()
    # Without the wrong setting, the broker starts.
    assert status(ensure_broker(settings(clean)))["devices"]


def test_broker_that_hangs_at_its_start_is_ended(clean):
    ensure_broker(settings(clean))
    path = clean / "gpupool" / "broker.sock"
    pid = status(path)["pid"]
    with pytest.raises(BrokerUnavailable, match="in time"):
        ensure_broker(settings(clean), str(clean / "other" / "b.sock"), timeout=0.01)
    assert status(path)["pid"] == pid


def test_launch_ends_a_program_that_never_runs_the_broker(clean, monkeypatch):
    """``exec`` blocks if a file system does not answer. The caller's time limit covers this."""
    stuck, pid = clean / "stuck", clean / "pid"
    stuck.write_text(f"#!/bin/sh\necho $$ > {pid}\nsleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(daemon.sys, "executable", str(stuck))
    begun = time.monotonic()
    with pytest.raises(BrokerUnavailable, match="did not start in time and was ended") as raised:
        daemon.launch(clean / "b.sock", ["/bin/true"], os.environ, begun + 3)
    assert raised.value.code == "start-timeout"
    assert time.monotonic() - begun < 60
    wait_until(lambda: identify(int(pid.read_text())) is None, "its end", 60)


def test_settings_that_json_cannot_hold_are_refused(clean):
    with pytest.raises(BrokerUnavailable, match="has a value that cannot be passed"):
        ensure_broker(settings(clean, quotas={"ada": object()}))


def test_socket_folder_that_is_a_link_is_refused(clean):
    (clean / "gpupool").symlink_to("/tmp")
    with pytest.raises(BrokerUnavailable) as caught:
        ensure_broker(settings(clean))
    assert caught.value.code == "bad-socket"


def test_a_socket_that_is_a_symbolic_link_is_refused(clean):
    (clean / "gpupool").mkdir(mode=0o700)
    (clean / "gpupool" / "broker.sock").symlink_to("/run/gpupool/other.sock")
    with pytest.raises(BrokerUnavailable, match="symbolic link"):
        ensure_broker(settings(clean))


def test_a_path_that_is_too_long_is_refused(clean):
    with pytest.raises(BrokerUnavailable, match="107"):
        ensure_broker(settings(clean), str(clean / ("x" * 120)))


@contextmanager
def kernel_on(broker):
    one = Kernel(broker, "one")
    try:
        yield one
    finally:
        one.close()


def test_a_broker_without_sessions_ends_itself(make_broker):
    broker = make_broker(linger=5).started  # its first kernel must start within 5 s
    with kernel_on(broker) as one:
        one.attach()
        assert broker.process.poll() is None
    # The broker's only kernel has ended, and no client sends requests. So the broker ends.
    assert broker.process.wait(60) == 0
    assert not broker.socket.exists()
    assert "because it had no session for" in broker.tail()


def test_second_broker_is_refused_and_the_first_continues(broker):
    process = broker.process
    answer = broker.start()
    assert answer["ok"] is False
    assert answer["code"] == "already-running"
    assert f"process {process.pid}" in answer["message"]
    broker.process = process
    assert broker.status()["pid"] == process.pid


def test_sighup_reads_the_configuration_again(broker, kernel):
    one = kernel("one")
    one.attach()
    broker.configure(idle_timeout=99, default_memory=100 * MiB, attach="manual")
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: broker.status()["settings"]["idle_timeout"] == 99, "the new setting")
    assert broker.status()["settings"]["attach"] == "manual"
    assert one.state() == "active"
    two = kernel("two")
    assert broker.session(two.session)["request"]["memory"] == 100 * MiB
    assert broker.session(two.session)["attach"] == "manual"


@pytest.mark.parametrize("bad", [{"idle_timeot": 1}, {"default_memory": "12 parsecs"}], ids=str)
def test_a_bad_configuration_changes_nothing(broker, kernel, bad):
    one = kernel("one")
    one.attach()
    before = broker.status()["settings"]
    broker.configure(**bad)
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "was not read again" in broker.tail(), "the complaint")
    assert broker.status()["settings"] == before
    assert one.state() == "active"


def test_option_that_needs_a_restart_is_logged_at_sighup(broker):
    broker.configure(emulate="1x1GiB")
    broker.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "at the next start" in broker.tail(), "the notice")
    assert len(broker.status()["devices"]) == 2


@pytest.fixture
def small_disk(folder):
    """Mount a file system of 1 MiB as the state folder; yield an open file there, to fill it."""
    state = folder / "state"
    state.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(state)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    yield (state / "filler").open("wb", buffering=0)
    subprocess.run(["umount", "-l", str(state)], check=True)


def test_a_full_disk_does_not_stop_the_pool(small_disk, make_broker):
    broker = make_broker().started
    with small_disk, kernel_on(broker) as one:
        with pytest.raises(OSError, match="No space"):
            fill(small_disk)
        one.attach()
        one.do("drop", hold="cell")
        wait_until(lambda: broker.status()["broker"]["journal_problem"], "the complaint")
        assert "cannot be written" in broker.tail()
        assert one.attach("again")
        small_disk.truncate(0)
        one.do("drop", hold="again")
        wait_until(lambda: not broker.status()["broker"]["journal_problem"], "its recovery")
        assert [r["kind"] for r in broker.rows("open", "attach")] == ["open", "attach"]


def test_start_on_a_full_disk_is_refused_with_the_reason(small_disk, make_broker, caplog):
    broker = make_broker().started
    broker.kill()
    with small_disk:
        with pytest.raises(OSError, match="No space"):
            fill(small_disk)
        answer = broker.start()
        assert (answer["ok"], answer["code"]) == (False, "no-space")
        state = broker.folder / "state"
        assert answer["next_step"].startswith(f"Make room on the disk of {state}, or set c.GPUPool")
        # A killed broker may be restarted only with its own configuration. So the launcher does not
        # use the other configuration, although it has another state folder.
        other = {"GPUPool": {"emulate": "1x1GiB", "state_dir": str(broker.folder / "other")}}
        with pytest.raises(BrokerUnavailable, match="cannot be started again") as caught:
            ensure_broker(other, str(broker.socket))
        assert f"Make room on the disk of {state}" in caught.value.next_step
        assert not (broker.folder / "other").exists()
        small_disk.truncate(0)
        assert broker.start()["ok"]


def fill(file):
    while True:
        file.write(b"x" * 4096)


def test_broker_names_state_dir_if_it_cannot_make_its_journal(make_broker, folder):
    (folder / "file").write_text("")
    answer = make_broker(state_dir=str(folder / "file" / "state")).start()
    assert answer["ok"] is False
    assert answer["code"] == "journal"
    assert "state_dir" in answer["next_step"]


def test_sessions_start_on_a_broker_with_chosen_devices(make_broker):
    broker = make_broker(devices=[1]).started
    assert [d["index"] for d in broker.status()["devices"]] == [1]
    with kernel_on(broker) as one:
        one.attach()
        with pytest.raises(RefusedError):
            Kernel(broker, "two", devices=2, launch=False)
