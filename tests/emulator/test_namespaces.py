# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Processes in several PID namespaces, as in containers, on one machine."""

import os
import select

import pytest
from test_suspend_calls import WORKER

from tests import namespaces

pytestmark = pytest.mark.skipif(bool(namespaces.refusal()), reason=namespaces.refusal())

FILL = """
context(0)
data = bytes_of(200 << 20, %d)
at = ok(D.cuMemAlloc(data.nbytes)); put(at, data)
want = hashlib.sha256(data).hexdigest()
_ = os.getpid()
"""

RIGHT = "_ = get(at, data.nbytes) == want"


def test_processes_are_suspended_and_moved_from_outside(emulated):
    machine = emulated()
    boxes = [machine.target(within=namespaces.OWN_NUMBERS) for _ in range(2)]
    assert [box.do(FILL % seed) for seed, box in enumerate(boxes)] == [1, 1]
    first, second = (namespaces.child(box.pid) for box in boxes)
    worker = machine.target()
    assert worker.do(WORKER + "_ = sorted(pids())") == sorted((first, second))
    worker.do(f"suspend({first})")
    assert worker.do("_ = pids()") == [second]
    worker.do(f"resume({first}, shift(1))")
    assert worker.do("_ = pids(0), pids(1)") == ([second], [first])
    assert all(box.do(RIGHT) for box in boxes)


def test_a_process_lists_and_frees_only_its_own_namespace(emulated):
    machine = emulated()
    box, other = (machine.target(within=namespaces.OWN_NUMBERS) for _ in range(2))
    box.do(FILL % 1)
    assert other.do(WORKER + "_ = pids(), used() >> 20") == ([], 232)
    other.do(FILL % 2)  # both processes have pid 1, each in its own namespace
    assert other.do("_ = pids(), used() >> 20") == ([1], 464)
    assert box.do(RIGHT)
    assert other.do(RIGHT)


def test_killed_process_in_a_namespace_frees_its_memory(emulated):
    machine = emulated()
    box, worker = machine.target(within=namespaces.OWN_NUMBERS), machine.target()
    box.do(FILL % 1)
    assert worker.do(WORKER + "_ = used() >> 20") == 232
    pid = namespaces.child(box.pid)
    ended = os.pidfd_open(pid)
    box.kill()
    assert select.select([ended], [], [], 60)[0]
    os.close(ended)
    assert worker.do("_ = used()") == 0
