# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The broker's event loop asks Linux for the shortest time slice; its child processes do not."""

from __future__ import annotations

import os

import psutil

from jupyter_gpupool.broker.wakeups import SLICE, time_slice, wake_soon

from .kit import Broker


def in_a_child(work):
    """Call ``work`` in a forked child process; return its result as a number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, str(int(work())).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as result:
        found = int(result.read())
    os.waitpid(pid, 0)
    return found


def test_only_the_event_loop_has_a_short_time_slice(tmp_path):
    usual = time_slice(0)  # 0 before Linux 6.12: older kernels report and change no time slice
    short = SLICE if usual else 0
    broker = Broker(tmp_path)
    try:
        broker.start()
        assert time_slice(broker.process.pid) == short
        children = psutil.Process(broker.process.pid).children()
        assert children
        assert {time_slice(child.pid) for child in children} == {usual}
        threads = {t.id for t in psutil.Process(broker.process.pid).threads()}
        # The time slice of a thread that has ended is 0.
        assert {time_slice(t) for t in threads - {broker.process.pid}} <= {usual, 0}
    finally:
        broker.close()


def test_other_policy_and_niceness_remain_unchanged():
    def batch():
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return wake_soon() or os.sched_getscheduler(0) != os.SCHED_BATCH

    def nice():
        before = os.nice(3)
        wake_soon()
        return os.nice(0) == before

    assert not in_a_child(batch)
    assert in_a_child(nice)
