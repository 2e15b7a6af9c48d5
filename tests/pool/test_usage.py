# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
"""The usage of users and groups: device-seconds and their decay, daily budgets, and restarts."""

from __future__ import annotations

import math
import random

import pytest

from jupyter_gpupool.pool import events as ev
from jupyter_gpupool.pool.groups import DAY, Daily, Group, Portion, Tree, path
from jupyter_gpupool.pool.metering import LeaseInUse, Meters
from jupyter_gpupool.pool.model import Owner, PoolSettings, Quota, Usage

from .builders import Lab, all_of, device, got, none

HALF = 100.0


def used(lab: Lab, name: str):
    return lab.pool.usage(lab.now).users[name]


def test_memory_and_compute_are_counted_in_device_seconds(make):
    lab = make(device(0), half_life=1e12)
    lab.running("a", 4, owner="ann")
    lab.after(10)
    found = used(lab, "ann")
    assert found.memory == pytest.approx(10 * 4 / 16)
    assert found.compute == pytest.approx(10)
    assert found.dominant == found.compute
    lab.drop("a")
    lab.after(10)
    found = used(lab, "ann")
    assert found.memory == pytest.approx(20 * 4 / 16)
    assert found.compute == pytest.approx(10), "an idle session computes nothing"
    assert found.today == pytest.approx(10 + 10 * 4 / 16)


def test_active_sessions_of_a_device_divide_its_compute(make):
    lab = make(device(0), half_life=1e12)
    lab.running("a", 4, owner="ann", compute=30)
    lab.running("b", 4, owner="bob", compute=90)
    lab.after(8)
    assert used(lab, "ann").compute == pytest.approx(2)
    assert used(lab, "bob").compute == pytest.approx(6)
    lab.drop("b")
    lab.after(4)
    assert used(lab, "ann").compute == pytest.approx(6), "alone it has all of it"


def test_usage_counts_half_after_its_half_life(make):
    lab = make(device(0), half_life=HALF)
    lab.running("a", 16, owner="ann")
    lab.after(1)
    lab.end("a")
    before = used(lab, "ann").dominant
    lab.after(HALF)
    assert used(lab, "ann").dominant == pytest.approx(before / 2)
    lab.after(20 * HALF)
    assert used(lab, "ann").dominant < 1e-5


def test_usage_of_endless_work_approaches_a_limit(make):
    lab = make(device(0), half_life=HALF)
    lab.running("a", 16, owner="ann")
    lab.after(30 * HALF)
    assert used(lab, "ann").dominant == pytest.approx(HALF / math.log(2))


def test_groups_have_the_usage_of_their_members(make):
    lab = make(groups={"lab": Group(), "bio": Group(parent="lab")}, half_life=1e12)
    open_in(lab, "a", "ann", "bio", 16)
    open_in(lab, "b", "bob", "lab", 16)
    lab.after(5)
    groups = lab.pool.usage(lab.now).groups
    assert groups["bio"].dominant == pytest.approx(5)
    assert groups["lab"].dominant == pytest.approx(10)


def test_usage_survives_a_restart(make):
    lab = make(device(0), half_life=HALF)
    lab.running("a", 16, owner="ann")
    lab.after(10)
    before = lab.pool.usage(lab.now)
    other = make(device(0), half_life=HALF)
    other.now = lab.now + HALF
    other.send(ev.UsageRecovered, users=before.users, groups=before.groups)
    found = used(other, "ann")
    assert found.dominant == pytest.approx(before.users["ann"].dominant / 2)
    assert found.today == pytest.approx(10)


def test_memory_of_a_lease_counts_while_no_broker_runs(make):
    lab = make(device(0), half_life=HALF)
    lab.running("a", 8, owner="ann")
    lab.after(10)
    before, since = lab.pool.usage(lab.now), lab.now
    other = make(device(0), half_life=HALF)
    other.now = lab.now + 4
    other.send(ev.Recovered, records=(lab.record("a"),))
    other.send(ev.UsageRecovered, users=before.users, since=since)
    found = used(other, "ann")
    assert found.today == pytest.approx(10 + 4 * 8 / 16), "alone, it had all of the compute before"
    other.after(1)
    assert used(other, "ann").today == pytest.approx(10 + 4 * 8 / 16 + 1)


def test_usage_saved_before_a_restart_counts_once(make):
    other = make(device(0), half_life=HALF)
    lab = make(device(0), half_life=HALF)
    lab.now = 7200.0
    lab.running("a", 16, owner="ann")
    old = {"ann": Usage(memory=1.0, today=3.0, at=lab.now - 3600)}
    other.now = lab.now + 2
    other.send(ev.Recovered, records=(lab.record("a"),))
    other.send(ev.UsageRecovered, users=old, since=lab.now)
    assert used(other, "ann").today == pytest.approx(3 + 2)


def test_recent_usage_lists_only_users_with_usage(make):
    lab = make(device(0), half_life=HALF)
    lab.running("a", 8, owner="ann")
    lab.end("a")
    lab.after(5)
    since = lab.now
    lab.running("b", 8, owner="bob")
    assert set(lab.pool.usage(lab.now, since).users) == {"bob"}
    lab.after(5)
    assert set(lab.pool.usage(lab.now, lab.now).users) == {"bob"}, "it has a lease"


def test_usage_continues_after_a_change_of_settings(make):
    lab = make(device(0), half_life=1e12)
    open_in(lab, "a", "ann", "bio", 16)
    lab.after(10)
    lab.send(
        ev.SettingsChanged,
        settings=lab.pool.settings.__class__(
            half_life=1e12, groups={"bio": Group()}, host_memory=1000
        ),
    )
    lab.after(5)
    found = lab.pool.usage(lab.now)
    assert found.users["ann"].dominant == pytest.approx(15)
    assert found.groups["bio"].dominant == pytest.approx(5), "counted since there is such a group"


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("portion", "size"),
    [
        (Portion(bytes=7), 7),
        (Portion(devices=1.5), 30),
        (Portion(percent=25), 15),
        (Portion(percent=0), 0),
    ],
)
def test_size_of_a_portion_depends_on_the_devices(portion, size):
    assert portion.of([30, 20, 10]) == size
    assert Portion(devices=2).of([]) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        dict,
        lambda: {"bytes": 1, "percent": 1.0},
        lambda: {"bytes": -1},
        lambda: {"percent": 101.0},
        lambda: {"devices": math.nan},
        lambda: {"devices": math.inf},
    ],
)
def test_invalid_portion_is_refused(wrong):
    with pytest.raises(ValueError, match=r"\."):
        Portion(**wrong())


def test_invalid_weights_and_budgets_are_refused():
    for wrong in (
        lambda: Group(weight=0.0),
        lambda: Group(weight=math.nan),
        lambda: Daily(-1.0),
        lambda: Daily(1.0, renews=DAY),
        lambda: Daily(1.0, rule="other"),
        lambda: Daily(1.0, then="other"),
    ):
        with pytest.raises(ValueError, match=r"\."):
            wrong()


def test_path_of_a_group_ends_at_a_cycle_or_an_unknown_parent():
    groups = {"a": Group(parent="b"), "b": Group(parent="a"), "c": Group(parent="none")}
    assert path(groups, "a") == ("b", "a")
    assert path(groups, "c") == ("c",)
    assert path(groups, "none") == ()
    assert Tree(groups).path("a") == ("b", "a")


# --------------------------------------------------------------------------- budgets


def open_in(lab: Lab, name: str, owner: str, group: str, memory: int = 10, hold: bool = True):
    lab.open(name, memory, owner=Owner(owner, group))
    if hold:
        actions = lab.hold(name)
        if all_of(actions, ev.Attach, session=name):
            lab.done(name)
        return actions
    return []


def budget(seconds: float, **rules):
    return {"quotas": {"ann": Quota(daily=Daily(seconds, **rules))}}


def budget_of(group: str, daily: Daily):
    if group:
        return {"groups": {group: Group(daily=daily)}}
    return {"quotas": {"ann": Quota(daily=daily)}}


def test_new_lease_is_refused_when_the_budget_is_used_up(make):
    lab = make(device(0), **budget(100.0, then="refuse"))
    lab.running("a", 16, owner="ann")
    lab.after(200)
    assert lab.state("a") == "active", "it goes on: nothing else waits"
    lab.drop("a")
    lab.release("a")
    lab.suspended("a", ("G0", 16))
    refusal = got(lab.hold("a"), ev.HoldRefused).refusal
    assert refusal.code == "budget"
    assert refusal.details["renews_at"] == DAY
    assert "00:00 UTC" in refusal.next_step
    lab.after(DAY - lab.now)
    got(lab.hold("a"), ev.Attach, session="a")


@pytest.mark.parametrize("group", ["", "bio"])
def test_refusal_names_when_gpu_seconds_can_come_back(make, group):
    daily = Daily(864.0, rule="refill", then="refuse")
    lab = make(device(0), **budget_of(group, daily))
    open_in(lab, "a", "ann", group, 8)
    lab.send(ev.ClockSet, ahead=600.0)
    lab.after(1000)
    lab.open("b", 8, owner=Owner("ann", group))
    refusal = got(lab.hold("b"), ev.HoldRefused).refusal
    who = "Kernels of the group bio" if group else "Your other kernels"
    assert refusal.next_step == (
        f"{who} use GPU-seconds as fast as the budget refills. If these kernels stop now, there "
        "are more GPU-seconds in 60 min, at 01:26 UTC."
    )
    assert refusal.details["renews_at"] is None
    assert refusal.details["soonest"] == pytest.approx(lab.now + 600 + DAY / 24)
    lab.end("a")
    assert got(lab.hold("b"), ev.HoldRefused).refusal.next_step == (
        "Try again later: there are more GPU-seconds in 60 min, at 01:26 UTC."
    )


@pytest.mark.parametrize("group", ["", "bio"])
@pytest.mark.parametrize("rule", ["window", "refill"])
def test_refusal_for_a_budget_of_zero_names_no_renewal(make, rule, group):
    daily = Daily(0.0, rule=rule, then="refuse")
    lab = make(device(0), **budget_of(group, daily))
    lab.open("a", 8, owner=Owner("ann", group))
    refusal = got(lab.hold("a"), ev.HoldRefused).refusal
    who = "The group bio gets" if group else "You get"
    option = "groups" if group else "quotas"
    assert refusal.message == (f"{who} no GPU-seconds: the daily budget is 0 (c.GPUPool.{option}).")
    assert "UTC" not in refusal.next_step
    assert refusal.details["soonest"] is None
    lines = lab.pool.standing(Owner("ann", group), lab.now)[1]
    kernels = "its kernels" if group else "your kernels"
    assert lines[-1].endswith(f"no GPU-seconds: {kernels} get no new slice.")


def test_rule_stop_refuses_a_hold_if_the_budget_is_zero(make):
    lab = make(device(0), **budget(0.0, then="stop"))
    lab.open("a", 8, owner="ann")
    refusal = got(lab.hold("a"), ev.HoldRefused).refusal
    assert refusal.message.startswith("You get no GPU-seconds")


def test_session_with_a_spent_budget_borrows_free_memory(make):
    lab = make(device(0), **budget(100.0), preempt=frozenset({"guarantee"}))
    lab.running("a", 16, owner="ann")
    lab.after(150)
    assert lab.state("a") == "active"
    lab.open("b", 16, owner="bob", priority="batch")
    suspend = got(lab.hold("b"), ev.Suspend, session="a")
    assert suspend.busy
    lab.suspended("a", ("G0", 16))
    assert lab.state("b") == "attaching"
    assert lab.state("a") == "queued"
    lab.done("b")
    lab.after(50)
    assert lab.state("a") == "queued", "it preempts nothing"
    lab.drop("b")
    lab.after(1)
    got(lab.past[-8:], ev.Suspend, session="b")


def test_reason_of_a_preemption_names_the_spent_budget(make):
    lab = make(device(0), **budget(100.0), preempt=frozenset({"guarantee"}))
    lab.running("a", 16, owner="ann")
    lab.after(150)
    lab.open("b", 16, owner="bob")
    lab.hold("b")
    assert got(lab.past, ev.Suspend, session="a").busy
    assert lab.pool.record("a").preempted.startswith("its GPU-seconds of today are used up")


def test_standing_says_how_much_of_the_budget_is_left(make):
    lab = make(device(0), **budget(100.0))
    lab.running("a", 16, owner="ann")
    found, lines = lab.pool.standing(Owner("ann"), lab.now + 30)
    (left,) = found.budgets
    assert (left.used, left.spent) == (pytest.approx(30), False)
    assert "".join(lines) == (
        "You have 70 of 100 GPU-seconds left today; at the present rate, they are used up in 70 s. "
        "From then on your kernels get only what no other kernel wants."
    )


@pytest.mark.parametrize(
    ("then", "consequence"),
    [("refuse", "get no new slice"), ("borrow", "get only what no other kernel wants")],
)
def test_text_of_a_spent_budget_names_time_and_consequence(make, then, consequence):
    lab = make(device(0), **budget(100.0, then=then, rule="refill"))
    lab.running("a", 16, owner="ann")
    lab.after(150)
    assert lab.state("a") == "active"
    _, lines = lab.pool.standing(Owner("ann"), lab.now)
    assert "".join(lines) == (
        "You have 0 of 100 GPU-seconds left today; there are more when your kernels use less, "
        f"in 60 min at the earliest. Until then your kernels {consequence}."
    )


def test_lone_session_stops_at_the_end_of_its_budget(make):
    lab = make(device(0), **budget(100.0, then="stop"))
    lab.running("a", 16, owner="ann")
    lab.after(99)
    assert lab.state("a") == "active"
    suspend = got(lab.after(2), ev.Suspend, session="a")
    assert suspend.busy
    lab.suspended("a", ("G0", 16))
    assert lab.pool.explain("a").reason.rule == "budget"
    assert "GPU-seconds of today" in lab.reason("a")
    got(lab.after(DAY - lab.now + 1), ev.Attach, session="a")


def test_session_runs_again_when_a_part_of_its_budget_is_back(make):
    lab = make(device(0), **budget(8640.0, rule="refill", then="stop"))
    lab.running("a", 16, owner="ann")
    lab.after(10000)
    got(lab.past, ev.Suspend, session="a")
    at = next(a.now for a in lab.past if isinstance(a, ev.StateChanged) and a.new == "detaching")
    assert at == pytest.approx(8640 / 0.9, rel=0.01), "a tenth came back meanwhile"
    lab.suspended("a", ("G0", 16))
    began = lab.now
    while lab.state("a") == "queued":
        lab.after(60)
    assert lab.now - began == pytest.approx(8640 / 24 / 0.1, abs=120)


def test_members_of_a_group_share_its_budget(make):
    groups = {"bio": Group(daily=Daily(100.0, then="refuse"))}
    lab = make(groups=groups)
    open_in(lab, "a", "ann", "bio", 16)
    open_in(lab, "b", "bob", "bio", 16)
    lab.after(51)
    lab.open("c", 4, owner=Owner("cyd", "bio"))
    refusal = got(lab.hold("c"), ev.HoldRefused).refusal
    assert refusal.message.startswith("The group bio")
    lab.open("d", 4, owner=Owner("dan"))
    none(lab.hold("d"), ev.HoldRefused)


# --------------------------------------------------------------------------- caps


def test_leases_of_a_group_together_stay_within_its_cap(make):
    lab = make(groups={"bio": Group(cap=Portion(bytes=20))})
    open_in(lab, "a", "ann", "bio", 12)
    open_in(lab, "b", "bob", "bio", 10)
    assert lab.state("b") == "queued"
    found = lab.pool.explain("b")
    assert (found.reason.rule, found.reason.group, found.reason.most) == ("cap", "bio", 20)
    assert [h.session for h in found.holders] == ["a"]
    open_in(lab, "c", "cyd", "bio", 4)
    assert lab.pool.explain("c").reason.rule == "behind-group"
    lab.drop("a")
    lab.suspended("a", ("G0", 12))
    assert lab.state("b") == "attaching"
    assert lab.state("c") == "attaching"


def test_refusal_of_a_request_above_the_cap_names_the_group(make):
    lab = make(groups={"lab": Group(cap=Portion(percent=25)), "bio": Group(parent="lab")})
    actions = lab.open("a", 10, owner=Owner("ann", "bio"), rid="r")
    refusal = got(actions, ev.Answer).refusal
    assert refusal.code == "over-quota"
    assert "your group lab may have at most 8 B" in refusal.message


def test_growth_stops_at_the_cap(make):
    lab = make(device(0), groups={"bio": Group(cap=Portion(bytes=8))})
    lab.open("a", 6, owner=Owner("ann", "bio"), limit=16)
    lab.hold("a")
    lab.done("a")
    assert got(lab.grow("a", 2), ev.Answer).refusal is None
    refusal = got(lab.grow("a", 1), ev.Answer).refusal
    assert refusal.code == "quota"
    assert "group bio" in refusal.message


@pytest.mark.parametrize(
    ("waiter", "memory", "why"),
    [
        ("bob", 16, "your group bio may have 20 B at once, and another kernel waits for what"),
        ("ann", 4, "another kernel of yours waits for what is left of your quota."),
    ],
)
def test_refused_growth_says_what_the_waiting_kernel_lacks(make, waiter, memory, why):
    lab = make(groups={"bio": Group(cap=Portion(bytes=20))}, quotas={"ann": Quota(leases=1)})
    lab.open("a", 6, owner=Owner("ann", "bio"), limit=16)
    lab.hold("a")
    lab.done("a")
    open_in(lab, "b", waiter, "bio", memory)
    assert lab.state("b") == "queued"
    refusal = got(lab.grow("a", 1), ev.Answer).refusal
    assert refusal.code == "quota"
    assert why in refusal.message


def test_usage_rates_are_zero_after_the_last_lease():
    rng, rules, meters = random.Random(3), PoolSettings(), Meters()
    leases: dict[str, LeaseInUse] = {}
    for now in range(1, 2000):
        name = f"s{rng.randrange(12)}"
        if rng.random() < 0.3 and name in leases:
            del leases[name]
            meters.drop(name)
        else:
            memory = {f"G{i}": rng.random() for i in rng.sample(range(3), rng.randint(1, 2))}
            owner = Owner(f"u{int(name[1:]) % 2}")
            leases[name] = LeaseInUse(owner, rng.random() < 0.5, rng.randint(1, 100), memory)
            meters.put(name, leases[name])
        meters.settle(float(now), rules)
        for user in ("u0", "u1"):
            account = meters.users.get(user)
            mine = [x for x in leases.values() if x.owner.name == user]
            rate = math.fsum(part for x in mine for part in x.memory.values())
            compute = 0.0
            for x in mine:
                for uuid in x.memory if x.active else ():
                    there = [y.compute for y in leases.values() if y.active and uuid in y.memory]
                    compute += x.compute / sum(there)
            assert account is None or account.memory_rate == pytest.approx(rate, abs=1e-12)
            assert account is None or account.compute_rate == pytest.approx(compute, abs=1e-12)
    for name in leases:
        meters.drop(name)
    meters.settle(2000.0, rules)
    for account in meters.users.values():
        assert (account.memory_rate, account.compute_rate, account.parts) == (0.0, 0.0, {})


# --------------------------------------------------------------------------- the time of day

#: A time at 22:00. The budget renews at the following midnight.
LATE = 20 * DAY + 22 * 3600.0


def spender(make, daily: Daily) -> Lab:
    """Return a lab in which ann has used 1,000 GPU-seconds, from 22:00 on."""
    lab = make(device(0), half_life=HALF, quotas={"ann": Quota(daily=daily)})
    lab.now = LATE
    lab.running("a", 16, owner="ann")
    lab.after(1000)
    lab.end("a")
    return lab


def left(lab: Lab) -> float:
    (budget,) = lab.pool.standing(Owner("ann"), lab.now)[0].budgets
    return budget.daily.seconds - budget.used


def test_budget_renews_when_the_clock_is_set_past_midnight(make):
    lab = spender(make, Daily(1000.0))
    assert used(lab, "ann").spent
    lab.send(ev.ClockSet, ahead=3600.0)
    assert left(lab) == pytest.approx(0), "23 o'clock is the same day"
    lab.send(ev.ClockSet, ahead=7200.0)
    assert left(lab) == pytest.approx(1000), "it is past midnight"
    lab.running("b", 16, owner="ann")
    lab.after(500)
    assert left(lab) == pytest.approx(500)


def test_budget_renews_at_midnight_of_the_corrected_clock(make):
    lab = spender(make, Daily(1000.0))
    lab.send(ev.ClockSet, ahead=3600.0)
    midnight = LATE + 3600
    assert lab.pool.standing(Owner("ann"), lab.now)[0].budgets[0].until == pytest.approx(midnight)
    lab.now = midnight - 1
    assert used(lab, "ann").spent
    lab.now = midnight
    assert not used(lab, "ann").spent


def test_clock_that_is_set_back_renews_no_budget(make):
    lab = spender(make, Daily(1000.0))
    for back in (-3600.0, -30 * 3600.0, -3000 * DAY):
        lab.send(ev.ClockSet, ahead=back)
        assert left(lab) == pytest.approx(0)
    # The last step set the clock back to the same time of another day. So the next midnight is
    # still 2 h after ``LATE``.
    lab.now = LATE + 2 * 3600 - 1
    assert left(lab) == pytest.approx(0)
    lab.now += 1
    assert left(lab) == pytest.approx(1000)


def test_sleep_of_the_machine_refills_budgets_and_decays_usage(make):
    lab = spender(make, Daily(2000.0, rule="refill"))
    before, had = used(lab, "ann"), left(lab)
    lab.send(ev.ClockSet, ahead=HALF)
    after = used(lab, "ann")
    assert after.dominant == pytest.approx(before.dominant / 2)
    assert left(lab) == pytest.approx(had + HALF * 2000 / DAY)
    lab.send(ev.ClockSet, ahead=-5000.0)
    assert left(lab) == pytest.approx(had + HALF * 2000 / DAY)
    lab.send(ev.ClockSet, ahead=DAY)
    assert left(lab) == pytest.approx(2000)


def test_clock_correction_charges_no_usage(make):
    lab = make(device(0), half_life=1e12, groups={"bio": Group(daily=Daily(DAY))})
    open_in(lab, "a", "ann", "bio", 16)
    lab.after(10)
    lab.send(ev.ClockSet, ahead=5 * DAY + 1)
    lab.after(10)
    found = lab.pool.usage(lab.now)
    assert found.users["ann"].dominant == found.groups["bio"].dominant == pytest.approx(20)
    assert lab.record("a").state == "active"


# --------------------------------------------------------------------------- other machines


def queue(lab: Lab) -> list[str]:
    places = {v.queue_position: v.record.id for v in lab.pool.view(lab.now).sessions}
    return [places[n] for n in sorted(p for p in places if p is not None)]


def test_usage_on_other_machines_changes_the_queue_order(make):
    lab = make(device(0), half_life=HALF)
    lab.running("x", 16, owner="eve")
    lab.open("a", 16, owner="ann")
    lab.hold("a")
    lab.open("b", 16, owner="bob")
    lab.hold("b")
    assert queue(lab) == ["a", "b"]
    lab.send(ev.UsedElsewhere, users={"ann": 50.0})
    assert queue(lab) == ["b", "a"]
    assert used(lab, "ann").dominant == 50
    assert used(lab, "ann").here == 0
    lab.send(ev.UsedElsewhere)
    assert queue(lab) == ["a", "b"]


def test_usage_on_other_machines_decays_and_is_replaced(make):
    lab = make(device(0), half_life=HALF, groups={"bio": Group()})
    lab.send(ev.UsedElsewhere, users={"ann": 64.0}, groups={"bio": 64.0})
    lab.after(HALF)
    usage = lab.pool.usage(lab.now)
    assert usage.users["ann"].dominant == pytest.approx(32)
    assert usage.groups["bio"].dominant == pytest.approx(32)
    lab.send(ev.ClockSet, ahead=HALF)
    assert used(lab, "ann").dominant == pytest.approx(16)
    lab.send(ev.UsedElsewhere, users={"ann": 3.0})
    usage = lab.pool.usage(lab.now)
    assert usage.users["ann"].dominant == 3
    assert usage.groups["bio"].dominant == 0


def test_equal_usage_on_other_machines_replaces_a_decayed_figure(make):
    lab = make(device(0), half_life=HALF)
    lab.send(ev.UsedElsewhere, users={"ann": 64.0})
    lab.after(HALF)
    lab.send(ev.UsedElsewhere, users={"ann": 64.0})
    assert used(lab, "ann").dominant == 64
