# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""If the driver can suspend a process after cuInit alone, a pause suspends such kernels."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from jupyter_gpupool.cli.maintenance import progress
from jupyter_gpupool.guard import page as layout
from jupyter_gpupool.guard.install import without_guard

from . import kit
from .kit import MiB, children, environment, wait_until
from .test_guarded import BIG, CONTEXT, Program
from .test_maintenance import INITIALISED, WHY, closed, maintain, order, with_device_files

PATIENCE = 60


@pytest.fixture
def parts():
    return kit.Broker, Program, {"attach": "lazy", "quiet_after": 0.3}


@pytest.fixture
def driver(broker):
    """The broker, on a driver that can suspend processes after cuInit alone."""
    broker.disturbed = True
    return broker


def test_pause_suspends_a_kernel_that_only_called_cuinit(driver, kernel):
    k = kernel(memory=BIG)
    seen = k.do("ask")
    assert with_device_files(driver, k.process.pid)
    maintain(driver, "pause")
    closed(driver)
    assert not with_device_files(driver, k.process.pid)
    assert k.mark() == layout.LANDING_ASIDE
    assert [row["kind"] for row in driver.rows("restart-notice")] == []
    assert k.do("ask") == seen, "it is answered without the driver"
    # Calls that need the driver wait, and show the reason.
    k.tell("context")
    wait_until(lambda: k.state() == "queued", "it waits", PATIENCE)
    assert driver.session(k.session)["wait_reason"] == WHY
    maintain(driver, "resume")
    assert k.answer(PATIENCE) is None
    assert k.mark() == layout.LANDING_NONE
    assert k.do("alloc", bytes=32 * MiB, byte=3) is None
    assert k.do("check") == 32 * MiB
    assert k.status()["used_bytes"] == 32 * MiB + CONTEXT


def test_resume_restores_the_kernel_before_its_next_call(driver, kernel):
    k = kernel(memory=BIG)
    seen = k.do("ask")
    maintain(driver, "pause")
    closed(driver)
    maintain(driver, "resume")
    assert k.mark() == layout.LANDING_NONE
    assert with_device_files(driver, k.process.pid)
    assert k.do("ask") == seen
    assert k.do("look") == {"fork": 3, "cuMemGetInfo_v2": 201}
    assert k.status()["attached_seconds_total"] == 0
    assert k.do("context") is None


def test_next_broker_restores_what_a_pause_suspended(driver, kernel):
    one, two = kernel(memory=BIG), kernel(memory=BIG)
    seen = [k.do("ask") for k in (one, two)]
    maintain(driver, "pause")
    closed(driver)
    driver.kill()
    assert driver.started
    assert order(driver)["closed"]
    for k in (one, two):
        assert not with_device_files(driver, k.process.pid)
        assert k.mark() == layout.LANDING_ASIDE
    assert one.do("ask") == seen[0]
    maintain(driver, "resume")
    assert two.do("ask") == seen[1]
    for k in (one, two):
        k.begin(16 * MiB, byte=2)
        assert k.do("check") == 16 * MiB


def test_incomplete_pause_survives_a_killed_broker(driver, kernel):
    k = kernel(memory=BIG)
    seen = k.do("ask")
    with_files = kernel(memory=BIG, launch=False)
    env = {**environment(driver.folder), **without_guard({**os.environ, **with_files.env})}
    with subprocess.Popen(
        [sys.executable, "-c", INITIALISED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        with_files.server.call("launched", session=with_files.session, pid=process.pid)
        maintain(driver, "pause")
        wait_until(lambda: k.mark() == layout.LANDING_ASIDE, "it is suspended", PATIENCE)
        wait_until(lambda: not with_device_files(driver, k.process.pid), "its files", PATIENCE)
        driver.kill()
        assert driver.started
        files = wait_until(lambda: order(driver)["files"], "who has device files open", PATIENCE)
        assert [f["pid"] for f in files] == [process.pid]
        assert not with_device_files(driver, k.process.pid)
        process.stdin.close()
    closed(driver)
    assert k.do("ask") == seen
    maintain(driver, "resume")
    k.begin(16 * MiB, byte=2)
    assert k.do("check") == 16 * MiB


def test_kernel_that_asked_about_a_paused_gpu_moves_to_another(driver, kernel):
    k = kernel(memory=BIG)
    (seen,) = k.do("ask")
    maintain(driver, "pause", seen)
    closed(driver, seen)
    assert not with_device_files(driver, k.process.pid)
    k.begin(16 * MiB, byte=2)
    (place,) = k.status()["devices"]
    assert place != seen
    assert k.do("check") == 16 * MiB
    assert k.mark() == layout.LANDING_NONE
    assert k.status()["used_bytes"] == 16 * MiB + CONTEXT
    maintain(driver, "resume")


def test_kernel_that_ends_while_suspended_leaves_no_session(driver, kernel):
    k = kernel(memory=BIG)
    k.do("ask")
    maintain(driver, "pause")
    closed(driver)
    k.kill()
    wait_until(lambda: driver.status()["sessions"] == [], "its session to end", PATIENCE)
    maintain(driver, "resume")
    kernel(memory=BIG).begin(MiB)


def test_process_that_keeps_a_device_file_open_is_named(driver, kernel):
    """After a suspend, the broker still looks in /proc for processes with open device files."""
    k = kernel(memory=BIG)
    k.do("ask")
    path = driver.folder / "broker.sock.emulated" / "nvidiactl"
    k.do("open", path=str(path))
    maintain(driver, "pause")
    files = wait_until(lambda: order(driver)["files"], "who has device files open", PATIENCE)
    assert [f["pid"] for f in files] == [k.process.pid]
    assert progress(order(driver))[1].endswith("; restart that kernel")
    assert not order(driver)["closed"]
    maintain(driver, "resume")
    k.begin(MiB)


def test_pause_names_the_suspend_that_it_waits_for(driver, kernel):
    k = kernel(memory=BIG)
    (seen,) = k.do("ask")
    workers = [psutil.Process(pid) for pid in children(driver, "worker")]
    for worker in workers:
        worker.suspend()  # SIGSTOP: the worker cannot finish its driver call
    maintain(driver, "pause", seen)
    what = "the suspend of kernels that have only called cuInit"
    wait_until(lambda: what in order(driver, seen)["step"], "what it waits for", PATIENCE)
    assert progress(order(driver, seen)) == [f"Waiting for {what}."]
    for worker in workers:
        worker.resume()
    for _ in range(600):
        row = order(driver, seen)
        if row["closed"]:
            break
        assert row["waits"] or row["files"] or row["step"], "it never waits for nothing"
        time.sleep(0.1)
    assert row["closed"] or row["files"]
    assert row["closed"] or k.process.pid in [f["pid"] for f in row["files"]]
    maintain(driver, "resume")


def test_kernel_whose_state_is_lost_in_a_pause_ends(driver, kernel):
    """The driver suspends the child, refuses the kernel, and then loses the child's state."""
    k = kernel(memory=BIG)
    k.do("ask")
    k.do("sub", command={"do": "ask"})
    driver.faults.set("checkpoint-refused", pid=k.process.pid)
    driver.faults.set("restore-failed", count=1)
    maintain(driver, "pause")
    wait_until(lambda: driver.session(k.session) is None, "its session ends", PATIENCE)
    driver.faults.clear()
    maintain(driver, "resume")
    kernel(memory=BIG).begin(MiB)


def test_kernel_that_got_a_slice_during_its_suspend_runs_again(driver, kernel):
    """At first, the driver refuses to restore the kernel, but keeps its state."""
    k = kernel(memory=BIG)
    (seen,) = k.do("ask")
    driver.faults.set("restore-keeps-state")
    driver.faults.set("restore-failed", pid=k.process.pid)
    workers = [psutil.Process(pid) for pid in children(driver, "worker")]
    for worker in workers:
        worker.suspend()  # SIGSTOP: the worker cannot finish its driver call
    maintain(driver, "pause", seen)
    wait_until(lambda: k.mark() == layout.LANDING_ASIDE, "the suspend has begun", PATIENCE)
    k.tell("context")
    k.wait_state("active", seconds=PATIENCE)
    for worker in workers:
        worker.resume()
    (row,) = wait_until(lambda: driver.rows("kept"), "a try", PATIENCE)
    assert "is not back on its GPU yet" in row["reason"]
    assert k.mark() == layout.LANDING_ASIDE
    assert k.status()["state"] == "active"
    driver.faults.clear()
    wait_until(lambda: k.mark() != layout.LANDING_ASIDE, "it runs again", PATIENCE)
    maintain(driver, "resume", seen)
    assert k.answer(PATIENCE) is None
    assert k.do("alloc", bytes=16 * MiB, byte=2) is None
    assert k.do("check") == 16 * MiB


def test_pause_waits_for_a_kernel_the_driver_cannot_suspend(broker, kernel):
    broker.disturbed = True
    broker.faults.set("init-not-enough")
    k = kernel(memory=BIG)
    seen = k.do("ask")
    maintain(broker, "pause")
    files = wait_until(lambda: order(broker)["files"], "who has device files open", PATIENCE)
    assert [f["pid"] for f in files] == [k.process.pid]
    assert k.mark() == layout.LANDING_NONE
    assert k.do("ask") == seen
    maintain(broker, "resume")
    k.begin(MiB)
