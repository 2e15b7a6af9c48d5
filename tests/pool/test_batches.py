# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A batch of requests gets the same slices as the same requests sent one by one.

The single requests are sent in the order of the queue. In another order, a request could take free
memory before a request with a higher rank arrives. The test leaves out two cases, because in them
the order of the queue changes while the pool serves the requests:

* the pool has suspended idle leases for the head of the queue, and then another request overtakes
  this head;
* a suspend brings a group below its guarantee, so that the group's requests go first.
"""

from __future__ import annotations

import random
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import PoolSettings
from jupyter_gpupool.pool.shares import Shares

from .world import WEIGHTED, World


class Recording(World):
    """A world that records its events.

    From these events, ``again`` makes another pool in the same state.
    """

    def __init__(self, rng: random.Random, **options: Any) -> None:
        self.past: list[ev.Event] = []
        self.rules: PoolSettings | None = None
        super().__init__(rng, deep=False, **options)

    def send(self, event: ev.Event) -> list[ev.Action]:
        if self.rules is None:
            self.rules = self.settings
        self.past.append(event)
        return super().send(event)

    def again(self, kind: type[Pool] = Pool) -> Any:
        """Return another pool that has handled the same events."""
        pool = kind(self.rules)
        for event in self.past:
            pool.handle(event)
        return pool


class Batching(Pool):
    """A pool that can plan once for several events: ``note`` handles an event without a plan."""

    collects = False

    def note(self, event: ev.Event) -> None:
        self.collects = True
        self.handle(event)
        self.collects = False

    def _settle(self, relieve: Any) -> Any:
        return [] if self.collects else super()._settle(relieve)


def picture(pool: Pool) -> dict[str, Any]:
    """Return each session's state, slices, promises, reservation and position."""
    return {
        r.id: (r.state, r.slices, (e := pool.explain(r.id)).promised, e.reserved, e.position)
        for r in pool.records()
    }


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 150), shares=st.booleans())
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_batched_requests_get_the_same_as_single_requests(seed, steps, shares):
    rng = random.Random(seed)
    world = Recording(rng, devices=rng.choice([1, 2, 3]), most=9, shares=shares)
    names = [name for name in WEIGHTED if name != "restart"]
    for _ in range(steps):
        getattr(world, rng.choice(names))()
    for _ in range(4):
        world.open()
    ready = [r.id for r in world.pool.records() if r.state == "detached" and not r.holds]
    assume(len(ready) > 1)
    asked = {
        name: ev.HoldTaken(now=world.now, session=name, hold="batch", kind="cell")
        for name in rng.sample(ready, min(len(ready), rng.randint(2, 5)))
    }
    probe = world.again(Batching)
    for event in asked.values():
        probe.note(event)
    queue = [s.id for s in Shares(probe._facts).order() if s.id in asked]
    queue += [name for name in asked if name not in queue]

    one, batch = world.again(), world.again(Batching)
    before = batch._plan.reservation
    for name in queue[:-1]:
        batch.note(asked[name])
    batch.handle(asked[queue[-1]])
    waiting = [s.id for s in batch._plan.order if s.id in asked]
    assume(waiting == [name for name in queue if name in waiting])
    after = batch._plan.reservation
    assume(before is None or (after is not None and after.session == before.session))

    for name in queue:
        one.handle(asked[name])
    assert picture(one) == picture(batch)
