# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Expected waits and their ranges, and the times when idle slices leave.

The pool computes expected waits only from past waits.
"""

from __future__ import annotations

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.estimate import Ahead
from jupyter_gpupool.pool.evidence import LEAST, MOST, Evidence, Figure

from .builders import Lab, device, got


def view(lab, name):
    return next(s for s in lab.pool.view(lab.now).sessions if s.record.id == name)


def turn(lab, one, other, seconds):
    """Let ``other`` wait until ``one`` ends its cell; return the message about the wait.

    The cell ends after ``seconds``. Then the pool suspends ``one``, and ``other`` gets the device.
    """
    told = got(lab.hold(other), ev.QueueMoved, session=other)
    lab.after(seconds)
    lab.drop(one)
    lab.suspended(one, ("G0", 4), seconds=0.5)
    lab.after(0.5)
    lab.done(other, seconds=0.5)
    return told


@pytest.fixture
def pair():
    """Two sessions that each need the whole device; ``a`` runs its first cell."""
    lab = Lab(device(0), max_swap_overhead=0.0)
    lab.running("a", 16)
    lab.open("b", 16)
    return lab


def used(lab, waits, seconds=30.0):
    names = ["a", "b"]
    for _ in range(waits):
        turn(lab, *names, seconds)
        names.reverse()
    return names


def test_wait_has_no_range_before_enough_waits_have_ended(pair):
    names = used(pair, LEAST)
    told = turn(pair, *names, 30.0)
    assert told.expected is None, "the first wait had no figure to compare with"
    told = turn(pair, *reversed(names), 30.0)
    least, most = told.expected
    assert (least, most) == pytest.approx((30.5, 30.5), abs=0.1), "all waits were alike"
    assert told.waited == 0.0


def test_view_keeps_the_sent_estimate_while_time_passes(pair):
    _, other = used(pair, LEAST + 1)
    told = got(pair.hold(other), ev.QueueMoved, session=other)
    expected = view(pair, other).expected
    assert expected.left(pair.now) == told.expected
    assert pair.pool.why(other).expected == expected
    assert any(line.startswith("It will probably wait for ") for line in pair.pool.why(other).lines)
    pair.now += 20
    assert view(pair, other).expected == expected, "absolute times: a client counts them down"


def test_wait_longer_than_all_others_has_no_range(pair):
    _, other = used(pair, LEAST + 1)
    pair.hold(other)
    pair.after(300)
    assert view(pair, other).expected is None
    waits = "It has waited for 5 min; there is no estimate yet."
    assert waits in pair.pool.why(other).lines


def test_estimate_ends_with_the_time_slice_of_the_holder():
    lab = Lab(device(0), preempt=frozenset({"turns"}))
    for name, size in (("a", 16), ("w", 16)):
        lab.open(name, size)
    lab.hold("a")
    lab.done("a")
    lab.after(1000)
    lab.drop("a")
    lab.hold("a", "again")
    lab.hold("w")
    pool = lab.pool
    figure = Ahead(pool._facts, pool._plan).figure(pool._facts.sessions["w"], 1)
    # A cell of session a usually runs for 1000 s. But a's time slice is over, so the pool expects a
    # much shorter wait.
    assert figure is not None
    assert figure.seconds < 10.0
    assert any("may take that memory" in line for line in pool.why("w").lines)


def test_estimate_includes_the_sessions_ahead():
    lab = Lab(device(0))
    lab.running("a", 16)
    lab.after(30)
    lab.drop("a")
    lab.hold("a", "again")
    for name in ("w1", "w2"):
        lab.open(name, 16)
        lab.hold(name)
    pool = lab.pool
    ahead = Ahead(pool._facts, pool._plan)
    seconds = [ahead.figure(pool._facts.sessions[n], p).seconds for p, n in ((1, "w1"), (2, "w2"))]
    assert seconds[0] == pytest.approx(30.0, abs=1.0)
    assert seconds[1] == pytest.approx(60.0, abs=1.0)


# ---------------------------------------------------------------------- ranges from past waits


def seen(*ratios):
    found = Evidence()
    for ratio in ratios:
        found.wait_ended([Figure(0.0, 10.0, 1, 1)], 10.0 * ratio)
    return found


def test_range_scales_the_estimate_by_the_ratios_of_past_waits():
    found = seen(*(0.1 * n for n in range(5, 25)))
    expected = found.expected(Figure(100.0, 20.0, 1, 3), 100.0)
    assert expected is not None
    assert expected.left(100.0) == pytest.approx((10.0, 48.0))
    assert (expected.waits, expected.holders) == (20, 3)
    assert expected.left(150.0) is None


def test_range_ignores_past_waits_shorter_than_this_wait():
    found = seen(*([0.5] * 50), *([4.0] * LEAST))
    late = found.expected(Figure(0.0, 10.0, 1, 1), 10.0)
    assert late is not None
    assert (late.since, late.until, late.waits) == (40.0, 40.0, LEAST)
    assert found.expected(Figure(0.0, 10.0, 1, 1), 41.0) is None


def test_old_waits_are_forgotten():
    found = seen(*([9.0] * 30), *([1.0] * MOST))
    expected = found.expected(Figure(0.0, 10.0, 1, 1), 0.0)
    assert expected is not None
    assert expected.until == 10.0


def test_range_for_a_suspend_ignores_waits_for_cells():
    found = seen(*([1.0] * 20))
    assert found.expected(Figure(0.0, 10.0, 1, 1, moving=True), 0.0) is None


# ---------------------------------------------------------------------- when an idle slice leaves


def test_idle_slice_has_a_countdown_only_if_no_session_waits():
    lab = Lab(device(0), idle_timeout=60.0)
    lab.idle("a", 6)
    lab.running("busy", 10)
    assert (view(lab, "a").leaves_at, view(lab, "a").wanted) == (60.0, False)
    assert view(lab, "busy").leaves_at is None
    lab.open("w", 16)
    lab.hold("w")
    assert (view(lab, "a").leaves_at, view(lab, "a").wanted) == (None, True)
    assert not view(lab, "busy").wanted, "it is not idle"
    lab.drop("w")
    assert (view(lab, "a").leaves_at, view(lab, "a").wanted) == (60.0, False)


def test_keep_changes_the_time_when_an_idle_slice_leaves():
    lab = Lab(device(0), idle_timeout=60.0)
    lab.idle("a", 6)
    lab.keep("a", 600)
    assert view(lab, "a").leaves_at == 600.0
