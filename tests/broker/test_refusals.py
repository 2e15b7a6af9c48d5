# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A state counts as lost if the driver refuses many times, over a long time, to restore it."""

from jupyter_gpupool.broker.gpu.refusals import MOST, PATIENCE, STALE, Refusals

HERE, THERE = frozenset({"GPU-a"}), frozenset({"GPU-b"})


def refuse(refusals, times, devices=HERE):
    return [refusals.another(devices, now) for now in times]


def test_state_is_lost_after_refusals_over_a_long_time():
    times = [1000.0 + PATIENCE * i / MOST for i in range(MOST + 1)]
    assert refuse(Refusals(), times) == [False] * MOST + [True]


def test_many_refusals_in_a_short_time_lose_nothing():
    assert not any(refuse(Refusals(), [1000.0 + i for i in range(50)]))


def test_count_of_refusals_restarts_on_another_gpu():
    refusals = Refusals()
    refuse(refusals, [0.0, 1.0, 2.0, 3.0])
    assert refuse(refusals, [PATIENCE + 1], THERE) == [False]
    assert refuse(refusals, [PATIENCE + 2]) == [False]
    assert refusals.count == 1


def test_refusals_before_a_failed_test_of_the_gpu_do_not_count():
    refusals = Refusals()
    refuse(refusals, [0.0, 1.0, 2.0, 3.0])
    refusals.blame("GPU-b")
    assert refusals.count == 4
    refusals.blame("GPU-a")
    assert refuse(refusals, [PATIENCE + 1]) == [False]


def test_old_refusals_do_not_count():
    refusals = Refusals()
    refuse(refusals, [0.0, 1.0, 2.0, 3.0])
    assert refuse(refusals, [4 + STALE]) == [False]
    assert refusals.count == 1
