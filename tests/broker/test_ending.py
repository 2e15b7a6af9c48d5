# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""SIGTERM and SIGINT end a broker within five seconds at any point."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from . import kit
from .kit import LATE, wait_until

#: A broker ends within this many seconds, or it logs that it ended by force.
WITHIN = 5.0


@pytest.fixture
def parts():
    return kit.Broker, kit.Kernel, {"emulate": kit.ONE}


def children(broker):
    """Return the command lines of all descendants of the broker."""
    with suppress(psutil.Error):
        found = psutil.Process(broker.process.pid).children(recursive=True)
        return [" ".join(child.cmdline()) for child in found]
    return []


def runs(broker, module):
    return any(f"devices.nvidia.child_programs {module}" in line for line in children(broker))


def journal_there(broker):
    return any((broker.folder / "state").glob("journal*.sqlite"))


#: Moments in a broker's start, in order. Each function returns True if the broker is that far.
POINTS = {
    "at once": lambda _: True,
    "lock taken": lambda broker: Path(f"{broker.socket}.lock").exists(),
    "journal made": journal_there,
    "devices listed": lambda broker: runs(broker, "monitor"),
    "self-test begun": lambda broker: runs(broker, "selftest"),
    "self-test suspends": lambda broker: runs(broker, "worker"),
    "socket made": lambda broker: broker.socket.exists(),
    "record written": lambda broker: Path(f"{broker.socket}.start.json").exists(),
}


def ends(broker, number=signal.SIGTERM, within=WITHIN):
    """Send a signal. The broker must end in time, without force, and remove its socket."""
    found = []
    with suppress(psutil.Error):
        found = psutil.Process(broker.process.pid).children(recursive=True)
    broker.process.send_signal(number)
    broker.process.wait(within + LATE)
    broker.process = None
    assert "ended by force" not in broker.tail()
    assert not broker.socket.exists()
    wait_until(lambda: not any(p.is_running() for p in found), "the end of its children", 60)


#: The tests send SIGTERM at each point. SIGINT has the same handler, so they send it at only two
#: points: before the broker sets the handler, and after that.
CASES = [
    *((point, signal.SIGTERM) for point in POINTS),
    ("at once", signal.SIGINT),
    ("record written", signal.SIGINT),
]


@pytest.mark.parametrize(("point", "number"), CASES)
def test_broker_ends_at_a_signal_during_its_start(make_broker, point, number):
    broker = make_broker()
    broker.start(wait=False)
    wait_until(lambda: POINTS[point](broker) or broker.process.poll() is not None, point, 60)
    ends(broker, number)
    assert "Traceback" not in broker.tail() or point == "at once"
    # Another broker can start.
    if number == signal.SIGTERM and point in ("self-test begun", "record written"):
        broker.started.stop()


@pytest.mark.long
def test_broker_ends_at_a_signal_at_any_time_of_its_start(make_broker):
    for step in range(60):
        broker = make_broker()
        broker.start(wait=False)
        time.sleep(step * 0.025)
        ends(broker, signal.SIGTERM if step % 2 else signal.SIGINT)


def test_signal_is_not_lost_while_a_sample_is_requested(make_broker):
    """The monitor once ignored its cancellation if the awaited event came at the same moment."""
    broker = make_broker(sample_interval=0.05).started
    kernels = [kit.Kernel(broker, str(n), memory=64 * kit.MiB) for n in range(2)]
    try:
        for n in range(20):
            kernels[n % 2].attach(f"c{n}")
            kernels[n % 2].do("drop", hold=f"c{n}")
        kernels[0].do("ask", hold="last")
        ends(broker)
    finally:
        for one in kernels:
            one.close()


def test_broker_with_a_blocked_event_loop_ends_in_time(make_broker):
    """A file system call blocks the event loop, so a thread of the broker must force the end."""
    broker = make_broker().started
    # Stop the broker's children, so that they answer no request of the broker.
    stopped = psutil.Process(broker.process.pid).children(recursive=True)
    for child in stopped:
        child.suspend()
    try:
        broker.process.terminate()
        broker.process.wait(WITHIN + LATE)
        broker.process = None
    finally:
        for child in stopped:
            with suppress(psutil.Error):
                child.resume()
    broker.started.stop()


def test_second_signal_ends_the_broker_at_once(make_broker):
    broker = make_broker().started
    kernel = kit.Kernel(broker, "one", memory=64 * kit.MiB)
    try:
        kernel.attach("c")
        kernel.do("drop", hold="c")
        broker.process.terminate()
        with suppress(ProcessLookupError):
            os.kill(broker.process.pid, signal.SIGTERM)
        assert broker.process.wait(WITHIN + LATE) in (0, 1)
        broker.process = None
    finally:
        kernel.close()
