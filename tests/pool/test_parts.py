# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The parts of the pool against slow but obvious versions of themselves."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.pool.inventory import DeviceLedger
from jupyter_gpupool.pool.lease import InvalidTransition, Session
from jupyter_gpupool.pool.model import Owner, Request
from jupyter_gpupool.pool.placement import spare
from jupyter_gpupool.pool.queue import WaitQueue, rank
from jupyter_gpupool.pool.timers import Timers

from .builders import device


def session(name: str = "s") -> Session:
    return Session(id=name, owner=Owner("ann"), request=Request(4, 4), attach="cell")


@given(
    leases=st.lists(st.integers(1, 9), max_size=6),
    free=st.integers(0, 12),
    wanted=st.integers(1, 24),
)
def test_spare_bytes_never_delay_the_claimant(leases, free, wanted):
    """In whatever order the present leases end, it starts as early as without the gift."""
    ledger = DeviceLedger(device(0))
    ledger.leases = {str(i): size for i, size in enumerate(leases)}
    ledger.granted = sum(leases)
    ledger.capacity = ledger.granted + free
    given_away = spare(ledger, wanted)
    assert given_away >= 0
    given_away = min(given_away, free)
    for count in range(len(leases) + 1):
        for ended in itertools.combinations(leases, count):
            if free + sum(ended) >= wanted:
                assert free - given_away + sum(ended) >= wanted


def test_the_queue_is_a_sorted_list():
    rng = random.Random(0)
    queue, plain = WaitQueue(), []
    for number in range(400):
        entry = (rng.random(), rng.random(), number, rng.randint(1, 50), f"s{number}")
        queue.add(entry)
        plain.append(entry)
        if rng.random() < 0.3:
            gone = plain.pop(rng.randrange(len(plain)))
            queue.remove(gone)
    plain.sort()
    assert list(queue) == plain
    assert len(queue) == len(plain)
    assert queue.first() == plain[0]
    assert [queue.position(e) for e in plain] == list(range(1, len(plain) + 1))
    for entry in plain:
        queue.remove(entry)
    assert queue.first() is None
    with pytest.raises(KeyError):
        queue.remove(plain[0])


@given(
    a=st.tuples(st.floats(0, 1e9), st.integers(-500, 500)),
    b=st.tuples(st.floats(0, 1e9), st.integers(-500, 500)),
    later=st.floats(0, 1e6),
)
def test_who_goes_first_never_changes_while_both_wait(a, b, later):
    """The rank orders as points + waited / ageing does, at any time."""
    classes = {"a": a[1], "b": b[1]}
    now = max(a[0], b[0]) + later
    points = [points + (now - since) / 60.0 for since, points in (a, b)]
    ranks = [rank(a[0], "a", classes, 60.0), rank(b[0], "b", classes, 60.0)]
    if abs(points[0] - points[1]) > 1e-3:
        assert (points[0] > points[1]) == (ranks[0] < ranks[1])


def test_without_ageing_only_the_class_counts():
    classes = {"high": 1, "low": 0}
    assert rank(1e9, "high", classes, 0.0) < rank(0.0, "low", classes, 0.0)


def test_timers_ring_once_each_and_not_before_their_time():
    rng = random.Random(1)
    timers, sessions = Timers(), [session(str(i)) for i in range(50)]
    due: dict[str, float] = {}
    now = 0.0
    for _ in range(3000):
        s = rng.choice(sessions)
        at = now + rng.choice([0.5, 1.0, 5.0, 100.0])
        timers.set(s, at)
        due[s.id] = at
        if rng.random() < 0.3:
            now += rng.random()
            rung = {x.id for x in timers.due(now)}
            assert rung == {name for name, t in due.items() if t <= now}
            for name in rung:
                del due[name]
        assert timers.next() == min(due.values(), default=None)
        timers.trim(len(sessions))
    assert len(timers) <= 4 * len(sessions) + 65


def test_a_step_that_the_table_does_not_have_is_an_error_with_a_story():
    s = session()
    s.move("queued", 1.0, "test")
    with pytest.raises(InvalidTransition) as caught:
        s.move("idle", 2.0, "nonsense")
    assert caught.value.code == "invalid-transition"
    assert "detached -> queued" in str(caught.value)
    assert "please report" in str(caught.value)
