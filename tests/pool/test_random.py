# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Random events, by Hypothesis and in a soak. The naive model checks each action of the pool."""

from __future__ import annotations

import heapq
import random
from typing import Any, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from jupyter_gpupool.pool import events as ev

from . import soak
from .builders import Lab, device
from .world import World


class Draws:
    """Has the methods of ``random.Random`` that the world uses, and gets values from Hypothesis.

    So Hypothesis can shrink a failure.
    """

    def __init__(self, data: Any) -> None:
        self.data = data

    def choice(self, options: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(list(options)))

    def randint(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


class PoolMachine(RuleBasedStateMachine):
    """Each rule is one step of the world; the world checks actions, accounts and liveness."""

    world: World

    @initialize(data=st.data(), devices=st.integers(1, 3), shares=st.booleans())
    def begin(self, data, devices, shares):
        self.world = World(Draws(data), devices=devices, most=6, shares=shares)

    def step(self, data: Any, name: str) -> None:
        self.world.c = Draws(data)
        getattr(self.world, name)()


def _rule(name: str) -> Any:
    @rule(data=st.data())
    def step(self: PoolMachine, data: Any) -> None:
        self.step(data, name)

    step.__name__ = name
    return step


# A number is the number of copies of a step. Hypothesis takes a step with more copies more often.
for step_name, times in {
    "open": 2,
    "hold": 4,
    "drop": 3,
    "complete": 4,
    "wait": 2,
    "tick": 1,
    "wait_long": 1,
    "replace": 1,
    "stale": 1,
    "end": 1,
    "change": 1,
    "grow": 1,
    "release": 1,
    "keep": 1,
    "recall": 1,
    "cancel": 1,
    "prioritise": 1,
    "dismiss": 1,
    "sample": 1,
    "host": 1,
    "pressure": 1,
    "settle": 1,
    "land": 1,
    "aside": 1,
    "drain": 1,
    "heal": 1,
    "pause": 1,
    "unpause": 1,
    "configure": 1,
    "restart": 1,
}.items():
    for copy in range(times):
        setattr(PoolMachine, f"{step_name}_{copy}", _rule(step_name))

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("seed", range(12))
def test_large_request_does_not_starve(seed):
    """The small sessions always run cells. Still, a session that needs whole devices must start.

    Every small cell ends within 5 s. The large session is the head of the queue. During one period
    of ageing, the pool only reserves devices for the head. After this period, the pool preempts
    leases that become idle on these devices.
    """
    rng = random.Random(seed)
    count = rng.choice([1, 2, 3])
    lab = Lab(*(device(i) for i in range(count)), ageing=10.0, host_memory=10_000)
    names = [f"s{i}" for i in range(10)]
    for name in names:
        lab.open(name, rng.choice([2, 4, 6]))
    lab.open("head", 16, devices=rng.randint(1, count))
    alarms: list[tuple[float, int, str, str]] = []

    def later(seconds: float, what: str, name: str) -> None:
        heapq.heappush(alarms, (lab.now + seconds, len(alarms), what, name))

    def answer(actions: list[ev.Action]) -> bool:
        for a in actions:
            if isinstance(a, ev.Attach):
                if a.session == "head":
                    return True
                later(0.1, "done", a.session)
            elif isinstance(a, ev.Suspend):
                later(rng.uniform(0.1, 1.0), "suspended", a.session)
            elif isinstance(a, ev.HoldGranted):
                later(rng.uniform(0.5, 5.0), "drop", a.session)
        return False

    for name in names:
        answer(lab.hold(name))
    lab.after(1.0)
    asked = lab.now
    started = answer(lab.hold("head"))
    while not started:
        assert lab.now < asked + 10.0 * (count + 2) + 30.0, "the head of the queue starves"
        wake = lab.pool.next_wakeup()
        if wake is not None and wake <= alarms[0][0]:
            lab.now = max(lab.now, wake)
            started = answer(lab.send(ev.Tick))
            continue
        at, _, what, name = heapq.heappop(alarms)
        lab.now = max(lab.now, at)
        if what == "done":
            actions = lab.done(name)
        elif what == "suspended":
            where = lab.where(name)[0][0]
            actions = lab.suspended(name, (where, rng.randint(1, 2)))
        elif what == "drop":
            actions = lab.drop(name)
            later(rng.uniform(0.0, 0.3), "hold", name)
        else:
            actions = lab.hold(name)
        started = answer(actions)


def test_random_events_break_no_rule():
    """The 5,000 random events are the same in each run."""
    assert soak.run(5_000, seed=0)["violations"] == 0


def test_random_events_with_shares_break_no_rule():
    """Random events with groups, guarantees, caps, budgets and preemption of running work."""
    assert soak.run(4_000, seed=0, shares=True)["violations"] == 0


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("shares", [False, True], ids=["plain", "shares"])
def test_a_million_random_events_break_no_rule(shares):
    assert soak.run(1_000_000, seed=0, shares=shares)["violations"] == 0
