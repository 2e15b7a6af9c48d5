# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""What must be true of a pool after every event, checked through its public methods."""

from __future__ import annotations

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.explain import Explanation
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import SessionRecord
from jupyter_gpupool.pool.preemption import leaving
from jupyter_gpupool.states import HAS_LEASE


def check_pool(pool: Pool, now: float, *, deep: bool = True) -> dict[str, Explanation]:
    """Check the accounts and every record, and that planning again changes nothing.

    With ``deep``, planning again must not change an explanation either.
    """
    assert pool.self_check() == []
    check_leaving(pool)
    records = pool.records()
    for record in records:
        check_record(record)
    plans = {record.id: pool.explain(record.id) for record in records} if deep else {}
    again = [a for a in pool.handle(ev.Tick(now=now)) if not isinstance(a, ev.QueueMoved)]
    assert again == [], f"planning again at {now} does {again}"
    for name, before in plans.items():
        after = pool.explain(name)
        assert after == before, f"planning again says {after} instead of {before}"
    if deep:
        check_promises(pool, now, plans)
    return plans


def check_leaving(pool: Pool) -> None:
    """Check that the kept times of idle sessions are those that the facts give now."""
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


def check_promises(pool: Pool, now: float, plans: dict[str, Explanation]) -> None:
    """Check that no plan promises more than is free once the suspends under way are done."""
    promised: dict[str, int] = {}
    for plan in plans.values():
        for x in plan.promised:
            promised[x.device] = promised.get(x.device, 0) + x.bytes
    leaving: dict[str, int] = {}
    for record in pool.records():
        for x in record.slices if record.state == "detaching" else ():
            leaving[x.device] = leaving.get(x.device, 0) + x.bytes
    for view in pool.view(now).devices:
        there = view.capacity - view.granted - view.foreign + leaving.get(view.device.uuid, 0)
        size = promised.get(view.device.uuid, 0)
        assert size <= max(0, there), f"{view.device.uuid}: {size} bytes promised of {there}"
