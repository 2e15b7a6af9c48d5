# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Threads between the gate and the driver, as /proc shows them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from jupyter_gpupool import procfs
from jupyter_gpupool.broker.pages import quiesce

from .kit import wait_until

SLEEPS = "import sys, time; print('.', flush=True); time.sleep(600)"
SPINS = "print('.', flush=True)\nwhile True: pass"


@pytest.fixture
def process():
    started: list[subprocess.Popen[str]] = []

    def start(code: str) -> int:
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child.pid

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdout.close()


def test_sleeping_process_is_quiet_at_once(process):
    pid = process(SLEEPS)
    wait_until(lambda: not quiesce.on_the_way([pid]), "the process sleeps")
    assert asyncio.run(quiesce.quiesce([pid]))


def test_thread_counts_as_past_the_gate_after_some_cpu_time(process):
    pid = process(SPINS)
    assert (pid, pid) in quiesce.on_the_way([pid])
    assert asyncio.run(quiesce.quiesce([pid]))
    _, ran = procfs.thread_time(pid, pid)
    assert ran >= quiesce.PASSED


def test_thread_without_processor_time_does_not_count_as_quiet(process, monkeypatch):
    pid = process(SPINS)
    monkeypatch.setattr(quiesce, "LONGEST", 0.05)
    monkeypatch.setattr(procfs, "thread_time", lambda *_: ("R", 5))
    assert not asyncio.run(quiesce.quiesce([pid]))


def test_ended_process_is_quiet_at_once(process):
    pid = process(SPINS)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert quiesce.on_the_way([pid]) == {}
    assert asyncio.run(quiesce.quiesce([pid]))


def test_cpu_ticks_are_read_if_schedstat_is_missing(process, monkeypatch):
    """If schedstat was missing, the broker once took every thread for a thread that had ended."""
    real = procfs._read

    def without(pid, name):
        if name.endswith("schedstat"):
            raise FileNotFoundError(name)
        return real(pid, name)

    pid = process(SPINS)
    monkeypatch.setattr(procfs, "_read", without)
    assert (pid, pid) in quiesce.on_the_way([pid])
    before = procfs.thread_time(pid, pid)[1]
    assert asyncio.run(quiesce.quiesce([pid]))
    assert procfs.thread_time(pid, pid)[1] - before >= quiesce.PASSED


def test_repeated_pid_is_checked_once(process, monkeypatch):
    pid, looked = process(SLEEPS), []
    monkeypatch.setattr(procfs, "thread_time", lambda *of: (looked.append(of), ("S", 0))[1])
    assert asyncio.run(quiesce.quiesce([pid] * 256))
    assert len(looked) == 1
