# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""Quotas, caps and budgets of which kernels on other machines already use a part."""

from __future__ import annotations

import dataclasses

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import DAY, Daily
from jupyter_gpupool.pool.model import Group, Owner, Portion, Quota

from .builders import all_of, device, got

ANN = Owner("ann", "lab")


def attaches(actions):
    return [action.session for action in all_of(actions, ev.Attach)]


def elsewhere(lab, owner=(0, 0, 0), group=0, **rules):
    """Tell the pool what other machines use of ann's quota and of her group's cap."""
    found = dataclasses.replace(
        lab.pool.settings,
        elsewhere={"ann": owner} if any(owner) else {},
        elsewhere_groups={"lab": group} if group else {},
        **rules,
    )
    return lab.send(ev.SettingsChanged, settings=found)


@pytest.fixture
def lab(make):
    return make(
        device(0, 32), quotas={"ann": Quota(memory=16, devices=2, leases=2)},
        groups={"lab": Group(cap=Portion(bytes=20))},
    )  # fmt: skip


@pytest.mark.parametrize("held", [(10, 0, 0), (0, 2, 0), (0, 0, 2)])
def test_use_on_other_machines_makes_a_session_wait(lab, held):
    elsewhere(lab, held)
    lab.open("a", 8, owner=ANN)
    assert attaches(lab.hold("a")) == []
    # Even if other machines use the whole quota, the pool does not refuse the request. The session
    # still waits.
    elsewhere(lab, (16, 2, 2))
    assert lab.state("a") == "queued"
    assert attaches(elsewhere(lab)) == ["a"]


def test_pool_refuses_only_a_request_above_the_whole_quota(lab):
    elsewhere(lab, (16, 0, 0))
    assert all_of(lab.open("a", 16, owner=ANN), ev.Answer) == []
    assert got(lab.open("b", 17, owner=ANN), ev.Answer).refusal.code == "over-quota"


def test_the_reason_names_other_machines(lab):
    elsewhere(lab, (10, 0, 0))
    lab.open("a", 8, owner=ANN)
    lab.hold("a")
    rest = "and kernels on other machines use the rest"
    none = "your kernels on this machine use none of your quota of 16 B"
    assert lab.reason("a") == f"{none}, {rest}"
    lab.end("a")
    elsewhere(lab, group=15)
    lab.open("b", 8, owner=ANN)
    lab.hold("b")
    cap = "the cap of your group lab (20 B)"
    assert lab.reason("b") == f"kernels on this machine use none of {cap}, {rest}"


def test_the_reason_names_other_machines_for_a_shared_limit(lab):
    lab.running("a", 12, owner=ANN)
    elsewhere(lab, (0, 0, 1))
    lab.open("b", 8, owner=ANN)
    lab.hold("b")
    assert lab.reason("b") == "your quota of 16 B is in use by your other kernel"
    elsewhere(lab, (1, 0, 1))
    assert "kernels on other machines use the rest" in lab.reason("b")


def test_more_use_on_other_machines_suspends_no_lease_here(lab):
    lab.running("a", 8, owner=ANN)
    assert elsewhere(lab, (16, 2, 2), 20) == []
    assert lab.state("a") == "active"


def test_growth_gets_only_quota_that_is_unused_elsewhere(lab):
    lab.running("a", 8, owner=ANN, limit=16)
    elsewhere(lab, (6, 0, 0))
    refusal = got(lab.send(ev.GrowAsked, session="a", device="G0", bytes=4, rid="r"), ev.Answer)
    assert refusal.refusal.code == "quota"
    assert refusal.refusal.details["left"] == 2
    elsewhere(lab, group=11)
    refusal = got(lab.send(ev.GrowAsked, session="a", device="G0", bytes=4, rid="r"), ev.Answer)
    assert refusal.refusal.details["left"] == 1


def test_self_check_accepts_use_on_other_machines(lab):
    lab.running("a", 8, owner=ANN)
    elsewhere(lab, (16, 2, 2), 20)
    assert lab.pool.self_check() == []


# --------------------------------------------------------------------------- GPU-seconds of a day


def budget(lab, here, *, more=True, then="stop", seconds=100.0, refill=None, **rules):
    """Set how many GPU-seconds of ann's daily budget this machine may use.

    If ``refill`` is given, the budget refills continuously: on this machine, by ``refill``
    GPU-seconds per day.
    """
    rule = {} if refill is None else {"rule": "refill", "refill_here": refill}
    daily = Daily(seconds, then=then, here=here, more_elsewhere=more, **rule)
    found = dataclasses.replace(
        lab.pool.settings, quotas={"ann": Quota(daily=daily)}, groups={}, **rules
    )
    return lab.send(ev.SettingsChanged, settings=found)


@pytest.mark.parametrize("then", ["stop", "refuse"])
def test_session_waits_until_its_machine_gets_gpu_seconds(lab, then):
    budget(lab, 0.0, then=then)
    lab.open("a", 8, owner=ANN)
    assert attaches(lab.hold("a")) == []
    assert lab.reason("a").startswith(
        "you used up this machine's part of today's GPU-seconds, and kernels on other "
        "machines use the rest; there are more in "
    )
    budget(lab, 0.0, then=then, elsewhere_reason="the ledger is silent")
    assert "the ledger is silent" in lab.reason("a")
    assert attaches(budget(lab, 20.0, then=then)) == ["a"]


def test_hold_is_refused_if_all_machines_used_up_the_budget(lab):
    budget(lab, 0.0, then="refuse")
    lab.open("a", 8, owner=ANN)
    lab.hold("a")
    refused = got(budget(lab, 0.0, then="refuse", more=False), ev.HoldRefused).refusal
    assert refused.code == "budget"
    assert refused.message == "You have used the 100 GPU-seconds of today."
    assert refused.details["used"] is None


def test_running_session_stops_when_this_machines_part_is_spent(lab):
    budget(lab, 20.0)
    lab.running("a", 8, owner=ANN)
    lab.after(19)
    assert lab.state("a") == "active"
    lab.after(2)
    assert lab.state("a") != "active"
    standing, lines = lab.pool.standing(ANN, lab.now)
    assert [b.spent for b in standing.budgets] == [True]
    assert lines[-1].startswith(
        "You have 0 GPU-seconds left today on this machine (the budget for all machines is 100)"
    )


def test_session_with_a_spent_part_may_borrow_free_memory(lab):
    budget(lab, 0.0, then="borrow")
    lab.open("a", 8, owner=ANN)
    assert attaches(lab.hold("a")) == ["a"]


def test_reason_names_no_time_if_other_machines_get_the_refill(lab):
    budget(lab, 0.0, refill=0.0)
    lab.open("a", 8, owner=ANN)
    assert attaches(lab.hold("a")) == []
    assert lab.reason("a") == (
        "you used up this machine's part of today's GPU-seconds, and kernels on other "
        "machines use the rest"
    )
    assert attaches(budget(lab, 20.0, refill=0.0)) == ["a"]


def test_refusal_names_no_time_if_other_machines_get_the_refill(lab):
    budget(lab, 0.0, refill=0.0, then="refuse")
    lab.open("a", 8, owner=ANN)
    lab.hold("a")
    spent = budget(lab, 0.0, refill=0.0, then="refuse", more=False)
    refused = got(spent, ev.HoldRefused).refusal
    assert refused.next_step == ("Try again later: this budget now refills on other machines only.")
    assert refused.details["soonest"] is None


def test_a_budget_refills_here_at_the_rate_of_this_machines_part(lab):
    budget(lab, 1000.0, seconds=DAY, refill=DAY / 2)
    lab.running("a", 32, owner=ANN)
    lab.after(40)
    # In each second, the session uses one GPU-second, and the budget refills half a GPU-second.
    assert lab.pool.usage(lab.now).users["ann"].today == pytest.approx(20, abs=1)
    before = lab.pool.usage(lab.now).users["ann"].today
    lab.send(ev.SessionEnded, session="a", reason="closed")
    assert lab.pool.usage(lab.now + 4).users["ann"].today == pytest.approx(before - 2, abs=0.1)


def test_budget_is_not_spent_after_its_part_has_become_larger(lab):
    def is_spent():
        standing, _ = lab.pool.standing(ANN, lab.now)
        return [budget.spent for budget in standing.budgets] == [True]

    budget(lab, 20_000.0, seconds=36_000.0, refill=0.0)
    lab.running("a", 32, owner=ANN)
    lab.after(20_100)
    assert is_spent()
    budget(lab, 20_360.0, seconds=36_000.0, refill=36_000.0)
    assert not is_spent()


def test_use_beyond_this_machines_part_is_not_charged(lab):
    budget(lab, 10.0, seconds=DAY, refill=0.0, then="borrow")
    lab.running("a", 32, owner=ANN)
    lab.after(100)
    assert lab.state("a") == "active"
    assert lab.pool.usage(lab.now).users["ann"].today == pytest.approx(10, abs=0.1)


# --------------------------------------------------------------------------- guarantees


def test_group_has_only_this_machines_part_of_its_guarantee(lab):
    group = Group(guarantee=Portion(bytes=12), guarantee_here=4)
    rules = dataclasses.replace(lab.pool.settings, quotas={}, groups={"lab": group})
    lab.send(ev.SettingsChanged, settings=rules)
    lab.open("a", 8, owner=ANN)
    standing, lines = lab.pool.standing(ANN, lab.now)
    assert [tuple(row) for row in standing.guarantees] == [("lab", 0, 4, 12)]
    shown = "Group lab has 0 B, below its guaranteed 4 B on this machine (12 B on all machines)."
    assert shown in lines
