# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The pass over the queue skips requests that cannot succeed now.

Its plan must be the same as the plan of a pass that skips no request.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from jupyter_gpupool.pool import machine
from jupyter_gpupool.pool.facts import Facts
from jupyter_gpupool.pool.reach import Reach
from jupyter_gpupool.pool.schedule import Plan

from .world import World

#: Most steps of the test come from this list. They rarely end a session, so the queue becomes long.
LIKELY = ["open", "hold", "hold", "wait", "complete", "tick", "drop", "sample"]


def same(facts: Facts, short: Plan, whole: Plan) -> None:
    for name in ("grants", "grows", "suspends", "promises", "reservation", "held", "held_groups"):
        assert getattr(short, name) == getattr(whole, name), name
    assert short.reasons.keys() == whole.reasons.keys()
    for name, why in short.reasons.items():
        assert why == whole.reasons[name], facts.sessions[name]


#: With each of these seeds, the queue becomes long, and the pass skips thousands of requests.
@pytest.mark.parametrize("seed", [6, 46, 49, 51, 52, 64, 71])
def test_skipping_hopeless_requests_does_not_change_the_plan(seed, monkeypatch):
    skipped = 0
    plan, hopeless = machine.plan, Reach.hopeless

    def counted(*given: object) -> object:
        nonlocal skipped
        why = hopeless(*given)
        skipped += why is not None
        return why

    def both(facts: Facts, before: Plan, relieve: Iterable[str] = ()) -> Plan:
        monkeypatch.setattr(Reach, "hopeless", lambda *_: None)
        whole = plan(facts, before, relieve)
        monkeypatch.setattr(Reach, "hopeless", counted)
        short = plan(facts, before, relieve)
        same(facts, short, whole)
        return short

    monkeypatch.setattr(machine, "plan", both)
    rng = random.Random(seed)
    world = World(rng, devices=rng.choice([1, 2, 4]), most=40, deep=False, shares=seed % 3 > 0)
    while world.events < 700:
        if rng.random() < 0.8:
            getattr(world, rng.choice(LIKELY))()
        else:
            world.step()
    assert skipped > 5000, "the queue was too short"
