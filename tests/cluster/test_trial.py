# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""``make cluster`` with a stand-in for its processes, and with its real processes."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys

import pytest

from jupyter_gpupool.cluster import node, trial
from tests.broker.kit import ROOT, environment, remove, short_folder, wait_until

from .kit import family, is_alive

#: A stand-in for ``jupyter gpupool``. The broker or node that the test names ends at once. All
#: other brokers and nodes run until SIGTERM. ``cluster status`` reports that the ledger serves once
#: all nodes have started.
PROGRAM = """
import pathlib, signal, sys
folder, ends, words = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
if words[0] == "cluster":
    print('{"serving": %s}' % str(len([*folder.glob("*.node")]) == 3).lower())
    raise SystemExit(not (folder / "gpu1.node").exists())
name = pathlib.Path(words[words.index("--socket") + 1]).stem
if name + "-" + words[0] == ends:
    raise SystemExit("no room for " + name)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
mark = folder / f"{name}.{words[0]}"
mark.touch()
signal.sigwait({signal.SIGTERM})
mark.unlink()
"""

RUN = """
import pathlib, sys
from jupyter_gpupool.cluster import trial
trial.LOOK = 0.02
folder = pathlib.Path(sys.argv[1])
sys.exit(trial.run(folder, "10.0.0.1:6379", [sys.executable, folder / "program.py", *sys.argv[1:]]))
"""


@pytest.fixture
def start(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    started = []

    def start(ends=""):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", RUN, str(tmp_path), ends],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            )
        )  # fmt: skip
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_help(process):
    text = ""
    while "Ctrl-C ends the cluster" not in text:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        text += line
    return text


def marks(folder):
    return {*folder.glob("*.node"), *folder.glob("*.broker")}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_all_machines(start, tmp_path, number):
    process = start()
    text = read_help(process)
    assert f"cluster status --address 10.0.0.1:6379 --token {tmp_path / 'token'}" in text
    wait_until(lambda: len(marks(tmp_path)) == 6, "all machines to run")
    process.send_signal(number)
    assert process.wait(60) == 0
    assert marks(tmp_path) == set()


def test_all_machines_end_if_one_machine_does_not_start(start, tmp_path):
    process = start("gpu2-node")
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "gpu2-node has ended with exit code 1:\n  no room for gpu2" in error
    assert marks(tmp_path) == set()


@pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the environment of make test-cluster"
)
def test_real_machines_start_and_leave_no_process():
    folder = short_folder()
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_gpupool.cluster.trial", str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env=environment(folder),
    )  # fmt: skip
    try:
        text = read_help(process)
        status = next(line for line in text.splitlines() if " cluster status " in line)
        words = status.partition(" gpupool ")[2].split()
        found = subprocess.run(
            [sys.executable, "-m", "jupyter_gpupool.cli", *words, "--json"],
            capture_output=True, text=True, cwd=ROOT, env=environment(folder), check=True,
        )  # fmt: skip
        nodes = json.loads(found.stdout)["nodes"]
        assert [node["name"] for node in nodes] == ["gpu1", "gpu2", "gpu3"]
        assert {node["state"] for node in nodes} == {"present"}
        started = family(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 0
        wait_until(lambda: not any(map(is_alive, started)), "all processes to end")
    finally:
        process.terminate()
        process.communicate()
        remove(folder)


def test_the_trial_needs_ray(monkeypatch, capsys):
    monkeypatch.setattr(node.importlib.util, "find_spec", lambda name: None)
    assert trial.main([]) == 1
    assert "This environment has no Ray" in capsys.readouterr().err
