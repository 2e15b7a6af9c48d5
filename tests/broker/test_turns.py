# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Compute shares on one device; the tests act as the guard, call by call."""

from __future__ import annotations

import threading
import time

import pytest

from .guardkit import PAUSED, WAITING, Guarded, GuardedBroker
from .kit import MiB, wait_until

TURN = 0.05


@pytest.fixture
def broker(folder):
    broker = GuardedBroker(
        folder, emulate="1x512MiB,context=32MiB", turn=TURN, quiet_after=0.5
    ).started
    yield broker
    broker.close()
    print(broker.tail())


class Worker(threading.Thread):
    """A program that calls CUDA in a loop; ``calls`` counts the calls that passed the gate."""

    def __init__(self, kernel):
        super().__init__(daemon=True)
        self.kernel = kernel
        self.calls = 0
        self.paused = 0
        self.over = threading.Event()

    def run(self):
        while not self.over.is_set():
            if self.held():
                self.paused += 1
                self.kernel.set(WAITING, 1)
                while self.held():
                    time.sleep(0.001)
                self.kernel.set(WAITING, 0)
            self.kernel.touch()
            self.calls += 1
            time.sleep(0.002)

    def held(self):
        """Return whether the page has a pause for this kernel that has not expired."""
        paused = self.kernel.gate() == PAUSED
        return paused and time.monotonic_ns() < self.kernel.pause_until()

    def stop(self):
        self.over.set()
        self.join()


@pytest.fixture
def worker(broker):
    made = []

    def make(compute):
        kernel = Guarded(broker, memory=100 * MiB, compute=compute)
        kernel.lease()
        made.append(Worker(kernel))
        made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()
        one.kernel.close()


def test_two_contending_kernels_get_their_shares(worker):
    large, small = worker(75), worker(25)
    wait_until(lambda: large.paused and small.paused, "turns are kept")
    before = large.calls, small.calls
    wait_until(lambda: small.calls - before[1] > 300, "for a while", seconds=60)
    ratio = (large.calls - before[0]) / (small.calls - before[1])
    print(f"ratio {ratio:.2f} for 75:25")
    # pool/test_timeslice tests exact shares. This test counts calls. A call takes 2 ms, or more on
    # a busy machine. A turn has 12 to 37 calls, and it ends in the middle of a call. So the ratio
    # is not exact.
    assert 2 < ratio < 4.5


def test_sole_kernel_does_not_wait(worker):
    one, other = worker(10), worker(10)
    wait_until(lambda: one.paused and other.paused, "turns are kept")
    other.stop()
    # The last turn of ``other`` may still run. After this turn, the broker does not pause ``one``.
    before = one.calls
    wait_until(lambda: one.calls > before + 50, "it goes on")
    wait_until(lambda: one.kernel.gate() != PAUSED, "open")
    paused, before = one.paused, one.calls
    wait_until(lambda: one.calls > before + 300, "it goes on")
    assert one.paused <= paused + 2


def test_kernel_with_a_full_share_is_not_paused(worker):
    one, other = worker(100), worker(100)
    before = one.calls, other.calls
    wait_until(lambda: min(one.calls - before[0], other.calls - before[1]) > 500, "they go on")
    assert one.paused == other.paused == 0


def test_busy_time_is_in_the_status(worker):
    one = worker(100)
    wait_until(lambda: one.kernel.status()["busy_seconds"] > 0.7, "it is counted")


def test_kernels_are_not_paused_after_a_brokers_death(broker, worker):
    one, other = worker(50), worker(50)
    wait_until(lambda: one.paused and other.paused, "turns are kept")
    broker.kill()
    before = one.calls, other.calls
    wait_until(lambda: min(one.calls - before[0], other.calls - before[1]) > 100, "both go on")
    assert one.kernel.pause_until() < time.monotonic_ns() + 2 * TURN * 1e9


def test_paused_and_idle_session_can_be_suspended(broker, worker):
    one, other = worker(50), worker(50)
    wait_until(lambda: one.paused and other.paused, "turns are kept")
    one.stop()
    one.kernel.wait_state("idle")
    one.kernel.server.call("release", session=one.kernel.session)
    one.kernel.wait_state("detached")
    assert other.kernel.state() == "active"
