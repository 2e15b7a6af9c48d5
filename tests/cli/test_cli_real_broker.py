# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The command line against a real broker on two emulated GPUs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jupyter_gpupool.cli import main
from jupyter_gpupool.client import Client

ROOT = Path(__file__).parents[2]
MiB = 1 << 20


@pytest.fixture(scope="module")
def real_broker():
    """Start ``jupyter gpupool broker``, wait until it is ready, and yield its socket."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-"))
    reading, writing = os.pipe()
    environment = {**os.environ, "JUPYTER_CONFIG_DIR": str(folder), "JUPYTER_CONFIG_PATH": ""}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "jupyter_gpupool.cli", "broker",
            "--socket", str(folder / "b.sock"), "--ready-fd", str(writing),
            "--GPUPool.emulate=2x512MiB,context=16MiB", f"--GPUPool.state_dir={folder}/state",
            "--GPUPool.default_memory=128MiB", "--GPUPool.linger=3600",
        ],
        cwd=ROOT, env=environment, pass_fds=(writing,), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as ready:
        assert json.loads(ready.readline())["ok"]
    yield folder / "b.sock"
    process.terminate()
    _, log = process.communicate(timeout=60)
    assert process.returncode == 0, log
    shutil.rmtree(folder)


@pytest.fixture
def opened(real_broker, monkeypatch):
    """Open a session for a process that does nothing; return the session's id."""
    monkeypatch.setenv("GPUPOOL_SOCKET", str(real_broker))
    process = subprocess.Popen(["sleep", "1000"])
    with Client(real_broker) as client:
        session = client.call("open", kernel_id="abcdef01-2345", label="train.ipynb")["session"]
        client.call("launched", session=session, pid=process.pid)
        yield session
        client.call("close", session=session)
    process.kill()
    process.wait()


def test_why_explains_a_session_and_refuses_an_unknown_one(opened, capsys):
    assert main(["why", opened[:10]]) == 0
    first, _, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Session {opened} (")
    assert second == "It has no slice and waits for none."
    assert main(["why", "abcdef", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lines"] == [second]
    assert main(["why", "zzz"]) == 1
    assert "No session has the name 'zzz'" in capsys.readouterr().err


def test_status_shows_the_gpus_and_the_session(opened, capsys):
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("GPU pool  EMULATED")
    assert out.count("EMULATED NVIDIA GPU") == 2
    assert re.search(rf"^ +{opened[:12]} +\S+ +no GPU +- +train\.ipynb$", out, re.MULTILINE)


def test_check_config_lists_differences_from_the_broker(opened, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_NO_CONFIG", "1")
    new = tmp_path / "new.py"
    new.write_text("c.GPUPool.groups = {'a': {'users': '*', 'guarantee': '512MiB'}}")
    assert main(["check-config", str(new), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["count"] == 2
    assert found["devices"]["source"] == "in the running broker"
    changed = {one["option"]: (one["there"], one["here"]) for one in found["differences"]}
    assert changed["default_memory"] == (128 * MiB, 4 << 30)
    assert changed["emulate"] == ("2x512MiB,context=16MiB", "")
    assert {one["option"] for one in found["differences"] if one["restart"]} == {
        "emulate", "state_dir",
    }  # fmt: skip
    assert [one["keys"] for one in found["differences"] if one["option"] == "groups"] == [
        ["a", "guarantee"], ["a", "users"],
    ]  # fmt: skip
    new.write_text("c.GPUPool.groups = {'a': {'users': '*', 'guarantee': '2GiB'}}")
    assert main(["check-config", str(new)]) == 1
    assert "'a' is guaranteed 2 GiB, but the GPUs of this machine have" in capsys.readouterr().out


def documented(kind: str) -> set[str]:
    """Return the fields that the table in docs/admins.md lists for ``kind``."""
    text = (ROOT / "docs/admins.md").read_text()
    row = re.search(rf"^\| `{kind}` \| (.*) \|$", text, re.MULTILINE)[1]
    return set(re.findall(r"`([a-z_]+)`", row))


def test_status_json_has_every_documented_field(opened, capsys):
    assert main(["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["emulated"] is True
    assert documented(r"devices\[\]") <= set(found["devices"][0])
    assert documented(r"sessions\[\]") <= set(found["sessions"][0])
    assert documented("host") <= set(found["host"])
    assert documented("settings") <= set(found["settings"])
    assert documented("limits") == set(found["limits"])
    assert found["problem"] == ""
    assert {"version", "socket", "pid", "now", "machine", "queue_length"} <= set(found)
    assert found["devices"][0]["memory_total"] == 512 * MiB


@pytest.mark.parametrize("name", ["the session", "the kernel"])
def test_release_accepts_the_first_letters_of_an_id(opened, capsys, name):
    beginning = opened[:6] if name == "the session" else "abcdef"
    assert main(["release", beginning]) == 0
    assert capsys.readouterr().out.strip()


def test_release_of_an_unknown_session_is_refused(opened, capsys):
    assert main(["release", "nope"]) == 1
    assert capsys.readouterr().err == (
        "jupyter gpupool: No session has the name 'nope', and no session or kernel id "
        "begins with it. "
        "`jupyter gpupool status` lists them.\n"
    )


def test_pause_is_shown_until_resume(opened, capsys):
    assert main(["pause", "--reason", "new driver"]) == 0
    out = capsys.readouterr().out
    assert "new driver; no process of the pool has a device file open.\n" in out
    # A repeated pause prints one line. Doctor shows a paused GPU as a warning, not as a failure.
    assert main(["pause", "--reason", "new driver"]) == 0
    assert capsys.readouterr().out.count("paused by the administrator") == 1
    main(["doctor", "--json"])
    found = [f for f in json.loads(capsys.readouterr().out) if f["name"].startswith("GPU ")]
    assert [f["verdict"] for f in found] == ["warn", "warn"]
    assert all(f["todo"].endswith("jupyter gpupool resume") for f in found)
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].startswith("The pool is paused by the administrator: new driver;")
    assert out.count("Not used: paused by the administrator: new driver") == 2
    assert main(["resume"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "The GPUs are in service again."
    assert main(["resume"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "", "no test ran"
    assert captured.err == "jupyter gpupool: Nothing is paused or drained.\n"


def test_resume_of_an_unknown_gpu_is_refused_and_tests_no_gpu(opened, capsys):
    assert main(["resume", "--device", "7"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "'7' is no GPU of this pool" in captured.err


def test_drain_needs_a_gpu(opened, capsys):
    assert main(["drain"]) == 2
    assert "--device" in capsys.readouterr().err
    assert main(["drain", "--device", "1"]) == 0
    assert "no kernel has a slice there." in capsys.readouterr().out
    assert main(["resume", "--device", "1"]) == 0


def test_doctor_checks_socket_devices_and_journal(opened, real_broker, capsys):
    main(["doctor", "--json"])
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)}
    assert found["socket"] == {
        "verdict": "ok",
        "name": "socket",
        "message": f"a broker answers at {real_broker}",
        "todo": "",
    }
    assert found["GPU 1"]["verdict"] == "ok"
    assert found["journal"]["verdict"] == "ok"


def test_a_second_broker_on_the_socket_is_refused(real_broker):
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.cli", "broker", "--socket", str(real_broker)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("jupyter gpupool broker: ")
    assert "already listens" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--GPUPool.idle_timout=3", "Did you mean 'idle_timeout'?"),
        ("--GPUPool.emulate=2x", "is not a size of device memory"),
        ("--GPUPool.devices=7", "names '7', but the GPUs of this machine are: "),
        ("--GPUPool.attach=lasy", "Allowed: 'lazy', 'cell' or 'manual'."),
    ],
)
def test_broker_with_a_wrong_option_does_not_start(tmp_path, option, message):
    arguments = ["--GPUPool.emulate=1x64MiB,context=16MiB", f"--GPUPool.state_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_gpupool.cli", "broker",
         "--socket", str(tmp_path / "s"), *arguments, option],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s").exists()
