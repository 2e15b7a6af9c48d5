# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A slice to which state has just been moved stays for a while: moving must not become the work."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.yielding import STAY_MOST

from .builders import Lab, all_of, device, got


class Quick(Lab):
    """A lab that does not add everything up after every event."""

    def send(self, kind: type[ev.Event], /, **fields: Any) -> list[ev.Action]:
        return self.pool.handle(kind(now=self.now, **fields))


def suspends(actions):
    return [a.session for a in all_of(actions, ev.Suspend)]


def moved(lab, name="a", suspend=1.0, resume=1.0, memory=10):
    """Let a session be idle on the slice to which it has just been resumed."""
    lab.idle(name, memory)
    lab.release(name)
    lab.suspended(name, ("G0", memory), seconds=suspend)
    lab.hold(name)
    lab.done(name, seconds=resume)
    lab.drop(name)


def test_who_was_just_moved_stays_for_what_moving_takes_by_the_share(make):
    lab = make(device(0))
    moved(lab)
    lab.after(3)
    lab.open("w", 10)
    told = got(lab.hold("w"), ev.QueueMoved, session="w")
    assert told.reason == (
        "the idle kernel there was moved 3 s ago; moving takes 2 s, so it keeps its slice for "
        "17 s more"
    )
    # And then one second to suspend it.
    assert told.eta == 18.0
    assert suspends(lab.after(16.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_share_is_a_setting_and_0_is_without(make, share):
    lab = make(device(0), max_swap_overhead=share)
    moved(lab)
    lab.open("w", 10)
    actions = lab.hold("w")
    if share:
        assert suspends(actions) == []
        assert suspends(lab.after(3.9)) == []
        actions = lab.after(0.1)
    assert suspends(actions) == ["a"]


def test_moves_that_were_not_measured_count_as_nothing(make):
    lab = make(device(0))
    moved(lab, suspend=0.0, resume=0.0)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["a"]


def test_a_slice_to_which_nothing_was_moved_goes_at_once(make):
    lab = make(device(0))
    moved(lab)
    lab.release("a")
    lab.suspended("a", seconds=1.0)  # it has freed everything meanwhile
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["a"]


def test_the_stay_is_bounded(make):
    lab = make(device(0), idle_timeout=10_000.0)
    moved(lab, suspend=100.0, resume=100.0)
    lab.open("w", 10)
    lab.hold("w")
    assert suspends(lab.after(STAY_MOST - 1)) == []
    assert suspends(lab.after(1)) == ["a"]


def test_release_and_the_idle_time_out_do_not_wait_for_it(make):
    lab = make(device(0), idle_timeout=5.0)
    moved(lab)
    assert suspends(lab.release("a")) == ["a"]
    lab.suspended("a", ("G0", 10), seconds=1.0)
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    assert suspends(lab.after(5)) == ["a"]


def test_the_newest_times_weigh_more(make):
    lab = make(device(0))
    moved(lab, suspend=1.0, resume=1.0)
    lab.release("a")
    lab.suspended("a", ("G0", 10), seconds=11.0)
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    lab.open("w", 10)
    lab.hold("w")
    # 1 + 0.3 x 10 s to suspend, 1 s to resume.
    assert suspends(lab.after(49.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_others_that_may_be_taken_are_taken_instead(make):
    lab = make(device(0, 20))
    moved(lab)
    lab.idle("b", 10)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["b"]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_two_sessions_in_turns_spend_no_more_than_the_share_on_moving(seed, share):
    """Each computes in bursts and wants the whole device for each of them, again and again.

    Whatever the bursts, the pauses, and how long moving takes: over a long time moving takes at
    most the share of it, and neither waits longer for the other than it must.
    """
    rng = random.Random(seed)
    lab = Quick(device(0), max_swap_overhead=share, idle_timeout=1e6)
    suspend, resume = rng.uniform(0.2, 3.0), rng.uniform(0.2, 3.0)
    burst, pause = rng.choice([(0.2, 0.3), (2.0, 0.1), (1.0, 5.0), (0.3, 0.02)])
    for name in ("a", "b"):
        lab.open(name, 16)
    alarms: list[tuple[float, int, str, str]] = []
    moving, moves, count = 0.0, 0, 0
    bursts = {"a": 0, "b": 0}
    asked: dict[str, float] = {}
    longest = 0.0

    def later(seconds: float, what: str, name: str) -> None:
        nonlocal count
        count += 1
        alarms.append((lab.now + seconds, count, what, name))
        alarms.sort()

    def act(actions: list[ev.Action]) -> None:
        nonlocal moving, moves, longest
        for a in actions:
            if isinstance(a, ev.Attach):
                seconds = resume * rng.uniform(0.8, 1.2) if a.origin else 0.0
                moving += seconds
                later(seconds, f"done {seconds}", a.session)
            elif isinstance(a, ev.Suspend):
                seconds = suspend * rng.uniform(0.8, 1.2)
                moving += seconds
                moves += 1
                later(seconds, f"suspended {seconds}", a.session)
            elif isinstance(a, ev.HoldGranted):
                bursts[a.session] += 1
                longest = max(longest, lab.now - asked[a.session])
                later(burst * rng.uniform(0.5, 1.5), "drop", a.session)

    def wants(name: str) -> None:
        asked[name] = lab.now
        act(lab.send(ev.HoldTaken, session=name, hold="device", kind="device"))

    wants("a")
    wants("b")
    # The first moves come before anything was measured.
    horizon = 50 * (suspend + resume) / share
    start: tuple[float, float] | None = None
    while lab.now < horizon:
        wake = lab.pool.next_wakeup()
        if wake is not None and (not alarms or wake <= alarms[0][0]):
            lab.now = max(lab.now, wake)
            act(lab.send(ev.Tick))
            continue
        at, _, what, name = alarms.pop(0)
        lab.now = max(lab.now, at)
        kind, _, seconds = what.partition(" ")
        if kind == "done":
            act(lab.done(name, seconds=float(seconds)))
        elif kind == "suspended":
            act(lab.suspended(name, ("G0", 16), seconds=float(seconds)))
        elif kind == "drop":
            act(lab.drop(name, "device"))
            later(pause * rng.uniform(0.5, 1.5), "want", name)
        else:
            wants(name)
        if start is None and moves == 4:
            start = lab.now, moving
    assert start is not None
    used = (moving - start[1]) / (lab.now - start[0])
    assert used <= share * 1.1
    assert moves > 15, "they do take turns"
    assert min(bursts.values()) > 15
    lab.pool.check_invariants()
    # A stay, the burst that was running at its end, and the move.
    assert longest <= 1.5 * (suspend + resume) * (1 / share + 1) + 2 * burst + 1
