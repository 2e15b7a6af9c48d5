# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Unit tests of the minimum residence: its bounds hold, whatever idle gaps an adversary chooses."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_gpupool.pool import residence
from jupyter_gpupool.pool.residence import ENOUGH, GAPS, STAY_MOST, Gap, Habits, Stay

COSTS = st.floats(0.05, 50.0)
GAP = st.floats(0.0, 200.0)
HABITS = st.builds(
    Habits,
    gaps=st.lists(GAP, max_size=GAPS).map(tuple),
    trust=st.floats(0.0, 1.0),
)
INF = math.inf


def play(habits: Habits, gap: float, cost: float) -> tuple[float, Habits]:
    """Let a holder be idle for ``gap`` seconds while another session waits.

    Return the lost GPU seconds, and the habits of the holder after the gap.
    """
    there = Gap(0.0, wanted=-1.0)
    until = residence.protected_until(there, Stay(), habits, cost=cost, share=0.001)
    assert until >= 0
    if gap < until:
        return gap, residence.returned(habits, there, gap, cost)
    there = residence.taken(there, Stay(), habits, until, cost=cost, share=0.001)
    return until + cost, residence.returned(habits, there, gap, cost)


# ------------------------------------------------------------------ worst cases


@given(COSTS, GAP)
def test_gap_without_history_costs_at_most_twice_the_optimum(cost, gap):
    lost, _ = play(Habits(), gap, cost)
    assert lost <= 2 * min(gap, cost) + 1e-9


@given(COSTS, st.lists(GAP, min_size=1, max_size=60))
def test_cost_of_gaps_is_at_most_twice_the_best_plus_one_move(cost, gaps):
    habits, lost = Habits(), 0.0
    for gap in gaps:
        more, habits = play(habits, gap, cost)
        lost += more
    best = sum(min(gap, cost) for gap in gaps)
    assert lost <= 2 * best + cost * (1 + 1e-6)


def test_worst_gaps_cost_at_most_twice_the_optimum():
    """An adversary ends each gap just before the move, just after it, or much later.

    In each of 400 rounds, the adversary compares pairs of gaps, and chooses the first gap of the
    pair whose cost exceeds twice the optimum by the most.
    """
    cost, habits, lost, best = 1.0, Habits(), 0.0, 0.0
    ratios = []
    for _ in range(400):
        x = residence.patience(habits, cost)
        options = [x, x + 1e-6, cost + 1e-6, 10 * cost, 1e-6]
        worst, chosen = -INF, 0.0
        for first in options:
            one, then = play(habits, first, cost)
            y = residence.patience(then, cost)
            for second in (y, y + 1e-6, 10 * cost):
                two, _ = play(then, second, cost)
                regret = one + two - 2 * (min(first, cost) + min(second, cost))
                if regret > worst:
                    worst, chosen = regret, first
        more, habits = play(habits, chosen, cost)
        lost += more
        best += min(chosen, cost)
        ratios.append((lost - cost) / max(best, 1e-9))
    assert ratios[-1] <= 2.0
    assert lost <= 2 * best + cost + 1e-6


# ------------------------------------------------------------------ patience


@given(HABITS, COSTS, GAP)
def test_patience_is_between_the_trust_bound_and_the_move_cost(habits, cost, away):
    found = residence.patience(habits, cost, away)
    assert cost * (1 - habits.trust) - 1e-9 <= found <= cost


@given(COSTS, st.lists(st.floats(0.001, 0.999), min_size=ENOUGH, max_size=GAPS))
def test_holder_that_always_returns_soon_is_protected(cost, shares):
    habits = Habits(tuple(share * cost for share in shares))
    assert residence.patience(habits, cost) >= min(cost, max(habits.gaps))


@given(COSTS, st.lists(st.floats(1.001, 50.0), min_size=ENOUGH, max_size=GAPS))
def test_holder_that_always_returns_late_is_not_protected(cost, factors):
    assert residence.patience(Habits(tuple(f * cost for f in factors)), cost) == 0.0


def test_two_gaps_are_too_few_for_a_history():
    assert residence.patience(Habits((100.0, 100.0)), 2.0) == 2.0
    assert residence.patience(Habits((100.0,) * 3), 2.0) == 0.0


def test_holder_idle_longer_than_ever_before_loses_protection():
    habits = Habits((0.3, 0.4, 0.3))
    assert residence.patience(habits, 2.0) == 2.0
    assert residence.patience(habits, 2.0, away=0.59) > 0.0
    assert residence.patience(habits, 2.0, away=0.61) == 0.0


def test_early_return_ends_trust_and_later_returns_restore_it():
    habits = Habits((100.0,) * GAPS)
    lost, habits = play(habits, 0.0, 1.0)
    assert lost == 1.0, "it was moved at once, and came back at once"
    assert habits.trust == 0.0
    assert residence.patience(habits, 1.0) == 1.0
    _, habits = play(habits, 0.4, 1.0)
    assert habits.trust == 0.4


# ------------------------------------------------------------------ allowance


@given(HABITS, COSTS, st.floats(0.01, 0.9), st.floats(0, 1000), st.floats(0, 1000))
def test_sum_of_protected_work_and_idle_time_is_bounded(habits, cost, share, computed, withheld):
    stay = Stay(computed, withheld)
    until = residence.protected_until(Gap(0.0, 0.0), stay, habits, cost=cost, share=share)
    most = min(STAY_MOST, cost / share)
    if computed + withheld >= most:
        assert until == -INF
    else:
        assert 0 <= until <= min(cost, most - computed - withheld) + 1e-9


@given(COSTS, st.floats(0.02, 0.5), st.data())
@settings(max_examples=200)
def test_moves_take_at_most_their_share_of_the_used_time(cost, share, data):
    """The lengths of bursts and pauses are random, but each pause is shorter than a move."""
    used = moved = now = 0.0
    habits = Habits()
    burst, pause = data.draw(st.floats(0.05, 3.0)), data.draw(st.floats(0.01, 0.95)) * cost
    for _ in range(3):  # three stays: all bursts have similar lengths, and all pauses have
        stay = Stay()
        while True:
            jitter = data.draw(st.floats(0.5, 1.0))
            now += burst * jitter
            used += burst * jitter
            stay = residence.computed(stay, burst * jitter)
            gap = Gap(now, wanted=-1.0)
            until = residence.protected_until(gap, stay, habits, cost=cost, share=share)
            length = pause * jitter
            if now + length >= until:
                used += max(0.0, until - now)
                moved += cost
                now += length
                break
            now += length
            used += length
            stay = residence.kept_idle(stay, gap, now)
            habits = residence.returned(habits, gap, now, cost)
        assert stay.computed + stay.withheld <= min(STAY_MOST, cost / share) + burst + pause
    assert moved <= max(share, cost / STAY_MOST) * (used + 1e-6) * (1 + 1e-6)


def test_holder_is_protected_while_no_session_waits():
    until = residence.protected_until(Gap(0.0), Stay(), Habits(), cost=2.0, share=0.1)
    assert until == INF
    stay = residence.kept_idle(Stay(), Gap(0.0), 1000.0)
    assert stay == Stay()
    assert residence.kept_idle(stay, Gap(0.0, wanted=999.0), 1000.0).withheld == 1.0


def test_protection_time_starts_when_a_session_waits():
    rules = {"cost": 2.0, "share": 0.1}
    assert residence.protected_until(Gap(10.0, 3.0), Stay(), Habits(), **rules) == 12.0
    assert residence.protected_until(Gap(10.0, 30.0), Stay(), Habits(), **rules) == 32.0
    assert residence.protected_until(Gap(10.0, 3.0), Stay(19.5), Habits(), **rules) == 10.5
    assert residence.protected_until(Gap(10.0, 3.0), Stay(20.0), Habits(), **rules) == -INF


def test_zero_share_or_zero_cost_gives_no_protection():
    assert residence.protected_until(Gap(0.0), Stay(), Habits(), cost=0.0, share=0.1) == -INF
    assert residence.protected_until(Gap(0.0), Stay(), Habits(), cost=2.0, share=0.0) == -INF


def test_move_after_enough_use_does_not_change_trust():
    gap = Gap(0.0, 0.0)
    early = residence.taken(gap, Stay(19.5), Habits(), 0.5, cost=2.0, share=0.1)
    assert residence.returned(Habits(), early, 0.6, 2.0).trust == 1.0
    assert residence.taken(gap, Stay(), Habits(), 2.0, cost=2.0, share=0.1).taken == 2.0
