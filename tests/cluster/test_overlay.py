# Copyright (c) jupyter_gpupool developers.
# Distributed under the terms of the Modified BSD License.
from __future__ import annotations

import math

from jupyter_gpupool.cluster.messages import Key
from jupyter_gpupool.cluster.overlay import (
    DRAINS,
    SILENT,
    budgets_of,
    guarantees_of,
    keys_of,
    limits_of,
    overlay,
    refills_of,
    seconds_used,
    windows,
)
from jupyter_gpupool.pool.groups import DAY, Daily, PoolUsage, Tree, Usage
from jupyter_gpupool.pool.model import Group, Owner, PoolSettings, Portion, Quota

RULES = PoolSettings(
    quotas={"*": Quota(leases=2), "ada": Quota(memory=8, devices=4), "root": Quota()},
    groups={"lab": Group(cap=Portion(bytes=10)), "bio": Group("lab")},
)


def test_the_unlent_part_of_a_limit_counts_as_used_elsewhere():
    lent = {Key("user", "ada", "memory"): 5, Key("user", "bob", "leases"): 1}
    found = overlay(RULES, ["bob"], lambda key: lent.get(key, 0), connected=True, drains=False)
    assert found.elsewhere.get("ada") == (3, 4, 0)
    assert found.elsewhere.get("bob") == (0, 0, 1)
    assert found.elsewhere_groups == {"lab": 10}


def test_a_user_without_a_request_has_no_part_yet():
    found = overlay(RULES, [], lambda key: 0, connected=True, drains=False)
    assert found.elsewhere.get("eve") == (0, 0, 2)
    assert found.elsewhere.get("root") is None


def test_a_limit_lent_here_completely_has_no_part_elsewhere():
    found = overlay(RULES, ["bob"], lambda key: 100, connected=True, drains=False)
    assert found.elsewhere.get("bob") is None
    assert found.elsewhere_groups == {}


def test_equal_budgets_give_equal_rules():
    first, second = (
        overlay(RULES, ["bob"], lambda key: 1, connected=True, drains=False) for _ in range(2)
    )
    assert first == second
    assert first != overlay(RULES, ["bob"], lambda key: 0, connected=True, drains=False)
    assert (
        overlay(RULES, [], lambda key: 1, connected=False, drains=False).elsewhere_reason == SILENT
    )
    assert (
        overlay(RULES, [], lambda key: 0, connected=False, drains=True).elsewhere_reason == DRAINS
    )


def test_a_slice_counts_for_its_user_and_all_groups_above():
    assert keys_of(RULES, Owner("ada", "bio")) == [
        Key("user", "ada", "memory"), Key("user", "ada", "devices"), Key("group", "lab", "memory"),
    ]  # fmt: skip
    assert limits_of(RULES)["user"]["*"] == {"leases": 2}
    assert limits_of(RULES)["group"] == {"lab": {"memory": 10}}


# --------------------------------------------------------------------------- GPU-seconds of a day

#: Noon UTC on 2026-11-23.
NOON = 1795435200.0
NIGHT = Daily(600.5, then="stop", renews=18 * 3600.0)
DAILY = PoolSettings(
    quotas={"*": Quota(daily=Daily(60)), "ada": Quota(daily=Daily(90, rule="refill"))},
    groups={"lab": Group(daily=NIGHT), "bio": Group("lab")},
)
BOB = Key("user", "bob", "gpu-seconds", "2026-11-23")
LAB = Key("group", "lab", "gpu-seconds", "2026-11-22")
ADA, REFILL = Key("user", "ada", "gpu-seconds"), Key("user", "ada", "refill")


def shared(used_up=(), **lent):
    most = {BOB: lent.get("bob", 0), LAB: lent.get("lab", 0), ADA: 30, REFILL: 45}
    return overlay(
        DAILY, ["bob"], lambda key: most.get(key, 0), connected=True, drains=False,
        now=NOON, used_up=used_up,
    )  # fmt: skip


def test_a_budget_counts_for_the_day_on_which_its_window_began():
    assert budgets_of(DAILY, Owner("bob", "bio"), NOON) == {BOB: Daily(60), LAB: NIGHT}
    assert [*budgets_of(DAILY, Owner("ada"), NOON)] == [ADA]
    later = budgets_of(DAILY, Owner("bob", "bio"), NOON + DAY / 2)
    assert [key.window for key in later] == ["2026-11-24", "2026-11-23"]
    # A budget that refills counts GPU-seconds of any age. So the start of its window is -inf.
    assert windows(DAILY, NOON) == (-math.inf, NOON + DAY / 4)
    lab = PoolSettings(groups=DAILY.groups)
    assert windows(lab, NOON) == (NOON - 3 * DAY / 4, NOON + DAY / 4)
    assert windows(RULES, NOON) is None


def test_the_ledger_divides_whole_seconds():
    assert limits_of(DAILY) == {
        "user": {"*": {"gpu-seconds": 60}, "ada": {"gpu-seconds": 90, "refill": 90}},
        "group": {"lab": {"gpu-seconds": 601}},
    }


def test_a_machine_uses_only_the_part_of_a_budget_lent_to_it():
    found = shared(bob=20, lab=601)
    bob, lab = found.quota_of("bob").daily, found.groups["lab"].daily
    assert (bob.most, bob.more_elsewhere, bob.is_shared) == (20, True, True)
    assert (lab.most, lab.more_elsewhere) == (600.5, False)
    ada = found.quota_of("ada").daily
    assert (ada.most, ada.refill, ada.more_elsewhere) == (30, 45, True)
    eve = found.quota_of("eve").daily
    assert (eve.most, eve.more_elsewhere) == (0, True)


def test_a_budget_that_is_used_up_has_no_part_elsewhere():
    bob = shared({BOB}, bob=20).quota_of("bob").daily
    assert (bob.most, bob.more_elsewhere) == (20, False)


def test_used_seconds_are_reported_rounded_up():
    usage = PoolUsage(
        {"bob": Usage(today=5.2), "ada": Usage(today=9)}, {"lab": Usage(today=7.0005)}
    )
    found = seconds_used(DAILY, usage, NOON)
    assert found == {BOB: 6, LAB: 7, ADA: 9}
    assert refills_of(DAILY, found) == {REFILL: 90}


# --------------------------------------------------------------------------- guarantees

SIZED = PoolSettings(
    groups={
        "lab": Group(guarantee=Portion(bytes=8)),
        "bio": Group("lab", guarantee=Portion(percent=50.0)),
    },
)


def test_guarantee_in_bytes_is_shared_but_a_percentage_is_not():
    key = Key("group", "lab", "guarantee")
    assert limits_of(SIZED)["group"] == {"lab": {"guarantee": 8}}
    assert guarantees_of(SIZED, Owner("ada", "bio")) == [key]
    assert guarantees_of(SIZED, Owner("ada")) == []
    found = overlay(SIZED, [], {key: 3}.__getitem__, connected=True, drains=False)
    tree = Tree(found.groups, [10, 10])
    # The guarantee of bio is a percentage of this machine's memory, so the ledger does not lend it.
    assert tree.guarantees == {"lab": 3, "bio": 10}
    assert Tree(SIZED.groups, [10, 10]).guarantees == {"lab": 8, "bio": 10}
