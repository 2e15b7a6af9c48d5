# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Fair shares over time: weights, floods of requests, and the longest possible wait."""

from __future__ import annotations

import math
import random

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import Group, Portion
from jupyter_gpupool.pool.model import PREEMPT_ALL, Owner, Quota

from .builders import Lab, device, got, none
from .crowd import Crowd

THREE_TO_ONE = {"big": Group(weight=3.0), "small": Group(weight=1.0)}


@pytest.mark.parametrize("preempt", [frozenset(), PREEMPT_ALL], ids=["by-cells", "preempted"])
@pytest.mark.parametrize(
    ("big", "small"),
    [(5.0, 5.0), (5.0, 45.0), (45.0, 5.0), (45.0, 45.0)],
    ids=["short", "short-long", "long-short", "long"],
)
def test_shares_under_endless_demand_approach_the_weights(big, small, preempt):
    crowd = Crowd(2, groups=THREE_TO_ONE, preempt=preempt, half_life=1200.0)
    for i in range(6):
        length = random.Random(i).uniform
        crowd.add(f"b{i}", Owner("ann", "big"), cell=lambda r=length: r(0.5, 1.5) * big)
        crowd.add(f"s{i}", Owner("bob", "small"), cell=lambda r=length: r(0.5, 1.5) * small)
    crowd.run(1800)
    found = crowd.got()
    assert found["ann"] / (found["ann"] + found["bob"]) == pytest.approx(0.75, abs=0.0375), found
    assert sum(found.values()) > 0.95 * 2 * 1800, "and no device is left idle"


def test_weights_hold_at_each_level_of_the_tree():
    groups = {
        "bio": Group(weight=2.0),
        "wet": Group(parent="bio", weight=1.0),
        "dry": Group(parent="bio", weight=3.0),
        "phy": Group(weight=2.0),
    }
    crowd = Crowd(4, groups=groups, half_life=1200.0)
    for i in range(8):
        crowd.add(f"w{i}", Owner("wes", "wet"), cell=6.0)
        crowd.add(f"d{i}", Owner("dan", "dry"), cell=14.0)
        crowd.add(f"p{i}", Owner("pia", "phy"), cell=40.0)
    crowd.run(1800)
    found, total = crowd.got(), 4 * 1800
    assert found["pia"] / total == pytest.approx(1 / 2, rel=0.05)
    assert found["dan"] / total == pytest.approx(3 / 8, rel=0.05)
    assert found["wes"] / total == pytest.approx(1 / 8, rel=0.1)


def test_share_that_a_group_does_not_use_goes_to_the_others():
    crowd = Crowd(1, groups=THREE_TO_ONE, half_life=1200.0)
    for i in range(3):
        crowd.add(f"s{i}", Owner("bob", "small"), cell=5.0)
    crowd.add("b", Owner("ann", "big"), cell=5.0, pause=45.0)
    crowd.run(1800)
    found = crowd.got()
    assert sum(found.values()) > 0.97 * 1800
    assert max(crowd.kernels["b"].waits) <= 5.0 + 1e-6, "it is next whenever it comes"


def test_user_with_many_requests_does_not_delay_the_others():
    """One user has 50 kernels, and ten users have one kernel each. All users get equal time.

    A kernel of the ten users waits at most for the time that two cells of each user take.
    """
    crowd = Crowd(2, half_life=1200.0)
    for i in range(50):
        crowd.add(f"f{i}", "flood", cell=8.0)
    for i in range(10):
        crowd.add(f"u{i}", f"user{i}", cell=8.0)
    crowd.run(1800)
    found = crowd.got()
    fair = 2 * 1800 / 11
    for name, seconds in found.items():
        assert seconds == pytest.approx(fair, rel=0.05), name
    waits = [w for i in range(10) for w in crowd.kernels[f"u{i}"].waits[1:]]
    assert max(waits) <= 2 * 11 * 8.0


def test_first_requests_of_all_users_go_before_second_requests(make):
    lab = make(half_life=3600.0)
    lab.running("x", 16)
    lab.running("y", 16)
    for name in ("f0", "f1", "f2"):
        lab.open(name, 16, owner="flood")
        lab.hold(name)
    lab.open("u", 16)
    lab.hold("u")
    assert [e.position for e in map(lab.pool.explain, ("f0", "u", "f1", "f2"))] == [1, 2, 3, 4]


def test_order_is_by_class_then_share_then_age(make):
    lab = make(device(0), ageing=1e9, half_life=3600.0)
    lab.running("used", 16, owner="ann")
    lab.after(100)
    for name, owner, priority in (
        ("ann-old", "ann", "notebook"),
        ("bob-new", "bob", "notebook"),
        ("ann-batch", "ann", "batch"),
        ("ann-now", "ann", "interactive"),
    ):
        lab.open(name, 16, owner=owner, priority=priority)
        lab.hold(name)
        lab.after(1)
    names = sorted(("ann-old", "bob-new", "ann-batch", "ann-now"), key=lambda n: position(lab, n))
    assert names == ["ann-now", "bob-new", "ann-old", "ann-batch"]


def position(lab: Lab, name: str) -> int:
    found = lab.pool.explain(name).position
    assert found is not None
    return found


def test_age_overtakes_a_class_but_not_a_fair_share(make):
    """After a long wait, a batch job goes before a newer notebook, but only within a fair share.

    The owner of "rich" has used more than a fair share, so the notebook stays ahead of "rich".
    """
    lab = make(device(0), ageing=1.0, half_life=1e6)
    lab.running("busy", 16, owner="ann")
    lab.after(10)
    lab.open("poor", 16, owner="bob", priority="batch")
    lab.hold("poor")
    lab.open("rich", 16, owner="ann", priority="batch")
    lab.hold("rich")
    lab.after(150)
    lab.open("new", 16, owner="cyd", priority="notebook")
    lab.hold("new")
    assert [position(lab, n) for n in ("poor", "new", "rich")] == [1, 2, 3]


def test_usage_does_not_count_if_the_half_life_is_zero(make):
    lab = make(device(0), half_life=0.0)
    lab.running("used", 16, owner="ann")
    lab.after(100)
    lab.open("a", 16, owner="ann")
    lab.hold("a")
    lab.open("b", 16, owner="bob")
    lab.hold("b")
    assert [position(lab, n) for n in ("a", "b")] == [1, 2]


def test_order_changes_with_usage_even_without_an_event(make):
    lab = make(device(0), device(1), half_life=1e6)
    lab.running("a", 16, owner="ann")
    lab.after(200)
    lab.end("a")
    lab.running("x", 16)
    lab.running("b", 16, owner="bob")
    for name, owner in (("wa", "ann"), ("wb", "bob")):
        lab.open(name, 16, owner=owner)
        lab.hold(name)
    assert [position(lab, n) for n in ("wa", "wb")] == [2, 1]
    lab.after(300)
    assert [position(lab, n) for n in ("wa", "wb")] == [1, 2]
    got(lab.end("x"), ev.Attach, session="wa")


# --------------------------------------------------------------------------- starvation


def bound(half: float, ratio: float, classes: float, leases: float) -> float:
    """Return the upper limit of a wait, by the formula in :mod:`jupyter_gpupool.pool.shares`.

    ``ratio`` is U / B, ``classes`` is C, and ``leases`` is L in this formula.
    """
    return max(classes, half * math.log2(1 + ratio)) + leases


@pytest.mark.parametrize("preempt", [frozenset(), PREEMPT_ALL], ids=["cells end", "preemption"])
@pytest.mark.parametrize("devices", [1, 3], ids=["one", "all of three"])
@pytest.mark.parametrize("seed", range(3))
def test_wait_of_the_heaviest_user_in_a_low_class_is_bounded(seed, devices, preempt):
    """One user has used the whole machine, and waits for all of it again, in the lowest class.

    The other users ask in a higher class.
    """
    half, ageing, cell, others = 60.0, 1.0, 5.0, 4
    crowd = Crowd(devices, half_life=half, ageing=ageing, seed=seed, preempt=preempt)
    rich = crowd.add(
        "rich", "rich", cell=lambda: 4000.0 if not rich.done else cell, priority="batch",
        devices=devices,
    )  # fmt: skip
    crowd.run(3999)
    for i in range(others):
        for k in range(devices):
            crowd.add(f"u{i}{k}", f"user{i}", cell=lambda: crowd.rng.uniform(0.5, 1.0) * cell)
    crowd.run(2)
    waits = rich.done + 1
    # In the formula, U / B is (weights of the others / weight of the owner), because "rich" has
    # used as many devices as the others use now. All weights are 1.
    crowd.run(bound(half, others, 100 * ageing, ageing + cell) + cell)
    assert rich.done >= waits, "it starves"


@pytest.mark.parametrize("weight", [0.25, 1.0, 4.0])
def test_bound_of_the_wait_depends_on_the_weight(weight):
    """The group waits at most for the bound plus one cell. A larger weight shortens the wait."""
    half, cell = 60.0, 5.0
    groups = {"rich": Group(weight=weight), "poor": Group()}
    crowd = Crowd(1, half_life=half, ageing=1.0, groups=groups, preempt=frozenset())
    rich = crowd.add("rich", Owner("rich", "rich"), cell=lambda: 4000.0 if not rich.done else 1.0)
    crowd.run(3999.9)
    for i in range(3):
        crowd.add(f"u{i}", Owner(f"user{i}", "poor"), cell=cell)
    crowd.run(1)
    assert rich.done == 1
    crowd.run(bound(half, 1 / weight, 0.0, 1.0 + cell) + 1.0)
    assert rich.done >= 2, "it starves"


def test_heavy_user_runs_again_after_its_usage_has_decayed():
    crowd = Crowd(1, half_life=60.0)
    crowd.add("a", "ann", cell=1000.0)
    crowd.run(1001)
    for i in range(3):
        crowd.add(f"u{i}", f"user{i}", cell=2.0)
    crowd.run(400)
    assert crowd.kernels["a"].done >= 1
    assert crowd.kernels["a"].running or crowd.kernels["a"].computed > 1000


# --------------------------------------------------------------------------- guarantees


def group_session(lab: Lab, name: str, group: str, memory: int, **fields) -> list[ev.Action]:
    lab.open(name, memory, owner=Owner(fields.pop("owner", f"user-{name}"), group), **fields)
    return lab.hold(name)


def test_session_within_a_guarantee_goes_before_a_higher_class(make):
    lab = make(
        device(0), groups={"bio": Group(guarantee=Portion(percent=100))}, preempt=frozenset()
    )
    lab.running("x", 16)
    group_session(lab, "high", "", 16, priority="interactive")
    group_session(lab, "low", "bio", 16, priority="batch")
    assert [position(lab, n) for n in ("low", "high")] == [1, 2]
    assert lab.pool.explain("low").standing.entitled == ("bio",)


def test_guarantee_covers_only_requests_that_fit_in_it(make):
    lab = make(device(0), groups={"bio": Group(guarantee=Portion(bytes=10))})
    lab.running("x", 16)
    lab.open("y", 4)
    lab.hold("y")
    group_session(lab, "a", "bio", 8)
    group_session(lab, "b", "bio", 8)
    group_session(lab, "c", "bio", 2)
    ends = {n: lab.pool.explain(n).standing.entitled for n in "abc"}
    assert ends == {"a": ("bio",), "b": (), "c": ("bio",)}


def test_quota_still_counts_within_a_guarantee(make):
    lab = make(
        device(0),
        groups={"bio": Group(guarantee=Portion(percent=100))},
        quotas={"ann": Quota(leases=1)},
        preempt=PREEMPT_ALL,
    )
    lab.open("a", 4, owner=Owner("ann", "bio"))
    lab.hold("a")
    lab.done("a")
    lab.open("b", 4, owner=Owner("ann", "bio"))
    none(lab.hold("b"), ev.Attach)
    assert lab.pool.explain("b").reason.rule == "quota"


def test_borrower_is_preempted_at_once_for_a_guarantee(make):
    lab = make(groups={"bio": Group(guarantee=Portion(percent=50))}, preempt=PREEMPT_ALL)
    lab.running("x", 16)
    lab.running("y", 16)
    lab.after(2)
    suspend = got(group_session(lab, "a", "bio", 16), ev.Suspend)
    assert suspend.busy
    assert "guaranteed" in suspend.reason
    lab.suspended(suspend.session, (suspend.slices[0].device, 16))
    assert lab.state("a") == "attaching"
    assert lab.state(suspend.session) == "queued"
    assert "guaranteed" in lab.record(suspend.session).preempted
    lab.done("a")
    lab.after(1000)
    assert lab.state("a") == "active", "what is within the guarantee stays"


def test_session_with_a_new_group_is_charged_to_that_group():
    groups = {"a": Group(cap=Portion(bytes=20)), "b": Group()}
    lab = Lab(device(0), device(1), groups=groups, half_life=3600.0)
    lab.running("x", 10, owner=Owner("ann", "a"))
    lab.after(100)
    lab.send(ev.SettingsChanged, settings=lab.pool.settings, groups={"x": "b", "gone": "b"})
    assert lab.record("x").owner == Owner("ann", "b")
    lab.after(100)
    used = lab.pool.usage(lab.now).groups
    assert used["b"].memory == pytest.approx(used["a"].memory, rel=0.1)
    assert not lab.pool.self_check()
