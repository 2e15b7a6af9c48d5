# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Checks that a pool must pass after every event. Most of them use only public methods."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.explain import Explanation
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import SessionRecord
from jupyter_gpupool.pool.preemption import leaving
from jupyter_gpupool.states import HAS_LEASE


def check_pool(
    pool: Pool, now: float, *, deep: bool = True, one_by_one: bool = True
) -> dict[str, Explanation]:
    """Check the accounts and every record, and that a second plan changes nothing.

    With ``deep``, the second plan must also change no explanation. This check compares the
    explanations only if the plan has changed their data. With ``one_by_one``, it always compares
    them, and also makes the explanation of each session alone.
    """
    assert pool.self_check() == []
    check_leaving(pool)
    records = pool.records()
    for record in records:
        check_record(record)
    plans = pool.explanations() if deep else {}
    if one_by_one:
        for name, told in plans.items():
            assert pool.explain(name) == told
    told = told_by(pool) if plans else None
    again = [a for a in pool.handle(ev.Tick(now=now)) if not isinstance(a, ev.QueueMoved)]
    assert again == [], f"planning again at {now} does {again}"
    if plans and (one_by_one or told_by(pool) != told):
        for name, after in pool.explanations().items():
            assert after == plans[name], f"planning again says {after} instead of {plans[name]}"
    if deep:
        check_promises(pool, records, plans)
    return plans


def told_by(pool: Pool) -> object:
    """Return the data of the explanations, as far as a plan can change it."""
    facts, plan = pool._facts, pool._plan
    sessions = [
        (s.id, s.state, s.measured.gap, s.wait.head_since, s.lease.stuck_since, s.lease.slices)
        for s in facts.sessions.values()
    ]
    queues = [s.id for s in plan.order], [s.id for s in plan.queue]
    return sessions, queues, plan.reasons, plan.promises, plan.reservation, set(facts.stuck)


def check_leaving(pool: Pool) -> None:
    """Check the cached times at which idle sessions leave: compute them again, and compare."""
    facts = pool._facts
    kept = dict(leaving(facts))
    for s in facts.sessions.values():
        facts.forget_times(s)
    assert leaving(facts) == kept


def check_record(r: SessionRecord) -> None:
    """Check that the state of a session agrees with its holds, slices and suspended state."""
    if r.state in ("queued", "active"):
        assert r.holds, f"{r.state} without a hold: {r}"
    if r.state in ("idle", "detached"):
        assert not r.holds, f"{r.state} with holds: {r}"
    if r.state == "queued":
        assert r.wait_reason, f"waits without a reason: {r}"
    if r.state != "ended":
        assert bool(r.slices) == (r.state in HAS_LEASE), r
        assert not r.suspended or r.state in ("detached", "queued", "attaching"), r
    assert len({x.device for x in r.slices}) == len(r.slices), f"two slices on one device: {r}"


def check_promises(pool: Pool, records: list[SessionRecord], plans: dict[str, Explanation]) -> None:
    """Check that each device has room for its promises after the suspends under way."""
    promised: dict[str, int] = {}
    for plan in plans.values():
        for x in plan.promised:
            promised[x.device] = promised.get(x.device, 0) + x.bytes
    leaving: dict[str, int] = {}
    for record in records:
        for x in record.slices if record.state == "detaching" else ():
            leaving[x.device] = leaving.get(x.device, 0) + x.bytes
    for view in pool.device_views():
        there = view.capacity - view.granted - view.foreign + leaving.get(view.device.uuid, 0)
        size = promised.get(view.device.uuid, 0)
        assert size <= max(0, there), f"{view.device.uuid}: {size} bytes promised of {there}"
