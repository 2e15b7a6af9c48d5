# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pool against the naive model, under Hypothesis and in a soak."""

from __future__ import annotations

from typing import Any, Sequence

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from . import soak
from .world import World


class Draws:
    """Hypothesis's choices in the place of ``random.Random``, so that failures shrink."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def choice(self, options: Sequence[Any]) -> Any:
        return self.data.draw(st.sampled_from(list(options)))

    def randint(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))


class PoolMachine(RuleBasedStateMachine):
    """Every rule is one step of the world; the world checks actions, accounts and liveness."""

    world: World

    @initialize(data=st.data(), devices=st.integers(1, 3))
    def begin(self, data, devices):
        self.world = World(Draws(data), devices=devices, most=6)

    def step(self, data: Any, name: str) -> None:
        self.world.c = Draws(data)
        getattr(self.world, name)()


def _rule(name: str) -> Any:
    @rule(data=st.data())
    def step(self: PoolMachine, data: Any) -> None:
        self.step(data, name)

    step.__name__ = name
    return step


# The common steps have several names, so that Hypothesis takes them more often.
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
    "release": 1,
    "keep": 1,
    "sample": 1,
    "host": 1,
    "drain": 1,
    "heal": 1,
    "configure": 1,
    "restart": 1,
}.items():
    for copy in range(times):
        setattr(PoolMachine, f"{step_name}_{copy}", _rule(step_name))

TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def test_soak():
    """30,000 random events; the same every time."""
    assert soak.run(30_000, seed=0)["violations"] == 0


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_long_soak():
    assert soak.run(1_000_000, seed=0)["violations"] == 0
