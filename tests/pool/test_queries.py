# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""A query never changes the pool. The tests make each query for all sessions and devices."""

from __future__ import annotations

import contextlib
import inspect
import random
from typing import Any, Callable, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.machine import Pool
from jupyter_gpupool.pool.model import Device, Slice

from . import world
from .test_random import Draws
from .world import World

#: Query method of a pool -> a function that returns the tuples of arguments to call it with.
QUERIES: dict[str, Callable[[Pool], Iterable[tuple[Any, ...]]]] = {
    **dict.fromkeys(
        [
            *("next_wakeup", "devices", "device_views", "leases", "suspended", "records"),
            *("self_check", "usage", "explanations"),
        ],
        lambda _pool: [()],
    ),
    **dict.fromkeys(
        [
            *("__contains__", "record", "request", "preferred", "growable", "story", "explain"),
            "why",
        ],
        lambda pool: [(name,) for name in (*[r.id for r in pool.records()], "nobody")],
    ),
    **dict.fromkeys(
        ["device", "headroom"],
        lambda pool: [(uuid,) for uuid in (*[d.uuid for d in pool.devices()], "GPU-none", "")],
    ),
    "standing": lambda pool: [(r.owner, now) for r in pool.records() for now in (0.0, 10.0**6)],
    "view": lambda _pool: [(0.0,), (10.0**6,)],
}


def ask_everything(pool: Pool) -> None:
    for name, arguments in QUERIES.items():
        for args in arguments(pool):
            with contextlib.suppress(KeyError):
                getattr(pool, name)(*args)


def seen(pool: Pool) -> Any:
    return pool.view(0.0), pool.records(), pool.next_wakeup()


class Asked(Pool):
    """A pool that the test asks every query before each event.

    Its twin gets the same events and no query. Both must decide the same.
    """

    def __init__(self, rules: Any) -> None:
        super().__init__(rules)
        self.twin = Pool(rules)

    def handle(self, event: ev.Event) -> list[ev.Action]:
        before = seen(self)
        ask_everything(self)
        assert seen(self) == before
        actions = super().handle(event)
        assert actions == self.twin.handle(event), "a query has changed a later decision"
        assert seen(self) == seen(self.twin)
        return actions


def test_all_public_methods_except_handle_are_queries():
    public = {
        name
        for name, _ in inspect.getmembers(Pool, inspect.isfunction)
        if not name.startswith("_") or name == "__contains__"
    }
    assert public == {*QUERIES, "handle"}


@given(data=st.data())
@settings(max_examples=15, derandomize=True, suppress_health_check=list(HealthCheck))
def test_no_query_changes_what_the_pool_shows_or_decides(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world, "Pool", Asked)
        one = World(Draws(data), devices=data.draw(st.integers(1, 3)), most=6, deep=False)
        for _ in range(data.draw(st.integers(0, 60))):
            one.step()


@pytest.mark.parametrize("seed", range(2))
def test_no_query_changes_anything_in_many_random_events(seed, monkeypatch):
    monkeypatch.setattr(world, "Pool", Asked)
    one = World(random.Random(seed), deep=False)
    while one.events < 350:
        one.step()


def test_query_about_an_unknown_device_does_not_add_it(lab):
    before = lab.pool.view(lab.now)
    assert lab.pool.headroom("no-such-device") == 0
    assert lab.pool.view(lab.now) == before
    assert [d.uuid for d in lab.pool.devices()] == ["G0", "G1"]


def test_query_about_lost_devices_adds_none(lab):
    """After a restart of the broker, some devices that its sessions name may be missing."""
    lab.open("a", 4)
    lab.send(ev.HoldTaken, session="a", hold="h", kind="device", bound=("GPU-gone",))
    lab.parked("b", 4)
    record = lab.record("b")
    other = Asked(lab.pool.settings)
    other.handle(ev.DeviceAppeared(now=0.0, device=Device("G5", 5, "test", "A", 16)))
    for name, slices in (("b", (Slice("G0", 4),)), ("c", (Slice("G9", 4), Slice("G5", 4)))):
        parked = type(record)(
            id=name, owner=record.owner, request=record.request, attach="cell", suspended=slices
        )
        other.handle(ev.Recovered(now=1.0, records=(parked,)))
    other.handle(ev.HoldTaken(now=2.0, session="b", hold="c", kind="cell"))
    ask_everything(lab.pool)
    ask_everything(other)
    assert seen(other) == seen(other.twin)
