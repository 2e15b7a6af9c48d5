# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""After a move, a session keeps its slice for a minimum time.

This rule limits the part of the time that moves take. It also limits how long other sessions wait
for an idle GPU. ``test_residence`` tests the rule without a pool. This file also tests the older
rule, which the pool keeps for comparison.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.model import Quota
from jupyter_gpupool.pool.residence import STAY_MOST

from .builders import Lab, all_of, device, got
from .checks import check_pool


class Quick(Lab):
    """A lab that saves time: it does not check all accounts after every event."""

    def send(self, kind: type[ev.Event], /, **fields: Any) -> list[ev.Action]:
        return self.pool.handle(kind(now=self.now, **fields))


def suspends(actions):
    return [a.session for a in all_of(actions, ev.Suspend)]


def moved(lab, name="a", suspend=1.0, resume=1.0, memory=10, waited=0.0, **fields):
    """Open a session, suspend and resume it, and end its cell."""
    lab.idle(name, memory, **fields)
    lab.release(name)
    lab.suspended(name, ("G0", memory), seconds=suspend, waited=waited)
    lab.hold(name)
    lab.done(name, seconds=resume, waited=waited)
    lab.drop(name)


CLOCK = {"residence": "clock"}


def test_idle_holder_keeps_its_slice_for_the_time_of_a_move(make):
    lab = make(device(0))
    moved(lab)
    lab.after(100)
    lab.open("w", 10)
    told = got(lab.hold("w"), ev.QueueMoved, session="w")
    assert told.reason == (
        "an idle kernel got its slice back 2 min ago and keeps it for 2 s more, because moving "
        "that kernel takes 2 s"
    )
    assert lab.pool.next_wakeup() == 102.0, "the timer is exact"
    assert suspends(lab.after(1.99)) == []
    assert suspends(lab.after(0.01)) == ["a"]


def test_protection_time_runs_only_while_a_session_waits(make):
    """The idle time of ``a`` before the wait of ``w`` does not use up the protection of ``a``.

    During the wait, ``a`` is idle only for a moment, so the pool still protects it.
    """
    lab = make(device(0))
    moved(lab)
    lab.after(200)
    for _ in range(5):
        lab.hold("a")
        lab.after(0.1)
        lab.drop("a")
        lab.after(0.2)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == []
    lab.after(0.1)
    lab.hold("a")
    assert suspends(lab.after(1)) == []
    assert suspends(lab.drop("a")) == []


def test_holder_that_computed_enough_yields_when_idle(make):
    lab = make(device(0))
    moved(lab)
    lab.hold("a")
    lab.open("w", 10)
    lab.hold("w")
    lab.after(20)  # cost of a move (2 s) / share (0.1)
    assert suspends(lab.drop("a")) == ["a"]


def test_idle_time_during_a_wait_counts_as_use(make):
    lab = make(device(0))
    moved(lab)
    lab.open("w", 10)
    lab.hold("w")
    for _ in range(11):  # the holder is idle for about half of the time
        lab.hold("a")
        lab.after(0.9)
        lab.drop("a")
        if lab.state("a") == "detaching":
            break
        lab.after(1)
    assert lab.state("a") == "detaching"
    assert 20.0 <= lab.now <= 22.0


def test_holder_that_always_returns_late_yields_at_once(make):
    lab = make(device(0))
    moved(lab)
    for _ in range(4):
        lab.after(30)
        lab.hold("a")
        lab.after(0.1)
        lab.drop("a")
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["a"]


@pytest.mark.parametrize(
    ("waited", "stays"),
    [(0.0, 0.0), (4.0, 10.0), (1000.0, 22.0)],
    ids=["free", "crowded", "stalled"],
)
def test_cost_of_a_move_includes_waits_for_other_moves(make, waited, stays):
    """A move that waits for other moves can take longer than 3 s, which is the holder's pause.

    Then the pool keeps the slice for the holder, for as long as a move takes.
    """
    lab = make(device(0))
    moved(lab, waited=waited)
    for _ in range(4):
        lab.after(3)
        lab.hold("a")
        lab.after(0.1)
        lab.drop("a")
    lab.open("w", 10)
    begun = lab.now
    if not stays:
        assert suspends(lab.hold("w")) == ["a"]
        return
    assert suspends(lab.hold("w")) == []
    assert lab.pool.next_wakeup() - begun == pytest.approx(stays), "the cost of a move"


def test_protection_does_not_restart_with_the_next_waiter(make):
    lab = make(device(0))
    moved(lab)
    for name in ("v", "w"):
        lab.open(name, 10)
    lab.hold("v")
    lab.after(1)
    lab.hold("w")
    lab.drop("v")
    assert suspends(lab.after(0.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_protection_restarts_after_a_time_without_waits(make):
    lab = make(device(0))
    moved(lab)
    lab.open("w", 10)
    lab.hold("w")
    lab.after(1)
    lab.drop("w")
    lab.after(50)
    lab.hold("w")
    assert suspends(lab.after(1.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_wait_for_a_quota_counts_as_waiting(make):
    lab = make(quotas={"me": Quota(leases=1)})
    moved(lab, owner="me")
    lab.open("w", 4, owner="me")
    lab.hold("w")
    assert suspends(lab.after(1.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_growth_counts_as_waiting(make):
    lab = make(device(0))
    moved(lab, memory=8)
    lab.running("g", 8)
    lab.change("g", 10)
    assert suspends(lab.after(1.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_two_holders_lose_their_protection_together(make):
    lab = make(device(0))
    moved(lab, "a", memory=5)
    moved(lab, "b", memory=5)
    lab.open("w", 16)
    lab.hold("w")
    assert suspends(lab.after(1.9)) == []
    assert sorted(suspends(lab.after(0.1))) == ["a", "b"]


def test_wait_for_another_device_keeps_the_protection(make):
    lab = make(device(0), device(1, model="B"))
    moved(lab)
    lab.parked("w", 10, memory=16)  # w is on G1, because G0 has no room
    assert lab.record("w").suspended[0].device == "G1"
    lab.running("x", 10)
    lab.hold("w")
    assert suspends(lab.after(60)) == []


def test_lazy_kernel_is_informed_once_that_a_session_waits(make):
    lab = make(device(0))
    lab.running("a", 10, attach="lazy")
    lab.open("w", 10)
    got(lab.hold("w"), ev.Wanted, session="a")
    lab.open("v", 10)
    assert not all_of(lab.hold("v"), ev.Wanted)
    # If a session waits during a later lease of the kernel, the pool informs the kernel once more.
    got(lab.drop("a"), ev.Suspend, session="a")
    lab.suspended("a", ("G0", 10))
    lab.done("w")
    assert not all_of(lab.hold("a"), ev.Wanted), "w's own agent tells it when its cell ends"
    lab.drop("w")
    lab.suspended("w")
    lab.done("v")
    lab.drop("v")
    lab.suspended("v")
    got(lab.done("a"), ev.HoldGranted, session="a")
    lab.hold("w")
    got(lab.past[-8:], ev.Wanted, session="a")


def test_lazy_kernel_is_informed_of_a_request_to_release(make):
    lab = make(device(0))
    lab.running("a", 10, attach="lazy")
    got(lab.release("a"), ev.Wanted, session="a")
    assert not all_of(lab.release("a"), ev.Wanted)
    got(lab.drop("a"), ev.Suspend, session="a")


def test_lazy_kernel_is_informed_again_after_a_refused_suspend(make):
    lab = make(device(0))
    lab.running("a", 10, attach="lazy")
    lab.open("w", 10)
    lab.hold("w")
    lab.drop("a")
    lab.hold("a")
    got(lab.refused("a", "busy"), ev.Wanted, session="a")


# ------------------------------------------------------------------ the older rule


def test_moved_lease_stays_for_move_cost_divided_by_share(make):
    lab = make(device(0), **CLOCK)
    moved(lab)
    lab.after(3)
    lab.open("w", 10)
    told = got(lab.hold("w"), ev.QueueMoved, session="w")
    assert told.reason == (
        "an idle kernel got its slice back 3 s ago and keeps it for 17 s more, because moving "
        "that kernel takes 2 s"
    )
    assert suspends(lab.after(16.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_protection_uses_the_share_setting_and_0_disables_it(make, share):
    lab = make(device(0), max_swap_overhead=share, **CLOCK)
    moved(lab)
    lab.open("w", 10)
    actions = lab.hold("w")
    if share:
        assert suspends(actions) == []
        assert suspends(lab.after(3.9)) == []
        actions = lab.after(0.1)
    assert suspends(actions) == ["a"]


def test_unmeasured_moves_cost_nothing(make):
    lab = make(device(0))
    moved(lab, suspend=0.0, resume=0.0)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["a"]


def test_slice_without_moved_state_is_preempted_at_once(make):
    lab = make(device(0))
    moved(lab)
    lab.release("a")
    lab.suspended("a", seconds=1.0)  # a has freed all its memory
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["a"]


def test_protected_time_is_bounded(make):
    lab = make(device(0), idle_timeout=10_000.0, **CLOCK)
    moved(lab, suspend=100.0, resume=100.0)
    lab.open("w", 10)
    lab.hold("w")
    assert suspends(lab.after(STAY_MOST - 1)) == []
    assert suspends(lab.after(1)) == ["a"]


def test_release_and_idle_timeout_ignore_the_protection(make):
    lab = make(device(0), idle_timeout=5.0)
    moved(lab)
    assert suspends(lab.release("a")) == ["a"]
    lab.suspended("a", ("G0", 10), seconds=1.0)
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    assert suspends(lab.after(5)) == ["a"]


def test_newer_move_times_have_more_weight(make):
    lab = make(device(0), **CLOCK)
    moved(lab, suspend=1.0, resume=1.0)
    lab.release("a")
    lab.suspended("a", ("G0", 10), seconds=11.0)
    lab.hold("a")
    lab.done("a", seconds=1.0)
    lab.drop("a")
    lab.open("w", 10)
    lab.hold("w")
    # The mean time of a suspend is 4 s (1 s + 0.3 x 10 s), the mean time of a resume is 1 s. Moves
    # may take 0.1 of the time. So the lease stays for (4 s + 1 s) / 0.1 = 50 s.
    assert suspends(lab.after(49.9)) == []
    assert suspends(lab.after(0.1)) == ["a"]


def test_pool_prefers_to_preempt_an_unprotected_lease(make):
    lab = make(device(0, 20))
    moved(lab)
    lab.idle("b", 10)
    lab.open("w", 10)
    assert suspends(lab.hold("w")) == ["b"]


class Loops(Quick):
    """Two sessions that compute in bursts and need the whole device for each burst."""

    def __init__(self, rng, swap, burst, pause, **rules):
        super().__init__(device(0), idle_timeout=1e6, **rules)
        self.rng, self.swap, self.burst, self.pause = rng, swap, burst, pause
        self.alarms: list[tuple[float, int, str, str]] = []
        self.count = self.moves = 0
        self.moving = 0.0
        #: Session -> how many seconds each of its bursts waited for the slice.
        self.waits: dict[str, list[float]] = {"a": [], "b": []}
        self.asked: dict[str, float] = {}
        for name in self.waits:
            self.open(name, 16)

    def later(self, seconds, what, name):
        self.count += 1
        self.alarms.append((self.now + seconds, self.count, what, name))
        self.alarms.sort()

    def act(self, actions):
        for a in actions:
            if isinstance(a, ev.Attach):
                seconds = self.swap / 2 * self.rng.uniform(0.8, 1.2) if a.origin else 0.0
                self.moving += seconds
                self.later(seconds, f"done {seconds}", a.session)
            elif isinstance(a, ev.Suspend):
                seconds = self.swap / 2 * self.rng.uniform(0.8, 1.2)
                self.moving += seconds
                self.moves += 1
                self.later(seconds, f"suspended {seconds}", a.session)
            elif isinstance(a, ev.HoldGranted):
                self.waits[a.session].append(self.now - self.asked[a.session])
                self.later(self.burst * self.rng.uniform(0.5, 1.5), "drop", a.session)

    def wants(self, name):
        self.asked[name] = self.now
        self.act(self.send(ev.HoldTaken, session=name, hold="device", kind="device"))

    def run(self, until, on_step=lambda: None):
        while self.now < until:
            wake = self.pool.next_wakeup()
            if wake is not None and (not self.alarms or wake <= self.alarms[0][0]):
                self.now = max(self.now, wake)
                self.act(self.send(ev.Tick))
                continue
            at, _, what, name = self.alarms.pop(0)
            self.now = max(self.now, at)
            kind, _, seconds = what.partition(" ")
            if kind == "done":
                self.act(self.done(name, seconds=float(seconds)))
            elif kind == "suspended":
                self.act(self.suspended(name, ("G0", 16), seconds=float(seconds)))
            elif kind == "drop":
                self.act(self.drop(name, "device"))
                self.later(self.pause * self.rng.uniform(0.5, 1.5), "want", name)
            else:
                self.wants(name)
            on_step()


@pytest.mark.parametrize("rule", ["work", "clock"])
@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
@pytest.mark.parametrize("seed", range(4))
def test_two_loops_spend_at_most_the_share_on_moves(seed, share, rule):
    """Moves take at most the configured share of the time, and each wait has an upper limit.

    Over a long time, this is true for all lengths of bursts, pauses and moves. The limit of a wait
    is the sum of one stay, one burst and one move. With the rule ``work``, the test makes all
    pauses shorter than a move: the holder's next burst begins before a move could end.
    """
    rng = random.Random(seed)
    swap = rng.uniform(0.4, 6.0)
    burst, pause = rng.choice([(0.2, 0.3), (2.0, 0.1), (1.0, 5.0), (0.3, 0.02)])
    if rule == "work":
        pause = min(pause, 0.6 * swap)
    lab = Loops(rng, swap, burst, pause, max_swap_overhead=share, residence=rule)
    start: list[tuple[float, float]] = []

    def note() -> None:
        if not start and lab.moves >= 4:  # the pool has not yet measured the first moves
            start.append((lab.now, lab.moving))

    lab.wants("a")
    lab.wants("b")
    lab.run(max(20 / share, 60) * swap, note)
    used = (lab.moving - start[0][1]) / (lab.now - start[0][0])
    assert used <= share * 1.1
    assert lab.moves > 15, "they do take turns"
    assert min(map(len, lab.waits.values())) > 15
    check_pool(lab.pool, lab.now)
    # The longest wait has three parts: the stay, the burst that runs when the stay ends, the move.
    longest = max(map(max, lab.waits.values()))
    assert longest <= 1.5 * swap * (1 / share + 1) + 2 * burst + pause + 1


@pytest.mark.parametrize("swap", [0.4, 2.4, 16.0])
@pytest.mark.parametrize("think", [1.1, 3.0, 40.0])
def test_two_users_in_turns_wait_only_for_the_move(swap, think):
    """The pauses of both users are longer than a move, so the pool protects no idle slice.

    A cell waits only for moves and for the other user's cell.
    """
    rng = random.Random(int(10 * swap))
    lab = Loops(rng, swap, 0.1, 2 * think * swap)
    lab.wants("a")
    lab.later(think * swap, "want", "b")
    lab.run(60 * think * swap)
    for waits in lab.waits.values():
        late = sorted(waits[10:])
        assert len(late) > 5
        assert late[len(late) // 2] <= 2.5 * swap + 0.2
        # At worst, a cell waits for four steps: the other session resumes, it runs its cell, the
        # pool suspends it, and the waiting session resumes.
        assert late[-1] <= 4 * swap + 0.2


def test_two_users_in_strict_turns_wait_only_for_the_move(make):
    """Two users take turns: each starts a cell only after the cell of the other user has ended.

    The pool has learnt after three idle gaps of a session that it need not protect the session.
    """
    lab = make(device(0))
    for name in ("a", "b"):
        lab.open(name, 10)
    waits = []
    names = ["a", "b"] * 10
    for before, name in zip(["", *names], names, strict=False):
        asked = lab.now
        lab.hold(name)
        if before:
            while lab.state(before) == "idle":
                lab.now = min(lab.pool.next_wakeup(), asked + 60)
                lab.send(ev.Tick)
            lab.after(1)
            lab.suspended(before, ("G0", 10), seconds=1.0)
        lab.after(1)
        lab.done(name, seconds=1.0 if lab.record(name).suspended else 0.0)
        waits.append(lab.now - asked)
        lab.after(0.1)
        lab.drop(name)
        lab.after(1)
    assert max(waits) <= 4.0
    assert all(wait <= 2.01 for wait in waits[10:]), waits
