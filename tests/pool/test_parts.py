# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Comparison of the pool's parts with slow but simple versions of the same rules."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_gpupool.pool.draft import Room
from jupyter_gpupool.pool.facts import DeviceLedger, Facts
from jupyter_gpupool.pool.model import Owner, PoolSettings, Request, SessionRecord, Slice
from jupyter_gpupool.pool.session import Session, Wait, record, restored
from jupyter_gpupool.pool.shares import Shares
from jupyter_gpupool.pool.transitions import InvalidTransition, move

from .builders import device


def session(name: str = "s", **fields: Any) -> Session:
    request = Request(4, 4, priority=fields.pop("priority", "notebook"))
    return Session(id=name, owner=Owner("ann"), request=request, attach="cell", **fields)


@given(
    leases=st.lists(st.integers(1, 9), max_size=6),
    free=st.integers(0, 12),
    wanted=st.integers(1, 24),
)
def test_spare_bytes_never_delay_the_head_of_the_queue(leases, free, wanted):
    """The leases may end in any order: the head can start as early as without the backfill."""
    room = Room(DeviceLedger(device(0), capacity=sum(leases) + free, granted=sum(leases)))
    room.leases = [(session(), size) for size in leases]
    given_away = room.spare(wanted)
    assert given_away >= 0
    given_away = min(given_away, free)
    for count in range(len(leases) + 1):
        for ended in itertools.combinations(leases, count):
            if free + sum(ended) >= wanted:
                assert free - given_away + sum(ended) >= wanted


def waiting(now: float, ageing: float, *sessions: Session) -> Facts:
    classes = {"high": 10, "low": 0}
    state = Facts(PoolSettings(ageing=ageing, priority_classes=classes))
    state.now = now
    for number, s in enumerate(sessions):
        s.state, s.wait = "queued", Wait(number=number, since=s.queued_at)
        state.add(s)
    return state


@given(
    since=st.lists(st.floats(0, 1e6), min_size=2, max_size=2),
    classes=st.lists(st.sampled_from(["high", "low"]), min_size=2, max_size=2),
    later=st.floats(0, 1e6),
)
def test_order_of_two_sessions_is_constant_while_both_wait(since, classes, later):
    """The sort key of the queue is: points of the class + waiting time / ageing.

    The keys of all sessions grow equally fast, so no session overtakes another by waiting.
    """
    pair = [
        session(name, queued_at=at, priority=priority)
        for name, at, priority in zip("ab", since, classes, strict=True)
    ]
    now = max(since)
    first = Shares(waiting(now, 60.0, *pair)).order()[0].id
    assert Shares(waiting(now + later, 60.0, *pair)).order()[0].id == first
    points = [(10 if c == "high" else 0) + (now - at) / 60.0 for at, c in zip(since, classes)]  # noqa: B905
    if abs(points[0] - points[1]) > 1e-3:
        assert first == ("a" if points[0] > points[1] else "b")


def test_class_alone_orders_the_queue_without_ageing():
    late = session("late", queued_at=1e9, priority="high")
    early = session("early", queued_at=0.0, priority="low")
    assert [s.id for s in Shares(waiting(1e9, 0.0, early, late)).order()] == ["late", "early"]


def test_invalid_transition_is_an_error_with_the_last_steps():
    state, s = Facts(PoolSettings()), session()
    state.now = 1.0
    state.add(s)
    move(state, s, "queued", "test", 1.0)
    with pytest.raises(InvalidTransition) as caught:
        move(state, s, "idle", "nonsense")
    assert caught.value.code == "invalid-transition"
    assert "detached -> queued" in str(caught.value)
    assert "please report" in str(caught.value)


def test_session_is_recorded_and_restored_with_every_field():
    values = {
        "str": "text",
        "int": 7,
        "float": 7.0,
        "bool": True,
        "tuple[Slice, ...]": (Slice("G0", 3),),
        "tuple[str, ...]": ("G0",),
    }
    own = {"id": "s", "owner": Owner("ann"), "request": Request(4, 4), "attach": "lazy"}
    fixed = {**own, "state": "detached", "holds": (), "slices": (), "wait_reason": "busy"}
    fixed |= {"footprint": 0}
    full = {f.name: values.get(str(f.type)) for f in dataclasses.fields(SessionRecord)}
    before = SessionRecord(**{**full, **fixed})
    after = record(restored(before, 100.0), "busy")
    changed = {"state_since", "idle_since"}  # a restart of the broker resets these fields
    changed |= {"recall_at", "recall_reason"}  # the end of the lease ends its recall
    for field in dataclasses.fields(SessionRecord):
        if field.name not in changed:
            assert getattr(after, field.name) == getattr(before, field.name), field.name
